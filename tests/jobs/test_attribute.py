"""job=attribute as a user runs it: stores, resume, failures, joining, verify, and images."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_model import KEYS, run_job, write_image
from zoo import TwoStageConvNet

import featx
from featx.errors import ConfigError, DataError, LayerError, StoreMismatchError
from featx.jobs.attribute import ContactSheets
from featx.models import state_sha256
from featx.types import Status

ALL = ["saliency", "input_x_gradient", "integrated_gradients", "gradcam", "occlusion"]
OPTIONS = {"method": "gradcam", "per_class": 2}
RUN: dict[str, Any] = {**KEYS, "layers": "deep", "dtype": "float32", "part_rows": 32}

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def run(data: Path, out: str = "store", **keys: Any) -> int:
    options = {**OPTIONS, **keys.pop("attribute", {})}
    return run_job("attribute", **{**RUN, "data": data, "out": out, "attribute": options, **keys})


def plain_model() -> TwoStageConvNet:
    torch.manual_seed(0)
    return TwoStageConvNet().eval()


def input_of(path: Path) -> torch.Tensor:
    """(1, 3, 32, 32) of an image, resized by Pillow."""
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB").resize((32, 32), Image.Resampling.BILINEAR))
    x = torch.from_numpy(pixels.astype(np.float32) / 255).permute(2, 0, 1)[None]
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (x - mean.view(3, 1, 1)) / std.view(3, 1, 1)


def by_hand(store: featx.FeatureStore, data: Path, row: int) -> tuple[np.ndarray, int, float]:
    """Grad-CAM of `deep`, the class and its probability, from the image of a row."""
    net = plain_model()
    assert store.attrs["weights_sha256"] == state_sha256(net)
    act = net.deep(net.conv(input_of(data / str(store.keys[row]))))
    output = net.head(act.mean((2, 3)))
    gradient = torch.autograd.grad(output[0].max(), act)[0].mean((2, 3))
    cam = torch.einsum("bc,bchw->bhw", gradient, act).relu()[0]
    return cam.detach().numpy(), int(output.argmax()), float(output.detach().softmax(1).max())


def test_every_row_explains_its_own_image(photos: Path) -> None:
    write_image(photos / "cat" / "bad.png", 1)
    (photos / "cat" / "bad.png").write_bytes(b"no image")
    assert run(photos, max_failures=1) == 0
    store = featx.open("store")
    assert store.complete
    assert sorted(store.layers) == ["gradcam", "probability", "score", "target"]
    assert store["gradcam"].shape == (22, 4, 4)
    assert store["target"].shape == (22,)
    assert store["gradcam"].attrs["layer"] == "deep"
    assert store["gradcam"].attrs["capture"] == "attribution (target predicted)"
    bad = store.row("cat/bad.png")
    assert store.failures[0]["status"] == Status.UNSUPPORTED.label
    assert np.isnan(store["gradcam"][bad]).all()
    assert np.isnan(store["target"][bad])
    for row in np.flatnonzero(store.ok):
        cam, number, probability = by_hand(store, photos, row)
        # decode=fast resizes to within one grey level of Pillow
        assert np.abs(store["gradcam"][row] - cam).max() <= 0.05 * max(cam.max(), 1e-3)
        assert int(store["target"][row]) == number
        assert abs(float(store["probability"][row]) - probability) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({}, {"layers": ["conv"]}, "the store has 'deep', now 'conv'"),
        ({}, {"target": 1}, "target predicted.*target 1"),
        ({"method": "integrated_gradients"}, {"steps": 5}, "steps 2.*steps 5"),
        ({"method": "integrated_gradients"}, {"baseline": "black"}, "baseline mean.*black"),
        ({"method": "occlusion"}, {"window": 16}, "window 8, stride 4.*window 16, stride 8"),
    ],
)
def test_other_settings_are_refused_with_the_difference(
    photos: Path, before: dict[str, Any], now: dict[str, Any], expected: str
) -> None:
    common = {"method": "gradcam", "per_class": 0, **before}
    layers: dict[str, Any] = {}
    if common["method"] != "gradcam":
        layers = {"layers": None}
        common |= {"steps": 2} if common["method"] == "integrated_gradients" else {"window": 8}
    keys = {key: now.pop(key) for key in ("target", "layers") if key in now}
    assert run(photos, attribute=common, **layers) == 0
    with pytest.raises(StoreMismatchError, match=expected):
        run(photos, attribute={**common, **now}, **{**layers, **keys})


@pytest.mark.slow
def test_methods_and_features_join_one_store(
    photos: Path, computed: list[tuple[frozenset[str], int]]
) -> None:
    half = {"dtype": "float16", "pack": False}
    assert run_job("extract", **{**RUN, "data": photos, "layers": ["conv"], **half}) == 0
    assert run(photos, **half) == 0
    computed.clear()
    assert run(photos, attribute={"method": ["gradcam", "saliency"]}, **half) == 0
    assert {names for names, _ in computed} == {frozenset({"saliency"})}
    store = featx.open("store")
    assert {"conv", "gradcam", "saliency", "target"} <= set(store.layers)
    assert run_job("verify", store="store", verify={"reextract_rows": 5}) == 0


@pytest.mark.slow
def test_verify_computes_rows_again_and_repairs(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"method": ALL, "steps": 2, "window": 16, "per_class": 0}
    assert run(photos, attribute=settings, pack=False, part_rows=4) == 0
    assert {*ALL, "integrated_gradients_delta"} < set(featx.open("store").layers)
    assert not Path("store/sheets").exists()
    capsys.readouterr()
    assert run_job("verify", store="store", verify={"reextract_rows": 9}) == 0
    assert "9 rows extracted again: 9 identical" in capsys.readouterr().out
    part = sorted(Path("store/parts").iterdir())[1]
    whole = part.read_bytes()
    part.write_bytes(whole[:-900] + bytes(900))
    assert run_job("verify", store="store", verify={"repair": True}) == 0
    assert part.read_bytes() == whole


def test_labels_are_classes_of_the_model_by_number_or_by_name(photos: Path) -> None:
    saliency = {"method": ["saliency"]}
    with pytest.raises(DataError, match=r"classes of the data set are cat, dog, and .* no names"):
        run(photos, target="label", attribute=saliency, layers=None)
    Path("classes.json").write_text('{"cat": 2, "dog": 0}')
    data = {"name": "folder", "root": str(photos), "classes": "classes.json"}
    keys = {"target": "label", "layers": None, "attribute": {**OPTIONS, **saliency}}
    assert run_job("attribute", **{**RUN, "data": data, "out": "store", **keys}) == 0
    store = featx.open("store")
    assert np.array_equal(store["target"][:], [2 if key[:3] == "cat" else 0 for key in store.keys])
    for key in store.keys:
        row = store.row(key)
        logits = plain_model()(input_of(photos / key))[0].detach()
        expected = float(logits[int(store["target"][row])])
        assert store["score"][row] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_folders_named_by_numbers_are_the_classes_of_these_numbers(photos: Path) -> None:
    """Folder 3 is the second of two classes."""
    folder = Path("numbered")
    for number, image in zip((1, 3), sorted((photos / "cat").iterdir()), strict=False):
        (folder / str(number)).mkdir(parents=True)
        shutil.copy(image, folder / str(number) / "a.png")
    assert run(folder, target="label", attribute={"method": ["saliency"]}, layers=None) == 0
    store = featx.open("store")
    assert store["target"][:].tolist() == [1, 3]


@pytest.mark.slow
def test_sheets_show_each_class_and_feature_maps(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"method": ALL, "steps": 2, "window": 16, "feature_map_layer": "conv"}
    assert run(photos, attribute=options) == 0
    names = ["cat.png", "dog.png", "maps-conv-cat.png", "maps-conv-dog.png"]
    assert sorted(os.listdir("store/sheets")) == names
    assert "store/sheets/cat.png" in capsys.readouterr().err
    with Image.open("store/sheets/cat.png") as sheet:
        pixels = np.asarray(sheet)
    panel, left, top = 192, 24, 96
    with Image.open(photos / "cat" / "000.png") as image:
        shown = image.convert("RGB").resize((32, 32), Image.Resampling.BILINEAR)
        shown = np.asarray(shown.resize((panel, panel), Image.Resampling.BICUBIC), np.float32)
    drawn = pixels[top : top + panel, left : left + panel].astype(np.float32)
    assert np.abs(drawn - shown).mean() < 3, "the first panel is the crop that the network saw"
    assert (pixels[-6:] == 255).all()
    assert (pixels[:, :20] == 255).all()


def test_each_class_has_a_sheet(photos: Path) -> None:
    for name, old in (("a_b", "cat"), ("a b", "dog")):
        (photos / old).rename(photos / name)
    assert run(photos) == 0
    assert sorted(os.listdir("store/sheets")) == ["a_b.png", "a_b_.png"]
    (photos / "a b").rename(photos / "c")
    Path("store/sheets/notes.txt").write_text("of the user")
    assert run(photos, overwrite=True) == 0
    assert sorted(os.listdir("store/sheets")) == ["a_b.png", "c.png", "notes.txt"]


def test_sheets_of_overwritten_maps_are_gone_before_there_are_new_ones(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    assert run(photos) == 0
    with monkeypatch.context() as patch:
        patch.setattr("featx.jobs.attribute.ContactSheets.run_finished", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(photos, target=1, overwrite=True)
    assert os.listdir("store/sheets") == []
    assert run(photos, target=1, overwrite=True) == 0
    assert sorted(os.listdir("store/sheets")) == ["cat.png", "dog.png"]


def test_a_wrong_layer_is_told_before_anything_is_written(photos: Path) -> None:
    for options in (
        {"layers": "depp"},
        {"attribute": {"feature_map_layer": "depp"}},
        {"attribute": {"feature_map_layer": "head"}},
    ):
        with pytest.raises(LayerError):
            run(photos, **options)
    refused = [
        (
            {"attribute": {"method": "saliency"}},
            "layers has an effect with attribute.method=gradcam",
        ),
        ({"layers": ["conv", "deep"]}, "job=attribute takes the name of one module"),
        ({"layers": {"deep": "avg"}}, "job=attribute takes the name of one module"),
    ]
    for keys, message in refused:
        with pytest.raises(ConfigError, match=message):
            run(photos, **keys)
    assert not Path("store").exists()


@pytest.mark.slow
def test_the_last_lines_open_what_was_made(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(photos) == 0
    printed = capsys.readouterr().out
    *lines, sheets = printed[printed.index("import featx") :].strip().splitlines()
    found: dict[str, Any] = {"featx": featx}
    for line in lines[:-2]:
        exec(line, found)
    heat_map, score = (eval(line, found) for line in lines[-2:])
    store = featx.open("store")
    assert heat_map.tobytes() == store["gradcam"][0].tobytes()
    assert heat_map.shape == (4, 4)
    assert score == store["score"][0]
    folder, _, names = sheets.removeprefix("# the sheets: ").rpartition("/")
    assert list(Path(folder).glob(names))


@pytest.mark.slow
def test_heat_maps_below_data_root_are_no_images_of_the_data_set(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    maps = str(photos / "runs/maps")
    assert run(photos, out=maps) == 0
    assert len(list(photos.rglob("*.png"))) == 21 + 2
    capsys.readouterr()
    store = featx.extract(**{**KEYS, "data": photos, "out": "second"})
    assert len(store) == 21
    assert "left out: 1 stores of featx" in capsys.readouterr().err
    assert run(photos, out=maps) == 0


def test_heat_maps_among_the_images_are_refused(photos: Path) -> None:
    with pytest.raises(ConfigError, match=r"is data\.root as well"):
        run(photos, out=str(photos))


def test_sheets_leave_out_an_image_that_is_deleted_meanwhile(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = ContactSheets.run_finished

    def delete_and_finish(sheets: ContactSheets) -> None:
        (photos / "cat" / "000.png").unlink()
        finish(sheets)

    monkeypatch.setattr(ContactSheets, "run_finished", delete_and_finish)
    assert run(photos, attribute={"method": ["gradcam"], "feature_map_layer": "conv"}) == 0
    names = ["cat.png", "dog.png", "maps-conv-cat.png", "maps-conv-dog.png"]
    assert sorted(os.listdir("store/sheets")) == names
