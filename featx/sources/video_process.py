"""A process that opens videos and decodes their frames: `python -m featx.sources.video_process`.

FFmpeg reads dozens of formats in C, and what it is given may come from strangers: it crashes and
hangs here, never in the run. A request is a line of JSON on stdin; the answer is a line of JSON on
stdout, with the frame behind it.
"""

from __future__ import annotations

import importlib
import json
import math
import signal
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from featx.sources.pixel_encoding import encode_pixels
from featx.types import ImageFault, Status

_KEPT = 4
"""Videos that are kept open."""

_BEHIND_THE_END_S = 0.5
"""A container may claim to be longer than its pictures, by its sound mostly: the last one stays."""

_BEGINNINGS = (
    (0, b"\x1aE\xdf\xa3"),  # Matroska, WebM
    (0, b"RIFF"),
    (0, b"\x00\x00\x01\xba"),  # MPEG
    (4, b"ftyp"),  # MP4, QuickTime
    (4, b"moov"),
    (4, b"mdat"),
    (4, b"wide"),
    (4, b"free"),
)
"""What the containers begin with that are opened; a playlist could lead FFmpeg to other files."""


class Videos:
    """Open videos, the last ones used kept.

    Args:
        decoder: torchcodec's VideoDecoder.
    """

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._open: OrderedDict[tuple[str, tuple[int, int]], Any] = OrderedDict()

    def duration_s(self, path: str) -> float:
        """Seconds that a video lasts, as its header says; where it does not, as its packets do.

        Raises:
            ImageFault: it cannot be opened.
        """
        _check_container(path)
        try:
            about = self._decoder(path, seek_mode="approximate").metadata
            found = about.duration_seconds_from_header
        except (RuntimeError, ValueError):
            found = None
        if found is None:
            found = self._opened(path).metadata.duration_seconds
        if not (math.isfinite(found) and found > 0):
            raise ImageFault(Status.DECODE_ERROR, f"the video claims to last {found} s")
        return float(found)

    def frame(self, path: str, time_s: float, max_pixels: int) -> bytes:
        """The frame that is shown at a time, as PPM, upright.

        Raises:
            ImageFault: there is none, or it is damaged or too large.
        """
        video = self._opened(path)
        about = video.metadata
        if about.width * about.height > max_pixels:
            raise ImageFault(Status.TOO_LARGE, f"{about.width} x {about.height} pixels")
        begin, end = about.begin_stream_seconds, about.end_stream_seconds
        if time_s >= end + _BEHIND_THE_END_S:
            raise ImageFault(Status.TRUNCATED, f"the video ends at {end:.3f} s")
        try:
            if time_s >= end:
                frame = video.get_frame_at(about.num_frames - 1)
            else:
                frame = video.get_frame_played_at(max(time_s, begin))
        except (RuntimeError, IndexError, ValueError) as error:
            raise _fault(error) from error
        return encode_pixels(frame.data.numpy())

    def _opened(self, path: str) -> Any:
        info = Path(path).stat()
        state = path, (info.st_size, info.st_mtime_ns)
        video = self._open.pop(state, None)
        if video is None:
            _check_container(path)
            try:
                # Exact: every packet's time is read, so a time is always the same frame.
                video = self._decoder(path, dimension_order="NHWC", seek_mode="exact")
            except (RuntimeError, ValueError) as error:
                raise _fault(error) from error
        self._open[state] = video
        if len(self._open) > _KEPT:
            self._open.popitem(last=False)
        return video


def _check_container(path: str) -> None:
    with open(path, "rb") as file:  # noqa: PTH123 - a path as the file system gives it
        head = file.read(16)
    if not head:
        raise ImageFault(Status.EMPTY, "the file has no bytes")
    if not any(head[at:].startswith(mark) for at, mark in _BEGINNINGS):
        raise ImageFault(Status.UNSUPPORTED, "no MP4, QuickTime, Matroska, WebM, AVI or MPEG video")


def _fault(error: Exception) -> ImageFault:
    text = " ".join(str(error).split())[-200:] or "it cannot be decoded"
    return ImageFault(Status.DECODE_ERROR, text, type(error).__name__)


def _answer(videos: Videos, request: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    try:
        if "time_s" not in request:
            return {"duration_s": videos.duration_s(request["path"])}, b""
        frame = videos.frame(request["path"], request["time_s"], request["max_pixels"])
    except ImageFault as fault:
        return {"status": fault.status, "message": str(fault), "error": fault.error}, b""
    except OSError as error:
        return {"errno": error.errno, "strerror": error.strerror}, b""
    return {}, frame


def _decoder() -> Any:
    """torchcodec's VideoDecoder.

    Raises:
        ImportError, RuntimeError, OSError: torchcodec, or FFmpeg, is not there.
    """
    decoder = importlib.import_module("torchcodec.decoders").VideoDecoder
    # Since 0.17 it can be imported without FFmpeg, and fails at each video.
    if getattr(sys.modules["torchcodec"], "ffmpeg_major_version", 0) is None:
        raise ImportError("torchcodec finds none of them")
    return decoder


def main() -> None:
    """Answer requests until stdin ends."""
    for signum in (signal.SIGINT, signal.SIGTERM):  # for the run, which ends its children
        signal.signal(signum, signal.SIG_IGN)
    answers = sys.stdout.buffer
    try:
        decoder = _decoder()
    except (ImportError, RuntimeError, OSError) as error:
        answers.write(json.dumps({"lacks": str(error).strip()[:300]}).encode() + b"\n")
        return
    answers.write(b"{}\n")
    answers.flush()
    videos = Videos(decoder)
    for line in sys.stdin.buffer:
        found, frame = _answer(videos, json.loads(line))
        answers.write(json.dumps({**found, "bytes": len(frame)}).encode() + b"\n" + frame)
        answers.flush()


if __name__ == "__main__":
    main()
