"""Rows and tokens of a store: by featx, h5py and numpy's memmap, and by DataLoader's workers."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import print_figures
from benchmarks.rounds import Add, Case, compare, timed
from benchmarks.synthetic_stores import make_store, synthetic_rows

BATCH = 256
"""Rows of a batch."""

TOKENS = (197, 768)
"""Tokens of an image, as a ViT-B of 224 pixels gives them, and their numbers."""


def write_memmap(path: Path, num_rows: int, shape: tuple[int, ...]) -> np.ndarray:
    """Write the rows of a synthetic store as one .npy file, and map it."""
    flat = np.lib.format.open_memmap(path, "w+", np.float16, (num_rows, *shape))
    done = 0
    for block in synthetic_rows(num_rows, shape):
        flat[done : done + len(block)] = block
        done += len(block)
    flat.flush()
    return np.load(path, mmap_mode="r")


def reader_cases(
    readers: dict[str, Callable[[Any], np.ndarray]],
    requests: list[Any],
    items_each: int,
    num_requests: dict[str, int] | None = None,
) -> dict[str, Case]:
    """Make a case of each reader, all with the same requests, after a comparison of what they read.

    Args:
        readers: name -> reads what one request asks for; the first is right.
        requests: arguments of the readers.
        items_each: number of rows or tokens of a request.
        num_requests: slow reader -> number of requests, instead of all.
    """
    expected = next(iter(readers.values()))(requests[0])

    def case(name: str, read: Callable[[Any], np.ndarray]) -> Case:
        assert np.array_equal(read(requests[0]), expected), f"{name} reads other values"
        chosen = requests[: (num_requests or {}).get(name, len(requests))]

        def count() -> int:
            for request in chosen:
                read(request)
            return len(chosen) * items_each

        return timed(count)

    return {name: case(name, read) for name, read in readers.items()}


def read_shape(folder: Path, kind: str, shape: tuple[int, ...], size: int, runs: int) -> dict:
    """Compare readers of rows of one shape, `size` bytes of them.

    Returns:
        Case -> speed of featx divided by that of numpy's memmap.
    """
    import h5py

    import featx

    num_rows = size // (2 * int(np.prod(shape)))
    make_store(folder / "store", num_rows, shape)
    mapped = write_memmap(folder / "x.npy", num_rows, shape)
    layer = featx.open(folder / "store")["layer"]
    rng = np.random.default_rng(1)
    print(f"\n{kind}: {num_rows} rows {shape} float16, {size / 1e9:.1f} GB")
    with h5py.File(folder / "store" / "features.h5", "r") as file:
        plain = file["features/layer"]

        def plain_rows(rows: np.ndarray) -> np.ndarray:
            """h5py wants increasing rows without repeats."""
            unique, inverse = np.unique(rows, return_inverse=True)
            return plain[unique.tolist()][inverse]

        singles = rng.integers(0, num_rows, 2000).tolist()
        batches = [rng.integers(0, num_rows, BATCH) for _ in range(min(200, num_rows // BATCH))]
        slices = [slice(i, i + BATCH) for i in range(0, num_rows - BATCH + 1, BATCH)]
        ratios: dict[str, float] = {}
        for title, requests, each, by_h5py, num_by_h5py in (
            ("single rows at random", singles, 1, plain.__getitem__, 200),
            (f"batches of {BATCH} at random", batches, BATCH, plain_rows, 2),
            (f"an epoch in order, {BATCH} at once", slices, BATCH, plain.__getitem__, 400),
        ):
            readers = {
                "memmap": lambda request: np.array(mapped[request]),
                "h5py": by_h5py,
                "featx": layer.__getitem__,
            }
            cases = reader_cases(readers, requests, each, {"h5py": num_by_h5py})
            ratios[title] = compare(title, cases, runs, "rows/s")["featx"]
    return ratios


def read(arguments: argparse.Namespace) -> None:
    """Random single rows, random batches, and an epoch in order, of vectors and of maps."""
    size = int(arguments.gigabytes * 1e9)
    for kind, shape in (("vectors", (2048,)), ("layer4 maps", (2048, 7, 7))):
        with tempfile.TemporaryDirectory(prefix="featx-read-", dir=arguments.folder) as folder:
            ratios = read_shape(Path(folder), kind, shape, size, arguments.runs)
        if arguments.json:
            for title, ratio in ratios.items():
                print_figures(f"{kind}, {title}", of_memmap=ratio)


def tokens(arguments: argparse.Namespace) -> None:
    """Random tokens by `take` and by numpy's memmap, and shuffled epochs from the page cache."""
    from featx.torch import TokenDataset

    num_rows = max(16, int(arguments.gigabytes * 1e9) // (2 * TOKENS[0] * TOKENS[1]))
    print(f"{num_rows} rows {TOKENS} float16, {num_rows * TOKENS[0]} tokens")
    with tempfile.TemporaryDirectory(prefix="featx-tokens-", dir=arguments.folder) as name:
        root = Path(name, "store")
        make_store(root, num_rows, TOKENS)
        flat = write_memmap(Path(name, "x.npy"), num_rows, TOKENS).reshape(-1, TOKENS[1])

        def opened() -> TokenDataset:
            return TokenDataset(root, "layer", tokens="all", memory=arguments.memory_mib << 20)

        dataset, rng = opened(), np.random.default_rng(1)
        for size in (4096, 16_384):
            requests = [rng.integers(0, len(flat), size) for _ in range(arguments.batches)]
            readers = {
                "memmap": flat.__getitem__,
                "featx": lambda one: dataset.take(*np.divmod(one, TOKENS[0])).numpy(),
            }
            cases = reader_cases(readers, requests, size)
            ratio = compare(f"{size} random tokens", cases, arguments.runs, "tokens/s")["featx"]
            if arguments.json:
                print_figures(f"{size} random tokens", of_memmap=ratio)

        def epoch(of: Callable[[], TokenDataset]) -> Case:
            return timed(lambda: sum(len(batch["row"]) for batch in of()))

        later = epoch(lambda: dataset)
        later()  # compares the checksum of each chunk, as a new data set does
        epochs = {"first epoch": epoch(opened), "later epoch": later}
        compare("shuffled epochs", epochs, arguments.runs, "tokens/s")


def loader(arguments: argparse.Namespace) -> None:
    """Rows per second of an epoch in BlockShuffleSampler's order, and how long training waits."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from featx.torch import BlockShuffleSampler, FeatureDataset

    width = 2048
    num_rows = int(arguments.gigabytes * 1e9) // (2 * width)

    def batches(root: Path, workers: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        dataset = FeatureDataset(root, "layer")
        sampler = BlockShuffleSampler(dataset)
        return iter(DataLoader(dataset, BATCH, sampler=sampler, num_workers=workers))

    head = nn.Linear(width, arguments.classes)
    optimiser = torch.optim.AdamW(head.parameters())

    def step(features: torch.Tensor, labels: torch.Tensor) -> None:
        loss = nn.functional.cross_entropy(head(features.float()), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    def in_memory() -> int:
        x, y = torch.rand(BATCH, width).half(), torch.zeros(BATCH, dtype=torch.int64)
        for _ in range(200):
            step(x, y)
        return 200 * BATCH

    waiting: dict[str, list[float]] = {}

    def epoch(root: Path, name: str, workers: int, train: bool) -> Case:
        def measure() -> float:
            rows = batches(root, workers)
            next(rows)  # the workers have started
            started_at, waited, count = time.perf_counter(), 0.0, 0
            while True:
                requested_at = time.perf_counter()
                batch = next(rows, None)
                waited += time.perf_counter() - requested_at
                if batch is None:
                    break
                count += len(batch[1])
                if train:
                    step(*batch)
            seconds = time.perf_counter() - started_at
            waiting.setdefault(name, []).append(waited / seconds)
            return count / seconds

        return measure

    with tempfile.TemporaryDirectory(prefix="featx-loader-", dir=arguments.folder) as folder:
        root = Path(folder) / "store"
        make_store(root, num_rows, (width,))
        cases = {"training alone, rows in memory": timed(in_memory)}
        for workers in arguments.workers:
            for what, train in (("loader alone", False), ("training", True)):
                name = f"{workers} workers, {what}"
                cases[name] = epoch(root, name, workers, train)
        title = (
            f"{num_rows} rows of {width} float16, batches of {BATCH}, {arguments.classes} classes, "
            f"{len(os.sched_getaffinity(0))} processors"
        )
        compare(title, cases, arguments.runs, "rows/s")
    for name, shares in waiting.items():
        print(f"  {name}: waits {statistics.median(shares):.0%} of the time")


def add_commands(add: Add) -> None:
    """Register the commands of this module."""
    command = add("read", read)
    command.add_argument("--gigabytes", type=float, default=2, help="of each kind of rows")
    command.add_argument("--runs", type=int, default=5)
    command.add_argument("--folder", help="where there is room for three times as much")
    command.add_argument("--json", action="store_true", help="also print the ratios as JSON")
    command = add("tokens", tokens)
    command.add_argument("--gigabytes", type=float, default=1.24, help="of tokens")
    command.add_argument("--memory-mib", type=int, default=64, help="that an epoch may hold")
    command.add_argument("--batches", type=int, default=20, help="of random tokens in a round")
    command.add_argument("--runs", type=int, default=5)
    command.add_argument("--folder", help="where there is room for twice as much")
    command.add_argument("--json", action="store_true", help="also print the ratios as JSON")
    command = add("loader", loader)
    command.add_argument("--gigabytes", type=float, default=0.2)
    command.add_argument("--classes", type=int, default=100)
    command.add_argument("--workers", type=int, nargs="+", default=[0, 2, 8])
    command.add_argument("--runs", type=int, default=3)
    command.add_argument("--folder", help="where there is room for twice as much")
