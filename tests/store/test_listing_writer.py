"""samples.h5 of many rows: written straight to the disk, and mapped by those who read it."""

from __future__ import annotations

import errno
import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import run_python
from made_store import listing_file, make_listing, make_run, temporary_files
from system_calls import Calls, watched

from featx.errors import FeatxError, RunError
from featx.storage import AtomicFolder, is_local
from featx.store import FeatureStore, listing_identity, read_listing, write_listing
from featx.store.hdf5_files import MAPPED_BYTES, map_values
from featx.store.listing import compare_listing
from featx.types import Listing

pytestmark = pytest.mark.usefixtures("without_retry_waits")


def columns_of(num_rows: int) -> dict[str, np.ndarray]:
    numbers = np.arange(num_rows)
    return {
        "age": np.where(numbers % 3, numbers * 0.5, np.nan),
        "good": numbers % 2 == 0,
        "patient": numbers.astype("S7"),
        "visit": numbers[::-1].copy(),
    }


def long_listing(num_rows: int) -> Listing:
    """A listing without Python objects, so that a million rows take no second."""
    numbers = np.arange(num_rows)
    digits = np.stack([numbers // 10**i % 10 for i in range(8, -1, -1)], 1).astype(np.uint8) + 48
    names = np.full((num_rows, 43), ord("x"), np.uint8)
    names[:, -9:] = digits
    return Listing(names.reshape(-1).view("S43"), numbers % 5 - 1, ("a", "b", "c", "d"))


LISTINGS = {
    "one row": make_listing(1),
    "few rows": make_listing(9),
    "no classes": replace(make_listing(50), classes=(), labels=np.full(50, -1)),
    "many classes": replace(make_listing(50), classes=tuple(f"class {i}" for i in range(3000))),
    "columns": replace(make_listing(700), columns=columns_of(700)),
    "reversed arrays": Listing(make_listing(9).keys[::-1], make_listing(9).labels[::-1], ("a",)),
    "more than a piece": long_listing(450_000),
}


@pytest.mark.parametrize("name", LISTINGS)
def test_the_bytes_are_those_of_a_file_built_in_memory(name: str, tmp_path: Path) -> None:
    listing, path = LISTINGS[name], tmp_path / "samples.h5"
    write_listing(AtomicFolder(tmp_path), path, listing, streamed_bytes=0)
    assert path.read_bytes() == bytes(listing_file(listing))
    assert compare_listing(path, listing) == (len(listing), None)
    assert temporary_files(tmp_path) == []
    with h5py.File(path, "r+") as file:
        file["label"][-1] = 7
    assert compare_listing(path, listing)[1] == "its dataset /label is not that of this store"


def test_an_existing_file_is_replaced(tmp_path: Path) -> None:
    path, disk = tmp_path / "samples.h5", AtomicFolder(tmp_path)
    for streamed_bytes in (0, 1 << 30):
        for num_rows in (4, 9):
            write_listing(disk, path, make_listing(num_rows), streamed_bytes)
            assert path.read_bytes() == bytes(listing_file(make_listing(num_rows)))
    assert temporary_files(tmp_path) == []


@pytest.mark.parametrize("at", [0, 0.2, 0.5, 0.97])
def test_a_disk_that_gives_back_other_bytes_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: float
) -> None:
    path, disk = tmp_path / "samples.h5", AtomicFolder(tmp_path)
    before = bytes(listing_file(make_listing(4)))
    path.write_bytes(before)
    sync = os.fsync

    def flip_and_sync(descriptor: int) -> None:
        sync(descriptor)
        place = int(at * os.fstat(descriptor).st_size)
        [byte] = os.pread(descriptor, 1, place)
        os.pwrite(descriptor, bytes([byte ^ 4]), place)

    monkeypatch.setattr(os, "fsync", flip_and_sync)
    with pytest.raises(RunError, match=r"was not written: reading .* back from the disk"):
        write_listing(disk, path, make_listing(900), streamed_bytes=0)
    assert path.read_bytes() == before
    assert temporary_files(tmp_path) == []


@pytest.mark.parametrize("lasting", [False, True])
def test_whichever_call_fails_the_file_is_the_old_or_the_new_one(
    tmp_path: Path, lasting: bool
) -> None:
    path, disk = tmp_path / "samples.h5", AtomicFolder(tmp_path)
    old, new = (bytes(listing_file(make_listing(n))) for n in (4, 9))
    for fail_at in itertools.count(1):
        path.write_bytes(old)
        error = (errno.ENOSPC, errno.EIO)[fail_at % 2]
        with watched(Calls(tmp_path, fail_at, error, spare=("unlink",), lasting=lasting)) as calls:
            if (failure := failure_of(disk, path)) is not None:
                assert os.strerror(error) in failure
        assert path.read_bytes() in ((new,) if failure is None else (old, new))
        assert temporary_files(tmp_path) == []
        if calls.untouched:
            break
    assert fail_at > 6


def failure_of(disk: AtomicFolder, path: Path) -> str | None:
    """What the error says with which a listing of nine rows is not written, or None."""
    try:
        write_listing(disk, path, make_listing(9), streamed_bytes=0)
    except FeatxError as error:
        return str(error)
    return None


class TestMapped:
    """Datasets that are mapped have the values that HDF5 reads; all others are left to HDF5."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        if not is_local(tmp_path.stat().st_dev):
            pytest.skip("the folder of the tests is not on a local disk")
        path = tmp_path / "samples.h5"
        listing = replace(make_listing(700), columns=columns_of(700))
        path.write_bytes(listing_file(listing))
        return path

    def mapped(self, path: Path, name: str, least_bytes: int = 0) -> Any:
        with path.open("rb") as raw, h5py.File(path) as file:
            return map_values(file[name], raw.fileno(), least_bytes)

    @pytest.mark.parametrize("name", ["key", "label", "columns/age", "columns/patient"])
    def test_values(self, path: Path, name: str) -> None:
        values = self.mapped(path, name)
        path.unlink()
        with pytest.raises(ValueError, match="read-only"):
            values[0] = values[1]
        expected = {"key": make_listing(700).keys, "label": make_listing(700).labels}
        expected |= {f"columns/{column}": array for column, array in columns_of(700).items()}
        assert values.tobytes() == expected[name].tobytes()
        assert values.dtype == expected[name].dtype

    def test_booleans_and_small_datasets_are_left_out(self, path: Path) -> None:
        assert self.mapped(path, "columns/good") is None
        assert self.mapped(path, "key", 700 * 12 + 1) is None
        assert self.mapped(path, "key", 700 * 12) is not None

    def test_other_forms_are_left_out(self, path: Path) -> None:
        with h5py.File(path, "r+") as file:
            file.create_dataset("chunks", data=np.arange(9), chunks=(4,))
            file.create_dataset("big endian", data=np.arange(9, dtype=">i8"))
            file.create_dataset("table", data=np.ones((3, 3)))
            file.create_dataset("without values", (9,), "i8")
            file.create_dataset("texts", data=["a", "b"], dtype=h5py.string_dtype())
            file.create_dataset("padded", data=[b"a", b"b"], dtype=padded_with_spaces(3))
        others = ["chunks", "table", "without values", "texts", "padded"]
        assert [name for name in others if self.mapped(path, name) is not None] == []
        assert self.mapped(path, "big endian").tolist() == list(range(9))

    def test_files_of_other_file_systems_and_short_ones_are_left_out(
        self, path: Path, request: pytest.FixtureRequest
    ) -> None:
        with path.open("rb") as raw, h5py.File(path) as file:
            keys = file["key"]
            os.truncate(path, 4096)
            assert map_values(keys, raw.fileno(), 0) is None
        path.write_bytes(listing_file(make_listing(700)))
        request.getfixturevalue("network_disk")
        assert self.mapped(path, "key") is None


def padded_with_spaces(width: int) -> Any:
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(width)
    kind.set_strpad(h5py.h5t.STR_SPACEPAD)
    return h5py.Datatype(kind)


MEMORY = """
import re, sys
from pathlib import Path
import numpy as np
from test_listing_writer import long_listing
from featx.storage import AtomicFolder
from featx.store.listing import (
    compare_listing, is_ascending, listing_identity, read_listing, write_listing
)
from featx.store.reader import FeatureStore

def mib(field):
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\\s+(\\d+)", text)[1]) / 1024

root, num_rows = Path(sys.argv[1]), int(sys.argv[2])
what = sys.argv[3]
rows = long_listing(num_rows if what in ("write", "compare") else 9)
if what != "write":
    FeatureStore(root)  # imports h5py's parts
Path("/proc/self/clear_refs").write_text("5")
private, peak = mib("RssAnon"), mib("VmHWM")
if what == "write":
    write_listing(AtomicFolder(root), root / "samples.h5", rows)
elif what == "compare":
    assert compare_listing(root / "samples.h5", rows) == (num_rows, None)
elif what == "read":
    found = read_listing(root, num_rows, sys.argv[4])
    assert listing_identity(found) == sys.argv[4]
    assert is_ascending(found.keys)
else:
    store = FeatureStore(root)
    assert store.row(long_listing(9).keys[7]) == 7
    try:
        store.row("x" * 60)
    except KeyError as error:
        assert "has no row" in str(error)
# What is mapped counts as well in the peak, and is no memory of this process.
print(mib("VmHWM") - peak if what in ("write", "compare") else mib("RssAnon") - private)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["write", "compare", "read", "find"])
def test_no_step_holds_the_listing_a_second_time(what: str, tmp_path: Path) -> None:
    """Keys and labels are 128 MB and 24 MB; what is read stays alive while it is measured."""
    if what in ("read", "find") and not is_local(tmp_path.stat().st_dev):
        pytest.skip("the folder of the tests is not on a local disk")
    num_rows = 3_000_000
    listing = long_listing(num_rows)
    assert listing.keys.nbytes > MAPPED_BYTES
    run = replace(make_run(1, 1 << 22, {"x": ()}), listing=listing)
    with run.session(tmp_path).hold():
        pass
    arguments = [tmp_path, num_rows, what, listing_identity(listing)]
    path = [Path(__file__).parents[1], Path(__file__).parent]
    # A labels dataset of 24 MB is below the size that is mapped.
    assert float(run_python("-c", MEMORY, *arguments, path=path).stdout) < 48


@pytest.mark.slow
def test_a_large_listing_is_mapped_by_workers_and_readers(tmp_path: Path) -> None:
    if not is_local(tmp_path.stat().st_dev):
        pytest.skip("the folder of the tests is not on a local disk")
    listing = long_listing(1_700_000)
    with replace(make_run(1, 1 << 21, {"x": ()}), listing=listing).session(tmp_path).hold():
        pass
    found = read_listing(tmp_path, len(listing), listing_identity(listing))
    assert found is not None
    assert not found.keys.flags.writeable
    store = FeatureStore(tmp_path)
    assert not store.key_bytes.flags.writeable
    assert store.labels.flags.writeable
    assert store.row(bytes(listing.keys[-1])) == len(listing) - 1
