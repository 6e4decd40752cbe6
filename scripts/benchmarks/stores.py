"""Rows of a store: reading by featx, h5py and numpy's memmap, and nearest neighbours."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

import featx
from benchmarks.measuring import Add, Case, compare, print_figures, timed
from benchmarks.synthetic_stores import BLOCK_ROWS, clustered_rows, make_store, synthetic_rows
from featx.analysis import LayerRows, LayerVectors
from featx.analysis.similarity import nearest_among
from featx.similarity import RowIndex

BATCH = 256
"""Rows of a batch."""


def read_shape(
    folder: Path, kind: str, shape: tuple[int, ...], size: int, runs: int
) -> dict[str, float]:
    """Compare readers of `size` bytes of rows of one shape: case -> featx divided by memmap."""
    num_rows = size // (2 * int(np.prod(shape)))
    make_store(folder / "store", num_rows, shape)
    mapped = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float16, (num_rows, *shape))
    for i, block in enumerate(synthetic_rows(num_rows, shape)):
        mapped[i * BLOCK_ROWS : (i + 1) * BLOCK_ROWS] = block
    mapped.flush()
    mapped = np.load(folder / "x.npy", mmap_mode="r")
    layer = featx.open(folder / "store")["layer"]
    rng = np.random.default_rng(1)
    print(f"\n{kind}: {num_rows} rows {shape} float16, {size / 1e9:.1f} GB")
    with h5py.File(folder / "store" / "features.h5", "r") as file:
        plain = file["features/layer"]

        def plain_rows(rows: np.ndarray) -> np.ndarray:
            """h5py wants increasing rows without repeats."""
            unique, inverse = np.unique(rows, return_inverse=True)
            read: np.ndarray = plain[unique.tolist()]
            return read[inverse]

        singles = rng.integers(0, num_rows, 2000).tolist()
        batches = [rng.integers(0, num_rows, BATCH) for _ in range(min(200, num_rows // BATCH))]
        slices = [slice(i, i + BATCH) for i in range(0, num_rows - BATCH + 1, BATCH)]
        ratios: dict[str, float] = {}
        for title, requests, each, by_h5py, num_by_h5py in (
            ("single rows at random", singles, 1, plain.__getitem__, 200),
            (f"batches of {BATCH} at random", batches, BATCH, plain_rows, 2),
            (f"an epoch in order, {BATCH} at once", slices, BATCH, plain.__getitem__, 400),
        ):

            def case(read: Callable[[Any], np.ndarray], chosen: list[Any], each: int) -> Case:
                assert np.array_equal(read(chosen[0]), np.array(mapped[chosen[0]]))

                def count() -> int:
                    for request in chosen:
                        read(request)
                    return len(chosen) * each

                return timed(count)

            cases = {
                "memmap": case(lambda request: np.array(mapped[request]), requests, each),
                "h5py": case(by_h5py, requests[:num_by_h5py], each),  # slow
                "featx": case(layer.__getitem__, requests, each),
            }
            ratios[title] = compare(title, cases, runs, "rows/s")["featx"]
    return ratios


def read(arguments: argparse.Namespace) -> None:
    """Random single rows, random batches, and an epoch in order, of vectors and of maps."""
    size = int(arguments.gigabytes * 1e9)
    for kind, shape in (("vectors", (2048,)), ("layer4 maps", (2048, 7, 7))):
        with tempfile.TemporaryDirectory(prefix="featx-read-") as folder:
            ratios = read_shape(Path(folder), kind, shape, size, arguments.runs)
        if arguments.json:
            for title, ratio in ratios.items():
                print_figures(f"{kind}, {title}", of_memmap=ratio)


def nearest(arguments: argparse.Namespace) -> None:
    """The 10 nearest of some rows, exactly, by faiss and by featx; then of all, by an index."""
    import faiss  # an extra

    faiss.omp_set_num_threads(torch.get_num_threads())
    with tempfile.TemporaryDirectory() as name:
        root = Path(name, "store")
        make_store(root, arguments.rows, (arguments.features,), clustered_rows)
        store = featx.open(root)
        queries = np.random.default_rng(1).permutation(arguments.rows)[: arguments.queries]
        rows = LayerRows(store, "layer", np.arange(arguments.rows))
        vectors = LayerVectors([rows], torch.device("cpu"), unit=True)
        matrix = vectors.block(0, len(vectors)).numpy()
        flat = faiss.IndexFlatIP(matrix.shape[1])
        flat.add(matrix)

        def by_faiss() -> np.ndarray:
            return flat.search(matrix[queries], 11)[0][:, 1:]

        def by_featx() -> np.ndarray:
            return nearest_among(vectors, queries, 10).scores

        assert np.allclose(by_faiss(), by_featx(), atol=1e-5), "not the same rows"
        cases = {
            "faiss": timed(lambda: len(by_faiss()), time.process_time),
            "featx": timed(lambda: len(by_featx()), time.process_time),
        }
        title = f"{len(queries)} of {len(matrix)} rows of {matrix.shape[1]}, exactly"
        compare(title, cases, arguments.runs, "rows per second of processor time")
        started_at = time.process_time()
        index = RowIndex(store, "layer", 0.99, standardise=False)
        index.nearest_rows()
        print(
            f"{index.recall:.2%} of the nearest rows by {index.num_probed_lists} of "
            f"{index.num_lists} lists, built and searched for all rows in "
            f"{time.process_time() - started_at:.1f} s of processor time"
        )


def add_commands(add: Add) -> None:
    """Register the commands of this module."""
    command = add("read", read)
    command.add_argument("--gigabytes", type=float, default=2, help="of each kind of rows")
    command.add_argument("--runs", type=int, default=5)
    command.add_argument("--json", action="store_true", help="also print the ratios as JSON")
    command = add("nearest", nearest)
    command.add_argument("--rows", type=int, default=100_000)
    command.add_argument("--features", type=int, default=512)
    command.add_argument("--queries", type=int, default=4096, help="rows of the exact search")
    command.add_argument("--runs", type=int, default=3)
