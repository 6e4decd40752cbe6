"""PCA, whitening and Fréchet distance from the statistics of a layer."""

from __future__ import annotations

import math
from typing import Any

import torch

from featx.analysis.statistics.moments import Moments
from featx.errors import ConfigError, counted
from featx.layers import Projection

MAX_SPECTRUM = 4096
"""Maximum number of features for which principal variances are computed for a table, which takes
some seconds."""


def principal_components(moments: Moments, k: int) -> Projection:
    """Compute the k orthonormal directions of largest variance, largest first.

    The sign of a direction makes its largest entry positive. Variances are divided by n - 1, as in
    scikit-learn.
    """
    variances, directions = _eigen(moments, "principal components")
    _check_k(moments, variances, k)
    return Projection(moments.mean.cpu(), directions[:k], variances[:k])


def whitening(
    moments: Moments, k: int | None = None, epsilon: float = 0.0, zca: bool = False
) -> Projection:
    """Compute the linear map after which features are uncorrelated with variance 1.

        PCA: y = (L + epsilon)^(-1/2) U^T (x - mean),  with covariance = U L U^T
        ZCA: y = U (L + epsilon)^(-1/2) U^T (x - mean)

    For ZCA, the whitening map nearest to the identity: A. J. Bell, T. J. Sejnowski, The
    "independent components" of natural scenes are edge filters, Vision Research 37(23), 1997.
    """
    if not 0 <= epsilon < math.inf:
        raise ConfigError(f"epsilon is {epsilon}; expected a number of at least 0.")
    variances, directions = _eigen(moments, "whitening")
    k = moments.dim if k is None else k
    _check_k(moments, variances, k, needs_variance=epsilon == 0)
    kept_directions = directions[:k]
    components = kept_directions / (variances[:k, None] + epsilon).sqrt()
    if zca:
        components = kept_directions.T @ components
    return Projection(moments.mean.cpu(), components, variances[:k])


def spread(moments: Moments) -> dict[str, object]:
    """Summarise the distribution of a layer's rows as JSON types. Return rows and features; mean
    (of the features' means), smallest and largest value; for two or more rows: total_variance,
    std_min and std_max; for full moments participation_ratio, which is (sum L)^2 / sum L^2 of the
    principal variances L, and for up to MAX_SPECTRUM features rank_me (see `rank_me`) and first,
    {10: share, 50: ..., 100: ...}, the share of the total variance in that many principal
    directions. Unknown values are None.
    """
    summary: dict[str, Any] = {"rows": moments.count, "features": moments.dim}
    unknown = ("mean", "smallest", "largest", "total_variance", "std_min", "std_max")
    summary |= dict.fromkeys((*unknown, "participation_ratio", "rank_me", "first"))
    if moments.count:
        summary["mean"] = float(moments.mean.mean())
        summary["smallest"] = float(moments.smallest.min())
        summary["largest"] = float(moments.largest.max())
    if moments.count < 2:
        return summary
    std = moments.std()
    total = float(std.square().sum())
    summary |= {"total_variance": total, "std_min": float(std.min()), "std_max": float(std.max())}
    if moments.kind == "full" and total > 0:
        entries = moments.scatter.ravel()
        trace = float(moments.scatter.diagonal().sum())
        summary["participation_ratio"] = trace**2 / float(entries @ entries)
        if moments.dim <= MAX_SPECTRUM:
            variances = torch.linalg.eigvalsh(moments.covariance().cpu()).flip(0).clamp_(min=0)
            shares = (variances.cumsum(0) / variances.sum()).tolist()
            summary["first"] = {k: shares[k - 1] for k in (10, 50, 100) if k < moments.dim}
            summary["rank_me"] = rank_me(moments)
    return summary


def rank_me(moments: Moments) -> float | None:
    """Compute RankMe, the effective rank of the matrix of all rows, which are not centred. Return a
    number from 1 to min(n, D), or None if all rows are 0.

        exp(-sum_k p_k log p_k),  p_k = s_k / sum_j s_j,  with the singular values s of X (n, D)

    Q. Garrido, R. Balestriero, L. Najman, Y. LeCun, RankMe: Assessing the Downstream Performance of
    Pretrained Self-Supervised Representations by Their Rank, ICML 2023, equation 1, after O. Roy
    and M. Vetterli, The Effective Rank, EUSIPCO 2007. They add 1e-7 to each p against a logarithm
    of 0; here 0 log 0 is 0. The singular values are roots of the eigenvalues of X^T X, of which
    those below their rounding error count as 0.
    """
    moments.check_full("RankMe")
    squares = torch.linalg.eigvalsh(moments.second_moment.cpu()).flip(0).clamp_(min=0)
    floor = float(squares[0]) * moments.dim * torch.finfo(torch.float64).eps
    squares[squares <= floor] = 0
    squares[moments.count :] = 0
    total = squares.sqrt().sum()
    if not total > 0:
        return None
    shares = squares.sqrt() / total
    return float(torch.special.entr(shares).sum().exp())


def gaussian_distance(a: Moments, b: Moments) -> float:
    """Compute the squared Fréchet distance of two Gaussians with these means and covariances (FID).

        |mean_a - mean_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2))

    M. Heusel et al., GANs Trained by a Two Time-Scale Update Rule Converge to a Local Nash
    Equilibrium, NeurIPS 2017, equation 6. With C = F F^T, the trace of the root is the sum of the
    singular values of F_a^T F_b. No root of a matrix product is computed, so singular covariances
    (fewer rows than features) need no offset on the diagonal, and no value becomes complex.
    Covariances are divided by n - 1, as in the published code. Raises ConfigError if the numbers of
    features differ, there are fewer than two rows, or moments are diagonal.
    """
    if a.dim != b.dim:
        raise ConfigError(f"a distance between {a.dim} and {b.dim} features is not defined.")
    factors = []
    for moments in (a, b):
        variances, directions = _eigen(moments, "a Fréchet distance")
        factors.append(directions * variances[:, None].sqrt())
    root_trace = torch.linalg.svdvals(factors[0] @ factors[1].T).sum()
    traces = a.variance().sum().cpu() + b.variance().sum().cpu()
    shift = (a.mean.cpu() - b.mean.cpu()).square().sum()
    return max(0.0, float(shift + traces - 2 * root_trace))


def _eigen(moments: Moments, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute variances (D,), largest first, and directions (D, D), one per row.

    Both are float64 on the CPU.
    """
    moments.check_full(what)
    values, vectors = torch.linalg.eigh(moments.covariance().cpu())
    variances, directions = values.flip(0).clamp_(min=0), vectors.flip(1).T
    # n rows vary in at most n - 1 directions; variances of the others are rounding errors.
    variances[moments.count - 1 :] = 0
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    return variances, directions * largest.sign()


def _check_k(
    moments: Moments, variances: torch.Tensor, k: int, needs_variance: bool = True
) -> None:
    """Check that k directions exist and, if required, that they have variance."""
    if not 1 <= k <= moments.dim:
        raise ConfigError(f"k is {k}; expected 1 to {moments.dim}, the number of features.")
    rank = rank_of(variances, moments.dim)
    if needs_variance and k > rank:
        advice = f"Give reduce.k={rank} or less, or take" if rank else "Take"
        raise ConfigError(
            f"k is {k}, but the {moments.count} rows of {moments.dim} features vary in "
            f"{counted(rank, 'direction')} only. {advice} the statistics of more rows; "
            "reduce=whiten also takes reduce.epsilon with reduce.zca=true and no reduce.k."
        )


def rank_of(variances: torch.Tensor, dim: int) -> int:
    """Count the variances, the largest first, that are more than rounding errors."""
    floor = float(variances[0]) * dim * torch.finfo(torch.float64).eps
    return int((variances > floor).sum())
