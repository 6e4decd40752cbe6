"""Names of other programs end in errors that say what to type, and what they say is true."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from featx.config import model_options
from featx.errors import FeatxError, ModelError
from featx.models import build_backbone, hint, registered_names, resolve_library
from featx.models.known_models import KnownModel, known_models


def said_of(name: str) -> str:
    """The message about an unknown model."""
    with pytest.raises(ModelError) as raised:
        resolve_library(model_options(name=name))
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dinov2_vits14", "timm has the same weights: model=vit_small_patch14_dinov2.lvd142m."),
        ("dinov2_vits14", "model=transformers model.name=facebook/dinov2-small."),
        ("dinov2_vitb14_reg", "the same weights: model=vit_base_patch14_reg4_dinov2.lvd142m."),
        ("dino_vits16", "the same weights: model=vit_small_patch16_224.dino."),
        ("dinov3_vits16", "same architecture: model=vit_small_patch16_dinov3.lvd1689m."),
        ("facebook/dinov2-base", "model=transformers model.name=facebook/dinov2-base."),
        (
            "facebook/dinov2-base",
            "the weights of torch.hub's dinov2_vitb14: model=vit_base_patch14_dinov2.lvd142m.",
        ),
        ("ViT-B/32", "same weights: model=open_clip model.name=ViT-B-32 model.weights=openai."),
        ("clip-vit-base-patch32", "model=transformers model.name=openai/clip-vit-base-patch32."),
        ("openai/clip-vit-base-patch32", "model=vit_base_patch32_clip_quickgelu_224.openai."),
        ("RN50x4", "model=open_clip model.name=RN50x4 model.weights=openai."),
        ("ViT-H-14", "model=open_clip model.name=ViT-H-14 model.weights=TAG, with one of the tags"),
        ("google/vit-base-patch16-224", "model=vit_base_patch16_224.orig_in21k_ft_in1k."),
        ("siglip-base-patch16-224", "architecture: model=vit_base_patch16_siglip_224.webli."),
        ("facebook/convnext-tiny-224", "torchvision has the same architecture: model=convnext_t"),
        ("microsoft/resnet-50", "torchvision has the same architecture: model=resnet50."),
        ("resnet-50", "otherwise: model=resnet50 (torchvision) or model=resnet50.a1_in1k (timm)."),
        ("ResNet50", "model=resnet50 (torchvision)"),
        ("efficientnet-b0", "model=efficientnet_b0 (torchvision)"),
        ("vit-b-16", "model=vit_b_16 (torchvision)"),
        ("convnext-tiny", "model=convnext_tiny (torchvision)"),
        ("vit_base_patch14_dinov2-lvd142m", "model=vit_base_patch14_dinov2.lvd142m (timm)."),
        ("laion/CLIP-ViT-B-32-laion2B-s34B-b79K", "model.weights=laion2b_s34b_b79k."),
        ("timm/resnet50.a1_in1k", "timm has the weights of timm/resnet50.a1_in1k: model=resnet50."),
        ("torchvision/resnet50", "torchvision has resnet50: model=resnet50."),
        ("owner/model", "model=transformers model.name=owner/model if it is a model for transfo"),
        ("/no/such/folder", "There is no such file or folder."),
    ],
)
def test_the_message_says_what_to_type(name: str, said: str) -> None:
    assert said in said_of(name)


@pytest.mark.parametrize(
    ("name", "library", "said"),
    [
        ("vit_tiny_patch16_224", "torchvision", "timm has it: model=vit_tiny_patch16_224.augreg_i"),
        ("resnet50.a1_in1k", "torchvision", "timm has it: model=resnet50.a1_in1k."),
        ("maxvit_t", "timm", "torchvision has it: model=maxvit_t."),
        ("ResNet18", "torchvision", "spelled otherwise: model=resnet18 (torchvision)"),
    ],
)
def test_a_name_of_another_library(name: str, library: str, said: str) -> None:
    with pytest.raises(ModelError) as raised:
        resolve_library(model_options(name=name, library=library))
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"library": "transformers", "name": "dinov2_vits14"}, "facebook/dinov2-small."),
        ({"library": "transformers", "name": "dinov2_vits14"}, "model=vit_small_patch14_dinov2.lv"),
        ({"library": "transformers", "name": "resnet50"}, "torchvision has it: model=resnet50."),
        ({"library": "transformers", "name": "ResNet-50"}, "otherwise: model=resnet50 (torchvis"),
        ({"library": "open_clip", "name": "dinov2_vits14"}, "model=vit_small_patch14_dinov2.lvd1"),
        ({"library": "hub", "name": "dinov2_vits14", "entry": "x"}, "model=vit_small_patch14_di"),
        ({"library": "hub", "name": "ViT-B/32", "entry": "x"}, "model=open_clip model.name=ViT-B-"),
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


@pytest.mark.parametrize("name", ["resnet51", "no_such_model_at_all"])
def test_a_name_that_nobody_knows_gets_the_nearest_and_the_search(name: str) -> None:
    assert hint(name, registered_names("timm")) == ""
    assert "job=models models.query=WORDS searches the names" in said_of(name)


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


def test_no_name_of_another_program_is_a_name_of_a_library() -> None:
    """Otherwise featx would never get to the message."""
    names = registered_names("timm") | registered_names("torchvision")
    assert [name for model in known_models() for name in model.names if name in names] == []
    every = [x for model in known_models() for x in (model.original, model.hugging_face) if x]
    assert len(every) == len(set(every)) > 100


@pytest.mark.parametrize("model", known_models(), ids=lambda known: known.names[0])
def test_every_suggestion_exists_and_the_same_weights_are_the_same(model: KnownModel) -> None:
    """timm's and open_clip's own tables name the file of the authors, or its copy on the hub."""
    import open_clip
    import timm
    from torchvision.models import list_models

    assert model.options
    for library, option in model.options:
        if library == "torchvision":
            assert option in list_models()
            assert not model.evidence
        elif library == "open_clip":
            found = re.fullmatch(r"open_clip model\.name=(\S+) model\.weights=(\S+)", option)
            assert found is not None
            cfg = open_clip.get_pretrained_cfg(*found.groups())
            assert cfg["url"].endswith(f"/{model.evidence}")
        else:
            assert library == "timm"
            assert option in _timm_weights()
            assert resolve_library(model_options(name=option)).name == "timm"
            cfg = timm.get_pretrained_cfg(option)
            if model.evidence and not cfg.url:
                # open_clip names the authors' file and this repository for one set of weights.
                tags = [open_clip.get_pretrained_cfg(*each) for each in open_clip.list_pretrained()]
                copies = {tag["hf_hub"].strip("/") for tag in tags if model.evidence in tag["url"]}
                assert copies == {cfg.hf_hub_id}
                assert "quickgelu" in option, "timm's note asks for it"
            else:
                assert cfg.url.endswith(f"/{model.evidence}") or not model.evidence


def _timm_weights() -> set[str]:
    import timm

    return set(timm.list_pretrained())


def test_the_command_ends_at_once_with_exit_code_2() -> None:
    program = (
        "import sys\n"
        "from featx.__main__ import run_command\n"
        "sys.argv = ['featx', 'data=sample', 'model=facebook/dinov2-base']\n"
        "code = run_command()\n"
        "print(code, sorted({'torch', 'timm', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "2 []\n", done.stderr
    assert "model=vit_base_patch14_dinov2.lvd142m" in done.stderr
