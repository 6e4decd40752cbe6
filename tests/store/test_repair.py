"""Repair keeps every sound row, bit for bit, and names the others."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import slow_except
from interruptions import Dies, die_at_disk_change
from made_store import (
    MadeRun,
    as_bfloat16,
    dataset_digests,
    make_added,
    make_run,
    temporary_files,
)

from featx.errors import RunError, StoreError, StoreLockedError
from featx.store import (
    FeatureStore,
    check_store,
    layout,
    missing_parts,
    read_manifest,
    repair_files,
    runs_to_extract,
)

pytestmark = pytest.mark.usefixtures("without_retry_waits")


@pytest.fixture
def run() -> MadeRun:
    return make_run(29, 8, failed=[2, 17, 20], damaged=[5, 21]).identified()


def spoil(path: Path, name: str, rows: Any, value: Any = 0.25) -> None:
    with h5py.File(path, "r+") as file:
        file[name][rows] = value


def lacking(root: Path) -> list[int]:
    manifest = read_manifest(root)
    assert manifest is not None
    return [part.index for _, parts in missing_parts(root, manifest) for part in parts]


def repaired(root: Path) -> None:
    """Repair what needs no images; which rows are lost was known before."""
    report = check_store(root)
    before = snapshot(root)
    expected = [run.names for run in runs_to_extract(report)]
    assert snapshot(root) == before
    assert [run.names for run in repair_files(report)] == expected


def snapshot(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_sound_store_is_left_alone(run: MadeRun, tmp_path: Path) -> None:
    run.copied(tmp_path, packed=True)
    before = snapshot(tmp_path)
    repaired(tmp_path)
    assert snapshot(tmp_path) == before


def test_of_parts_only_the_bad_one_goes(run: MadeRun, tmp_path: Path) -> None:
    run.copied(tmp_path)
    parts = sorted((tmp_path / "parts").iterdir())
    before = {path.name: path.read_bytes() for path in parts}
    spoil(parts[1], "features/map", 3)
    bad = parts[1].read_bytes()
    repaired(tmp_path)
    assert parts[1].read_bytes() == bad
    assert lacking(tmp_path) == [1]
    run.finish(tmp_path)
    assert check_store(tmp_path).complete
    assert {path.name: path.read_bytes() for path in parts} == before


def test_a_part_that_was_computed_again_is_not_called_damaged(
    run: MadeRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run.copied(tmp_path)
    for part in ("part-000000.h5", "part-000002.h5"):
        spoil(tmp_path / "parts" / part, "features/map", 3)
    repaired(tmp_path)
    with run.session(tmp_path).hold() as session:
        assert caplog.text.count("is not valid") >= 2
        caplog.clear()
        assert run.compute_lost(session)
    with run.session(tmp_path).hold():
        pass
    assert caplog.text == ""
    assert not (tmp_path / "damaged.json").exists()
    assert check_store(tmp_path).complete


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "row", "left"),
    [("features/map", 20, {2}), ("key", 9, set()), ("classes", 0, set()), ("status", 9, {0, 1}),
     ("checksums/features/flat", 1, set()), ("failures/row", 1, set())],
)  # fmt: skip
def test_of_a_packed_file_the_parts_with_bad_rows_go(
    run: MadeRun, tmp_path: Path, name: str, row: int, left: set[int]
) -> None:
    run.copied(tmp_path, packed=True)
    before = dataset_digests(tmp_path / "features.h5")
    value = b"cow" if name in ("key", "classes") else 1
    spoil(tmp_path / "features.h5", name, row, value)
    repaired(tmp_path)
    lost = set(lacking(tmp_path))
    assert lost == left if name != "status" else lost <= {0, 1, 2, 3}
    assert check_store(tmp_path).complete == (not lost)
    run.finish(tmp_path, packed=True)
    assert dataset_digests(tmp_path / "features.h5") == before
    assert check_store(tmp_path).complete


@pytest.mark.slow
def test_of_several_runs_only_the_layers_with_bad_rows_are_lost(
    run: MadeRun, tmp_path: Path
) -> None:
    """Rows that failed in one run only keep their values and their reasons in the other."""
    added = make_added(run, {"deep": (7,)}, failed=[2, 5])
    run.copied(tmp_path, packed=True)
    added.finish(tmp_path, packed=True)
    before = dataset_digests(tmp_path / "features.h5")
    spoil(tmp_path / "features.h5", "features/deep", 12)
    repaired(tmp_path)
    assert lacking(tmp_path) == [4 + 1]
    added.finish(tmp_path)
    store = FeatureStore(tmp_path)
    assert check_store(tmp_path).complete
    np.testing.assert_array_equal(store["flat"][5], run.features["flat"][5])
    np.testing.assert_array_equal(store["deep"][17], added.features["deep"][17])
    added.finish(tmp_path, packed=True)
    now = dataset_digests(tmp_path / "features.h5")
    assert {k: v for k, v in now.items() if k != "failures/message"} == {
        k: v for k, v in before.items() if k != "failures/message"
    }


@pytest.fixture
def small_chunks(set_chunk_bytes: Callable[[int], None]) -> None:
    """Two rows of `map` in a chunk, four of `flat`."""
    set_chunk_bytes(100)


def lost_rows(root: Path) -> list[int]:
    manifest = read_manifest(root)
    assert manifest is not None
    ranges = [part for _, parts in missing_parts(root, manifest) for part in parts]
    return [row for part in ranges for row in range(part.start, part.stop)]


def compute_lost(run: MadeRun, root: Path) -> list[int]:
    with run.session(root).hold() as session:
        return run.compute_lost(session)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("packed", [True, False])
def test_only_the_rows_of_damaged_chunks_are_lost(
    run: MadeRun, tmp_path: Path, packed: bool
) -> None:
    """Two chunks of a part, in two layers: the other rows stay, failed ones with their reasons."""
    run.copied(tmp_path, packed=packed)
    before = contents_of(tmp_path)
    path = tmp_path / ("features.h5" if packed else "parts/part-000002.h5")
    first = 0 if packed else 16
    spoil(path, "features/map", 19 - first)  # rows 18 and 19
    spoil(path, "features/flat", 21 - first)  # rows 20 to 23
    repaired(tmp_path)
    assert lost_rows(tmp_path) == [18, 19, 20, 21, 22, 23]
    store = FeatureStore(tmp_path)
    np.testing.assert_array_equal(store["map"][16:18], run.expected("map")[16:18])
    with pytest.raises(StoreError, match=r"verify\.repair=true"):
        store["map"][18:20]
    assert compute_lost(run, tmp_path) == [18, 19, 20, 21, 22, 23]
    assert not (tmp_path / layout.DAMAGED).exists() or packed
    assert check_store(tmp_path).complete
    np.testing.assert_equal(contents_of(tmp_path), before)


def contents_of(root: Path) -> tuple[Any, ...]:
    store = FeatureStore(root)
    return {name: store[name][:] for name in store}, store.status, store.failures


@pytest.mark.slow
def test_a_damaged_listing_spoils_no_label_of_a_packed_file_taken_apart(
    run: MadeRun, tmp_path: Path
) -> None:
    """Both are damaged at once: the labels must come from the one whose sha256 is right."""
    run.copied(tmp_path, packed=True)
    spoil(tmp_path / "samples.h5", "label", slice(None), 1)
    spoil(tmp_path / "features.h5", "features/flat", 3)
    repaired(tmp_path)
    run.finish(tmp_path)
    store = FeatureStore(tmp_path)
    assert store.labels.tolist() == run.listing.labels.tolist()
    assert check_store(tmp_path).complete
    run.finish(tmp_path, packed=True)
    assert FeatureStore(tmp_path).labels.tolist() == run.listing.labels.tolist()


@pytest.mark.parametrize(("name", "packed"), [("message", True), ("error", False)])
def test_lost_messages_come_from_failures_csv(
    run: MadeRun, tmp_path: Path, packed: bool, name: str
) -> None:
    run.copied(tmp_path, packed=packed)
    before = FeatureStore(tmp_path).failures
    path = tmp_path / ("features.h5" if packed else "parts/part-000002.h5")
    spoil(path, f"failures/{name}", 0, b"flipped")
    repaired(tmp_path)
    found = FeatureStore(tmp_path).failures
    for failure in (*before, *found):  # a line break is an escape in the CSV
        failure["message"] = failure["message"].replace("\n", "\\n")
    assert found == before
    # Without the file, the rows are kept and say that their messages are lost.
    spoil(tmp_path / "parts/part-000002.h5", f"failures/{name}", 0, b"flipped")
    (tmp_path / "failures.csv").unlink()
    repaired(tmp_path)
    after = FeatureStore(tmp_path).failures
    assert [failure["row"] for failure in after] == [failure["row"] for failure in before]
    assert after[0]["error"] == before[0]["error"]
    assert after[1][name] == after[2][name] == "lost with a damaged file"


@pytest.mark.slow
def test_failures_that_are_not_counted_never_make_a_failed_row_ok(
    run: MadeRun, tmp_path: Path
) -> None:
    run.copied(tmp_path, packed=True)
    with h5py.File(tmp_path / "features.h5", "r+") as file:
        file.attrs.modify("num_failures", 0)
    repaired(tmp_path)
    run.finish(tmp_path)
    assert FeatureStore(tmp_path).status.tolist() == run.status().tolist()
    assert check_store(tmp_path).complete


def interrupted(root: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Repair that is killed at its `at`-th step on the disk; False where it came to its end."""
    with monkeypatch.context() as patch:
        die_at_disk_change(patch, at + 1)
        try:
            repair_files(check_store(root))
        except Dies:
            return True
    return False


@pytest.mark.parametrize("at", slow_except(range(5), 1, 3))
def test_an_interrupted_repair_is_given_again(
    run: MadeRun, tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts that it made already are neither damage nor lost."""
    run.copied(tmp_path, packed=True)
    before = dataset_digests(tmp_path / "features.h5")
    spoil(tmp_path / "features.h5", "features/flat", 3)
    (tmp_path / "featx.json").write_bytes(b"{")
    assert interrupted(tmp_path, at, monkeypatch)
    repaired(tmp_path)
    assert lacking(tmp_path) == [0]
    run.finish(tmp_path, packed=True)
    assert dataset_digests(tmp_path / "features.h5") == before
    assert temporary_files(tmp_path) == []


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("packed", [True, False])
def test_a_good_row_is_in_the_store_at_every_step_of_a_repair(
    run: MadeRun, tmp_path: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part whose chunks are sound is rebuilt; of another one all rows but those of one chunk."""
    for at in range(20):
        root = tmp_path / str(at)
        run.copied(root, packed=packed)
        rebuilt = root / "parts" / "part-000001.h5"
        if packed:
            spoil(root / "features.h5", "features/flat", 17)  # rows 16 to 19
        else:
            data = bytearray(rebuilt.read_bytes())
            data[data.find(b"OHDR", 200) + 5] ^= 1  # header of a dataset
            rebuilt.write_bytes(data)
            spoil(root / "parts" / "part-000002.h5", "features/flat", 1)
        is_interrupted = interrupted(root, at, monkeypatch)
        assert packed or rebuilt.exists()
        repaired(root)
        assert lost_rows(root) == [16, 17, 18, 19]
        if not is_interrupted:
            break
    assert at >= 2


def test_a_full_disk_leaves_the_packed_file_where_it_is(
    run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its good rows are nowhere else yet."""
    run.copied(tmp_path, packed=True)
    spoil(tmp_path / "features.h5", "features/flat", 3)
    bad = (tmp_path / "features.h5").read_bytes()

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    report = check_store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(RunError, match="Free some space"):
            repair_files(report)
    assert (tmp_path / "features.h5").read_bytes() == bad
    repaired(tmp_path)
    assert lacking(tmp_path) == [0]


def test_a_packed_file_that_cannot_be_read_now_is_left_where_it_is(
    run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.copied(tmp_path, packed=True)
    spoil(tmp_path / "features.h5", "features/flat", 3)
    report = check_store(tmp_path)

    def failing(path: Path) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("featx.store.sound_rows.open_metadata", failing)
    with pytest.raises(StoreError, match="When it can be read"):
        repair_files(report)
    assert (tmp_path / "features.h5").exists()


def test_a_store_that_is_being_written_is_not_repaired(run: MadeRun, tmp_path: Path) -> None:
    run.copied(tmp_path)
    spoil(tmp_path / "parts" / "part-000001.h5", "features/flat", 3)
    report = check_store(tmp_path)
    with run.session(tmp_path).hold(), pytest.raises(StoreLockedError):
        repair_files(report)
    assert (tmp_path / "parts" / "part-000001.h5").exists()


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_a_chunk_that_cannot_be_decoded_costs_its_rows_only(tmp_path: Path, codec: str) -> None:
    made = make_run(29, 8, {"flat": (40,)}, codec=codec, failed=[9]).identified()
    made.copied(tmp_path, packed=True)
    before = dataset_digests(tmp_path / "features.h5")
    with h5py.File(tmp_path / "features.h5") as file:
        info = file["features/flat"].id.get_chunk_info(2)
    with (tmp_path / "features.h5").open("r+b") as raw:
        raw.seek(info.byte_offset + info.size // 4)
        raw.write(b"\xff" * (info.size // 2))
    repaired(tmp_path)
    assert lacking(tmp_path) == [2]
    made.finish(tmp_path, packed=True)
    assert dataset_digests(tmp_path / "features.h5") == before


@pytest.mark.parametrize(
    ("codec", "dtype"), [("gzip", "float32"), ("gzip", "bfloat16"), ("zstd", "bfloat16")]
)
def test_without_a_chunk_table_a_chunk_that_cannot_be_decoded_costs_its_rows_only(
    tmp_path: Path, codec: str, dtype: str, set_chunk_bytes: Callable[[int], None]
) -> None:
    """HDF5 alone then reads the part; it gives bfloat16 another type than the file has."""
    set_chunk_bytes(320)
    made = make_run(29, 32, {"flat": (40,)}, codec=codec)
    made = as_bfloat16(made) if dtype == "bfloat16" else made
    made.identified().copied(tmp_path)
    path = tmp_path / "parts" / "part-000000.h5"
    with h5py.File(path) as file:
        step = file["features/flat"].chunks[0]
        info = file["features/flat"].id.get_chunk_info(1)
    assert 0 < step < 29 // 2
    data = bytearray(path.read_bytes())
    data[info.byte_offset : info.byte_offset + 16] = b"\xff" * 16
    data[data.rfind(b"featx chunk table 2") + 60] ^= 1
    path.write_bytes(data)
    repaired(tmp_path)
    assert lost_rows(tmp_path) == list(range(step, 2 * step))


@pytest.mark.slow
def test_a_sound_leftover_is_kept_and_an_unsound_one_makes_room(
    run: MadeRun, tmp_path: Path
) -> None:
    """A part left beside the packed file must not stand in the way of the row it should hold."""
    run.copied(tmp_path / "s", packed=True)
    run.copied(tmp_path / "parts only")
    other = replace(run, features={n: v + 1 for n, v in run.features.items()})
    other.copied(tmp_path / "other")
    root = tmp_path / "s"
    (root / "parts").mkdir()
    for index, source in ((1, "parts only"), (2, "other")):
        name = f"part-{index:06d}.h5"
        (root / "parts" / name).write_bytes((tmp_path / source / "parts" / name).read_bytes())
    spoil(root / "parts" / "part-000002.h5", "features/flat", 0)
    spoil(root / "features.h5", "features/flat", 3)
    repaired(root)
    assert lacking(root) == [0]
    run.finish(root, packed=True)
    assert np.array_equal(FeatureStore(root)["flat"][:], run.expected("flat"), equal_nan=True)
