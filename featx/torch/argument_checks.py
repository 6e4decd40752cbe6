"""Check of numbers that the classes of this package are given."""

from __future__ import annotations

import numpy as np


def check_whole_number(name: str, value: object, least: int) -> None:
    """Raise ValueError unless an argument is a whole number of at least `least`."""
    if not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name}={value!r}: expected a whole number of at least {least}.")
