"""Encoded bytes -> one upright RGB picture, or an ImageFault that says why not.

The only file that names a decoder of this machine's CPU; another device's is in on_device. Pillow
opens everything and decodes whatever is odd; sound JPEGs are decoded by simplejpeg where it is
installed, to the same pixels in less time. For decode=fast, JPEGs far larger than needed are
decoded at a half, a quarter or an eighth of their size, which libjpeg does while it decodes. HEIC
is decoded by pillow-heif where it is installed.
"""

from __future__ import annotations

import importlib.util
import io
import re
import struct
import zlib
from dataclasses import dataclass, replace
from importlib.metadata import version as version_of

import numpy as np
import numpy.typing as npt
from PIL import AvifImagePlugin, Image, ImageColor, ImageFile, UnidentifiedImageError

from featx.base.process_setting import ProcessSetting
from featx.config import DataConfig
from featx.errors import ConfigError
from featx.images.rgb_conversion import to_rgb
from featx.types import ImageFault, Status

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM", "AVIF")
"""The only parsers of Pillow that an image can reach, whatever its name says. JPEG includes MPO,
which Pillow does not register by itself."""

_SIGNATURE = re.compile(
    rb"\xff\xd8\xff|\x89PNG|GIF8|BM|II[*+]\0|MM\0[*+]|RIFF....WEBP|P[1-6]\s|....ftypavi[fs]",
    re.DOTALL,
)
_HEIF = re.compile(rb"....ftyp(hei[cxms]|hev[cxms]|mif1|msf1)", re.DOTALL)
"""HEVC in its container; the last two may hold AVIF as well, which Pillow tries first."""

_HEIF_NAME = re.compile(rb"\.(heic|heif|hif)", re.IGNORECASE)

_CUT_SHORT = re.compile(r"runcat|nd of file|outside of file bounds|Cannot read full")
"""What decoders say of a file that ends too early."""

PILLOW, SIMPLEJPEG = "pillow", "simplejpeg"
"""Who decodes JPEGs."""

MAX_CODED_PIXELS = 1 << 22
"""Larger pictures are never decoded on another device, where many are decoded at a time."""

_ORIENTATION = 0x0112
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_TURN_BACK = {6: 8, 8: 6}


@dataclass(frozen=True)
class ImagePolicy:
    """What to do with odd pictures; part of the fingerprint.

    Attributes:
        exif: 'apply' or 'ignore' the EXIF orientation.
        background: (R, G, B) under transparent pixels.
        max_pixels: a picture of more pixels is refused before it is decoded.
        jpeg: who decodes JPEGs where pixels are asked for; all give the same ones.
        heif: the version of pillow-heif that the store is bound to, None where it is to none.
    """

    exif: str
    background: tuple[int, int, int]
    max_pixels: int
    jpeg: str = PILLOW
    heif: str | None = None

    @classmethod
    def from_config(cls, config: DataConfig) -> ImagePolicy:
        """Raises ConfigError where the background is no colour."""
        try:
            colour = ImageColor.getrgb(config.background)
        except ValueError as error:
            raise ConfigError(
                f"data.background={config.background}: expected a colour name such as white, "
                "or '#rrggbb'."
            ) from error
        return cls(config.exif, (colour[0], colour[1], colour[2]), config.max_pixels)


@dataclass(frozen=True)
class EncodedJpeg:
    """A JPEG that libjpeg takes without a word, for another device to decode.

    Attributes:
        data: the encoded bytes.
        size: (width, height) in pixels, before it is turned.
        turn: its EXIF orientation; 1 for none, or where the policy ignores it.
        eighth: (ceil(height / 8), ceil(width / 8), 3), the same picture as libjpeg decodes it at an
            eighth of its size.
    """

    data: bytes
    size: tuple[int, int]
    turn: int
    eighth: npt.NDArray[np.uint8]


def _pillow_now() -> tuple[int | None, bool, int]:
    lenient = ImageFile.LOAD_TRUNCATED_IMAGES
    return Image.MAX_IMAGE_PIXELS, lenient, AvifImagePlugin.DEFAULT_MAX_THREADS


def _set_pillow(settings: tuple[int | None, bool, int]) -> None:
    Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = settings[:2]
    AvifImagePlugin.DEFAULT_MAX_THREADS = settings[2]


# Pillow's own pixel limit is off: ours is in force, which records where Pillow's only warns.
# Truncated files are refused, whatever another library in this process has asked for. An AVIF is
# decoded in one thread, as the loader has one for every CPU.
_pillow_settings: ProcessSetting[tuple[int | None, bool, int]] = ProcessSetting(
    _pillow_now, _set_pillow, (None, False, 1)
)


def jpeg_decoder(begun: str | None = None) -> str:
    """Who decodes JPEGs for decode=fast: PILLOW, or SIMPLEJPEG where the extra is installed.

    Args:
        begun: who did when the store was begun, None for a new store.

    Raises:
        ConfigError: the store was begun with simplejpeg, and it is not installed.
    """
    installed = importlib.util.find_spec("simplejpeg") is not None
    if begun is None:
        return SIMPLEJPEG if installed else PILLOW
    if begun == SIMPLEJPEG and not installed:
        raise ConfigError(
            "this store was begun with simplejpeg, which is not installed here: "
            'pip install "featx[jpeg]", or choose a new out.'
        )
    return begun


def heif_version(keys: npt.NDArray[np.bytes_], begun: str | None, new: bool) -> str | None:
    """The version of pillow-heif that a store is bound to, None where it is to none.

    A new store is, where pillow-heif is installed and a key names such a picture. Other stores
    decode what they meet with what is there.

    Args:
        keys: (N,) of the listing.
        begun: the version that the store was begun with, None where it is bound to none.
        new: whether the store is begun now.

    Raises:
        ConfigError: the store is bound to it, and it is not installed.
    """
    installed = importlib.util.find_spec("pillow_heif") is not None
    if begun is not None and not installed:
        raise ConfigError(
            "this store was begun with pillow-heif, which is not installed here: "
            'pip install "featx[heif]", or choose a new out.'
        )
    named = new and installed and _HEIF_NAME.search(np.ascontiguousarray(keys).data)
    return version_of("pillow_heif") if begun is not None or named else None


def coded_jpeg(data: bytes, policy: ImagePolicy, at_least: int) -> EncodedJpeg | None:
    """A JPEG in colour that another device may decode, None for everything else.

    All of it is read, at an eighth of its size: that takes a third of the time, and says whether
    its bytes are sound, which decoders elsewhere may not say.

    Args:
        data, policy: as for `decode`.
        at_least: a JPEG that `decode` would make smaller for it is None.
    """
    try:
        with _pillow_settings:
            return _coded(data, policy, at_least)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - what it is, `decode` says
        return None


def decode_pixels(data: bytes, policy: ImagePolicy, at_least: int | None) -> npt.NDArray[np.uint8]:
    """Decode an image whole, as `decode` does.

    Args:
        data, policy, at_least: as for `decode`.

    Returns:
        (H, W, 3).
    """
    image = _guarded(data, policy, at_least)
    return image if isinstance(image, np.ndarray) else np.array(image)


def decode(data: bytes, policy: ImagePolicy, at_least: int | None = None) -> Image.Image:
    """Decode an image whole, with Pillow.

    Args:
        data: the encoded bytes.
        policy: for orientation, transparency and size.
        at_least: a JPEG may come back smaller than it is, with its shorter side still twice this
            many pixels; None decodes at full size.

    Returns:
        The first frame, mode RGB, upright.

    Raises:
        ImageFault: with the status that names the reason.
    """
    image = _guarded(data, replace(policy, jpeg=PILLOW), at_least)
    assert isinstance(image, Image.Image)
    return image


def _guarded(
    data: bytes, policy: ImagePolicy, at_least: int | None
) -> Image.Image | npt.NDArray[np.uint8]:
    """One boundary around one image: of the files that fail, many raise something other than
    OSError (ValueError, TypeError, SyntaxError, struct.error, ...)."""
    try:
        with _pillow_settings:
            return _decode(data, policy, at_least)
    except (ImageFault, MemoryError):
        raise
    except Exception as error:
        raise _fault(data, error) from error


def _decode(
    data: bytes, policy: ImagePolicy, at_least: int | None
) -> Image.Image | npt.NDArray[np.uint8]:
    image = _open(data)
    width, height = image.size
    if width * height > policy.max_pixels:
        raise ImageFault(Status.TOO_LARGE, f"{width} x {height} pixels, over {policy.max_pixels}")
    if image.format == "PNG":
        _check_png(data)
        _mend_transparency(image)
    # Of HEIC, `draft` would take a thumbnail.
    scalable = image.format in ("JPEG", "MPO") and image.mode == "RGB"
    if at_least is not None and _far_larger(image.size, at_least) and scalable:
        scale = 2 * at_least / min(width, height)
        image.draft("RGB", (int(width * scale), int(height * scale)))
    if policy.jpeg == SIMPLEJPEG and image.format == "JPEG" and image.mode == "RGB":
        turn = _orientation(image) if policy.exif == "apply" else 1
        if turn == 1 and (pixels := _sound_jpeg(data, image.size)) is not None:
            return pixels
    # Pillow turns a TIFF upright while it loads it; every other format is turned here.
    turned = _orientation(image) if image.format == "TIFF" else 1
    image.load()
    turn = _orientation(image) if policy.exif == "apply" else _TURN_BACK.get(turned, turned)
    rgb = to_rgb(image, policy.background)
    return rgb if turn == 1 else rgb.transpose(_TRANSPOSE[turn])


def _far_larger(size: tuple[int, int], at_least: int) -> bool:
    """Whether a JPEG is decoded at less than its size."""
    return min(size) >= 4 * at_least


def _coded(data: bytes, policy: ImagePolicy, at_least: int) -> EncodedJpeg | None:
    image = _open(data)
    width, height = size = image.size
    if image.format != "JPEG" or image.mode != "RGB" or min(size) < 8:
        return None
    if width * height > min(policy.max_pixels, MAX_CODED_PIXELS) or _far_larger(size, at_least):
        return None
    turn = _orientation(image) if policy.exif == "apply" else 1
    image.draft("RGB", (width // 8, height // 8))
    eighth = _sound_jpeg(data, image.size) if policy.jpeg == SIMPLEJPEG else np.array(image)
    if eighth is None or eighth.shape != (-(-height // 8), -(-width // 8), 3):
        return None
    return EncodedJpeg(data, size, turn, eighth)


def _open(data: bytes) -> ImageFile.ImageFile:
    """An image of which the header is read: by a parser of the allow-list, or pillow-heif's."""
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        if not _HEIF.match(data):
            raise
    if importlib.util.find_spec("pillow_heif") is None:
        raise ImageFault(Status.UNSUPPORTED, 'HEIC needs pip install "featx[heif]"')
    from pillow_heif import HeifImageFile

    image: ImageFile.ImageFile = HeifImageFile(io.BytesIO(data))  # type: ignore[no-untyped-call]
    return image


def _sound_jpeg(data: bytes, size: tuple[int, int]) -> npt.NDArray[np.uint8] | None:
    """(H, W, 3), or None where libjpeg has anything to say: Pillow then decides what it is.

    Args:
        data: of a JPEG of three colours.
        size: (width, height) at which it is wanted: its own, or what `draft` made of it.
    """
    import simplejpeg

    width, height = size
    try:
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(
            data, min_width=width, min_height=height, strict=True
        )
    except ValueError:
        return None
    return pixels if pixels.shape == (height, width, 3) else None


def _check_png(data: bytes) -> None:
    """Compare the checksums of the pixel data, which Pillow leaves out."""
    at = 8
    while at + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        end = at + 8 + length
        if kind == b"IEND" or end + 4 > len(data):
            return  # whether enough is there is found out by decoding
        if kind == b"IDAT":
            stored = int.from_bytes(data[end : end + 4])
            if zlib.crc32(memoryview(data)[at + 4 : end]) != stored:
                raise ImageFault(Status.DECODE_ERROR, "the checksum of its pixels is wrong")
        at = end + 4


def _mend_transparency(image: ImageFile.ImageFile) -> None:
    """Bring a PNG's transparent colour to the 8 bits of its pixels.

    Pillow scales the pixels of 2, 4 and 3 x 16 bits to 8, but not the colour it compares them with.
    Of 16 bits the upper 8 are compared, as Pillow keeps no others.
    """
    clear = image.info.get("transparency")
    raw_mode = image.tile[0].args if image.tile else None
    if isinstance(clear, int) and raw_mode in ("L;2", "L;4"):
        image.info["transparency"] = (clear & 3) * 85 if raw_mode == "L;2" else (clear & 15) * 17
    elif isinstance(clear, tuple) and raw_mode == "RGB;16B":
        image.info["transparency"] = tuple(value >> 8 for value in clear)


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 where there is none, it is damaged, or out of range."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except (OSError, ValueError, TypeError, KeyError, SyntaxError, struct.error):
        return 1
    return value if value in _TRANSPOSE else 1


def _fault(data: bytes, error: Exception) -> ImageFault:
    message = str(error).replace("\n", " ")[:200] or "no message"
    if isinstance(error, Image.DecompressionBombError):
        status = Status.TOO_LARGE
    elif isinstance(error, UnidentifiedImageError):
        status, message = _unknown(data)
    elif isinstance(error, EOFError | struct.error | zlib.error) or _CUT_SHORT.search(message):
        status = Status.TRUNCATED
    else:
        status = Status.DECODE_ERROR
    return ImageFault(status, message, type(error).__name__)


def _unknown(data: bytes) -> tuple[Status, str]:
    """Why no parser takes a file."""
    if _SIGNATURE.match(data) is None:
        return Status.UNSUPPORTED, "not an image of a known format"
    if data[4:11] == b"ftypavi" and not AvifImagePlugin.SUPPORTED:
        return Status.UNSUPPORTED, "AVIF needs a Pillow that has it, such as its wheels on PyPI"
    if data.startswith(b"\xff\xd8"):
        return Status.DECODE_ERROR, "its header is damaged, or it is a lossless or 12-bit JPEG"
    return Status.DECODE_ERROR, "its header is damaged"
