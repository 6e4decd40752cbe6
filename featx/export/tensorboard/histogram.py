"""Histogram of the values of a stream of any length, in constant memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_CHUNK = 1 << 18
"""Number of values that are counted at a time, so that their bin numbers stay in the CPU cache."""

_BITS = {
    "float16": (np.uint16, 6),
    "bfloat16": (np.uint16, 3),
    "float32": (np.uint32, 19),
}
"""dtype -> unsigned integer of the same size, and the number of low bits that a bin ignores."""


class Histogram:
    """Counts of values of one dtype in bins that are the same for every stream.

    A bin contains all values with the same leading bits: sign, exponent and 4 bits of the fraction.
    There are 16 bins between two powers of two, 1024 bins for float16 and 8192 for the other
    dtypes, and a shift finds the bin of a value.

    Args:
        dtype: 'float16', 'bfloat16' (as uint16, as in the store) or 'float32'.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._unsigned, self._shift = _BITS[dtype]
        self._num_bins = 1 << (8 * np.dtype(self._unsigned).itemsize - self._shift)
        self._counts = np.zeros(self._num_bins, dtype=np.int64)

    def add(self, values: npt.NDArray[Any]) -> None:
        """Count finite values, an array of any shape."""
        bits = values.view(self._unsigned).ravel(order="K")  # memory order, which needs no copy
        for start in range(0, bits.size, _CHUNK):
            chunk = bits[start : start + _CHUNK]
            bins = np.right_shift(chunk, self._shift, dtype=np.intp)
            self._counts += np.bincount(bins, minlength=self._num_bins)

    def take(self) -> npt.NDArray[np.float64]:
        """Return the counts so far, and reset them.

        Returns:
            (k, 3) float64: left edge, right edge and count of the bins that are not empty, in
            rising order.
        """
        half = self._num_bins // 2  # the sign is the first bit
        positive, negative = np.flatnonzero(self._counts[:half]), self._counts[half:].nonzero()[0]
        negative = negative[::-1]
        left = np.concatenate([-self._value(negative + 1), self._value(positive)])
        right = np.concatenate([-self._value(negative), self._value(positive + 1)])
        counts = self._counts[np.concatenate([negative + half, positive])]
        self._counts[:] = 0
        return np.stack([left, right, counts.astype(np.float64)], axis=1)

    def _value(self, bins: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the value nearest to 0 of each bin; beyond the last bin, the largest value."""
        bits = (bins << self._shift).astype(self._unsigned)
        if self._dtype == "bfloat16":
            found, largest = (bits.astype(np.uint32) << 16).view(np.float32), np.float32
        else:
            largest = np.dtype(self._dtype).type
            found = bits.view(largest)
        return np.minimum(found.astype(np.float64), float(np.finfo(largest).max))
