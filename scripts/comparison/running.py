"""Runs the commands of a case with the featx of a checkout."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from comparison.cases import Case, Step
from comparison.programs.small_models import num_files

PROGRAMS = Path(__file__).resolve().parent / "programs"
TIME_LIMIT_S = 600.0


def environment(checkout: Path, cache: Path) -> dict[str, str]:
    """Return the environment of a command, with a folder for caches that no other checkout has."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("FEATX_")},
        "PYTHONPATH": os.pathsep.join([str(checkout), str(PROGRAMS)]),
        "PYTHON": sys.executable,
        "XDG_CACHE_HOME": str(cache),
        "HF_HUB_OFFLINE": "1",
    }


def check_import(checkout: Path) -> None:
    """Raise SystemExit unless Python imports featx from a checkout."""
    done = subprocess.run(
        [sys.executable, "-c", "import featx; print(featx.__file__)"],
        cwd=PROGRAMS,
        env=environment(checkout, Path(os.devnull)),
        capture_output=True,
        text=True,
        check=False,
    )
    expected = checkout / "featx" / "__init__.py"
    if done.returncode or Path(done.stdout.strip()) != expected:
        raise SystemExit(
            f"{sys.executable} does not import {expected}, but printed:\n{done.stdout}{done.stderr}"
        )


def run_case(case: Case, checkout: Path, folder: Path, inputs: Path) -> list[str]:
    """Run the commands of a case one after the other in a new folder.

    Its path stands in messages and stores, so that both checkouts run in the same one. The output
    and the exit code of each command lie in `messages` there; a line is returned for each that has
    not the exit code of its step.
    """
    wrong = []
    messages = folder / "messages"
    messages.mkdir(parents=True)
    for number, step in enumerate(case.steps, 1):
        step = step if isinstance(step, Step) else Step(step)
        line = step.line.replace("DATA", str(inputs))
        if line.startswith("$ "):
            command = ["/bin/sh", "-c", line[2:]]
        else:
            command = [sys.executable, "-m", "featx", *shlex.split(line)]
        if step.kill:
            (folder / "hold").touch()
        place = messages / f"{number:02d}"
        place.with_suffix(".command").write_text(line)
        with place.with_suffix(".out").open("w") as out, place.with_suffix(".err").open("w") as err:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment(checkout, folder.with_name(f"{folder.name}-cache")),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            code = _end(process, step, folder)
        place.with_suffix(".code").write_text(str(code))
        if code != step.code:
            wrong.append(f"{place.name}: exit code {code}, expected {step.code}")
    return wrong


def _end(process: subprocess.Popen[bytes], step: Step, folder: Path) -> int | str:
    """Wait for the end of a command, which a signal may bring about; return its exit code."""
    deadline = time.monotonic() + TIME_LIMIT_S
    if step.kill:
        while num_files(folder / step.folder) < step.parts and process.poll() is None:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        time.sleep(1.0)  # the passes after the last part wait for the end of `hold` now
        if process.poll() is None:
            os.killpg(process.pid, step.kill)
        time.sleep(1.0)  # workers notice that the command has ended
        (folder / "hold").unlink()
    try:
        return process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"none after {TIME_LIMIT_S:.0f} s"
