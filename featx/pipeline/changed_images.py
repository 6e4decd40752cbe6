"""Detects images that have changed since the rows of a store were computed from them.

As in the index of git, an image with unchanged size and modification time counts as unchanged;
the bytes of all others are compared. An image whose modification time is less than RECENT_NS away
from the moment of the comparison may change again without another time, so its state is not kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from featx.base import log_message, name_text, num_cpus
from featx.errors import counted
from featx.images import read_image
from featx.storage import s3_outage
from featx.store import UNSETTLED, Manifest, changed_states, layout, stored_image_checksums
from featx.types import (
    NO_IMAGE,
    UNKNOWN_IMAGE,
    ImageFault,
    Source,
    Stateful,
    ViewSource,
    image_checksum,
)

RECENT_NS = 2_000_000_000
"""Coarsest resolution of modification times in nanoseconds: 2 s, on FAT."""

_QUEUED_IMAGES = 1 << 12
"""Number of images that are queued for reading at a time."""

_SHOWN = 10
"""Number of keys that a message names."""


@dataclass(frozen=True)
class ImagesOfRun:
    """Images from which a run computed its rows.

    `first_row` is that of the run in the listing. `checksums` are (n,) uint64, UNKNOWN_IMAGE if
    none was recorded; `computed` is (n,) bool.
    """

    first_row: int
    checksums: npt.NDArray[np.uint64]
    computed: npt.NDArray[np.bool_]

    @property
    def rows(self) -> slice:
        """Rows of the run in the listing."""
        return slice(self.first_row, self.first_row + len(self.checksums))


@dataclass(frozen=True)
class ImageChanges:
    """Result of comparing the images of a store or of statistics.

    Attributes:
        changed: for each run, the rows that it computed from an image that has changed.
        rows: all of these rows, in ascending order.
        gone: rows whose image had bytes before and has none now.
        num_rows: number of computed rows whose images were checked, by state or by bytes.
        num_read: number of these rows whose bytes were compared.
        num_unknown: number of computed rows without a checksum of their image.
        states: (N,) IMAGE_STATE to store for the next comparison, or None if the data set knows no
            states.
        checksums: (N,) uint64 checksums of the images of the rows, to store with the states.
    """

    changed: tuple[npt.NDArray[np.int64], ...]
    rows: npt.NDArray[np.int64]
    gone: npt.NDArray[np.int64]
    num_rows: int
    num_read: int
    num_unknown: int
    states: npt.NDArray[np.void] | None
    checksums: npt.NDArray[np.uint64]


def image_changes(
    source: Source,
    keys: npt.NDArray[np.bytes_],
    root: Path,
    manifest: Manifest,
    present: npt.NDArray[np.bool_] | None = None,
    read_all: bool = False,
    announces: bool = True,
) -> ImageChanges:
    """Compare the images of a store with those its rows were computed from.

    Args:
        keys: (N,) keys of the rows of the store.
        present: (N,) bool, which keys the data set contains; None for all.
        read_all: compare the bytes of all images if the data set knows no states; otherwise such
            images are not compared.
        announces: log the number of images whose bytes are compared.

    Raises:
        RunError: the file system of the images keeps failing.
        StoreError: the store cannot be read now.
    """
    runs = _images_of_runs(root, manifest)
    return compare_images(source, keys, runs, root / layout.IMAGES, present, read_all, announces)


def compare_images(
    source: Source,
    keys: npt.NDArray[np.bytes_],
    runs: Sequence[ImagesOfRun],
    states_file: Path,
    present: npt.NDArray[np.bool_] | None = None,
    read_all: bool = False,
    announces: bool = True,
) -> ImageChanges:
    """Compare the images of a data set with those that runs computed their rows from.

    `states_file` has the states of the images at the last comparison; see `image_changes`.
    """
    now_ns = time.time_ns()  # taken before any state is read
    present = np.ones(len(keys), np.bool_) if present is None else present
    states = None
    if isinstance(source, Stateful):
        are_there = slice(None) if present.all() else present
        source_states = source.states(keys[are_there])
        if source_states is not None:
            states = np.full(len(keys), UNSETTLED)
            states[are_there] = source_states

    expected, mixed, computed = _expected(len(keys), runs)
    has_checksum = expected != UNKNOWN_IMAGE
    doubtful = np.full(len(keys), read_all)
    if states is not None:
        doubtful = changed_states(states_file, states, expected)
    doubtful = has_checksum & present & (doubtful | mixed)
    compared = np.flatnonzero(doubtful)
    current = expected.copy()
    current[compared] = _current_checksums(source, keys[compared], announces)
    current[has_checksum & ~present] = NO_IMAGE
    changed = []
    for run in runs:
        recorded, now = run.checksums, current[run.rows]
        is_other = (
            run.computed & (recorded != UNKNOWN_IMAGE) & (recorded != now) & (now != NO_IMAGE)
        )
        changed.append(np.flatnonzero(is_other) + run.first_row)
    rows = np.unique(np.concatenate(changed))
    gone = has_checksum & (expected != NO_IMAGE) & (current == NO_IMAGE)
    if states is not None:
        # A state is kept only if it stands for bytes that are known to be those of the row. All
        # others become UNSETTLED, which equals no state, so that the next comparison reads the
        # bytes again.
        written_at = states["mtime_ns"]
        unsettled = gone | ((written_at > now_ns - RECENT_NS) & (written_at < now_ns + RECENT_NS))
        unsettled[rows] = True
        states[unsettled] = UNSETTLED
    return ImageChanges(
        changed=tuple(changed),
        rows=rows,
        gone=np.flatnonzero(gone),
        num_rows=int(has_checksum.sum()) if states is not None or read_all else len(compared),
        num_read=len(compared),
        num_unknown=int((computed & ~has_checksum).sum()),
        states=states,
        checksums=expected,
    )


def row_checksums(root: Path, manifest: Manifest) -> npt.NDArray[np.uint64]:
    """Checksums of the images of all rows of a store, UNKNOWN_IMAGE for rows that it lacks."""
    return _expected(manifest.num_rows, _images_of_runs(root, manifest))[0]


def rows_of_two_images(root: Path, manifest: Manifest) -> npt.NDArray[np.int64]:
    """Rows whose layers were computed from different images, by the checksums in the store."""
    _, mixed, _ = _expected(manifest.num_rows, _images_of_runs(root, manifest))
    return np.flatnonzero(mixed)


def image_keys(source: Source, keys: npt.NDArray[np.bytes_]) -> list[bytes]:
    """Keys of the images that rows show, each once; boxes and views are rows of one image."""
    of_rows: list[bytes] = keys.tolist()
    if isinstance(source, ViewSource):
        of_rows = [source.image_key(key) for key in of_rows]
    return list(dict.fromkeys(of_rows))


def changed_images_text(path: Path, images: Sequence[bytes], what: str) -> str:
    """Message for images that differ from those that a result in `path` was computed from.

    `what` says what refresh=true does: a clause that starts with "computes".
    """
    return (
        f"{changed_text(len(images))} since {path} was computed: "
        f"{named_keys(images, len(images))}. The command of the run with "
        f"refresh=true {what}. Or put the images back, choose another out=DIR, or "
        "overwrite=true to delete what is there."
    )


def changed_text(count: int) -> str:
    """Clause that says how many images have changed."""
    return counted(count, "image has changed", "images have changed")


def gone_images_text(images: Sequence[bytes]) -> str:
    """Clause that names images that no longer exist."""
    count = len(images)
    named = named_keys(images, count)
    return f"{counted(count, 'image is', 'images are')} missing or empty now: {named}"


def changed_failures_text(images: Sequence[bytes]) -> str:
    """Message for failed images that have changed since."""
    count = len(images)
    return (
        f"{counted(count, 'failed image has changed', 'failed images have changed')} since: "
        f"refresh=true computes {'its row' if count == 1 else 'their rows'} again "
        f"({named_keys(images, count)})"
    )


def unknown_images_text(count: int) -> str:
    """Clause that says how many rows have no checksum of their image."""
    return (
        f"{counted(count, 'row does', 'rows do')} not say which image "
        f"{'it was' if count == 1 else 'they were'} computed from"
    )


def named_keys(keys: Iterable[bytes], count: int) -> str:
    """Keys for a message; beyond the first _SHOWN only their number."""
    shown = [name_text(key) for _, key in zip(range(_SHOWN), keys, strict=False)]
    return ", ".join(shown) + (f" and {count - len(shown)} more" if count > len(shown) else "")


def _images_of_runs(root: Path, manifest: Manifest) -> list[ImagesOfRun]:
    stored = stored_image_checksums(root, manifest)
    return [
        ImagesOfRun(run.grid.first_row, checksums, computed)
        for run, (checksums, computed) in zip(manifest.runs, stored, strict=True)
    ]


def _expected(
    num_rows: int, runs: Sequence[ImagesOfRun]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Combine the checksums of several runs."""
    expected = np.full(num_rows, UNKNOWN_IMAGE, dtype=np.uint64)
    mixed, computed = np.zeros(num_rows, np.bool_), np.zeros(num_rows, np.bool_)
    for run in runs:
        rows, sums = run.rows, run.checksums
        before = expected[rows]
        both = (before != UNKNOWN_IMAGE) & (sums != UNKNOWN_IMAGE)
        mixed[rows] |= both & (before != sums)
        computed[rows] |= run.computed
        before[~both] = np.maximum(before, sums)[~both]  # UNKNOWN_IMAGE is 0, so the known one wins
    return expected, mixed, computed


def _current_checksums(
    source: Source, keys: npt.NDArray[np.bytes_], announces: bool
) -> npt.NDArray[np.uint64]:
    """Checksums of the images as they are now, (n,) uint64.

    An image is read once, however many rows show it.
    """
    if not len(keys):
        return np.empty(0, dtype=np.uint64)
    image_of_key = np.arange(len(keys))
    if isinstance(source, ViewSource):
        image_keys = [source.image_key(key) for key in keys.tolist()]
        _, firsts, image_of_key = np.unique(image_keys, return_index=True, return_inverse=True)
        keys = keys[firsts]
    if announces:
        log_message(f"{counted(len(keys), 'image')} may have changed: the bytes are compared")

    def checksum(key: bytes) -> int:
        try:
            return image_checksum(read_image(source, key))
        except ImageFault:
            return NO_IMAGE

    current = np.empty(len(keys), dtype=np.uint64)
    with (
        s3_outage.waiting_limit(),
        ThreadPoolExecutor(num_cpus(), thread_name_prefix="featx-compare") as threads,
    ):
        for start in range(0, len(keys), _QUEUED_IMAGES):
            block = keys[start : start + _QUEUED_IMAGES].tolist()
            current[start : start + len(block)] = list(threads.map(checksum, block))
    checksums: npt.NDArray[np.uint64] = current[image_of_key]
    return checksums
