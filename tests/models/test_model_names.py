"""Model names are known without importing the libraries, and are the libraries' own."""

from __future__ import annotations

import pytest

from featx.config import (
    ModelConfig,
    from_composed,
    from_keywords,
    model_choice,
    model_options,
)
from featx.errors import ConfigError, FeatxError, ModelError
from featx.models import LIBRARIES, build_backbone, read_catalogue, resolve_library
from featx.models.catalogue import is_known, known_names


def test_torchvision_names_are_those_it_registers() -> None:
    from torchvision.models import list_models

    assert LIBRARIES.get("torchvision").names() == set(list_models())


def test_timm_names_are_those_it_registers() -> None:
    """The deprecated ones too, which `timm.list_models` hides and `create_model` takes."""
    from timm.models import _registry

    known = set(_registry._model_entrypoints) | set(_registry._deprecated_models)
    assert LIBRARIES.get("timm").names() == known


def test_a_library_that_is_not_installed_has_no_names() -> None:
    assert known_names("no_such_library_anywhere", lambda: ["net"]) == frozenset()
    assert not is_known("no_such_library_anywhere", "resnet18", lambda: ["resnet18"])


def test_another_version_of_a_library_lists_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: "99.0")
    names = known_names("timm", lambda: ["brand_new_net"])
    assert names == read_catalogue().left_out["timm"] | {"brand_new_net"}
    assert is_known("timm", "brand_new_net", lambda: ["brand_new_net"])
    assert not is_known("timm", "no_such_net", list)


def test_a_name_of_the_file_imports_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: "99.0")

    def fail() -> list[str]:
        raise AssertionError("the library was imported")

    assert is_known("timm", "resnet18", fail)


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
        ("hf-hub:owner/model", "auto", "timm"),
    ],
)
def test_who_knows_a_name(name: str, library: str, expected: str) -> None:
    assert resolve_library(model_options(name=name, library=library)).name == expected


def test_a_deprecated_name_of_timm_is_answered_with_what_it_became(
    capsys: pytest.CaptureFixture[str],
) -> None:
    old, present = "vit_tiny_patch16_224_in21k", "vit_tiny_patch16_224.augreg_in21k"
    backbone = build_backbone(model_options(name=old, library="timm", weights=None), 0)
    message = f"warning: model.name={old} is a deprecated name of timm, which loads {present}"
    assert message in capsys.readouterr().err
    assert backbone.name.endswith(present)
    build_backbone(model_options(name=present, library="timm", weights=None), 0)
    assert "deprecated" not in capsys.readouterr().err


@pytest.mark.parametrize("typed", ["dino", "resmlp_12_224_din", "vit_tiny_patch16_224_in21"])
def test_a_deprecated_name_of_timm_is_never_suggested(typed: str) -> None:
    from timm.models._registry import _deprecated_models

    with pytest.raises(FeatxError) as caught:
        resolve_library(model_options(name=typed))
    suggested = str(caught.value).partition("Nearest:")[2].replace(",", " ").split()
    assert suggested
    assert not {name.strip(".") for name in suggested} & set(_deprecated_models)


@pytest.mark.parametrize(
    ("word", "first"),
    [
        ("dino", "vit_small_patch14_dinov2.lvd142m"),
        ("DINOv3", "vit_small_patch16_dinov3.lvd1689m"),
        ("siglip", "vit_base_patch16_siglip_224.webli"),
        ("clip", "vit_base_patch16_clip_quickgelu_224.openai"),
        ("resnet", "resnet18"),
    ],
)
def test_the_name_of_a_family_is_answered_with_the_recommended_models_of_it(
    word: str, first: str
) -> None:
    with pytest.raises(FeatxError) as caught:
        resolve_library(model_options(name=word))
    suggested = str(caught.value).partition("Nearest: ")[2].partition(". ")[0].split(", ")
    assert suggested[0] == first
    for name in suggested:
        resolve_library(model_options(name=name))


def test_the_word_dino_names_models_of_the_first_dino_too() -> None:
    with pytest.raises(FeatxError, match=r"Nearest: .*vit_small_patch8_224\.dino[,.]"):
        resolve_library(model_options(name="dino"))


def test_the_option_model_takes_a_model_or_a_library() -> None:
    assert model_choice("resnet50") == {"name": "resnet50"}
    assert model_choice("packaged") == {"name": "efficientnet_lite0", "library": "packaged"}
    assert model_choice("auto") == {"name": "auto"}, "auto is no library that one could mean"
    config = from_composed(from_keywords({"model": "resnet50"}))
    assert (config.model.name, resolve_library(config.model).name) == ("resnet50", "torchvision")
    with pytest.raises(ConfigError, match=r"model=timm needs model\.name=NAME"):
        from_composed(from_keywords({"model": "timm"}))
    with pytest.raises(ConfigError, match=r"model\.library=tim: expected one of .* Nearest: timm"):
        model_options(library="tim")
    with pytest.raises(ConfigError, match=r"unknown key .*wieghts.* Nearest: model\.weights"):
        model_options(wieghts=None)


def test_a_library_refuses_the_options_of_another_one() -> None:
    with pytest.raises(FeatxError, match=r"model_options makes the options of a library"):
        build_backbone(ModelConfig(name="resnet18", library="timm"), 0)


@pytest.mark.parametrize(
    ("name", "library", "nearest"),
    [
        ("resnet51", "auto", "resnet50"),
        ("mobilnet_v2", "auto", "mobilenet_v2"),
        ("vit_tiny_patch16_225", "timm", "vit_tiny_patch16_224"),
    ],
)
def test_an_unknown_name_lists_the_nearest(name: str, library: str, nearest: str) -> None:
    with pytest.raises(ModelError, match=f"unknown model '{name}'.*Nearest:.*{nearest}"):
        resolve_library(model_options(name=name, library=library))
