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
        self._unsigned, self._shift = _BITS[dtype]
        self._num_bins = 1 << (8 * np.dtype(self._unsigned).itemsize - self._shift)
        self._counts = np.zeros(self._num_bins, dtype=np.int64)
        bits = np.arange(self._num_bins // 2) << self._shift
        if dtype == "bfloat16":
            bits, dtype = bits << 16, "float32"
        real = np.dtype(dtype)
        magnitudes = bits.astype(f"u{real.itemsize}").view(real)
        # Beyond the largest number, the bits are those of infinity and NaN.
        largest = np.finfo(real).max
        magnitudes = np.where(np.isfinite(magnitudes), magnitudes, largest).astype(np.float64)
        magnitudes = np.append(magnitudes, largest)
        self._edges = np.concatenate([-magnitudes[:0:-1], magnitudes])

    def add(self, values: npt.NDArray[Any]) -> None:
        """Count finite values, an array of any shape."""
        bits = values.view(self._unsigned).ravel(order="K")  # memory order, which needs no copy
        for start in range(0, bits.size, _CHUNK):
            chunk = bits[start : start + _CHUNK]
            bins = np.right_shift(chunk, self._shift, dtype=np.intp)
            self._counts += np.bincount(bins, minlength=self._num_bins)

    def take(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Return the counts so far, and reset them.

        Returns:
            (k + 1,) edges and (k,) counts of bins in rising order; neighbouring bins without values
            are one bin. Both are empty if there are no values.
        """
        half = self._num_bins // 2  # the sign is the first bit
        counts = np.concatenate([self._counts[half:][::-1], self._counts[:half]])
        self._counts[:] = 0
        used = np.flatnonzero(counts)
        edges = np.union1d(used, used + 1)
        return self._edges[edges], counts[edges[:-1]]
