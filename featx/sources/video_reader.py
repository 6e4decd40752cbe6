"""Pool of processes (video_process.py) that decode frames of videos and may crash or hang."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
import time
import weakref
from typing import Any

from featx.base import CRASHES, module_command, module_environment, num_cpus
from featx.errors import MissingExtraError, RunError
from featx.types import ImageFault, Status

_MOST = 4
"""Maximum number of processes; each takes a few hundred MiB of memory."""

_TRIES = 2
"""Attempts per request. A process may have died because of an earlier video, so a failed request is
repeated once in a new process."""


class FrameReader:
    """Durations and frames of videos, decoded in parallel; a video always uses the same process."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._children = [_Child() for _ in range(min(_MOST, num_cpus()))]
        weakref.finalize(self, _end, self._children)

    def duration_s(self, path: str) -> float:
        """Return the duration of a video in seconds. Raises as `frame` does."""
        header, _ = self._ask(path, {"path": path})
        return float(header["duration_s"])

    def frame(self, path: str, time_s: float, max_pixels: int) -> bytes:
        """Return the frame that is displayed at a time, as PPM."""
        request = {"path": path, "time_s": time_s, "max_pixels": max_pixels}
        return self._ask(path, request)[1]

    def _ask(self, path: str, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Send a request to the process of a video and return the answer; raises as `frame`
        does."""
        # One process per video, where the video stays open between requests.
        child = self._children[hash(path) % len(self._children)]
        with child.lock:
            for tries_left in reversed(range(_TRIES)):
                try:
                    header, frame = child.ask(request, self._timeout_s)
                    break
                except ImageFault:
                    child.end()
                    if not tries_left:
                        raise
                except BaseException:  # a late answer would be taken for the next one
                    child.end()
                    raise
        if "status" in header:
            raise ImageFault(Status(header["status"]), header["message"], header["error"])
        if "errno" in header:
            raise OSError(header["errno"], header["strerror"], path)
        return header, frame


class _Child:
    """One process, which is started by the first request.

    Attributes:
        lock: held by the thread that talks to the process.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = bytearray()

    def ask(self, request: dict[str, Any], limit_s: float | None) -> tuple[dict[str, Any], bytes]:
        """Send a request and wait for the answer; after an exception, the caller must call `end`.

        Returns the JSON object and the bytes behind it.
        """
        process = self._process or self._start()
        assert process.stdin is not None
        until = None if limit_s is None else time.monotonic() + limit_s
        # If the process has ended, reading its answer reports that.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request).encode() + b"\n")
        found = json.loads(self._line(process, until))
        return found, self._take(process, found["bytes"], until)

    def end(self) -> None:
        """Kill the process if it runs; the next request starts a new one."""
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
        """Start the process and wait until torchcodec is imported."""
        # FFmpeg logs a line per frame to stderr.
        self._process = subprocess.Popen(
            module_command("featx.sources.video_process"),
            env=module_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        header = json.loads(self._line(self._process, None))  # imports have no time limit
        if "lacks" in header:
            self.end()
            raise MissingExtraError(
                'data=video needs torchcodec, pip install "featx[video]", and FFmpeg\'s shared '
                f"libraries (4 to 9), such as apt install ffmpeg: {header['lacks']}"
            )
        return self._process

    def _line(self, process: subprocess.Popen[bytes], until: float | None) -> bytes:
        """Return the next line of the answer without its end."""
        while b"\n" not in self._pending:
            self._more(process, until)
        line, _, rest = bytes(self._pending).partition(b"\n")
        self._pending = bytearray(rest)
        return line

    def _take(self, process: subprocess.Popen[bytes], size: int, until: float | None) -> bytes:
        """Return the next `size` bytes of the answer."""
        while len(self._pending) < size:
            self._more(process, until)
        taken = bytes(self._pending[:size])
        del self._pending[:size]
        return taken

    def _more(self, process: subprocess.Popen[bytes], until: float | None) -> None:
        """Wait for more bytes of an answer and add them to the buffer."""
        assert process.stdout is not None
        wait_s = None if until is None else max(0.0, until - time.monotonic())
        if not select.select([process.stdout], [], [], wait_s)[0]:
            message = "decoding takes longer than data.timeout_s, also in a subprocess"
            raise ImageFault(Status.TIMEOUT, message, "TimeoutError")
        piece = os.read(process.stdout.fileno(), 1 << 20)
        if piece:
            self._pending += piece
            return
        code = process.wait()
        if -code in CRASHES:
            name = signal.Signals(-code).name
            message = f"decoding it ends the process with {name}, also in a subprocess"
            raise ImageFault(Status.CRASHES_DECODER, message, name)
        if code == -signal.SIGKILL:  # as the kernel does when memory is exhausted
            raise MemoryError("the process that decodes videos was killed")
        raise RunError(f"the process that decodes videos ended with exit code {code}.")


def _end(children: list[_Child]) -> None:
    """Kill all processes, when the reader is garbage-collected or at exit."""
    for child in children:
        child.end()
