"""Loading of rows as batches in their order, with threads that read and decode ahead.

Each row keeps its position. A failed image leaves zeros there and a Failure in the batch; no other
image takes its place.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future

import numpy as np
import torch

from featx.base import ReplaceableThreadPool, num_cpus
from featx.images.decode import EncodedJpeg
from featx.images.decode_settings import DecodeSettings
from featx.images.fault_tolerant_decode import FaultTolerantDecoder
from featx.images.gpu_decode import DeviceDecoder
from featx.images.row_loader import LoaderTimes, RowLoader
from featx.types import (
    NO_IMAGE,
    Batch,
    Failure,
    Listing,
    Part,
    RegionSource,
    Source,
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

Groups = list[Future[list[EncodedJpeg | Failure | None]]]
"""Results of `RowLoader.fill` for groups of images."""


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
        self._rows = RowLoader(source, listing, decoding, self._decoder, self.times, is_profiled)
        self._batch_size = batch_size
        # A group must not be so large that threads find none: `batches` loads several batches.
        share = (1 + PREFETCH_BATCHES) * batch_size // (4 * num_cpus())
        self._group_rows = max(1, min(GROUP_ROWS, share))
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
        try:
            self._stack.close()
        finally:
            self._rows.close()

    @property
    def warnings(self) -> dict[str, int]:
        """Reason -> number of images with this warning of their decoder, so far."""
        return dict(self._decoder.warnings.counts)

    def batches(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Batch]]:
        """Load the batches of some parts in order; a batch never crosses a part.

        Args:
            parts: parts to load.

        Yields:
            The part and one of its batches, (B, C, H, W). The last batch of a part is filled up
            with zeros.

        Raises:
            RunError: reading images fails repeatedly, or memory is exhausted.
        """
        pending: deque[tuple[Part, Callable[[], Batch]]] = deque()
        spans = (
            (part, start, min(self._batch_size, part.stop - start))
            for part in parts
            for start in range(part.start, part.stop, self._batch_size)
        )
        for part, start, count in spans:
            # Batches finish in any order; the queue hands them out in the order of the rows.
            pending.append((part, self._begin(start, count)))
            if len(pending) > PREFETCH_BATCHES:
                part, get_batch = pending.popleft()
                yield part, get_batch()
        while pending:
            part, get_batch = pending.popleft()
            yield part, get_batch()

    def load(self, rows: Iterable[int]) -> torch.Tensor:
        """Load some rows as one tensor.

        Returns:
            (n, C, H, W), uint8 or normalised float32, without failed images; n may be 0.
        """
        images = [image for image in self.each(rows) if image is not None]
        none = torch.zeros((0, *self._decoding.preprocess.shape), dtype=self._rows.dtype)
        return torch.stack(images) if images else none

    def each(self, rows: Iterable[int]) -> Iterator[torch.Tensor | None]:
        """Load the image of each row in order.

        Yields:
            (C, H, W) uint8 or normalised float32, or None if the image fails.

        Raises:
            RunError: reading images fails repeatedly, or memory is exhausted.
        """
        for result in self.results(rows):
            yield None if isinstance(result, Failure) else result

    def results(self, rows: Iterable[int]) -> Iterator[torch.Tensor | Failure]:
        """Load the image of each row in order, or yield its failure; otherwise like `each`."""
        pending: deque[tuple[torch.Tensor, Future[EncodedJpeg | Failure | None]]] = deque()
        for row in rows:
            out = torch.empty(self._decoding.preprocess.shape, dtype=self._rows.dtype)
            pending.append((out, self._decoder.submit(self._rows.fill, row, out.numpy())))
            if len(pending) > AHEAD_ROWS:
                yield _image_or_failure(*pending.popleft())
        while pending:
            yield _image_or_failure(*pending.popleft())

    def decode_crash_list(self) -> None:
        """Decode images that were in flight when a process died, each in a child process.

        Raises:
            RunError: reading images fails repeatedly.
        """
        self._decoder.decode_crash_list(self._listing.keys)

    def _begin(self, start: int, count: int) -> Callable[[], Batch]:
        """Start loading a batch.

        Args:
            start: first row.
            count: number of rows, at most B.

        Returns:
            A function that waits for the batch and returns it.
        """
        shape = (self._batch_size, *self._decoding.preprocess.shape)
        # Every image is written to its place, zeros if it fails, so only padding is cleared here.
        images = torch.empty(shape, dtype=self._rows.dtype, pin_memory=self._pinned)
        images[count:].zero_()
        sums = np.full(count, NO_IMAGE, dtype=np.uint64)
        batch = Batch(images, start, count, [], sums)
        outs = images.numpy()
        for_device = [self._is_for_device(start + i) for i in range(count)]

        def submit_groups(indices: list[int], are_for_device: bool) -> Groups:
            """Submit the images with these places in the batch, in groups."""
            calls = [(start + i, outs[i], sums[i : i + 1], are_for_device) for i in indices]
            return [
                self._decoder.submit_group(self._rows.fill, calls[i : i + self._group_rows])
                for i in range(0, len(calls), self._group_rows)
            ]

        if self._device_decoder is None:
            return functools.partial(
                _wait_for_batch, batch, submit_groups(list(range(count)), False)
            )
        # The images of the GPU come first: it decodes them while the CPUs decode the others.
        gpu_indices = [i for i in range(count) if for_device[i]]
        gpu_results = submit_groups(gpu_indices, True)
        other_results = submit_groups([i for i in range(count) if not for_device[i]], False)
        # A thread of its own waits for the decoders and drives the GPU, so batches reach it in
        # order and the run loop is not held up.
        work = self._decode_on_device, batch, gpu_indices, gpu_results, other_results
        return self._device_thread.submit(*work).result

    def _is_for_device(self, row: int) -> bool:
        """Return whether the GPU decodes the image of a row, provided that it can."""
        if self._device_decoder is None or self._regions is not None:
            return False
        return self._decoding.is_for_device(self._listing.keys[row])

    def _decode_on_device(
        self, batch: Batch, gpu_indices: list[int], gpu_results: Groups, other_results: Groups
    ) -> Batch:
        """Decode the images of the GPU's share, and copy the whole batch to the device.

        Args:
            batch: batch whose CPU-decoded images are being filled in.
            gpu_indices: places in the batch of the images that are for the GPU.
            gpu_results: results of `RowLoader.fill` for these, in their order.
            other_results: results of `RowLoader.fill` for the other images.
        """
        device = self._device_decoder
        assert device is not None, "decoding on the device needs one"
        results = _results(gpu_results)
        encoded = {
            i: result
            for i, result in zip(gpu_indices, results, strict=True)
            if isinstance(result, EncodedJpeg)
        }
        started_at = time.perf_counter()
        with device.own_stream(), self._rows.span("decode on the device"):
            crops = dict(zip(encoded, device.crops(list(encoded.values())), strict=True))
        decode_s = time.perf_counter() - started_at
        outs = batch.images.numpy()
        cpu_futures = [
            self._decoder.submit(
                self._rows.fill, batch.start + i, outs[i], None, False, encoded[i].data
            )
            for i, crop in crops.items()
            if crop is None
        ]
        results += [future.result() for future in cpu_futures] + _results(other_results)
        failures = [result for result in results if isinstance(result, Failure)]
        batch.failures = sorted(failures, key=lambda failure: failure.row)
        started_at = time.perf_counter()
        decoded = {i: crop for i, crop in crops.items() if crop is not None}
        with device.own_stream():
            batch.images = batch.images.to(device.device, non_blocking=True)
            if decoded:
                rows = torch.tensor(list(decoded), device=device.device)
                batch.images.index_copy_(0, rows, torch.stack(list(decoded.values())))
        self.times.add(on_device_s=decode_s + time.perf_counter() - started_at)
        return batch


def _results(groups: Groups) -> list[EncodedJpeg | Failure | None]:
    """Wait for groups of images; returns the result of each image, in their order."""
    return [result for group in groups for result in group.result()]


def _wait_for_batch(batch: Batch, groups: Groups) -> Batch:
    """Wait until all images of a batch are in their places."""
    batch.failures = [result for result in _results(groups) if isinstance(result, Failure)]
    return batch


def _image_or_failure(
    image: torch.Tensor, future: Future[EncodedJpeg | Failure | None]
) -> torch.Tensor | Failure:
    """The image after waiting for its result, or its failure."""
    result = future.result()
    return result if isinstance(result, Failure) else image
