"""Process that opens videos and decodes frames: `python -m featx.sources.video_process`.

FFmpeg parses dozens of formats in C, and videos may come from untrusted origins, so its crashes and
hangs are confined to this process. A request on stdin is JSON; the answer on stdout is a line of
JSON and the bytes of the frame. No objects are pickled.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import re
import signal
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

from featx.base import LruCache
from featx.sources.pixel_encoding import encode_pixels
from featx.types import ImageFault, Status

_KEPT = 4
"""Maximum number of videos that are open at a time."""

_BEHIND_THE_END_S = 0.5
"""Seconds behind the last frame for which the last frame is returned. The duration in a container
often includes sound that is longer than the images."""

_DECODED_EARLIER = 16
"""Maximum number of frames that are stored before a frame and shown after it, in H.264 and HEVC."""

_MPEG, _AVI, _MATROSKA = b"\x00\x00\x01\xba", b"RIFF", b"\x1aE\xdf\xa3"

_DAMAGE = re.compile(
    rb"(error while decoding MB|Error at MB|Invalid NAL unit size|\S+ damaged at|illegal .c vlc|"
    rb"marker does not match f_code|concealing|corrupt)[^\n]*"
)
"""Messages of FFmpeg's decoders, of H.264 and MPEG-4 above all, for damaged frames and those that
depend on them, which it returns like others. Undamaged files cause other messages, such as 'mmco:
unref short failure' of H.264 with open groups of pictures; those of HEVC and VP9 cause none."""

_MATRIX = {b"mvhd": 36, b"tkhd": 40}
"""Boxes of an MP4 with a matrix by which frames are turned -> its first byte."""

_CONVERSION = "ffmpeg -i IN -c copy OUT.mp4"

_BEGINNINGS = (
    (0, _MATROSKA),  # and WebM
    (0, _AVI),
    (4, b"ftyp"),  # MP4, QuickTime
    (4, b"moov"),
    (4, b"mdat"),
    (4, b"wide"),
    (4, b"free"),
)
"""Offset and signature of the containers that are opened. Others are rejected, since a playlist
could make FFmpeg open other files."""


class _OpenVideo(NamedTuple):
    """A decoder, and the time from which its frames may be damaged, as the file ends early."""

    decoder: Any
    sound_until_s: float


class Videos:
    """Open videos, with a cache of the last ones.

    `messages` is a file of what FFmpeg prints, which is emptied before each frame.
    """

    def __init__(self, decoder: Any, messages: IO[bytes]) -> None:
        self._decoder, self._messages = decoder, messages
        self._open: LruCache[tuple[str, int, int], _OpenVideo | ImageFault] = LruCache(_KEPT)

    def duration_s(self, path: str) -> float:
        """Return the duration of a video in seconds, from its header, else from its packets."""
        _check_container(path)
        seconds = None
        with contextlib.suppress(RuntimeError, ValueError):
            seconds = _stated_duration_s(self._decoder(path, seek_mode="approximate").metadata)
        if seconds is None:
            seconds = self._open_video(path).decoder.metadata.duration_seconds
        if not (math.isfinite(seconds) and seconds > 0):
            raise ImageFault(Status.DECODE_ERROR, f"the video claims to last {seconds} s")
        return float(seconds)

    def frame(self, path: str, time_s: float, max_pixels: int) -> bytes:
        """Decode the frame that is displayed so many seconds after the first one.

        Returns the upright frame as PPM.
        """
        video, sound_until_s = self._open_video(path)
        metadata = video.metadata
        if metadata.width * metadata.height > max_pixels:
            raise ImageFault(Status.TOO_LARGE, f"{metadata.width} x {metadata.height} pixels")
        begin, end = metadata.begin_stream_seconds, metadata.end_stream_seconds
        time_s += begin  # which is not 0 in recordings, and where sound begins first
        if time_s >= end + _BEHIND_THE_END_S:
            raise ImageFault(Status.TRUNCATED, f"the video ends at {end - begin:.3f} s")
        self._messages.seek(0)
        self._messages.truncate()
        try:
            if time_s >= end:
                found = video.get_frames_at([metadata.num_frames - 1])
            else:
                # By the times at which frames begin. get_frame_played_at takes the next frame where
                # the stated duration of one ends before it, as in screen recordings.
                found = video.get_frames_played_at([time_s])
        except (RuntimeError, IndexError, ValueError) as error:
            self._close(path)  # its position in the file is unknown now
            raise _fault(error) from error
        self._messages.seek(0)
        if damage := _DAMAGE.search(self._messages.read()):
            # The next request decodes from a key frame again, so that it meets the damage too.
            self._close(path)
            raise ImageFault(
                Status.DECODE_ERROR, f"FFmpeg finds damage: {damage[0].decode(errors='replace')}"
            )
        if found.pts_seconds.item() >= sound_until_s:
            raise ImageFault(
                Status.TRUNCATED, "the file ends early, so that its last frames may be damaged"
            )
        # FFmpeg has missed the key frame. Frames of AVI may come late, as AVI has no times of
        # display, only the order of decoding.
        if found.pts_seconds.item() > time_s and _check_container(path) != _AVI:
            raise ImageFault(
                Status.DECODE_ERROR,
                f"FFmpeg finds only a later frame; {_CONVERSION} makes a video where it finds it",
            )
        return encode_pixels(found.data[0].numpy())

    def _open_video(self, path: str) -> _OpenVideo:
        """Return an open decoder for a file, identified by path, size and mtime."""
        info = Path(path).stat()
        state = path, info.st_size, info.st_mtime_ns
        video = self._open.get_or_make(state, lambda: self._scan(path))
        if isinstance(video, ImageFault):
            raise video.with_traceback(None)
        return video

    def _close(self, path: str) -> None:
        self._open.drop(lambda state: state[0] == path)

    def _scan(self, path: str) -> _OpenVideo | ImageFault:
        """Open a file, and read the time stamps of all its packets.

        A fault is returned, so that it is kept: it may take as long to find for each frame.
        """
        try:
            mark = _check_container(path)
            # seek_mode="exact" scans the time stamps, so a time always gives the same frame.
            decoder = self._decoder(path, dimension_order="NHWC", seek_mode="exact")
            _check_duration(decoder.metadata)
            sound_until_s = math.inf
            if mark not in (_AVI, _MATROSKA) and _ends_early(path):
                first = max(0, decoder.metadata.num_frames - 1 - _DECODED_EARLIER)
                sound_until_s = decoder.get_frames_at([first]).pts_seconds.item()
        except ImageFault as fault:
            return fault
        except (RuntimeError, ValueError) as error:
            return _fault(error)
        return _OpenVideo(decoder, sound_until_s)


def _stated_duration_s(metadata: Any) -> float | None:
    """Duration in the header; None if frames begin late, as some headers then state their end."""
    is_late = (metadata.begin_stream_seconds_from_header or 0) > _BEHIND_THE_END_S
    return None if is_late else metadata.duration_seconds_from_header


def _check_duration(metadata: Any) -> None:
    """Refuse a video with more frames than its header says, and so than it has rows."""
    stated_s, lasts_s = _stated_duration_s(metadata), metadata.duration_seconds
    if stated_s is not None and lasts_s > stated_s + _BEHIND_THE_END_S:
        raise ImageFault(
            Status.DECODE_ERROR,
            f"its frames last {lasts_s:.3f} s, and its header says {stated_s:.3f} s; {_CONVERSION} "
            "makes a video with the right header",
        )


def _boxes(file: BinaryIO) -> Iterator[tuple[bytes, int, int]]:
    """Kind, begin and end of the content of each box of an MP4; those in moov and trak follow."""
    position = 0
    file.seek(0)
    while len(head := file.read(16)) == 16:
        length, kind, long = struct.unpack(">I4sQ", head)
        begin = position + (16 if length == 1 else 8)
        length = long if length == 1 else length
        if length < 8:  # 0: the last one, as long as the file
            return
        yield kind, begin, position + length
        position = begin if kind in (b"moov", b"trak") else position + length
        file.seek(position)


def _ends_early(path: str) -> bool:
    """Return whether the frames of an MP4 reach beyond the end of the file."""
    size = Path(path).stat().st_size
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a path as the file system gives it
        return any(kind == b"mdat" and end > size for kind, _, end in _boxes(file))


def _is_mirrored(file: BinaryIO) -> bool:
    """Return whether an MP4 is shown with left and right, or top and bottom, exchanged."""
    for kind, begin, _ in _boxes(file):
        if kind == b"moof":  # one of thousands, which come behind moov
            return False
        if kind in _MATRIX:
            file.seek(begin)
            content = file.read(100)
            at = _MATRIX[kind] + 12 * (content[:1] == b"\1")  # numbers of 64 bits in version 1
            a, b, _, c, d = struct.unpack(">5i", content[at : at + 20].ljust(20, b"\0"))
            if a * d < b * c:
                return True
    return False


def _has_index(file: BinaryIO) -> bool:
    """Return whether an AVI is complete and has an index of its frames."""
    position, size, found = 0, os.fstat(file.fileno()).st_size, False
    file.seek(0)
    while len(head := file.read(12)) == 12:
        kind, length, form = struct.unpack("<4sI4s", head)
        if kind == b"RIFF" or (kind == b"LIST" and form in (b"hdrl", b"strl")):
            position += 12  # its chunks follow
        else:
            position += 8 + length + length % 2
            if position > size + 1:  # anything may follow behind the index, but no frames
                return found and kind != b"LIST"
            found |= kind in (b"idx1", b"indx")
        file.seek(position)
    return found


def _check_container(path: str) -> bytes:
    """Check the first bytes of a file, and return the signature."""
    with open(path, "rb") as file:  # noqa: PTH123 - a path as the file system gives it
        head = file.read(16)
        if not head:
            raise ImageFault(Status.EMPTY, "the file has no bytes")
        for at, mark in _BEGINNINGS:
            if head[at:].startswith(mark):
                _check_content(file, head)
                return mark
    if head.startswith(_MPEG):
        reason = f"FFmpeg finds other frames of MPEG; {_CONVERSION} makes an MP4 with the same ones"
    else:
        reason = "no MP4, QuickTime, Matroska, WebM or AVI video"
    raise ImageFault(Status.UNSUPPORTED, reason)


def _check_content(file: BinaryIO, head: bytes) -> None:
    """Refuse what torchcodec decodes to other frames than players show."""
    # Without an index FFmpeg takes every frame for a key frame, and decodes from any of them.
    if head[8:12] == b"AVI " and not _has_index(file):
        raise ImageFault(
            Status.TRUNCATED,
            "the AVI ends early or has no index; ffmpeg -fflags +discardcorrupt -i IN -c:v ffv1 "
            "OUT.mkv makes a video of its frames",
        )
    if not head.startswith((_AVI, _MATROSKA)) and _is_mirrored(file):
        raise ImageFault(
            Status.UNSUPPORTED,
            "its header mirrors the frames; ffmpeg -i IN -c:v ffv1 OUT.mkv makes a video of the "
            "frames as they are shown",
        )


def _fault(error: Exception) -> ImageFault:
    """Convert an exception of torchcodec to an ImageFault."""
    text = " ".join(str(error).split()).partition(" This should never happen")[0]
    text = text[-200:] or "it cannot be decoded"
    return ImageFault(Status.DECODE_ERROR, text, type(error).__name__)


def _answer(videos: Videos, request: Mapping[str, Any]) -> tuple[dict[str, object], bytes]:
    """Answer one request.

    Returns the JSON object, and the bytes of the frame or b''. Failures are part of the object.
    """
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
    decoder = importlib.import_module("torchcodec.decoders").VideoDecoder
    # torchcodec 0.17 and later can be imported without FFmpeg and then fail at each video.
    if getattr(sys.modules["torchcodec"], "ffmpeg_major_version", 0) is None:
        raise ImportError("torchcodec finds none of them")
    return decoder


def main() -> None:
    """Answer requests until stdin ends."""
    # Ctrl-C reaches the whole process group; the run decides when its children end.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    requests = Connection(os.dup(0), writable=False)
    answers = Connection(os.dup(1), readable=False)
    os.environ["TORCHCODEC_FFMPEG_LOG_LEVEL"] = "ERROR"  # usually QUIET
    try:
        decoder = _decoder()
    except (ImportError, RuntimeError, OSError) as error:
        answers.send_bytes(json.dumps({"lacks": str(error).strip()[:300]}).encode())
        return
    answers.send_bytes(b"{}")
    with tempfile.TemporaryFile(buffering=0) as messages:
        os.dup2(messages.fileno(), 2)
        videos = Videos(decoder, messages)
        while True:
            try:
                request = json.loads(requests.recv_bytes())
            except EOFError:
                return
            header, frame = _answer(videos, request)
            answers.send_bytes(json.dumps(header).encode() + b"\n" + frame)


if __name__ == "__main__":
    main()
