"""Parts by their size and number: what a commit takes, and a store of very many parts."""

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
from benchmarks.synthetic_stores import made_rows, make_run

SHAPE = (197, 768)
"""Tokens of an image, as a ViT-B of 224 pixels gives them, and their numbers."""

BATCH = 32


@contextlib.contextmanager
def made_folder(arguments: argparse.Namespace) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="featx-parts-", dir=arguments.folder))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def commit_one(folder: Path, mib: int, codec: str) -> None:
    """Print JSON of what one part of about so many MiB takes, from its first row to its name."""
    from featx.store.layout import power_of_two_at_least
    from featx.store.session import StoreSession

    num_rows = max(1, (mib << 20) // (2 * SHAPE[0] * SHAPE[1]))
    run, listing = make_run(num_rows, SHAPE, power_of_two_at_least(num_rows), codec)
    batch = next(iter(made_rows(num_rows, SHAPE)))[:BATCH]
    with StoreSession(folder / "store", run, listing).hold() as session:
        reset_peak()
        before, begun, busy = peak_mib(), time.perf_counter(), time.process_time()
        [part] = session.missing()
        builder = session.begin_part(part, run.layers)
        for start in range(0, num_rows, BATCH):
            builder.add(start, {"layer": batch[: num_rows - start]}, [])
        session.commit(builder)
        figures = {
            "mib": num_rows * 2 * SHAPE[0] * SHAPE[1] / 2**20,
            "seconds": time.perf_counter() - begun,
            "processor_seconds": time.process_time() - busy,
            "peak_mib": peak_mib() - before,
        }
    print(json.dumps(figures))


def commit(arguments: argparse.Namespace) -> None:
    """One part of each size in a process of its own: speed, and peak memory above the start."""
    if arguments.one:
        commit_one(Path(arguments.folder), arguments.one, arguments.codec)
        return
    for mib in arguments.mib:
        with made_folder(arguments) as folder:
            command = [*COMMAND, "commit", "--one", str(mib), "--folder", str(folder)]
            command += ["--codec", arguments.codec]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        found = json.loads(done)
        rate = found["mib"] * 1.048576 / found["processor_seconds"]
        print(
            f"{found['mib']:6.0f} MiB, codec {arguments.codec}: {found['seconds']:6.2f} s, "
            f"{found['processor_seconds']:6.2f} s of CPU ({rate:.0f} MB/s a core), peak "
            f"{found['peak_mib']:.0f} MiB ({found['peak_mib'] / found['mib']:.2f} times the part)",
            flush=True,
        )


def timed(title: str, work: Callable[[], Any]) -> Any:
    """Print seconds, seconds of the CPU, and the peak of memory above the start."""
    reset_peak()
    before, begun, busy = peak_mib(), time.perf_counter(), time.process_time()
    value = work()
    print(
        f"{title:34} {time.perf_counter() - begun:8.2f} s {time.process_time() - busy:8.2f} s of "
        f"CPU, {peak_mib() - before:6.0f} MiB",
        flush=True,
    )
    return value


def many_parts(arguments: argparse.Namespace) -> None:
    """A store of very many parts of tiny rows: made, resumed, and opened by each reader."""
    import featx
    from featx.store.session import StoreSession
    from featx.store.status import store_status
    from featx.torch import FeatureDataset, TokenDataset

    shape = (arguments.tokens, 1) if arguments.tokens > 1 else (2,)
    num_rows = arguments.parts * arguments.rows
    print(f"{arguments.parts} parts of {arguments.rows} rows {shape} float16, {num_rows} rows")
    kept = arguments.store
    with contextlib.nullcontext() if kept else made_folder(arguments) as folder:
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
                assert session.whole

        if not (root / "featx.json").exists():
            timed("all parts committed", write)
        timed("resume", resume)
        for file in (root / "parts").iterdir():
            forget_pages(file)
        timed("resume, nothing in the page cache", resume)
        timed("job=status", lambda: store_status(root))
        timed("featx.open", lambda: featx.open(root))
        timed("status of all rows", lambda: featx.open(root).status)
        timed("FeatureDataset", lambda: len(FeatureDataset(root, "layer")))
        if arguments.tokens > 1:
            tokens = {"tokens": "all", "memory": arguments.memory_mib << 20, "block": 64}
            data = timed(
                "TokenDataset", lambda: TokenDataset(root, "layer", **tokens, drop_last=False)
            )
            batches = iter(data)
            timed("its first batch", lambda: next(batches))
            timed("the next 1000", lambda: sum(1 for _ in islice(batches, 1000)))
            timed("4096 tokens by take", lambda: data.take(*random_tokens(num_rows, shape[0])))


def random_tokens(num_rows: int, num_tokens: int) -> tuple[Any, Any]:
    """Rows and positions of 4096 tokens."""
    rng = np.random.default_rng(0)
    return rng.integers(0, num_rows, 4096), rng.integers(0, num_tokens, 4096)


def add_commands(add: Add) -> None:
    """The commands of scripts/benchmark that are measured here."""
    one = add("commit", commit)
    one.add_argument("--mib", nargs="+", type=int, default=[64, 256, 512, 1024, 2048])
    one.add_argument("--codec", default="none")
    one.add_argument("--folder", help="where the store lies; not a file system in memory")
    one.add_argument("--one", type=int, help=argparse.SUPPRESS)
    one = add("many-parts", many_parts)
    one.add_argument("--parts", type=int, default=40_000)
    one.add_argument("--rows", type=int, default=1, help="of a part, a power of two")
    one.add_argument("--tokens", type=int, default=1, help="of a row, each of one number; 1: none")
    one.add_argument("--memory-mib", type=int, default=8, help="of TokenDataset")
    one.add_argument("--folder", help="where the store lies")
    one.add_argument("--store", help="a store that is made unless it is there, and kept")
