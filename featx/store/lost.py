"""Rows that a store had when it was opened and has no more."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from featx.errors import StoreError
from featx.store.reader import FeatureStore


def refuse_lost_rows(
    store: FeatureStore, layer: str, rows: npt.NDArray[np.int64], values: npt.NDArray[Any]
) -> None:
    """Raise StoreError where rows that were ok have no values any more.

    A store whose files went looks for them anew, and what is not there then reads as NaN; a row
    that is ok never holds one.

    Args:
        store: the rows were read from.
        layer: of these values.
        rows: (n,) of the store, ok when it was opened.
        values: (n, ...) what was read of them.
    """
    if not values.size:
        return
    gone = np.isnan(values.reshape(len(rows), -1)[:, 0])
    if gone.any():
        raise StoreError(
            f"{store.root} has lost row {int(rows[gone][0])} of {layer} since it was opened. The "
            "command that made the store computes it again."
        )
