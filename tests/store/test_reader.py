"""Reading: numpy's indexing, unfinished and moving stores, processes, and files made to harm."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import run_python
from hypothesis import given, settings
from hypothesis import strategies as st
from made_store import MadeRun, make_run

import featx
from featx.errors import LayerError, StoreError
from featx.store import FeatureStore, check_store, open_hdf5
from featx.store.pack import pack
from featx.types import Listing, Status

NUM_ROWS = 29


@pytest.fixture(scope="module")
def run() -> MadeRun:
    return make_run(num_rows=NUM_ROWS, part_rows=8, failed=[2, 17, 20], damaged=[5, 21])


@pytest.fixture(scope="module")
def parts(run: MadeRun, tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    return FeatureStore(run.write(tmp_path_factory.mktemp("parts"), [2, 0, 3, 1]))


@pytest.fixture(scope="module")
def packed(run: MadeRun, tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    return FeatureStore(run.write(tmp_path_factory.mktemp("packed"), packed=True))


@pytest.fixture(params=["parts", "packed"])
def store(request: pytest.FixtureRequest) -> FeatureStore:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, FeatureStore)
    return found


def assert_same(read: np.ndarray, expected: np.ndarray) -> None:
    assert np.shape(read) == np.shape(expected)
    assert np.asarray(read).dtype == expected.dtype
    assert np.array_equal(read, expected, equal_nan=True)


MASK = np.arange(NUM_ROWS) % 3 == 1
INDICES: list[Any] = [
    0, 28, -1, -29, np.int64(3), np.uint8(28), np.array(5), slice(None), slice(3, 20),
    slice(-5, None), slice(20, 3), slice(None, None, 7), slice(None, None, -1), slice(28, 0, -5),
    slice(-1000, 1000), [5, 3, 3], [], [-1, 0, 28, 7, 8, 7], np.array([27, 1]), (3,), (),
    np.array([1, 2], dtype=np.uint16), range(4, 25, 6), list(range(28, -1, -1)),
    np.zeros(0, dtype=np.int32), MASK, MASK.tolist(), np.zeros(NUM_ROWS, bool), Ellipsis,
    (Ellipsis, 0), (Ellipsis, 1, 1, 1), (2, Ellipsis), (3, 1), (slice(4, 9), 2),
    (slice(4, 9), slice(None), 1), ([5, 3], slice(1, None)), ([5, 3, 8], [0, 1, 2]),
    (MASK, Ellipsis, 0), (MASK, np.arange(10) % 3), (4, [0, 2]), (slice(None), [0, 2]),
    (7, 1, 1, 1), ([7], 1, 1, 1), (Ellipsis, 7, 1, 1, 0), (slice(1, 3), None), (np.array(6), 0),
    ([[1], [2]][0], [0]), (slice(None), Ellipsis, [0, 1], [1, 0]), ([5, 3], slice(None), [1, 0]),
    ((1, 7),), ((1, 7), slice(None), 0), ((),), ((), 0), (Ellipsis, 1, 1, 1, None),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=lambda index: str(index)[:40].replace("\n", ""))
def test_indexing_is_numpys(store: FeatureStore, run: MadeRun, index: Any) -> None:
    assert_same(store["map"][index], run.expected("map")[index])


rows = st.integers(-NUM_ROWS, NUM_ROWS - 1)
ends = st.none() | st.integers(-40, 40)
any_index = st.one_of(
    rows,
    st.builds(slice, ends, ends, st.none() | st.integers(-9, 9).filter(bool)),
    st.lists(rows, max_size=30),
    st.lists(st.booleans(), min_size=NUM_ROWS, max_size=NUM_ROWS).map(np.array),
)


@given(any_index)
@settings(max_examples=40, deadline=None)
def test_any_rows_are_numpys(
    run: MadeRun, parts: FeatureStore, packed: FeatureStore, index: Any
) -> None:
    expected = run.expected("flat")[index]
    assert_same(parts["flat"][index], expected)
    assert_same(packed["flat"][index], expected)


@pytest.mark.parametrize(
    "index",
    [29, -30, [0, 29], [-30], np.uint64(2**64 - 1), 2**70, 1.0, [0.5], "a", None, True,
     np.ones(28, bool), np.ones(0, bool), [[0, 1]], [None], np.ones((29, 3), bool), {}, (29, 0),
     (Ellipsis, 29, 0, 0, 0), (0, 3), (slice(None), 5), (0, 0, 0, 0, 0)],
    ids=str,
)  # fmt: skip
def test_what_is_no_row_is_an_index_error(store: FeatureStore, index: Any) -> None:
    with pytest.raises(IndexError):
        store["map"][index]


def test_what_is_read_is_the_readers_own(store: FeatureStore, run: MadeRun) -> None:
    store["flat"][:][:] = 0
    row = store["flat"][3]
    row[:] = 0
    assert_same(store["flat"][:], run.expected("flat"))


def test_an_array_is_what_numpy_expects(store: FeatureStore, run: MadeRun) -> None:
    array = store["map"]
    assert (array.shape, array.ndim, array.dtype, len(array)) == ((29, 3, 2, 2), 4, "float32", 29)
    assert array.nbytes == 29 * 12 * 4
    assert_same(np.asarray(array), run.expected("map"))
    assert_same(np.asarray(array, dtype=np.float64), run.expected("map").astype(np.float64))
    assert_same(np.array(array), run.expected("map"))
    assert_same(np.stack(list(array)), run.expected("map"))
    with pytest.raises(ValueError, match="always a copy"):
        np.asarray(array, copy=False)
    assert "map (29, 3, 2, 2) float32, 1.4 KiB in chunks of" in repr(array)
    assert (array.attrs["layer"], array.attrs["reduce"]) == ("map", "gem")


def test_a_table_for_pandas(packed: FeatureStore, run: MadeRun) -> None:
    pandas = pytest.importorskip("pandas")
    store = packed
    table = store.to_pandas()
    assert isinstance(table, pandas.DataFrame)
    assert table["key"].tolist() == store.keys.tolist()
    assert table["label"].tolist() == run.listing.labels.tolist()
    names = [*run.listing.classes, None]
    assert [None if pandas.isna(name) else name for name in table["class"]] == [
        names[label] for label in run.listing.labels
    ]
    assert table["status"].tolist() == [Status(x).label for x in run.status()]
    assert table.columns[4:].tolist() == list(store.columns)
    with_values = store.to_pandas(["flat", "map"])
    width = run.expected("flat").shape[1]
    assert with_values.columns[-13:-11].tolist() == [f"flat.{width - 1}", "map.0"]
    values = with_values[[f"flat.{i}" for i in range(width)]].to_numpy()
    assert_same(values, run.expected("flat"))
    assert_same(with_values.to_numpy()[:, -12:].astype("f4"), run.expected("map").reshape(29, 12))
    assert store.to_pandas("flat").columns[-1] == f"flat.{width - 1}"
    with pytest.raises(LayerError, match="flat"):
        store.to_pandas("flta")
    assert (with_values.dtypes.iloc[-12:] == "float32").all()
    for read in (pandas.DataFrame, np.asarray):
        with pytest.raises(TypeError, match=r"store\.to_pandas\(\) is the table of its rows"):
            read(store)


def test_a_table_writes_names_that_are_not_utf8_as_exports_do(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    run = make_run(2)
    keys = np.array([b"a\xff/1.jpg", "ä/2.jpg".encode()])
    run = replace(run, listing=Listing(keys, np.array([0, 1]), ("a\udcff", "ä")))
    table = featx.open(run.write(tmp_path / "store")).to_pandas()
    assert table["key"].tolist() == ["a\\xff/1.jpg", "ä/2.jpg"]
    assert table["class"].tolist() == ["a\\xff", "ä"]


class Texts(HTMLParser):
    """The texts of a page; refuses an end that does not fit its beginning, scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "style", "img")
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def check_html(store: FeatureStore) -> None:
    """The table of a notebook has what `repr` has, and the reasons of failures."""
    texts = Texts(store._repr_html_()).texts
    assert {"flat", "map", "(29, 5)", "(29, 3, 2, 2)", "gem", "float32", "580 B"} <= set(texts)
    assert any("29 rows, 26 ok, 3 failed, 2 classes, complete" in text for text in texts)
    assert any("3 non finite" in text for text in texts)


def test_a_description_escapes_what_a_file_says(tmp_path: Path) -> None:
    run = make_run(5, 4)
    folder = run.write(tmp_path / "<b>run & co", packed=True)
    with h5py.File(folder / "features.h5", "r+") as file:
        file.attrs["model"] = "<script>alert(1)</script>"
    page = FeatureStore(folder)._repr_html_()
    assert "<script>alert(1)</script>" in "".join(Texts(page).texts)
    assert "<b>run" in "".join(Texts(page).texts)


def test_a_description_of_a_damaged_store_is_no_error(tmp_path: Path) -> None:
    folder = make_run(12, 4).write(tmp_path)
    store = FeatureStore(folder)
    (folder / "parts" / "part-000001.h5").write_bytes(b"not HDF5 any more")
    with pytest.raises(StoreError):
        _ = store.status
    assert "12 rows, status cannot be read" in repr(store)
    assert "12 rows, status cannot be read" in store._repr_html_()


def test_the_store_tells_what_it_holds(store: FeatureStore, run: MadeRun) -> None:
    assert len(store) == 29
    assert store.layers == tuple(store) == ("flat", "map")
    assert "flat" in store
    assert "other" not in store
    assert store.complete
    assert store.num_rows_present == 29
    assert store.classes == ("cat", "dög")
    assert store.labels.tolist() == run.listing.labels.tolist()
    assert store.labels.dtype == np.int64
    assert store.status.tolist() == run.status().tolist()
    assert store.ok.tolist() == np.isin(run.status(), [0, 12]).tolist()
    assert store.attrs["featx_format"] == 4
    assert store.attrs["model"] == "toy"
    lines = repr(store).splitlines()
    assert lines[0].endswith("29 rows, 26 ok, 3 failed, 2 classes, complete>")
    assert lines[1] == "  flat  (29, 5)        float32   gem"
    assert lines[2] == "  map   (29, 3, 2, 2)  float32   gem"
    assert lines[3].startswith("  toy")
    check_html(store)
    failure = store.failures[1]
    assert failure == {
        "row": 17,
        "key": "dog/0005.jpg",
        "status": "non finite",
        "error": "OSError",
        "message": "row 17: bröken, \n 'x'",
    }


def test_parts_and_packed_say_the_same(parts: FeatureStore, packed: FeatureStore) -> None:
    assert parts.attrs["fingerprint"] == packed.attrs["fingerprint"]
    assert parts.keys.tolist() == packed.keys.tolist()
    assert parts.failures == packed.failures
    for name in ("layer", "capture", "reduce", "compute_dtype"):
        assert parts["flat"].attrs[name] == packed["flat"].attrs[name]


def test_layers_keep_their_order_when_the_parts_are_packed(tmp_path: Path) -> None:
    shapes = {"blocks.10": (2,), "avgpool": (1,), "blocks.2.fc1": (2,), "blocks.2": (2,), "ä": (1,)}
    run = make_run(num_rows=4, part_rows=4, shapes=shapes)
    before = FeatureStore(run.write(tmp_path)).layers
    run.write(tmp_path, [], packed=True)
    expected = ("avgpool", "blocks.2", "blocks.2.fc1", "blocks.10", "ä")
    assert FeatureStore(tmp_path).layers == before == expected


def test_an_unknown_layer_names_the_nearest(store: FeatureStore) -> None:
    with pytest.raises(LayerError, match=r"'flatt'; it has flat, map\. Nearest: flat\."):
        store["flatt"]
    for no_name in (0, None, ["flat"]):
        with pytest.raises(LayerError, match=r"chosen by its name, not .*; it has flat, map\."):
            store[no_name]  # type: ignore[index]


def test_a_store_stands_for_its_path(store: FeatureStore) -> None:
    again = featx.open(store)
    assert (again.root, again.keys.tolist()) == (store.root, store.keys.tolist())


def test_a_row_is_found_by_its_key(store: FeatureStore, run: MadeRun) -> None:
    for row, key in enumerate(run.listing.keys.tolist()):
        assert store.row(key) == store.row(key.decode()) == row
        assert store.keys[row] == store.key_of(row) == key.decode()


@pytest.mark.parametrize(
    "key", ["cat/000.jpg", "", "zzz", "cat/0000.jpg ", "cat/0000.jpgg", b"cat/0000.jp", "CAT/0000"]
)
def test_an_unknown_key_is_a_key_error(store: FeatureStore, key: str | bytes) -> None:
    with pytest.raises(KeyError, match="has no row"):
        store.row(key)


@pytest.mark.parametrize("key", [3, np.int64(3), None])
def test_what_is_no_key_is_told_what_is_one(store: FeatureStore, key: Any) -> None:
    with pytest.raises(TypeError, match=r"a str or bytes; .*store\.key_of"):
        store.row(key)


def test_an_unknown_key_names_the_nearest(store: FeatureStore) -> None:
    with pytest.raises(KeyError, match=r"Nearest: cat/0002\.jpg"):
        store.row("cat/0002.jpeg")


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("dog/0001.jpg", "Dog/0001.png, "),
        ("photos/cat/0001.jpg", "cat/0001.jpg, "),
        ("cat/0003", r"cat/0003\.jpg\."),
    ],
)
def test_a_key_with_another_folder_or_ending_names_the_images_of_that_name(
    tmp_path: Path, typed: str, nearest: str
) -> None:
    run = make_run(num_rows=4, part_rows=4)
    keys = np.array([b"Dog/0001.png", b"ant/0001.jpg", b"cat/0001.jpg", b"cat/0003.jpg"])
    run = replace(run, listing=replace(run.listing, keys=keys))
    with pytest.raises(KeyError, match=f"Nearest: {nearest}"):
        FeatureStore(run.write(tmp_path)).row(typed)


def test_xy_holds_the_ok_rows_with_their_own_labels(store: FeatureStore, run: MadeRun) -> None:
    ok = np.isin(run.status(), [0, 12]) & (run.listing.labels >= 0)
    num_rows = int(ok.sum())
    assert 0 < num_rows < 26
    features, labels = store.xy("map")
    assert features.shape == (num_rows, 12)
    assert features.dtype == np.float32
    assert np.array_equal(features, run.features["map"][ok].reshape(num_rows, 12))
    assert np.array_equal(labels, run.listing.labels[ok])


def test_float16_becomes_float32_for_scikit_learn(tmp_path: Path) -> None:
    run = make_run(num_rows=5, part_rows=2, dtype="float16")
    features, _ = FeatureStore(run.write(tmp_path)).xy("flat")
    assert features.dtype == np.float32
    is_labelled = run.listing.labels >= 0
    assert np.array_equal(features, run.features["flat"][is_labelled].astype(np.float32))


class TestUnfinished:
    @pytest.mark.parametrize("done", [[], [1], [3, 0]])
    def test_rows_not_there_are_nan_and_absent(
        self, run: MadeRun, tmp_path: Path, done: list[int]
    ) -> None:
        store = FeatureStore(run.write(tmp_path, done))
        there = np.isin(np.arange(29) // 8, done)
        assert not store.complete
        assert store.num_rows_present == there.sum()
        for name in run.features:
            assert_same(store[name][there], run.expected(name)[there])
            assert np.isnan(store[name][~there]).all()
            backwards = np.flatnonzero(np.ones(29))[::-1]
            assert np.isnan(store[name][backwards][::-1][~there]).all()
        assert store.status[~there].tolist() == [255] * (~there).sum()
        assert store.status[there].tolist() == run.status()[there].tolist()
        assert not store.ok[~there].any()
        assert len(store.keys) == len(store.labels) == 29
        assert len(store.xy("flat")[0]) == (store.ok & (store.labels >= 0)).sum()
        assert {failure["row"] for failure in store.failures} == {
            f.row for f in run.failures if there[f.row]
        }
        assert f"{there.sum()} of 29 rows" in repr(store)

    def test_refresh_shows_what_came_since(self, run: MadeRun, tmp_path: Path) -> None:
        store = FeatureStore(run.write(tmp_path, [0]))
        assert store.status[9] == 255
        before = store.rows_sha256
        run.write(tmp_path, [1, 2, 3])
        assert np.isnan(store["flat"][9]).all()
        assert store.refresh() is store
        assert store.rows_sha256 == FeatureStore(tmp_path).rows_sha256 != before
        assert store.complete
        assert store.status[9] == 0
        assert_same(store["flat"][:], run.expected("flat"))
        assert len(store.failures) == 3

    def test_a_store_killed_at_its_very_start_is_no_store_yet(
        self, run: MadeRun, tmp_path: Path
    ) -> None:
        run.write(tmp_path, [])
        (tmp_path / "samples.h5").unlink()
        with pytest.raises(StoreError, match=r"holds no store: .*samples\.h5 is missing"):
            FeatureStore(tmp_path)

    def test_a_store_killed_before_its_first_part_has_no_row(
        self, run: MadeRun, tmp_path: Path
    ) -> None:
        run.write(tmp_path, [])
        (tmp_path / "parts").rmdir()
        store = FeatureStore(tmp_path)
        assert (len(store), store.num_rows_present, store.complete) == (29, 0, False)
        assert np.isnan(store["flat"][:]).all()
        assert not store.ok.any()


class TestWhilePacking:
    def test_an_open_store_keeps_working_after_its_parts_are_gone(self, tmp_path: Path) -> None:
        run = make_run(num_rows=40, part_rows=4, failed=[0, 3, 15])
        store = FeatureStore(run.write(tmp_path))
        assert_same(store["flat"][:5], run.expected("flat")[:5])
        run.write(tmp_path, [], packed=True)
        assert not (tmp_path / "parts").exists()
        assert_same(store["flat"][::-1], run.expected("flat")[::-1])
        assert_same(store["map"][:], run.expected("map"))
        assert store.status.tolist() == run.status().tolist()
        assert store.keys.tolist() == [key.decode() for key in run.listing.keys]
        assert [failure["row"] for failure in store.failures] == [0, 3, 15]
        assert store.complete

    @pytest.mark.parametrize("looked", [True, False])
    def test_status_and_features_are_of_one_moment(self, tmp_path: Path, looked: bool) -> None:
        """A view of an unfinished store stays as it is, or shows everything; never half."""
        run = make_run(num_rows=20, part_rows=4)
        store = FeatureStore(run.write(tmp_path, [0, 1]))
        if looked:
            assert store.status[19] == 255
        run.write(tmp_path, [2, 3, 4], packed=True)
        features = store["flat"][:]
        assert np.isnan(features).any(axis=1).tolist() == (~store.ok).tolist()
        assert store.complete == store.ok.all() == (not looked)
        store.refresh()
        assert_same(store["flat"][:], run.expected("flat"))
        assert store.complete
        assert store.ok.all()

    def test_packed_between_two_looks_at_the_folder(
        self, tmp_path: Path, on_open: list[Callable[[str], None]]
    ) -> None:
        run = make_run(num_rows=20, part_rows=4)
        run.write(tmp_path)

        def packed_meanwhile(path: str) -> None:
            if path.endswith("featx.json"):
                on_open.clear()
                run.write(tmp_path, [], packed=True)

        on_open.append(packed_meanwhile)
        store = FeatureStore(tmp_path)
        assert not on_open
        assert store.complete
        assert_same(store["flat"][:], run.expected("flat"))

    def test_parts_that_vanish_are_an_error_never_nan(self, tmp_path: Path) -> None:
        run = make_run(num_rows=20, part_rows=4)
        store = FeatureStore(run.write(tmp_path))
        (tmp_path / "parts" / "part-000002.h5").unlink()
        assert not FeatureStore(tmp_path).complete
        with pytest.raises(StoreError, match=r"has lost rows since it was opened.*part-000002"):
            store["flat"][8:12]
        assert not store.complete, "after another look it must say what is missing"
        assert store.status[8:12].tolist() == [255] * 4

    def test_a_store_overwritten_meanwhile_is_not_mixed_in(self, tmp_path: Path) -> None:
        run = make_run(num_rows=20, part_rows=4)
        store = FeatureStore(run.write(tmp_path))
        assert_same(store["flat"][0], run.expected("flat")[0])
        other = make_run(num_rows=20, part_rows=4, seed=1)
        with other.session(tmp_path).hold(overwrite=True) as session:
            for part in session.missing():
                session.commit(other.builder(part))
        with pytest.raises(StoreError, match="belongs to another run"):
            store["flat"][:]

    @pytest.mark.parametrize("packed", [(False, False), (False, True), (True, True)])
    def test_a_process_that_opens_its_files_later_reads_nothing_of_another_store(
        self, tmp_path: Path, packed: tuple[bool, bool]
    ) -> None:
        run = make_run(num_rows=20, part_rows=4)
        sent = pickle.dumps(FeatureStore(run.copied(tmp_path / "store", packed[0])))
        shutil.rmtree(tmp_path / "store")
        other = make_run(num_rows=20, part_rows=4, seed=1)
        listing = replace(other.listing, labels=1 - other.listing.labels)
        replace(other, listing=listing).copied(tmp_path / "store", packed[1])
        store = pickle.loads(sent)
        for read in 2 * (lambda: store["flat"][:], lambda: store.labels, lambda: store.keys):
            with pytest.raises(StoreError, match="was opened"):
                read()

    @pytest.mark.parametrize("packed", [False, True])
    def test_rows_computed_again_are_not_put_to_an_old_status(
        self, tmp_path: Path, packed: bool
    ) -> None:
        """A process that opens its files later would read other rows beside a status of before."""
        run = make_run(num_rows=20, part_rows=4, failed=[9])
        store = FeatureStore(run.copied(tmp_path / "store"))
        assert store.status[9] != 0
        assert_same(store["flat"][8:12], run.expected("flat")[8:12])
        replace(run, failures=()).copied(tmp_path / "new", packed)
        sent = pickle.dumps(store)
        if packed:
            shutil.rmtree(tmp_path / "store")
            (tmp_path / "new").rename(tmp_path / "store")
        else:
            part = Path("parts", "part-000002.h5")
            (tmp_path / "new" / part).rename(tmp_path / "store" / part)
        later = pickle.loads(sent)
        for _ in range(2):
            with pytest.raises(StoreError, match=r"has changed since .*Open it again"):
                later["flat"][8:12]
        assert_same(store["flat"][8:12], run.expected("flat")[8:12])
        assert_same(later.refresh()["flat"][8:12], run.features["flat"][8:12])
        assert later.ok.all()

    @pytest.mark.parametrize("is_changed", [False, True])
    def test_rows_of_a_changed_image_are_not_put_to_rows_read_before_they_were_packed(
        self, tmp_path: Path, is_changed: bool
    ) -> None:
        run = make_run(num_rows=20, part_rows=4)
        for name, first_image in (("store", 10), ("new", 10 + is_changed)):
            with run.session(tmp_path / name).hold() as session:
                for part in session.missing():
                    rows = {key: x[part.start : part.stop] for key, x in run.features.items()}
                    images = np.arange(part.start, part.stop, dtype=np.uint64) + first_image
                    builder = session.begin_part(part, run.specs)
                    builder.add(part.start, rows, (), images)
                    session.commit(builder)
        store = FeatureStore(tmp_path / "store")
        store["flat"][0:4]
        pack(tmp_path / "new")
        shutil.rmtree(tmp_path / "new" / "parts")
        shutil.rmtree(tmp_path / "store")
        (tmp_path / "new").rename(tmp_path / "store")
        if is_changed:
            for _ in range(2):
                with pytest.raises(StoreError, match=r"has changed since .*Open it again"):
                    store["flat"][:]
        else:
            assert_same(store["flat"][:], run.features["flat"])


class TestOpening:
    def test_folder_file_and_text_open_the_same(self, packed: FeatureStore) -> None:
        for path in (packed.root, str(packed.root), packed.root / "features.h5"):
            assert_same(featx.open(path)["flat"][:], packed["flat"][:])

    def test_a_change_of_folder_does_not_change_the_store(
        self, run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = make_run(num_rows=NUM_ROWS, part_rows=8, seed=5)
        run.copied(tmp_path / "a" / "store")
        other.write(tmp_path / "b" / "store")
        monkeypatch.chdir(tmp_path / "a")
        store = FeatureStore("store")
        monkeypatch.chdir(tmp_path / "b")
        assert_same(store["flat"][:], run.expected("flat"))

    def test_home_is_expanded_as_extract_does(
        self, run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        run.copied(tmp_path / "store")
        assert len(featx.open("~/store")) == 29

    @pytest.mark.parametrize(
        ("content", "message"),
        [(None, "there is no store"), ("folder", "holds no store: there is no featx.json"),
         (b"", "cannot be read as HDF5"), (b"x" * 5000, "cannot be read as HDF5")],
    )  # fmt: skip
    def test_what_is_no_store_says_so(
        self, tmp_path: Path, content: bytes | str | None, message: str
    ) -> None:
        path = tmp_path / "x"
        if content == "folder":
            path.mkdir()
        elif isinstance(content, bytes):
            path.write_bytes(content)
        with pytest.raises(StoreError, match=message):
            FeatureStore(path)

    def test_other_files_of_a_store_and_wrong_indices_say_what_to_give(
        self, run: MadeRun, tmp_path: Path
    ) -> None:
        root = tmp_path / "store"
        run.copied(root)
        for name in ("featx.json", "samples.h5"):
            with pytest.raises(StoreError, match=rf"{name} is no store: give its folder, or its"):
                FeatureStore(root / name)
        store = FeatureStore(root)
        with pytest.raises(IndexError, match=r"store\.row\(key\) is the row of a key"):
            store["flat"][store.keys[:2]]

    def test_a_mistyped_store_is_answered_with_its_neighbours(
        self, run: MadeRun, tmp_path: Path
    ) -> None:
        run.copied(tmp_path / "runs" / "photos")
        with pytest.raises(StoreError, match=r"no store at .*phtos\. Nearest: photos\."):
            FeatureStore(tmp_path / "runs" / "phtos")
        with pytest.raises(StoreError, match=r"holds no store: .* Its folders do, such as photos"):
            FeatureStore(tmp_path / "runs")

    def test_other_hdf5_files_and_single_parts_say_so(self, run: MadeRun, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file["a"] = [1]
        with pytest.raises(StoreError, match="not a featx store"):
            FeatureStore(tmp_path / "x.h5")
        run.copied(tmp_path / "store")
        for part in (0, 1):
            with pytest.raises(StoreError, match="one part of a store; open the store's folder"):
                FeatureStore(tmp_path / "store" / "parts" / f"part-{part:06d}.h5")

    def test_reading_changes_no_file(self, run: MadeRun, tmp_path: Path) -> None:
        run.copied(tmp_path)
        before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.rglob("*")}
        store = FeatureStore(tmp_path)
        assert store["flat"][:].shape == (29, 5)
        assert len(store.failures) == 3
        assert before == {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.rglob("*")}

    @pytest.mark.parametrize(
        ("version", "message"),
        [
            (5, r"format 5, .* reads format 4\. Upgrade featx"),
            (3, r"format 3, .* reads format 4\. Run its command again, with overwrite=true"),
        ],
    )
    def test_other_formats_are_refused_politely(
        self, run: MadeRun, tmp_path: Path, version: int, message: str
    ) -> None:
        run.copied(tmp_path / "a", packed=True)
        with h5py.File(tmp_path / "a" / "features.h5", "r+") as file:
            file.attrs["featx_format"] = version
        run.write(tmp_path / "b", [0])
        path = tmp_path / "b" / "featx.json"
        path.write_text(json.dumps({"featx_format": version, "other": "things"}))
        for act in (
            lambda: FeatureStore(tmp_path / "a"),
            lambda: FeatureStore(tmp_path / "b"),
            lambda: check_store(tmp_path / "b"),
            lambda: run.write(tmp_path / "b"),
        ):
            with pytest.raises(StoreError, match=message):
                act()

    @pytest.mark.parametrize("codec", ["gzip", "zstd"])
    def test_rows_that_compress_to_nearly_nothing_open(self, tmp_path: Path, codec: str) -> None:
        """Zeros and NaN shrink further than anything honest; they are no bomb."""
        run = make_run(
            num_rows=256, part_rows=256, shapes={"x": (4096,)}, codec=codec, failed=range(128)
        )
        run.features["x"][:] = 0
        run.write(tmp_path, packed=True)
        assert_same(FeatureStore(tmp_path)["x"][120:140], run.expected("x")[120:140])


SECRET = b"root:x:0:0:secret-of-the-system"


def delete_and(make: Callable[[h5py.File, Path], Any], name: str) -> Callable[..., None]:
    def change(file: h5py.File, secret: Path) -> None:
        del file[name]
        make(file, secret)

    return change


def virtual(name: str, shape: tuple[int, ...], dtype: str) -> Callable[[h5py.File, Path], None]:
    def make(file: h5py.File, secret: Path) -> None:
        layout = h5py.VirtualLayout(shape, dtype)
        layout[:] = h5py.VirtualSource(str(secret), "x", shape, dtype)
        file.create_virtual_dataset(name, layout)

    return make


def external(
    name: str, shape: tuple[int, ...], dtype: str
) -> Callable[[h5py.File, Path], h5py.Dataset]:
    return lambda file, secret: file.create_dataset(
        name, shape, dtype, external=[(str(secret), 0, h5py.h5f.UNLIMITED)]
    )


def huge(name: str, shape: tuple[int, ...], dtype: str, **how: Any) -> Callable[..., h5py.Dataset]:
    return lambda file, _: file.create_dataset(name, shape, dtype, **how)


def link(name: str, made: Callable[[Path], Any]) -> Callable[[h5py.File, Path], None]:
    return lambda file, secret: file.__setitem__(name, made(secret))


def compressed_bomb(name: str) -> Callable[[h5py.File, Path], None]:
    def make(file: h5py.File, _: Path) -> None:
        dataset = file.create_dataset(
            name, (NUM_ROWS, 1 << 36), "f4", chunks=(1, 1 << 20), compression="gzip"
        )
        dataset[0, :100] = 1

    return make


HOSTILE: dict[str, tuple[str, Callable[[h5py.File, Path], Any]]] = {
    "soft link": ("features/flat", link("features/flat", lambda _: h5py.SoftLink("/key"))),
    "dangling link": ("features/flat", link("features/flat", lambda _: h5py.SoftLink("/no"))),
    "external link": (
        "features/flat",
        link("features/flat", lambda s: h5py.ExternalLink(str(s), "x")),
    ),
    "group behind a link": ("features", link("features", lambda s: h5py.ExternalLink(str(s), "/"))),
    "keys behind a link": ("key", link("key", lambda s: h5py.ExternalLink(str(s), "x"))),
    "labels behind a link": ("label", link("label", lambda s: h5py.ExternalLink(str(s), "x"))),
    "status behind a link": ("status", link("status", lambda s: h5py.SoftLink("/label"))),
    "classes behind a link": ("classes", link("classes", lambda s: h5py.ExternalLink(str(s), "x"))),
    "classes in another file": ("classes", external("classes", (1,), "S31")),
    "keys in another file": ("key", external("key", (NUM_ROWS,), "S1")),
    "features in another file": ("features/flat", external("features/flat", (NUM_ROWS,), "f4")),
    "virtual features": ("features/flat", virtual("features/flat", (NUM_ROWS,), "f4")),
    "virtual keys": ("key", virtual("key", (NUM_ROWS,), "S1")),
    "8 TB of classes": ("classes", huge("classes", (1 << 40,), "S8", chunks=(1 << 20,))),
    "8 TB of keys": ("key", huge("key", (1 << 40,), "S8", chunks=(1 << 20,))),
    "8 TB a row": ("features/flat", huge("features/flat", (NUM_ROWS, 1 << 38), "f4")),
    "8 TB from a few bytes": ("features/flat", compressed_bomb("features/flat")),
    "text for features": (
        "features/flat",
        huge("features/flat", (NUM_ROWS,), h5py.string_dtype()),
    ),
    "features of fewer rows": (
        "features/flat",
        huge("features/flat", (3, 2), "f4", data=np.ones((3, 2))),
    ),
    "labels of fewer rows": ("label", huge("label", (3,), "i8", data=np.ones(3))),
    "scalar label": ("label", huge("label", (), "i8", data=1)),
    "text for labels": ("label", huge("label", (NUM_ROWS,), "S1", data=[b"x"] * NUM_ROWS)),
    "a group for keys": ("key", lambda file, _: file.create_group("key")),
    "no keys": ("key", lambda file, _: None),
    "no features": ("features", lambda file, _: None),
    "no classes": ("classes", lambda file, _: None),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_made_to_harm_is_refused_by_name(
    packed: FeatureStore, tmp_path: Path, case: str
) -> None:
    name, make = HOSTILE[case]
    path, secret = tmp_path / "features.h5", tmp_path / "secret"
    shutil.copy(packed.root / "features.h5", path)
    with h5py.File(secret, "w") as file:
        file["x"] = np.frombuffer(SECRET[:29], "S1")
    if "in another file" in case:
        secret.write_bytes(SECRET * 20)
    with h5py.File(path, "r+") as file:
        delete_and(make, name)(file, secret)
    with pytest.raises(StoreError) as refused:
        FeatureStore(path)
    assert name.split("/")[-1] in str(refused.value)
    assert "secret" not in str(refused.value)
    with pytest.raises(StoreError):
        FeatureStore(shutil.copytree(tmp_path, tmp_path / "folder", dirs_exist_ok=True))


@pytest.mark.parametrize("name", ["row", "error", "message"])
def test_failures_that_lie_elsewhere_are_refused(
    packed: FeatureStore, tmp_path: Path, name: str
) -> None:
    path, secret = tmp_path / "features.h5", tmp_path / "secret"
    shutil.copy(packed.root / "features.h5", path)
    secret.write_bytes(SECRET)
    with h5py.File(path, "r+") as file:
        del file["failures"][name]
        file.create_dataset(f"failures/{name}", (3,), "S5", external=[(str(secret), 0, 15)])
    store = FeatureStore(path)
    with pytest.raises(StoreError, match=f"failures/{name} is no plain dataset; refused"):
        _ = store.failures


def test_failures_of_rows_that_are_not_there_are_refused(
    packed: FeatureStore, tmp_path: Path
) -> None:
    """Row -1 would be reported as the last image's failure."""
    path = tmp_path / "features.h5"
    shutil.copy(packed.root / "features.h5", path)
    for row in (-1, 29, 1 << 60):
        with h5py.File(path, "r+") as file:
            file["failures/row"][0] = row
        with pytest.raises(StoreError, match="rows that are not in it"):
            _ = FeatureStore(path, verify=False).failures


@pytest.mark.parametrize("name", ["features/flat", "status"])
def test_a_part_made_to_harm_is_refused(run: MadeRun, tmp_path: Path, name: str) -> None:
    run.copied(tmp_path)
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET * 20)
    with h5py.File(tmp_path / "parts" / "part-000001.h5", "r+") as file:
        old = file[name]
        shape, dtype = old.shape, old.dtype
        del file[name]
        file.create_dataset(name, shape, dtype, external=[(str(secret), 0, 1 << 20)])
    store = FeatureStore(tmp_path)
    with pytest.raises(StoreError, match="no plain dataset; refused"):
        _ = store["flat"][8] if name != "status" else store.status


def test_a_file_without_the_complete_mark_is_not_complete(
    packed: FeatureStore, tmp_path: Path
) -> None:
    path = tmp_path / "features.h5"
    shutil.copy(packed.root / "features.h5", path)
    with h5py.File(path, "r+") as file:
        del file.attrs["complete"]
    assert not FeatureStore(path).complete


def read_rows(store: FeatureStore, seed: int, count: int = 30) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [store["flat"][int(row)].tobytes() for row in rng.integers(0, len(store), count)]


def read_in_child(store: FeatureStore, seed: int, queue: Any) -> None:
    queue.put((seed, read_rows(store, seed), store.status.tolist(), store.keys.tolist()))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_other_processes_read_the_same_rows(store: FeatureStore, run: MadeRun, method: str) -> None:
    """The files are open in the parent, which reads on while its children do."""
    expected = run.expected("flat")
    read_rows(store, 0)
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    children = [
        context.Process(target=read_in_child, args=(store, seed, queue))
        for seed in range(1, 5 if method == "fork" else 3)
    ]
    for child in children:
        child.start()
    mine = read_rows(store, 99, 300)
    found = [queue.get(timeout=60) for _ in children]
    for child in children:
        child.join()
        assert child.exitcode == 0
    found.append((99, mine, run.status().tolist(), store.keys.tolist()))
    for seed, rows, status, keys in found:
        chosen = np.random.default_rng(seed).integers(0, 29, len(rows))
        assert rows == [expected[row].tobytes() for row in chosen]
        assert status == run.status().tolist()
        assert keys == store.keys.tolist()


def test_a_pickled_store_holds_paths_only(store: FeatureStore, run: MadeRun) -> None:
    read_rows(store, 0)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(store, protocol))
        assert_same(again["flat"][:], run.expected("flat"))
        array = pickle.loads(pickle.dumps(store["map"], protocol))
        assert_same(array[[3, 1]], run.expected("map")[[3, 1]])


def test_threads_read_the_same_rows(tmp_path: Path) -> None:
    run = make_run(num_rows=160, part_rows=4, shapes={"flat": (5,)})
    store = FeatureStore(run.write(tmp_path))
    expected = run.expected("flat")
    gate = threading.Barrier(4)

    def read(seed: int) -> bool:
        gate.wait()
        rows = np.random.default_rng(seed).integers(0, 160, 60)
        return all(np.array_equal(store["flat"][int(row)], expected[row]) for row in rows)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(4)))


FEW_FILES = """
import resource, sys
import numpy as np
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from made_store import make_run
from featx.store.reader import FeatureStore
store = FeatureStore(sys.argv[1])
assert store.complete
expected = make_run(num_rows=200, part_rows=1, shapes={"flat": (5,)}).expected("flat")
assert np.array_equal(store["flat"][:], expected)
assert np.array_equal(store["flat"][::-1], expected[::-1])
assert store.ok.all() and len(store.failures) == 0
print("all rows")
"""


@pytest.mark.slow
def test_two_hundred_parts_are_read_with_64_file_handles(tmp_path: Path) -> None:
    make_run(num_rows=200, part_rows=1, shapes={"flat": (5,)}).write(tmp_path)
    done = run_python("-c", FEW_FILES, tmp_path, path=[Path(__file__).parents[1]])
    assert done.stdout == "all rows\n"


def test_no_file_handle_left_is_an_error_never_nan(tmp_path: Path) -> None:
    run = make_run(num_rows=40, part_rows=4)
    store = FeatureStore(run.write(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, hard))
    try:
        with pytest.raises(OSError, match=r"[Tt]oo many open files"):
            store["flat"][:]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert_same(store["flat"][:], run.expected("flat"))


def test_a_with_block_closes_the_files_and_a_later_read_opens_them_again(tmp_path: Path) -> None:
    run = make_run(num_rows=12, part_rows=4)
    root = run.write(tmp_path)

    def num_open() -> int:
        links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
        return sum(link.startswith(str(root)) for link in links)

    with featx.open(root) as store:
        flat = store["flat"]
        assert_same(flat[:], run.expected("flat"))
        assert num_open() > 0
    assert num_open() == 0
    assert_same(flat[:], run.expected("flat"))
    store.close()
    assert num_open() == 0


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_thread_may_close_a_store_that_others_read(
    tmp_path: Path, packed: bool, codec: str
) -> None:
    run = make_run(num_rows=NUM_ROWS, part_rows=8, codec=codec)
    store = FeatureStore(run.write(tmp_path, packed=packed))
    expected, is_over = run.expected("flat"), threading.Event()

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(50):
            rows = rng.integers(0, NUM_ROWS, 5)
            assert_same(store["flat"][rows], expected[rows])
            assert_same(store["flat"][: rows[0]], expected[: rows[0]])

    def close() -> None:
        while not is_over.wait(1e-4):
            store.close()

    with ThreadPoolExecutor(4) as pool:
        closing, *reading = pool.submit(close), *(pool.submit(read, seed) for seed in range(3))
        wait(reading)
        is_over.set()
    for future in (closing, *reading):
        future.result()


SCRIPT = """
import sys

import torch

import featx
store = featx.open(sys.argv[1])
x = store["flat"][:]
"""


@pytest.mark.slow
def test_a_script_that_keeps_its_store_ends_without_a_word(store: FeatureStore) -> None:
    """With torch there, files are let go of after modules have lost their names."""
    done = run_python("-c", SCRIPT, store.root)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_single_rows_are_not_read_through_h5py(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """A slice of all rows for one index would be right, and a thousand times too slow."""
    run = make_run(num_rows=NUM_ROWS, part_rows=8, codec=codec)
    packed = FeatureStore(run.write(tmp_path, packed=True))
    _ = packed["flat"][0]  # what is read once, for all rows, is read
    asked: list[Any] = []
    real = h5py.Dataset.__getitem__

    def spy(self: h5py.Dataset, args: Any, new_dtype: Any = None) -> Any:
        asked.append(args)
        return real(self, args)

    monkeypatch.setattr(h5py.Dataset, "__getitem__", spy)
    assert_same(packed["flat"][[20, 3, 4, 20]], run.expected("flat")[[20, 3, 4, 20]])
    assert asked == []


def test_a_damaged_packed_file_is_not_passed_over_in_silence(run: MadeRun, tmp_path: Path) -> None:
    run.copied(tmp_path)
    pack(tmp_path)
    (tmp_path / "features.h5").write_bytes(b"no hdf5")
    with pytest.raises(StoreError, match=r"features\.h5 cannot be read as HDF5"):
        FeatureStore(tmp_path)


def test_a_file_that_hdf5_cannot_lock_is_not_said_to_be_damaged(
    run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with HDF5_USE_FILE_LOCKING=TRUE on a network file system without locks."""
    run.copied(tmp_path)
    pack(tmp_path)
    real = h5py.File

    def without_locks(name: Any, *arguments: Any, **options: Any) -> h5py.File:
        if isinstance(name, Path):
            raise OSError(errno.ENOLCK, "unable to lock file")
        return real(name, *arguments, **options)

    monkeypatch.setattr(h5py, "File", without_locks)
    with pytest.raises(StoreError, match=r"cannot read .*unable to lock.* When it can be read"):
        _ = FeatureStore(tmp_path)["flat"][:]


def test_a_store_and_plain_h5py_may_hold_the_same_file(tmp_path: Path) -> None:
    """HDF5 refuses one file with two locking flags in one process; a notebook does just that."""
    path = tmp_path / "mine.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(3)
    with h5py.File(path, "r"), open_hdf5(path) as second:
        assert second["x"][:].tolist() == [0, 1, 2]
    with h5py.File(path, "r", locking=False), open_hdf5(path) as second:
        assert second["x"][:].tolist() == [0, 1, 2]
    with open_hdf5(path), h5py.File(path, "r") as second:
        assert second["x"][:].tolist() == [0, 1, 2]
