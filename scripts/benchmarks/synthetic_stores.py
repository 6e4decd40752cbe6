"""Stores with synthetic rows, to read from and to search in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from featx.store import Run, StoreSession, layout
from featx.store.pack import pack
from featx.types import LayerSpec, Listing, StoreHeader

Rows = Callable[[int, tuple[int, ...]], Iterator[np.ndarray]]

BLOCK_ROWS = 512
"""Rows that are generated, or written, at once."""


def synthetic_rows(num_rows: int, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Blocks of (BLOCK_ROWS, *shape) float16 in [0, 2), every row different."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1 << 14, (BLOCK_ROWS, *shape), dtype=np.uint16)
    for i, start in enumerate(range(0, num_rows, BLOCK_ROWS)):
        yield ((base + i) & 0x3FFF).view(np.float16)[: num_rows - start]


def clustered_rows(num_rows: int, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Blocks of (BLOCK_ROWS, D) float16 around 1000 centres on a bent surface of 32 dimensions."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((1000, 32), dtype=np.float32)
    rotation = rng.standard_normal((32, *shape), dtype=np.float32) / 5
    for start in range(0, num_rows, BLOCK_ROWS):
        count = min(BLOCK_ROWS, num_rows - start)
        points = centres[rng.integers(0, 1000, count)]
        points += 0.7 * rng.standard_normal(points.shape, dtype=np.float32)
        rows = np.maximum(points @ rotation, 0)
        rows += 0.05 * rng.standard_normal(rows.shape, dtype=np.float32)
        yield rows.astype(np.float16)


def make_run(num_rows: int, shape: tuple[int, ...]) -> tuple[Run, Listing]:
    """Make a run of one layer, and its listing."""
    spec = LayerSpec("layer", "layer", "output", "none", {}, shape, "float16", "float32")
    keys = np.array([b"%09d.jpg" % i for i in range(num_rows)])
    listing = Listing(keys, np.zeros(num_rows, np.int64), ("none",))
    header = StoreHeader({}, "", "made up", "none", "", "none", {})
    part_rows = layout.power_of_two_at_most(layout.PART_BYTES / spec.row_bytes)
    return Run(header, (spec,), layout.Grid(num_rows, part_rows), "none", {}), listing


def make_store(
    root: Path, num_rows: int, shape: tuple[int, ...], rows: Rows = synthetic_rows
) -> None:
    """Make a packed store with one layer, as extraction does."""
    run, listing = make_run(num_rows, shape)
    session, blocks = StoreSession(root, run, listing), rows(num_rows, shape)
    left = np.zeros((0, *shape), np.float16)
    with session.hold():
        for part in session.missing():
            builder = session.begin_part(part, run.layers)
            at = part.start
            while at < part.stop:
                left = left if len(left) else next(blocks)
                now, left = left[: part.stop - at], left[part.stop - at :]
                builder.add(at, {"layer": now}, [])
                at += len(now)
            session.commit(builder)
        pack(root)
        session.finish_packing()
