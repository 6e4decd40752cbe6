"""Decoding of JPEGs by simplejpeg, and the damage that libjpeg finds in their data.

Pillow and simplejpeg decode with libjpeg, which repairs damaged data as well as it can and warns.
Pillow drops its warnings; simplejpeg reports the first one.
"""

from __future__ import annotations

import re
import struct

import numpy as np
import numpy.typing as npt
import simplejpeg

from featx.images.decode_settings import ACCEPT, ImagePolicy
from featx.images.decoder_warnings import ACCEPTED_DAMAGE, warn
from featx.types import ImageFault, Status

JPEG = b"\xff\xd8\xff"
"""First bytes of a JPEG."""

_NO_END = "Premature end of JPEG file"
"""libjpeg's words for data that end before the end marker."""

_END = b"\xff\xd9"
"""Marker at the end of an image. Within compressed data 0xFF is followed by other bytes."""

_SCAN, _PROGRESSIVE, _EXIF, _COMMENT = 0xDA, 0xC2, 0xE1, 0xFE
"""Markers of segments: compressed data, frame of a progressive image, EXIF or XMP, and text."""

_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of segments that begin with the number of bits of a component: frames of any kind."""

_METADATA = range(0xE0, 0xF0)
"""Markers of segments that tell about colours, cameras and thumbnails."""

_EXTRANEOUS = re.compile(r"(\d+) extraneous bytes before marker 0xd9")
"""Warning about bytes between the last pixels and the end marker."""

_STRAY_BYTES = 2
"""Number of such bytes that some sound files have."""

_AHEAD_BYTES = 16
"""Number of bytes that libjpeg may have read when it comes to the end marker."""

_LEAST_LINES = 8
"""Number of line ends that all follow a carriage return in no sound file."""


Header = list[tuple[int, int, int]]
"""Segments of a JPEG: marker, and the positions of its first byte and behind its last one."""


def read_header(data: bytes) -> Header:
    """Find the segments of the header of a JPEG, and that of its first scan as the last one.

    Bytes between segments are left out, as libjpeg does.
    """
    header, start, end = [], 2, len(data) - 4
    while 0 <= start < end:
        marker = data[start + 1]
        if data[start] != 0xFF or marker in (0, 0xFF):
            start = data.find(b"\xff", start + 1)
            continue
        stop = start + 2 + (data[start + 2] << 8) + data[start + 3]
        header.append((marker, start, stop))
        if marker == _SCAN:
            break
        start = stop
    return header


def plain_jpeg_size(data: bytes, header: Header) -> tuple[int, int] | None:
    """Return (width, height) of a JPEG of RGB or grey without EXIF or XMP data, else None."""
    if any(marker == _EXIF for marker, _, _ in header):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except (ValueError, KeyError):  # KeyError: simplejpeg 1.9 has no name for 4:4:1
        return None
    return (width, height) if colours in ("YCbCr", "RGB", "Gray") else None


def decode_sound_jpeg(
    data: bytes, size: tuple[int, int], header: Header
) -> npt.NDArray[np.uint8] | None:
    """Decode a JPEG, or return None if libjpeg has any error or warning.

    Returns (H, W, 3) uint8 RGB, or None.
    """
    # A lossless JPEG may have 2 to 7 bits, which libjpeg does not scale to 8.
    if any(marker in _FRAMES and data[start + 4] != 8 for marker, start, _ in header):
        return None
    width, height = size
    try:
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(
            data, min_width=width, min_height=height, strict=True
        )
    except ValueError:
        return None
    if pixels.shape != (height, width, 3):
        return None
    return None if _unreported_damage(data, header) else pixels


def jpeg_damage(data: bytes) -> str | None:
    """Return what is wrong with the data of a JPEG, in libjpeg's words, or None.

    Metadata, and bytes between the segments of the header, are no damage. Bytes between the last
    pixels and the end marker are none if there are one or two, or if they are padding. Otherwise
    they are most often what is left after damage.
    """
    bare, num_components = _without_metadata(data)
    options = {"colorspace": "CMYK"} if num_components == 4 else {}
    while True:
        try:
            # A factor of 8 takes a third of the time, and reads all data.
            simplejpeg.decode_jpeg(bare, min_width=1, min_height=1, min_factor=8, **options)
        except ValueError as error:
            words = str(error)
        else:
            return _unreported_damage(bare, read_header(bare))
        if words.startswith(("tj", "Invalid SOS parameters")):
            return None  # simplejpeg does not support the image, or it is an odd but sound one
        if words == _NO_END and not bare.endswith(_END):
            # If only the end marker is missing, Pillow decides.
            return words if jpeg_damage(data + _END) else None
        match = _EXTRANEOUS.search(words)
        end = bare.find(_END, bare.find(bytes([0xFF, _SCAN])))
        if match is None or not _is_padding(bare, end - int(match[1]), end):
            return words
        bare = bare[: end - int(match[1])] + bare[end:]


def check_jpeg(data: bytes, policy: ImagePolicy) -> None:
    """Refuse a JPEG with damaged data, or warn of it if the policy accepts it."""
    damage = jpeg_damage(data)
    if damage is None:
        return
    if policy.damaged != ACCEPT:
        status = Status.TRUNCATED if damage == _NO_END else Status.DECODE_ERROR
        raise ImageFault(status, damage, "DamagedJpegError")
    warn(f"{ACCEPTED_DAMAGE}{damage}")


def frame_size(data: bytes) -> tuple[int, int]:
    """Return (width, height) of the pixels of a JPEG, or (0, 0) if it has no frame."""
    for marker, start, _ in read_header(data):
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, start + 5)
            return width, height
    return 0, 0


def with_tables(block: bytes, tables: bytes) -> bytes:
    """A strip or tile of a TIFF as a JPEG of its own."""
    return block[:2] + tables[2:-2] + block[2:]


def _without_metadata(data: bytes) -> tuple[bytes, int]:
    """A JPEG without metadata and without bytes between the segments, and its components."""
    parts, num_components, is_sequential = [data[:2]], 0, False
    for marker, start, stop in read_header(data):
        segment = data[start:stop]
        if marker == _SCAN:
            if is_sequential:  # some cameras write other parameters, which have no meaning
                segment = segment[:-3] + b"\0\x3f\0"
            parts.append(segment + data[stop:])
        elif marker not in _METADATA and marker != _COMMENT:
            parts.append(segment)
        if 0xC0 <= marker <= 0xC2 and len(segment) > 9:
            num_components, is_sequential = segment[9], marker != _PROGRESSIVE
    return b"".join(parts), num_components


def _is_padding(bare: bytes, start: int, end: int) -> bool:
    """Return whether bytes before the end marker are harmless.

    Zeros that have replaced compressed data are no padding: some of them became pixels.
    """
    if end - start <= _STRAY_BYTES:
        return True
    byte = bare[start : start + 1]
    # libjpeg reads a few bytes ahead, which it does not count.
    before = bare[start - _AHEAD_BYTES : start]
    return bare[start:end] == byte * (end - start) and before != byte * _AHEAD_BYTES


def _unreported_damage(data: bytes, header: Header) -> str | None:
    """Return what is wrong with a JPEG that libjpeg takes without a warning, or None."""
    if not header or header[-1][0] != _SCAN:
        return None
    scan = header[-1][1]
    first = data.find(b"\n", scan)
    if data[first - 1 : first] == b"\r":  # one in 256; the counts take longer
        num_lines = data.count(b"\n", scan)
        if _LEAST_LINES <= num_lines == data.count(b"\r\n", scan):
            return "line ends were converted in its data: CR LF instead of LF"
    for marker, start, _ in header:
        if marker == _PROGRESSIVE and _lacks_scans(data, start, scan):
            return "its last scans are missing"
    return None


def _lacks_scans(data: bytes, frame: int, scan: int) -> bool:
    """Return whether a progressive JPEG ends before every coefficient has all of its bits."""
    components = data[frame + 10 : frame + 10 + 3 * data[frame + 9] : 3]
    missing_bits = {component: bytearray(b"\1" * 64) for component in components}
    end = data.find(_END, scan)
    while 0 <= scan < end:
        count = data[scan + 4]
        first, last, bits = data[scan + 5 + 2 * count : scan + 8 + 2 * count]
        for component in data[scan + 5 : scan + 5 + 2 * count : 2]:
            missing_bits[component][first : last + 1] = bytes([bits & 15]) * (last + 1 - first)
        scan = data.find(bytes([0xFF, _SCAN]), scan + 2)
    return any(any(bits) for bits in missing_bits.values())
