"""Loading of rows as batches in their order, with decoders that read and decode ahead.

Each row keeps its position. A failed image leaves zeros there and a Failure in the batch; no other
image takes its place.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from featx.base import num_cpus
from featx.images.decode_settings import PILLOW, DecodeSettings
from featx.images.decoder_channels import Job, LoaderTimes
from featx.images.decoder_pool import KEPT_BATCHES, DecoderPool
from featx.images.decoder_warnings import count_warnings
from featx.images.preprocess import centre_crop
from featx.images.row_loader import RowLoader, image_in_place
from featx.types import Batch, Failure, Listing, Part, Source, ViewSource

PREFETCH_BATCHES = 3
"""Number of batches that are loaded while one is computed; it bounds the memory of the loader."""

AHEAD_ROWS = 64
"""Number of images that `Loader.results` loads ahead."""

_SINGLE_ROWS = 8
"""Number of images that `Loader.results` loads together."""

_RUN, _LIBRARY = 0, 1
"""Numbers of the workers: as the run loads images, and by the library's own transform."""


class Loader:
    """Reads, decodes and crops the images of a run; a context manager that owns the decoders.

    Decoders are forked when the first image is asked for.

    Args:
        device: device of the model, or None for the CPU. For CUDA, batches are in page-locked
            memory, from which copies run asynchronously.

    Attributes:
        times: seconds and bytes of the decoders since `start_counting`.
    """

    def __init__(
        self,
        source: Source,
        listing: Listing,
        decoding: DecodeSettings,
        device: torch.device | None = None,
    ) -> None:
        self.num_decoders = decoding.workers or num_cpus()
        self._decoding = decoding
        self._warnings: Counter[str] = Counter()
        views = isinstance(source, ViewSource)
        # Pillow needs 4 bytes a pixel. An image of several rows may have so many that this
        # decides the memory of the run; that the decoders agree is left to tests there.
        jpeg = decoding.policy.jpeg if views else PILLOW
        library = replace(decoding, policy=replace(decoding.policy, jpeg=jpeg), reference=True)
        self._has_windows = decoding.preprocess.has_windows
        self._rows = RowLoader(source, listing, decoding)
        self._workers = [self._rows, RowLoader(source, listing, library)]
        self._reads_in_decoders = getattr(source, "reads_in_decoders", False)
        self._has_views = views
        # The place of an image of its own size is mostly unused, and must be neither locked nor
        # copied as a whole.
        on_cuda = device is not None and device.type == "cuda"
        self._pinned_for = device if on_cuda and not self._has_windows else None
        self._num_kept = None if self._has_windows else KEPT_BATCHES
        # An image of its own size may be large: each decoder has one ahead.
        self._prefetch = self.num_decoders if self._has_windows else PREFETCH_BATCHES
        self._rows_together = 1 if self._has_windows else _SINGLE_ROWS
        self._ahead_rows = self.num_decoders if self._has_windows else AHEAD_ROWS
        self._pool = self._new_pool()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.__exit__(*error)

    def _new_pool(self) -> DecoderPool:
        """Decoders that are not started yet."""
        pool = DecoderPool(
            self._workers,
            self.num_decoders,
            self._decoding.timeout_s,
            self._reads_in_decoders,
            self._has_views,
            self._pinned_for,
            self._num_kept,
        )
        pool.on_warnings = lambda row, messages: count_warnings(
            self._warnings, self._rows.image_key(row), messages
        )
        self.times = pool.times
        return pool

    def end_decoders(self) -> None:
        """End the decoders; others are forked when the next image is asked for.

        Decoders keep the memory that their parent had when they were forked, also what it has freed
        since, such as weights that were folded or converted.
        """
        self._pool.__exit__()
        self._pool = self._new_pool()

    @property
    def warnings(self) -> dict[str, int]:
        """Reason -> number of images with this warning of their decoder since `start_counting`."""
        return dict(self._warnings)

    def start_counting(self) -> None:
        """Count seconds, bytes and warnings from zero."""
        self.times = self._pool.times = LoaderTimes()
        self._warnings = Counter()

    def batches(self, parts: Iterable[Part], batch_size: int) -> Iterator[tuple[Part, Batch]]:
        """Load the batches of some parts in order; a batch never crosses a part.

        Args:
            batch_size: number B of images per batch; 1 with windows.

        Yields:
            The part and one of its batches, (B, C, H, W), with windows an image in its own size,
            and (1, C, 0, 0) if it failed. The last batch of a part is filled up
            with zeros. Images lie in memory that is shared with the decoders, which use it again
            when the tensor and its views are gone.

        Raises:
            RunError: reading images fails repeatedly, or memory is exhausted.
        """
        spans = (
            (part, start, min(batch_size, part.stop - start))
            for part in parts
            for start in range(part.start, part.stop, batch_size)
        )
        pending: deque[tuple[Part, Job]] = deque()
        try:
            while True:
                num_missing = self._prefetch + 1 - len(pending)
                for part, start, count in itertools.islice(spans, num_missing):
                    rows = np.arange(start, start + count)
                    pending.append((part, self._pool.begin(_RUN, rows, batch_size)))
                if not pending:
                    return
                # Batches finish in any order; the queue hands them out in the order of the rows.
                part, job = pending.popleft()
                yield part, self._batch_of(job)
        finally:
            for _, job in pending:
                self._pool.abandon(job)

    def load(self, rows: Iterable[int]) -> torch.Tensor:
        """Load some rows as one tensor.

        Returns:
            (n, C, H, W), uint8 or normalised float32, without failed images; n may be 0.
        """
        images = [each for each in self.results(rows) if not isinstance(each, Failure)]
        dtype = torch.float32 if self._decoding.reference else torch.uint8
        none = torch.zeros((0, *self._decoding.preprocess.shape), dtype=dtype)
        return torch.stack(images) if images else none

    def results(
        self, rows: Iterable[int], by_library: bool = False
    ) -> Iterator[torch.Tensor | Failure]:
        """Load the image of each row in order.

        Args:
            by_library: whether the library's own transform is used, and Pillow decodes.

        Yields:
            (C, H, W) uint8 or normalised float32, or the failure of the row. With windows the
            window in the centre of the image.

        Raises:
            RunError: reading images fails repeatedly, or memory is exhausted.
        """
        crop = self._decoding.preprocess.crop
        for result in self.whole_results(rows, by_library):
            if self._has_windows and not isinstance(result, Failure):
                yield centre_crop(result, crop).clone()
            else:
                yield result

    def whole_results(
        self, rows: Iterable[int], by_library: bool = False
    ) -> Iterator[torch.Tensor | Failure]:
        """Load as `results`; with windows images in their own size."""
        worker = _LIBRARY if by_library else _RUN
        num_together, num_ahead = self._rows_together, self._ahead_rows // self._rows_together
        remaining = iter(rows)
        pending: deque[Job] = deque()
        try:
            while True:
                while len(pending) <= num_ahead:
                    chunk = np.array([*itertools.islice(remaining, num_together)])
                    if not len(chunk):
                        break
                    pending.append(self._pool.begin(worker, chunk, num_together))
                if not pending:
                    return
                job = pending.popleft()
                images = self._finish(job)[0][: len(job.rows)].clone()
                failure_of = {failure.row: failure for failure in job.failures}
                for image, row in zip(images, job.rows.tolist(), strict=True):
                    yield failure_of.get(row, image)
        finally:
            for job in pending:
                self._pool.abandon(job)

    def _batch_of(self, job: Job) -> Batch:
        """The batch of a job. Nothing else may refer to its images, whose memory is used again."""
        images, checksums = self._finish(job)
        count = len(job.rows)
        images[count:].zero_()
        return Batch(images, int(job.rows[0]), count, job.failures, checksums, job.damaged)

    def _finish(self, job: Job) -> tuple[torch.Tensor, npt.NDArray[np.uint64]]:
        """Wait for a job. Returns (B, C, H, W) images in shared memory, and checksums."""
        images, checksums = self._pool.finish(job)
        if self._has_windows:  # the image in the only place, in its own size
            images = image_in_place(images[0], self._decoding.preprocess.shape[0])[None]
        return images, checksums
