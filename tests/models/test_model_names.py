"""Model names are known without importing the libraries, and are the libraries' own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from featx.config import ModelConfig
from featx.errors import ModelError
from featx.models import registered_names, resolve_library


def test_torchvision_names_are_those_it_registers() -> None:
    from torchvision.models import list_models

    assert registered_names("torchvision") == set(list_models())


def test_timm_names_are_those_it_registers() -> None:
    """The deprecated ones too, which `timm.list_models` hides and `create_model` takes."""
    from timm.models import _registry

    known = set(_registry._model_entrypoints) | set(_registry._deprecated_models)
    assert registered_names("timm") == known


def test_a_library_that_is_not_installed_has_no_names() -> None:
    assert registered_names("no_such_library_anywhere") == frozenset()


@pytest.mark.parametrize(
    ("name", "library", "expected"),
    [
        ("efficientnet_lite0", "auto", "packaged"),
        ("efficientnet_lite0", "timm", "timm"),
        ("resnet50", "auto", "torchvision"),
        ("resnet50", "timm", "timm"),
        ("vit_tiny_patch16_224", "auto", "timm"),
        ("vit_small_patch14_dinov2.lvd142m", "auto", "timm"),
        ("resnet50.a1_in1k", "auto", "timm"),
        ("hf-hub:owner/model", "timm", "timm"),
    ],
)
def test_who_knows_a_name(name: str, library: str, expected: str) -> None:
    assert resolve_library(ModelConfig(name=name, library=library)) == expected


def test_custom_needs_no_name() -> None:
    config = ModelConfig(name="anything", library="custom", factory="a:b")
    assert resolve_library(config) == "custom"


@pytest.mark.parametrize(
    ("name", "library", "nearest"),
    [
        ("resnet51", "auto", "resnet50"),
        ("mobilnet_v2", "auto", "mobilenet_v2"),
        ("vit_tiny_patch16_225", "timm", "vit_tiny_patch16_224"),
        ("ResNet18", "torchvision", "resnet18"),
    ],
)
def test_an_unknown_name_lists_the_nearest(name: str, library: str, nearest: str) -> None:
    with pytest.raises(ModelError, match=f"unknown model '{name}'.*Nearest:.*{nearest}"):
        resolve_library(ModelConfig(name=name, library=library))


def test_a_name_of_another_library_is_unknown_to_this_one() -> None:
    with pytest.raises(ModelError, match=r"'vit_tiny_patch16_224' \(looked in torchvision\)"):
        resolve_library(ModelConfig(name="vit_tiny_patch16_224", library="torchvision"))


def test_an_unknown_name_is_told_without_importing_torch() -> None:
    program = (
        "import sys\n"
        "from featx.config.run_config import ModelConfig\n"
        "from featx.errors import ModelError\n"
        "from featx.models import resolve_library\n"
        "try:\n"
        "    resolve_library(ModelConfig(name='resnet51'))\n"
        "except ModelError:\n"
        "    print(sorted({'torch', 'torchvision', 'timm'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n", done.stderr
