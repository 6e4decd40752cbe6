"""Command `python -m featx`: composes the config, runs the job, turns errors into exit codes."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import itertools
import logging
import os
import re
import shlex
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from featx.base import (
    cpu_quota,
    discard_output,
    end_process,
    is_memory_exhausted,
    log_as_json,
    log_message,
    num_cpus,
    open_standard_streams,
    own_process,
    paused_collection,
    print_result,
    restart_in_utf8,
    shipped_folder,
    speed_up_imports,
    table,
)
from featx.base.version import __version__
from featx.errors import (
    EXIT_TOO_MANY_FAILURES,
    ConfigError,
    FeatxError,
    RunError,
    StorageError,
    StoreError,
    exit_text,
    first_line,
)

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

    from omegaconf import DictConfig

    from featx.cli import CommandLine
    from featx.types import Json

_OF_A_PATH = frozenset(
    {
        *(errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR),
        *(errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN),
    }
)
"""Error numbers of a path that the user has given, and of a disk that fails or is disconnected."""

_LIBRARIES = ("PIL", "h5py", "hydra", "numpy", "omegaconf", "timm", "torch", "torchvision")
"""Packages that a file NAME.py in the current folder would hide."""

_NO_TEMPORARY = "No usable temporary directory|torchinductor_"
"""Pattern of errors of the module tempfile, and of the folder that torch makes while it is
imported."""

_REPEATS = itertools.count()
"""Number of times that a signal was sent again."""


def main() -> None:
    """Entry point of `featx` and of `python -m featx`; ends the process with its exit code."""
    restart_in_utf8()
    open_standard_streams()
    _handle_signals(partial(_exit, "\nstopped; nothing was written.\n"))
    code = 2 if _is_library_hidden() else run_command()
    _handle_signals(partial(_exit, ""))
    if _Task.was_sent:
        sys.exit(code)  # only the interpreter ends the process pool of a launcher
    end_process(code)


def _is_library_hidden() -> bool:
    """Return whether a file of the current folder is imported in place of a library; say so."""
    for name in _LIBRARIES:
        file = os.path.join(sys.path[0], f"{name}.py")  # python -m: the current folder
        if os.path.isfile(file):  # noqa: PTH113 - pathlib takes longer to import
            log_message(
                f"{file} is imported in place of the library {name}. Rename it, or give the "
                "command in another folder."
            )
            return True
    return False


def run_command() -> int:
    """Run what sys.argv asks for and return the exit code."""
    with contextlib.ExitStack() as until_job:
        until_job.enter_context(paused_collection())
        return _run_command(until_job)


def _run_command(until_job: contextlib.ExitStack) -> int:
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from featx.cli import checked_hydra, explain_error, read_command_line, register_with_hydra
    from featx.jobs import JOBS

    debug = os.environ.get("FEATX_DEBUG") == "1"
    _prepare_process()
    runs: list[tuple[str, int, str]] = []
    typed = sys.argv
    try:
        line = read_command_line(typed[1:], JOBS)
        if _printed_information(line):
            return 0
        register_with_hydra(JOBS, line.config_dirs)
        sys.argv = [typed[0], *line.arguments]
        hydra_options = {"config_path": str(shipped_folder("conf")), "config_name": "config"}
        task = _Task(line, debug, until_job, runs)
        with checked_hydra():
            hydra.main(version_base="1.3", **hydra_options)(task)()
        has_glob = any("=glob(" in text for text in line.arguments)
        if has_glob and not runs and not _Task.was_sent:
            raise ConfigError("-m: these options make no run. A pattern glob(...) finds nothing.")
    except BrokenPipeError:
        discard_output()  # a reader may close the pipe before the end of the help (`-h | head`)
        return 0
    except (HydraException, OmegaConfBaseException, FeatxError) as error:
        if debug:
            raise
        log_message(str(error if isinstance(error, FeatxError) else explain_error(error)))
        return error.exit_code if isinstance(error, RunError) else 2
    except (OSError, RuntimeError) as error:
        if debug or (answer := _answer(error)) is None:
            raise
        return answer
    except ValueError as error:
        if debug or runs:
            raise
        log_message(str(error))  # Hydra refuses flags that do not go together
        return 2
    except KeyboardInterrupt as interrupt:
        return 128 + getattr(interrupt, "signum", signal.SIGINT)
    finally:
        sys.argv = typed
    if len(runs) > 1:
        log_message(_table_of_runs(runs))
    codes = {code for _, code, _ in runs}
    # A run that is done, with many failed images, must not hide one that failed.
    return max(codes - {0, EXIT_TOO_MANY_FAILURES} or codes, default=0)


def _prepare_process() -> None:
    """Make the settings of a process that runs jobs of the command and nothing else."""
    own_process()
    speed_up_imports()
    # Hydra prints errors and exits by itself unless it is told to raise them.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    if cpu_quota() is not None:  # torch, BLAS and faiss count the CPUs without the quota
        os.environ.setdefault("OMP_NUM_THREADS", str(num_cpus()))
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    # torch.compile warns of code that it makes, and of a CUDA toolkit on a machine without a GPU.
    warnings.filterwarnings("ignore", module=r"torch\._inductor")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


class _Task:
    """What Hydra calls with the config of each run.

    Launchers such as joblib send it to other processes, and only the exit codes of the runs come
    back.
    """

    was_sent = False
    """Whether a launcher has sent it to another process."""

    def __init__(
        self,
        line: CommandLine,
        debug: bool,
        until_job: contextlib.ExitStack,
        runs: list[tuple[str, int, str]],
    ) -> None:
        self._line, self._debug = line, debug
        self._until_job, self._runs = until_job, runs

    def __call__(self, node: DictConfig) -> None:
        self._until_job.close()
        label = _announce_run(self._line)
        self._runs.append((label, 1, ""))  # what it raises from now on is no error of the options
        self._runs[-1] = label, *_run_job(node, self._line, self._debug)

    def __reduce__(self) -> tuple[object, ...]:
        _Task.was_sent = True
        # By the name of the module: the other process does not run this file as __main__.
        itself = importlib.import_module("featx.__main__")
        return itself.task_of_launcher, (self._line, self._debug)


def task_of_launcher(line: CommandLine, debug: bool) -> Callable[[DictConfig], None]:
    """Prepare a process that a launcher of Hydra has started, and return what it calls."""
    _prepare_launched_process(tuple(line.config_dirs))
    return partial(_run_launched, line=line, debug=debug)


@functools.cache
def _prepare_launched_process(config_dirs: tuple[Path, ...]) -> object:
    """Prepare a process for the runs of one command; returns what must live as long."""
    from featx.cli import checked_hydra, register_with_hydra
    from featx.jobs import JOBS

    _prepare_process()
    register_with_hydra(JOBS, config_dirs)
    checks = checked_hydra()
    checks.__enter__()
    return checks  # Python would end the block with the last reference to it


def _run_launched(node: DictConfig, line: CommandLine, debug: bool) -> None:
    """Run one job; raise RunError with its exit code, for the command that waits for it."""
    label = _announce_run(line)
    code, _ = _run_job(node, line, debug)
    if code:
        error = RunError(f"the run {label} ended with exit code {code}; its output says why.")
        error.exit_code = code
        raise error


def _announce_run(line: CommandLine) -> str:
    """Print which run of a multirun begins; returns its options, or '' for a single run."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from featx.cli import sweep_of

    hydra = HydraConfig.get()
    if hydra.mode is not RunMode.MULTIRUN:
        return ""
    count, keys = sweep_of(line, getattr(hydra.sweeper, "params", None))
    own = [text for text in hydra.overrides.task if text.partition("=")[0].lstrip("+") in keys]
    label = re.sub(r'\\(?=")|(?<!\\)"', "", " ".join(own))  # quotes of Hydra, not those inside
    log_message(f"\n[{hydra.job.num + 1} of {count}] {label}")
    return label


def _table_of_runs(runs: Sequence[tuple[str, int, str]]) -> str:
    """Return a table of the runs of a multirun: options, exit code, and what their stores say."""
    from featx.storage import parse_path
    from featx.store import layout, read_result

    cells = []
    for label, code, out in runs:
        summary: Json = {}
        with contextlib.suppress(OSError, StoreError):
            if code in (0, 3):
                summary = read_result(parse_path(out) / layout.SUMMARY)
        rate = summary.get("images_per_second")
        figures = (str(summary.get("rows", "")), str(summary.get("failures", "")))
        cells.append((label, str(code), *figures, f"{rate:.1f}" if rate else "", out))
    header = ("run", "exit code", "rows", "failed", "images/s", "store")
    return "\n" + table(header, cells, left=1)


def _printed_information(line: CommandLine) -> bool:
    """Print the version or the help if the command line asks for it; returns whether it does."""
    from featx.cli import help_text, job_help_text, options_help_text
    from featx.config import known_keys
    from featx.jobs import JOBS

    if wants_version := "--version" in line.arguments:
        print_result(f"featx {__version__}")
    elif line.wants_help:
        names = [line.job] if line.job is not None and line.job in JOBS else []
        if not names and not line.help_topics:
            print_result(help_text(JOBS))
        # A group has the name of its job: --help probe describes the group, job=probe the job.
        names += [topic for topic in line.help_topics if topic not in known_keys()]
        for job in [JOBS.get(name) for name in names if name in JOBS]:
            print_result(job_help_text(job, job.may_read))
        for topic in line.help_topics:
            if topic in known_keys() or topic not in JOBS:
                print_result(options_help_text(topic, [job.name for job in JOBS]))
    return wants_version or line.wants_help


def _run_job(node: DictConfig, line: CommandLine, debug: bool) -> tuple[int, str]:
    """Run one job; in a multirun, an error does not end the others.

    Returns exit code, and `store` or `out`, which is '' if the config cannot be read.
    """
    from omegaconf.errors import OmegaConfBaseException

    from featx import jobs
    from featx.cli import explain_error
    from featx.config import from_composed, given_by_value, saved_yaml

    out = ""
    try:
        checked = from_composed(node)
        out = checked.out if checked.store is None else checked.store
        jobs.check(checked, line.given)
        if checked.log.json:
            log_as_json()
        file_options = given_by_value(checked) - line.given if line.has_files else ()
        if unused := jobs.unread(checked, file_options):
            log_message(
                f"job={checked.job.name} does not use {', '.join(unused)} of the config file"
            )
        config_yaml = saved_yaml(node)
        makes_store = jobs.JOBS.get(checked.job.name).makes_store and checked.job.name != "plan"
        resumes = "; the same command resumes after the last complete part" if makes_store else ""
        _handle_signals(partial(_stop, f"stopped{resumes}."))
        try:
            return jobs.run(checked, config_yaml), out
        except KeyboardInterrupt:
            from featx.pipeline import kept_text

            log_message(f"\n{kept_text(checked.out) if makes_store else 'stopped.'}")
            raise
    except OmegaConfBaseException as error:
        if debug:
            raise
        log_message(str(explain_error(error)), "error")
        return 2, out
    except FeatxError as error:
        if debug:
            raise
        log_message(str(error), "error")
        if isinstance(error, StorageError):
            log_message(resume_command(line.typed))
        return error.exit_code, out
    except (OSError, MemoryError, RuntimeError, ImportError) as error:
        if debug or (answer := _answer(error)) is None:
            raise
        return answer, out
    except SystemExit as error:  # it ends a process without a word
        log_message(f"the run has failed: {exit_text(error)}", "error")
        return 1, out


def _answer(error: Exception) -> int | None:
    """Say what a path, a limit or a setting of the machine does not allow; return the exit code.

    Return None for other errors.
    """
    text, code = str(error), 2
    if limit := _exhausted(error):
        code = 1
        answer = (
            f"this process can get no more {limit}: {first_line(error)}. Raise the limit, end "
            "other processes, or ask for less at a time."
        )
    elif isinstance(error, OSError) and re.search(_NO_TEMPORARY, text):
        code = 1
        answer = (
            f"no temporary files can be written: {first_line(error)}. Free some space there, or "
            "write TMPDIR=DIR in front of the command to name another folder."
        )
    elif "determine home directory" in text:  # of the module pathlib
        answer = (
            "the home folder of this user, or of USER in a path ~USER, is not known. Write the "
            "path in full, or HOME=DIR in front of the command."
        )
    elif isinstance(error, OSError) and error.filename and error.errno in _OF_A_PATH:
        answer = f"{error.filename} cannot be opened: {error.strerror}."
    elif isinstance(error, FileNotFoundError) and _is_current_folder_gone():
        answer = "the current folder has been deleted. Change to another one with cd."
    else:
        return None
    log_message(answer, "error")
    return code


def _is_current_folder_gone() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - the system call
    except FileNotFoundError:
        return True
    return False


def _exhausted(error: Exception) -> str | None:
    """Return what the machine or a limit of the process is out of, or None for other errors."""
    text, number = str(error), getattr(error, "errno", None)
    if is_memory_exhausted(error):
        return "memory (ulimit -v)"
    if number in (errno.EMFILE, errno.ENFILE):
        return "open files (ulimit -n)"
    if number == errno.EFBIG:
        return "bytes in one file (ulimit -f)"
    # That of a fork; a pipe that does not take a message now, or a server, gives EAGAIN as well.
    is_fork = number == errno.EAGAIN and text.endswith(os.strerror(errno.EAGAIN))
    if is_fork or "can't start new thread" in text:
        return "processes or threads (ulimit -u)"
    return None


def resume_command(arguments: Sequence[str]) -> str:
    """Return the command that resumes a failed run."""
    arguments_kept = [
        text for text in arguments if text.partition("=")[0].lstrip("+") != "overwrite"
    ]
    return shlex.join(["python", "-m", "featx", *arguments_kept])


def _handle_signals(handler: Callable[[int, FrameType | None], object]) -> None:
    """Handle the signals that end a command; one that is ignored, as SIGHUP under nohup, stays
    ignored.
    """
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, handler)


def _exit(text: str, signum: int, frame: object) -> None:
    """Exit at once with a text; the handler of signals before a job begins and after it."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    os._exit(128 + signum)


def _stop(text: str, signum: int, frame: FrameType | None) -> None:
    """End the job by an exception; while a module is imported, end the process with a text.

    There an exception may arrive as one of another type, and torch aborts on one while it loads.
    Python drops an exception that a finalizer or the callback of a weak reference raises, as for
    each of a million objects of h5py: the signal then comes again. One that runs for a second is
    ended as well, as it may wait for ever.
    """
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_filename == weakref.__file__:
            threading.Timer(0.01, os.kill, (os.getpid(), signum)).start()
            if next(_REPEATS) % 100 < 99:
                return
            break
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _exit(f"\n{text}\n", signum, frame)
        frame = frame.f_back
    from featx.storage import s3_outage

    s3_outage.stop_waiting()
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    from featx.pipeline import Interrupted

    raise Interrupted(signum)


if __name__ == "__main__":
    main()
