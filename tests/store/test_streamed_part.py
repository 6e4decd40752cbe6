"""Parts whose rows go to the disk as they come: the same bytes, and nothing lost or left behind."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run_python, slow_except, with_path
from made_store import MadeRun, as_bfloat16, dataset_digests, make_run, temporary_files

from featx.errors import RunError
from featx.store import FeatureStore, check_store
from featx.store.chunk_file import SparseImage
from featx.store.part_files import part_path

pytestmark = pytest.mark.usefixtures("without_retry_waits")

RUNS: dict[str, dict[str, Any]] = {
    "tiny": {"num_rows": 21, "part_rows": 8, "failed": [2, 17]},
    "small chunks": {"num_rows": 600, "part_rows": 512, "shapes": {"a": (1024,), "b": (3, 5, 5)}},
    "one chunk": {"num_rows": 100, "part_rows": 128, "shapes": {"a": (7,), "b": ()}},
    "tokens": {"num_rows": 5, "part_rows": 4, "shapes": {"tokens": (197, 768)}, "failed": [4]},
    "float32": {"num_rows": 40, "part_rows": 64, "shapes": {"a": (90_000,)}, "dtype": "float32"},
    "rows of more than a chunk": {"num_rows": 3, "part_rows": 2, "shapes": {"a": (700_000,)}},
}


def written(run: MadeRun, root: Path, batch: int) -> dict[str, bytes]:
    """Content of all files of parts, each filled in batches."""
    with run.session(root).hold() as session:
        for part in session.missing():
            builder = run.part_of(session, part, batch)
            assert bool(temporary_files(root)) == run.streamed
            session.commit(builder)
    assert temporary_files(root) == []
    return {path.name: path.read_bytes() for path in sorted((root / "parts").iterdir())}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("batch", slow_except([3, 4096], 3))
def test_the_bytes_are_those_of_a_part_built_in_memory(
    name: str, batch: int, tmp_path: Path
) -> None:
    run = make_run(**RUNS[name])
    in_memory = written(run, tmp_path / "memory", batch)
    assert written(replace(run, streamed=True), tmp_path / "streamed", batch) == in_memory


def test_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    run = make_run(9, 4, {"x": (5, 4)})
    bits = np.arange(180, dtype=np.uint16).reshape(9, 5, 4) + 0x3F00
    run = replace(as_bfloat16(run), features={"x": bits})
    in_memory = written(run, tmp_path / "memory", 2)
    assert written(replace(run, streamed=True), tmp_path / "streamed", 2) == in_memory


@pytest.mark.parametrize("streamed_bytes", [0, 1 << 60], ids=["streamed", "in memory"])
def test_the_rows_handed_over_are_not_kept(tmp_path: Path, streamed_bytes: int) -> None:
    """The engine may use its buffers again, also those of rows of an incomplete chunk."""
    run = make_run(6, 8, {"x": (3,)})
    with run.session(tmp_path / "store").hold() as session:
        [part] = session.missing()
        builder = session.begin_part(part, run.specs, streamed_bytes)
        for row in range(6):
            values = run.features["x"][row : row + 1].copy()
            builder.add(row, {"x": values}, [])
            values[:] = 0
        session.commit(builder)
    assert np.array_equal(FeatureStore(tmp_path / "store")["x"][:], run.features["x"])


def test_maps_in_channels_last_are_copied_chunk_by_chunk(tmp_path: Path) -> None:
    run = make_run(256, 256, {"x": (256, 14, 14)}, dtype="float32")
    rows = np.zeros((64, 14, 14, 256), np.float32).transpose(0, 3, 1, 2)
    with run.session(tmp_path / "store").hold() as session:
        [part] = session.missing()
        builder = session.begin_part(part, run.specs, streamed_bytes=0)
        tracemalloc.start()
        try:
            builder.add(0, {"x": rows}, [])
            assert tracemalloc.get_traced_memory()[1] < rows.nbytes / 2
        finally:
            tracemalloc.stop()
            builder.discard()


def test_rows_out_of_order_are_refused(tmp_path: Path) -> None:
    run = make_run(8, 8, {"x": (3,)})
    with run.session(tmp_path / "store").hold() as session:
        builder = session.begin_part(session.missing()[0], run.specs, streamed_bytes=0)
        with pytest.raises(AssertionError, match="in order"):
            builder.add(4, {"x": run.features["x"][4:]}, [])


def test_small_parts_and_compressed_ones_are_built_in_memory(tmp_path: Path) -> None:
    for codec in ("none", "gzip"):
        run = make_run(8, 8, {"x": (1024, 32)}, codec=codec)
        num_bytes = 8 * 1024 * 32 * 4
        with run.session(tmp_path / codec).hold() as session:
            [part] = session.missing()
            for least, is_streamed in ((num_bytes, codec == "none"), (num_bytes + 1, False)):
                builder = session.begin_part(part, run.specs, least)
                assert bool(temporary_files(tmp_path)) == is_streamed
                builder.discard()
        assert temporary_files(tmp_path) == []


def test_a_part_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    run = replace(make_run(8, 4, {"x": (3,)}), streamed=True)
    root = tmp_path / "store"

    def stop_in_the_second_part() -> None:
        with run.session(root).hold() as session:
            first, second = session.missing()
            session.commit(run.part_of(session, first))
            run.part_of(session, second)
            assert len(temporary_files(root)) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_in_the_second_part()
    assert temporary_files(root) == []
    assert FeatureStore(root).status.tolist() == [0] * 4 + [255] * 4


def test_another_process_was_first(tmp_path: Path) -> None:
    run = replace(make_run(4, 4, {"x": (3,)}, failed=[1]), streamed=True)
    root = tmp_path / "store"
    with run.session(root).hold() as session:
        [part] = session.missing()
        mine = run.part_of(session, part)
        session.commit(run.part_of(session, part))
        kept = part_path(root, 0).stat().st_ino
        assert [failure.row for failure in session.commit(mine)] == [1]
        assert part_path(root, 0).stat().st_ino == kept
    assert temporary_files(root) == []


@pytest.mark.parametrize("at", [0, 0.3, 0.9])
def test_a_disk_that_gives_back_other_bytes_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: float
) -> None:
    run = replace(make_run(8, 8, {"x": (10_000,)}), streamed=True)
    sync = os.fsync

    def flip_and_sync(descriptor: int) -> None:
        sync(descriptor)
        if ".tmp-part" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            place = int(at * os.fstat(descriptor).st_size)
            [byte] = os.pread(descriptor, 1, place)
            os.pwrite(descriptor, bytes([byte ^ 4]), place)

    root = tmp_path / "store"
    with run.session(root).hold() as session:
        builder = run.part_of(session, session.missing()[0])
        monkeypatch.setattr(os, "fsync", flip_and_sync)
        with pytest.raises(RunError, match=r"was not written: reading .* back from the disk"):
            session.commit(builder)
    monkeypatch.undo()
    assert list((root / "parts").iterdir()) == []
    run.finish(root)
    assert check_store(root).complete


KILLED = """
import json, sys
from dataclasses import replace
from pathlib import Path
from featx.store.pack import pack
from made_store import make_run
root, streamed = Path(sys.argv[1]), sys.argv[3] == "True"
run = replace(make_run(**json.loads(sys.argv[2])), streamed=streamed)
print("ready", flush=True)
with run.session(root).hold() as session:
    for part in session.missing():
        session.commit(run.part_of(session, part, 2))
        print(part.index, flush=True)
    if not session.is_packed:
        pack(root)
        session.finish_packing()
"""

KILL_RUN: dict[str, Any] = {
    "num_rows": 96, "part_rows": 8, "shapes": {"a": (40_000,), "b": (3, 7)}, "failed": [5, 40]
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("streamed", "num_kills"), [(True, 200), (False, 40)])
def test_kills_lose_no_committed_part(tmp_path: Path, streamed: bool, num_kills: int) -> None:
    """What a run said to be committed is there after a kill, and never anything else."""
    run, draw = make_run(**KILL_RUN), random.Random(7)
    root, said, kills = tmp_path / "store", set(), 0
    while kills < num_kills:
        command = [sys.executable, "-c", KILLED, str(root), json.dumps(KILL_RUN), str(streamed)]
        environment = with_path(Path(__file__).parents[2], Path(__file__).parents[1])
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(draw.uniform(0, 0.35))
            process.send_signal(signal.SIGKILL)
            said |= {int(line) for line in process.stdout if line.endswith("\n")}
        kills += process.returncode == -signal.SIGKILL
        if not (root / "samples.h5").exists():  # it comes before the first part
            assert not said
            continue
        store = FeatureStore(root)
        status = store.status
        there = status != 255
        for index in said:
            assert there[8 * index : 8 * index + 8].all(), f"part {index} was committed and is gone"
        for name in run.features:
            assert np.array_equal(store[name][:][there], run.expected(name)[there], equal_nan=True)
        if process.returncode == 0:  # begun again, so that every kill meets a run
            shutil.rmtree(root)
            said.clear()
    run.finish(root, packed=True)
    assert check_store(root).complete
    assert temporary_files(root) == []
    whole = run.copied(tmp_path / "whole", packed=True)
    assert dataset_digests(root / "features.h5") == dataset_digests(whole / "features.h5")


LARGE_PART = """
import resource, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
sys.path.insert(0, "scripts")
from benchmarks.synthetic_stores import make_run
from featx.store import StoreSession, layout

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

shape, num_rows, batch = (197, 768), 8192, 32
run, listing = make_run(num_rows, shape)
run = replace(run, grid=layout.Grid(num_rows, num_rows))
values = np.random.default_rng(0).integers(0, 1 << 14, (batch, *shape), np.uint16).view(np.float16)
with StoreSession(Path(sys.argv[1], "store"), run, listing).hold() as session:
    before = peak_mib()
    [part] = session.missing()
    builder = session.begin_part(part, run.layers)
    for start in range(0, num_rows, batch):
        builder.add(start, {"layer": values}, [])
    session.commit(builder)
    print(peak_mib() - before)
"""


@pytest.mark.slow
def test_a_part_of_2_gib_takes_little_memory(tmp_path: Path) -> None:
    """Without a codec; with one, a part is held in memory, as docs/store-format.md says."""
    repository = Path(__file__).parents[2]
    done = run_python("-c", LARGE_PART, tmp_path, path=[repository], cwd=repository)
    assert float(done.stdout) < 400


PAGE = 1 << 16


def read_all(image: SparseImage) -> bytes:
    image.seek(0)
    return image.read() or b""


def test_a_sparse_image_behaves_as_a_file(tmp_path: Path) -> None:
    rng = random.Random(0)
    image = SparseImage()
    with (tmp_path / "file").open("w+b") as file:
        for _ in range(200):
            at, count = rng.randrange(4 * PAGE), rng.randrange(PAGE)
            if rng.random() < 0.3:
                assert image.truncate(at) == file.truncate(at)
            else:
                data = bytes(count) if rng.random() < 0.3 else rng.randbytes(count)
                assert image.seek(at) == file.seek(at)
                assert image.write(data) == file.write(data)
                assert image.tell() == file.tell()
            file.flush()
            assert read_all(image) == (tmp_path / "file").read_bytes()


def test_neither_zeros_nor_what_was_truncated_take_memory() -> None:
    image = SparseImage()
    tracemalloc.start()
    try:
        image.write(bytes(64 * PAGE))
        image.write(os.urandom(64 * PAGE))
        assert tracemalloc.get_traced_memory()[0] > 60 * PAGE
        image.truncate(64 * PAGE)
        assert tracemalloc.get_traced_memory()[0] < PAGE
    finally:
        tracemalloc.stop()
    assert image.size == 64 * PAGE
