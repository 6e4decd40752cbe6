"""A store that several runs make: layers added to all rows, rows added to all layers."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from made_store import (
    MadeRun,
    dataset_digests,
    joined,
    make_added,
    make_grown,
    make_run,
    temporary_files,
)

from featx.errors import StoreError, StoreMismatchError
from featx.storage import AtomicFolder
from featx.store import FeatureStore, check_store
from featx.store.committed_parts import remove_parts
from featx.store.pack import pack
from featx.types import Status

ONE = {"flat": (5,), "map": (3, 2, 2)}
MORE = {"deep": (7,), "wide": (2, 3)}


@pytest.fixture
def first() -> MadeRun:
    return make_run(29, 8, ONE, failed=[2, 17]).identified()


def assert_holds(root: Path, *runs: MadeRun) -> None:
    """Every value, key, label and status, read back; and the store's own checksums."""
    store = FeatureStore(root)
    listing = runs[-1].listing
    assert store.complete
    assert set(store.layers) == {name for run in runs for name in run.features}
    for run in runs:
        for name in run.features:
            np.testing.assert_array_equal(store[name][:], run.expected(name), strict=True)
    failed = {f.row: f for run in reversed(runs) for f in run.failures}
    status = [int(failed[row].status) if row in failed else 0 for row in range(len(listing))]
    assert store.status.tolist() == status
    assert [(f["row"], f["message"]) for f in store.failures] == [
        (row, failed[row].message) for row in sorted(failed)
    ]
    assert store.labels.tolist() == listing.labels.tolist()
    assert store.classes == listing.classes
    assert [store.row(bytes(key)) for key in listing.keys] == list(range(len(listing)))
    report = check_store(root)
    assert report.complete, report.as_dict()


def pack_here(root: Path) -> None:
    """As job=pack does it, without the child process."""
    pack(root)
    remove_parts(AtomicFolder(root))


def feature_digests(path: Path) -> dict[str, str]:
    """What does not depend on how the rows fell into parts."""
    found = dataset_digests(path)
    return {name: value for name, value in found.items() if not name.startswith("checksums")}


def test_packed_then_layers_then_packed_equals_one_go(first: MadeRun, tmp_path: Path) -> None:
    """Where the same rows fail in both runs, even the checksums are those of a single run."""
    first = replace(first, failures=())
    added = make_added(first, MORE)
    root = first.copied(tmp_path / "s", packed=True)
    added.finish(root, packed=True)
    whole = joined(first, added).copied(tmp_path / "whole", packed=True)
    assert dataset_digests(root / "features.h5") == dataset_digests(whole / "features.h5")


@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_layer_shows_only_when_it_is_whole(first: MadeRun, tmp_path: Path, packed: bool) -> None:
    added = make_added(first, MORE, part_rows=4, failed=[5])
    first.copied(tmp_path, packed=packed)
    before = {p.name: p.read_bytes() for p in tmp_path.rglob("*.h5") if p.name != "samples.h5"}
    for _ in range(len(added.grid)):
        store = FeatureStore(tmp_path)
        assert set(store.layers) == set(ONE)
        assert store.complete
        assert store.status.tolist() == first.status().tolist()
        np.testing.assert_array_equal(store["map"][:], first.expected("map"))
        if packed:
            assert len(dataset_digests(tmp_path / "features.h5")) > 5
        added.finish(tmp_path, at_most=1)
    assert set(FeatureStore(tmp_path).layers) == {*ONE, *MORE}
    for name, data in before.items():
        where = tmp_path / name if packed else tmp_path / "parts" / name
        assert where.read_bytes() == data, "an old file was touched"
    assert_holds(tmp_path, first, added)


@pytest.mark.slow
@pytest.mark.parametrize("new_rows", [1, 7, 8, 100])
@pytest.mark.parametrize("part_rows", [4, 8, 64])
@pytest.mark.parametrize("codec", ["none", "gzip"])
@pytest.mark.parametrize("packed", [True, False])
def test_rows_join_behind_those_that_are_there(
    first: MadeRun, tmp_path: Path, new_rows: int, part_rows: int, codec: str, packed: bool
) -> None:
    """29 rows in parts of 8: the last chunk of the first run is cut, and has to be filled."""
    grown = make_grown(first, new_rows, part_rows, codec, failed=[28 + new_rows])
    root = first.copied(tmp_path / "s", packed=packed)
    grown.finish(root, grow=True)
    assert_holds(root, grown)
    pack_here(root)
    assert_holds(root, grown)
    whole = replace(grown, codec="none", part_rows=8).copied(tmp_path / "whole", packed=True)
    assert dataset_digests(root / "features.h5") == dataset_digests(whole / "features.h5")


@pytest.mark.parametrize("packed", [True, False])
def test_rows_show_as_they_come(first: MadeRun, tmp_path: Path, packed: bool) -> None:
    grown = make_grown(first, 19, part_rows=8, failed=[30])
    first.copied(tmp_path, packed=packed)
    for done in range(4):
        grown.finish(tmp_path, grow=True, at_most=min(done, 1))
        store = FeatureStore(tmp_path)
        there = min(29 + 8 * done, 48)
        assert len(store) == 48
        assert store.complete == (there == 48)
        assert store.num_rows_present == there
        status = grown.status()
        status[there:] = Status.ABSENT
        assert store.status.tolist() == status.tolist()
        for name in ONE:
            expected = grown.expected(name)
            expected[there:] = np.nan
            np.testing.assert_array_equal(store[name][:], expected, strict=True)
        assert store.labels.tolist() == grown.listing.labels.tolist()
        assert store.row(bytes(grown.listing.keys[40])) == 40
        if packed:
            with h5py.File(tmp_path / "features.h5") as file:
                assert file["status"].shape == (29,)
                assert file.attrs["complete"]


STORIES = list(itertools.permutations(["layers", "rows", "more rows"]))
TESTED_STORIES = [
    STORIES[1],
    *(pytest.param(story, marks=pytest.mark.slow) for story in STORIES[:1] + STORIES[2:]),
]


@pytest.mark.parametrize(
    ("packing", "kill"),
    [
        ("always", True),
        pytest.param("first only", True, marks=pytest.mark.slow),
        pytest.param("never", True, marks=pytest.mark.slow),
        pytest.param("at the end", True, marks=pytest.mark.slow),
        pytest.param("always", False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("story", TESTED_STORIES, ids="-".join)
def test_rows_and_layers_in_any_order_equal_one_go(
    tmp_path: Path, story: tuple[str, ...], packing: str, kill: bool
) -> None:
    """Each step may be stopped after a part and resumed by a new session."""
    current = make_run(29, 8, ONE).identified()
    root = tmp_path / "s"
    current.finish(root, packed=packing in ("always", "first only"))
    for number, step in enumerate(story):
        before = {name: rows.copy() for name, rows in current.features.items()}
        last = number == len(story) - 1
        packed = packing == "always" or (packing == "at the end" and last)
        if step == "layers":
            added = make_added(current, MORE, part_rows=16)
            job, grow, current = added, False, joined(current, added)
        else:
            current = make_grown(current, 7 if step == "rows" else 20, part_rows=8)
            job, grow = current, True
        if kill:
            job.finish(root, grow=grow, at_most=1)
            (root / ".tmp-features.h5.1.2").write_bytes(b"half")
        job.finish(root, grow=grow, packed=packed)
        store = FeatureStore(root)
        for name, rows in before.items():
            np.testing.assert_array_equal(store[name][: len(rows)], rows, strict=True)
    assert_holds(root, current)
    if packing in ("never", "first only"):
        pack_here(root)
        assert_holds(root, current)
    assert temporary_files(root) == []
    whole = replace(current, part_rows=8).copied(tmp_path / "whole", packed=True)
    theirs, ours = (feature_digests(r / "features.h5") for r in (whole, root))
    assert ours == theirs


@pytest.mark.parametrize("packed", [True, False])
def test_a_row_that_failed_in_one_run_has_failed(
    first: MadeRun, tmp_path: Path, packed: bool
) -> None:
    """Row 2 fails in both runs, 17 in the first, 5 in the second only: its old values stay."""
    added = make_added(first, MORE, failed=[2, 5])
    first.copied(tmp_path, packed=True)
    added.finish(tmp_path, packed=packed)
    store = FeatureStore(tmp_path)
    assert store.status[[2, 5, 17]].tolist() == [
        first.failures[0].status,
        Status.TIMEOUT,
        first.failures[1].status,
    ]
    assert {f["row"]: f["message"] for f in store.failures} == {
        2: first.failures[0].message,
        5: "again 5",
        17: first.failures[1].message,
    }
    np.testing.assert_array_equal(store["flat"][5], first.features["flat"][5])
    assert np.isnan(store["deep"][5]).all()
    np.testing.assert_array_equal(store["deep"][17], added.features["deep"][17])
    assert store.ok.sum() == 26
    with added.session(tmp_path).hold():
        assert (tmp_path / "failures.csv").read_text().count("again") == 1


@pytest.mark.parametrize("packed", [True, False])
def test_an_image_that_was_accepted_though_damaged_stays_one(
    first: MadeRun, tmp_path: Path, packed: bool
) -> None:
    """Row 5 in both runs, 9 in the first and 11 in the second; 7 fails in the second run."""
    first = replace(first, damaged=(5, 7, 9))
    added = replace(make_added(first, MORE, failed=[7]), damaged=(5, 11))
    first.copied(tmp_path, packed=True)
    added.finish(tmp_path, packed=packed)
    status = FeatureStore(tmp_path).status
    assert status[[5, 9, 11]].tolist() == [Status.IMAGE_DAMAGED] * 3
    assert status[7] == Status.TIMEOUT
    assert check_store(tmp_path).complete


def test_a_grown_store_knows_every_row_by_its_key(first: MadeRun, tmp_path: Path) -> None:
    """Its keys are in no order any more, so a search for one needs one of its own."""
    grown = make_grown(make_grown(first, 10), 10)
    first.copied(tmp_path, packed=True)
    make_grown(first, 10).finish(tmp_path, grow=True, packed=True)
    grown.finish(tmp_path, grow=True, packed=True)
    store = FeatureStore(tmp_path)
    keys = grown.listing.keys.tolist()
    assert keys != sorted(keys)
    for row, key in enumerate(keys):
        assert store.row(key) == row
        np.testing.assert_array_equal(store["flat"][store.row(key)], grown.expected("flat")[row])
    with pytest.raises(KeyError):
        store.row("ant/29-0999.jpg")


def refused(run: MadeRun, root: Path, match: str, grow: bool = False) -> None:
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(StoreMismatchError, match=match), run.session(root, grow).hold():
        pytest.fail("it was not refused")
    after = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    before.pop(root / ".lock")
    after.pop(root / ".lock")
    assert after == before


class TestRefused:
    @pytest.mark.parametrize("packed", [True, False])
    def test_layers_under_other_settings(
        self, first: MadeRun, tmp_path: Path, packed: bool
    ) -> None:
        first.copied(tmp_path, packed=packed)
        added = make_added(first, MORE).changed(size=[256, 256])
        refused(added, tmp_path, r"size: the store has \[224, 224\], now \[256, 256\]")

    def test_rows_without_being_asked(self, first: MadeRun, tmp_path: Path) -> None:
        first.copied(tmp_path, packed=True)
        refused(make_grown(first, 3), tmp_path, r"3 new images.*grow=true")

    def test_rows_under_other_settings(self, first: MadeRun, tmp_path: Path) -> None:
        first.copied(tmp_path, packed=True)
        refused(make_grown(first, 3).changed(model="x"), tmp_path, "model", grow=True)

    def test_rows_for_some_layers_only(self, first: MadeRun, tmp_path: Path) -> None:
        first.copied(tmp_path, packed=True)
        make_added(first, MORE).finish(tmp_path, packed=True)
        refused(make_grown(first, 3), tmp_path, "rows can only be added to all of them", grow=True)

    def test_fewer_rows(self, first: MadeRun, tmp_path: Path) -> None:
        make_grown(first, 5).finish(tmp_path)
        refused(first, tmp_path, "new images|listing", grow=False)

    def test_another_listing_of_the_same_length(self, first: MadeRun, tmp_path: Path) -> None:
        first.copied(tmp_path)
        labels = first.listing.labels[::-1].copy()
        other = replace(first, listing=replace(first.listing, labels=labels)).identified()
        refused(other, tmp_path, "listing: the store has")

    def test_other_layers_while_the_store_is_unfinished(
        self, first: MadeRun, tmp_path: Path
    ) -> None:
        first.finish(tmp_path, at_most=2)
        refused(make_added(first, MORE), tmp_path, "is not complete")

    def test_other_layers_while_layers_are_being_added(
        self, first: MadeRun, tmp_path: Path
    ) -> None:
        first.copied(tmp_path, packed=True)
        make_added(first, MORE).finish(tmp_path, at_most=1)
        refused(make_added(first, {"third": (2,)}), tmp_path, "is not complete")

    def test_a_layer_of_the_same_name_and_another_shape(
        self, first: MadeRun, tmp_path: Path
    ) -> None:
        first.copied(tmp_path, packed=True)
        other = make_added(first, {"flat": (6,)})
        refused(other, tmp_path, "flat.*shape|layer flat")


@pytest.mark.parametrize(("part_rows", "codec"), [(8, "gzip"), (16, "none")])
def test_the_command_that_grew_a_store_resumes_it(
    first: MadeRun, tmp_path: Path, part_rows: int, codec: str
) -> None:
    """Also where it has another codec or rows per part than the first run had."""
    grown = make_grown(first, 40, part_rows, codec)
    first.copied(tmp_path, packed=True)
    grown.finish(tmp_path, grow=True, at_most=1)
    grown.finish(tmp_path, grow=True, packed=True)
    assert_holds(tmp_path, grown)


def test_layers_that_are_there_already_are_never_made_twice(first: MadeRun, tmp_path: Path) -> None:
    """A session that is asked for old and new layers at once must not write the old ones again."""
    root = first.copied(tmp_path, packed=True)
    added = make_added(first, MORE)
    both = joined(first, added)
    try:
        both.finish(root, packed=True)
    except StoreMismatchError:
        assert_holds(root, first)
    else:
        assert_holds(root, both)


@pytest.mark.slow
def test_a_packed_file_lost_while_layers_are_added_costs_the_first_run_only(
    first: MadeRun, tmp_path: Path
) -> None:
    added = make_added(first, MORE)
    root = first.copied(tmp_path, packed=True)
    added.finish(root)
    kept = {p.name: p.read_bytes() for p in (root / "parts").iterdir()}
    (root / "features.h5").write_bytes(b"")
    with pytest.raises(StoreMismatchError, match="is not complete"):
        added.finish(root)
    first.finish(root)
    now = {p.name: p.read_bytes() for p in (root / "parts").iterdir()}
    assert {name: now[name] for name in kept} == kept
    assert_holds(root, first, added)
    pack_here(root)
    assert_holds(root, first, added)


def test_a_packed_file_of_another_store_is_refused_while_rows_are_added(
    first: MadeRun, tmp_path: Path
) -> None:
    """Its rows would come under the keys of this store."""
    other = make_run(29, 8, ONE, seed=5).identified()
    other.copied(tmp_path / "other", packed=True)
    root = first.copied(tmp_path / "s", packed=True)
    make_grown(first, 9).finish(root, grow=True, at_most=1)
    shutil.copy(tmp_path / "other" / "features.h5", root / "features.h5")
    with pytest.raises(StoreError, match="belongs to another run"):
        FeatureStore(root)
    assert not check_store(root).complete


def test_a_kill_between_the_longer_listing_and_the_manifest_changes_nothing(
    first: MadeRun, tmp_path: Path
) -> None:
    grown = make_grown(first, 9)
    root = first.copied(tmp_path / "s")
    manifest = (root / "featx.json").read_bytes()
    grown.finish(root, grow=True, at_most=0)
    (root / "featx.json").write_bytes(manifest)
    store = FeatureStore(root)
    assert store.complete
    assert store.classes == ("cat", "dög", "ant"), "numbers of known classes stay"
    assert store.labels.tolist() == first.listing.labels.tolist()
    assert check_store(root).complete
    first.finish(root)
    make_grown(first, 4).finish(root, grow=True, packed=True)
    assert_holds(root, make_grown(first, 4))


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_leftover_parts_of_a_packed_run_are_cleared_and_are_no_damage(
    first: MadeRun, tmp_path: Path, packed: bool
) -> None:
    """The process may die between publishing the packed file and deleting the parts."""
    added = make_added(first, MORE)
    first.copied(tmp_path)
    added.finish(tmp_path)
    pack(tmp_path)
    assert check_store(tmp_path).complete
    (tmp_path / "parts" / "part-000002.h5").unlink()
    assert check_store(tmp_path).complete
    added.finish(tmp_path, packed=packed)
    assert not (tmp_path / "parts").exists()
    assert_holds(tmp_path, first, added)


@pytest.mark.parametrize("packed", [True, False])
def test_a_row_is_never_ok_where_one_of_its_layers_is_gone(
    first: MadeRun, tmp_path: Path, packed: bool
) -> None:
    """The first run lost rows; the parts of the second one still say that they are ok."""
    added = make_added(first, MORE, failed=[2])
    grown = make_grown(joined(first, added), 10)
    root = first.copied(tmp_path / "s", packed=packed)
    added.finish(root)
    grown.finish(root, grow=True)
    (root / "features.h5" if packed else root / "parts" / "part-000000.h5").unlink()
    store = FeatureStore(root)
    lost = 29 if packed else 8
    assert not store.complete
    assert len(store) == 39
    assert store.status[:lost].tolist() == [Status.ABSENT] * lost
    for name in store.layers:
        there = np.isfinite(store[name][:].reshape(39, -1)).all(1)
        assert (there == store.ok).all()
