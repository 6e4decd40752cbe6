"""Golden files: a look-alike that loads without an error is found by features of the right code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from interruptions import files_of_at_most
from PIL import Image
from timm.data import create_transform, resolve_data_config
from tiny_model import extract

import featx
from featx.errors import ConfigError, ModelError, RunError


def photo(size: tuple[int, int], seed: int) -> Image.Image:
    """RGB image of (width, height) pixels with smooth structure and edges."""
    width, height = size
    y, x = np.mgrid[0:height, 0:width] / 17
    waves = np.stack([np.sin(x + seed), np.cos(x * y / 20), np.sin(2 * y) > 0], axis=-1)
    return Image.fromarray(np.clip(127 + 90 * waves, 0, 255).astype(np.uint8))


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for i, size in enumerate([(301, 257), (200, 180), (263, 411)]):
        photo(size, i).save(tmp_path / "photos" / f"{i}.png")
    return tmp_path / "photos"


def of_timm(name: str, weights: Path, **more: Any) -> tuple[torch.nn.Module, Callable[..., Any]]:
    """What a user's own code does: timm's model with a state dict, and timm's transform for it."""
    model = timm.create_model(name, **more).eval()
    model.load_state_dict(torch.load(weights))
    return model, create_transform(**resolve_data_config(model=model))


def saved(path: Path, name: str, **more: Any) -> Path:
    torch.manual_seed(0)
    model = timm.create_model(name, **more)
    for key, buffer in model.named_buffers():
        if key.endswith("running_mean"):
            torch.nn.init.normal_(buffer, std=0.3)
    torch.save(model.state_dict(), path)
    return path


def run(photos: Path, name: str, weights: Path, golden: str, **keys: Any) -> featx.FeatureStore:
    model = {"name": name, "library": "timm", "weights": str(weights), "golden": golden}
    return extract(photos, **{"model": model, "layers": ["embedding"], "pack": False, **keys})


def files(photos: Path) -> list[Path]:
    return sorted(photos.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("gives", ["logits", "embedding"])
def test_the_right_model_passes(
    tmp_path: Path, photos: Path, gives: str, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = saved(tmp_path / "w.pth", "test_resnet")
    model, transform = of_timm("test_resnet", weights)
    if gives == "embedding":
        model.reset_classifier(0)
    featx.write_golden("golden.npz", files(photos), model, transform)
    run(photos, "test_resnet", weights, "golden.npz")
    name = "output" if gives == "logits" else "embedding"
    assert f"{name} of model.golden within" in capsys.readouterr().err
    manifest = (tmp_path / "store" / "featx.json").read_text()
    assert '"golden"' in manifest
    Path("golden.npz").unlink()
    run(photos, "test_resnet", weights, "golden.npz")  # a resume compares nothing


@pytest.mark.slow
def test_weights_of_a_look_alike_are_refused(tmp_path: Path, photos: Path) -> None:
    """Same names and shapes, loaded strictly; padding and epsilon of BatchNorm are others."""
    right, wrong = "tf_efficientnet_lite0", "efficientnet_lite0"
    weights = saved(tmp_path / "w.pth", right)
    model, _ = of_timm(right, weights)
    _, transform = of_timm(wrong, weights)
    featx.write_golden("golden.npz", files(photos)[:1], model, transform)
    with pytest.raises(ModelError, match=r"is not the model of model\.golden=.*look-alike"):
        run(photos, wrong, weights, "golden.npz")


def test_another_transform_is_refused(tmp_path: Path, photos: Path) -> None:
    weights = saved(tmp_path / "w.pth", "test_resnet")
    model, _ = of_timm("test_resnet", weights)
    other = create_transform((3, 160, 160), interpolation="bicubic", crop_pct=0.9)
    featx.write_golden("golden.npz", files(photos), model, other)
    with pytest.raises(ModelError, match=r"is not that of model\.golden=.*pixels differ by up to"):
        run(photos, "test_resnet", weights, "golden.npz")


def test_features_that_the_model_does_not_give_are_refused(tmp_path: Path, photos: Path) -> None:
    weights = saved(tmp_path / "w.pth", "test_resnet")
    model, transform = of_timm("test_resnet", weights)
    featx.write_golden("golden.npz", files(photos), lambda x: model(x)[:, :7], transform)
    with pytest.raises(ModelError, match=r"of shape \(7,\), and .* gives output \(1000,\)"):
        run(photos, "test_resnet", weights, "golden.npz")


def test_files_that_are_none_are_refused(tmp_path: Path, photos: Path) -> None:
    weights = saved(tmp_path / "w.pth", "test_resnet")
    with pytest.raises(ConfigError, match=r"model\.golden=nowhere\.npz: no such file"):
        run(photos, "test_resnet", weights, "nowhere.npz")
    Path("other.npz").write_bytes(b"PK\x03\x04 and nothing else")
    with pytest.raises(ConfigError, match=r"is no file of featx\.write_golden"):
        run(photos, "test_resnet", weights, "other.npz")


def test_what_cannot_be_compared_is_not_written(tmp_path: Path) -> None:
    def transform(image: Image.Image) -> torch.Tensor:
        return torch.zeros(3, 8, 8)

    images = [photo((20, 20), 0)]
    with pytest.raises(ConfigError, match="returned a tuple"):
        featx.write_golden(tmp_path / "g.npz", images, lambda x: (x, x), transform)
    with pytest.raises(ConfigError, match="not finite"):
        featx.write_golden(tmp_path / "g.npz", images, lambda x: x / 0, transform)
    with pytest.raises(ConfigError, match="was given 0 images"):
        featx.write_golden(tmp_path / "g.npz", [], lambda x: x, transform)


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    def transform(image: Image.Image) -> torch.Tensor:
        return torch.zeros(3, 8, 8)

    path = tmp_path / "golden.npz"
    path.write_bytes(b"of another model")
    with files_of_at_most(1000), pytest.raises(RunError, match="Raise the limit"):
        featx.write_golden(path, [photo((200, 180), 0)], lambda x: x, transform)
    assert path.read_bytes() == b"of another model"
    assert list(tmp_path.iterdir()) == [path]


def test_the_example_of_the_documentation(tmp_path: Path, photos: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "models.md"
    examples = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    (example,) = [text for text in examples if "write_golden" in text]
    weights = saved(tmp_path / "tuned.pth", "test_resnet")
    exec(example, {})
    run(photos, "test_resnet", weights, "golden.npz")
    found = json.loads((tmp_path / "store" / "featx.json").read_text())["conformance"]
    assert found["golden"]["images"] == 2
    assert found["golden"]["compared"] == "output"


@pytest.mark.parametrize(("root", "is_frozen"), [(True, True), (False, False)])
def test_every_module_keeps_its_mode(tmp_path: Path, root: bool, is_frozen: bool) -> None:
    """As in fine-tuning with a frozen BatchNorm; also where the call fails."""
    modes = []
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.AdaptiveAvgPool2d(1)
    )
    model.train(root)
    model[1].train(not is_frozen)
    before = [part.training for part in model.modules()]
    model[1].register_forward_hook(lambda part, *args: modes.append(part.training))
    image = photo((32, 32), 0)

    def transform(image: Image.Image) -> torch.Tensor:
        return torch.zeros(3, 32, 32)

    featx.write_golden(tmp_path / "golden.npz", [image, image], model, transform)
    assert [part.training for part in model.modules()] == before
    model.append(torch.nn.Linear(9, 9))
    before.append(model[-1].training)
    with pytest.raises(RuntimeError):
        featx.write_golden(tmp_path / "golden.npz", [image], model, transform)
    assert [part.training for part in model.modules()] == before
    assert modes == [False, False]
