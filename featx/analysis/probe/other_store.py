"""Another store whose rows are tested (probe.test_store)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.groups import row_groups
from featx.analysis.probe.labelled_rows import LabelledRows
from featx.errors import ConfigError, StoreMismatchError
from featx.store import FeatureStore

_SAME = ("weights_sha256", "transform")
"""Attributes that two stores must have in common."""
_SAME_OF_A_LAYER = ("layer", "capture", "reduce")
"""Attributes that a layer must have in common in two stores."""


def open_other_store(store: FeatureStore, path: str, layers: Sequence[str]) -> FeatureStore:
    """Open probe.test_store and check that its features are comparable."""
    other = FeatureStore(path, verify="rows")
    if other.root == store.root or other.attrs["fingerprint"] == store.attrs["fingerprint"]:
        raise ConfigError(
            f"probe.test_store={path} is the store that is trained on: its rows would be tested on "
            "themselves. Use probe.split."
        )
    wrong = [
        f"  {name}: {store.attrs[name]!r} and {other.attrs[name]!r}"
        for name in _SAME
        if store.attrs.get(name) != other.attrs.get(name)
    ]
    for layer in layers:
        mine, theirs = store[layer], other[layer]
        pairs: list[tuple[str, Any, Any]] = [("shape", mine.shape[1:], theirs.shape[1:])]
        pairs += [(name, mine.attrs.get(name), theirs.attrs.get(name)) for name in _SAME_OF_A_LAYER]
        wrong += [f"  {layer}, {name}: {a} and {b}" for name, a, b in pairs if a != b]
    if wrong:
        raise StoreMismatchError(
            f"features of {store.root} and {other.root} are not comparable:\n" + "\n".join(wrong)
        )
    return other


def groups_of_both(
    testing: LabelledRows,
    column: str | None,
    groups: npt.NDArray[np.int64] | None,
    num_training: int,
) -> npt.NDArray[np.int64] | None:
    """Return (n,) groups of training rows, then of another store's rows, or None without groups."""
    test_groups = row_groups(testing, column)
    if test_groups is None and groups is None:
        return None
    training_groups = np.arange(num_training) if groups is None else groups
    testing_groups = np.arange(len(testing.rows)) if test_groups is None else test_groups.of_row
    return np.concatenate([training_groups, testing_groups + training_groups.max() + 1])
