"""Places of tokens as attributes of a dataset and as an entry of featx.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from featx.types import TokenGeometry

_NAMES = ("prefix_tokens", "class_token", "token_grid", "input_size")


def geometry_values(geometry: TokenGeometry | None) -> dict[str, Any]:
    """Entries of a token geometry by name, as JSON types; empty without a geometry."""
    if geometry is None:
        return {}
    return {
        "prefix_tokens": geometry.prefix_tokens,
        "class_token": int(geometry.has_class_token),
        "token_grid": list(geometry.grid),
        "input_size": list(geometry.input_size),
    }


def geometry_of(values: Mapping[str, Any]) -> TokenGeometry | None:
    """Token geometry from its entries, or None if they are missing.

    Args:
        values: attributes of a dataset, or an entry of featx.json; other names are ignored.

    Raises:
        ValueError, TypeError: an entry is missing or impossible.
    """
    if not any(name in values for name in _NAMES):
        return None
    if missing := [name for name in _NAMES if name not in values]:
        raise ValueError(f"its tokens lack {', '.join(missing)}")
    rows, columns = (int(number) for number in values["token_grid"])
    height, width = (int(number) for number in values["input_size"])
    prefix = int(values["prefix_tokens"])
    if prefix < 0 or min(rows, columns, height, width) < 1:
        raise ValueError(f"its tokens are {prefix} and {rows} x {columns} of {height} x {width}")
    return TokenGeometry(prefix, bool(values["class_token"]), (rows, columns), (height, width))
