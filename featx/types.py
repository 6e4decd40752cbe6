"""Types that travel through featx, from the listing of a data set to the store.

    Source.listing() -> Listing                       which images, in which order
    Loader           -> Batch                         (B, 3, H, W) images and the failures of rows
    Engine.rows(Batch.images) -> BatchRows            {layer: (B, ...)} reduced features in the
                                                      store's dtype, and which are not finite
    PartBuilder      -> one committed Part            rows [start, stop) of the listing
    FeatureStore     -> rows, by position or by key

Data flows in this direction only. This module imports numpy only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]
"""Array whose dtype depends on the layer, the column or the image."""

Json = Mapping[str, Any]
"""JSON object whose entries are read by their names: a result, a summary, a header of a file."""


class Status(IntEnum):
    """Status of a row; the numbers are part of the store format."""

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
    DAMAGED_AND_IMAGE_GONE = 11
    """Lost with a damaged chunk of the store, and its image is not there any more."""
    IMAGE_DAMAGED = 12
    """Accepted although the image is damaged: the row has features of what its decoder made."""
    ABSENT = 255

    @property
    def label(self) -> str:
        """Name for people: 'decode error'."""
        return self.name.lower().replace("_", " ")

    @property
    def has_features(self) -> bool:
        """Whether rows with this status have features."""
        return self in (Status.OK, Status.IMAGE_DAMAGED)


def with_features(status: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """(N,) whether rows have features, of their (N,) statuses."""
    mask: npt.NDArray[np.bool_] = (status == Status.OK) | (status == Status.IMAGE_DAMAGED)
    return mask


def rows_by_label(labels: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Rows of each label that occurs, in ascending order of labels and of rows.

    They come from one sort: a comparison with each label takes labels x rows.
    """
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1) if len(labels) else []


def combined_status(
    before: npt.NDArray[np.uint8], now: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint8]:
    """(N,) status of rows after a later run, of their (N,) statuses before it and in it.

    A row that failed in one run has failed, and an image that was accepted though damaged stays
    one, whatever a later run made of it.
    """
    is_failed = ~with_features(before) & (before != Status.ABSENT)
    is_damaged = (before == Status.IMAGE_DAMAGED) & (now == Status.OK)
    status: npt.NDArray[np.uint8] = np.where(is_failed | is_damaged, before, now)
    return status


@dataclass(frozen=True)
class Listing:
    """Images of a data set in fixed order; row i of the store belongs to entry i.

    Attributes:
        keys: (N,) fixed-length bytes, unique, in bytewise order.
        labels: (N,) int64, indices into `classes`, -1 for rows without a label.
        classes: names of the C classes.
        skipped: reason -> number of files that were found and left out.
        content_tags: (N,) int64: numbers that change when the image behind a key changes, as
            far as the source knows without reading it (size, ...); None if it knows nothing.
        columns: name -> (N,) further values of each row, in bytewise order of the names: int64,
            float64 (NaN for missing values), bool, or fixed-length UTF-8 bytes (empty for missing
            values).
        warnings: sentences about values that are probably not meant so; a run logs them.
        label_note: what was looked for as labels if rows have none, or what else looks like labels
            and is not used; printed after the number of classes.
    """

    keys: npt.NDArray[np.bytes_]
    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    content_tags: npt.NDArray[np.int64] | None = None
    columns: Mapping[str, Array] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    label_note: str = ""

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all arrays."""
        tags = () if self.content_tags is None else (self.content_tags,)
        return sum(each.nbytes for each in (self.keys, self.labels, *tags, *self.columns.values()))

    def head(self, count: int) -> Listing:
        """Listing of the first `count` rows; classes keep their indices."""
        return self.take(slice(count))

    def sample(self, count: int) -> Listing:
        """Listing of `count` rows: equally many of each class, spread evenly over its rows.

        Rows without a label count as a class.
        """
        rows_of_class = rows_by_label(self.labels)
        chosen, left = [], min(count, len(self))
        # Small classes first, so that what they lack is shared by the larger ones.
        for number, rows in enumerate(sorted(rows_of_class, key=len)):
            share = min(len(rows), -(-left // (len(rows_of_class) - number)))
            chosen.append(rows[np.linspace(0, len(rows) - 1, share).astype(np.int64)])
            left -= share
        return self.take(np.sort(np.concatenate(chosen)))

    def take(self, rows: slice | npt.NDArray[np.int64]) -> Listing:
        """Listing of some rows; classes keep their indices."""
        return replace(
            self,
            keys=self.keys[rows],
            labels=self.labels[rows],
            content_tags=None if self.content_tags is None else self.content_tags[rows],
            columns={name: values[rows] for name, values in self.columns.items()},
        )


IMAGE_STATE = np.dtype([("size", "<i8"), ("mtime_ns", "<i8"), ("tag", "<i8")])
"""State of an image that a source knows without reading it; -1 for unknown values.

Size in bytes, modification time in nanoseconds since 1970, and a number for anything else that
changes with the image (ctime, ETag, offset).
"""

UNTOLD = np.array((-1, -1, -1), IMAGE_STATE)
"""State with no known value."""

NO_STATE = np.array((-2, -2, -2), IMAGE_STATE)
"""State of an image that does not exist; equal to the state of no image."""


@runtime_checkable
class Source(Protocol):
    """Data set: lists its images and reads them."""

    # An attribute `reads_in_decoders` may be True, if `read` also works in forks of the process
    # that has listed the images, because it uses no lock, connection or handle of that process.
    # Otherwise threads of that process read, and hand the bytes to the decoders.

    def listing(self) -> Listing:
        """List all images, in order; raises DataError if there are none."""

    def read(self, key: bytes) -> bytes:
        """Read the encoded bytes of one image.

        It is called in several threads, and in processes that have not called `listing`: a report,
        and a worker that got the source as a Python object, take the keys from the store. A source
        that was listed may in addition find out that the data set has changed since.

        Args:
            key: a key that `listing` returns, here or in another process.

        Raises:
            ImageFault: this image cannot be read (missing, empty).
            OSError: the environment fails (unmounted disk, I/O error), which says nothing about the
                image.
        """


@runtime_checkable
class Stateful(Protocol):
    """Source that knows, without reading images, whether they may have changed."""

    def states(self, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.void] | None:
        """Current states of some images.

        An image with an unchanged state counts as unchanged; the bytes of others are compared.

        Args:
            keys: (n,) keys that `listing` returned.

        Returns:
            (n,) IMAGE_STATE, with NO_STATE for images that do not exist; None if states are
            unknown.

        Raises:
            OSError: the environment fails.
        """


@runtime_checkable
class PathSource(Stateful, Protocol):
    """Source that looks for its images at paths that somebody else has written."""

    def place(self, key: bytes) -> str:
        """Where the image of a key is looked for, and how to look elsewhere; a clause."""


class Box(NamedTuple):
    """Rectangle in an upright image, in pixels; x is its left edge, y its top edge."""

    x: int
    y: int
    width: int
    height: int


class RandomCrop(NamedTuple):
    """Rectangle that torchvision's RandomResizedCrop would choose, by a seed of its own.

    Attributes:
        seed: number that decides the rectangle.
        scale: smallest and largest share of the area.
        ratio: smallest and largest quotient of width and height.
    """

    seed: int
    scale: Sequence[float]
    ratio: Sequence[float]


class View(NamedTuple):
    """What of an upright image a row shows, and how.

    Attributes:
        box: part of the image; None for all of it.
        orientation: EXIF orientation from which the part is turned; 1 leaves it as it is.
        crop: random crop of the part, which is resized to the input of the model; or None.
    """

    box: Box | None = None
    orientation: int = 1
    crop: RandomCrop | None = None


@runtime_checkable
class ViewSource(Protocol):
    """Source whose rows are boxes or views of images; `read` returns the bytes of the image."""

    def image_key(self, key: bytes) -> bytes:
        """Key of the image that a row shows."""

    def view(self, key: bytes) -> View:
        """View of the image that a row is."""


@runtime_checkable
class BoxReader(Protocol):
    """Source of images that reads boxes of them without decoding the whole image."""

    def read_box(self, image_key: bytes, box: Box) -> bytes:
        """Read a box as an encoded image of its size; raises as `Source.read`."""


class ImageFault(Exception):  # noqa: N818 - it is recorded, not reported as an error
    """Raised if an image cannot become a row; the loader records it as a failure.

    Args:
        status: reason.
        message: what happened.
        error: name of the original exception.
    """

    def __init__(self, status: Status, message: str, error: str = "ImageFault") -> None:
        super().__init__(message)
        self.status = status
        self.error = error

    @classmethod
    def of(
        cls, error: Exception, status: Status = Status.DECODE_ERROR, what: str = ""
    ) -> ImageFault:
        """Return the fault of an image that makes other code raise an exception.

        Args:
            status: status of the row.
            what: beginning of the message, before that of the exception.
        """
        text = " ".join(str(error).split())[:300] or "no message"
        return cls(status, what + text, type(error).__name__)


UNKNOWN_IMAGE, NO_IMAGE = 0, 1
"""Values in place of an image checksum.

UNKNOWN_IMAGE: none was recorded. NO_IMAGE: the data set returned no bytes (missing, empty).
"""


def image_checksum(data: bytes) -> int:
    """xxh3_64 of the bytes of an encoded image; never UNKNOWN_IMAGE or NO_IMAGE.

    32 bits would miss one changed image in 4 * 10^9.
    """
    from xxhash import xxh3_64_intdigest  # stores can be read without this package

    number = xxh3_64_intdigest(data)
    return number if number > NO_IMAGE else number + NO_IMAGE + 1


def count_different_images(
    checksums: npt.NDArray[np.uint64], others: npt.NDArray[np.uint64]
) -> int:
    """Count the pairs of images whose bytes are known to differ, of (n,) checksums of both."""
    are_known = (checksums > NO_IMAGE) & (others > NO_IMAGE)
    return int((are_known & (checksums != others)).sum())


@dataclass(frozen=True)
class Failure:
    """Failed row, as recorded in failures.csv.

    Attributes:
        error: name of the exception.
    """

    row: int
    key: bytes
    status: Status
    error: str
    message: str


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) of the listing, which are computed, committed and resumed as a whole."""

    index: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass
class Batch:
    """Consecutive rows on their way to the device; the shape is constant within a run.

    Attributes:
        images: (B, 3, H, W), normalised float32 with decode=reference, otherwise uint8 in [0, 255].
            Padding and failed rows are zero. Decoders use this memory again when the tensor and its
            views are gone, so copies to a device must have ended by then.
        start: first row of the listing in this batch.
        count: number of rows of the listing, at most B; the rest is padding.
        failures: failed rows among them.
        checksums: (count,) uint64, `image_checksum` of the bytes of each row's image, or None.
        damaged: rows whose images are damaged and were accepted.
    """

    images: torch.Tensor
    start: int
    count: int
    failures: list[Failure]
    checksums: npt.NDArray[np.uint64] | None = None
    damaged: Collection[int] = ()


ITEM_BYTES = {"float16": 2, "float32": 4, "bfloat16": 2}
"""Number types of a store and their size in bytes."""


@dataclass(frozen=True)
class LayerSpec:
    """Dataset of the store: what is captured where, and the form of its rows.

    Attributes:
        name: name of the dataset in /features.
        layer: dotted name of the module or operation.
        capture: 'output', 'input' or 'attention', or a gradient there; for job=attribute a
            description of the method.
        reduce: name of the reduction.
        reduce_args: parameters of the reduction.
        shape: shape of a row, without the batch dimension.
        dtype: number type of the store: 'float16', 'float32' or 'bfloat16'.
        compute_dtype: dtype of the layer's values before the conversion, such as 'bfloat16'.
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
        """Bytes of one row in the store, uncompressed."""
        return int(np.prod(self.shape, dtype=np.int64)) * ITEM_BYTES[self.dtype]


UNKNOWN_SIZE = (0, 0)
"""Size of the input of the network if the rows do not tell it, as a grid of windows."""


@dataclass(frozen=True)
class TokenGeometry:
    """Places of the tokens of a layer in the input of the network.

    Rows (T, C) are prefix tokens followed by patch tokens in row-major order. In a map, (C, H, W)
    or (H, W, C), each position is a patch token.

    Attributes:
        prefix_tokens: number of class and register tokens before the patch tokens.
        has_class_token: whether the first of them is a class token.
        grid: (rows, columns) of the patch tokens.
        input_size: (height, width) of the input of the network in pixels, or UNKNOWN_SIZE.
    """

    prefix_tokens: int
    has_class_token: bool
    grid: tuple[int, int]
    input_size: tuple[int, int]

    def channels_first(self, row_shape: tuple[int, ...]) -> bool | None:
        """Return whether a map is (C, H, W) rather than (H, W, C); None if the row is no map."""
        if len(row_shape) != 3 or self.grid not in (row_shape[1:], row_shape[:2]):
            return None
        return self.grid == row_shape[1:]


@dataclass(frozen=True)
class StoreHeader:
    """Header that every file of a run carries as root attributes.

    Attributes:
        fingerprint: name -> value (JSON types) of every setting that changes values.
        config: composed config as YAML, without secrets.
        weights_sha256: SHA-256 of its parameters.
        transform: preprocessing, as one readable line.
        versions: library -> version.
    """

    fingerprint: Json
    config: str
    model: str
    weights: str
    weights_sha256: str
    transform: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class ResumeState:
    """Choices with which an existing store or statistics were started; a resume keeps them.

    Attributes:
        resolved: name -> value of every `auto`.
        fingerprint: settings of the store that change values, those of the model at least.
        part_rows: rows per part of the layers that are resumed, or None for new layers.
        what: subject and verb for messages, such as 'the store was'.
        has_new_layers: whether no value of the layers to compute exists yet.
    """

    resolved: Json
    fingerprint: Json
    part_rows: int | None
    what: str = "the store was"
    has_new_layers: bool = False
