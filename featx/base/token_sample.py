"""Random positions that follow from a key and a seed alone, for samples of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GAMMA = 0x9E3779B97F4A7C15
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def sampled_positions(
    keys: Sequence[bytes], seed: int, num_positions: int, k: int
) -> npt.NDArray[np.int64]:
    """Choose k of n positions for each of B keys, without replacement: (B, k) int64, increasing.

    The chosen positions are those of the k smallest values of m(h + (i + 1) 0x9E3779B97F4A7C15)
    modulo 2^64, for i from 0 to n - 1, with ties in the order of i. m is the output function of
    splitmix64 (G. L. Steele, D. Lea, C. H. Flood, Fast Splittable Pseudorandom Number Generators,
    OOPSLA 2014), and h is the first 8 bytes, little-endian, of the SHA-256 of the seed (8 bytes,
    little-endian) followed by the key. A smaller k gives a subset of the positions of a larger one.
    """
    start = seed.to_bytes(8, "little")
    hashed = [hashlib.sha256(start + key).digest()[:8] for key in keys]
    h = np.frombuffer(b"".join(hashed), "<u8").astype(np.uint64)
    # Unsigned arithmetic of arrays is modulo 2^64.
    steps = np.arange(1, num_positions + 1, dtype=np.uint64) * np.uint64(_GAMMA)
    z = h[:, None] + steps
    for shift, factor in _STEPS:
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    z ^= z >> np.uint64(31)
    return np.sort(np.argsort(z, axis=1, kind="stable")[:, :k], axis=1)
