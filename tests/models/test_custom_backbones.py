"""The user's own module, from a file in the current folder; and the real CIFAR-10 ResNet-20."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_image
from safetensors.torch import save_file
from torchvision.transforms import v2

import featx
from featx.config import TransformConfig, model_options
from featx.errors import ModelError, WeightsError
from featx.images import check_reference
from featx.models import Backbone, build_backbone

TINY = """
import torch
from torch import nn

class Tiny(nn.Module):
    num_prefix_tokens = 2

    def __init__(self, width=4, bias=True):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, bias=bias)
        self.fc = nn.Linear(width, 2)

    def forward(self, x):
        return self.fc(self.conv(x).mean((2, 3)))

def make(**args):
    return Tiny(**args)

def make_nothing():
    return {"not": "a module"}

number = 3
"""

RESNET20 = '''
"""K. He et al., Deep Residual Learning for Image Recognition, CVPR 2016, section 4.2: option A."""
import torch
import torch.nn.functional as F
from torch import nn


class BasicBlock(nn.Module):
    def __init__(self, inside, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.stride, self.pad = stride, (width - inside) // 2

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.stride != 1:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))
        out += x
        return F.relu(out)


class ResNet20(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self.stage(16, 16, 1)
        self.layer2 = self.stage(16, 32, 2)
        self.layer3 = self.stage(32, 64, 2)
        self.linear = nn.Linear(64, 10)

    def stage(self, inside, width, stride):
        first = BasicBlock(inside, width, stride)
        return nn.Sequential(first, *[BasicBlock(width, width, 1) for _ in range(2)])

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder with two modules in it; sys.path is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    before = set(sys.modules)
    (tmp_path / "my_tiny_net.py").write_text(TINY)
    (tmp_path / "my_resnet20.py").write_text(RESNET20)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


def build(factory: str, weights: str | None = "default", seed: int = 0, **keys: Any) -> Backbone:
    return build_backbone(
        model_options(library="custom", factory=factory, weights=weights, **keys), seed
    )


def test_a_factory_in_the_current_folder_with_arguments(here: Path) -> None:
    backbone = build("my_tiny_net:make", args={"width": 7, "bias": False})
    assert backbone.module.conv.weight.shape == (7, 3, 3, 3)
    assert backbone.module.conv.bias is None
    assert backbone.name == "custom/my_tiny_net:make"
    assert backbone.weights == "as the factory made them"
    assert backbone.num_prefix_tokens == 2
    assert not any(m.training for m in backbone.module.modules())
    assert not any(p.requires_grad for p in backbone.module.parameters())
    check_reference(backbone.preprocess)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("my_tiny_net", "expected package.module:factory"),
        ("my_tiny_net:", "expected package.module:factory"),
        (":make", "expected package.module:factory"),
        ("my_tiny_net.py:make", "such as my_model:make for the function make of my_model.py"),
        ("my_tiny_nett:make", "No module named 'my_tiny_nett'.*PYTHONPATH"),
        ("my_tiny_net.deeper:make", "No module named 'my_tiny_net.deeper'"),
        (".my_tiny_net:make", "model.factory=.my_tiny_net:make"),
        ("my_tiny_net:maek", "no callable 'maek'.*Nearest: make"),
        ("my_tiny_net:number", "no callable 'number'"),
        ("my_tiny_net:make_nothing", "returned a dict, expected a torch.nn.Module"),
    ],
)
def test_wrong_factories(here: Path, factory: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(factory)


def test_threads_that_build_at_once_get_the_weights_of_their_seed(here: Path) -> None:
    (here / "my_slow_net.py").write_text(
        "import time\nimport torch\nfrom torch import nn\n\n"
        "def make():\n"
        "    made = []\n"
        "    for _ in range(3):\n"
        "        made.append(nn.Linear(3, 2))\n"
        "        time.sleep(0.02)\n"
        "    return nn.Sequential(*made)\n"
    )

    def digest(seed: int) -> str:
        return build("my_slow_net:make", seed=seed).weights_sha256

    state = torch.random.get_rng_state()
    alone = [digest(seed) for seed in (0, 1, 2)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(digest, (0, 1, 2))) == alone
    assert torch.equal(torch.random.get_rng_state(), state)


def test_wrong_arguments_name_the_target(here: Path) -> None:
    with pytest.raises(ModelError, match=r"my_tiny_net:make cannot be called.*unexpected keyword"):
        build("my_tiny_net:make", args={"depth": 3})


def test_a_module_that_does_not_compile_is_told_as_such(here: Path) -> None:
    (here / "my_broken.py").write_text("def make(:\n")
    with pytest.raises(ModelError, match=r"model\.factory=my_broken:make.*invalid syntax"):
        build("my_broken:make")


def test_weights_from_a_file(here: Path) -> None:
    state = {k: v + 1 for k, v in build("my_tiny_net:make").module.state_dict().items()}
    save_file(state, here / "w.safetensors")
    backbone = build("my_tiny_net:make", "w.safetensors")
    assert torch.equal(backbone.module.fc.weight, state["fc.weight"])
    assert backbone.weights == "w.safetensors"
    with pytest.raises(WeightsError, match="download the file and give its path"):
        build("my_tiny_net:make", "https://example.org/w.pth")
    with pytest.raises(WeightsError, match="no such file"):
        build("my_tiny_net:make", "IMAGENET1K_V1")


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_the_stated_transform_is_torchvisions(here: Path, interpolation: str) -> None:
    stated = TransformConfig(40, 32, [0.1, 0.2, 0.3], [0.4, 0.5, 0.6], interpolation)
    preprocess = build("my_tiny_net:make", transform=stated).preprocess
    expected = v2.Compose(
        [
            v2.Resize(40, v2.InterpolationMode(interpolation), antialias=True),
            v2.CenterCrop(32),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.1, 0.2, 0.3], [0.4, 0.5, 0.6]),
        ]
    )
    image = make_image(77, 61)
    torch.testing.assert_close(preprocess.reference(image), expected(image))
    assert preprocess.has_fast_path is (interpolation != "nearest")


def test_resnet20_keeps_its_accuracy_on_cifar10(here: Path, shared_data: Path) -> None:
    """SOURCE.txt: top-1 on these 500 JPEGs is 79.8 %, with the weights' own normalisation."""
    root = shared_data / "cifar10-resnet20"
    store = featx.extract(
        model={
            "library": "custom",
            "name": "resnet20",
            "factory": "my_resnet20:ResNet20",
            "weights": str(root / "resnet20-12fca82f.th"),
            "transform": {"resize": 32, "crop": 32},
        },
        layers=["linear"],
        data=str(root / "images"),
        out=str(here / "run"),
        decode="reference",
        precision="fp32",
        dtype="float32",
        batch_size=64,
    )
    logits, labels = store.xy("linear")
    assert logits.shape == (500, 10)
    assert store.classes == tuple(sorted(store.classes))
    assert float(np.mean(logits.argmax(1) == labels)) == pytest.approx(0.798, abs=0.005)
