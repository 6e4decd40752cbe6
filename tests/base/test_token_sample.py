"""Sampled positions equal a reference written from their definition, number by number."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
from scipy import stats

from featx.base import sampled_positions

MASK = (1 << 64) - 1


def reference(key: bytes, seed: int, n: int, k: int) -> list[int]:
    """The definition of the design, in Python's whole numbers."""
    h = int.from_bytes(hashlib.sha256(seed.to_bytes(8, "little") + key).digest()[:8], "little")
    found = []
    for i in range(n):
        z = (h + (i + 1) * 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        found.append((z ^ (z >> 31), i))
    return sorted(i for _, i in sorted(found)[:k])


def test_splitmix64_is_the_published_generator() -> None:
    """The first numbers of the public-domain splitmix64.c for the seed 1234567."""
    z, found = 1234567, []
    for _ in range(3):
        z = (z + 0x9E3779B97F4A7C15) & MASK
        y = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        y = ((y ^ (y >> 27)) * 0x94D049BB133111EB) & MASK
        found.append(y ^ (y >> 31))
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", [0, 7, (1 << 63) - 1])
def test_positions_are_those_of_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    keys = [rng.randbytes(rng.randint(0, 40)) for _ in range(400)]  # most are no UTF-8
    found = sampled_positions(keys, seed, 196, 16)
    assert found.tolist() == [reference(key, seed, 196, 16) for key in keys]


def test_fewer_positions_are_among_more_and_all_is_all() -> None:
    keys = [b"%d" % i for i in range(50)]
    few, more = sampled_positions(keys, 3, 49, 8), sampled_positions(keys, 3, 49, 16)
    assert all({*a} <= {*b} for a, b in zip(few.tolist(), more.tolist(), strict=True))
    assert np.array_equal(sampled_positions(keys, 3, 49, 49), np.tile(np.arange(49), (50, 1)))


def test_positions_are_uniform() -> None:
    counts = np.bincount(sampled_positions([b"%d" % i for i in range(5000)], 0, 49, 4).ravel())
    assert stats.chisquare(counts).pvalue > 1e-4
