"""Counts of numbers by size, over a stream of any length, in bounded memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_CHUNK = 1 << 18
"""Numbers that are counted at a time: their bin numbers stay in the processor's cache."""

_BITS = {
    "float16": (np.uint16, 6),
    "bfloat16": (np.uint16, 3),
    "float32": (np.uint32, 19),
}
"""dtype -> its bits as a whole number, and how many of the last ones do not count."""


class Histogram:
    """How often numbers of one dtype fall into bins that are the same for every stream.

    A bin is all numbers with the same leading bits: sign, exponent and 4 bits of the fraction. So
    there are 16 bins from one power of two to the next, 1024 of float16 and 8192 of the others, and
    finding a number's bin is a shift.

    Args:
        dtype: 'float16', 'bfloat16' (as uint16, as the store keeps it) or 'float32'.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._unsigned, self._shift = _BITS[dtype]
        self._num_bins = 1 << (8 * np.dtype(self._unsigned).itemsize - self._shift)
        self._counts = np.zeros(self._num_bins, dtype=np.int64)

    def add(self, values: npt.NDArray[Any]) -> None:
        """Count finite numbers, an array of any shape."""
        bits = values.view(self._unsigned).ravel(order="K")  # in any order, so without a copy
        for start in range(0, bits.size, _CHUNK):
            chunk = bits[start : start + _CHUNK]
            bins = np.right_shift(chunk, self._shift, dtype=np.intp)
            self._counts += np.bincount(bins, minlength=self._num_bins)

    def take(self) -> npt.NDArray[np.float64]:
        """What was counted so far, and begin anew.

        Returns:
            (k, 3): left edge, right edge and count of the bins that are not empty, in order.
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
        """The number nearest to 0 in each bin; past the last one the largest there is."""
        bits = (bins << self._shift).astype(self._unsigned)
        if self._dtype == "bfloat16":
            found, largest = (bits.astype(np.uint32) << 16).view(np.float32), np.float32
        else:
            largest = np.dtype(self._dtype).type
            found = bits.view(largest)
        return np.minimum(found.astype(np.float64), float(np.finfo(largest).max))
