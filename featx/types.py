"""The things that travel through featx, from the listing to the store: the design on one page.

    Source.listing() -> Listing                       which images, in which order
    Loader           -> Batch                         (B, 3, H, W) and the faults of its rows
    Engine.run(Batch.images) -> {layer: (B, ...)}     reduced, in the store's dtype
    PartBuilder      -> one committed Part            rows [start, stop) of the listing
    FeatureStore     -> rows, by position or by key

Nothing flows back. This module imports numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


class Status(IntEnum):
    """What became of a row; the numbers are part of the store format."""

    OK = 0
    MISSING = 1
    EMPTY = 2
    UNSUPPORTED = 3
    DECODE_ERROR = 4
    TRUNCATED = 5
    TOO_LARGE = 6
    TRANSFORM_ERROR = 7
    NON_FINITE = 8
    TIMEOUT = 9
    CRASHES_DECODER = 10
    ABSENT = 255

    @property
    def label(self) -> str:
        """The name as people read it: 'decode error'."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True)
class Listing:
    """The images of a data set in their fixed order; row i of the store belongs to entry i.

    Attributes:
        keys: (N,) fixed-length bytes, unique, in bytewise order.
        labels: (N,) int64, the index into classes, -1 where there is none.
        classes: C names.
        skipped: what was seen and left out, reason -> count.
        marks: (N,) int64, a number for each row that is another one where its image is, as far as
            the source knows without reading it (its size, ...); None where it knows nothing.
        columns: name -> (N,) what else is known of each row, in bytewise order of the names: int64,
            float64 (NaN where a value is missing), bool, or fixed-length UTF-8 bytes (empty where
            a value is missing).
    """

    keys: npt.NDArray[np.bytes_]
    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    marks: npt.NDArray[np.int64] | None = None
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys)

    def head(self, count: int) -> Listing:
        """The first rows only; classes keep their numbers."""
        return replace(
            self,
            keys=self.keys[:count],
            labels=self.labels[:count],
            marks=None if self.marks is None else self.marks[:count],
            columns={name: values[:count] for name, values in self.columns.items()},
        )


IMAGE_STATE = np.dtype([("size", "<i8"), ("mtime_ns", "<i8"), ("tag", "<i8")])
"""What a source can tell of an image without reading it: bytes, time of change in ns since 1970,
and a number for whatever else changes with it (ctime, ETag, offset); -1 where it does not know."""

UNTOLD = np.array((-1, -1, -1), IMAGE_STATE)
"""The state where nothing is known."""

NO_STATE = np.array((-2, -2, -2), IMAGE_STATE)
"""The state of no image: none is equal to it."""


@runtime_checkable
class Source(Protocol):
    """A kind of data set: it lists and reads, nothing else."""

    def listing(self) -> Listing:
        """All images, in order. Raises DataError where there are none."""

    def read(self, key: bytes) -> bytes:
        """The encoded bytes of one image.

        Raises:
            ImageFault: this image cannot be had (missing, empty).
            OSError: the environment fails (mount gone, I/O error); says nothing of the image.
        """


@runtime_checkable
class Stateful(Protocol):
    """A Source that can tell without reading them whether images may have changed."""

    def states(self, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.void] | None:
        """(n,) IMAGE_STATE of the images of some keys, which `listing` gave, as they are now.

        An image whose state is what it was is taken to be the same; of others the bytes are
        compared. An image that is not there has NO_STATE. None where nothing can be told.

        Raises:
            OSError: the environment fails.
        """


class Box(NamedTuple):
    """A region of an upright picture, in pixels; x and y are its corner at the top left."""

    x: int
    y: int
    width: int
    height: int


@runtime_checkable
class RegionSource(Protocol):
    """A Source whose rows are regions of pictures; `read` gives the whole picture."""

    def picture(self, key: bytes) -> bytes:
        """The key of the picture that a row is cut from."""

    def box(self, key: bytes) -> Box:
        """The region that is a row."""


class ImageFault(Exception):  # noqa: N818 - it is recorded, not reported as an error
    """One image cannot become a row; caught at the loader's boundary and recorded.

    Attributes:
        status: the reason, as stored.
        error: name of the exception behind it.
    """

    def __init__(self, status: Status, message: str, error: str = "ImageFault") -> None:
        super().__init__(message)
        self.status = status
        self.error = error


UNKNOWN_IMAGE, NO_IMAGE = 0, 1
"""In place of a checksum: nothing was recorded; the data set gave no bytes (missing, empty)."""


def image_checksum(data: bytes) -> int:
    """The first 64 bits of BLAKE2b of an encoded image, never one of the two numbers above.

    32 bits would overlook one changed image in 4 * 10^9, which is not never; BLAKE2b is as fast as
    memory on machines without instructions for SHA, and hashlib lets other threads run.
    """
    number = int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
    return number if number > NO_IMAGE else number + NO_IMAGE + 1


@dataclass(frozen=True)
class Failure:
    """One failed row, as it stands in failures.csv."""

    row: int
    key: bytes
    status: Status
    error: str
    message: str


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) of the listing: the unit of work, of commit and of resume."""

    index: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass
class Batch:
    """Consecutive rows on their way to the device; the shape never changes within a run.

    Attributes:
        images: (B, 3, H, W), normalised float32 for decode=reference, else uint8 in [0, 255]; rows
            past count and failed rows are zero. For decode=gpu they are on that device.
        start: the first row of the listing in this batch.
        count: how many rows of the listing it holds, at most B.
        failures: the failed ones among them.
        checksums: (count,) uint64, `image_checksum` of the bytes that each row was made from.
    """

    images: torch.Tensor
    start: int
    count: int
    failures: list[Failure]
    checksums: npt.NDArray[np.uint64] | None = None


ITEM_BYTES = {"float16": 2, "float32": 4, "bfloat16": 2}
"""The number types of a store, and the bytes of one number."""


@dataclass(frozen=True)
class LayerSpec:
    """One dataset of the store: what is captured where, and what a row of it looks like.

    Attributes:
        name: the dataset's name below /features.
        layer: the module's dotted name.
        capture: 'output' or 'input' of that module, or a gradient there; of job=attribute a
            description of the method.
        reduce: the reduction's name; reduce_args its parameters.
        shape: of one row, without the batch dimension.
        dtype: of the store, 'float16', 'float32' or 'bfloat16'.
        compute_dtype: in which the layer gave it, e.g. 'bfloat16'.
    """

    name: str
    layer: str
    capture: str
    reduce: str
    reduce_args: Mapping[str, float | str]
    shape: tuple[int, ...]
    dtype: str
    compute_dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes one row takes in the store."""
        return int(np.prod(self.shape, dtype=np.int64)) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class StoreHeader:
    """What every file of one run says of itself: the root attributes of the format.

    Attributes:
        fingerprint: every setting that changes values, name -> value (JSON types only).
        config: the configuration as the user gave it, YAML.
        model, weights, weights_sha256: the backbone and the identity of its parameters.
        transform: the preprocessing, as one readable line.
        versions: library -> version.
    """

    fingerprint: Mapping[str, Any]
    config: str
    model: str
    weights: str
    weights_sha256: str
    transform: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class ResumeState:
    """What was decided when a store or statistics were begun; a resume decides nothing anew.

    Attributes:
        resolved: every `auto`, name -> value.
        part_rows: of the layers that are gone on with, None for layers that are new.
        what: was begun, for messages.
    """

    resolved: Mapping[str, Any]
    part_rows: int | None
    what: str = "the store was"
