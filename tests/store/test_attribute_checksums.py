"""The texts of attributes: no reader asks HDF5 for one whose heap is damaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import h5py
import pytest
from made_store import MadeRun, make_run

import featx
from featx.errors import StoreError
from featx.store import check_store, layout, open_hdf5, open_metadata

SIGNATURE = b"GCOL"


@pytest.fixture
def run() -> MadeRun:
    return make_run(11, 4, {"flat": (5,), "map": (3, 2, 2)}, failed=[2, 9]).identified()


@pytest.fixture(params=[False, True], ids=["part", "packed"])
def file(request: pytest.FixtureRequest, run: MadeRun, tmp_path: Path) -> Path:
    root = run.finish(tmp_path / "store", packed=request.param)
    return root / (layout.PACKED if request.param else f"parts/{layout.part_name(1)}")


def heaps(path: Path) -> list[tuple[int, int]]:
    with h5py.File(path, "r") as opened:
        return [(int(at), int(size)) for at, size, _ in opened.attrs[layout.TEXT_CHECKSUMS]]


def test_every_heap_of_a_file_has_a_checksum(file: Path) -> None:
    data, found, at = file.read_bytes(), [], -1
    while (at := data.find(SIGNATURE, at + 1)) >= 0:
        found.append(at)
    assert found
    assert [address for address, _ in heaps(file)] == found


def test_long_texts_fill_several_heaps(run: MadeRun, tmp_path: Path) -> None:
    run = replace(run, header=replace(run.header, config="x: 1\n" * 4000))
    path = run.identified().finish(tmp_path / "store", packed=True) / layout.PACKED
    assert sum(size for _, size in heaps(path)) > 20_000
    assert featx.open(path.parent).attrs["config"] == run.header.config


@pytest.mark.slow
def test_no_flipped_byte_of_a_heap_gets_as_far_as_hdf5(file: Path) -> None:
    pristine = file.read_bytes()
    for address, size in heaps(file):
        for offset in range(address, address + size, 7):
            data = bytearray(pristine)
            data[offset] ^= 1 << offset % 8
            file.write_bytes(data)
            for opening in (open_hdf5, open_metadata):
                with pytest.raises(StoreError, match="texts of its attributes"), opening(file):
                    pass
    assert check_store(file.parent if file.name == layout.PACKED else file.parents[1]).damages


def test_a_file_that_is_shorter_than_its_heap(file: Path) -> None:
    """The claim of a stranger's file: no memory is taken for it."""
    with h5py.File(file, "r+") as opened:
        opened.attrs[layout.TEXT_CHECKSUMS] = [[0, 1 << 60, 0]]
    with pytest.raises(StoreError, match="texts of its attributes"):
        open_hdf5(file)


def test_files_of_early_runs_have_no_such_checksum(file: Path, run: MadeRun) -> None:
    with h5py.File(file, "r+") as opened:
        del opened.attrs[layout.TEXT_CHECKSUMS]
    with open_hdf5(file) as opened:
        assert opened.attrs["model"] == run.header.model
