"""Parts by their size and number: the cost of a commit, and a store of very many parts."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.commands import COMMAND, Add
from benchmarks.process_memory import peak_mib, reset_peak
from benchmarks.reading import forget_pages
from benchmarks.synthetic_stores import make_run, synthetic_rows

SHAPE = (197, 768)
"""Tokens of an image, as a ViT-B of 224 pixels gives them, and their numbers."""

BATCH = 32


@contextlib.contextmanager
def temporary_folder(arguments: argparse.Namespace) -> Iterator[Path]:
    """Make a folder, and remove it at the end of the block."""
    folder = Path(tempfile.mkdtemp(prefix="featx-parts-", dir=arguments.folder))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def commit_one(folder: Path, mib: int, codec: str) -> None:
    """Print the figures of a part of about `mib` MiB as JSON, from its first row to its commit."""
    from featx.store import StoreSession
    from featx.store.layout import power_of_two_at_least

    num_rows = max(1, (mib << 20) // (2 * SHAPE[0] * SHAPE[1]))
    run, listing = make_run(num_rows, SHAPE, power_of_two_at_least(num_rows), codec)
    batch = next(iter(synthetic_rows(num_rows, SHAPE)))[:BATCH]
    with StoreSession(folder / "store", run, listing).hold() as session:
        reset_peak()
        before, started_at, processor = peak_mib(), time.perf_counter(), time.process_time()
        [part] = session.missing()
        builder = session.begin_part(part, run.layers)
        for start in range(0, num_rows, BATCH):
            builder.add(start, {"layer": batch[: num_rows - start]}, [])
        session.commit(builder)
        figures = {
            "mib": num_rows * 2 * SHAPE[0] * SHAPE[1] / 2**20,
            "seconds": time.perf_counter() - started_at,
            "processor_seconds": time.process_time() - processor,
            "peak_mib": peak_mib() - before,
        }
    print(json.dumps(figures))


def commit(arguments: argparse.Namespace) -> None:
    """One part of each size in a process of its own: speed, and peak memory above the start."""
    if arguments.one:
        commit_one(Path(arguments.folder), arguments.one, arguments.codec)
        return
    for mib in arguments.mib:
        with temporary_folder(arguments) as folder:
            command = [*COMMAND, "commit", "--one", str(mib), "--folder", str(folder)]
            command += ["--codec", arguments.codec]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        figures = json.loads(done)
        rate = figures["mib"] * 1.048576 / figures["processor_seconds"]
        print(
            f"{figures['mib']:6.0f} MiB, codec {arguments.codec}: {figures['seconds']:6.2f} s, "
            f"{figures['processor_seconds']:6.2f} s of processor time ({rate:.0f} MB/s a core), "
            f"peak {figures['peak_mib']:.0f} MiB "
            f"({figures['peak_mib'] / figures['mib']:.2f} times the part)",
            flush=True,
        )


def measure(title: str, function: Callable[[], Any]) -> Any:
    """Call a function; print its seconds, processor time, and peak memory above the start."""
    reset_peak()
    before, started_at, processor = peak_mib(), time.perf_counter(), time.process_time()
    value = function()
    seconds, processor = time.perf_counter() - started_at, time.process_time() - processor
    print(
        f"{title:34} {seconds:8.2f} s {processor:8.2f} s of processor time, "
        f"{peak_mib() - before:6.0f} MiB",
        flush=True,
    )
    return value


def many_parts(arguments: argparse.Namespace) -> None:
    """A store of very many parts of tiny rows: written, resumed, and opened by each reader."""
    import featx
    from featx.store import StoreSession, store_status
    from featx.torch import FeatureDataset, TokenDataset

    shape = (arguments.tokens, 1) if arguments.tokens > 1 else (2,)
    num_rows = arguments.parts * arguments.rows
    print(f"{arguments.parts} parts of {arguments.rows} rows {shape} float16, {num_rows} rows")
    kept = arguments.store
    with contextlib.nullcontext() if kept else temporary_folder(arguments) as folder:
        root = Path(kept) if folder is None else folder / "store"
        run, listing = make_run(num_rows, shape, arguments.rows)
        values = np.ones((arguments.rows, *shape), np.float16)

        def write() -> None:
            with (session := StoreSession(root, run, listing)).hold():
                for part in session.missing():
                    builder = session.begin_part(part, run.layers)
                    builder.add(part.start, {"layer": values[: len(part)]}, [])
                    session.commit(builder)

        def resume() -> None:
            with (session := StoreSession(root, run, listing)).hold():
                assert session.is_complete

        if not (root / "featx.json").exists():
            measure("all parts committed", write)
        measure("resume", resume)
        for file in (root / "parts").iterdir():
            forget_pages(file)
        measure("resume, nothing in the page cache", resume)
        measure("job=status", lambda: store_status(root))
        measure("featx.open", lambda: featx.open(root))
        measure("status of all rows", lambda: featx.open(root).status)
        measure("FeatureDataset", lambda: len(FeatureDataset(root, "layer")))
        if arguments.tokens > 1:
            tokens = {"tokens": "all", "memory": arguments.memory_mib << 20, "block": 64}
            data = measure(
                "TokenDataset", lambda: TokenDataset(root, "layer", **tokens, drop_last=False)
            )
            batches = iter(data)
            measure("its first batch", lambda: next(batches))
            measure("the next 1000", lambda: sum(1 for _ in islice(batches, 1000)))
            measure("4096 tokens by take", lambda: data.take(*random_tokens(num_rows, shape[0])))


def random_tokens(num_rows: int, num_tokens: int) -> tuple[Any, Any]:
    """Rows and positions of 4096 tokens."""
    rng = np.random.default_rng(0)
    return rng.integers(0, num_rows, 4096), rng.integers(0, num_tokens, 4096)


def add_commands(add: Add) -> None:
    """Register the commands of this module."""
    command = add("commit", commit)
    command.add_argument("--mib", nargs="+", type=int, default=[64, 256, 512, 1024, 2048])
    command.add_argument("--codec", default="none")
    command.add_argument("--folder", help="where the store lies; not a file system in memory")
    command.add_argument("--one", type=int, help=argparse.SUPPRESS)
    command = add("many-parts", many_parts)
    command.add_argument("--parts", type=int, default=40_000)
    command.add_argument("--rows", type=int, default=1, help="of a part, a power of two")
    command.add_argument(
        "--tokens", type=int, default=1, help="of a row, each of one number; 1: none"
    )
    command.add_argument("--memory-mib", type=int, default=8, help="of TokenDataset")
    command.add_argument("--folder", help="where the store lies")
    command.add_argument("--store", help="a store that is made unless it is there, and kept")
