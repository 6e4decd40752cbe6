"""Loading of rows as batches in their order, with threads that read and decode ahead.

Each row keeps its position. A failed image leaves zeros there and a Failure in the batch; no other
image takes its place.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.profiler import record_function

from featx.base import ReplaceableThreadPool, num_cpus
from featx.errors import RunError
from featx.images.decode import EncodedJpeg
from featx.images.decode_settings import DecodeSettings
from featx.images.fault_tolerant_decode import FaultTolerantDecoder
from featx.images.gpu_decode import DeviceDecoder
from featx.images.preprocess import cut_out
from featx.types import (
    NO_IMAGE,
    Batch,
    Failure,
    ImageFault,
    Listing,
    Part,
    RegionSource,
    Source,
    Status,
    image_checksum,
)

PREFETCH_BATCHES = 3
"""Number of batches that are loaded while one is computed; it bounds the memory of the loader."""

AHEAD_ROWS = 64
"""Number of images that `Loader.each` loads ahead."""

GROUP_ROWS = 8
"""Largest number of images that one task of a thread loads, one after the other.

Handing a task to a thread costs as much interpreter time as an image costs otherwise. Interpreter
time limits a process with many threads, because only one of them runs Python at a time.
"""

NUM_CACHED_IMAGES = 2
"""Number of decoded images that are kept while boxes are cut from them; each takes up to 256 MiB.
"""

DecodedImage = Image.Image | npt.NDArray[np.uint8]
"""Upright RGB image: (H, W, 3) uint8 for the fast path, a Pillow image for the reference."""

Groups = list[Future[list[EncodedJpeg | Failure | None]]]
"""Results of `Loader._fill` for groups of images."""


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


class Loader:
    """Reads, decodes and crops the images of a run; a context manager that owns its threads.

    Args:
        source: source of the images.
        listing: keys and labels of the rows.
        decoding: decoders, transform and time limit.
        batch_size: number B of images per batch.
        device: device of the model, or None for the CPU. For CUDA, batches are in page-locked
            memory, from which copies run asynchronously; if the GPU decodes a share, batches are
            already on it.
        is_profiled: whether reading and decoding appear in the trace of torch's profiler.

    Attributes:
        times: seconds and bytes of the threads so far.
    """

    def __init__(
        self,
        source: Source,
        listing: Listing,
        decoding: DecodeSettings,
        batch_size: int,
        device: torch.device | None = None,
        is_profiled: bool = False,
    ) -> None:
        self.times = LoaderTimes()
        self._listing = listing
        self._decoding = decoding
        self._regions = source if isinstance(source, RegionSource) else None
        self._decoder = FaultTolerantDecoder(
            source,
            decoding.policy,
            None if decoding.reference else decoding.preprocess.shortest_side,
            decoding.timeout_s,
            decoding.crash_list,
            "featx-loader",
        )
        self._cached_images: deque[tuple[bytes, tuple[DecodedImage, int]]] = deque(
            maxlen=NUM_CACHED_IMAGES
        )
        self._cache_lock = threading.Lock()
        self._batch_size = batch_size
        # A group must not be so large that threads find none: `batches` loads several batches.
        share = (1 + PREFETCH_BATCHES) * batch_size // (4 * num_cpus())
        self._group_rows = max(1, min(GROUP_ROWS, share))
        # The profiler's function takes 7 µs even while nothing is profiled.
        self._span: Callable[[str], contextlib.AbstractContextManager[object]] = (
            record_function if is_profiled else _no_span
        )
        self._pinned = device is not None and device.type == "cuda"
        self._device_decoder: DeviceDecoder | None = None
        if decoding.device_share is not None and device is not None:
            self._device_decoder = DeviceDecoder(decoding.preprocess, device)
        self._device_thread = ReplaceableThreadPool(1, None, "featx-on-device")
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Loader:
        if self._device_decoder is not None:
            self._stack.enter_context(self._device_thread)
        self._stack.enter_context(self._decoder)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def warnings(self) -> dict[str, int]:
        """Reason -> number of images with this warning of their decoder, so far."""
        return dict(self._decoder.warnings.counts)

    def batches(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Batch]]:
        """Load the batches of some parts in order; a batch never crosses a part.

        Args:
            parts: parts to load.

        Yields:
            The part and one of its batches, (B, 3, H, W). The last batch of a part is filled up
            with zeros.

        Raises:
            RunError: reading images fails repeatedly, or memory is exhausted.
        """
        waiting: deque[tuple[Part, Callable[[], Batch]]] = deque()
        spans = (
            (part, start, min(self._batch_size, part.stop - start))
            for part in parts
            for start in range(part.start, part.stop, self._batch_size)
        )
        for part, start, count in spans:
            # Batches finish in any order; the queue hands them out in the order of the rows.
            waiting.append((part, self._begin(start, count)))
            if len(waiting) > PREFETCH_BATCHES:
                part, finished = waiting.popleft()
                yield part, finished()
        while waiting:
            part, finished = waiting.popleft()
            yield part, finished()

    def load(self, rows: Iterable[int]) -> torch.Tensor:
        """Load some rows as one tensor.

        Returns:
            (n, 3, H, W), uint8 or normalised float32, without failed images; n may be 0.
        """
        found = [image for image in self.each(rows) if image is not None]
        none = torch.zeros((0, 3, *self._decoding.preprocess.crop), dtype=self._dtype)
        return torch.stack(found) if found else none

    def each(self, rows: Iterable[int]) -> Iterator[torch.Tensor | None]:
        """Load the image of each row in order.

        Yields:
            (3, H, W) uint8 or normalised float32, or None if the image fails.

        Raises:
            RunError: reading images fails repeatedly, or memory is exhausted.
        """
        waiting: deque[tuple[torch.Tensor, Future[EncodedJpeg | Failure | None]]] = deque()
        for row in rows:
            place = torch.empty((3, *self._decoding.preprocess.crop), dtype=self._dtype)
            waiting.append((place, self._decoder.submit(self._fill, row, place.numpy())))
            if len(waiting) > AHEAD_ROWS:
                yield _unless_failed(*waiting.popleft())
        while waiting:
            yield _unless_failed(*waiting.popleft())

    def decode_crash_list(self) -> None:
        """Decode images that were in flight when a process died, each in a child process.

        Raises:
            RunError: reading images fails repeatedly.
        """
        self._decoder.decode_crash_list(self._listing.keys)

    @property
    def _dtype(self) -> torch.dtype:
        """float32 if the reference transform normalises, otherwise uint8."""
        return torch.float32 if self._decoding.reference else torch.uint8

    def _begin(self, start: int, count: int) -> Callable[[], Batch]:
        """Start loading a batch.

        Args:
            start: first row.
            count: number of rows, at most B.

        Returns:
            A function that waits for the batch and returns it.
        """
        shape = (self._batch_size, 3, *self._decoding.preprocess.crop)
        # Every image is written to its place, zeros if it fails, so only padding is cleared here.
        images = torch.empty(shape, dtype=self._dtype, pin_memory=self._pinned)
        images[count:].zero_()
        sums = np.full(count, NO_IMAGE, dtype=np.uint64)
        batch = Batch(images, start, count, [], sums)
        places = images.numpy()
        for_device = [self._is_for_device(start + i) for i in range(count)]

        def groups(indices: list[int], are_for_device: bool) -> Groups:
            """Submit the images with these places in the batch, in groups."""
            calls = [(start + i, places[i], sums[i : i + 1], are_for_device) for i in indices]
            return [
                self._decoder.submit_group(self._fill, calls[i : i + self._group_rows])
                for i in range(0, len(calls), self._group_rows)
            ]

        if self._device_decoder is None:
            return functools.partial(_filled, batch, groups(list(range(count)), False))
        # The images of the GPU come first: it decodes them while the CPUs decode the others.
        taken = [i for i in range(count) if for_device[i]]
        prepared = groups(taken, True)
        others = groups([i for i in range(count) if not for_device[i]], False)
        # A thread of its own waits for the decoders and drives the GPU, so batches reach it in
        # order and the run loop is not held up.
        work = self._on_to_device, batch, taken, prepared, others
        return self._device_thread.submit(*work).result

    def _is_for_device(self, row: int) -> bool:
        """Whether the GPU decodes the image of a row, provided that it can."""
        if self._device_decoder is None or self._regions is not None:
            return False
        return self._decoding.is_for_device(self._listing.keys[row])

    def _on_to_device(
        self, batch: Batch, taken: list[int], prepared: Groups, others: Groups
    ) -> Batch:
        """Decode the images that were left for the GPU, and copy the whole batch there.

        Args:
            batch: batch whose CPU-decoded images are being filled in.
            taken: places in the batch of the images that are for the GPU.
            prepared: results of `_fill` for these, in their order.
            others: results of `_fill` for the other images.
        """
        device = self._device_decoder
        assert device is not None, "decoding on the device needs one"
        results = _results(prepared)
        encoded = {
            i: result
            for i, result in zip(taken, results, strict=True)
            if isinstance(result, EncodedJpeg)
        }
        started_at = time.perf_counter()
        with device.own_stream(), self._span("decode on the device"):
            crops = dict(zip(encoded, device.crops(list(encoded.values())), strict=True))
        took = time.perf_counter() - started_at
        places = batch.images.numpy()
        here = [
            self._decoder.submit(
                self._fill, batch.start + i, places[i], None, False, encoded[i].data
            )
            for i, crop in crops.items()
            if crop is None
        ]
        results += [future.result() for future in here] + _results(others)
        failures = [result for result in results if isinstance(result, Failure)]
        batch.failures = sorted(failures, key=lambda failure: failure.row)
        started_at = time.perf_counter()
        decoded = {i: crop for i, crop in crops.items() if crop is not None}
        with device.own_stream():
            batch.images = batch.images.to(device.device, non_blocking=True)
            if decoded:
                rows = torch.tensor(list(decoded), device=device.device)
                batch.images.index_copy_(0, rows, torch.stack(list(decoded.values())))
        self.times.add(on_device=took + time.perf_counter() - started_at)
        return batch

    def _fill(
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
            with self._span("read"):
                if data is None:
                    data = b"" if decoded_image is not None else self._decoder.read(key)
                    num_bytes = len(data)
                if decoded_image is None:
                    number = image_checksum(data)
                if checksum is not None:
                    checksum[0] = number
            read = time.perf_counter()
            with self._span("decode"):
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
        self.times.add(read - started_at, time.perf_counter() - read, num_bytes)
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
            if x.shape != expected or x.dtype != self._dtype:
                raise ValueError(
                    f"the transform gives {tuple(x.shape)} {x.dtype}, expected {expected} "
                    f"{self._dtype}"
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


def _results(groups: Groups) -> list[EncodedJpeg | Failure | None]:
    """Wait for groups of images; returns the result of each image, in their order."""
    return [result for group in groups for result in group.result()]


def _filled(batch: Batch, groups: Groups) -> Batch:
    """Wait until all images of a batch are in their places."""
    batch.failures = [result for result in _results(groups) if isinstance(result, Failure)]
    return batch


def _unless_failed(
    image: torch.Tensor, result: Future[EncodedJpeg | Failure | None]
) -> torch.Tensor | None:
    """The image after waiting for its result, or None if it failed."""
    return image if result.result() is None else None
