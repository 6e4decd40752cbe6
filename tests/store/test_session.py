"""A store started, stopped, damaged, resumed: what counts as done and what is refused."""

from __future__ import annotations

import csv
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import slow_except
from made_store import MadeRun, make_listing, make_run, temporary_files
from system_calls import Calls, watched

from featx.errors import StoreError, StoreLockedError, StoreMismatchError
from featx.storage import AtomicFolder
from featx.store import FeatureStore, commit_part
from featx.store.pack import pack
from featx.store.part_files import part_path

pytestmark = pytest.mark.usefixtures("without_retry_waits")


@pytest.fixture
def run() -> MadeRun:
    """Four parts of 8 rows, the last one short; failures in the first and the third."""
    return make_run(num_rows=29, part_rows=8, failed=[2, 17, 20], damaged=[5, 21])


def missing(run: MadeRun, root: Path) -> list[int]:
    """What a resume finds to be done."""
    with run.session(root).hold() as session:
        parts = {*session.missing(), *session.parts_with(session.lost_rows())}
        return sorted(part.index for part in parts)


def test_a_new_store_has_its_manifest_listing_and_no_rows(run: MadeRun, tmp_path: Path) -> None:
    root = tmp_path / "runs" / "store"
    with run.session(root).hold() as session:
        assert [part.index for part in session.missing()] == [0, 1, 2, 3]
        assert session.num_committed == 0
    manifest = json.loads((root / "featx.json").read_text())
    assert manifest["featx_format"] == 4
    assert manifest["part_rows"] == 8
    assert manifest["fingerprint"] == run.header.fingerprint
    assert [layer["name"] for layer in manifest["layers"]] == ["flat", "map"]
    with h5py.File(root / "samples.h5") as file:
        assert file["key"][:].tolist() == run.listing.keys.tolist()
        assert file["label"][:].tolist() == run.listing.labels.tolist()


def test_the_manifest_is_written_before_everything_else(run: MadeRun, tmp_path: Path) -> None:
    with watched(Calls(tmp_path)) as calls, run.session(tmp_path).hold() as session:
        session.commit(run.builder(run.grid.part(0)))
    linked = [Path(subject).name for name, subject in calls.seen if name == "link"]
    assert [name.split(".")[1][4:] for name in linked] == ["featx", "part-000000"]
    names = [Path(subject).name for name, subject in calls.seen if name in ("link", "replace")]
    assert [name.split(".")[1][4:] for name in names][:2] == ["featx", "samples"]


def test_a_resume_finds_what_is_done_and_does_only_what_is_missing(
    run: MadeRun, tmp_path: Path
) -> None:
    run.write(tmp_path, [2, 0])
    before = part_path(tmp_path, 2).stat()
    with run.session(tmp_path).hold() as session:
        assert [part.index for part in session.missing()] == [1, 3]
        assert session.num_committed == 16
        assert session.failures == list(run.failures)
    run.write(tmp_path, [1, 3])
    after = part_path(tmp_path, 2).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert missing(run, tmp_path) == []


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def no_hdf5(path: Path) -> None:
    path.write_bytes(b"not at all" * 100)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def edit(change: Callable[[h5py.File], None]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            change(file)

    return damage


def drop(name: str) -> Callable[[Path], None]:
    return edit(lambda file: file.__delitem__(name))


def replace_dataset(name: str, values: Any) -> Callable[[Path], None]:
    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = values

    return edit(change)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "zeroed": zero,
    "empty": empty,
    "truncated": truncate,
    "no hdf5": no_hdf5,
    "a folder": folder,
    "no features": drop("features"),
    "no layer": drop("features/map"),
    "no key": drop("key"),
    "no status": drop("status"),
    "no failures": drop("failures"),
    "no fingerprint": edit(lambda file: file.attrs.__delitem__("fingerprint")),
    "layer of another shape": replace_dataset("features/flat", np.zeros((8, 6), np.float32)),
    "layer of another type": replace_dataset("features/flat", np.zeros((8, 5), np.float16)),
    "layer with fewer rows": replace_dataset("features/flat", np.zeros((7, 5), np.float32)),
    "a group for a layer": edit(
        lambda file: (file.__delitem__("features/flat"), file.create_group("features/flat"))  # type: ignore[arg-type]
    ),
    "short status": replace_dataset("status", np.zeros(7, np.uint8)),
    "huge key": edit(
        lambda file: (
            file.__delitem__("key"),
            file.create_dataset("key", (1 << 40,), "S8", chunks=(1024,)),
        )  # type: ignore[arg-type]
    ),
    "failure of another part": replace_dataset("failures/row", np.array([99])),
    "start is text": edit(lambda file: file.attrs.create("start", "x")),
}


FEWER_DAMAGES = (
    *("truncated", "a folder", "no layer", "no status", "no fingerprint", "layer of another shape"),
    *("a group for a layer", "huge key", "failure of another part", "start is text"),
)


@pytest.mark.parametrize("damage", slow_except(DAMAGES, *FEWER_DAMAGES))
def test_a_damaged_part_is_computed_again(
    run: MadeRun, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    run.copied(tmp_path)
    DAMAGES[damage](part_path(tmp_path, 0))
    with caplog.at_level(logging.WARNING):
        lost = missing(run, tmp_path)
    assert lost in ([], [0])  # no more than its chunks are needed to make it again
    assert "part-000000.h5 is not valid" in caplog.text
    run.write(tmp_path, lost, packed=True)
    assert_whole(run, tmp_path)


def assert_whole(run: MadeRun, root: Path) -> None:
    store = FeatureStore(root)
    assert store.complete
    for name in run.features:
        assert np.array_equal(store[name], run.expected(name), equal_nan=True)
    assert store.status.tolist() == run.status().tolist()
    assert store.keys.tolist() == [os.fsdecode(key) for key in run.listing.keys.tolist()]
    assert [failure["row"] for failure in store.failures] == [f.row for f in run.failures]


def test_swapped_parts_do_not_count(run: MadeRun, tmp_path: Path) -> None:
    """Both have the right shape and fingerprint; only their places are wrong."""
    run.write(tmp_path)
    one, two = part_path(tmp_path, 1), part_path(tmp_path, 2)
    one.rename(tmp_path / "x")
    two.rename(one)
    (tmp_path / "x").rename(two)
    with pytest.raises(StoreError, match="holds the rows of another part"):
        FeatureStore(tmp_path)["flat"][8:16]
    assert missing(run, tmp_path) == [1, 2]
    run.write(tmp_path, [2, 1], packed=True)
    assert_whole(run, tmp_path)


def test_parts_of_another_run_do_not_count(run: MadeRun, tmp_path: Path) -> None:
    other = run.changed(model="other")
    other.write(tmp_path / "other")
    run.write(tmp_path / "store", [0])
    shutil.copy(part_path(tmp_path / "other", 1), part_path(tmp_path / "store", 1))
    with pytest.raises(StoreError, match="belongs to another run"):
        FeatureStore(tmp_path / "store")["flat"][8]
    assert missing(run, tmp_path / "store") == [1, 2, 3]


@pytest.mark.parametrize(
    "name",
    ["part-3.h5", "part-0000003.h5", "part-x.h5", "part-000003 (copy).h5", "part--00001.h5",
     "part-000004.h5", "part-.h5"],
)  # fmt: skip
def test_a_good_part_under_a_wrong_name_does_not_count(
    run: MadeRun, tmp_path: Path, name: str
) -> None:
    """The reader would not find it under that name."""
    run.copied(tmp_path)
    part_path(tmp_path, 3).rename(tmp_path / "parts" / name)
    assert missing(run, tmp_path) == [3]
    run.write(tmp_path, [3], packed=True)
    assert_whole(run, tmp_path)


@pytest.mark.parametrize("damage", ["zeroed", "truncated", "empty", "no hdf5", "not complete"])
def test_a_damaged_packed_file_goes_and_the_parts_are_kept(
    run: MadeRun, tmp_path: Path, damage: str
) -> None:
    run.copied(tmp_path)
    pack(tmp_path)
    change = {**DAMAGES, "not complete": edit(lambda file: file.attrs.modify("complete", False))}
    change[damage](tmp_path / "features.h5")
    with run.session(tmp_path).hold() as session:
        assert not session.is_packed
        assert session.missing() == []
    run.write(tmp_path, [], packed=True)
    assert_whole(run, tmp_path)


def test_a_part_under_the_packed_files_name_does_not_count(tmp_path: Path) -> None:
    run = make_run(num_rows=5, part_rows=8)
    run.write(tmp_path)
    shutil.copy(part_path(tmp_path, 0), tmp_path / "features.h5")
    with run.session(tmp_path).hold() as session:
        assert not session.is_packed


@pytest.mark.parametrize("other", ["rows", "labels", "damaged", "gone"])
def test_a_listing_of_another_run_is_written_again(
    run: MadeRun, tmp_path: Path, other: str
) -> None:
    """A reader takes keys and labels from it as long as there are parts."""
    run.write(tmp_path, [0, 1])
    if other == "damaged":
        truncate(tmp_path / "samples.h5")
    elif other == "gone":
        (tmp_path / "samples.h5").unlink()
    else:
        listing = make_listing(28) if other == "rows" else run.listing
        labels = listing.labels[::-1].copy()
        foreign = replace(run, listing=replace(listing, labels=labels))
        foreign.write(tmp_path / "foreign", [])
        shutil.copy(tmp_path / "foreign" / "samples.h5", tmp_path / "samples.h5")
    assert missing(run, tmp_path) == [2, 3]
    store = FeatureStore(tmp_path)
    assert store.labels.tolist() == run.listing.labels.tolist()
    assert store.row(bytes(run.listing.keys[11])) == 11


def test_leftovers_of_a_kill_are_cleared(run: MadeRun, tmp_path: Path) -> None:
    run.write(tmp_path, [0])
    folders = ("", "parts", ".hydra", "sheets", "tensorboard", "tensorboard/run-0")
    for sub in folders:
        (tmp_path / sub).mkdir(exist_ok=True)
        (tmp_path / sub / ".tmp-part-000001.h5.123.456").write_bytes(b"half")
    assert missing(run, tmp_path) == [1, 2, 3]
    assert temporary_files(tmp_path) == []


def test_files_that_a_job_without_the_lock_is_writing_stay(run: MadeRun, tmp_path: Path) -> None:
    run.write(tmp_path, [0])
    predictions = tmp_path / "probe" / "predictions.csv"
    predictions.parent.mkdir()
    with AtomicFolder(tmp_path).stream_file(predictions) as file:
        file.write(b"of a probe")
        assert missing(run, tmp_path) == [1, 2, 3]
    assert predictions.read_bytes() == b"of a probe"
    assert temporary_files(tmp_path) == []


def test_other_settings_are_refused_with_the_keys_and_both_values(
    run: MadeRun, tmp_path: Path
) -> None:
    run.write(tmp_path, [0])
    before = part_path(tmp_path, 0).read_bytes()
    changed = run.changed(size=[256, 256], interpolation="bicubic")
    with pytest.raises(StoreMismatchError) as refused, changed.session(tmp_path).hold():
        pytest.fail("two runs in one store")
    text = str(refused.value)
    assert "size: the store has [224, 224], now [256, 256]" in text
    assert "interpolation: the store has 'not there', now 'bicubic'" in text
    assert "model" not in text
    assert "overwrite=true" in text
    assert part_path(tmp_path, 0).read_bytes() == before
    assert missing(run, tmp_path) == [1, 2, 3]


@pytest.mark.parametrize(("name", "value"), [("part_rows", 16), ("codec", "gzip"), ("specs", ())])
def test_another_layout_is_refused_even_under_the_same_fingerprint(
    run: MadeRun, tmp_path: Path, name: str, value: Any
) -> None:
    run.write(tmp_path, [0])
    changed = replace(run, **{name: value})
    with pytest.raises(StoreMismatchError), changed.session(tmp_path).hold():
        pytest.fail("parts of two layouts in one store")


@pytest.mark.parametrize("name", ["features.h5", "featx.json", "samples.h5", "parts"])
def test_a_link_to_a_disk_that_is_not_there_is_no_missing_file(
    run: MadeRun, tmp_path: Path, name: str
) -> None:
    """features.h5 is moved to a large disk and linked; then the disk is not mounted."""
    root, disk = tmp_path / "store", tmp_path / "disk"
    run.copied(root, packed=name == "features.h5")
    disk.mkdir()
    (root / name).rename(disk / name)
    (root / name).symlink_to(disk / name)
    assert_whole(run, root)
    disk.rename(tmp_path / "unmounted")
    said = rf"{name} is a link to .*disk/{name}, which is not there now"
    with pytest.raises(StoreError, match=said), run.session(root).hold():
        pass
    with pytest.raises(StoreError, match=said):
        FeatureStore(root)
    (tmp_path / "unmounted").rename(disk)
    assert_whole(run, root)


def test_overwrite_clears_the_store(run: MadeRun, tmp_path: Path) -> None:
    run.write(tmp_path, packed=True)
    changed = make_run(num_rows=10, part_rows=4, seed=7)
    with changed.session(tmp_path).hold(overwrite=True) as session:
        assert [part.index for part in session.missing()] == [0, 1, 2]
        assert session.failures == []
    assert not (tmp_path / "features.h5").exists()
    changed.write(tmp_path, packed=True)
    assert_whole(changed, tmp_path)


def test_overwrite_also_clears_parts_and_a_damaged_manifest(run: MadeRun, tmp_path: Path) -> None:
    run.write(tmp_path, [0, 2])
    (tmp_path / "featx.json").write_text("{")
    with run.session(tmp_path).hold(overwrite=True) as session:
        assert len(session.missing()) == 4


def test_overwrite_leaves_a_folder_that_is_no_store_alone(run: MadeRun, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / ".hydra").mkdir()
    names = ("parts/wheel.h5", "parts/part-of-a-whole.h5", ".hydra/x", "summary.json")
    mine = [tmp_path / name for name in names]
    for path in mine:
        path.write_bytes(b"mine")
    with run.session(tmp_path).hold(overwrite=True):
        pass
    run.write(tmp_path, packed=True)
    assert [path.read_bytes() for path in mine] == [b"mine"] * 4
    assert_whole(run, tmp_path)


def test_overwrite_deletes_the_manifest_last(run: MadeRun, tmp_path: Path) -> None:
    """Killed half way, the folder must still be known as a store, not as somebody's files."""
    run.write(tmp_path, packed=True)
    with (
        watched(Calls(tmp_path)) as calls,
        run.session(tmp_path).hold(overwrite=True),
    ):
        deleted = [Path(subject).name for name, subject in calls.seen if name == "unlink"]
    deleted = [name for name in deleted if not name.startswith(".tmp")]
    assert deleted.index("features.h5") < deleted.index("samples.h5") < deleted.index("featx.json")


def test_a_second_session_is_refused_and_deletes_nothing(run: MadeRun, tmp_path: Path) -> None:
    run.write(tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with run.session(tmp_path).hold() as _:
        with (
            pytest.raises(StoreLockedError, match=f"pid {os.getpid()} on "),
            run.session(tmp_path).hold(overwrite=True),
        ):
            pass
        assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_part_that_appears_meanwhile_is_kept_only_if_it_is_ours(
    run: MadeRun, tmp_path: Path
) -> None:
    """Where locks do nothing: the link that came first stands, but is not trusted blindly."""
    other = run.changed(model="other")
    other.write(tmp_path / "other")
    with run.session(tmp_path / "store").hold() as session:
        shutil.copy(part_path(tmp_path / "other", 0), part_path(tmp_path / "store", 0))
        with pytest.raises(StoreError, match=r"written by another process.*another run"):
            session.commit(run.builder(run.grid.part(0)))
        assert 0 in [part.index for part in session.missing()]


def test_a_commit_in_a_thread_keeps_its_file_when_the_session_ends_before_it(
    run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor must not be closed, as another file may get the number."""
    begun, ended = threading.Event(), threading.Event()

    def commit_later(*given: Any) -> Any:
        begun.set()
        assert ended.wait(60)
        return commit_part(*given)

    monkeypatch.setattr("featx.store.session.commit_part", commit_later)
    with ThreadPoolExecutor(1) as pool:
        with run.session(tmp_path).hold() as session:
            builder = replace(run, streamed=True).part_of(session, run.grid.part(0))
            commit = pool.submit(session.commit, builder)
            assert begun.wait(60)
        ended.set()
        assert list(commit.result()) == builder.failures
    monkeypatch.undo()
    run.finish(tmp_path)
    np.testing.assert_array_equal(FeatureStore(tmp_path)["flat"][:], run.expected("flat"))


def test_a_manifest_that_appears_meanwhile_is_not_written_over(
    run: MadeRun, tmp_path: Path, on_open: list[Callable[[str], None]]
) -> None:
    """Where locks do nothing: the process that linked featx.json first has the store."""
    run.changed(model="other").write(tmp_path / "other", [])

    def appears(path: str) -> None:
        if Path(path).name.startswith(".tmp-featx.json"):
            on_open.clear()
            (tmp_path / "other" / "featx.json").rename(tmp_path / "featx.json")

    on_open.append(appears)
    with (
        pytest.raises(StoreError, match="created by another process"),
        run.session(tmp_path).hold(),
    ):
        pytest.fail("two runs in one store")


DAMAGED = ["", "{", "[]", "null", "{}", '{"featx_format": "x"}', '{"featx_format": 4}', "\xff"]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_manifest_without_a_copy_is_refused_with_what_to_do(
    run: MadeRun, tmp_path: Path, text: str
) -> None:
    run.write(tmp_path, [])
    (tmp_path / "featx.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(StoreError, match=r"damaged.*overwrite=true"), run.session(tmp_path).hold():
        pass
    with pytest.raises(StoreError, match="damaged"):
        FeatureStore(tmp_path)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("text", slow_except([*DAMAGED, None], "", "{", "{}", "\xff", None))
def test_a_lost_manifest_is_put_back_from_a_part_or_the_packed_file(
    run: MadeRun, tmp_path: Path, text: str | None, packed: bool
) -> None:
    if packed:
        run.copied(tmp_path, packed=True)
    else:
        run.write(tmp_path, [1])
    before = (tmp_path / "featx.json").read_bytes()
    if text is None:
        (tmp_path / "featx.json").unlink()
    else:
        (tmp_path / "featx.json").write_bytes(text.encode("latin-1"))
    present = 29 if packed else 8
    assert FeatureStore(tmp_path).num_rows_present == present
    assert missing(run, tmp_path) == ([] if packed else [0, 2, 3])
    assert (tmp_path / "featx.json").read_bytes() == before
    run.write(tmp_path, missing(run, tmp_path), packed=not packed)
    assert_whole(run, tmp_path)


def test_failures_csv_holds_every_failure_once_in_order(run: MadeRun, tmp_path: Path) -> None:
    run.write(tmp_path, [2])
    run.write(tmp_path, [0])
    with run.session(tmp_path).hold():
        pass
    with (tmp_path / "failures.csv").open(newline="") as file:
        header, *rows = list(csv.reader(file))
    assert header == ["row", "key", "status", "error", "message"]
    assert rows == [
        [str(f.row), os.fsdecode(f.key), f.status.label, f.error, f.message.replace("\n", "\\n")]
        for f in run.failures
    ]


def test_failures_csv_grows_with_every_commit(run: MadeRun, tmp_path: Path) -> None:
    with run.session(tmp_path).hold() as session:
        for index in (2, 0):
            session.commit(run.builder(run.grid.part(index)))
        with (tmp_path / "failures.csv").open(newline="") as file:
            assert [row[0] for row in csv.reader(file)] == ["row", "17", "20", "2"]


def test_unusual_bytes_in_keys_reach_the_csv_and_the_reader(tmp_path: Path) -> None:
    keys = np.array(sorted([b"a\xff\xfe.jpg", b"b\n,\"'.jpg", "ü€.jpg".encode(), b" .jpg"]))
    listing = replace(make_listing(4), keys=keys)
    run = replace(make_run(num_rows=4, part_rows=2, failed=[0, 1, 2, 3]), listing=listing)
    run = replace(run, failures=tuple(replace(f, key=bytes(keys[f.row])) for f in run.failures))
    for packed in (False, True):
        run.write(tmp_path, missing(run, tmp_path), packed)
        store = FeatureStore(tmp_path)
        assert [os.fsencode(key) for key in store.keys.tolist()] == keys.tolist()
        assert [store.row(key) for key in keys.tolist()] == [0, 1, 2, 3]
        assert [store.row(key) for key in store.keys.tolist()] == [0, 1, 2, 3]
        assert [os.fsencode(f["key"]) for f in store.failures] == keys.tolist()
        with (tmp_path / "failures.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))[1:]
        assert [row[1] for row in rows] == [" .jpg", "a\\xff\\xfe.jpg", "b\\n,\"'.jpg", "ü€.jpg"]


def test_summary_keeps_the_earlier_runs(run: MadeRun, tmp_path: Path) -> None:
    for rows in (3, 5):
        with run.session(tmp_path).hold() as session:
            session.write_summary({"rows": rows})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(summary.pop("sha256")) == 64
    assert summary == {"rows": 5, "runs": [{"rows": 3}, {"rows": 5}]}
