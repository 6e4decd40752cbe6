"""Reduction sample: k tokens or positions of a map, chosen by the key of the image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Lt

from featx.base import sampled_positions
from featx.config import Count, ReduceConfig, options
from featx.errors import ReduceError
from featx.layers.reductions.registry import REDUCTIONS, reduction_member
from featx.layers.reductions.row_layout import (
    KeyedReduction,
    Reduction,
    RowLayout,
    map_view,
    token_grid,
)

if TYPE_CHECKING:
    import torch

_DEFAULT_K = 16


@options("reduce")
class SampleOptions(ReduceConfig):
    """Options of reduce=sample."""

    name: str = "sample"
    k: Count | None = None
    """Number of tokens of each image; null takes 16."""
    candidates: Literal["patches", "all"] = "patches"
    """Tokens to choose from: patches, which leaves class and register tokens out, or all."""
    seed: Annotated[int, Ge(0), Lt(1 << 63)] = 0
    """Seed of the choice, which depends on it and on the key of the image alone."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of each image."""
        return _DEFAULT_K if self.k is None else self.k

    @property
    def args(self) -> dict[str, float | str]:
        """Number, candidates and seed."""
        return {"k": self.num_tokens, "candidates": self.candidates, "seed": self.seed}


@dataclass(frozen=True)
class TokenSample(KeyedReduction):
    """The function of reduce=sample for the rows of a layer.

    Attributes:
        view: function from the tensor of the layer to (B, T, C) tokens.
        first: index of the first candidate on the token axis.
        num_candidates: number of tokens to choose from.
        grid: (rows, columns) of the candidates in the image; (0, 0) if they are no grid.
        k: number of tokens to choose.
        seed: seed of the choice.
    """

    view: Reduction
    first: int
    num_candidates: int
    grid: tuple[int, int]
    k: int
    seed: int

    def __call__(self, x: torch.Tensor, keys: Sequence[bytes] = ()) -> torch.Tensor:
        """Return (B, k, C) tokens in the order of the token axis."""
        import torch

        padded = [*keys, *[b""] * (len(x) - len(keys))]
        chosen = sampled_positions(padded, self.seed, self.num_candidates, self.k)
        tokens = self.view(x)
        places = torch.from_numpy(chosen + self.first).to(tokens.device)
        return tokens.gather(1, places[:, :, None].expand(-1, -1, tokens.shape[2]))

    @property
    def bound_args(self) -> dict[str, float | str]:
        """Candidates of the layer, from which the positions of any row follow."""
        rows, columns = self.grid
        found: dict[str, float | str] = {"first": self.first, "num_candidates": self.num_candidates}
        return {**found, "rows": rows, "columns": columns} if rows else found


def _sample(config: SampleOptions, rows: RowLayout) -> Reduction:
    """Return k tokens per image; see `featx.base.sampled_positions`."""
    if len(rows.shape) not in (2, 3):
        raise ReduceError(
            f"reduce=sample does not fit {rows.layer}: its rows have shape {rows.shape}, expected "
            "tokens (T, C) or a map."
        )
    k = config.num_tokens
    sample = (_of_map if len(rows.shape) == 3 else _of_tokens)(config, rows)
    if k > sample.num_candidates:
        raise ReduceError(
            f"reduce=sample does not fit {rows.layer}: reduce.k={k} is more than its "
            f"{sample.num_candidates} tokens. Give a smaller reduce.k."
        )
    return sample


def _of_map(config: SampleOptions, rows: RowLayout) -> TokenSample:
    """Return the sample of the positions of a map, in row-major order."""
    import torch

    to_map = map_view("sample", rows)
    # A meta tensor has a shape but no memory.
    num_rows, num_columns = to_map(torch.empty(1, *rows.shape, device="meta")).shape[2:]

    def view(x: torch.Tensor) -> torch.Tensor:
        return to_map(x).flatten(2).transpose(1, 2)

    grid = (num_rows, num_columns)
    return TokenSample(view, 0, num_rows * num_columns, grid, config.num_tokens, config.seed)


def _of_tokens(config: SampleOptions, rows: RowLayout) -> TokenSample:
    """Return the sample of the patch tokens, or of all tokens.

    Raises:
        ReduceError: patches are asked for, and the tokens are not prefix tokens and a grid.
    """
    prefix = rows.num_prefix_tokens if config.candidates == "patches" else 0
    grid = token_grid(rows.shape[0], rows.input_size, prefix)
    if grid is None and config.candidates == "patches":
        raise ReduceError(
            f"reduce=sample does not fit {rows.layer}: its {rows.shape[0]} tokens are not {prefix} "
            "prefix tokens and a grid of patches. Choose from all tokens with "
            "reduce.candidates=all."
        )
    count = rows.shape[0] - prefix
    return TokenSample(lambda x: x, prefix, count, grid or (0, 0), config.num_tokens, config.seed)


REDUCTIONS.register(
    reduction_member(
        "sample",
        "k tokens, or positions of a map, chosen by seed and key of the image.",
        _sample,
        SampleOptions,
    )
)
