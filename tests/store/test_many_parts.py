"""Stores of very many parts: chunk tables are read in place of HDF5, and tell the same."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from made_store import MadeRun, make_run

import featx
from featx.errors import StoreError
from featx.store import Manifest
from featx.store.chunk_table import read_column_by_table
from featx.store.hdf5_files import open_raw
from featx.store.part_files import inspect_parts, map_in_threads, part_path
from featx.types import Part

FAILED = (2, 9)


@pytest.fixture
def run() -> MadeRun:
    return make_run(21, 4, {"x": (5,)}, failed=FAILED)


def looks(root: Path, run: MadeRun, many: int) -> list[tuple[Part, str | None, list[int]]]:
    made = run.as_run()
    found = inspect_parts(root, Manifest((made,)), made.parts(), many)
    return [(part, problem, [failure.row for failure in failed]) for part, problem, failed in found]


def test_a_look_at_the_tables_tells_what_hdf5_tells(run: MadeRun, tmp_path: Path) -> None:
    root = run.copied(tmp_path / "store")
    by_tables = looks(root, run, many=1)
    assert by_tables == looks(root, run, many=1000)
    assert [row for _, _, rows in by_tables for row in rows] == list(FAILED)


def test_files_that_are_not_those_parts(run: MadeRun, tmp_path: Path) -> None:
    root = run.copied(tmp_path / "store")
    other = run.changed(seed=5).finish(tmp_path / "other")
    wider = make_run(21, 4, {"x": (6,)}).finish(tmp_path / "wider")
    paths = [part_path(root, index) for index in range(6)]
    paths[0].write_bytes(paths[1].read_bytes())
    paths[2].write_bytes(part_path(other, 2).read_bytes())
    paths[3].write_bytes(part_path(wider, 3).read_bytes())
    paths[4].write_bytes(b"")
    by_tables = looks(root, run, many=1)
    assert by_tables == looks(root, run, many=1000)
    assert [problem is None for _, problem, _ in by_tables] == [False, True, *[False] * 3, True]


def test_a_file_cut_off_anywhere_is_found(run: MadeRun, tmp_path: Path) -> None:
    root = run.copied(tmp_path / "store")
    path = part_path(root, 5)
    data = path.read_bytes()
    for length in range(0, len(data), len(data) // 40):
        path.write_bytes(data[:length])
        assert looks(root, run, many=1)[5][1] is not None, length


def status_by_table(path: Path, run: MadeRun, start: int) -> np.ndarray | None:
    with contextlib.closing(open_raw(path)) as raw:
        found = read_column_by_table(raw, "status", run.as_run().digest, start)
    return None if found is None else found[0]


def test_the_status_by_the_table_is_that_of_hdf5(run: MadeRun, tmp_path: Path) -> None:
    root = run.copied(tmp_path / "store")
    for part in run.as_run().parts():
        path = part_path(root, part.index)
        found = status_by_table(path, run, part.start)
        assert np.array_equal(found, run.status()[part.start : part.stop])
        assert status_by_table(path, run, part.start + 1) is None
        assert status_by_table(path, run.changed(seed=5), part.start) is None


@pytest.mark.slow
def test_a_table_that_is_longer_than_the_end_that_is_read_at_once(tmp_path: Path) -> None:
    wide = make_run(8, 4, {f"layer{i:04d}": (1,) for i in range(500)}, failed=[6])
    root = wide.finish(tmp_path / "store")
    by_tables = looks(root, wide, many=1)
    assert by_tables == looks(root, wide, many=1000)
    assert [problem for _, problem, _ in by_tables] == [None, None]
    assert part_path(root, 0).stat().st_size > 128 << 10
    status = status_by_table(part_path(root, 0), wide, 0)
    assert np.array_equal(status, [0] * 4)


def test_very_many_items_in_threads_keep_their_order() -> None:
    assert list(map_in_threads(lambda item: item * item, range(1000))) == [
        i * i for i in range(1000)
    ]
    results = map_in_threads(lambda item: 1 // (300 - item), range(1000))
    assert next(results) == 0
    with pytest.raises(ZeroDivisionError):
        list(results)
    abandoned = map_in_threads(str, range(1000))
    next(abandoned)
    abandoned.close()
    assert not [one.name for one in threading.enumerate() if one.name.startswith("featx-files")]


@pytest.mark.parametrize("where", ["table", "status"])
def test_damage_is_left_to_hdf5(run: MadeRun, tmp_path: Path, where: str) -> None:
    root = run.copied(tmp_path / "store")
    path = part_path(root, 0)
    with h5py.File(path) as file:
        at = file["status"].id.get_chunk_info(0).byte_offset
    data = bytearray(path.read_bytes())
    data[at if where == "status" else data.rindex(b"featx chunk table 2\n") + 60] ^= 1
    path.write_bytes(data)
    assert status_by_table(path, run, 0) is None
    assert looks(root, run, many=1) == looks(root, run, many=1000)


@pytest.mark.slow
def test_a_store_of_more_parts_than_stay_open(tmp_path: Path) -> None:
    """Resumed and read by tables alone, from the part without failures to the one with."""
    run = make_run(1100, 1, {"x": (2,)}, failed=[7, 1099])
    root = run.finish(tmp_path / "store")
    store = featx.open(root)
    assert np.array_equal(store.status, run.status())
    replace(run, failures=()).finish(tmp_path / "new")
    part_path(tmp_path / "new", 7).rename(part_path(root, 7))
    assert np.array_equal(store["x"][6], run.features["x"][6])
    with pytest.raises(StoreError, match="has changed since the store was opened"):
        store["x"][7]
    run.finish(tmp_path / "old")
    part_path(tmp_path / "old", 7).rename(part_path(root, 7))
    with run.session(root).hold() as session:
        assert session.missing() == []
        assert [failure.row for failure in session.failures] == [7, 1099]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", pytest.param("zstd", marks=pytest.mark.slow)])
def test_open_descriptors_are_counted_by_files_and_not_by_layers(
    tmp_path: Path, codec: str
) -> None:
    """HDF5's, the reader's, and that of its memory map."""
    layers = {f"layer{number:02}": (3,) for number in range(12)}
    made = make_run(60, 2, layers, codec=codec)
    root = made.finish(tmp_path / "store")
    before = len(os.listdir("/proc/self/fd"))
    store = featx.open(root)
    for name in layers:
        np.testing.assert_array_equal(store[name][:], made.features[name])
    num_open = len(os.listdir("/proc/self/fd")) - before
    assert 0 < num_open <= 3 * 30 + 3
