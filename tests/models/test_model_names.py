"""Names of models are known without importing the libraries; errors say what to type instead."""

from __future__ import annotations

import functools
import json
from pathlib import Path

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
from featx.models.catalogue import known_names
from featx.models.libraries import ModelLibrary

SCRIPTS = Path(__file__).parents[2] / "scripts"


def said_of(name: str, library: str = "auto") -> str:
    """The message about an unknown model."""
    with pytest.raises(ModelError) as raised:
        resolve_library(model_options(name=name, library=library))
    return str(raised.value)


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


def test_another_version_of_a_library_lists_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: "99.0")
    names = known_names("timm", lambda: ["brand_new_net"])
    assert names == read_catalogue().left_out["timm"] | {"brand_new_net"}


def test_a_name_of_the_file_imports_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    class Imported(ModelLibrary[ModelConfig]):
        def own_names(self) -> list[str]:
            raise AssertionError("the library was imported")

    monkeypatch.setattr("importlib.metadata.version", lambda package: "99.0")
    assert Imported("timm", "Models of timm.").knows("resnet18")
    with pytest.raises(AssertionError, match="was imported"):
        Imported("timm", "Models of timm.").knows("no_such_net")


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

    suggested = said_of(typed).partition("Nearest:")[2].replace(",", " ").split()
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
    suggested = said_of(word).partition("Nearest: ")[2].partition(". ")[0].split(", ")
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
    said = said_of(name, library)
    assert said.startswith(f"unknown model '{name}'")
    assert nearest in said.partition("Nearest:")[2]
    assert said.endswith("For your own module: model=custom model.factory=package.module:factory.")
    assert "job=models models.query=WORDS searches the names" in said


# What the errors say


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dinov2_vits14", "The same weights: model=vit_small_patch14_dinov2.lvd142m (timm)."),
        ("dinov2_vits14", "model=transformers model.name=facebook/dinov2-small."),
        ("dinov3_vits16", "or architecture: model=vit_small_patch16_dinov3.lvd1689m (timm)."),
        ("facebook/dinov2-base", "model=transformers model.name=facebook/dinov2-base."),
        ("facebook/dinov2-base", "architecture: model=vit_base_patch14_dinov2.lvd142m (timm)."),
        ("ViT-B/32", "or model=open_clip model.name=ViT-B-32 model.weights=openai (open_clip)."),
        ("clip-vit-base-patch32", "model=transformers model.name=openai/clip-vit-base-patch32."),
        ("openai/clip-vit-base-patch32", "model=vit_base_patch32_clip_quickgelu_224.openai (timm)"),
        ("ViT-H-14", "model=open_clip model.name=ViT-H-14 model.weights=laion2b_s32b_b79k"),
        ("microsoft/resnet-50", "architecture: model=resnet50 (torchvision)."),
        (
            "resnet-50",
            "model=resnet50 (torchvision) or model=resnet50.a1_in1k (timm).",
        ),
        ("ResNet50", "model=resnet50 (torchvision)"),
        ("vit_base_patch14_dinov2-lvd142m", "model=vit_base_patch14_dinov2.lvd142m (timm)."),
        ("laion/CLIP-ViT-B-32-laion2B-s34B-b79K", "model.weights=laion2b_s34b_b79k"),
        ("timm/resnet50.a1_in1k", "The same weights: model=resnet50.a1_in1k (timm)."),
        ("torchvision/resnet50", "architecture: model=resnet50 (torchvision)."),
        ("owner/model", "model=transformers model.name=owner/model if it is a model for transfo"),
        ("/no/such/folder", "There is no such file or folder."),
        ("best.pth", "There is no such file or folder."),
    ],
)
def test_the_message_says_what_to_type(name: str, said: str) -> None:
    assert said in said_of(name)


@pytest.mark.parametrize(
    ("name", "library", "said"),
    [
        (
            "vit_tiny_patch16_224",
            "torchvision",
            "model=vit_tiny_patch16_224.augreg_in21k_ft_in1k",
        ),
        ("resnet50.a1_in1k", "torchvision", "model=resnet50.a1_in1k (timm)."),
        ("maxvit_t", "timm", "model=maxvit_t (torchvision)."),
        ("ResNet18", "torchvision", "model=resnet18 (torchvision)"),
    ],
)
def test_a_name_of_another_library(name: str, library: str, said: str) -> None:
    assert said in said_of(name, library)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"library": "transformers", "name": "dinov2_vits14"}, "facebook/dinov2-small."),
        ({"library": "transformers", "name": "dinov2_vits14"}, "model=vit_small_patch14_dinov2.lv"),
        ({"library": "transformers", "name": "resnet50"}, "model=resnet50 (torchvision)"),
        ({"library": "transformers", "name": "ResNet-50"}, "model=resnet50 (torchvision)"),
        ({"library": "open_clip", "name": "dinov2_vits14"}, "model=vit_small_patch14_dinov2.lvd1"),
        ({"library": "hub", "name": "dinov2_vits14", "factory": "x"}, "model=vit_small_patch14_di"),
        (
            {"library": "hub", "name": "ViT-B/32", "factory": "x"},
            "model=open_clip model.name=ViT-B-",
        ),
    ],
)
def test_a_library_that_takes_any_name_says_who_has_it(options: dict[str, str], said: str) -> None:
    """model=transformers, open_clip and hub find out that they lack a model as they open it."""
    with pytest.raises(FeatxError) as raised:
        build_backbone(model_options(**options), 0)
    assert said in str(raised.value)


def test_the_name_of_a_family_leads_to_transformers() -> None:
    assert "siglip is a family of transformers: model=transformers model.name=" in said_of("siglip")
    assert "family" not in said_of("siglipp")


@pytest.mark.parametrize("name", ["a" * 5000, "~no_such_user/dinov2", "$x", "%", "-"])
def test_odd_names_are_unknown_models_too(name: str) -> None:
    assert said_of(name).startswith("unknown model ")


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", {"model_type": "dinov2"}, "model=transformers model.name=FOLDER."),
        ("config.json", {"architecture": "resnet18"}, "model=timm model.name=local-dir:FOLDER."),
        ("open_clip_config.json", {}, "model=open_clip model.name=FOLDER."),
        ("other.json", {}, "It is a folder without the config.json of a model."),
    ],
)
def test_a_folder_gets_the_library_of_what_it_holds(
    file: str, content: dict[str, str], said: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    assert said.replace("FOLDER", str(tmp_path)) in said_of(str(tmp_path))


def test_a_file_of_weights_is_an_option_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.pth"
    file.write_bytes(b"")
    assert f"model=NAME model.weights={file}" in said_of(str(file))


ROWS = [row.split("\t") for row in (SCRIPTS / "known_models.tsv").read_text().splitlines()[1:]]
"""Rows of the table of which scripts/model_catalogue makes the column `also`."""


def test_the_catalogue_has_the_names_of_other_programs() -> None:
    also = {name for entry in read_catalogue().entries for name in entry.also}
    expected = {row[0] if row[6] else f"~{row[0]}" for row in ROWS if row[0]}
    assert also == expected | {f"~{row[2]}" for row in ROWS if row[2]}


def test_no_name_of_another_program_is_a_name_of_a_library() -> None:
    """Otherwise featx would never get to the message."""
    names = {*LIBRARIES.get("timm").names(), *LIBRARIES.get("torchvision").names()}
    every = [name for row in ROWS for name in (row[0], row[2]) if name]
    assert len(every) == len(set(every)) > 100
    assert not names.intersection(every, (name.partition("/")[2] for name in every))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0] or row[2])
def test_every_suggestion_exists_and_the_same_weights_are_the_same(row: list[str]) -> None:
    """timm's and open_clip's own tables name the file of the authors, or its copy on the hub."""
    import open_clip
    import timm
    from torchvision.models import list_models

    _, _, _, clip, of_timm, torchvision, evidence = row
    assert clip or of_timm or torchvision
    if torchvision:
        assert torchvision in list_models()
        assert not evidence
    if clip:
        assert open_clip.get_pretrained_cfg(*clip.split())["url"].endswith(f"/{evidence}")
    if of_timm:
        assert of_timm in _timm_weights()
        assert resolve_library(model_options(name=of_timm)).name == "timm"
        cfg = timm.get_pretrained_cfg(of_timm)
        if evidence and not cfg.url:
            # open_clip names the authors' file and this repository for one set of weights.
            tags = [open_clip.get_pretrained_cfg(*each) for each in open_clip.list_pretrained()]
            copies = {tag["hf_hub"].strip("/") for tag in tags if evidence in tag["url"]}
            assert copies == {cfg.hf_hub_id}
            assert "quickgelu" in of_timm, "timm's note asks for it"
        else:
            assert cfg.url.endswith(f"/{evidence}") or not evidence


@functools.cache
def _timm_weights() -> set[str]:
    import timm

    return set(timm.list_pretrained())
