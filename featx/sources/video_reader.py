"""Pool of processes (video_process.py) that decode frames of videos and may crash or hang."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
import weakref
from multiprocessing import Pipe
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
    """One process, which is started by the first request."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any], limit_s: float | None) -> tuple[dict[str, Any], bytes]:
        """Send a request, wait for the answer, and return its JSON object and the bytes behind it.

        After an exception, the caller must call `end`.
        """
        if self._process is None:
            self._start()
        with contextlib.suppress(BrokenPipeError):  # reading the answer reports that it has ended
            self._requests.send_bytes(json.dumps(request).encode())
        if not self._answers.poll(limit_s):
            message = "decoding takes longer than data.timeout_s, also in a subprocess"
            raise ImageFault(Status.TIMEOUT, message, "TimeoutError")
        return self._receive()

    def end(self) -> None:
        """Kill the process if it runs; the next request starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._requests.close()
            self._answers.close()

    def _start(self) -> None:
        """Start the process and wait until torchcodec is imported."""
        theirs, self._requests = Pipe(duplex=False)
        self._answers, answers = Pipe(duplex=False)
        with theirs, answers:
            # FFmpeg logs a line per frame to stderr.
            self._process = subprocess.Popen(
                module_command("featx.sources.video_process"),
                env=module_environment(),
                stdin=theirs.fileno(),
                stdout=answers.fileno(),
                stderr=subprocess.DEVNULL,
            )
        header, _ = self._receive()  # imports have no time limit
        if "lacks" in header:
            self.end()
            raise MissingExtraError(
                'data=video needs torchcodec, pip install "featx[video]", and FFmpeg\'s shared '
                f"libraries (4 to 9), such as apt install ffmpeg: {header['lacks']}"
            )

    def _receive(self) -> tuple[dict[str, Any], bytes]:
        """Return the JSON object of an answer and the bytes behind it, or raise why none comes."""
        try:
            header, _, frame = self._answers.recv_bytes().partition(b"\n")
            return json.loads(header), frame
        except (EOFError, OSError):
            assert self._process is not None
            code = self._process.wait()
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
