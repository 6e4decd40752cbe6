"""Folders that datasets' save_to_disk wrote."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_faults import image_fault
from tiny_model import write_image

import featx
from featx.errors import ConfigError, DataError, MissingExtraError
from featx.sources import open_source, source_of
from featx.sources.huggingface import HuggingFaceOptions
from featx.types import NO_STATE, ImageFault, Source, Status

pytestmark = pytest.mark.usefixtures("without_progress_bars")

datasets = pytest.importorskip("datasets", reason="the extra huggingface is not installed")


@pytest.fixture
def without_progress_bars() -> None:
    datasets.disable_progress_bars()


def saved(root: Path, **keys: object) -> Source:
    return open_source(HuggingFaceOptions(root=str(root), **keys))


def made(images: list[Any], **columns: Any) -> Any:
    kinds = {"image": datasets.Image()}
    kinds |= {name: kind for name, (_, kind) in columns.items()}
    values = {"image": images, **{name: rows for name, (rows, _) in columns.items()}}
    return datasets.Dataset.from_dict(values, features=datasets.Features(kinds))


def test_bytes_and_class_names(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", 0)
    data = (tmp_path / "a.png").read_bytes()
    labels = datasets.ClassLabel(names=["cat", "dog"])
    rows = [{"bytes": data, "path": "a.png"}, {"bytes": data[:20], "path": None}, None]
    # -1 is no class where the classes have names, also if it and 1 are the only labels.
    made(rows, label=([1, 1, -1], labels)).save_to_disk(tmp_path / "saved")
    source = saved(tmp_path / "saved")
    listing = source.listing()
    assert listing.keys.tolist() == [b"row-000000", b"row-000001", b"row-000002"]
    assert (listing.labels.tolist(), listing.classes) == ([1, 1, -1], ("cat", "dog"))
    assert "1 row has the label -1, which counts as no label" in listing.warnings[0]
    assert source.read(b"row-000000") == data
    assert source.read(b"row-000001") == data[:20]
    with image_fault(Status.EMPTY):
        source.read(b"row-000002")


def test_labels_of_an_object_are_read_without_its_images() -> None:
    labels = datasets.ClassLabel(names=["cat", "dog"])
    rows = [{"bytes": b"no image", "path": None}, {"bytes": None, "path": "nowhere.png"}]
    dataset = made(rows, label=([1, 0], labels))
    for each in (dataset, dataset.with_format("torch")):
        listing = source_of(each).listing()
        assert (listing.labels.tolist(), listing.classes) == ([1, 0], ("cat", "dog"))

    def items(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"image": rows["image"], "label": [5 for _ in rows["image"]]}

    pixels = np.zeros((4, 4, 3), np.uint8)
    dataset = made([pixels, pixels], label=([1, 0], datasets.Value("int64")))
    assert source_of(dataset.with_transform(items)).listing().labels.tolist() == [5, 5]
    with pytest.raises(DataError, match=r"the item is a dict of img, label; expected"):
        source_of(dataset.rename_column("image", "img")).listing()
    note = source_of(dataset.rename_column("label", "labels")).listing().label_note
    assert note.startswith("there is no column label; 'labels' looks like labels and is not used")


def test_a_dict_of_splits_asks_for_one_of_them() -> None:
    splits = datasets.DatasetDict(train=made([None]), test=made([None]))
    with pytest.raises(ConfigError, match=r"splits train, test; give one .* data_set\['train'\]"):
        featx.extract(splits)


def test_a_selection_is_read_in_its_own_order(tmp_path: Path) -> None:
    rows = made([{"bytes": b"%d" % i, "path": None} for i in range(5)])
    rows.select([3, 1, 4]).save_to_disk(tmp_path / "saved")
    source = saved(tmp_path / "saved")
    assert [source.read(key) for key in source.listing().keys.tolist()] == [b"3", b"1", b"4"]


def test_splits_and_columns_are_named(tmp_path: Path) -> None:
    text = datasets.Value("string")
    rows = made([{"bytes": b"x", "path": None}], kind=(["k"], text))
    both = rows.add_column("other", [None]).cast_column("other", datasets.Image())
    datasets.DatasetDict({"train": rows, "test": both}).save_to_disk(tmp_path / "saved")
    assert saved(tmp_path / "saved").listing().classes == ()
    assert saved(tmp_path / "saved", label_column="kind").listing().classes == ("k",)
    with pytest.raises(DataError, match=r"data\.split=val: .* has train, test"):
        saved(tmp_path / "saved", split="val")
    with pytest.raises(DataError, match=r"image, other hold images\. Choose one"):
        saved(tmp_path / "saved", split="test")
    assert len(saved(tmp_path / "saved", split="test", path_column="image").listing()) == 1
    with pytest.raises(DataError, match=r"data\.label_column=kid: .* Nearest: kind"):
        saved(tmp_path / "saved", label_column="kid")
    rows.remove_columns("image").save_to_disk(tmp_path / "none")
    with pytest.raises(DataError, match=r"none hold images\. cast_column\(NAME"):
        saved(tmp_path / "none")


def saved_with_paths(root: Path, images: list[dict[str, Any] | None]) -> Source:
    """A folder whose table names files; save_to_disk itself puts the bytes into the table."""
    pa = pytest.importorskip("pyarrow", reason="datasets writes by it")
    made([{"bytes": b"x", "path": None}]).save_to_disk(root)
    path = str(next(root.glob("data-*.arrow")))
    with pa.memory_map(path) as file:
        schema = pa.ipc.open_stream(file).schema
    table = pa.Table.from_pylist([{"image": image} for image in images], schema=schema)
    with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        writer.write_table(table)
    return saved(root)


def test_images_kept_as_paths_lie_inside_the_folder(tmp_path: Path) -> None:
    rows = [{"bytes": None, "path": name} for name in ("in.png", "../out.png")]
    source = saved_with_paths(tmp_path / "saved", rows)
    (tmp_path / "saved" / "in.png").write_bytes(b"inside")
    (tmp_path / "out.png").write_bytes(b"outside")
    assert source.read(b"row-000000") == b"inside"
    with pytest.raises(ImageFault, match="leads out of the folder"):
        source.read(b"row-000001")


def test_what_is_no_such_folder_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for root in (tmp_path, tmp_path / "none"):
        with pytest.raises(DataError, match="is no folder that save_to_disk wrote"):
            saved(root)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r'pip install "featx\[huggingface\]"'):
        saved(tmp_path)


def test_a_folder_without_rows_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("datasets", minversion="5.2")  # older ones cannot save it
    made([]).save_to_disk(tmp_path / "empty")
    with pytest.raises(DataError, match="saved without rows"):
        saved(tmp_path / "empty")


def test_states_tell_when_a_file_or_the_table_changes(tmp_path: Path) -> None:
    rows = [
        {"bytes": b"x", "path": "x.png"},
        {"bytes": None, "path": "in.png"},
        {"bytes": None, "path": "other.png"},
        None,
    ]
    root = tmp_path / "saved"
    source = saved_with_paths(root, rows)
    for name in ("in.png", "other.png"):
        (root / name).write_bytes(b"an image")
    keys = np.array([b"row-%06d" % row for row in range(4)])
    before = source.states(keys)
    assert (source.states(keys) == before).all()
    (root / "in.png").write_bytes(b"another image")
    assert (source.states(keys) != before).tolist() == [False, True, False, False]
    assert source.states(keys[1:2]) == source.states(keys)[1]
    assert (source.states(keys)["size"] == 13).tolist() == [False, True, False, False]
    (root / "in.png").unlink()
    assert source.states(keys)[1] == NO_STATE
