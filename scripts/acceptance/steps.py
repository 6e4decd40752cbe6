"""Steps with time limits in processes of their own, and the files that they leave."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "gpu_acceptance"

DRY_IMAGES = 64
"""Number of images of a dry run."""


@dataclass(frozen=True)
class Settings:
    """Where and how a step runs.

    Attributes:
        out: folder of the results; `work` below it holds images and stores.
        dry_run: whether it runs on the CPU, with few images and tiny models.
    """

    out: Path
    dry_run: bool

    @property
    def device(self) -> str:
        """Value of the option `device`."""
        return "cpu" if self.dry_run else "cuda:0"

    @property
    def work(self) -> Path:
        """Folder for images and stores, which is left out of the results."""
        folder = Path(os.environ.get("FEATX_ACCEPTANCE_WORK", "/tmp/featx-acceptance"))
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@dataclass(frozen=True)
class Step:
    """One step of a command.

    Attributes:
        name: its name, without spaces.
        limit_s: seconds after which it is killed.
        run: takes the settings and returns figures as JSON types, with the entries `goals`
            (description -> whether it was reached) and `wrong` (what breaks a promise) if it has
            any.
    """

    name: str
    limit_s: float
    run: Callable[[Settings], Mapping[str, Any]]


def run_steps(command: str, steps: Sequence[Step], settings: Settings, minutes: float) -> bool:
    """Run the steps one after the other, within a limit for all of them.

    Args:
        command: name of the command.
        steps: its steps.
        settings: where and how they run.
        minutes: time limit of the command.

    Returns:
        Whether no step failed or found a wrong value.
    """
    settings.out.mkdir(parents=True, exist_ok=True)
    ends_at = time.monotonic() + 60 * minutes
    append(settings, {"command": command, "step": "machine", "figures": machine()})
    is_right = True
    for step in steps:
        left = ends_at - time.monotonic()
        limit_s = min(step.limit_s, left)
        started_at = time.monotonic()
        line = {"state": "not run", "error": "no time was left"} if left < 10 else {
            **_in_process(command, step, settings, limit_s)
        }  # fmt: skip
        line["seconds"] = round(time.monotonic() - started_at, 1)
        append(settings, {"command": command, "step": step.name, **line})
        wrong = line.get("figures", {}).get("wrong") or ()
        is_right = is_right and line["state"] == "done" and not wrong
        print(f"{step.name}: {line['state']} in {line['seconds']} s", *wrong, flush=True)
        if "error" in line:
            print(line["error"], flush=True)
        write_tables(settings)
    return is_right


def _in_process(command: str, step: Step, settings: Settings, limit_s: float) -> dict[str, Any]:
    """Run a step in a process group of its own, which is killed at its limit."""
    words = [sys.executable, str(SCRIPT), command, str(settings.out), "--step", step.name]
    log = settings.out / f"{step.name}.log"
    paths = [str(REPOSITORY), str(REPOSITORY / "scripts"), os.environ.get("PYTHONPATH", "")]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            words + (["--dry-run"] if settings.dry_run else []),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return {"state": "too long", "error": f"stopped after {limit_s:.0f} s"}
    result = settings.out / f"{step.name}.json"
    printed = log.read_text(errors="replace")
    if code or not result.exists():
        return {"state": "failed", "error": "\n".join(printed.splitlines()[-12:])}
    figures = json.loads(result.read_text())
    result.unlink()
    log.unlink()  # few files may be brought back; those of failed steps are kept
    return {"state": "done", "figures": figures}


def run_step(steps: Sequence[Step], name: str, settings: Settings) -> None:
    """Run one step in this process and write its figures to OUT/NAME.json."""
    step = next(step for step in steps if step.name == name)
    figures = step.run(settings)
    (settings.out / f"{name}.json").write_text(json.dumps(figures))


def append(settings: Settings, line: Mapping[str, Any]) -> None:
    """Add a line to gpu.jsonl, with the time."""
    with (settings.out / "gpu.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.strftime("%Y-%m-%d %H:%M:%S"), **line}) + "\n")


def machine() -> dict[str, Any]:
    """Describe the machine: GPU, clocks, power limit, CPUs, memory and versions."""
    query = "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.sm"
    return {
        "gpu": _output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"),
        "cpus": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "python": platform.python_version(),
        "commit": _output_of("git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"),
        **{name: _version(name) for name in ("torch", "torchvision", "timm", "pillow", "h5py")},
    }


def _output_of(*command: str) -> str:
    """Output of a command; '' if it does not exist or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def featx(
    settings: Settings, *options: str, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run the command in the folder of the work.

    Args:
        settings: where and how the step runs.
        options: its options, to which `device` is added.

    Raises:
        RuntimeError: it failed; the message has the end of what it printed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "featx", f"device={settings.device}", *options],
        cwd=settings.work,
        capture_output=True,
        text=True,
        check=False,
    )
    if check and done.returncode:
        raise RuntimeError(
            f"{' '.join(options)} ended with {done.returncode}\n{done.stderr[-1500:]}"
        )
    return done


def write_tables(settings: Settings) -> None:
    """Write gpu.md from gpu.jsonl: wrong values, missed goals, and the figures of each step."""
    lines = [json.loads(line) for line in (settings.out / "gpu.jsonl").read_text().splitlines()]
    parts = ["# Acceptance on a GPU", ""]
    if settings.dry_run:
        parts += ["A dry run on a CPU with tiny models: its figures say nothing about a GPU.", ""]
    machines = [line["figures"] for line in lines if line["step"] == "machine"]
    described = ", ".join(f"{key} {value}" for key, value in machines[-1].items() if value)
    parts += [f"{lines[-1]['time']}: {described}", ""]
    steps = [line for line in lines if line["step"] != "machine"]
    problems = [f"- {line['step']}: {text}" for line in steps for text in _problems(line)]
    parts += ["## Wrong or missed", "", *(problems or ["Nothing."]), ""]
    for line in steps:
        parts += [
            f"## {line['command']}: {line['step']} ({line['state']}, {line['seconds']} s)",
            "",
        ]
        parts += _table(line.get("figures", {}).get("rows", []))
    (settings.out / "gpu.md").write_text("\n".join(parts) + "\n")


def _problems(line: Mapping[str, Any]) -> list[str]:
    """Errors, wrong values and missed goals of a step."""
    figures = line.get("figures", {})
    goals = [f"missed: {text}" for text, reached in figures.get("goals", {}).items() if not reached]
    state = [] if line["state"] == "done" else [f"{line['state']}: {line.get('error', '')}"]
    return [*state, *(f"WRONG: {text}" for text in figures.get("wrong", ())), *goals]


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table in Markdown, with the keys of the rows as columns."""
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row))
    body = ["| " + " | ".join(_cell(row.get(name, "")) for name in names) + " |" for row in rows]
    return ["| " + " | ".join(names) + " |", "|" + "---|" * len(names), *body, ""]


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
