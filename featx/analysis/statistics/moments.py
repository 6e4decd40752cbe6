"""Moments of rows, that is count, mean and scatter in float64, and norms of tokens; their merge.

part_moments.py sums the rows of a part in a fixed order, stats_file.py defines the files,
session.py merges the parts of a run, and covariance.py computes PCA and whitening.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.statistics.tokens import FENCES
from featx.base import float64_device, plain_tensors, rows_of_block
from featx.errors import ConfigError, NonFiniteError
from featx.store import layout
from featx.types import TokenGeometry

KINDS = ("full", "diagonal")

MAX_FULL = 1 << 14
"""Maximum number of features of a full scatter matrix: 2 GiB of float64."""

BINS_PER_OCTAVE = 64
"""Bins between a norm and twice as much; each is 1.1 % wide."""

EDGES: npt.NDArray[np.float64] = np.exp2(
    np.arange(-20 * BINS_PER_OCTAVE, 28 * BINS_PER_OCTAVE + 1) / BINS_PER_OCTAVE
)
"""Edges of the bins, from 2^-20 to 2^28. One bin more lies below them, and one above."""

NUM_BINS = len(EDGES) + 1

Counts = npt.NDArray[np.int64]


@dataclass(eq=False)
class Moments:
    """Count, mean and scatter of rows, which suffice for linear statistics, in float64.

    Attributes:
        count: n, the number of rows.
        mean: (D,) float64; zero if n is 0.
        scatter: sum over the rows of (x - mean)(x - mean)^T: (D, D) float64 and exactly symmetric,
            or its diagonal (D,).
        smallest: (D,) float64 minimum of each feature; infinity if n is 0.
        largest: (D,) float64 maximum of each feature; -infinity if n is 0.
        norms: norms of the tokens of the same images, if the layer has tokens; else None.
    """

    count: int
    mean: torch.Tensor
    scatter: torch.Tensor
    smallest: torch.Tensor
    largest: torch.Tensor
    norms: PositionNorms | None = None

    @classmethod
    def empty(cls, dim: int, kind: str = "full", device: torch.device | str = "cpu") -> Moments:
        """Return the moments of no rows, 'full' or 'diagonal'; a merge with others returns those
        unchanged. The device is the CPU if the given one has no float64. Raises ConfigError for
        full moments of more than MAX_FULL features.
        """
        check_size(dim, kind)
        shape = (dim, dim) if kind == "full" else (dim,)
        options = float64_on(torch.device(device))
        infinity = torch.full((dim,), math.inf, **options)
        zeros = torch.zeros(dim, **options), torch.zeros(shape, **options)
        return cls(0, *zeros, infinity, -infinity)

    @classmethod
    def of(cls, rows: torch.Tensor, kind: str = "full") -> Moments:
        """Compute the 'full' or 'diagonal' moments of rows (n, D) of any float dtype in float64, on
        their device if it has float64. Raises ConfigError if the rows are not (n, D) floats, or
        have too many features for kind='full', NonFiniteError if a value or its square is NaN or
        infinite.
        """
        if rows.ndim != 2 or not rows.is_floating_point() or rows.shape[1] == 0:
            raise ConfigError(
                f"moments are taken of (n, D) rows of floats; got {tuple(rows.shape)} {rows.dtype}."
            )
        with plain_tensors():
            total = cls.empty(rows.shape[1], kind, rows.device)
            step = rows_that_fit(rows.shape[1])
            for start in range(0, len(rows), step):
                block = rows[start : start + step].to(total.mean.device)
                block = block.to(torch.float64, copy=True)
                total = total.merge(moments_of_block(block, kind, range(start, start + len(block))))
        return total

    def merge(self, other: Moments) -> Moments:
        """Return the moments of the rows of both, without changing either. Raises ConfigError if
        their sizes or kinds differ.

            d = mean_b - mean_a,  n = n_a + n_b
            mean = mean_a + d n_b / n,  scatter = scatter_a + scatter_b + d d^T n_a n_b / n

        T. F. Chan, G. H. Golub, R. J. LeVeque, Updating Formulae and a Pairwise Algorithm for
        Computing Sample Variances, COMPSTAT 1982, equation 2.1, applied to vectors and their
        scatter matrix.
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
        norms = None
        if self.norms is not None and other.norms is not None:
            norms = self.norms.merge(other.norms)
        count = self.count + other.count
        difference = other.mean.to(self.mean.device) - self.mean
        # outer(d, d) is exactly symmetric, while (w d) d^T is not because of rounding.
        scatter = _outer_product(difference, self.kind).mul_(self.count * other.count / count)
        scatter.add_(self.scatter).add_(other.scatter.to(scatter.device))
        return Moments(
            count,
            self.mean + difference * (other.count / count),
            scatter,
            torch.minimum(self.smallest, other.smallest.to(scatter.device)),
            torch.maximum(self.largest, other.largest.to(scatter.device)),
            norms,
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
        """SHA-256 of count, mean and scatter, independent of the file that holds them."""
        identity = hashlib.sha256(self.count.to_bytes(8, "little"))
        for tensor in (self.mean, self.scatter):
            identity.update(np.ascontiguousarray(tensor.cpu().numpy().ravel(), dtype="<f8").data)
        return identity.hexdigest()

    @property
    def second_moment(self) -> torch.Tensor:
        """X^T X: (D, D) float64, or its diagonal (D,)."""
        return _outer_product(self.mean, self.kind).mul_(self.count).add_(self.scatter)

    def covariance(self, ddof: int = 1) -> torch.Tensor:
        """Return scatter / (n - ddof), (D, D) float64. Raises ConfigError if the moments are
        diagonal, or there are at most ddof rows.
        """
        self.check_full("a covariance")
        return self.scatter / self._degrees(ddof)

    def variance(self, ddof: int = 1) -> torch.Tensor:
        """Return the variance of each feature, (D,) float64. Raises ConfigError for at most ddof
        rows.
        """
        squares = self.scatter.diagonal() if self.kind == "full" else self.scatter
        return squares / self._degrees(ddof)

    def std(self, ddof: int = 1) -> torch.Tensor:
        """Return the standard deviation of each feature, (D,) float64, like `variance`."""
        return self.variance(ddof).sqrt()

    def check_full(self, subject: str) -> None:
        """Raise ConfigError unless the full scatter matrix was computed."""
        if self.kind != "full":
            raise ConfigError(
                f"{subject}: the full scatter matrix is needed, and only its diagonal was kept. "
                "Take the statistics again with stats.covariance=full."
            )

    def _degrees(self, ddof: int) -> int:
        if self.count <= ddof:
            raise ConfigError(
                f"a variance with ddof={ddof} needs more than {ddof} rows; there are {self.count}."
            )
        return self.count - ddof


@dataclass(frozen=True, eq=False)
class PositionNorms:
    """L2 norms of the tokens of a layer, or of the positions of a map.

    Attributes:
        positions: moments of the norm at each of T positions over the images (diagonal), prefix
            tokens first, then the patches in row-major order.
        histogram: (NUM_BINS,) int64 number of patch tokens in each bin of EDGES, a norm on an edge
            in the bin above it.
        tokens: places of the tokens.
    """

    positions: Moments
    histogram: Counts
    tokens: TokenGeometry

    def merge(self, other: PositionNorms) -> PositionNorms:
        """Return the norms of the images of both."""
        positions = self.positions.merge(other.positions)
        return PositionNorms(positions, self.histogram + other.histogram, self.tokens)

    def quantile(self, share: float) -> float:
        """Return the upper edge of the bin that the quantile of the patch tokens lies in.

        It is above the quantile by 1.1 % at most, for norms between 2^-20 and 2^28.
        """
        reached = self.histogram.cumsum() >= share * self.histogram.sum()
        return float(EDGES[min(int(reached.argmax()), len(EDGES) - 1)])

    @property
    def threshold(self) -> float:
        """Norm from which a patch token is an outlier.

        The first edge of a bin that is not below Q3 + 3 (Q3 - Q1), Tukey's outer fence as in
        `TokenNorms`, with the quartiles of `quantile`.
        """
        low, high = self.quantile(0.25), self.quantile(0.75)
        fence = high + FENCES * (high - low)
        return float(EDGES[min(int(np.searchsorted(EDGES, fence)), len(EDGES) - 1)])

    @property
    def outliers(self) -> int:
        """Number of patch tokens whose norm is `threshold` or more."""
        return int(self.histogram[int(np.searchsorted(EDGES, self.threshold)) + 1 :].sum())


def check_size(dim: int, kind: str, subject: str = "a row") -> None:
    """Check that moments of a kind can be held for `dim` features."""
    if kind not in KINDS:
        raise ConfigError(f"there are no moments of kind {kind!r}; expected one of {KINDS}.")
    if kind == "full" and dim > MAX_FULL:
        raise ConfigError(
            f"{subject} has {dim} features: their scatter matrix would take "
            f"{8 * dim**2 / 2**30:.1f} GiB; at most {MAX_FULL} features (2 GiB) are taken. Reduce "
            "the layer first (reduce=avg), take each position as a row "
            "(stats.observation=position), or keep variances only (stats.covariance=diagonal)."
        )


def float64_on(device: torch.device) -> dict[str, Any]:
    """Return the options of a float64 tensor on a device, or on the CPU if it has no float64."""
    return {"dtype": torch.float64, "device": float64_device(device)}


def rows_that_fit(width: int) -> int:
    """Return how many rows of a width fit into a block as float64: a power of two."""
    return layout.power_of_two_at_most(rows_of_block(8 * width))


def _outer_product(vector: torch.Tensor, kind: str) -> torch.Tensor:
    """Return v v^T, or its diagonal."""
    return torch.outer(vector, vector) if kind == "full" else vector * vector


def moments_of_block(x: torch.Tensor, kind: str, images: Sequence[int]) -> Moments:
    """Compute the moments of (n, D) float64 rows, which are overwritten, in two passes."""
    if len(x) == 0:
        return Moments.empty(x.shape[1], kind, x.device)
    finite = x.isfinite()
    if not finite.all():
        row, feature = (int(i) for i in (~finite).nonzero()[0])
        image = images[row * len(images) // len(x)]
        raise NonFiniteError(f"row {image}: feature {feature} is {x[row, feature].item()}.")
    smallest, largest = x.amin(0), x.amax(0)
    # The first row is subtracted before the mean: no precision is lost for values far from zero,
    # and constants give exactly 0.
    origin = x[0].clone()
    x -= origin
    shift = x.mean(0)
    x -= shift
    if kind == "full":
        scatter = (x.T @ x).triu_()  # a BLAS product need not be exactly symmetric
        scatter += scatter.triu(1).T
    else:
        scatter = x.square_().sum(0)
    if not scatter.isfinite().all():
        raise NonFiniteError(
            f"rows {images[0]} to {images[-1]}: their squares are beyond the range of float64."
        )
    return Moments(len(x), origin + shift, scatter, smallest, largest)
