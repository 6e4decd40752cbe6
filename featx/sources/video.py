"""Source data=video: frames of videos, one every data.every_s seconds.

A key is the path of the video and the time of the frame in seconds: 'talks/clip.mp4@00012.000'.
Videos are opened in processes (video_process.py), which may crash or hang.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import signal
import subprocess
import threading
import weakref
from multiprocessing import Pipe
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Lt

from featx.base import CRASHES, module_command, module_environment, num_cpus, require_extra
from featx.config import options
from featx.errors import DataError, MissingExtraError, RunError
from featx.sources.base import FolderSource, endings, state_of
from featx.sources.registry import SOURCES, FileOptions, source_member
from featx.sources.row_keys import frame_key
from featx.types import ImageFault, Listing, Source, Status

EXTENSIONS = frozenset(b".mp4 .m4v .mov .mkv .webm .avi .mpg .mpeg".split())
"""File name extensions that count as videos, compared without regard to case. The content is
checked only when a video is opened."""

_MOST = 4
"""Maximum number of processes; each takes a few hundred MiB of memory."""

_TRIES = 2
"""Attempts per request. A process may have died because of an earlier video, so a failed request is
repeated once in a new process."""


@options("data")
class VideoOptions(FileOptions):
    """Options of data=video."""

    root_help: ClassVar[str] = "data.root=DIR, the folder of your videos, or one of them"

    name: str = "video"
    every_s: Annotated[float, Ge(0.001), Lt(math.inf)] = 1.0
    """Seconds from one frame of a video to the next."""


def open_source(config: VideoOptions) -> Source:
    """Open the videos below the folder data.root, or the single video data.root.

    Raises MissingExtraError if torchcodec is not installed.
    """
    require_extra("torchcodec", "data=video", "torchcodec", "video")
    return VideoSource(config)


class VideoSource:
    """Frames of videos in bytewise order of their keys: grouped by video and sorted by time.

    A video that cannot be opened has a single row, at time 0, which fails and records the reason.
    """

    def __init__(self, config: VideoOptions) -> None:
        root = config.path
        self._file = root if root.is_file() else None
        extensions = endings(config.extensions, EXTENSIONS)
        self._folder = FolderSource(
            root.parent if self._file else root, config.follow_links, extensions, what="videos"
        )
        self._every_s = config.every_s
        self._max_pixels = config.max_pixels
        self._frames = FrameReader(config.timeout_s)
        self._states: dict[bytes, tuple[int, int]] = {}

    def listing(self) -> Listing:
        """Open every video to find its duration, and list its frames.

        The content tag of a frame is the size of its video.
        """
        if self._file is None:
            videos = self._folder.listing()
        else:
            name = os.fsencode(self._file.name)
            videos = Listing(np.array([name]), np.array([-1], dtype=np.int64))
        keys: list[bytes] = []
        labels, content_tags = [], []
        for video, label in zip(videos.keys.tolist(), videos.labels.tolist(), strict=True):
            count = self._count(video)
            keys += [frame_key(video, k * self._every_s) for k in range(count)]
            labels.append(np.full(count, label, dtype=np.int64))
            content_tags.append(np.full(count, self._states.get(video, (0, 0))[0], dtype=np.int64))
        listed = np.array(keys, dtype=np.bytes_)
        order = np.argsort(listed, kind="stable")
        return Listing(
            listed[order],
            np.concatenate(labels)[order],
            videos.classes,
            videos.skipped,
            np.concatenate(content_tags)[order],
        )

    def read(self, key: bytes) -> bytes:
        """Decode one frame and return it as PPM."""
        video, _, time_of_key = key.rpartition(b"@")
        path = self._path(video)
        try:
            state = state_of(os.stat(path))[:2]  # noqa: PTH116 - unusual bytes
        except FileNotFoundError as error:
            self._folder.check_root()
            raise ImageFault(Status.MISSING, "no such file", "FileNotFoundError") from error
        if self._states.get(video, state) != state:
            raise OSError(errno.ESTALE, "the video was changed while it was in use", path)
        # A key is cut off at milliseconds, and the frame before may last until its time. A
        # microsecond is more than rounding errors, and less than any frame lasts.
        steps = math.ceil(float(time_of_key) / self._every_s - 1e-6)
        time_s = steps * self._every_s + 1e-6
        request = {"path": path, "time_s": time_s, "max_pixels": self._max_pixels}
        return self._frames.ask(request)[1]

    def states(self, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.void]:
        """Return the state of the video of each frame."""
        videos, which = np.unique([key.rpartition(b"@")[0] for key in keys], return_inverse=True)
        states: npt.NDArray[np.void] = self._folder.states(videos)[which]
        return states

    def _count(self, video: bytes) -> int:
        """Return the number of frames of a video; 1 if it cannot be opened."""
        path = self._path(video)
        try:
            self._states[video] = state_of(os.stat(path))[:2]  # noqa: PTH116 - unusual bytes
            lasts_s = float(self._frames.ask({"path": path})[0]["duration_s"])
            if lasts_s / self._every_s > (size := self._states[video][0]):
                raise DataError(
                    f"{path} claims to last {lasts_s:g} s, more frames than its {size} bytes can "
                    "hold. Leave it out, or choose a larger data.every_s."
                )
            # The small subtraction keeps rounding errors from adding a frame at the very end.
            return max(1, math.ceil(lasts_s / self._every_s - 1e-6))
        except (ImageFault, FileNotFoundError):  # of a dangling link
            return 1
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.") from error

    def _path(self, video: bytes) -> str:
        return os.path.abspath(os.path.join(self._folder.root, os.fsdecode(video)))  # noqa: PTH100 - unusual bytes


class FrameReader:
    """Durations and frames of videos, decoded in parallel; a video always uses the same process."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._children = [_Child() for _ in range(min(_MOST, num_cpus()))]
        weakref.finalize(self, _end, self._children)

    def ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Send a request to the process of a video, and return its answer.

        With a `time_s` the answer is the frame that is displayed so many seconds after the first
        one, as PPM, otherwise the `duration_s` of the video.
        """
        # One process per video, where the video stays open between requests.
        child = self._children[hash(request["path"]) % len(self._children)]
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
            raise OSError(header["errno"], header["strerror"], request["path"])
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

    def _receive(self) -> tuple[dict[str, object], bytes]:
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


SOURCES.register(
    source_member(
        "video",
        "Frames of videos at regular times.",
        VideoOptions,
        open_source,
        extra="video",
    )
)
