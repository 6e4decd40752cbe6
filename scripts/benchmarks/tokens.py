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
from benchmarks.synthetic_stores import made_rows, make_run, make_store, write_parts

SHAPE = (197, 768)
"""Tokens of an image, as a ViT-B of 224 pixels gives them, and their numbers."""


def make_forms(folder: Path, num_rows: int) -> dict[str, Path]:
    """The same rows as a packed store, as a store in parts, and as one .npy file."""
    from featx.store.session import StoreSession

    make_store(folder / "packed", num_rows, SHAPE)
    part_rows = 1 << max(0, (num_rows // 8).bit_length() - 1)
    with StoreSession(folder / "parts", *make_run(num_rows, SHAPE, part_rows)).hold() as session:
        write_parts(session)
    flat = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float16, (num_rows, *SHAPE))
    done = 0
    for piece in made_rows(num_rows, SHAPE):
        flat[done : done + len(piece)] = piece
        done += len(piece)
    flat.flush()
    return {name: folder / name for name in ("packed", "parts")}


def in_turn(ways: Mapping[str, Callable[[], int]], runs: int) -> dict[str, list[float]]:
    """Tokens a second of each way, several rounds in turn; a way returns its number of tokens."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs):
        for name, work in ways.items():
            begun = time.perf_counter()
            count = work()
            found[name].append(count / (time.perf_counter() - begun))
    return found


def show(title: str, found: dict[str, list[float]], as_json: bool) -> None:
    """Print medians, and the median of the ratios to the first way in the same round."""
    first = next(iter(found.values()))
    for name, rates in found.items():
        ratio = statistics.median(one / base for one, base in zip(rates, first, strict=True))
        spread = f"({min(rates):.0f} to {max(rates):.0f})"
        print(
            f"{title:30} {name:24} {statistics.median(rates):10.0f} tok/s {spread:22} {ratio:.3f}"
        )
        if as_json and rates is not first:
            print_figures(f"{title}, {name}", of_first=ratio)
        title = ""


def measure_take(folder: Path, forms: dict[str, Path], arguments: argparse.Namespace) -> None:
    """Random tokens, compared with numpy's memmap bit for bit."""
    from featx.torch import TokenDataset

    flat = np.load(folder / "x.npy", mmap_mode="r").reshape(-1, SHAPE[1])
    datasets = {name: TokenDataset(path, "layer", tokens="all") for name, path in forms.items()}
    rng = np.random.default_rng(1)
    for size in (4096, 16_384):
        asked = [rng.integers(0, len(flat), size) for _ in range(arguments.batches)]
        pairs = [np.divmod(one, SHAPE[0]) for one in asked]
        for dataset in datasets.values():
            for one, (rows, positions) in zip(asked, pairs, strict=True):
                assert np.array_equal(dataset.take(rows, positions).numpy(), flat[one])

        def take_all(take: Callable[..., Any], questions: list[Any]) -> int:
            return sum(len(take(*question)) for question in questions)

        ways = {"memmap": partial(take_all, flat.__getitem__, [(one,) for one in asked])}
        for name, dataset in datasets.items():
            ways[f"take, {name}"] = partial(take_all, dataset.take, pairs)
        show(f"{size} random tokens", in_turn(ways, arguments.runs), arguments.json)


def measure_epochs(forms: dict[str, Path], arguments: argparse.Namespace) -> None:
    """Shuffled epochs from the page cache, without and with the comparison of checksums."""
    from featx.torch import TokenDataset

    def opened(path: Path) -> TokenDataset:
        return TokenDataset(path, "layer", tokens="all", memory=arguments.memory_mib << 20)

    def epoch(path: Path, again: bool) -> Callable[[], int]:
        known = opened(path)

        def count() -> int:
            dataset = known if again else opened(path)  # a new one compares each chunk
            return sum(len(batch["row"]) for batch in dataset)

        if again:
            count()
        return count

    ways = {
        f"{name}, {what}": epoch(path, again)
        for name, path in forms.items()
        for what, again in (("first epoch", False), ("later epoch", True))
    }
    known = opened(forms["packed"])
    print(f"\nshuffled: {', '.join(f'{name} {value:.0f}' for name, value in known.mixing.items())}")
    show("shuffled epoch, warm", in_turn(ways, arguments.runs), arguments.json)


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
"""Threads that read blocks, as many as those of TokenDataset past the page cache."""


def read_at_random(path: Path, block: int, memory: int = 0) -> int:
    """Read blocks of a file past the page cache in a random order in threads.

    Args:
        path: file.
        block: tokens of a block.
        memory: bytes of a memory to whose random places the threads copy the tokens, and from which
            this thread meanwhile copies as many to batches: what an epoch costs without its order.
            0: nothing is copied.
    """
    block_bytes = block * 2 * SHAPE[1]
    held = np.zeros(memory // (2 * SHAPE[1]), f"V{2 * SHAPE[1]}")
    places = np.random.default_rng(0).permutation(len(held))
    blocks = np.random.default_rng(0).permutation(path.stat().st_size // block_bytes)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(some: Any) -> None:
        view = memoryview(mmap.mmap(-1, block_bytes + 8192))
        for at in (some * block_bytes).tolist():
            low, high = at // 4096 * 4096, -(-(at + block_bytes) // 4096) * 4096
            os.preadv(descriptor, [view[: high - low]], low)
            if memory:
                first = at // block_bytes * block % (len(held) - block)
                tokens = np.frombuffer(view, held.dtype, block, at - low)
                held[places[first : first + block]] = tokens

    try:
        with ThreadPoolExecutor(THREADS) as threads:
            done = threads.map(read, np.array_split(blocks, THREADS))
            for low in range(0, len(blocks) * block if memory else 0, 4096):
                first = low % (len(held) - 4096)
                held.take(places[first : first + 4096])
            list(done)
    finally:
        os.close(descriptor)
    return len(blocks) * block


def copy_alone(memory: int) -> int:
    """Copy tokens to random places of a memory and from there to batches, in one thread."""
    token = f"V{2 * SHAPE[1]}"
    held = np.zeros(memory // (2 * SHAPE[1]), token)
    block = np.zeros(SHAPE[0], token)
    places = np.random.default_rng(0).permutation(len(held))
    rounds = 8
    for _ in range(rounds):
        for low in range(0, len(held) - SHAPE[0] + 1, SHAPE[0]):
            held[places[low : low + SHAPE[0]]] = block
        for low in range(0, len(held), 4096):
            held.take(places[low : low + 4096])
    return rounds * len(held)


def measure_cold(forms: dict[str, Path], arguments: argparse.Namespace) -> None:
    """Shuffled epochs from the disk, and the packed file read in order past the page cache."""
    from featx.storage import supports_direct_io
    from featx.torch import TokenDataset

    packed = forms["packed"] / "features.h5"
    if not supports_direct_io(packed):
        print("cold: the file system refuses O_DIRECT, so there is no reference")
        return

    def epoch(path: Path, direct: bool, block: int | None) -> Callable[[], int]:
        def count() -> int:
            for file in [*path.rglob("*.h5")]:
                forget_pages(file)
            dataset = TokenDataset(
                path, "layer", tokens="all", memory=arguments.memory_mib << 20,
                direct=direct, block=block, verify=False,
            )  # fmt: skip
            return sum(len(batch["row"]) for batch in dataset)

        return count

    ways = {"in order, O_DIRECT": lambda: read_sequentially(packed)}
    ways["copying alone"] = lambda: copy_alone(arguments.memory_mib << 20)
    for block in (64, 197, 394):
        ways[f"reading alone, {block}"] = partial(read_at_random, packed, block)
        ways[f"reading, copying, {block}"] = partial(
            read_at_random, packed, block, arguments.memory_mib << 20
        )
        ways[f"packed, blocks of {block}"] = epoch(forms["packed"], True, block)
    ways["parts, blocks of 394"] = epoch(forms["parts"], True, 394)
    ways["packed, 394, page cache"] = epoch(forms["packed"], False, 394)
    show("shuffled epoch, cold", in_turn(ways, arguments.runs), arguments.json)


def measure_memory(forms: dict[str, Path], arguments: argparse.Namespace) -> None:
    """Peak resident memory of an epoch above that before it, in a process of its own."""
    command = [*COMMAND, "tokens", "--one", str(forms["packed"])]
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
    dataset = TokenDataset(
        arguments.one, "layer", tokens="all", memory=arguments.memory_mib << 20, direct=False
    )
    for _ in dataset:
        pass
    print(json.dumps(peak_mib() - before))


def tokens(arguments: argparse.Namespace) -> None:
    """Tokens at random and in shuffled epochs, beside numpy.memmap and reading in order."""
    if arguments.one:
        one_epoch(arguments)
        return
    folder = Path(tempfile.mkdtemp(prefix="featx-tokens-", dir=arguments.folder))
    try:
        num_rows = max(16, int(arguments.gigabytes * 1e9) // (2 * SHAPE[0] * SHAPE[1]))
        print(f"{num_rows} rows {SHAPE} float16, {num_rows * SHAPE[0]} tokens")
        forms = make_forms(folder, num_rows)
        measure_take(folder, forms, arguments)
        measure_epochs(forms, arguments)
        measure_cold(forms, arguments)
        measure_memory(forms, arguments)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def add_commands(add: Add) -> None:
    """The commands of scripts/benchmark that are measured here."""
    one = add("tokens", tokens)
    one.add_argument("--gigabytes", type=float, default=1.24, help="of each of the three forms")
    one.add_argument("--memory-mib", type=int, default=64, help="that an epoch may hold")
    one.add_argument("--batches", type=int, default=20, help="of random tokens in a round")
    one.add_argument("--runs", type=int, default=5)
    one.add_argument("--folder", help="where the stores lie; not a file system in memory")
    one.add_argument("--json", action="store_true", help="also print figures as JSON")
    one.add_argument("--one", help=argparse.SUPPRESS)
