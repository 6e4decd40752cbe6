"""job=predict and featx.predict: the head sees what the store would hold."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from csv_rows import csv_rows
from made_store import flip_byte_of_row, temporary_files
from PIL import Image
from safetensors.numpy import load_file
from tiny_model import TRUSTED, extract, run_job, write_image, write_images

import featx
from featx.analysis.probe.heads import head_bytes, read_head
from featx.errors import ConfigError, DataError, RunError, StoreError, StoreMismatchError
from featx.export.report.prediction_page import most_doubtful

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 41 images, and their store with heads of two layers, one of them a map."""
    root = tmp_path_factory.mktemp("made")
    photos = write_images(root / "photos")
    for i in range(20):
        write_image(photos / ("cat", "dog")[i % 2] / f"more{i}.png", 100 + i)
    extract(photos, layers=["conv", "pool"], out=str(root / "store"), part_rows=64)
    assert run_job("probe", store=str(root / "store"), device="cpu", probe={"l2": 0.1}) == 0
    return root


@pytest.fixture
def photos(made: Path) -> Path:
    return made / "photos"


@pytest.fixture
def probed(made: Path, in_tmp_path: None) -> featx.FeatureStore:
    """The store, copied to where a test may change it."""
    shutil.copytree(made / "store", "store")
    return featx.open("store")


def expected(store: featx.FeatureStore, layer: str) -> np.ndarray:
    """Softmax of the head on the store's rows, in plain numpy."""
    head = load_file(f"store/probe/{layer}.safetensors")
    x = store[layer][:].reshape(len(store), -1).astype(np.float64)
    scores = (x - head["mean"]) / head["scale"] @ head["weight"].T + head["bias"]
    scores = np.exp(scores - scores.max(1, keepdims=True))
    return scores / scores.sum(1, keepdims=True)


def predict_job(**keys: Any) -> list[dict[str, str]]:
    code = keys.pop("code", 0)
    keys = {"model": TRUSTED, "out": "new", "device": "cpu", "store": "store", **keys}
    assert run_job("predict", **keys) == code
    return csv_rows("new/predictions.csv")


@pytest.mark.parametrize("layer", ["conv", "pool"])
def test_the_same_images_get_what_the_stores_rows_get(
    probed: featx.FeatureStore, photos: Path, layer: str
) -> None:
    rows = predict_job(layers=layer, data=str(photos))
    scores = expected(probed, layer)
    assert [row["key"] for row in rows] == probed.keys.tolist()
    assert {row["status"] for row in rows} == {"ok"}
    found = np.array([float(row["probability"]) for row in rows])
    assert found == pytest.approx(scores.max(1), abs=2e-6)
    assert [row["class"] for row in rows] == [probed.classes[i] for i in scores.argmax(1)]
    columns = np.array([[float(row[f"score:{name}"]) for name in probed.classes] for row in rows])
    assert columns == pytest.approx(scores, abs=2e-6)
    assert (columns.max(1) == found).all()


def test_a_probe_of_other_rows_is_said(
    probed: featx.FeatureStore, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {"name": "folder", "root": str(photos), "limit": 2}
    predict_job(data=few)
    assert "another state" not in capsys.readouterr().err
    shutil.copytree(photos, "photos")
    write_image(Path("photos/cat/000.png"), 99)
    extract("photos", layers=["conv", "pool"], part_rows=64, refresh=True)
    predict_job(data=few)
    assert "probe.json belongs to another state of the store" in capsys.readouterr().err


def test_a_page_of_other_predictions_does_not_stay_beside_new_ones(
    probed: featx.FeatureStore, photos: Path, on_open: list[Callable[[str], None]]
) -> None:
    few = {"name": "folder", "root": str(photos), "limit": 2}
    predict_job(data=few)
    assert Path("new/predictions.html").exists()

    def killed(path: str) -> None:
        if Path(path).name.startswith(".tmp-predictions.html"):
            raise KeyboardInterrupt

    on_open.append(killed)
    with pytest.raises(KeyboardInterrupt):
        predict_job(data=few)
    assert not Path("new/predictions.html").exists()


def test_a_full_disk_leaves_the_files_of_an_earlier_run(
    probed: featx.FeatureStore, photos: Path, on_open: list[Callable[[str], None]]
) -> None:
    few = {"name": "folder", "root": str(photos), "limit": 2}
    predict_job(data=few)
    files = [Path("new/predictions.csv"), Path("new/predictions.html")]
    before = [path.read_bytes() for path in files]

    def full(path: str) -> None:
        if Path(path).name.startswith(".tmp-predictions.csv"):
            raise OSError(errno.ENOSPC, "No space left on device", path)

    on_open.append(full)
    with pytest.raises(RunError, match="No space left"):
        predict_job(data={**few, "limit": 3})
    assert [path.read_bytes() for path in files] == before
    assert temporary_files(Path("new")) == []


@pytest.mark.slow
def test_the_page_shows_the_most_doubtful_images_first(
    probed: featx.FeatureStore, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An image that fails is a row with its reason."""
    shutil.copytree(photos, "fresh")
    Path("fresh/bad.png").write_bytes(b"no image")
    rows = predict_job(data="fresh", code=3)
    said = capsys.readouterr()
    assert "42 images, 1 failed" in said.out
    assert "1 of 42 images failed" in said.err
    (bad,) = (row for row in rows if row["key"] == "bad.png")
    assert bad["status"] == "unsupported"
    assert bad["class"] == bad["probability"] == bad["score:cat"] == ""
    assert bad["reason"]
    text = Path("new/predictions.html").read_text(encoding="utf-8")
    assert str(Path.cwd()) not in re.sub(r"base64,[\w+/=]+", "", text)
    ok = sorted((row for row in rows if row["class"]), key=lambda row: float(row["probability"]))
    shown = re.findall(r'alt="([^"]+): (cat|dog)" loading', text)
    assert len(shown) == len(ok) == 41
    assert shown[0] == (ok[0]["key"], ok[0]["class"])
    probability = {row["key"]: float(row["probability"]) for row in ok}
    found = [probability[key] for key, _ in shown]
    assert found == sorted(found)
    assert "bad.png" in text
    assert "1 of 42 images failed" in text
    assert "41 images, sorted by" in text


def test_the_default_folder_has_the_name_of_the_head(
    probed: featx.FeatureStore, photos: Path
) -> None:
    keys = {"model": TRUSTED, "device": "cpu", "store": "store"}
    assert run_job("predict", **keys, layers="conv", data=str(photos)) == 0
    assert Path("runs/photos/conv/predictions.csv").is_file()


def test_doubt_is_the_distance_of_the_two_largest_scores() -> None:
    nan = float("nan")
    scores = np.array([[0.5, 0.49, 0.01], [0.4, 0.1, 0.1], [nan] * 3, [0.9, 0.1, 0]], np.float32)
    assert most_doubtful(scores).tolist() == [0, 1, 3]
    assert most_doubtful(np.ones((2, 1), np.float32)).tolist() == [0, 1]


def test_from_python_with_files_in_any_order(probed: featx.FeatureStore, photos: Path) -> None:
    files = [photos / key for key in probed.keys[[5, 2, 5]]]
    found = featx.predict(
        "store/probe/pool.safetensors", files, device="cpu", model_factory="zoo:TwoStageConvNet"
    )
    scores = expected(probed, "pool")[[5, 2, 5]]
    assert found.scores == pytest.approx(scores, abs=1e-5)
    assert [row.key for row in found] == [str(file) for file in files]
    assert found.classes == ("cat", "dog")
    assert found.layer == "pool"
    assert (
        found.accuracy
        == json.loads(Path("store/probe.json").read_text())["layers"]["pool"]["linear"]["accuracy"]
    )
    whole = featx.predict(
        "store/probe/pool.safetensors", photos, device="cpu", model_factory="zoo:TwoStageConvNet"
    )
    assert len(whole) == len(probed)
    of_store = featx.predict("store", files, device="cpu", model_factory="zoo:TwoStageConvNet")
    assert of_store.layer == json.loads(Path("store/probe.json").read_text())["layer"]
    with pytest.raises(DataError, match="images is empty"):
        featx.predict("store/probe/pool.safetensors", [], model_factory="zoo:TwoStageConvNet")


def test_from_python_with_images_of_any_kind(probed: featx.FeatureStore, photos: Path) -> None:
    file = photos / str(probed.keys[5])
    shutil.copy(file, "~nobody.png")
    with Image.open(file) as image:
        images = [
            image,
            file.read_bytes(),
            "~nobody.png",
            "no\0file.png",
            "\ud800.png",
            (file, "cat"),
        ]
        found = featx.predict("store", images, device="cpu", model_factory="zoo:TwoStageConvNet")
    assert [row.status for row in found] == ["ok"] * 3 + ["decode error"] * 2 + ["ok"]
    assert [row.key for row in found][::5] == ["0", "5"]
    assert found.rows[2].key == str(Path.cwd() / "~nobody.png")
    sound = found.scores[[0, 1, 2, 5]]
    assert np.array_equal(sound, sound[:1].repeat(4, 0))
    with pytest.raises(DataError, match=r"data\.root=.*/store is a store"):  # a PathLike
        featx.predict("store", probed, model_factory="zoo:TwoStageConvNet")
    with pytest.raises(DataError, match="images is a NoneType; expected a list"):
        featx.predict("store", None, model_factory="zoo:TwoStageConvNet")  # type: ignore[arg-type]


def test_code_that_a_file_names_is_not_imported(probed: featx.FeatureStore, photos: Path) -> None:
    with pytest.raises(ConfigError, match="featx imports no code because a file names it"):
        featx.predict("store/probe/pool.safetensors", photos)
    with pytest.raises(ConfigError, match=r"add model=custom model\.factory=zoo:TwoStageConvNet"):
        predict_job(model="efficientnet_lite0", data=str(photos))


def test_another_model_is_refused(probed: featx.FeatureStore, photos: Path) -> None:
    path = Path("store/probe/pool.safetensors")
    data = path.read_bytes()
    head, about = read_head(path, torch.device("cpu"))
    assert about["weights_sha256"] == probed.attrs["weights_sha256"]
    path.write_bytes(head_bytes(head, {**about, "weights_sha256": "0" * 64}))
    with pytest.raises(StoreMismatchError, match="weights_sha256: was '0000"):
        featx.predict(path, photos, model_factory="zoo:TwoStageConvNet")
    path.write_bytes(data[:-20])
    with pytest.raises(StoreError, match="cannot be read as a head"):
        featx.predict(path, photos, model_factory="zoo:TwoStageConvNet")
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(StoreError, match=r"so it is damaged\. Make it again: job=probe"):
        featx.predict(path, photos, model_factory="zoo:TwoStageConvNet")
    path.unlink()
    with pytest.raises(StoreError, match="there is no head at"):
        featx.predict(path, photos)


def test_what_is_missing_is_reported(probed: featx.FeatureStore, photos: Path) -> None:
    Path("store/probe.json").unlink()
    with pytest.raises(StoreError, match=r"no probe\.json: python -m featx job=probe"):
        predict_job(data=str(photos))
    with pytest.raises(ConfigError, match="needs store=DIR"):
        predict_job(store=None, data=str(photos))
    run_job("probe", store="store", probe={"method": "knn"})
    with pytest.raises(StoreError, match=r"has no head of .*; it has none"):
        predict_job(data=str(photos))
    with pytest.raises(ConfigError, match="the head of one layer"):
        predict_job(layers=["a", "b"], data=str(photos))


def test_images_are_read_as_those_of_the_store(probed: featx.FeatureStore, photos: Path) -> None:
    data = {"name": "folder", "root": str(photos), "exif": "ignore"}
    with pytest.raises(ConfigError, match=r"data\.exif=ignore"):
        predict_job(data=data)


@pytest.mark.slow
def test_an_overwritten_store_has_no_probe_of_the_old_one(
    probed: featx.FeatureStore, photos: Path
) -> None:
    assert json.loads(Path("store/probe.json").read_text())["head"]
    extract(photos, layers=["conv", "pool"], overwrite=True)
    assert not Path("store/probe.json").exists()
    assert not Path("store/probe").exists()


@pytest.mark.parametrize(
    ("job", "options"),
    [
        ("extract", {"data": "gone", "out": "new"}),
        ("stats", {"data": "gone", "out": "new"}),
        ("predict", {"store": "store", "data": "gone", "model": TRUSTED}),
        ("probe", {"store": "store"}),
        ("neighbors", {"store": "store", "layers": "pool"}),
        ("mislabelled", {"store": "store", "layers": "pool"}),
    ],
)
def test_a_folder_without_the_right_to_write_is_refused_before_the_computation(
    probed: featx.FeatureStore,
    monkeypatch: pytest.MonkeyPatch,
    job: str,
    options: dict[str, Any],
) -> None:
    """The computation would find that rows are damaged, or that there are no images."""
    flip_byte_of_row(Path("store/features.h5"), "pool", 3)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(StoreError, match="this user may not, or the disk is read-only"):
        run_job(job, **options)


def test_a_mistyped_path_of_images_leaves_no_folder(probed: featx.FeatureStore) -> None:
    with pytest.raises(DataError, match="does not exist"):
        run_job("predict", store="store", data="foto", out="new/scores", model=TRUSTED)
    assert not Path("new").exists()


def test_scores_that_do_not_fit_into_memory_are_refused(
    probed: featx.FeatureStore, photos: Path, set_free_memory: Callable[..., None]
) -> None:
    set_free_memory(1e9, 1e9, 10.0)  # the batches fit
    message = r"The scores of \d+ images and 2 classes take .* Predict fewer images at a time"
    with pytest.raises(ConfigError, match=message):
        predict_job(data=str(photos))
