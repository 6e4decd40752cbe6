"""The command's child: how it ends, the command ends; its crashes are counted; nothing outlives."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from featx.base import supervisor

starts = Path("starts")

def work():
    count = len(starts.read_text()) if starts.exists() else 0
    starts.write_text("x" * (count + 1))
    Path("child").write_text(str(os.getpid()))
    {work}
    return 0

def was_decoding(folder, pid):
    assert pid == int(Path("child").read_text())
    return {decoding}

sys.exit(supervisor.run_supervised(work, was_decoding))
"""

PATIENT = """
    def handler(signum, frame):
        if not supervisor.is_echo(signum):
            with open("signals", "a") as file: file.write(f"{signum} ")
    for signum in (signal.SIGINT, signal.SIGTERM): signal.signal(signum, handler)
    Path("ready").touch()
    until = time.monotonic() + 20
    while not Path("signals").exists() and time.monotonic() < until: time.sleep(0.01)
    time.sleep(0.3)
    return 128 + int(Path("signals").read_text().split()[0])"""


def program(work: str, decoding: str = "True") -> list[str]:
    return [sys.executable, "-c", PROGRAM.format(work=work, decoding=decoding)]


def run(folder: Path, work: str, decoding: str = "True") -> tuple[int, str, int]:
    """Exit code, stderr, and how often the work was started."""
    done = subprocess.run(
        program(work, decoding), cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    starts = folder / "starts"
    return done.returncode, done.stderr, len(starts.read_text()) if starts.exists() else 0


@contextlib.contextmanager
def running(folder: Path, work: str, **options: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        program(work), cwd=folder, text=True, stderr=subprocess.PIPE, **options
    )
    try:
        until = time.monotonic() + 30
        while not (folder / "ready").exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.wait()


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.parametrize("code", [0, 1, 2, 3, 130, 143])
def test_the_exit_code_is_the_works(tmp_path: Path, code: int) -> None:
    assert run(tmp_path, f"return {code}") == (code, "", 1)


def test_an_exit_and_an_exception_pass_through(tmp_path: Path) -> None:
    assert run(tmp_path, "sys.exit(7)")[0] == 7
    code, printed, _ = run(tmp_path, "1 / 0")
    assert code == 1
    assert "ZeroDivisionError" in printed


def test_a_crash_with_an_image_at_hand_is_tried_again(tmp_path: Path) -> None:
    code, printed, starts = run(tmp_path, "if count == 0: os.kill(os.getpid(), signal.SIGSEGV)")
    assert (code, starts) == (0, 2)
    assert (
        printed == "\nThe decoder of an image crashed the process (SIGSEGV); it is started again.\n"
    )


def test_it_starts_again_as_long_as_images_are_found(tmp_path: Path) -> None:
    work = "if count: supervisor.count_crash_listed()\n    if count < 9: os.abort()"
    assert run(tmp_path, work)[::2] == (0, 10)


def test_a_second_crash_without_a_guilty_image_is_the_end(tmp_path: Path) -> None:
    work = "if count == 1: supervisor.count_crash_listed()\n    os.abort()"
    code, printed, starts = run(tmp_path, work)
    assert (code, starts) == (1, 3)
    assert "The process crashed (SIGABRT) and is not started again" in printed


def test_a_crash_without_an_image_at_hand_is_the_end(tmp_path: Path) -> None:
    code, printed, starts = run(tmp_path, "os.abort()", decoding="False")
    assert (code, starts) == (1, 1)
    assert "no image is known to crash its decoder" in printed


def test_it_ends_after_many_crashes(tmp_path: Path) -> None:
    code, _, starts = run(tmp_path, "supervisor.count_crash_listed()\n    os.abort()")
    assert (code, starts) == (1, 101)


def test_where_it_notes_is_reported(tmp_path: Path) -> None:
    work = "supervisor.set_journal_folder(Path('a b') / 'ü')\n    if count == 0: os.abort()"
    place = str(tmp_path / "a b" / "ü")
    assert run(tmp_path, work, decoding=f"str(folder) == {place!r}")[::2] == (0, 2)


def test_a_child_that_is_killed_is_not_started_again(tmp_path: Path) -> None:
    code, printed, starts = run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert (code, starts) == (1, 1)
    assert "killed (SIGKILL)" in printed
    assert "memory" in printed


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("to_group", [False, True])
def test_a_signal_reaches_the_work_once(
    tmp_path: Path, signum: signal.Signals, to_group: bool
) -> None:
    """Ctrl-C, and what ends a job of a cluster, reaches parent and child; kill the parent only."""
    with running(tmp_path, PATIENT, start_new_session=True) as process:
        (os.killpg if to_group else os.kill)(process.pid, signum)
        _, printed = process.communicate(timeout=30)
    assert (process.returncode, printed) == (128 + signum, "")
    assert (tmp_path / "signals").read_text() == f"{int(signum)} "


INTERRUPTED = """
    import itertools
    def interrupt(frame, event, arg):
        nonlocal countdown
        if frame.f_code is not supervisor.is_echo.__code__: return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            countdown -= 1
            if countdown == 0: answers.append(supervisor.is_echo(signal.SIGTERM))
        return interrupt
    for instruction in itertools.count(1):
        supervisor._last_arrivals.clear()
        countdown, answers = instruction, []
        sys.settrace(interrupt)
        answers.append(supervisor.is_echo(signal.SIGTERM))
        sys.settrace(None)
        if len(answers) == 1: break
        if sorted(answers) != [False, True]: return instruction
    return 0 if instruction > 20 else 255"""


def test_a_signal_within_the_handler_of_the_first_is_an_echo(tmp_path: Path) -> None:
    """At whichever instruction of the check the second one comes, one of the two counts."""
    assert run(tmp_path, INTERRUPTED)[:2] == (0, "")


def test_killing_what_the_user_sees_leaves_nothing_running(tmp_path: Path) -> None:
    with running(tmp_path, PATIENT) as process:
        child = int((tmp_path / "child").read_text())
        assert is_alive(child)
        process.kill()
        process.communicate()
        until = time.monotonic() + 5
        while is_alive(child) and time.monotonic() < until:
            time.sleep(0.01)
    assert process.returncode == -signal.SIGKILL
    assert not is_alive(child)


def test_stdin_and_the_group_are_the_commands(tmp_path: Path) -> None:
    work = (
        "Path('group').write_text(f'{os.getppid()} {os.getpgrp()}')\n"
        "    Path('given').write_text(sys.stdin.read())"
    )
    done = subprocess.run(
        program(work), cwd=tmp_path, input="typed", text=True, start_new_session=True, check=True
    )
    assert done.returncode == 0
    assert (tmp_path / "given").read_text() == "typed"
    parent, group = (tmp_path / "group").read_text().split()
    assert parent == group


@pytest.mark.parametrize("how", ["debug", "threads"])
def test_where_there_can_be_no_child_the_work_is_done_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    lines = program("Path('parent').write_text(str(os.getppid()))")
    if how == "debug":
        monkeypatch.setenv("FEATX_DEBUG", "1")
    else:
        start = "import threading; threading.Thread(target=time.sleep, args=(0.5,)).start()\n"
        lines[-1] = lines[-1].replace("sys.exit(sup", start + "sys.exit(sup")
    subprocess.run(lines, cwd=tmp_path, check=True)
    assert int((tmp_path / "parent").read_text()) == os.getpid()


AT_WORK = """
import sys, time
import torch
from featx.base.thread_pool import ReplaceableThreadPool
from featx.base.supervisor import end_process

a = torch.rand(600, 600)
with ReplaceableThreadPool(2, {limit_s}, "busy", end_limit_s=0.05) as threads:
    for _ in range(2):
        threads.submit(lambda: [a @ a for _ in range(200)])
    time.sleep(0.2)
print("left", flush={flush})
{end}
"""


@pytest.mark.parametrize(
    ("end", "flush", "limit_s"),
    [
        pytest.param("end_process(3)", False, 0.1, id="the command"),
        pytest.param("sys.exit(3)", True, None, id="a script", marks=pytest.mark.slow),
    ],
)
def test_threads_at_work_do_not_abort_the_end_of_the_process(
    end: str, flush: bool, limit_s: float | None
) -> None:
    """A daemon thread inside torch, when the interpreter ends, is 'terminate called', SIGABRT."""
    text = AT_WORK.format(end=end, flush=flush, limit_s=limit_s)
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "left\n", "")


def test_a_result_that_cannot_be_written_is_no_success() -> None:
    text = "from featx.base.supervisor import end_process; print('x'); end_process(0)"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", text],
            env=buffered, stdout=full, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert b"cannot be written: No space left" in done.stderr
