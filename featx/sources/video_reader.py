"""Frames of videos from processes that may crash or hang (video_process.py)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from featx.base.machine import num_cpus
from featx.base.supervisor import CRASHES
from featx.errors import MissingExtraError, RunError
from featx.types import ImageFault, Status

_MOST = 4
"""Processes; each takes a few hundred MB."""

_TRIES = 2
"""What a process died of may have been another video's doing: once more in a new one."""


class FrameReader:
    """Durations and frames of videos, several at once; a video always goes to the same process.

    Args:
        timeout_s: that an answer may take, None for any time.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._children = [_Child() for _ in range(min(_MOST, num_cpus()))]
        weakref.finalize(self, _end, self._children)

    def duration_s(self, path: str) -> float:
        """Seconds that a video lasts. Raises as `frame` does."""
        about, _ = self._ask(path, {"path": path})
        return float(about["duration_s"])

    def frame(self, path: str, time_s: float, max_pixels: int) -> bytes:
        """The frame that is shown at a time, as PPM.

        Raises:
            ImageFault: there is none, or decoding it ends or hangs its process.
            OSError: the file cannot be read now.
            MissingExtraError: torchcodec, or FFmpeg, is not installed.
            RunError: no such process can be started.
        """
        request = {"path": path, "time_s": time_s, "max_pixels": max_pixels}
        return self._ask(path, request)[1]

    def _ask(self, path: str, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        child = self._children[hash(path) % len(self._children)]
        with child.lock:
            for left in reversed(range(_TRIES)):
                try:
                    found, frame = child.ask(request, self._timeout_s)
                    break
                except ImageFault:
                    child.end()
                    if not left:
                        raise
                except BaseException:  # what it would still answer is nobody's
                    child.end()
                    raise
        if "status" in found:
            raise ImageFault(Status(found["status"]), found["message"], found["error"])
        if "errno" in found:
            raise OSError(found["errno"], found["strerror"], path)
        return found, frame


class _Child:
    """One process, started with the first request."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = bytearray()

    def ask(self, request: dict[str, Any], limit_s: float | None) -> tuple[dict[str, Any], bytes]:
        """What the process answers; it has to be ended where that raises."""
        process = self._process or self._start()
        assert process.stdin is not None
        until = None if limit_s is None else time.monotonic() + limit_s
        with contextlib.suppress(BrokenPipeError):  # told by the end of its answers
            process.stdin.write(json.dumps(request).encode() + b"\n")
        found = json.loads(self._line(process, until))
        return found, self._take(process, found["bytes"], until)

    def end(self) -> None:
        """Kill the process, if there is one; the next request starts another."""
        process, self._process = self._process, None
        self._pending.clear()
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        home = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
        # -P keeps the user's folder off the child's path: a types.py there would be imported.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "featx.sources.video_process"],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # FFmpeg's remarks on each frame
            bufsize=0,
        )
        about = json.loads(self._line(self._process, None))  # the limit is not that of imports
        if "lacks" in about:
            self.end()
            raise MissingExtraError(
                'data=video needs torchcodec, pip install "featx[video]", and FFmpeg\'s shared '
                f"libraries (4 to 9), such as apt install ffmpeg: {about['lacks']}"
            )
        return self._process

    def _line(self, process: subprocess.Popen[bytes], until: float | None) -> bytes:
        while b"\n" not in self._pending:
            self._more(process, until)
        line, _, rest = bytes(self._pending).partition(b"\n")
        self._pending = bytearray(rest)
        return line

    def _take(self, process: subprocess.Popen[bytes], size: int, until: float | None) -> bytes:
        while len(self._pending) < size:
            self._more(process, until)
        taken = bytes(self._pending[:size])
        del self._pending[:size]
        return taken

    def _more(self, process: subprocess.Popen[bytes], until: float | None) -> None:
        """Wait for more of an answer.

        Raises:
            ImageFault: it takes too long, or the process was ended by what it decodes.
        """
        assert process.stdout is not None
        wait_s = None if until is None else max(0.0, until - time.monotonic())
        if not select.select([process.stdout], [], [], wait_s)[0]:
            message = "decoding takes longer than data.timeout_s, also by itself"
            raise ImageFault(Status.TIMEOUT, message, "TimeoutError")
        piece = os.read(process.stdout.fileno(), 1 << 20)
        if piece:
            self._pending += piece
            return
        code = process.wait()
        if -code in CRASHES:
            name = signal.Signals(-code).name
            message = f"decoding it ends the process with {name}, also by itself"
            raise ImageFault(Status.CRASHES_DECODER, message, name)
        self.end()
        if code == -signal.SIGKILL:
            raise MemoryError("the process that decodes videos was killed")
        raise RunError(f"the process that decodes videos ended with exit code {code}.")


def _end(children: list[_Child]) -> None:
    for child in children:
        child.end()
