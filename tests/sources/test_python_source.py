"""Data sets given as Python objects: keys, labels, and whatever the user's code raises."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from image_faults import fault_of
from PIL import Image
from tiny_model import KEYS, extract, run_job, write_image

import featx
from featx.errors import ConfigError, DataError, StoreMismatchError
from featx.sources import FolderSource, source_of
from featx.sources.python import ObjectOptions
from featx.types import Listing, Status


class Given:
    """A map-style data set of what a function gives; other attributes as keywords."""

    def __init__(self, count: int, item: Callable[[int], Any], **attributes: Any) -> None:
        self.count, self.item = count, item
        self.asked: list[int] = []
        vars(self).update(attributes)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        self.asked.append(row)
        return self.item(row)


def pixels(row: int) -> np.ndarray:
    return np.full((6, 5, 3), row, np.uint8)


def test_items_may_be_images_of_many_kinds(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", 0)
    data = (tmp_path / "a.png").read_bytes()
    image = Image.fromarray(pixels(7))
    items = [image, pixels(7), torch.from_numpy(pixels(7)).permute(2, 0, 1), pixels(7)[..., 0]]
    items += [data, bytearray(data), str(tmp_path / "a.png"), tmp_path / "a.png"]
    items += os.scandir(tmp_path)
    source = source_of(items)
    keys = source.listing().keys.tolist()
    assert keys == [b"%06d" % i for i in range(9)]
    read = [source.read(key) for key in keys]
    assert read[0] == read[1] == read[2] == b"P6\n5 6\n255\n" + pixels(7).tobytes()
    assert read[3] == b"P5\n5 6\n255\n" + bytes([7] * 30)
    assert read[4:] == [data] * 5


def test_two_dots_after_a_link_lead_to_the_folder_above_its_target(in_tmp_path: None) -> None:
    for name in ("a.png", "far/a.png"):
        write_image(Path(name), len(name))
    Path("far/deep").mkdir()
    Path("link").symlink_to("far/deep")
    source = source_of(["link/../a.png"])
    assert source.read(source.listing().keys[0]) == Path("far/a.png").read_bytes()


def test_labels_come_from_the_items_and_only_one_is_asked_for_where_there_are_none() -> None:
    dataset = Given(5, lambda row: (pixels(row), row % 3))
    listing = source_of(dataset).listing()
    assert (listing.labels.tolist(), listing.classes) == ([0, 1, 2, 0, 1], ("0", "1", "2"))
    names = source_of(Given(3, lambda row: [pixels(row), ("dog", None, "cat")[row]])).listing()
    assert (names.labels.tolist(), names.classes) == ([1, -1, 0], ("cat", "dog"))
    some = [(pixels(0), "dog"), pixels(1), (pixels(2), "cat")]
    assert source_of(some).listing().labels.tolist() == [1, -1, 0]
    assert source_of(some[1:]).listing().labels.tolist() == [-1, 0]
    mappings = source_of(Given(2, lambda row: {"label": "ba"[row], "image": pixels(row), "id": 7}))
    assert mappings.listing().labels.tolist() == [1, 0]
    assert mappings.read(b"000001") == b"P6\n5 6\n255\n" + pixels(1).tobytes()
    assert source_of([{"image": pixels(0)}]).listing().labels.tolist() == [-1]
    some_names = source_of([{"path": "b.png", "Label": "x"}, {"path": "a.png"}])
    assert some_names.listing().labels.tolist() == [0, -1]
    assert fault_of(some_names, b"000000").status == Status.MISSING
    types = {"image": None, "label": SimpleNamespace(names=["cat", "dog"])}  # as of `datasets`
    items = Given(2, lambda row: {"image": pixels(row), "label": row}, features=types)
    assert source_of(items).listing().classes == ("cat", "dog")
    tensors = source_of(Given(3, lambda row: (pixels(row), torch.tensor(row)))).listing()
    assert tensors.labels.tolist() == [0, 1, 2]
    of_one = np.array([[2], [0], [1]])  # as of MedMNIST
    for attributes in ({"labels": of_one}, {"targets": list(of_one)}, {}):
        given = Given(3, lambda row: (pixels(row), of_one[row]), **attributes)
        source = source_of(given)
        assert source.listing().labels.tolist() == [2, 0, 1]
        assert source.read(b"000001").startswith(b"P6")
    tuples = source_of(torch.utils.data.TensorDataset(torch.zeros(2, 3, 6, 5, dtype=torch.uint8)))
    assert tuples.listing().labels.tolist() == [-1, -1]
    assert tuples.read(b"000001") == b"P6\n5 6\n255\n" + bytes(90)
    alone = Given(1000, pixels)
    assert source_of(alone).listing().labels.tolist() == [-1] * 1000
    assert alone.asked == [0]


@pytest.mark.parametrize("targets", [[2, 0, 1], np.array([2, 0, 1]), torch.tensor([2, 0, 1])])
@pytest.mark.parametrize("of", [list, np.array])
def test_targets_and_classes_are_taken_without_asking_for_items(targets: Any, of: Any) -> None:
    dataset = Given(
        3, lambda row: (pixels(row), [2, 0, 1][row]), targets=targets, classes=of(["x", "y", "z"])
    )
    source = source_of(dataset)
    listing = source.listing()
    assert (listing.labels.tolist(), listing.classes) == ([2, 0, 1], ("x", "y", "z"))
    assert dataset.asked == []
    assert source.read(b"000001").startswith(b"P6")


def test_a_class_with_several_names_has_all_of_them_as_in_imagenet_of_torchvision() -> None:
    synonyms = [("tench", "Tinca tinca"), ("goldfish",)]
    listing = source_of(Given(2, pixels, targets=[1, 0], classes=synonyms)).listing()
    assert listing.classes == ("tench, Tinca tinca", "goldfish")


def test_a_label_that_is_another_one_later_is_a_failure_of_its_row() -> None:
    source = source_of(Given(2, lambda row: (pixels(row), row + 1), targets=[1, 1]))
    source.listing()
    assert source.read(b"000000").startswith(b"P6")
    fault = fault_of(source, b"000001")
    assert (fault.status, fault.error) == (Status.DECODE_ERROR, "LabelMismatch")
    assert str(fault) == "dataset[1] has label 2, but 1 when listed"
    missing = source_of(Given(1, lambda row: (pixels(row), float("nan"))))  # another one each time
    assert missing.listing().labels.tolist() == [-1]
    assert missing.read(b"000000").startswith(b"P6")


def test_keys_of_the_data_set_are_taken_in_bytewise_order() -> None:
    dataset = Given(3, pixels, keys=["b", "é", "a"], targets=[0, 1, 2])
    source = source_of(dataset)
    listing = source.listing()
    assert listing.keys.tolist() == [b"a", b"b", "é".encode()]
    assert listing.labels.tolist() == [2, 0, 1]
    assert source.read(b"a")[-1] == 2
    assert source.read("é".encode())[-1] == 1
    for wrong, message in ((["a", "b", "a"], "more than once: a"), (["a"], "has 1 entries"),
                           (["a", "", "b"], "not empty")):  # fmt: skip
        with pytest.raises(DataError, match=message):
            source_of(Given(3, pixels, keys=wrong)).listing()


def test_whatever_the_users_code_raises_is_recorded_for_its_row() -> None:
    class OwnError(Exception):
        pass

    errors = [OwnError("no\nway"), KeyError("k"), OSError(5, "I/O"), RuntimeError(), None]

    def item(row: int) -> Any:
        if errors[row] is not None:
            raise errors[row]
        return pixels(row), 1

    source = source_of(Given(5, item))
    assert source.listing().labels.tolist() == [-1, -1, -1, -1, 1]
    for row, name in enumerate(["OwnError", "KeyError", "OSError", "RuntimeError"]):
        fault = fault_of(source, b"%06d" % row)
        assert (fault.status, fault.error) == (Status.DECODE_ERROR, name)
    assert str(fault_of(source, b"000000")) == "no way"
    for wrong, name in ((3, "TypeError"), ((1, 2, 3), "TypeError"), ({"img": 1}, "TypeError"),
                        (pixels(0) * 1j, "ValueError")):  # fmt: skip
        source = source_of([(pixels(0), 1), wrong])
        source.listing()
        assert fault_of(source, b"000001").error == name
    missing = source_of(["/nowhere/x.jpg", b""])
    missing.listing()
    assert fault_of(missing, b"000000").status == Status.MISSING
    assert fault_of(missing, b"000001").status == Status.EMPTY


@pytest.mark.parametrize("item", [(1, 2, 3), {"img": 1}])
def test_items_that_all_have_no_image_are_refused_when_they_are_listed(item: object) -> None:
    dataset = Given(1000, lambda row: item)
    for source in (source_of(dataset), source_of([item] * 3)):
        with pytest.raises(DataError, match=r"has no images\. dataset\[0\]: the item .* expected"):
            source.listing()
    assert dataset.asked == [0]


@pytest.mark.parametrize("item", ["", "a\0", "\ud800", (), torch.ones(3, 9, 9, requires_grad=True)])
def test_an_item_that_is_no_image_fails_in_its_row(item: object) -> None:
    source = source_of(["a", item])
    keys = source.listing().keys
    assert keys.tolist() == [b"000000", b"000001"]
    source.states(keys)
    assert fault_of(source, b"000001").status == Status.DECODE_ERROR


def test_images_in_memory_and_opened_files_have_states(tmp_path: Path) -> None:
    for i in range(3):
        write_image(tmp_path / f"{i}.png", i)

    def states(data: Any) -> np.ndarray:
        source = source_of(data)
        found = source.states(source.listing().keys)
        assert found is not None
        return found

    paths = sorted(tmp_path.iterdir())
    for data in (paths, [path.read_bytes() for path in paths]):
        assert states(data).tolist() == states(data).tolist()
        assert len({state.tobytes() for state in states(data)}) == 3
    images = [Image.open(path) for path in paths]
    array = np.stack([np.asarray(image) for image in images])
    expected = states(list(array))
    for data in (images, array, torch.from_numpy(array)):
        assert states(data).tolist() == expected.tolist()
        changed = states(data[:1]).tolist() + states(data[2:]).tolist()
        assert changed == expected[[0, 2]].tolist()
    assert len({state.tobytes() for state in expected}) == 3
    assert source_of(Given(3, pixels)).states(np.array([b"000000"])) is None


def test_a_lazy_frame_whose_query_fails_is_named() -> None:
    def collect(self: object) -> object:
        raise ValueError("unable to find column nope")

    lazy = type("LazyFrame", (), {"__module__": "polars.lazyframe", "collect": collect})()
    with pytest.raises(DataError, match=r"collect\(\) failed: ValueError: .* nope\. Correct"):
        source_of(lazy)


def test_missing_values_and_columns_of_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    frame = type("GeoDataFrame", (pandas.DataFrame,), {})({"path": ["b", "a", "c"]}, dtype="string")
    for number, (values, dtype) in enumerate(
        (([1, None, 0], "Int64"), ([True, None, False], "boolean"), (["y", None, "x"], "string"))
    ):
        frame["label"] = frame[number] = pandas.array(values, dtype)
        listing = source_of(frame, ObjectOptions(columns=[str(number)])).listing()
        assert (listing.keys.tolist(), listing.labels.tolist()) == ([b"a", b"b", b"c"], [-1, 1, 0])
        expected = [b"", b"y", b"x"] if dtype == "string" else [np.nan, 1, 0]
        np.testing.assert_array_equal(listing.columns[str(number)], expected)
    note = source_of(frame.rename(columns={"label": "class"})).listing().label_note
    assert note.startswith("there is no column label; 'class' looks like labels and is not used")
    frame["other"] = ["x", 1, None]
    with pytest.raises(DataError, match="column other is not of one type that a store can hold"):
        source_of(frame, ObjectOptions(columns=["other"]))
    with pytest.raises(DataError, match="1 row without a path: 1, column image"):
        source_of(pandas.DataFrame({"image": ["a", {"bytes": b"x"}]}))
    frame.columns = ["path", "label", *["unused"] * 5][: len(frame.columns)]
    assert source_of(frame).listing().classes == ("x", "y")
    frame.columns = ["path", *["label"] * 5][: len(frame.columns)]
    with pytest.raises(DataError, match="two columns of the same name: path, label, label"):
        source_of(frame)


def test_memory_is_no_fault_of_an_image() -> None:
    def item(row: int) -> Any:
        raise MemoryError

    source = source_of(Given(1, item, targets=[0]))
    source.listing()
    with pytest.raises(MemoryError):
        source.read(b"000000")


def test_one_item_is_asked_for_at_a_time() -> None:
    inside, most = 0, 0
    lock = threading.Lock()

    def item(row: int) -> Any:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.002)
        with lock:
            inside -= 1
        return pixels(row)

    source = source_of(Given(40, item))
    keys = source.listing().keys.tolist()
    with ThreadPoolExecutor(8) as threads:
        assert [data[-1] for data in threads.map(source.read, keys)] == list(range(40))
    assert most == 1


def test_what_is_no_data_set_is_said() -> None:
    for one_image in (pixels(0), torch.from_numpy(pixels(0))):
        with pytest.raises(DataError, match=r"\(6, 5, 3\), which looks like one image"):
            source_of(one_image)
    for wrong in (iter([1]), 5, object()):
        with pytest.raises(DataError, match="expected a path, a mapping, a data set with __len__"):
            source_of(wrong)
    methods = {"__len__": lambda self: 1, "__iter__": lambda self: iter([1])}
    stream = type("Stream", (torch.utils.data.IterableDataset,), methods)()
    for wrong in (iter([1]), stream):
        with pytest.raises(DataError, match=r"Give list\(data\), if its items fit"):
            source_of(wrong)
    methods["__getitem__"] = lambda self, row: pixels(row)
    both = type("Both", (torch.utils.data.IterableDataset,), methods)()
    assert source_of(both).listing().keys.tolist() == [b"000000"]
    loader = torch.utils.data.DataLoader([pixels(0)])
    with pytest.raises(DataError, match=r"data is a DataLoader.* Give its \.dataset\."):
        source_of(loader)
    with pytest.raises(DataError, match="data is the class Given; give one object of it"):
        source_of(Given)
    with pytest.raises(DataError, match="has no rows"):
        source_of([]).listing()
    with pytest.raises(DataError, match="found labels of kind float, number"):
        source_of([(pixels(0), 1), (pixels(0), 1.5)]).listing()
    with pytest.raises(DataError, match=r"dataset\.targets has 1 entries, the data set 2 rows"):
        source_of(Given(2, pixels, targets=[1])).listing()


# Through featx.extract


@pytest.mark.usefixtures("in_tmp_path")
def test_other_images_in_a_list_are_not_taken_for_those_of_the_store(photos: Path) -> None:
    images = [Image.open(path) for path in sorted(photos.rglob("*.png"))[:4]]
    extract(images)
    with pytest.raises(StoreMismatchError, match="4 images have changed"):
        extract(images[::-1])
    extract(images)


@pytest.mark.usefixtures("in_tmp_path")
def test_images_that_are_not_compared_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    extract(Given(4, pixels))
    for keys, are_compared in (({}, False), ({"refresh": True}, True)):
        capsys.readouterr()
        extract(Given(4, pixels), **keys)
        text = " ".join(capsys.readouterr().err.split())
        assert "4 of 4 rows are there already" in text
        assert ("only refresh=true compares their images" not in text) == are_compared


@pytest.mark.usefixtures("in_tmp_path")
def test_features_are_those_of_the_folder_and_a_bad_item_costs_no_neighbour(photos: Path) -> None:
    paths = sorted(photos.rglob("*.png"))
    reference = extract(photos, dtype="float32", part_rows=32)

    def item(row: int) -> Any:
        if row == 4:
            raise ZeroDivisionError("by zero")
        with Image.open(paths[row]) as image:
            return image.convert("RGB"), paths[row].parent.name

    keys = [os.fspath(path.relative_to(photos)) for path in paths]
    store = extract(Given(21, item, keys=keys), out="mine", dtype="float32", part_rows=32)
    assert store.keys.tolist() == reference.keys.tolist()
    assert store.classes == reference.classes
    rest = np.flatnonzero(store.ok)
    assert np.flatnonzero(~store.ok).tolist() == [4]
    assert store.failures[0]["error"] == "ZeroDivisionError"
    assert store["conv"][rest].tobytes() == reference["conv"][rest].tobytes()
    assert store.labels[rest].tolist() == reference.labels[rest].tolist()


@pytest.mark.slow
@pytest.mark.usefixtures("in_tmp_path")
def test_the_same_object_resumes_and_another_one_is_refused(
    photos: Path, computed: list[tuple[frozenset[str], int]]
) -> None:
    paths = sorted(photos.rglob("*.png"))
    data = [(path, i % 2) for i, path in enumerate(paths)]
    extract(data, pack=False)
    (Path("store") / "parts" / "part-000002.h5").unlink()
    computed.clear()
    store = extract(data, pack=False)
    assert store.complete
    assert [row for _, row in computed] == [16, 20]
    with pytest.raises(StoreMismatchError, match="other labels"):
        extract([(path, 1 - label) for path, label in data])
    with pytest.raises(StoreMismatchError, match="no longer in the data set"):
        extract(data[:20])
    added = paths[-1].with_name("zzz.png")  # the keys of the data set are the paths
    added.write_bytes(paths[0].read_bytes())
    with pytest.raises(StoreMismatchError, match="1 new image that is"):
        extract([*data, (added, 0)])
    assert len(extract([*data, (added, 0)], grow=True, pack=False)) == 22
    with pytest.raises(DataError, match="only a Python program can open it"):
        run_job("verify", store="store", verify={"reextract_rows": 2})


class OwnSource:
    """A Source by a user, around the folder's."""

    def __init__(self, folder: Path) -> None:
        self.folder = FolderSource(folder)
        self.changed: dict[str, Any] = {}

    def listing(self) -> Listing:
        found = self.folder.listing()
        return Listing(**{**vars(found), **self.changed})

    def read(self, key: bytes) -> bytes:
        return self.folder.read(key)


@pytest.mark.usefixtures("in_tmp_path")
def test_a_source_of_ones_own(photos: Path) -> None:
    reference = extract(photos, part_rows=32)
    own = OwnSource(photos)
    store = extract(own, out="own", part_rows=32)
    assert store["conv"][:].tobytes() == reference["conv"][:].tobytes()
    keys = own.listing().keys
    for changed, message in (
        ({"keys": keys[::-1]}, "different keys in bytewise order"),
        ({"keys": keys.tolist()}, "fixed-length bytes"),
        ({"labels": own.listing().labels[1:]}, r"expected an array of shape \(21,\)"),
        ({"labels": own.listing().labels + 1}, "2 in row .*, of 2 classes"),
        ({"keys": keys[:0], "labels": keys[:0]}, "has no rows"),
    ):
        own.changed = changed
        with pytest.raises(DataError, match=message):
            extract(own, out="other")


@pytest.mark.usefixtures("in_tmp_path")
def test_other_options_of_the_group_go_with_the_object(photos: Path) -> None:
    data = sorted(photos.rglob("*.png"))
    store = extract({"source": data, "limit": 5}, pack=False)
    assert len(store) == 5
    with pytest.raises(ConfigError, match=r"data\.root has no effect with a data set given"):
        extract({"source": data, "root": "photos"})
    statistics = featx.stats(**{k: v for k, v in KEYS.items() if k not in ("part_rows", "out")},
                             data=data, out="statistics")  # fmt: skip
    assert statistics["conv"].count == 21


@pytest.mark.parametrize("path", ["photos/", b"photos", Path("photos")])
def test_a_path_is_no_data_set_object(path: object) -> None:
    with pytest.raises(DataError, match="a path, and expected is an object"):
        source_of(path)
