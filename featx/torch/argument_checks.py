"""Checks of arguments that the classes of this package are given."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def check_whole_number(name: str, value: object, least: int) -> None:
    """Raise ValueError unless an argument is a whole number of at least `least`."""
    if not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name}={value!r}: expected a whole number of at least {least}.")


def check_whole_numbers(least: int, **arguments: int | None) -> None:
    """Raise ValueError unless each argument is a whole number of at least `least`, or None."""
    for name, value in arguments.items():
        if value is not None:
            check_whole_number(name, value, least)


def index_array(name: str, values: Any, size: int) -> npt.NDArray[np.int64]:
    """Distinct ascending indices of an axis, from a list of integers or a boolean mask."""
    array = np.asarray(values)
    if array.dtype == np.bool_ and array.shape == (size,):
        return np.flatnonzero(array)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"{name}: expected a list of integers or a mask of {size} truth values, and got an "
            f"array of {array.dtype} with shape {array.shape}."
        )
    if array.size and (array.min() < 0 or array.max() >= size):
        wrong = array[(array < 0) | (array >= size)][0]
        raise ValueError(f"{name}: expected numbers from 0 to {size - 1}, and got {wrong}.")
    return np.unique(array).astype(np.int64)
