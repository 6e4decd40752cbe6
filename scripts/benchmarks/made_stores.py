"""Stores with made-up rows, to read from and to search in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

PIECE_ROWS = 512
"""Rows that are made, or written, at once."""


def made_rows(num_rows: int, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Pieces of (PIECE_ROWS, *shape) float16 in [0, 2), every row another one."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1 << 14, (PIECE_ROWS, *shape), dtype=np.uint16)
    for i, start in enumerate(range(0, num_rows, PIECE_ROWS)):
        yield ((base + i) & 0x3FFF).view(np.float16)[: num_rows - start]


def clustered_rows(num_rows: int, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Pieces of (PIECE_ROWS, D) float16 around 1000 centres on a bent surface of 32 dimensions."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((1000, 32), dtype=np.float32)
    turned = rng.standard_normal((32, *shape), dtype=np.float32) / 5
    for start in range(0, num_rows, PIECE_ROWS):
        count = min(PIECE_ROWS, num_rows - start)
        places = centres[rng.integers(0, 1000, count)]
        places += 0.7 * rng.standard_normal(places.shape, dtype=np.float32)
        rows = np.maximum(places @ turned, 0)
        rows += 0.05 * rng.standard_normal(rows.shape, dtype=np.float32)
        yield rows.astype(np.float16)


def make_store(
    root: Path,
    num_rows: int,
    shape: tuple[int, ...],
    rows: Callable[[int, tuple[int, ...]], Iterator[np.ndarray]] = made_rows,
) -> None:
    """A packed store with one layer, made as extraction makes it."""
    from featx.store import layout
    from featx.store.manifest import Run
    from featx.store.pack import pack
    from featx.store.session import StoreSession
    from featx.store.writer import PartBuilder
    from featx.types import LayerSpec, Listing, StoreHeader

    spec = LayerSpec("layer", "layer", "output", "none", {}, shape, "float16", "float32")
    keys = np.array([b"%09d.jpg" % i for i in range(num_rows)])
    listing = Listing(keys, np.zeros(num_rows, np.int64), ("none",))
    header = StoreHeader({}, "", "made up", "none", "", "none", {})
    part_rows = layout.power_of_two_at_most(layout.PART_BYTES / spec.row_bytes)
    run = Run(header, (spec,), layout.Grid(num_rows, part_rows), "none", {})
    session = StoreSession(root, run, listing)
    with session.hold():
        pieces = rows(num_rows, shape)
        for part in session.missing():
            builder = PartBuilder(part, [spec])
            for start in range(part.start, part.stop, PIECE_ROWS):
                builder.add(start, {"layer": next(pieces)}, [])
            session.commit(builder)
        pack(root)
        session.after_packing()
