"""Loading of single images into their places: read, decode, cut out, turn, resize and crop."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from featx.base import name_text, return_freed_memory
from featx.errors import RunError
from featx.images.decode import DecodedImage, decode_array, decode_box_image, decode_pillow
from featx.images.decode_settings import DecodeSettings
from featx.images.decoder import DecodingClock
from featx.images.decoder_warnings import recorded_warnings, warn
from featx.images.image_reading import read_image
from featx.images.preprocess import Preprocess
from featx.images.rgb_conversion import PixelFormatError
from featx.images.tiff_blocks import TiffBlocks
from featx.images.views import cut_view
from featx.types import (
    NO_IMAGE,
    Array,
    ImageFault,
    Listing,
    Source,
    Status,
    ViewSource,
    image_checksum,
)

_LARGE_BYTES = 8 << 20
"""Least size of an encoded image with several rows, from which on the allocator returns freed
memory to the kernel: its blocks are large, and the next ones may not fit into their place."""


WINDOW_ERROR = "WindowError"
"""Error of an image whose size does not fit the windows of a run."""

UNFIT = (PixelFormatError.__name__, WINDOW_ERROR)
"""Errors of images that do not fit the model."""

_NUM_HEADER = 8
"""Elements in front of an image of its own size in its place; the first bytes are its size."""


def image_in_place(place: torch.Tensor, num_channels: int) -> torch.Tensor:
    """View of the image of its own size in a place, (C, H, W); (C, 0, 0) if it failed."""
    height, width = place[:_NUM_HEADER].view(torch.int32)[:2].tolist()
    count = num_channels * height * width
    return place[_NUM_HEADER : _NUM_HEADER + count].view(num_channels, height, width)


@dataclass(frozen=True)
class _WholeImage:
    """An image that several rows show, or the reason why it could not be decoded."""

    key: bytes
    checksum: int
    decoded: DecodedImage | TiffBlocks | ImageFault
    warnings: tuple[str, ...] = ()


class RowLoader:
    """Loads the images of a listing; the worker of a decoder.

    Attributes:
        keys: (N,) keys of all rows.
        shape: (C, H, W) of an image. With windows, whose images have their own sizes, the number
            of elements of a place: of the size and of an image of `data.max_pixels`. The pages of
            a place that no image reaches take no memory.
        dtype: float32 if the reference transform normalises, otherwise uint8.
    """

    def __init__(self, source: Source, listing: Listing, decoding: DecodeSettings) -> None:
        self.shape: tuple[int, ...] = decoding.preprocess.shape
        self._has_windows = decoding.preprocess.has_windows
        if self._has_windows:
            self.shape = (_NUM_HEADER + self.shape[0] * decoding.policy.max_pixels,)
        self.dtype: np.dtype[np.generic] = np.dtype(np.float32 if decoding.reference else np.uint8)
        self._torch_dtype = torch.float32 if decoding.reference else torch.uint8
        self._source = source
        self.keys = listing.keys
        self._decoding = decoding
        self._policy = decoding.policy
        self._takes_pillow = decoding.reference and self._policy.channels is None
        self._views = source if isinstance(source, ViewSource) else None
        # The size of a box or a crop is unknown before its image is decoded.
        at_full_size = decoding.reference or self._views is not None
        self._at_least = None if at_full_size else decoding.preprocess.shortest_side
        self._whole: _WholeImage | None = None
        self._had_large = False  # whether an image of _LARGE_BYTES was read for its views

    def image_key(self, row: int) -> bytes:
        """Key of the image that a row is, or whose view it is."""
        key = bytes(self.keys[row])
        return key if self._views is None else self._views.image_key(key)

    def read(self, row: int) -> bytes:
        """Read the encoded bytes of the image of a row. Raises as `read_image`."""
        try:
            return read_image(self._source, bytes(self.keys[row]))
        except MemoryError as error:
            raise self._out_of_memory(row) from error

    def warm_up(self) -> None:
        """Import the decoders, and call them once."""
        height, width = self._decoding.preprocess.crop
        file = io.BytesIO()
        Image.new("RGB", (width + 16, height + 16)).save(file, "JPEG")
        if self._policy.channels is None:
            decoded = self._decode(file.getvalue())
            if isinstance(decoded, np.ndarray):  # a reference transform may be anybody's code
                self._decoding.preprocess.crop_array(decoded)

    def fill(
        self,
        row: int,
        read: Callable[[], bytes],
        out: Array,
        checksum: npt.NDArray[np.uint64],
        clock: DecodingClock,
    ) -> None:
        """Load an image, or a view of one, into its place in a batch."""
        preprocess = self._decoding.preprocess
        try:
            if self._views is None:
                data = read()
                checksum[0] = image_checksum(data)
                with clock:
                    self._put(out, self._prepare(self._decode(data), preprocess))
                return
            view, key = self._views.view(bytes(self.keys[row])), self.image_key(row)
            if self._whole is None or self._whole.key != key:
                self._whole = None  # the next image needs its memory
                self._return_memory()
                self._whole = self._load_whole(key, read, checksum, clock)
            image = self._whole
            checksum[0] = image.checksum
            if isinstance(image.decoded, ImageFault):
                fault = image.decoded
                raise ImageFault(fault.status, str(fault), fault.error)
            for text in image.warnings:
                warn(text)
            with clock:
                cut = self._as_transform_input(cut_view(image.decoded, view))
                if view.crop is not None:
                    preprocess = preprocess.without_crop()
                self._put(out, self._prepare(cut, preprocess))
        except MemoryError as error:
            raise self._out_of_memory(row) from error

    def clear(self, out: Array) -> None:
        """Clear the place of a row that failed; with windows, its size."""
        out[: _NUM_HEADER if self._has_windows else None] = 0

    def _put(self, out: Array, pixels: Array) -> None:
        """Copy an image into its place; numpy starts no threads of OpenMP, as torch would."""
        if not self._has_windows:
            np.copyto(out, pixels)
            return
        if pixels.size > len(out) - _NUM_HEADER:
            raise ImageFault(
                Status.TOO_LARGE,
                f"{pixels.shape[2]} x {pixels.shape[1]} pixels are more than data.max_pixels="
                f"{self._policy.max_pixels}",
            )
        out[:_NUM_HEADER].view(np.int32)[:2] = pixels.shape[1:]
        np.copyto(out[_NUM_HEADER : _NUM_HEADER + pixels.size].reshape(pixels.shape), pixels)

    def _out_of_memory(self, row: int) -> RunError:
        """The error of a machine without memory, which never becomes the failure of a row."""
        return RunError(
            f"out of memory at {name_text(bytes(self.keys[row]))}. Nothing committed is lost; "
            "free some memory and give the same command again. A smaller batch_size or "
            "data.max_pixels needs less."
        )

    def _load_whole(
        self,
        key: bytes,
        read: Callable[[], bytes],
        checksum: npt.NDArray[np.uint64],
        clock: DecodingClock,
    ) -> _WholeImage:
        """Read and decode an image that several rows show."""
        try:
            data = read()
        except ImageFault as fault:
            return _WholeImage(key, NO_IMAGE, fault)
        number = image_checksum(data)
        checksum[0] = number  # should decoding end this process
        self._had_large |= len(data) >= _LARGE_BYTES
        try:
            with clock, recorded_warnings() as caught:
                decoded = decode_box_image(data, self._policy, self._at_least)
        except ImageFault as fault:
            return _WholeImage(key, number, fault)
        del data  # TiffBlocks keep it
        self._return_memory()
        return _WholeImage(key, number, decoded, tuple(caught))

    def _return_memory(self) -> None:
        """Return freed memory to the kernel, if large images were read for their views."""
        if self._had_large:
            return_freed_memory()

    def _prepare(self, decoded_image: DecodedImage, preprocess: Preprocess) -> Array:
        """The image of a row in the size of the crop, (C, H, W) uint8 or normalised float32.

        With windows the whole image, in its own size.
        """
        resize = preprocess.resize
        expected = preprocess.shape
        if isinstance(decoded_image, Image.Image):
            width, height = decoded_image.size
            transformed = functools.partial(preprocess.reference, decoded_image)
        else:
            height, width, _ = decoded_image.shape
            transformed = functools.partial(preprocess.crop_array, decoded_image)
        short, long = sorted((width, height))
        # After resizing the shorter side, the longer one has resize * long / short pixels: a very
        # long image would exceed the memory that max_pixels allows.
        if isinstance(resize, int) and resize * resize * long > self._policy.max_pixels * short:
            raise ImageFault(
                Status.TOO_LARGE, f"{width} x {height} pixels would be too long after resizing"
            )
        try:
            x = transformed()
            if self._has_windows:
                expected = (expected[0], *x.shape[1:])
            # copyto would broadcast one channel to three, and convert other numbers.
            if x.shape != expected or x.dtype != self._torch_dtype:
                raise ValueError(
                    f"the transform gives {tuple(x.shape)} {x.dtype}, expected {expected} "
                    f"{self._torch_dtype}"
                )
            pixels: Array = x.numpy()
        except (MemoryError, ImageFault):
            raise
        except Exception as error:
            if "allocate memory" in str(error) or "enough memory" in str(error):
                raise MemoryError(str(error)) from error  # torch raises RuntimeError
            raise ImageFault.of(error, Status.TRANSFORM_ERROR) from error
        height, width = pixels.shape[1:]
        least_height, least_width = preprocess.crop
        if height < least_height or width < least_width:  # with windows only
            raise ImageFault(
                Status.TRANSFORM_ERROR,
                f"{width} x {height} pixels are smaller than a window of {least_width} x "
                f"{least_height}; give a smaller model.window.size, or model.transform.resize",
                WINDOW_ERROR,
            )
        return pixels

    def _as_transform_input(self, cut: DecodedImage) -> DecodedImage:
        """A view of an image, in the type that the transform takes.

        The whole image stays in the type of its decoder: a copy of 20,000 x 20,000 pixels would
        need 1.2 GB more.
        """
        if self._takes_pillow:
            return cut if isinstance(cut, Image.Image) else Image.fromarray(cut)
        return np.array(cut) if isinstance(cut, Image.Image) else cut

    def _decode(self, data: bytes) -> DecodedImage:
        """The whole image of a row, in the type that the transform takes."""
        if self._takes_pillow:
            return decode_pillow(data, self._policy, self._at_least)
        return decode_array(data, self._policy, self._at_least)
