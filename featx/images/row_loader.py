"""Loading of single images into their places: read, decode, cut out a box, resize and crop."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.profiler import record_function

from featx.errors import RunError
from featx.images.decode import EncodedJpeg
from featx.images.decode_settings import DecodeSettings
from featx.images.fault_tolerant_decode import FaultTolerantDecoder
from featx.images.preprocess import cut_out
from featx.types import (
    NO_IMAGE,
    Failure,
    ImageFault,
    Listing,
    RegionSource,
    Source,
    Status,
    image_checksum,
)

NUM_CACHED_IMAGES = 2
"""Number of decoded images that are kept while boxes are cut from them; each takes up to 256 MiB.
"""

DecodedImage = Image.Image | npt.NDArray[np.uint8]
"""Upright RGB image: (H, W, 3) uint8 for the fast path, a Pillow image for the reference."""


@dataclass
class LoaderTimes:
    """Times of a loader, summed over its threads.

    Attributes:
        read: seconds in which threads read images.
        decode: seconds in which threads decoded, resized and cropped.
        bytes: number of encoded bytes read.
        on_device: seconds in which the GPU decoded and batches were copied there.
    """

    read: float = 0.0
    decode: float = 0.0
    bytes: int = 0
    on_device: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(
        self, read: float = 0, decode: float = 0, num_bytes: int = 0, on_device: float = 0
    ) -> None:
        """Add seconds and bytes; safe to call from several threads."""
        with self._lock:
            self.read += read
            self.decode += decode
            self.bytes += num_bytes
            self.on_device += on_device


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
        self._cached_images: deque[tuple[bytes, tuple[DecodedImage, int]]] = deque(
            maxlen=NUM_CACHED_IMAGES
        )
        self._cache_lock = threading.Lock()

    def fill(
        self,
        row: int,
        place: npt.NDArray[Any],
        checksum: npt.NDArray[np.uint64] | None = None,
        for_device: bool = False,
        data: bytes | None = None,
    ) -> EncodedJpeg | Failure | None:
        """Load one image into its place in a batch.

        Args:
            row: row of the listing.
            place: (3, H, W) array of the loader's dtype that takes the image; zero if it fails.
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
        num_bytes = 0
        started_at = time.perf_counter()
        try:
            decoded_image, number = self._cached(key) or (None, NO_IMAGE)
            with self.span("read"):
                if data is None:
                    data = b"" if decoded_image is not None else self._decoder.read(key)
                    num_bytes = len(data)
                if decoded_image is None:
                    number = image_checksum(data)
                if checksum is not None:
                    checksum[0] = number
            read = time.perf_counter()
            with self.span("decode"):
                encoded = self._decoder.encoded(key, data) if for_device else None
                if encoded is None:
                    if decoded_image is None:
                        decoded_image = self._decoded(key, data)
                    # numpy copies in this thread; torch would start OpenMP threads for each one.
                    np.copyto(place, self._prepare(key, decoded_image, number))
        except ImageFault as fault:
            place[...] = 0
            return Failure(row, key, fault.status, fault.error, str(fault))
        except MemoryError as error:
            # The machine, not the image: such a failure never becomes a row.
            raise RunError(
                f"out of memory at {os.fsdecode(key)}. Nothing committed is lost; free some memory "
                "and give the same command again. A smaller batch_size or data.max_pixels needs "
                "less."
            ) from error
        self._times.add(read - started_at, time.perf_counter() - read, num_bytes)
        return encoded

    def _prepare(self, key: bytes, decoded_image: DecodedImage, checksum: int) -> npt.NDArray[Any]:
        """The image of a row in the size of the crop, (3, H, W) uint8 or normalised float32.

        Args:
            key: key of the row.
            decoded_image: whole decoded image.
            checksum: checksum of its encoded bytes.

        Raises:
            ImageFault: the box is outside the image, the image is too long, or the transform fails.
        """
        resize = self._decoding.preprocess.resize
        expected = (3, *self._decoding.preprocess.crop)
        if self._regions is not None:
            self._cache(key, decoded_image, checksum)
            decoded_image = cut_out(decoded_image, self._regions.box(key))
        if isinstance(decoded_image, Image.Image):
            width, height = decoded_image.size
            transformed = functools.partial(self._decoding.preprocess.reference, decoded_image)
        else:
            height, width, _ = decoded_image.shape
            transformed = functools.partial(self._decoding.preprocess.crop_uint8, decoded_image)
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
        except MemoryError:
            raise
        except Exception as error:
            if "allocate memory" in str(error) or "enough memory" in str(error):
                raise MemoryError(str(error)) from error  # torch raises RuntimeError
            raise ImageFault(
                Status.TRANSFORM_ERROR, str(error)[:200], type(error).__name__
            ) from error

    def _cached(self, key: bytes) -> tuple[DecodedImage, int] | None:
        """The decoded image whose box a row is and its checksum, if the image is still kept."""
        if self._regions is None:
            return None
        with self._cache_lock:
            return dict(self._cached_images).get(self._decoder.image_key(key))

    def _cache(self, key: bytes, decoded_image: DecodedImage, checksum: int) -> None:
        """Keep a decoded image for further boxes; the oldest one is dropped."""
        with self._cache_lock:
            if (name := self._decoder.image_key(key)) not in dict(self._cached_images):
                self._cached_images.append((name, (decoded_image, checksum)))

    def _decoded(self, key: bytes, data: bytes) -> DecodedImage:
        """The whole image of a row, in the type that the transform takes."""
        if self._decoding.reference:
            return self._decoder.image(key, data)
        return self._decoder.pixels(key, data)


def _no_span(name: str) -> contextlib.AbstractContextManager[object]:
    """Takes the place of the profiler's function in a run without a profile."""
    return _NO_SPAN


_NO_SPAN: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
