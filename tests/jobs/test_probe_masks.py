"""job=probe with probe.masks: classes of pixels, against a known rule and scikit-learn."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import probe_job
import pytest
import torch
from PIL import Image
from probe_job import given_split, predictions
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import confusion_matrix, jaccard_score
from sklearn.preprocessing import StandardScaler
from tiny_model import MODEL, extract, run_job

import featx
from featx.analysis import head_of_store
from featx.base import WIDTH
from featx.errors import ConfigError, DataError, LayerError, StoreError

pytestmark = pytest.mark.usefixtures("in_tmp_path", "one_thread")

COLOURS = np.array([[250, 20, 20], [20, 250, 20], [20, 20, 250], [230, 230, 20]], np.uint8)
PATCHES = {**MODEL, "name": "patches", "factory": "zoo:PatchColours"}
LAYERS = {"maps": "none", "tokens": "none"}


KEYS = [f"{'ab'[i % 2]}/{i:03d}.png" for i in range(16)]
"""Of the images of a data set, which are in two folders."""


def write_image(classes: np.ndarray, path: Path, side: int = 4) -> None:
    """Write an image of flat patches, one colour a class; PNG, so that no pixel changes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(COLOURS[classes].repeat(side, 0).repeat(side, 1)).save(path)


def mask(numbers: np.ndarray, name: str, folder: str = "masks") -> None:
    path = Path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(numbers.astype(np.uint8)).save(path)


def scenes(count: int = 16, num_classes: int = 3) -> np.ndarray:
    """(n, 8, 8) classes of patches, in stripes of two to four patches; every third has a corner."""
    rng = np.random.default_rng(0)
    made = np.zeros((count, 8, 8), int)
    for i in range(count):
        edges = [0, int(rng.integers(2, 5)), int(rng.integers(5, 7)), 8]
        order = rng.permutation(num_classes)[:3]
        for low, high, number in zip(edges, edges[1:], order, strict=False):
            made[i, low:high] = number
        made[i] = made[i] if i % 2 else made[i].T
        if i % 3 == 0:
            made[i, 5:, 5:] = order[0]
    return made


def dataset(classes: np.ndarray, layers: dict[str, Any] | None = None, **data: Any) -> None:
    """A store of images of these patches, and a mask for each."""
    for i, each in enumerate(classes):
        write_image(each, Path("photos", KEYS[i]))
        mask(each.repeat(4, 0).repeat(4, 1), KEYS[i])
    options = {"name": "folder", "root": "photos", **data}
    extract(options, model=PATCHES, layers=layers or LAYERS, part_rows=16)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masks")
    with contextlib.chdir(folder):
        dataset(scenes())
    return folder


@pytest.fixture
def striped(made: Path, tmp_path: Path) -> None:
    """A copy of the images of `scenes`, of their masks and of their store."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)


def probe(**options: Any) -> dict[str, Any]:
    return probe_job.probe(**{"masks": "masks", "l2": 1e-4, **options})


def lines(layer: str) -> list[dict[str, str]]:
    return predictions(layer=layer)


def recomputed(rows: list[dict[str, str]], prefix: str = "") -> dict[str, float]:
    """Metrics from the counts in predictions.csv, in plain Python."""
    sums: dict[str, list[int]] = {}
    for row in rows:
        counts = [int(row[prefix + name]) for name in ("true", "predicted", "right")]
        before = sums.get(row["class"], [0, 0, 0])
        sums[row["class"]] = [a + b for a, b in zip(before, counts, strict=True)]
    seen = [each for each in sums.values() if each[0]]
    return {
        "miou": sum(right / (true + said - right) for true, said, right in seen) / len(seen),
        "pixel_accuracy": sum(each[2] for each in seen) / sum(each[0] for each in seen),
        "mean_accuracy": sum(right / true for true, _, right in seen) / len(seen),
    }


@pytest.mark.usefixtures("striped")
def test_a_linear_rule_on_patches_is_found_and_every_number_follows_from_the_csv(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = probe()
    out = capsys.readouterr().out
    assert found["task"] == "segmentation"
    for layer, prefix in (("maps", 0), ("tokens", 2)):
        about = found["layers"][layer]
        assert about["grid"] == [8, 8]
        assert about["prefix_tokens"] == prefix
        assert about["linear"]["miou"] >= 0.99
        assert about["linear"]["patch_miou"] == 1
        again = recomputed(lines(layer))
        for name, value in again.items():
            assert about["linear"][name] == pytest.approx(value, abs=1e-12)
        patches = recomputed(lines(layer), "patches_")
        assert about["linear"]["patch_miou"] == pytest.approx(patches["miou"], abs=1e-12)
    assert found["miou"] == found["layers"][found["layer"]]["linear"]["miou"]
    assert np.trace(found["confusion"]) / np.sum(found["confusion"]) == found["pixel_accuracy"]
    assert np.sum(found["confusion"], 1).tolist() == found["pixels_of_classes"]
    low, high = found["interval"]
    assert low <= found["miou"] <= high
    assert found["unit"] == "image"
    assert found["head"] is None
    assert found["class_numbers"] == [0, 1, 2]
    assert f"mIoU {found['miou']:.3f}, 95 % interval" in out.replace("\n", " ")
    assert "not of whole images" in out.replace("\n", " ")
    assert all(len(line) <= WIDTH for line in out.splitlines())
    with pytest.raises(StoreError, match="has no head"):
        head_of_store(Path("store"), None)
    featx.write_report(store="store", report={"thumbnails": 0})
    page = Path("store/report.html").read_text(encoding="utf-8")
    assert re.findall(r'<th scope="row" title="(\d)">', page) == [
        str(i) for i in np.argsort(found["pixels_of_classes"], kind="stable")[::-1]
    ]
    assert "32 pixels that the network saw, not on whole images" in page


def test_pixels_are_those_of_scikit_learn_and_torch() -> None:
    """Masks whose edges cross patches, and colours that only hint at the class."""
    rng, names = np.random.default_rng(4), []
    masks = np.zeros((14, 32, 32), int)
    for i, each in enumerate(masks):
        each[: int(rng.integers(6, 20))] = 1
        each[:, : int(rng.integers(6, 14))] = 2
        each[int(rng.integers(0, 20)) :][:3, :9] = 200 if i % 4 else 1
        image = COLOURS[np.minimum(each, 3)] + rng.normal(0, 150, (32, 32, 3))
        names.append(f"{i:02d}.png")
        Path("photos").mkdir(exist_ok=True)
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(f"photos/{names[-1]}")
        mask(each, names[-1])
    extract("photos", model=PATCHES, layers={"maps": "none"}, dtype="float32", part_rows=16)
    found = probe(ignore=200, l2=1e-2)
    tested = sorted({row["key"] for row in lines("maps")})
    test = np.array([name in tested for name in names])
    maps = featx.open("store")["maps"][:].astype(np.float64)
    x = maps[~test].transpose(0, 2, 3, 1).reshape(-1, 3)
    scaler = StandardScaler().fit(x)
    cells = masks[~test].reshape(-1, 8, 4, 8, 4).transpose(0, 1, 3, 2, 4).reshape(-1, 16)
    counts = np.stack([(cells == number).sum(1) for number in range(3)], 1)
    known = counts.any(1)
    # One row for each patch and class, with the number of pixels as its weight.
    rows, weights = np.repeat(scaler.transform(x)[known], 3, 0), counts[known].ravel().astype(float)
    y = np.tile(np.arange(3), int(known.sum()))
    oracle = LogisticRegression(C=1 / (1e-2 * weights.sum()), tol=1e-9, max_iter=5000)
    oracle.fit(rows, y, sample_weight=weights)
    said = []
    for each in maps[test]:
        logits = oracle.decision_function(scaler.transform(each.reshape(3, -1).T))
        small = torch.from_numpy(logits.T.reshape(1, 3, 8, 8))
        large = torch.nn.functional.interpolate(
            small, size=(32, 32), mode="bilinear", align_corners=False
        )
        said.append(large.argmax(1)[0].numpy())
    true, predicted = masks[test].ravel(), np.array(said).ravel()
    expected = confusion_matrix(true[true < 3], predicted[true < 3], labels=range(3))
    assert np.array_equal(found["confusion"], expected)
    assert 0.3 < found["miou"] < 0.95
    iou = jaccard_score(true[true < 3], predicted[true < 3], average=None)
    assert found["iou"] == pytest.approx(iou.tolist(), abs=1e-12)
    assert found["miou"] == pytest.approx(float(iou.mean()), abs=1e-12)


@pytest.mark.usefixtures("striped")
def test_no_image_is_on_both_sides_and_groups_stay_whole() -> None:
    found = probe(folds=3)
    tested = [(row["fold"], row["key"]) for row in lines("maps")]
    folds = {key: {fold for fold, other in tested if other == key} for _, key in tested}
    assert len(folds) == 16
    assert {len(each) for each in folds.values()} == {1}
    assert found["rows"] == 16
    assert len(found["layer_of_folds"]) == 3
    chosen = [
        row
        for layer in LAYERS
        for row in lines(layer)
        if found["layer_of_folds"][int(row["fold"]) - 1] == layer
    ]
    assert found["miou"] == pytest.approx(recomputed(chosen)["miou"], abs=1e-12)
    probe(**given_split(KEYS, ["train"] * 13 + ["test"] * 3))
    assert {row["key"] for row in lines("maps")} == {*KEYS[13:]}


def test_boxes_of_an_image_take_its_mask_and_stay_together() -> None:
    rng = np.random.default_rng(2)
    rows = ["path,x,y,width,height"]
    for i in range(8):
        classes = rng.integers(0, 3, (4, 6)).repeat(4, 0).repeat(4, 1)  # 16 x 24 patches
        write_image(classes, Path(f"photos/{i}.png"))
        mask(classes.repeat(4, 0).repeat(4, 1), f"{i}.png")
        rows += [f"{i}.png,{x},{y},32,32" for x, y in ((0, 0), (64, 32), (32, 16))]
    Path("boxes.csv").write_text("\n".join(rows))
    data = {"name": "folder", "root": "photos", "boxes": "boxes.csv"}
    extract(data, model=PATCHES, layers=LAYERS, part_rows=32)
    found = probe()
    assert found["miou"] >= 0.98
    assert found["split"]["groups"]["by"] == "image"
    assert found["unit"] == "group"
    tested = {row["key"] for row in lines("maps")}
    images = {key.split("#")[0] for key in tested}
    assert len(tested) == 3 * len(images)


@pytest.mark.usefixtures("striped")
def test_unusable_masks_are_left_out_by_name() -> None:
    Path("masks/a/000.png").unlink()
    mask(np.zeros((32, 30)), "b/001.png")
    mask(np.full((32, 32), 255), "a/002.png")
    mask(np.full((32, 32), 7), "b/003.png")
    Path("masks/a/004.png").write_bytes(b"damaged")
    Image.new("RGB", (32, 32)).save("masks/b/005.png")
    write_image(1 - np.eye(8, dtype=int), Path("photos/a/006.png"))
    Path("names.txt").write_text("red\ngreen\nblue\u2028dark\n")
    found = probe(mask_classes="names.txt")
    reasons = {each["key"]: each["reason"] for each in found["masks"]["refused"]}
    assert reasons == {
        "a/000.png": "there is no mask a/000.png",
        "b/001.png": "mask b/001.png is of 30 x 32 pixels, and the upright image of 32 x 32",
        "a/002.png": "all pixels of its crop are ignored (probe.ignore=255)",
        "b/003.png": "its mask has the class number 7, and probe.mask_classes names 0 to 2",
        "a/004.png": reasons["a/004.png"],
        "b/005.png": "mask b/005.png: mode RGB; expected a palette (P), or grey of 8 (L) or 16 "
        "(I;16) bits",
        "a/006.png": "the image has changed since its features were extracted",
    }
    assert "mask a/004.png: " in reasons["a/004.png"]
    assert (
        "7 rows without a usable mask are left out: a/000.png: there is"
        in (found["notes_on_rows"][0])
    )
    assert found["classes"] == ["red", "green", "blue\u2028dark"]
    assert found["masks"]["num_refused"] == 7
    assert found["rows_labelled"] == 9


@pytest.mark.parametrize("endings", [("png", "bmp"), ("001", "002")])
def test_a_mask_whose_name_fits_two_images_is_that_of_neither(endings: tuple[str, str]) -> None:
    classes = scenes(10)
    for i, each in enumerate(classes):
        write_image(each, Path(f"photos/{i}.png"))
        mask(each.repeat(4, 0).repeat(4, 1), f"{i}.png")
    Path("photos/0.png").rename(f"photos/0.{endings[0]}")
    Image.open("photos/1.png").save(f"photos/0.{endings[1]}", "PNG")
    names = sorted(path.name for path in Path("photos").iterdir())
    Path("photos/table.csv").write_text("\n".join(["path", *names]))
    table = {"name": "table", "root": "photos/table.csv", "path_column": "path"}
    extract(table, model=PATCHES, layers={"maps": "none"}, part_rows=16)
    found = probe()
    first, second = sorted(f"0.{ending}" for ending in endings)
    assert found["masks"]["refused"] == [
        {"key": key, "reason": f"mask 0.png would also be that of {other}; rename one image"}
        for key, other in ((first, second), (second, first))
    ]
    assert found["rows_labelled"] == 9


def test_ignored_pixels_count_nowhere_and_failed_rows_shift_nothing() -> None:
    classes = scenes(16)
    (Path("photos") / "a").mkdir(parents=True)
    Path("photos/a/0005.png").write_bytes(b"no image")
    for i, each in enumerate(classes):
        write_image(each, Path("photos", KEYS[i]))
        numbers = each.repeat(4, 0).repeat(4, 1)
        numbers[:7] = 9
        mask(numbers, KEYS[i])
    extract("photos", model=PATCHES, layers=LAYERS, max_failures=1, part_rows=32)
    found = probe(ignore=9)
    assert found["notes_on_rows"][0] == "1 failed row is left out"
    assert found["class_numbers"] == [0, 1, 2]
    assert sum(found["pixels_of_classes"]) == found["rows"] * 25 * 32
    assert found["miou"] >= 0.98
    found = probe()
    assert found["class_numbers"] == [0, 1, 2, 9]


def test_a_class_that_is_only_tested_counts_with_0() -> None:
    classes = scenes(12)
    classes[11, :4] = 3
    dataset(classes, {"maps": "none"})
    found = probe(**given_split(KEYS[:12], ["train"] * 9 + ["test"] * 3))
    assert found["iou"][3] == 0
    assert found["miou"] < 0.8
    assert "1 classes have no pixel in the training rows" in found["notes"][0]
    assert all(row["predicted"] == "0" for row in lines("maps") if row["class"] == "3")


@pytest.mark.usefixtures("striped")
def test_what_cannot_be_probed_is_refused_with_the_reason() -> None:
    def refused(error: type[Exception], **options: Any) -> str:
        with pytest.raises(error) as caught:
            probe(**options)
        return str(caught.value)

    assert "there is no such folder" in refused(ConfigError, masks="nowhere")
    Path("empty").mkdir()
    text = refused(DataError, masks="empty")
    assert "none of the 16 rows" in text
    assert "and 11 more" in text
    for key in KEYS:
        mask(np.where(np.eye(32) > 0, 255, 0), key, "one")
    assert "the class 0 only" in refused(DataError, masks="one")
    assert "need" in (text := refused(ConfigError, memory_gib=1e-6))
    assert "probe.memory_gib=1e-06" in text
    for options, said in (
        ({"method": "knn", "l2": None}, "probe.method=linear alone"),
        ({"task": "regression", "label_column": "x"}, "leave probe.task out"),
        ({"label_column": "x"}, "probe.label_column has no effect with probe.masks"),
        ({"seeds": 3}, "probe.seeds has no effect"),
        ({"masks": None, "ignore": 3}, "probe.ignore has an effect with probe.masks"),
        ({"masks": None, "mask_classes": "x"}, "probe.mask_classes has an effect"),
        ({"ignore": -2}, "expected a whole number from 0 to 65535"),
    ):
        assert said in refused(ConfigError, **options)
    Path("names.txt").write_text("red\n\nblue\n")
    assert "one name a line" in refused(ConfigError, mask_classes="names.txt")
    with pytest.raises(ConfigError, match=r"data has no effect|data.root has no effect"):
        run_job("probe", store="store", data={"name": "folder", "root": "photos"})


def test_layers_without_places_are_refused() -> None:
    dataset(scenes(8), {"maps": "avg"})
    with pytest.raises(ConfigError, match=r"probe.masks needs tokens or maps, and maps has one"):
        probe()
    sample = {"name": "sample", "k": 5}
    extract("photos", model=PATCHES, layers=["tokens"], out="sampled", reduce=sample)
    with pytest.raises(LayerError, match="does not record which tokens of tokens are patches"):
        run_job("probe", store="sampled", device="cpu", probe={"masks": "masks"})


@pytest.mark.parametrize("cells", [(4, 8), (3, 5)])  # (3, 3, 5) looks like (H, W, C)
def test_a_grid_has_any_proportions(cells: tuple[int, int]) -> None:
    rows, columns = cells
    dataset(scenes(8), {"maps": {"name": "grid", "rows": rows, "columns": columns}})
    about = probe()["layers"]["maps"]
    assert about["grid"] == [rows, columns]
    assert about["features"] == 3
    assert about["linear"]["miou"] > 0.5
    found = probe_job.probe(method="attentive", l2=0.01, epochs=1)["layers"]["maps"]
    assert found["attentive"]["tokens"] == rows * columns


@pytest.mark.usefixtures("striped")
def test_images_that_have_moved_are_found_with_data_root() -> None:
    first = probe()
    Path("photos").rename("moved")
    with pytest.raises(StoreError, match=r"are not at photos.*data.root="):
        probe()
    given, moved = {"masks": "masks", "l2": 1e-4}, {"name": "folder", "root": "moved"}
    assert run_job("probe", store="store", device="cpu", probe=given, data=moved) == 0
    assert json.loads(Path("store/probe.json").read_text())["miou"] == first["miou"]


def test_masks_are_of_the_upright_image() -> None:
    """Images that are not square, stored on their side with an EXIF orientation."""
    rng = np.random.default_rng(3)
    tags = Image.Exif()
    tags[0x0112] = 6
    Path("photos").mkdir()
    for i in range(10):
        upright = np.zeros((8, 11), int)
        upright[:, : int(rng.integers(3, 6))] = 1
        upright[: int(rng.integers(3, 6))] += 1
        side = COLOURS[np.rot90(upright)].repeat(4, 0).repeat(4, 1)
        Image.fromarray(side).save(f"photos/{i}.png", exif=tags)
        mask(upright.repeat(4, 0).repeat(4, 1), f"{i}.png")
    extract("photos", model=PATCHES, layers={"maps": "none"})
    assert probe()["miou"] >= 0.9
    for i in range(10):
        path = Path(f"masks/{i}.png")
        turned = np.rot90(np.array(Image.open(path)))
        mask(turned, f"{i}.png", "turned")
    with pytest.raises(DataError, match="and the upright image of 44 x 32"):
        probe(masks="turned")
