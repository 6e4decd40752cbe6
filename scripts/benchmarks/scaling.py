"""Scaling: parts per minute, worker processes, and stores of growing numbers of rows."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.commands import Add
from benchmarks.process_memory import peak_mib, read_mib, reset_peak


def parts(arguments: argparse.Namespace) -> None:
    """Parts per minute of one process and of workers, from the first part that is ready on."""
    import h5py

    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        pixels = np.random.default_rng(0).integers(0, 256, (arguments.parts, 8, 8, 3), np.uint8)
        with h5py.File(folder / "images.h5", "w") as file:
            file["x"] = pixels
        options = [
            "model=custom", "model.factory=benchmarks.null_model:MeanColour",
            "model.weights=null", "model.transform.resize=8", "model.transform.crop=8",
            "layers=[mean]", "precision=fp32", "compile=false", "batch_size=1",
            "part_rows=1", "pack=false", "data=hdf5",
            f"data.root={folder / 'images.h5'}", "data.dataset=/x",
        ]  # fmt: skip
        compare_workers(arguments, folder, options, 60, "parts a minute")


def compare_processes(arguments: argparse.Namespace) -> None:
    """Images per second of a real model, by one process and by workers, from the first batch on."""
    options = [
        "data=textiles", f"data.limit={arguments.images}", "precision=fp32", "compile=false",
        "pack=false", *arguments.options,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        compare_workers(arguments, Path(name), options, 1, "images a second")


def compare_workers(
    arguments: argparse.Namespace, folder: Path, options: list[str], factor: float, unit: str
) -> None:
    """Run the command with `options` for each of `arguments.workers`, once a round in turn.

    Args:
        arguments: options of the command of scripts/benchmark.
        folder: folder for the store.
        options: options of featx.
        factor: what images/s are multiplied by.
        unit: unit of that product.
    """
    rates_of: dict[str, list[float]] = {workers: [] for workers in arguments.workers}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for _ in range(arguments.runs):
        for workers, rates in rates_of.items():
            out = folder / "store"
            last = [f"out={out}", "overwrite=true", f"executor.workers={workers}"]
            command = [sys.executable, "-m", "featx", *options, *last]
            subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            summary = json.loads((out / "summary.json").read_text())
            rates.append(factor * summary["images_per_second"])
            print(f"  executor.workers={workers}: {rates[-1]:.1f} {unit}", flush=True)
    first = next(iter(rates_of.values()))
    for workers, rates in rates_of.items():
        ratios = [one / base for one, base in zip(rates, first, strict=True)]
        print(
            f"executor.workers={workers:5} {statistics.median(rates):7.1f} {unit}, "
            f"{statistics.median(ratios):.3f} times the first "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )


NAMED_KEY_BYTES = 43
"""Bytes of those keys of `SyntheticSource` that look like names of files in class folders."""


def make_source(root: Path, count: int, key_bytes: int) -> Any:
    """Make a folder source whose keys are generated when they are listed.

    Keys of other lengths than NAMED_KEY_BYTES are numbers, without folders.
    """
    from featx.sources import FolderSource
    from featx.types import IMAGE_STATE

    class SyntheticSource(FolderSource):
        def _walk(self) -> Iterator[bytes]:
            if key_bytes != NAMED_KEY_BYTES:
                yield from (b"%0*d" % (key_bytes, i) for i in range(count))
                return
            each = -(-count // 1000)
            for i in range(count):
                yield b"class-%04d/photo_of_something_%09d.jpg" % (i // each, i)

        def states(self, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.void]:
            return np.full(len(keys), np.ones((), IMAGE_STATE))

    return SyntheticSource(root)


MEMORY_MONITOR = """
import sys, threading
from benchmarks.process_memory import read_mib
done = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), done.set()), daemon=True).start()
largest = read_mib("RssAnon", sys.argv[1])
print(flush=True)
while not done.wait(0.01):
    largest = max(largest, read_mib("RssAnon", sys.argv[1]))
print(largest)
"""
"""Program that reads the private memory of a process every 10 ms, and prints the largest."""


class Stages:
    """Figures of stages, one after the other.

    Attributes:
        figures: stage -> (processor time in seconds, peak of private memory in MiB, peak with the
            pages of mapped files in MiB).
    """

    def __init__(self) -> None:
        self.figures: dict[str, tuple[float, float, float]] = {}

    def measure(self, stage: str, function: Callable[[], Any]) -> Any:
        """Call a function, record its figures, and return its value."""
        reset_peak()
        # A thread of this process would have to wait for long calls of numpy and HDF5.
        with subprocess.Popen(
            [sys.executable, "-c", MEMORY_MONITOR, str(os.getpid())], cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as monitor:  # fmt: skip
            assert monitor.stdout is not None
            monitor.stdout.readline()
            started_at = time.process_time()
            value = function()
            seconds = time.process_time() - started_at
            private = float(monitor.communicate()[0])
        self.figures[stage] = seconds, private, peak_mib()
        print(f"  {stage}: {seconds:.2f} s, {private:.0f} MiB", file=sys.stderr, flush=True)
        return value


WORKER = """
import sys
from pathlib import Path
from featx.store.listing import read_listing
rows = read_listing(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
print(len(rows), flush=True)
sys.stdin.read()
"""
"""Program of a worker that reads its listing, and then waits."""


def measure_workers_mib(
    store: Path, num_rows: int, identity: str, count: int = 8
) -> tuple[float, float]:
    """MiB that workers of one machine need together: private, and shared, counted once."""
    command = [sys.executable, "-c", WORKER, str(store), str(num_rows), identity]
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for _ in range(count)
        ]
        for worker in workers:
            assert worker.stdout is not None
            assert int(worker.stdout.readline()) == num_rows
        private = sum(read_mib("RssAnon", worker.pid) for worker in workers)
        together = sum(read_mib("Pss", worker.pid, "smaps_rollup") for worker in workers)
        for worker in workers:
            worker.communicate()
    return private, together - private


def measure_size(folder: str, num_rows: int, key_bytes: int, skipped: Sequence[str] = ()) -> None:
    """Print JSON of the stages of a store of so many rows, without the skipped stages.

    A row is a vector of two float16; parts have the 65,536 rows that 2.5 KiB a row would give
    them, so listing, parts, resume and packing do the same work, except for the bytes of features.
    """
    import featx
    from featx.store import read_listing, store_status
    from featx.store.pack import pack

    stages, root = Stages(), Path(folder)
    store = root / "store"
    identity, key = measure_writing(stages, root, num_rows, key_bytes, skipped)
    stages.measure("status", lambda: store_status(store))
    files = sum(len(names) for _, _, names in os.walk(store))
    stages.measure("worker", lambda: read_listing(store, num_rows, identity))
    workers = measure_workers_mib(store, num_rows, identity)
    stages.measure("open", lambda: featx.open(store))
    assert stages.measure("find a key", lambda: featx.open(store).row(key)) == num_rows - 1
    size = sum(path.stat().st_size for path in (store / "parts").iterdir())
    if "pack" not in skipped:
        stages.measure("pack", lambda: pack(store))
        size = (store / "features.h5").stat().st_size
    measured = {"stages": stages.figures, "files": files, "bytes": size, "workers": workers}
    print(json.dumps({"rows": num_rows, **measured}))


def measure_writing(
    stages: Stages, root: Path, num_rows: int, key_bytes: int, skipped: Sequence[str]
) -> tuple[str, bytes]:
    """Measure the stages of the writing process, which holds the listing all the time.

    Returns:
        Identity of the listing, and its last key.
    """
    from featx.pipeline import image_changes
    from featx.store import Grid, PartBuilder, Run, StoreSession, listing_identity
    from featx.types import LayerSpec, StoreHeader

    source = make_source(root, num_rows, key_bytes)
    rows = stages.measure("list", source.listing)
    identity = stages.measure("identity", lambda: listing_identity(rows))
    spec = LayerSpec("layer", "layer", "output", "none", {}, (2,), "float16", "float32")
    header = StoreHeader({"listing": identity}, "", "made up", "none", "", "none", {})
    run = Run(header, (spec,), Grid(num_rows, 1 << 16), "none", {})
    values, checksums = np.zeros((1 << 16, 2), np.float16), np.full(1 << 16, 7, np.uint64)

    def begin() -> None:
        with StoreSession(root / "store", run, rows).hold():
            pass

    def compute() -> None:
        with (session := StoreSession(root / "store", run, rows)).hold():
            for part in session.missing():
                builder = PartBuilder(part, [spec])
                features = {"layer": values[: len(part)]}
                builder.add(part.start, features, [], checksums[: len(part)])
                session.commit(builder)

    def resume() -> None:
        with (session := StoreSession(root / "store", run, rows)).hold():
            assert session.is_complete

    def compare_images() -> None:
        with (session := StoreSession(root / "store", run, rows)).hold():
            changes = image_changes(source, rows.keys, session.root, session.manifest)
            assert changes.states is not None
            assert not len(changes.rows)
            session.write_image_states(changes.states)

    for stage, function in (
        ("begin", begin), ("states", compare_images), ("commit", compute), ("resume", resume),
        ("images", compare_images),
    ):  # fmt: skip
        if stage not in skipped:
            stages.measure(stage, function)
    return identity, bytes(rows.keys[-1])


def scale(arguments: argparse.Namespace) -> None:
    """Each size runs in its own process; larger sizes are extrapolated from the last two."""
    done = []
    for num_rows in sorted(arguments.rows):
        with tempfile.TemporaryDirectory(prefix="featx-scale-", dir=arguments.folder) as name:
            # scripts/benchmark imports torch, whose 500 MiB are not those of a listing.
            parameters = f"{name!r}, {num_rows}, {arguments.key_bytes}, {arguments.skip!r}"
            code = f"from benchmarks.scaling import measure_size; measure_size({parameters})"
            printed = subprocess.run(
                [sys.executable, "-c", code], cwd=Path(__file__).parents[1],
                stdout=subprocess.PIPE, text=True, check=True,
            ).stdout  # fmt: skip
        done.append(json.loads(printed))
        print(f"{num_rows:,} rows: {done[-1]['files']} files, {done[-1]['bytes'] / 1e6:.0f} MB")
        print("8 workers: {:.0f} MiB private, {:.0f} MiB shared".format(*done[-1]["workers"]))
    before, last = done[-2:]
    beyond = [n for n in (10**7, 10**8, 10**9) if n > last["rows"]]
    sizes = [*(entry["rows"] for entry in done), *beyond]
    print("\nseconds of processor time / peak MiB of private memory / with mapped files;")
    print("~ is extrapolated from the last two")
    print("stage       " + "".join(f"{size:>24,}" for size in sizes))
    for stage, figures in last["stages"].items():
        cells = ["{:.2f} / {:.0f} / {:.0f}".format(*entry["stages"][stage]) for entry in done]
        for size in beyond:
            steps = (size - last["rows"]) / (last["rows"] - before["rows"])
            pairs = zip(before["stages"][stage], figures, strict=True)
            cells.append(
                "~{:.0f} / ~{:.0f} / ~{:.0f}".format(*(b + steps * (b - a) for a, b in pairs))
            )
        print(f"{stage:12}" + "".join(f"{cell:>24}" for cell in cells))


def add_commands(add: Add) -> None:
    """Register the commands of this module."""
    command = add("parts", parts)
    command.add_argument("--parts", type=int, default=2000, help="of one row each")
    command.add_argument(
        "--workers", nargs="+", default=["null", "1", "2"], help="worker processes"
    )
    command.add_argument("--runs", type=int, default=3)
    command.add_argument("--folder", help="where the store lies")
    command = add("workers", compare_processes)
    command.add_argument("options", nargs="*", help="of featx, such as model=resnet50")
    command.add_argument("--images", type=int, default=1024)
    command.add_argument(
        "--workers", nargs="+", default=["null", "1", "2"], help="worker processes"
    )
    command.add_argument("--runs", type=int, default=3)
    command.add_argument("--folder", help="where the store lies")
    command = add("scale", scale)
    sizes = [10**5, 10**6, 10**7]
    command.add_argument(
        "--rows", nargs="+", type=int, default=sizes, help="two or more sizes, which are measured"
    )
    command.add_argument("--key-bytes", type=int, default=NAMED_KEY_BYTES, help="bytes of a key")
    command.add_argument(
        "--skip", nargs="+", default=[], choices=["states", "images", "pack"],
        help="stages that this machine has no memory or disk for",
    )  # fmt: skip
    command.add_argument("--folder", help="where the stores lie")
