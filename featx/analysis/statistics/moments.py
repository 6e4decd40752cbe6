"""Count, mean and scatter of rows in float64, and how two of them are merged.

part_moments.py sums the rows of a part in one fixed order, stats_file.py keeps the parts of a run
as files, covariance.py makes PCA and whitening of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from featx.base.devices import float64_home, plain_tensors
from featx.errors import ConfigError, NonFiniteError
from featx.store import layout

KINDS = ("full", "diagonal")

MAX_FULL = 1 << 14
"""Most features of a full scatter matrix: 2 GiB of float64."""

BLOCK_BYTES = 64 << 20
"""Of float64 that are summed at once."""


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
        options = float64_on(torch.device(device))
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
            step = rows_that_fit(rows.shape[1])
            for start in range(0, len(rows), step):
                block = rows[start : start + step].to(total.mean.device)
                block = block.to(torch.float64, copy=True)
                total = total.merge(of_block(block, kind, range(start, start + len(block))))
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


def float64_on(device: torch.device) -> dict[str, Any]:
    """Options of a float64 tensor on a device, or on the CPU where the device has none."""
    return {"dtype": torch.float64, "device": float64_home(device)}


def rows_that_fit(width: int) -> int:
    """How many rows of so many features are summed at once: a power of two."""
    return layout.power_of_two_at_most(BLOCK_BYTES / (8 * width))


def _product(vector: torch.Tensor, kind: str) -> torch.Tensor:
    """v v^T, or its diagonal."""
    return torch.outer(vector, vector) if kind == "full" else vector * vector


def of_block(x: torch.Tensor, kind: str, images: Sequence[int]) -> Moments:
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
