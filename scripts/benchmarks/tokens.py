"""Single tokens of a store: at random, in shuffled epochs, from a cold disk, and their memory."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.commands import COMMAND, Add
from benchmarks.figures import print_figures
from benchmarks.reading import forget_pages
from benchmarks.synthetic_stores import make_run, make_store, synthetic_rows, write_parts

SHAPE = (197, 768)
"""Tokens of an image, as a ViT-B of 224 pixels gives them, and their numbers."""


def write_layouts(folder: Path, num_rows: int) -> dict[str, Path]:
    """Write the same rows as a packed store, as a store in parts, and as one .npy file."""
    make_store(folder / "packed", num_rows, SHAPE)
    write_store_in_parts(folder / "parts", num_rows)
    flat = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float16, (num_rows, *SHAPE))
    done = 0
    for block in synthetic_rows(num_rows, SHAPE):
        flat[done : done + len(block)] = block
        done += len(block)
    flat.flush()
    return {name: folder / name for name in ("packed", "parts")}


def write_store_in_parts(root: Path, num_rows: int) -> None:
    """Write synthetic rows as a store of 8 to 15 parts."""
    from featx.store import StoreSession

    part_rows = 1 << max(0, (num_rows // 8).bit_length() - 1)
    with StoreSession(root, *make_run(num_rows, SHAPE, part_rows)).hold() as session:
        write_parts(session)


def measure_in_turn(cases: Mapping[str, Callable[[], int]], runs: int) -> dict[str, list[float]]:
    """Tokens per second of each case, several rounds in turn; a case returns how many it read."""
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(runs):
        for name, function in cases.items():
            started_at = time.perf_counter()
            count = function()
            rates[name].append(count / (time.perf_counter() - started_at))
    return rates


def print_rates(title: str, rates_of: dict[str, list[float]], as_json: bool) -> None:
    """Print medians, and the median of the ratios to the first case in the same round."""
    first = next(iter(rates_of.values()))
    label = title  # of the first line only
    for name, rates in rates_of.items():
        ratio = statistics.median(one / base for one, base in zip(rates, first, strict=True))
        spread = f"({min(rates):.0f} to {max(rates):.0f})"
        print(
            f"{label:30} {name:24} {statistics.median(rates):10.0f} tok/s {spread:22} {ratio:.3f}"
        )
        if as_json and rates is not first:
            print_figures(f"{title}, {name}", of_first=ratio)
        label = ""


def measure_take(folder: Path, layouts: dict[str, Path], arguments: argparse.Namespace) -> None:
    """Random tokens, compared with numpy's memmap bit for bit."""
    from featx.torch import TokenDataset

    flat = np.load(folder / "x.npy", mmap_mode="r").reshape(-1, SHAPE[1])
    datasets = {name: TokenDataset(path, "layer", tokens="all") for name, path in layouts.items()}
    rng = np.random.default_rng(1)
    for size in (4096, 16_384):
        indices = [rng.integers(0, len(flat), size) for _ in range(arguments.batches)]
        pairs = [np.divmod(one, SHAPE[0]) for one in indices]
        for dataset in datasets.values():
            for one, (rows, positions) in zip(indices, pairs, strict=True):
                assert np.array_equal(dataset.take(rows, positions).numpy(), flat[one])

        def take_all(take: Callable[..., Any], requests: list[Any]) -> int:
            return sum(len(take(*request)) for request in requests)

        cases = {"memmap": partial(take_all, flat.__getitem__, [(one,) for one in indices])}
        for name, dataset in datasets.items():
            cases[f"take, {name}"] = partial(take_all, dataset.take, pairs)
        print_rates(f"{size} random tokens", measure_in_turn(cases, arguments.runs), arguments.json)


def measure_epochs(layouts: dict[str, Path], arguments: argparse.Namespace) -> None:
    """Shuffled epochs from the page cache, without and with the comparison of checksums."""
    from featx.torch import TokenDataset

    def open_dataset(path: Path) -> TokenDataset:
        return TokenDataset(path, "layer", tokens="all", memory=arguments.memory_mib << 20)

    def epoch(path: Path, is_later: bool) -> Callable[[], int]:
        first = open_dataset(path)

        def count() -> int:
            dataset = first if is_later else open_dataset(path)  # a new one compares each chunk
            return sum(len(batch["row"]) for batch in dataset)

        if is_later:
            count()
        return count

    cases = {
        f"{name}, {what}": epoch(path, is_later)
        for name, path in layouts.items()
        for what, is_later in (("first epoch", False), ("later epoch", True))
    }
    packed = open_dataset(layouts["packed"])
    print(
        f"\nshuffled: {', '.join(f'{name} {value:.0f}' for name, value in packed.mixing.items())}"
    )
    print_rates("shuffled epoch, warm", measure_in_turn(cases, arguments.runs), arguments.json)


def read_sequentially(path: Path) -> int:
    """Read a file past the page cache in order, 4 MiB at a time, in one thread."""
    buffer = mmap.mmap(-1, 4 << 20)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    done = 0
    try:
        while (count := os.preadv(descriptor, [buffer], done)) > 0:
            done += count
    finally:
        os.close(descriptor)
    return done // (2 * SHAPE[1])


THREADS = 8
"""Threads that read blocks. More requests at once are faster up to about this number."""


def read_at_random(path: Path, block: int, memory: int = 0) -> int:
    """Read blocks of a file past the page cache in a random order in threads.

    Args:
        path: file.
        block: tokens of a block.
        memory: bytes of a buffer to whose random positions the threads copy the tokens, while this
            thread copies as many from it to batches, as an epoch does; 0 if nothing is copied.
    """
    block_bytes = block * 2 * SHAPE[1]
    buffer = np.zeros(memory // (2 * SHAPE[1]), f"V{2 * SHAPE[1]}")
    order = np.random.default_rng(0).permutation(len(buffer))
    blocks = np.random.default_rng(0).permutation(path.stat().st_size // block_bytes)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(numbers: Any) -> None:
        view = memoryview(mmap.mmap(-1, block_bytes + 8192))
        for at in (numbers * block_bytes).tolist():
            low, high = at // 4096 * 4096, -(-(at + block_bytes) // 4096) * 4096
            os.preadv(descriptor, [view[: high - low]], low)
            if memory:
                first = at // block_bytes * block % (len(buffer) - block)
                tokens = np.frombuffer(view, buffer.dtype, block, at - low)
                buffer[order[first : first + block]] = tokens

    try:
        with ThreadPoolExecutor(THREADS) as threads:
            done = threads.map(read, np.array_split(blocks, THREADS))
            for low in range(0, len(blocks) * block if memory else 0, 4096):
                first = low % (len(buffer) - 4096)
                buffer.take(order[first : first + 4096])
            list(done)
    finally:
        os.close(descriptor)
    return len(blocks) * block


def copy_tokens(memory: int) -> int:
    """Copy tokens to random positions of a buffer and from there to batches, in one thread."""
    token = f"V{2 * SHAPE[1]}"
    buffer = np.zeros(memory // (2 * SHAPE[1]), token)
    block = np.zeros(SHAPE[0], token)
    order = np.random.default_rng(0).permutation(len(buffer))
    rounds = 8
    for _ in range(rounds):
        for low in range(0, len(buffer) - SHAPE[0] + 1, SHAPE[0]):
            buffer[order[low : low + SHAPE[0]]] = block
        for low in range(0, len(buffer), 4096):
            buffer.take(order[low : low + 4096])
    return rounds * len(buffer)


def measure_cold(layouts: dict[str, Path], arguments: argparse.Namespace) -> None:
    """Shuffled epochs from the disk, and the packed file read in order past the page cache."""
    from featx.torch import TokenDataset

    packed = layouts["packed"] / "features.h5"
    try:
        os.close(os.open(packed, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        print("cold: the file system refuses O_DIRECT, so there is no reference")
        return

    def epoch(path: Path, block: int | None) -> Callable[[], int]:
        def count() -> int:
            for file in [*path.rglob("*.h5")]:
                forget_pages(file)
            dataset = TokenDataset(
                path, "layer", tokens="all", memory=arguments.memory_mib << 20,
                block=block, verify=False,
            )  # fmt: skip
            return sum(len(batch["row"]) for batch in dataset)

        return count

    cases = {"in order, O_DIRECT": lambda: read_sequentially(packed)}
    cases["copying alone"] = lambda: copy_tokens(arguments.memory_mib << 20)
    for block in (64, 197, 394):
        cases[f"reading alone, {block}"] = partial(read_at_random, packed, block)
        cases[f"reading, copying, {block}"] = partial(
            read_at_random, packed, block, arguments.memory_mib << 20
        )
        cases[f"packed, blocks of {block}"] = epoch(layouts["packed"], block)
    cases["parts, blocks of 394"] = epoch(layouts["parts"], 394)
    print_rates("shuffled epoch, cold", measure_in_turn(cases, arguments.runs), arguments.json)


def measure_memory(store: Path, arguments: argparse.Namespace) -> None:
    """Peak resident memory of an epoch above that of its start, in a process of its own."""
    command = [*COMMAND, "tokens", "--one", str(store)]
    command += ["--memory-mib", str(arguments.memory_mib)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    peak = json.loads(done.stdout)
    bound = 1.25 * arguments.memory_mib + 64
    print(
        f"\npeak memory of an epoch above its start: {peak:.0f} MiB with memory="
        f"{arguments.memory_mib} MiB (bound: {bound:.0f})"
    )


def one_epoch(arguments: argparse.Namespace) -> None:
    """Print the peak of one epoch in MiB."""
    from benchmarks.process_memory import peak_mib, reset_peak
    from featx.torch import TokenDataset

    reset_peak()
    before = peak_mib()
    dataset = TokenDataset(arguments.one, "layer", tokens="all", memory=arguments.memory_mib << 20)
    for _ in dataset:
        pass
    print(json.dumps(peak_mib() - before))


def tokens(arguments: argparse.Namespace) -> None:
    """Tokens at random and in shuffled epochs, compared with numpy.memmap and reading in order."""
    if arguments.one:
        one_epoch(arguments)
        return
    folder = Path(tempfile.mkdtemp(prefix="featx-tokens-", dir=arguments.folder))
    try:
        num_rows = max(16, int(arguments.gigabytes * 1e9) // (2 * SHAPE[0] * SHAPE[1]))
        print(f"{num_rows} rows {SHAPE} float16, {num_rows * SHAPE[0]} tokens")
        if arguments.peak_only:
            write_store_in_parts(folder / "parts", num_rows)
            measure_memory(folder / "parts", arguments)
            return
        layouts = write_layouts(folder, num_rows)
        measure_take(folder, layouts, arguments)
        measure_epochs(layouts, arguments)
        measure_cold(layouts, arguments)
        measure_memory(layouts["packed"], arguments)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def add_commands(add: Add) -> None:
    """Register the commands of this module."""
    command = add("tokens", tokens)
    command.add_argument(
        "--gigabytes", type=float, default=1.24, help="of each of the three layouts"
    )
    command.add_argument("--memory-mib", type=int, default=64, help="that an epoch may hold")
    command.add_argument("--batches", type=int, default=20, help="of random tokens in a round")
    command.add_argument("--runs", type=int, default=5)
    command.add_argument("--folder", help="where the stores lie; not a file system in memory")
    command.add_argument("--json", action="store_true", help="also print figures as JSON")
    command.add_argument(
        "--peak-only", action="store_true",
        help="write a store in parts only, and measure the peak memory of an epoch",
    )  # fmt: skip
    command.add_argument("--one", help=argparse.SUPPRESS)
