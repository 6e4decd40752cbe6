"""Streaming statistics of a layer in float64: count, mean and scatter.

    PartMoments       the rows of one part, in batches of any size -> Moments

stats_file.py keeps the parts of a run as files, projection.py makes PCA and whitening of them.

Floating-point sums depend on their order, so the order is fixed: a tree over the rows of the
listing. A span of rows is cut at the row in it that is divisible by the highest power of two, down
to leaves of LEAF_ROWS rows, or one part, if that is smaller. A leaf is summed at once, and two
halves are merged, the lower rows first. Neither the batches the rows came in, nor the order of the
parts, nor where a run was interrupted or merged early, changes a bit of the result (same device,
threads and libraries).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from featx.errors import (
    ConfigError,
    NonFiniteError,
)
from featx.store import layout
from featx.types import LayerSpec, Part

KINDS = ("full", "diagonal")

MAX_FULL = 1 << 14
"""Most features of a full scatter matrix: 2 GiB of float64."""

LEAF_ROWS = 256
LEAF_BYTES = 64 << 20
"""A leaf of the tree: this many rows of the listing, fewer where they take more than the bytes."""

_NO_FLOAT64 = ("mps",)
"""Devices without float64; their rows are summed on the CPU."""


@dataclass(eq=False)
class Moments:
    """Count, mean and scatter of some rows: all that linear statistics need, in float64.

    Attributes:
        count: n, rows seen.
        mean: (D,) float64; zero where n is 0.
        scatter: sum over the rows of (x - mean)(x - mean)^T: (D, D) float64, exactly symmetric;
            or (D,), its diagonal only.
        smallest, largest: (D,) float64, of each feature; infinity and its negative where n is 0.
    """

    count: int
    mean: torch.Tensor
    scatter: torch.Tensor
    smallest: torch.Tensor
    largest: torch.Tensor

    @classmethod
    def empty(cls, dim: int, kind: str = "full", device: torch.device | str = "cpu") -> Moments:
        """The moments of no row; merged with others, it gives those, bit for bit.

        Raises:
            ConfigError: kind='full' of more than MAX_FULL features.
        """
        check_size(dim, kind)
        shape = (dim, dim) if kind == "full" else (dim,)
        options = _float64_on(torch.device(device))
        infinity = torch.full((dim,), math.inf, **options)
        zeros = torch.zeros(dim, **options), torch.zeros(shape, **options)
        return cls(0, *zeros, infinity, -infinity)

    @classmethod
    def of(cls, rows: torch.Tensor, kind: str = "full") -> Moments:
        """The moments of (n, D) rows of any float dtype, summed in float64 on their device.

        Raises:
            ConfigError: the rows are no (n, D) floats, or too many features for kind='full'.
            NonFiniteError: a value is NaN or infinite, or its square is.
        """
        if rows.ndim != 2 or not rows.is_floating_point() or rows.shape[1] == 0:
            raise ConfigError(
                f"moments are taken of (n, D) rows of floats; got {tuple(rows.shape)} {rows.dtype}."
            )
        with plain_tensors():
            total = cls.empty(rows.shape[1], kind, rows.device)
            step = _rows_that_fit(rows.shape[1])
            for start in range(0, len(rows), step):
                block = rows[start : start + step].to(total.mean.device)
                block = block.to(torch.float64, copy=True)
                total = total.merge(_of_block(block, kind, range(start, start + len(block))))
        return total

    def update(self, rows: torch.Tensor) -> None:
        """Add (n, D) rows, in place."""
        total = self.merge(Moments.of(rows, self.kind))
        self.count, self.mean, self.scatter = total.count, total.mean, total.scatter
        self.smallest, self.largest = total.smallest, total.largest

    def merge(self, other: Moments) -> Moments:
        """The moments of the rows of both; neither is changed.

            d = mean_b - mean_a,  n = n_a + n_b
            mean = mean_a + d n_b / n,  scatter = scatter_a + scatter_b + d d^T n_a n_b / n

        T. F. Chan, G. H. Golub, R. J. LeVeque, Updating Formulae and a Pairwise Algorithm for
        Computing Sample Variances, COMPSTAT 1982, equation 2.1; for the scatter matrix of vectors
        as for the sum of squares of numbers.

        Raises:
            ConfigError: they are of different size or kind.
        """
        if other.scatter.shape != self.scatter.shape:
            raise ConfigError(
                f"moments of {self.dim} features ({self.kind}) and of {other.dim} ({other.kind}) "
                "cannot be merged."
            )
        if other.count == 0:
            return self
        if self.count == 0:
            return other
        count = self.count + other.count
        difference = other.mean.to(self.mean.device) - self.mean
        # outer(d, d) is symmetric to the bit; (w d) d^T would not be.
        scatter = _product(difference, self.kind).mul_(self.count * other.count / count)
        scatter.add_(self.scatter).add_(other.scatter.to(scatter.device))
        return Moments(
            count,
            self.mean + difference * (other.count / count),
            scatter,
            torch.minimum(self.smallest, other.smallest.to(scatter.device)),
            torch.maximum(self.largest, other.largest.to(scatter.device)),
        )

    @property
    def dim(self) -> int:
        """D, the number of features."""
        return len(self.mean)

    @property
    def kind(self) -> str:
        """'full' or 'diagonal'."""
        return "full" if self.scatter.ndim == 2 else "diagonal"

    @property
    def sha256(self) -> str:
        """The identity of count, mean and scatter, wherever they are kept."""
        identity = hashlib.sha256(self.count.to_bytes(8, "little"))
        for tensor in (self.mean, self.scatter):
            identity.update(np.ascontiguousarray(tensor.cpu().numpy().ravel(), dtype="<f8").data)
        return identity.hexdigest()

    @property
    def second_moment(self) -> torch.Tensor:
        """X^T X: (D, D) float64, or (D,), its diagonal."""
        return _product(self.mean, self.kind).mul_(self.count).add_(self.scatter)

    def covariance(self, ddof: int = 1) -> torch.Tensor:
        """(D, D) float64: scatter / (n - ddof).

        Raises:
            ConfigError: only the diagonal is there, or there are no more than ddof rows.
        """
        self.check_full("a covariance")
        return self.scatter / self._degrees(ddof)

    def variance(self, ddof: int = 1) -> torch.Tensor:
        """(D,) float64. Raises ConfigError where there are no more than ddof rows."""
        squares = self.scatter.diagonal() if self.kind == "full" else self.scatter
        return squares / self._degrees(ddof)

    def std(self, ddof: int = 1) -> torch.Tensor:
        """(D,) float64: the root of the variance."""
        return self.variance(ddof).sqrt()

    def check_full(self, what: str) -> None:
        """Raise ConfigError where only the diagonal of the scatter matrix is there."""
        if self.kind != "full":
            raise ConfigError(
                f"{what} needs the full scatter matrix; these moments hold its diagonal. "
                "Take them again with kind='full'."
            )

    def _degrees(self, ddof: int) -> int:
        if self.count <= ddof:
            raise ConfigError(
                f"a variance with ddof={ddof} needs more than {ddof} rows; there are {self.count}."
            )
        return self.count - ddof


def check_size(dim: int, kind: str, what: str = "a row") -> None:
    """Raise ConfigError unless moments of this kind can be held for `dim` features.

    Args:
        what: has so many features; begins the message.
    """
    if kind not in KINDS:
        raise ConfigError(f"there are no moments of kind {kind!r}; expected one of {KINDS}.")
    if kind == "full" and dim > MAX_FULL:
        raise ConfigError(
            f"{what} has {dim} features: their scatter matrix would take {8 * dim**2 / 2**30:.1f} "
            f"GiB; at most {MAX_FULL} features (2 GiB) are taken. Reduce the layer first "
            "(reduce=avg), take each position as a row, or keep variances only: kind='diagonal'."
        )


@contextlib.contextmanager
def plain_tensors() -> Iterator[None]:
    """No gradients are recorded, and what is made can be changed in place outside, too.

    Hooks run in inference mode, whose tensors cannot be changed outside of it.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


def _float64_on(device: torch.device) -> dict[str, Any]:
    """Options of a float64 tensor on a device, or on the CPU where the device has none."""
    home = torch.device("cpu") if device.type in _NO_FLOAT64 else device
    return {"dtype": torch.float64, "device": home}


def _rows_that_fit(width: int) -> int:
    return layout.power_of_two_at_most(LEAF_BYTES / (8 * width))


def _product(vector: torch.Tensor, kind: str) -> torch.Tensor:
    """v v^T, or its diagonal."""
    return torch.outer(vector, vector) if kind == "full" else vector * vector


def _of_block(x: torch.Tensor, kind: str, images: Sequence[int]) -> Moments:
    """The moments of (n, D) float64 rows, which are overwritten; two passes.

    Args:
        images: what errors call the rows, n / len(images) rows each.
    """
    if len(x) == 0:
        return Moments.empty(x.shape[1], kind, x.device)
    finite = x.isfinite()
    if not finite.all():
        row, feature = (int(i) for i in (~finite).nonzero()[0])
        image = images[row * len(images) // len(x)]
        raise NonFiniteError(f"row {image}: feature {feature} is {x[row, feature].item()}.")
    smallest, largest = x.amin(0), x.amax(0)
    # Rows less the first one: nothing is lost of values far from zero, constants give exactly 0.
    origin = x[0].clone()
    x -= origin
    shift = x.mean(0)
    x -= shift
    if kind == "full":
        scatter = (x.T @ x).triu_()  # a product of matrices need not be symmetric to the last bit
        scatter += scatter.triu(1).T
    else:
        scatter = x.square_().sum(0)
    if not scatter.isfinite().all():
        raise NonFiniteError(
            f"rows {images[0]} to {images[-1]}: their squares are beyond the range of float64."
        )
    return Moments(len(x), origin + shift, scatter, smallest, largest)


@dataclass(frozen=True)
class StatsLayer:
    """One layer whose statistics are taken.

    Attributes:
        spec: what is captured; spec.shape is that of an image's tensor before flattening.
        kind: 'full' or 'diagonal'.
        positions: how many rows an image gives: None for one, its whole tensor flattened; P where
            each of P spatial positions or tokens is a row.

    Raises:
        ConfigError: the scatter matrix would be too large, or positions do not fit the shape.
    """

    spec: LayerSpec
    kind: str = "full"
    positions: int | None = None

    def __post_init__(self) -> None:
        if self.positions is not None and math.prod(self.spec.shape) % self.positions:
            raise ConfigError(
                f"{self.spec.name}: a tensor of shape {self.spec.shape} has no {self.positions} "
                "positions."
            )
        what = f"{self.spec.name} of shape {self.spec.shape}"
        check_size(self.dim, self.kind, what if self.positions is None else f"a position of {what}")

    @property
    def rows_per_image(self) -> int:
        """Rows that one image gives."""
        return self.positions or 1

    @property
    def dim(self) -> int:
        """D, features of a row."""
        return math.prod(self.spec.shape) // self.rows_per_image

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of an image's tensor, as it may come to `PartMoments.add`."""
        if self.positions is not None:
            return ((self.positions, self.dim),)
        return (tuple(self.spec.shape), (self.dim,))

    @property
    def attributes(self) -> dict[str, Any]:
        """What the file says of it."""
        return {
            **layout.layer_attributes(self.spec),
            "shape": list(self.spec.shape),
            "row": "image" if self.positions is None else "position",
            "rows_per_image": self.rows_per_image,
            "kind": self.kind,
        }


class PartMoments:
    """The moments of one layer over the rows of one part, which come in order, in any batches.

    What is held on the device: a leaf of at most LEAF_BYTES, and one scatter matrix for each level
    of the tree below the part.
    """

    def __init__(self, part: Part, layer: StatsLayer) -> None:
        self.part = part
        self.layer = layer
        self._leaf_rows = min(LEAF_ROWS, _rows_that_fit(layer.rows_per_image * layer.dim))
        self._next = part.start
        self._buffer = torch.empty(0)
        self._kept: list[int] = []
        self._nodes: list[tuple[int, int, Moments]] = []

    def add(self, start: int, rows: torch.Tensor, failed: Collection[int] = ()) -> None:
        """Add the images [start, start + b) of the listing. The rows are copied.

        Args:
            start: the first one; the one after the last of the batch before.
            rows: (b, *spec.shape) or (b, D), of any float dtype, on any device; (b, P, D) where
                each position is a row.
            failed: images among them, by row of the listing, that are left out.

        Raises:
            NonFiniteError: a value of a row that did not fail is NaN or infinite.
        """
        name, stop = self.layer.spec.name, start + len(rows)
        assert start == self._next, f"row {start} came where row {self._next} was due"
        assert stop <= self.part.stop, "a batch crosses its part"
        assert all(start <= row < stop for row in failed), "a failure outside its batch"
        assert rows.is_floating_point(), f"{name} is {rows.dtype}"
        # Another order of the axes could be reshaped as well, and would mix features up unseen.
        assert tuple(rows.shape[1:]) in self.layer.shapes, f"{name} has shape {tuple(rows.shape)}"
        failed = frozenset(failed)
        with plain_tensors():
            while self._next < stop:
                leaf_stop = (self._next // self._leaf_rows + 1) * self._leaf_rows
                leaf_stop = min(leaf_stop, self.part.stop)
                self._fill(rows[self._next - start : leaf_stop - start], failed)
                if self._next == leaf_stop:
                    self._close_leaf(leaf_stop)

    def finish(self) -> Moments:
        """The moments of the part. All its rows must have come."""
        assert self._next == self.part.stop, f"row {self._next} of the part never came"
        *lower, (_, _, total) = self._nodes
        for _, _, node in reversed(lower):
            total = node.merge(total)
        return total

    def _fill(self, rows: torch.Tensor, failed: frozenset[int]) -> None:
        """Copy images into the leaf's buffer; all of them lie in one leaf."""
        images = range(self._next, self._next + len(rows))
        kept = [image for image in images if image not in failed]
        if len(kept) < len(rows):
            rows = rows[torch.tensor([i - self._next for i in kept], dtype=torch.long)]
        each = self.layer.rows_per_image
        if not len(self._buffer):
            most = min(self._leaf_rows, len(self.part)) * each
            self._buffer = torch.empty((most, self.layer.dim), **_float64_on(rows.device))
        place = len(self._kept) * each
        vectors = rows.reshape(-1, self.layer.dim).to(self._buffer.device)
        self._buffer[place : place + len(vectors)] = vectors
        self._kept += kept
        self._next = images.stop

    def _close_leaf(self, stop: int) -> None:
        """Sum the leaf up, and merge what is whole: two halves of an aligned power of two."""
        num_rows = len(self._kept) * self.layer.rows_per_image
        leaf = _of_block(self._buffer[:num_rows], self.layer.kind, self._kept)
        start = self._nodes[-1][1] if self._nodes else self.part.start
        self._nodes.append((start, stop, leaf))
        self._kept = []
        while len(self._nodes) > 1:
            (start, cut, lower), (_, stop, upper) = self._nodes[-2:]
            if not is_aligned(start, stop) or cut_row(start, stop) != cut:
                break
            self._nodes[-2:] = [(start, stop, lower.merge(upper))]


def cut_row(start: int, stop: int) -> int:
    """Where the tree cuts rows [start, stop): the row divisible by the highest power of two."""
    bits = (start ^ (stop - 1)).bit_length() - 1
    return (stop - 1) >> bits << bits


def is_aligned(start: int, stop: int) -> bool:
    """Whether [start, stop) is a power of two of rows, at a multiple of it."""
    size = stop - start
    return size & (size - 1) == 0 and start % size == 0
