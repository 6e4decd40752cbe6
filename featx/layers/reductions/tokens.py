"""Reductions cls and patch_avg of the tokens of a transformer."""

from __future__ import annotations

from featx.config import ReduceConfig
from featx.errors import ReduceError
from featx.layers.reductions.registry import REDUCTIONS, reduction_member
from featx.layers.reductions.row_layout import Reduction, RowLayout, check_tokens, mean


def _cls(config: ReduceConfig, rows: RowLayout) -> Reduction:
    """Return the class token."""
    check_tokens("cls", rows)
    if not rows.has_class_token:
        raise ReduceError(
            f"reduce=cls does not fit {rows.layer}: the {rows.num_prefix_tokens} tokens in front "
            "of this backbone's patch tokens are register tokens, and it has no class token. "
            "Use reduce=patch_avg, which leaves them out, or avg, none or flatten."
        )
    return lambda x: x[:, 0]


def _patch_avg(config: ReduceConfig, rows: RowLayout) -> Reduction:
    """Return the mean over patch tokens."""
    check_tokens("patch_avg", rows)
    num_prefix_tokens = rows.num_prefix_tokens
    return lambda x: mean(x[:, num_prefix_tokens:], (1,))


REDUCTIONS.register(reduction_member("cls", "The class token.", _cls))
REDUCTIONS.register(
    reduction_member(
        "patch_avg", "Mean over the patch tokens, without class and register tokens.", _patch_avg
    )
)
