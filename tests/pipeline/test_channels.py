"""Images of any numbers and channels through whole runs, against plain PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import timm
import torch
from conftest import slow_except
from PIL import Image
from torch import nn
from torchvision.transforms import functional as TF

import featx
from featx.errors import ConfigError, DataError, ModelError, StoreMismatchError

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.patches = nn.Linear(channels * 8 * 8, 8)
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        # Convolutions give other last bits in channels-last memory, which featx may choose.
        x = torch.nn.functional.unfold(x.contiguous(), 8, stride=8).transpose(1, 2)
        return self.fc(torch.relu(self.patches(x)).mean(1))

def make(channels=5):
    return Net(channels)
"""
MEAN, STD = [0.1, 0.2, 0.3, 0.4, 0.5], [0.5, 0.6, 0.7, 0.8, 0.9]
FIVE = {"scale": 10000, "mean": MEAN, "std": STD, "resize": 40, "crop": 32}
EXACT = {"precision": "fp32", "dtype": "float32", "batch_size": 1, "fold_batchnorm": False}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bands_net.py").write_text(CODE)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("bands_net", None)


def custom(transform: dict[str, Any], **args: Any) -> dict[str, Any]:
    return {
        "library": "custom",
        "name": "custom",
        "factory": "bands_net:make",
        "args": args,
        "transform": transform,
    }


def extracted(data: Any, out: str, model: dict[str, Any], **more: Any) -> featx.FeatureStore:
    return featx.extract(data=data, model=model, layers=["fc"], out=out, **{**EXACT, **more})


def plain(images: list[npt.NDArray[Any]], divisor: float = 10000) -> npt.NDArray[np.float32]:
    """Rows by plain PyTorch: images (H, W, C) in their order."""
    import bands_net

    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    module: nn.Module = bands_net.make(images[0].shape[2]).eval()
    torch.random.set_rng_state(state)
    rows = []
    for image in images:
        x = torch.from_numpy(image.astype(np.float32)).permute(2, 0, 1) / divisor
        x = TF.center_crop(TF.resize(x, [40], antialias=True), [32, 32])
        num = image.shape[2]
        with torch.no_grad():
            rows.append(module(TF.normalize(x, MEAN[:num], STD[:num])[None])[0])
    return torch.stack(rows).numpy()


def five_bands(num: int) -> list[npt.NDArray[np.uint16]]:
    rng = np.random.default_rng(0)
    sizes = [(50 + 3 * i, 70 - 2 * i) for i in range(num)]
    return [rng.integers(0, 10001, (*size, 5), dtype=np.uint16) for size in sizes]


def npy_folder(folder: Path, images: list[npt.NDArray[Any]]) -> dict[str, Any]:
    folder.mkdir()
    for i, image in enumerate(images):
        np.save(folder / f"{i}.npy", image if i % 2 else image.transpose(2, 0, 1))
    return {"name": "folder", "root": str(folder), "extensions": ["npy"]}


def test_five_channels_are_plain_pytorch_bit_for_bit(here: Path) -> None:
    images = five_bands(6)
    data = npy_folder(here / "images", images)
    store = extracted(data, "folder", custom(FIVE))
    expected = plain(images)
    np.testing.assert_array_equal(store["fc"][:], expected)
    assert "float32 pixels of 5 channels divided by 10000" in store.attrs["transform"]
    in_memory = extracted([*images], "memory", custom(FIVE))
    np.testing.assert_array_equal(in_memory["fc"][:], expected)
    found = featx.embed(images[:2], store="folder", model_factory="bands_net:make")
    np.testing.assert_array_equal(found["fc"], expected[:2])
    with h5py.File("x.h5", "w") as file:
        file["images"] = np.stack([image[:40, :40] for image in images])
    of_file = {"name": "hdf5", "root": "x.h5", "dataset": "images"}
    rows = extracted(of_file, "hdf5", custom(FIVE))["fc"][:]
    np.testing.assert_array_equal(rows, plain([image[:40, :40] for image in images]))


def test_bands_for_a_model_of_rgb(here: Path) -> None:
    images = five_bands(4)
    data = npy_folder(here / "images", images)
    transform = {**FIVE, "mean": MEAN[:3], "std": STD[:3], "channels": 5, "bands": [3, 0, 0]}
    store = extracted(data, "run", custom(transform, channels=3))
    np.testing.assert_array_equal(
        store["fc"][:], plain([image[..., [3, 0, 0]] for image in images])
    )


@pytest.mark.parametrize("kind", slow_except(["png", "tif"], "png"))
def test_low_bits_of_grey_images_count(here: Path, kind: str) -> None:
    images = [np.full((40, 40), 1000 * 256, np.uint32).astype(np.uint16) for _ in range(3)]
    images[1] += 1
    images[2][5, 5] += 3
    folder = here / "images"
    folder.mkdir()
    for i, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{i}.{kind}")
    transform = {**FIVE, "mean": MEAN[:1], "std": STD[:1], "scale": 65535}
    store = extracted(str(folder), "run", custom(transform, channels=1))
    rows = store["fc"][:]
    assert len({row.tobytes() for row in rows}) == 3
    np.testing.assert_array_equal(rows, plain([image[..., None] for image in images], 65535))
    dtype = extracted(str(folder), "dtype", custom({**transform, "scale": "dtype"}, channels=1))
    np.testing.assert_array_equal(dtype["fc"][:], rows)


def test_pixels_that_are_not_finite_are_failed_rows(here: Path) -> None:
    images = [image.astype(np.float32) for image in five_bands(5)]
    images[1][3, 4, 2], images[3][0, 0, 0] = np.nan, np.inf
    data = npy_folder(here / "images", images)
    np.save(here / "images" / "5.npy", np.zeros((40, 40, 4)))
    store = extracted(data, "run", custom(FIVE), max_failures=3)
    assert store.ok.tolist() == [True, False, True, False, True, False]
    np.testing.assert_array_equal(store["fc"][:][store.ok], plain([*images[::2]]))
    text = (here / "run" / "failures.csv").read_text()
    assert text.count("NaN or infinite") == 2
    assert "shape (40, 40, 4); expected (H, W, 5)" in text


@pytest.mark.slow
def test_a_resume_with_another_scale_is_refused(here: Path) -> None:
    data = npy_folder(here / "images", five_bands(3))
    extracted(data, "run", custom(FIVE))
    for change in ({"scale": 10001}, {"channels": 5, "bands": [1, 0, 2, 3, 4]}):
        with pytest.raises(StoreMismatchError, match="transform"):
            extracted(data, "run", custom({**FIVE, **change}))


@pytest.mark.slow
def test_a_model_and_images_of_other_channels_are_an_error_at_the_start(here: Path) -> None:
    data = npy_folder(here / "images", five_bands(3))
    three = {**FIVE, "mean": MEAN[:3], "std": STD[:3]}
    with pytest.raises(DataError, match=r"none of 3 images.*expected \(H, W, 3\)"):
        extracted(data, "run", custom(three, channels=3))
    with pytest.raises(DataError, match=r"none of 3 images.*model\.transform\.scale states it"):
        extracted(data, "run", custom({}, channels=3))
    with pytest.raises(ModelError, match=r"\(2, 5, 32, 32\).*RuntimeError"):
        extracted(data, "run", custom(FIVE, channels=3))
    rgb = here / "rgb"
    rgb.mkdir()
    Image.new("RGB", (50, 50)).save(rgb / "x.png")
    with pytest.raises(DataError, match=r"none of 1 image .*3 channels; expected 5"):
        extracted(str(rgb), "run", custom(FIVE))
    with pytest.raises(ModelError, match=r"\(2, 3, 224, 224\).*RuntimeError"):
        extracted(str(rgb), "run", custom({}))
    assert not (here / "run").exists()


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        ({"mean": MEAN}, r"three numbers.*need model\.transform\.scale"),
        ({"scale": 0}, "number above 0"),
        ({"scale": "auto"}, "number above 0.*dtype"),
        ({"scale": True}, "number above 0"),
        ({"scale": 1e-320}, "number above 0.*1e-37 to 1e.38"),
        ({"channels": 5}, "no effect without model.transform.scale"),
        ({"scale": 1, "bands": [0]}, r"needs model\.transform\.channels"),
        ({"scale": 1, "bands": [5], "channels": 5}, "numbers from 0 to 4"),
        (
            {"scale": 1, "bands": [], "channels": 5},
            "bands is empty: expected a list",
        ),
        ({"scale": 1, "channels": 0}, "at least 1"),
        ({"scale": 1, "interpolation": "nearest"}, "bilinear or bicubic"),
        ({"scale": 1, "channels": 5}, r"mean has 3 numbers .* 5 channels.*mean=\[0\.5,0\.5,0\.5,"),
        ({"scale": 1, "mean": MEAN}, r"std has 3 numbers"),
    ],
)
def test_what_the_options_refuse(here: Path, transform: dict[str, Any], message: str) -> None:
    data = npy_folder(here / "images", five_bands(1))
    with pytest.raises(ConfigError, match=message):
        extracted(data, "run", custom(transform))


@pytest.mark.slow
def test_timm_with_other_channels(here: Path) -> None:
    images = five_bands(4)
    data = npy_folder(here / "images", images)
    transform = {"scale": 10000, "mean": MEAN, "std": STD}
    model = {
        "library": "timm",
        "name": "test_resnet",
        "weights": None,
        "args": {"in_chans": 5},
        "transform": transform,
    }
    layers = ["embedding"]
    store = featx.extract(data=data, model=model, layers=layers, out="run", **EXACT)
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    module = timm.create_model("test_resnet", in_chans=5).eval()
    torch.random.set_rng_state(state)
    with torch.no_grad():
        for image, row in zip(images, store["embedding"][:], strict=True):
            x = torch.from_numpy(image.astype(np.float32)).permute(2, 0, 1) / 10000
            x = TF.resize(x, [int(160 / 0.95)], TF.InterpolationMode.BILINEAR, antialias=True)
            x = TF.normalize(TF.center_crop(x, [160, 160]), MEAN, STD)
            expected = module.forward_head(module.forward_features(x[None]), pre_logits=True)[0]
            np.testing.assert_allclose(row, expected.numpy(), rtol=1e-5, atol=1e-6)
    model["transform"] = {**transform, "mean": MEAN[:3]}
    with pytest.raises(ConfigError, match=r"in_chans=5.*mean=\[0\.5,0\.5,0\.5,0\.5,0\.5\]"):
        featx.extract(data=data, model=model, layers=layers, out="other")


def test_boxes_of_five_channels_are_those_of_cut_images(here: Path) -> None:
    image = five_bands(1)[0]
    data = npy_folder(here / "images", [image])
    boxes = [(0, 0, 45, 50), (13, 5, 42, 41)]
    lines = [f"0.npy,{x},{y},{w},{h}" for x, y, w, h in boxes]
    Path("boxes.csv").write_text("path,x,y,width,height\n" + "\n".join(lines))
    store = extracted({**data, "boxes": "boxes.csv"}, "run", custom(FIVE))
    cut = [image[y : y + h, x : x + w] for x, y, w, h in boxes]
    np.testing.assert_array_equal(store["fc"][:], plain(cut))
