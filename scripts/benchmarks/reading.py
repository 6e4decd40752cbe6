"""Rows of a store: read by featx, h5py and numpy, by DataLoader's workers, and through codecs."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.commands import COMMAND, Add
from benchmarks.figures import print_figures
from benchmarks.synthetic_stores import make_store, rectified_rows, synthetic_rows

BATCH = 256
"""Rows of a batch in `read`."""


def compare_readers(
    title: str,
    readers: dict[str, Callable[[Any], np.ndarray]],
    requests: list[Any],
    rows_each: int,
    runs: int,
    num_requests: dict[str, int],
) -> float:
    """Time every reader on the same requests, several runs in turn, and print rows per second.

    Args:
        title: name of the case.
        readers: name -> reads the rows of one request; the first is the reference.
        requests: arguments of the readers.
        rows_each: number of rows of a request.
        runs: number of rounds.
        num_requests: slow reader -> number of requests, instead of all.

    Returns:
        Speed of the last reader divided by that of the first.
    """
    expected = next(iter(readers.values()))(requests[0])
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for name, read in readers.items():
        assert np.array_equal(read(requests[0]), expected), f"{name} reads other rows"
    for _ in range(runs):
        for name, read in readers.items():
            chosen = requests[: num_requests.get(name, len(requests))]
            started_at = time.perf_counter()
            for request in chosen:
                read(request)
            rates[name].append(len(chosen) * rows_each / (time.perf_counter() - started_at))
    reference = statistics.median(next(iter(rates.values())))
    for name, figures in rates.items():
        median = statistics.median(figures)
        spread = f"({min(figures):.0f} to {max(figures):.0f})"
        print(f"{title:34} {name:8} {median:11.0f} rows/s {spread:24} {median / reference:7.3f}")
        title = ""
    return median / reference


def read_shape(
    folder: Path, kind: str, shape: tuple[int, ...], size: int, runs: int
) -> dict[str, float]:
    """Print the table of rows of one shape, `size` bytes of them.

    Returns:
        Case -> speed of featx divided by that of numpy's memmap.
    """
    import h5py

    import featx

    num_rows = size // (2 * int(np.prod(shape)))
    make_store(folder / "store", num_rows, shape)
    flat = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float16, (num_rows, *shape))
    done = 0
    for block in synthetic_rows(num_rows, shape):
        flat[done : done + len(block)] = block
        done += len(block)
    flat.flush()
    del flat
    mapped = np.load(folder / "x.npy", mmap_mode="r")
    layer = featx.open(folder / "store")["layer"]
    rng = np.random.default_rng(1)
    with h5py.File(folder / "store" / "features.h5", "r") as file:
        plain = file["features/layer"]

        def plain_rows(rows: np.ndarray) -> np.ndarray:
            """h5py wants increasing rows without repeats."""
            unique, inverse = np.unique(rows, return_inverse=True)
            return plain[unique.tolist()][inverse]

        print(f"\n{kind}: {num_rows} rows {shape} float16, {size / 1e9:.1f} GB; ratio to memmap")
        ratios: dict[str, float] = {}
        title = "single rows at random"
        singles = rng.integers(0, num_rows, 2000).tolist()
        readers = {"memmap": lambda i: np.array(mapped[i]), "h5py": plain.__getitem__}
        readers["featx"] = layer.__getitem__
        ratios[title] = compare_readers(title, readers, singles, 1, runs, {"h5py": 200})
        title = f"batches of {BATCH} at random"
        batches = [rng.integers(0, num_rows, BATCH) for _ in range(min(200, num_rows // BATCH))]
        readers = {"memmap": mapped.__getitem__, "h5py": plain_rows, "featx": layer.__getitem__}
        ratios[title] = compare_readers(title, readers, batches, BATCH, runs, {"h5py": 2})
        title = f"an epoch in order, {BATCH} at once"
        slices = [slice(i, i + BATCH) for i in range(0, num_rows - BATCH + 1, BATCH)]
        readers = {"memmap": lambda s: np.array(mapped[s]), "h5py": plain.__getitem__}
        readers["featx"] = layer.__getitem__
        ratios[title] = compare_readers(title, readers, slices, BATCH, runs, {"h5py": 400})
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


def forget_pages(path: Path) -> None:
    """Drop a file from the page cache, so that the next read comes from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def checks(arguments: argparse.Namespace) -> None:
    """Cost of comparing chunks with their checksums in an epoch in order, for every codec.

    The file comes from the disk, from the page cache, and from there by a store that has compared
    it before. Epochs without a check and with one alternate. The cost is the median over the pairs,
    of the time that passes and of processor time, which other programs disturb less.
    """
    import featx
    from featx.store import FeatureStore

    shape = (2048,)
    num_rows = int(arguments.gigabytes * 1e9) // (2 * shape[0])
    size = num_rows * shape[0] * 2 / 1e6
    print(f"{num_rows} rows {shape} float16, 77 % zeros; medians of {arguments.runs} pairs")
    print("codec   from   MB/s unchecked, checked    cost   of processor time")
    for codec in arguments.codecs:
        with tempfile.TemporaryDirectory(prefix="featx-checks-", dir=arguments.folder) as folder:
            root = Path(folder)
            make_store(root, num_rows, shape, rectified_rows, codec)

            def epoch(store: FeatureStore, num_rows: int = num_rows) -> tuple[float, float]:
                layer = store["layer"]
                started_at = time.perf_counter(), time.process_time()
                for start in range(0, num_rows, BATCH):
                    layer[start : start + BATCH]
                return time.perf_counter() - started_at[0], time.process_time() - started_at[1]

            for state in ("disk", "cache", "again"):
                seconds: dict[Any, list[tuple[float, float]]] = {False: [], "chunks": []}
                for run in range(arguments.runs):
                    # The second one finds a warmer machine, so the order alternates as well.
                    for verify in (False, "chunks") if run % 2 else ("chunks", False):
                        store = featx.open(root, verify=verify)
                        if state == "disk":
                            forget_pages(root / "features.h5")
                        if state == "again":
                            epoch(store)
                        seconds[verify].append(epoch(store))
                without, checked = (np.array(seconds[key]) for key in (False, "chunks"))
                wall, processor = 100 * (np.median(checked / without, axis=0) - 1)
                rates = [size / np.median(each[:, 0]) for each in (without, checked)]
                print(
                    f"{codec:7} {state:6} {rates[0]:14.0f} {rates[1]:8.0f} {wall:8.1f} % "
                    f"{processor:8.1f} %"
                )


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

    def epoch(root: Path, workers: int, train: bool) -> tuple[float, float]:
        """Rows per second from the second batch on, and the share of the time spent waiting."""
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
        return count / seconds, waited / seconds

    cases = [(workers, train) for workers in arguments.workers for train in (False, True)]
    figures_of: dict[tuple[int, bool], list[tuple[float, float]]] = {case: [] for case in cases}
    training_rates: list[float] = []
    with tempfile.TemporaryDirectory(prefix="featx-loader-", dir=arguments.folder) as folder:
        root = Path(folder) / "store"
        make_store(root, num_rows, (width,))
        x, y = torch.rand(BATCH, width).half(), torch.zeros(BATCH, dtype=torch.int64)
        for _ in range(arguments.runs):
            started_at = time.perf_counter()
            for _ in range(200):
                step(x, y)
            training_rates.append(200 * BATCH / (time.perf_counter() - started_at))
            for case in cases:
                figures_of[case].append(epoch(root, *case))
    processors = len(os.sched_getaffinity(0))
    print(
        f"{num_rows} rows of {width} float16, batches of {BATCH}, {arguments.classes} classes, "
        f"{processors} processors\ntraining alone, rows in memory "
        f"{statistics.median(training_rates):9.0f} rows/s "
        f"({min(training_rates):.0f} to {max(training_rates):.0f})"
    )
    for (workers, train), figures in figures_of.items():
        rates = [rows for rows, _ in figures]
        share = statistics.median(waiting for _, waiting in figures)
        what = f"training, waits {share:4.0%}" if train else "loader alone"
        print(
            f"{workers} workers  {what:22} {statistics.median(rates):9.0f} rows/s "
            f"({min(rates):.0f} to {max(rates):.0f})"
        )


def measure_rate(function: Callable[[], object], size: int, runs: int) -> float:
    """Megabytes per second of the best run."""
    best = float("inf")
    for _ in range(runs):
        started_at = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - started_at)
    return size / best / 1e6


def write_codec(path: Path, values: np.ndarray, codec: str, threads: int) -> None:
    """Write /x: by the filter pipeline of featx in threads if it supports the codec, or by h5py."""
    import h5py

    from featx.store import codecs, layout
    from featx.store.filter_pipeline import Pipeline

    row_bytes = values[0].nbytes
    chunk_rows = layout.Grid(len(values), 1 << 30).chunk_rows(row_bytes, codec != "none")
    with h5py.File(path, "w", libver=layout.LIBVER) as file:
        made = file.create_dataset(
            "x",
            values.shape,
            values.dtype,
            chunks=(chunk_rows, *values.shape[1:]),
            maxshape=(layout.power_of_two_at_least(len(values)), *values.shape[1:]),
            **codecs.filters(codec),
        )
        pipeline = Pipeline.of(made)
        if not pipeline.is_supported:
            made[:] = values
            return

        def encode(start: int) -> bytes:
            chunk = values[start : start + chunk_rows]
            if len(chunk) < chunk_rows:
                chunk = np.resize(chunk, (chunk_rows, *values.shape[1:]))
            return pipeline.encode(chunk)

        starts = range(0, len(values), chunk_rows)
        rest = (0,) * (values.ndim - 1)
        with ThreadPoolExecutor(threads) as pool:
            stored: Iterable[bytes] = (
                pool.map(encode, starts) if threads > 1 else map(encode, starts)
            )
            for start, data in zip(starts, stored, strict=True):
                made.id.write_direct_chunk((start, *rest), data)


def read_codec(path: Path, values: np.ndarray) -> None:
    """Read all rows of /x back, and compare them."""
    import h5py

    from featx.store.chunk_reader import ChunkReader

    with h5py.File(path, "r") as file:
        rows = ChunkReader(file["x"], path)
        out = np.empty_like(values)
        rows.read_range(0, out)
        rows.close()
    if not np.array_equal(out.view(np.uint16), values.view(np.uint16)):
        raise AssertionError(f"{path} reads back differently")


def print_codecs(arguments: argparse.Namespace) -> None:
    """Print a line for each codec, with as many threads as this process may use processors."""
    values = np.load(arguments.one)
    threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="featx-codec-", dir=arguments.folder) as folder:
        for codec in arguments.codecs:
            path = Path(folder) / "x.h5"
            writing = measure_rate(
                lambda path=path, codec=codec: write_codec(path, values, codec, threads),
                values.nbytes,
                arguments.runs,
            )
            reading = measure_rate(
                lambda path=path: read_codec(path, values), values.nbytes, arguments.runs
            )
            print(codec, values.nbytes / path.stat().st_size, writing, reading)


def codecs(arguments: argparse.Namespace) -> None:
    """Ratio and speed of each codec on features of the packaged images."""
    if arguments.one:
        print_codecs(arguments)
        return
    import featx

    layers = ["embedding", *arguments.maps]
    processors = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="featx-codecs-", dir=arguments.folder) as folder:
        store = featx.extract(
            model="efficientnet_lite0",
            data={"limit": arguments.images},
            layers=layers,
            out=str(Path(folder) / "store"),
        )
        print(f"\nMB/s with 1 thread and with {len(processors)}; the best of {arguments.runs} runs")
        for layer in layers:
            values = store[layer][:]
            zeros = 100 * float(np.mean(values == 0))
            # Few rows would measure the overhead, so they are repeated, never within one chunk.
            times = max(1, int(arguments.megabytes * 1e6) // values.nbytes)
            repeated = Path(folder) / "x.npy"
            np.save(repeated, np.concatenate([values] * times))
            print(f"{layer} {values.shape} float16, {times} times; {zeros:.0f} % zeros")
            figures: dict[str, list[str]] = {}
            for allowed in (processors[:1], processors):
                command = [*COMMAND, *sys.argv[1:], "--one", str(repeated)]
                os.sched_setaffinity(0, allowed)  # the child's threads are as many
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                os.sched_setaffinity(0, processors)
                for line in done.stdout.splitlines():
                    codec, *rest = line.split()
                    figures.setdefault(codec, []).extend(rest)
            for codec, (ratio, write_1, read_1, _, write_n, read_n) in figures.items():
                print(
                    f"  {codec:8} ratio {float(ratio):5.2f}   write {float(write_1):6.0f} "
                    f"{float(write_n):6.0f}   read {float(read_1):6.0f} {float(read_n):6.0f}"
                )


def add_commands(add: Add) -> None:
    """Register the commands of this module."""
    command = add("read", read)
    command.add_argument("--gigabytes", type=float, default=2, help="of each kind of rows")
    command.add_argument("--runs", type=int, default=5)
    command.add_argument("--folder", help="where there is room for three times as much")
    command.add_argument(
        "--json", action="store_true", help="print the ratios to memmap as JSON too"
    )
    command = add("checks", checks)
    command.add_argument("--gigabytes", type=float, default=1)
    command.add_argument("--codecs", nargs="+", default=["none", "gzip", "zstd"])
    command.add_argument("--runs", type=int, default=5)
    command.add_argument("--folder", help="where there is room for three times as much")
    command = add("loader", loader)
    command.add_argument("--gigabytes", type=float, default=0.2)
    command.add_argument("--classes", type=int, default=100)
    command.add_argument("--workers", type=int, nargs="+", default=[0, 2, 8])
    command.add_argument("--runs", type=int, default=3)
    command.add_argument("--folder", help="where there is room for twice as much")
    command = add("codecs", codecs)
    command.add_argument("--images", type=int, default=512)
    command.add_argument(
        "--megabytes", type=float, default=64, help="of each layer, at least one round"
    )
    command.add_argument(
        "--maps", nargs="+", default=["blocks.6", "bn2"], help="layers besides embedding"
    )
    command.add_argument("--codecs", nargs="+", default=["none", "gzip", "zstd"])
    command.add_argument("--runs", type=int, default=3)
    command.add_argument("--folder", help="where the files lie; RAM measures the codecs alone")
    command.add_argument("--one", help=argparse.SUPPRESS)
