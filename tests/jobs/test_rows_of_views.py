"""data.views and data.crops from the command: rows, labels, resume, prediction and refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from csv_rows import csv_rows
from PIL import Image, ImageOps
from safetensors.numpy import load_file
from tiny_model import MODEL, TRUSTED, extract, run_job, write_images

import featx
from featx.config import DataConfig
from featx.errors import ConfigError, ModelError, StoreError, StoreMismatchError

pytestmark = pytest.mark.usefixtures("in_tmp_path")

VIEWS = ["original", "hflip", "rot90"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_images(tmp_path / "photos", 12)


def viewed(photos: Path, out: str = "store", **keys: Any) -> featx.FeatureStore:
    options = ("views", "crops", "crop_scale", "boxes", "limit", "sample")
    data = {name: keys.pop(name) for name in options if name in keys}
    keys["part_rows"] = 16
    return extract({"name": "folder", "root": str(photos), **data}, out=out, **keys)


def rows_of(store: featx.FeatureStore, layer: str = "conv") -> dict[str, bytes]:
    return {str(key): store[layer][i].tobytes() for i, key in enumerate(store.keys)}


def test_original_is_the_image_and_every_view_has_its_label(photos: Path) -> None:
    whole, store = extract(photos, out="whole"), viewed(photos, views=VIEWS)
    assert len(store) == 3 * len(whole)
    expected = [f"{key}#{view}" for key in whole.keys for view in sorted(VIEWS)]
    assert store.keys.tolist() == expected
    assert store.classes == whole.classes
    assert store.labels.tolist() == np.repeat(whole.labels, 3).tolist()
    rows = rows_of(store)
    assert rows_of(whole) == {key: rows[f"{key}#original"] for key in whole.keys.tolist()}
    assert store.image_checksums.tolist() == np.repeat(whole.image_checksums, 3).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("option", ["limit", "sample"])
def test_a_limit_and_a_sample_count_images(photos: Path, option: str) -> None:
    whole = extract({"name": "folder", "root": str(photos), option: 5}, out="whole")
    store = viewed(photos, views=VIEWS, **{option: 5})
    expected = [f"{key}#{view}" for key in whole.keys for view in sorted(VIEWS)]
    assert store.keys.tolist() == expected


def test_columns_and_labels_of_a_table_are_those_of_every_view(photos: Path) -> None:
    names = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))
    lines = [f"{name},{('x', 'y', '')[i % 3]},p{i // 2}" for i, name in enumerate(names)]
    Path("t.csv").write_text("\n".join(["path,label,patient", *lines]))
    data = {"name": "table", "root": "t.csv", "image_root": str(photos), "columns": ["patient"]}
    store = extract({**data, "views": "vflip", "crops": 1})
    assert len(store) == 2 * len(names)
    for row, key in enumerate(store.keys.tolist()):
        i = names.index(key.partition("#")[0])
        label = int(store.labels[row])
        assert (store.classes[label] if label >= 0 else "") == ("x", "y", "")[i % 3]
        assert store.column("patient")[row] == f"p{i // 2}"


def test_a_view_of_a_box_is_that_of_the_box_saved_by_itself(photos: Path) -> None:
    name = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))[0]
    Path("boxes.csv").write_text(f"path,x,y,width,height\n{name},5,7,20,31\n{name},40,7,20,31\n")
    store = viewed(photos, boxes="boxes.csv", views=VIEWS, crops=1, max_failures=4)
    key = f"{name}#5,7,20,31"
    assert [row["key"].rpartition("#")[0] for row in store.failures] == [f"{name}#40,7,20,31"] * 4
    box = Image.open(photos / name).crop((5, 7, 25, 38))
    Path("cut").mkdir()
    box.save("cut/original.png")
    ImageOps.mirror(box).save("cut/hflip.png")
    box.transpose(Image.Transpose.ROTATE_90).save("cut/rot90.png")
    apart = extract("cut", out="apart")
    for view in VIEWS:
        row = store["conv"][store.row(f"{key}#{view}")]
        assert row.tobytes() == apart["conv"][apart.row(f"{view}.png")].tobytes()


def test_a_run_that_resumes_and_grows_has_the_rows_of_one_run(photos: Path) -> None:
    whole = viewed(photos, out="whole", views=["hflip"], crops=3)
    viewed(photos, views=["hflip"], crops=3, limit=7)
    grown = viewed(photos, views=["hflip"], crops=3, grow=True)
    assert rows_of(grown) == rows_of(whole)
    code = {"reextract_rows": len(grown)}
    assert run_job("verify", store="store", verify=code) == 0
    with pytest.raises(StoreMismatchError, match=r"data\.crops"):
        viewed(photos, views=["hflip"], crops=3, crop_scale=[0.5, 1.0])
    with pytest.raises(StoreMismatchError, match=r"grow=true"):
        viewed(photos, views=["hflip", "vflip"], crops=3)


def test_a_prediction_is_the_mean_over_the_views_of_an_image(photos: Path) -> None:
    extract(photos, layers=["pool"])
    assert run_job("probe", store="store", device="cpu", probe={"l2": 0.1}) == 0
    names = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))
    (photos / names[2]).write_bytes(b"no image")
    views = {"views": ["original", "hflip"], "crops": 2}
    data = {"name": "folder", "root": str(photos), **views}
    keys = {"store": "store", "out": "new", "device": "cpu", "max_failures": 9}
    assert run_job("predict", model=TRUSTED, data=data, **keys) == 0
    lines = csv_rows("new/predictions.csv")
    assert [line["key"] for line in lines] == names
    assert [i for i, line in enumerate(lines) if line["status"] != "ok"] == [2]
    assert lines[2]["class"] == lines[2]["score:cat"] == ""
    page = Path("new/predictions.html").read_text(encoding="utf-8")
    assert set(re.findall(r'alt="([^"]+): (?:cat|dog)" loading', page)) == {*names} - {names[2]}
    store = viewed(photos, layers=["pool"], out="views", max_failures=9, **views)
    head = load_file("store/probe/pool.safetensors")
    x = (store["pool"][:].reshape(len(store), -1).astype(np.float64) - head["mean"]) / head["scale"]
    scores = np.exp(x @ head["weight"].T + head["bias"])
    scores /= scores.sum(1, keepdims=True)
    for name, line in zip(names, lines, strict=True):
        if line["status"] == "ok":
            rows = [row for row, key in enumerate(store.keys) if key.rpartition("#")[0] == name]
            assert len(rows) == 4
            mean = scores[rows].mean(0)
            found = [float(line[f"score:{each}"]) for each in ("cat", "dog")]
            assert found == pytest.approx(mean, abs=2e-6)
            assert line["class"] == ("cat", "dog")[int(mean.argmax())]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"views": ["hflip", "hflip"]}, "a value is repeated"),
        ({"views": ["hflop"]}, "expected some of original, .* Nearest: hflip"),
        ({"views": []}, r"data\.views is empty"),
        ({"crops": 0}, "expected a whole number from 1"),
        ({"crop_scale": [0.1, 0.5]}, r"data\.crop_scale has an effect with data\.crops only"),
        ({"crops": 1, "crop_scale": [0.5, 0.1]}, "expected the smaller number first"),
        (
            {"crops": 1, "crop_scale": [0.5, 1.5]},
            r"crop_scale=\[0\.5,1\.5\]: expected \[smallest",
        ),
    ],
)
def test_views_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig(**options)


def test_what_needs_whole_images_is_refused_with_the_reason(photos: Path) -> None:
    viewed(photos, views="hflip")
    with pytest.raises(ConfigError, match="views of images"):
        run_job("export", store="store", export={"format": "webdataset"})
    Path("masks").mkdir()
    with pytest.raises(StoreError, match=r"probe\.masks: the rows of .* are views of images"):
        run_job("probe", store="store", probe={"masks": "masks"})


def test_crops_need_a_transform_that_resizes(photos: Path) -> None:
    model = {**MODEL, "transform": {**MODEL["transform"], "interpolation": "nearest"}}  # type: ignore[dict-item]
    with pytest.raises((ConfigError, ModelError), match=r"data\.crops=2: a random crop takes"):
        viewed(photos, crops=2, model=model)
    assert len(viewed(photos, views="hflip", model=model)) == 12


def test_images_of_a_python_object_have_views(photos: Path) -> None:
    paths = sorted(photos.rglob("*.png"))[:3]
    images = [Image.open(path).convert("RGB") for path in paths]
    store = extract({"source": images, "views": ["rot180"]})
    assert store.keys.tolist() == ["000000#rot180", "000001#rot180", "000002#rot180"]
    Path("turned").mkdir()
    for i, image in enumerate(images):
        image.rotate(180).save(f"turned/{i}.png")
    assert store["conv"][:].tobytes() == extract("turned", out="apart")["conv"][:].tobytes()
