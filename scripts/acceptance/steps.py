"""Steps with time limits in processes of their own, and the lines that they leave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.measuring import REPOSITORY, CommandError, run_command

DRY_IMAGES = 64
"""Number of images of a dry run."""


@dataclass(frozen=True)
class Settings:
    """Folder of the results, and whether all runs on the CPU with few images and tiny models."""

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


def run_steps(command: str, steps: Mapping[str, float], settings: Settings, minutes: float) -> bool:
    """Run steps, name -> limit in seconds, and return whether none failed or found wrong values."""
    settings.out.mkdir(parents=True, exist_ok=True)
    ends_at = time.monotonic() + 60 * minutes
    append(settings, {"command": command, "step": "machine", "figures": machine()})
    is_right = True
    for step, limit_s in steps.items():
        started_at = time.monotonic()
        line: dict[str, Any] = {"state": "not run", "error": "no time was left"}
        if ends_at - started_at >= 10:
            line = _in_process(command, step, settings, min(limit_s, ends_at - started_at))
        line["seconds"] = round(time.monotonic() - started_at, 1)
        append(settings, {"command": command, "step": step, **line})
        figures = line.get("figures", {})
        print(f"{step}: {line['state']} in {line['seconds']} s", line.get("error", ""))
        for row in figures.get("rows", ()):
            print(f"  {row}")
        for goal in (goal for goal, reached in figures.get("goals", {}).items() if not reached):
            print(f"  missed: {goal}")
        for text in figures.get("wrong", ()):
            print(f"  WRONG: {text}")
        is_right = is_right and line["state"] == "done" and not figures.get("wrong")
    return is_right


def _in_process(command: str, step: str, settings: Settings, limit_s: float) -> dict[str, Any]:
    """Run a step in a process group of its own, which is killed at its limit."""
    script = REPOSITORY / "scripts" / "gpu_acceptance"
    words = [sys.executable, str(script), command, str(settings.out), "--step", step]
    words += ["--dry-run"] if settings.dry_run else []
    log, result = (settings.out / f"{step}.{suffix}" for suffix in ("log", "json"))
    with log.open("wb") as stream:
        limited = ["timeout", "--signal=KILL", str(limit_s), *words]
        code = subprocess.run(limited, stdout=stream, stderr=stream, check=False).returncode
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return {"state": "killed", "error": f"at its limit of {limit_s:.0f} s, or by the system"}
    if code:
        printed = log.read_text(errors="replace")
        return {"state": "failed", "error": "\n".join(printed.splitlines()[-12:])}
    figures = json.loads(result.read_text())
    result.unlink()
    log.unlink()  # few files may be brought back; those of failed steps are kept
    return {"state": "done", "figures": figures}


def append(settings: Settings, line: Mapping[str, Any]) -> None:
    """Add a line to gpu.jsonl, with the time."""
    with (settings.out / "gpu.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.strftime("%Y-%m-%d %H:%M:%S"), **line}) + "\n")


def machine() -> dict[str, Any]:
    """Describe the GPU, the CPUs and the version of torch."""
    query = "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.sm"
    gpu = ""
    with contextlib.suppress(OSError, CommandError):  # without a GPU
        gpu = run_command("nvidia-smi", query, "--format=csv,noheader")
    return {"gpu": gpu.strip(), "cpus": os.cpu_count(), "torch": version("torch")}


def featx(settings: Settings, *options: str) -> None:
    """Run the command in the folder of the work; raises RuntimeError with the end of its errors."""
    words = (sys.executable, "-m", "featx", f"device={settings.device}", *options)
    run_command(*words, cwd=settings.work)
