"""Loading of single images into their places: read, decode, cut out a box, resize and crop."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.profiler import record_function

from featx.base import return_freed_memory
from featx.errors import RunError
from featx.images.decode import EncodedJpeg
from featx.images.decode_settings import DecodeSettings
from featx.images.fault_tolerant_decode import FaultTolerantDecoder
from featx.images.whole_images import DecodedImage, WholeImage, WholeImages
from featx.types import (
    NO_IMAGE,
    Box,
    Failure,
    ImageFault,
    Listing,
    RegionSource,
    Source,
    Status,
    image_checksum,
)

_LARGE_BYTES = 8 << 20
"""Least size of an encoded image, out of which boxes are cut, from which on the allocator returns
freed memory to the kernel: its blocks are large, and the next ones may not fit into their place."""


@dataclass
class LoaderTimes:
    """Times of a loader, summed over its threads.

    Attributes:
        read_s: seconds in which threads read images.
        decode_s: seconds in which threads decoded, resized and cropped.
        num_bytes: number of encoded bytes read.
        on_device_s: seconds in which the GPU decoded and batches were copied there.
    """

    read_s: float = 0.0
    decode_s: float = 0.0
    num_bytes: int = 0
    on_device_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(
        self, read_s: float = 0, decode_s: float = 0, num_bytes: int = 0, on_device_s: float = 0
    ) -> None:
        """Add seconds and bytes; safe to call from several threads."""
        with self._lock:
            self.read_s += read_s
            self.decode_s += decode_s
            self.num_bytes += num_bytes
            self.on_device_s += on_device_s


class RowLoader:
    """Loads the image of any row of a listing, in threads of a decoder.

    Args:
        source: source of the images.
        listing: keys of the rows.
        decoding: transform and limits.
        decoder: reads and decodes.
        times: receives the seconds and bytes of each image.
        is_profiled: whether reading and decoding appear in the trace of torch's profiler.

    Attributes:
        dtype: dtype of the images: float32 if the reference transform normalises, otherwise uint8.
        span: context manager that names a section in the trace of the profiler.
    """

    def __init__(
        self,
        source: Source,
        listing: Listing,
        decoding: DecodeSettings,
        decoder: FaultTolerantDecoder,
        times: LoaderTimes,
        is_profiled: bool,
    ) -> None:
        self.dtype = torch.float32 if decoding.reference else torch.uint8
        # The profiler's function takes 7 µs even while nothing is profiled.
        self.span: Callable[[str], contextlib.AbstractContextManager[object]] = (
            record_function if is_profiled else _no_span
        )
        self._listing = listing
        self._decoding = decoding
        self._decoder = decoder
        self._times = times
        self._regions = source if isinstance(source, RegionSource) else None
        self._whole_images = WholeImages()
        self._had_large = False  # whether an image of _LARGE_BYTES was read for its boxes

    def close(self) -> None:
        """Drop the images that were kept for further boxes."""
        self._whole_images.clear()
        self._return_memory()

    def fill(
        self,
        row: int,
        out: npt.NDArray[Any],
        checksum: npt.NDArray[np.uint64] | None = None,
        for_device: bool = False,
        data: bytes | None = None,
    ) -> EncodedJpeg | Failure | None:
        """Load one image into its place in a batch.

        Args:
            row: row of the listing.
            out: (C, H, W) array of the loader's dtype that takes the image; zero if it fails.
            checksum: (1,) array that takes the checksum of the encoded bytes, also of images that
                cannot be decoded; None if it is not needed.
            for_device: whether to leave decoding to the GPU if it can.
            data: encoded bytes if they were read before.

        Returns:
            None if the image is in its place, the encoded image if the GPU is to decode it, or the
            failure.

        Raises:
            RunError: reading fails repeatedly, or memory is exhausted.
        """
        key = bytes(self._listing.keys[row])
        try:
            if self._regions is not None:
                self._fill_box(key, self._regions.box(key), out, checksum)
                return None
            return self._fill_image(key, out, checksum, for_device, data)
        except ImageFault as fault:
            out[...] = 0
            return Failure(row, key, fault.status, fault.error, str(fault))
        except MemoryError as error:
            # The machine, not the image: such a failure never becomes a row.
            raise RunError(
                f"out of memory at {os.fsdecode(key)}. Nothing committed is lost; free some memory "
                "and give the same command again. A smaller batch_size or data.max_pixels needs "
                "less."
            ) from error

    def _fill_image(
        self,
        key: bytes,
        out: npt.NDArray[Any],
        checksum: npt.NDArray[np.uint64] | None,
        for_device: bool,
        data: bytes | None,
    ) -> EncodedJpeg | None:
        """Load an image into its place; arguments and result as of `fill`.

        Raises:
            ImageFault: the image cannot be read, decoded or transformed.
        """
        started_at = time.perf_counter()
        num_bytes = 0
        with self.span("read"):
            if data is None:
                data = self._decoder.read(key)
                num_bytes = len(data)
            if checksum is not None:
                checksum[0] = image_checksum(data)
        read_at = time.perf_counter()
        with self.span("decode"):
            encoded = self._decoder.prepare_jpeg(key, data) if for_device else None
            if encoded is None:
                # numpy copies in this thread; torch would start OpenMP threads for each one.
                np.copyto(out, self._prepare(self._decode(key, data)))
        self._times.add(read_at - started_at, time.perf_counter() - read_at, num_bytes)
        return encoded

    def _fill_box(
        self,
        key: bytes,
        box: Box,
        out: npt.NDArray[Any],
        checksum: npt.NDArray[np.uint64] | None,
    ) -> None:
        """Load a box of an image into its place; arguments as of `fill`.

        Raises:
            ImageFault: the image cannot be read or decoded, or the box lies outside it.
        """
        name, load = self._decoder.image_key(key), functools.partial(self._load_whole, key)
        image = self._whole_images.get(name, load, self._decoder.is_retry)
        if checksum is not None:
            checksum[0] = image.checksum
        started_at = time.perf_counter()
        with self.span("decode"):
            cut = self._decoder.cut(key, image.image(), box)
            np.copyto(out, self._prepare(self._as_transform_input(cut)))
        self._times.add(0, time.perf_counter() - started_at)

    def _load_whole(self, key: bytes) -> WholeImage:
        """Read and decode the image that the box of a row lies in."""
        started_at = read_at = time.perf_counter()
        number, num_bytes = NO_IMAGE, 0
        try:
            with self.span("read"):
                data = self._decoder.read(key)
                number, num_bytes = image_checksum(data), len(data)
            read_at = time.perf_counter()
            self._had_large |= num_bytes >= _LARGE_BYTES
            self._return_memory()
            with self.span("decode"):
                decoded = self._decoder.decode_box_image(key, data)
            del data  # TiffBlocks keep it
            self._return_memory()
            return WholeImage(number, decoded)
        except ImageFault as fault:
            return WholeImage(number, fault)
        finally:
            self._times.add(read_at - started_at, time.perf_counter() - read_at, num_bytes)

    def _return_memory(self) -> None:
        """Return freed memory to the kernel, if large images were read for their boxes."""
        if self._had_large:
            return_freed_memory()

    def _prepare(self, decoded_image: DecodedImage) -> npt.NDArray[Any]:
        """The image of a row in the size of the crop, (C, H, W) uint8 or normalised float32.

        Args:
            decoded_image: decoded image, or box of it.

        Raises:
            ImageFault: the image is too long, or the transform fails.
        """
        resize = self._decoding.preprocess.resize
        expected = self._decoding.preprocess.shape
        if isinstance(decoded_image, Image.Image):
            width, height = decoded_image.size
            transformed = functools.partial(self._decoding.preprocess.reference, decoded_image)
        else:
            height, width, _ = decoded_image.shape
            transformed = functools.partial(self._decoding.preprocess.crop_array, decoded_image)
        short, long = sorted((width, height))
        # After resizing the shorter side, the longer one has resize * long / short pixels: a very
        # long image would exceed the memory that max_pixels allows.
        if (
            isinstance(resize, int)
            and resize * resize * long > self._decoding.policy.max_pixels * short
        ):
            raise ImageFault(
                Status.TOO_LARGE, f"{width} x {height} pixels would be too long after resizing"
            )
        try:
            x = transformed()
            # copyto would broadcast one channel to three, and convert other numbers.
            if x.shape != expected or x.dtype != self.dtype:
                raise ValueError(
                    f"the transform gives {tuple(x.shape)} {x.dtype}, expected {expected} "
                    f"{self.dtype}"
                )
            pixels: npt.NDArray[Any] = x.numpy()
            return pixels
        except (MemoryError, ImageFault):
            raise
        except Exception as error:
            if "allocate memory" in str(error) or "enough memory" in str(error):
                raise MemoryError(str(error)) from error  # torch raises RuntimeError
            raise ImageFault(
                Status.TRANSFORM_ERROR, str(error)[:200], type(error).__name__
            ) from error

    def _as_transform_input(self, box: DecodedImage) -> DecodedImage:
        """A box of an image, in the type that the transform takes.

        The whole image stays in the type of its decoder: a copy of 20,000 x 20,000 pixels would
        need 1.2 GB more.
        """
        takes_pillow = self._decoding.reference and self._decoding.policy.channels is None
        if takes_pillow:
            return box if isinstance(box, Image.Image) else Image.fromarray(box)
        return np.array(box) if isinstance(box, Image.Image) else box

    def _decode(self, key: bytes, data: bytes) -> DecodedImage:
        """The whole image of a row, in the type that the transform takes."""
        if self._decoding.reference and self._decoding.policy.channels is None:
            return self._decoder.decode_pillow(key, data)
        return self._decoder.decode_array(key, data)


def _no_span(name: str) -> contextlib.AbstractContextManager[object]:
    """Takes the place of the profiler's function in a run without a profile."""
    return _NO_SPAN


_NO_SPAN: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
