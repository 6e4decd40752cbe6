"""model=open_clip: image towers, against open_clip itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clip_zoo import SMALL, open_clip, plain_model, preprocess_of, register, write_folder
from conftest import make_image
from safetensors.torch import load_file
from tiny_model import run_job

import featx
from featx.config import model_options
from featx.errors import ConfigError, FeatxError, ModelError, WeightsError
from featx.models import Backbone, build_backbone

SIZES = ((501, 225), (225, 301), (64, 200))


def build(name: Path | str, **options: Any) -> Backbone:
    return build_backbone(model_options(library="open_clip", name=str(name), **options), 0)


def embedded(backbone: Backbone, x: torch.Tensor) -> torch.Tensor:
    assert backbone.embedding is not None
    with torch.no_grad():
        return backbone.embedding.compute(x)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("clip") / "vit", "vit")


@pytest.fixture
def name(vit: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return register(vit, monkeypatch)


@pytest.mark.parametrize("kind", SMALL)
def test_a_folder_gives_what_open_clip_gives(kind: str, tmp_path: Path) -> None:
    backbone = build(write_folder(tmp_path, kind))
    model, transform = plain_model(tmp_path)
    preprocess = backbone.preprocess
    levels = 255 * torch.tensor(preprocess.std).view(3, 1, 1)
    assert preprocess.has_fast_path
    images = [make_image(*size, seed=number) for number, size in enumerate(SIZES)]
    x = torch.stack([transform(image) for image in images])
    for image, expected in zip(images, x, strict=True):
        assert torch.equal(preprocess.reference(image), expected)
        fast = preprocess.normalise(preprocess.crop_uint8(np.array(image))[None])[0]
        assert ((fast - expected) * levels).abs().max() <= 2.01
    with torch.no_grad():
        torch.testing.assert_close(embedded(backbone, x), model.encode_image(x, normalize=False))
        unit = build(tmp_path, normalize=True)
        torch.testing.assert_close(embedded(unit, x), model.encode_image(x, normalize=True))
    assert backbone.provenance["embedding"] == "encode_image(normalize=False)"
    assert unit.provenance["embedding"] == "encode_image(normalize=True)"
    assert backbone.provenance["quick_gelu"] == (kind == "quick_gelu")
    assert backbone.num_prefix_tokens == (0 if kind == "resnet" else 1)
    stages = backbone.stages or ()
    assert len(stages) == {"resnet": 4, "timm": 6}.get(kind, 3)
    assert set(stages) <= {key for key, _ in backbone.module.named_modules()}


def test_images_that_are_not_square_are_prepared_as_by_open_clip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SMALL["vit"]["vision_cfg"], "image_size", [48, 32])
    preprocess = build(write_folder(tmp_path, "vit")).preprocess
    image = make_image(501, 225)
    assert torch.equal(preprocess.reference(image), plain_model(tmp_path)[1](image))
    assert preprocess.crop == (48, 32)


@pytest.mark.parametrize("wrong", [{"mode": "L"}, {"interpolation": "nearest"}, {"std": [1]}])
def test_a_preprocessing_that_open_clip_does_not_take_is_named(
    wrong: dict[str, Any], tmp_path: Path
) -> None:
    file = write_folder(tmp_path, "vit") / "open_clip_config.json"
    values = json.loads(file.read_text())
    values["preprocess_cfg"] |= wrong
    file.write_text(json.dumps(values))
    with pytest.raises(WeightsError, match=r"open_clip does not take .*'size'"):
        build(tmp_path)


def test_a_run_stores_the_normalised_embedding(vit: Path, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    images = [make_image(*size, seed=number) for number, size in enumerate(SIZES)]
    for number, image in enumerate(images):
        image.save(tmp_path / "images" / f"{number}.png")
    run_job(
        "extract",
        model={"library": "open_clip", "name": str(vit), "normalize": True},
        layers={"embedding": "none", "transformer.resblocks.2": "cls"},
        data=str(tmp_path / "images"),
        decode="reference",
        dtype="float32",
        precision="fp32",
        out=str(tmp_path / "out"),
    )
    model, transform = plain_model(vit)
    with torch.no_grad():
        expected = model.encode_image(torch.stack([transform(i) for i in images]), normalize=True)
    store = featx.open(tmp_path / "out")
    np.testing.assert_allclose(store["embedding"][:], expected, atol=2e-6)
    assert store["transformer.resblocks.2"].shape == (3, 32)
    fingerprint = json.loads((tmp_path / "out" / "featx.json").read_text())["fingerprint"]
    assert fingerprint["model.embedding"] == "encode_image(normalize=True)"
    assert fingerprint["version.open_clip_torch"] == open_clip.__version__


def test_a_tag_and_a_file_like_it_are_the_same_model(vit: Path, name: str) -> None:
    file = str(vit / "open_clip_model.safetensors")
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for tag, quick in (("openai", True), ("other", False)):
        by_tag = build(name, weights=tag)
        by_file = build(name, weights=file, weights_like=tag)
        plain, _, transform = open_clip.create_model_and_transforms(
            name, pretrained=tag, force_quick_gelu=quick
        )
        with torch.no_grad():
            expected = plain.eval().encode_image(x)
        for backbone in (by_tag, by_file):
            torch.testing.assert_close(embedded(backbone, x), expected)
            assert backbone.provenance["quick_gelu"] == quick
            image = make_image(211, 90)
            assert torch.equal(backbone.preprocess.reference(image), transform(image))
        assert by_tag.weights == f"open_clip {tag}"
        assert by_file.weights == f"{file} like {tag}"
        assert by_tag.weights_sha256 == by_file.weights_sha256
    quick, plain = (build(name, weights=tag) for tag in ("openai", "other"))
    assert not torch.equal(embedded(quick, x), embedded(plain, x)), "the activation matters"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weights": "FILE"}, WeightsError, r"Add model\.weights_like=TAG.* openai, other, far"),
        ({"weights": "FILE", "weights_like": "laion"}, WeightsError, r"no such tag for .* openai"),
        ({"weights": "default"}, WeightsError, r"name the weights in model\.weights\. Tags"),
        ({"weights": "laion"}, WeightsError, r"model\.weights=laion: open_clip has no such tag"),
        ({"weights": "openai", "weights_like": "other"}, ConfigError, r"file of your own"),
        ({"weights": "no/such.safetensors", "weights_like": "other"}, WeightsError, r"no such fil"),
    ],
)
def test_what_a_file_is_like_has_to_be_said(
    options: dict[str, str], error: type[FeatxError], message: str, vit: Path, name: str
) -> None:
    if options["weights"] == "FILE":
        options = {**options, "weights": str(vit / "open_clip_model.safetensors")}
    with pytest.raises(error, match=message):
        build(name, **options)


def test_files_of_a_training_and_of_other_models(vit: Path, name: str, tmp_path: Path) -> None:
    state = load_file(vit / "open_clip_model.safetensors")
    training = {"epoch": 3, "state_dict": {f"module.{key}": x for key, x in state.items()}}
    torch.save(training, tmp_path / "epoch_3.pt")
    found = build(name, weights=str(tmp_path / "epoch_3.pt"), weights_like="other")
    assert found.weights_sha256 == build(vit).weights_sha256
    assert found.checkpoint["prefix"] == "state_dict/module.visual."
    del training["state_dict"]["module.visual.ln_post.bias"]
    torch.save(training, tmp_path / "epoch_4.pt")
    with pytest.raises(WeightsError, match=r"ln_post\.bias"):
        build(name, weights=str(tmp_path / "epoch_4.pt"), weights_like="other")


def test_folders_that_are_no_such_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"there is no .*open_clip_config\.json"):
        build(tmp_path)
    write_folder(tmp_path, "vit")
    with pytest.raises(ConfigError, match=r"a folder has its own weights"):
        build(tmp_path, weights="openai")
    with pytest.raises(ConfigError, match=r"tags and folders bring their preprocessing"):
        build(tmp_path, weights_like="openai")
    (tmp_path / "open_clip_model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"has no weights: expected open_clip_model\.safetens"):
        build(tmp_path)
    assert build(tmp_path, weights=None).weights == "random (seed 0)"
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": {"embed_dim": 3}}))
    with pytest.raises(ModelError, match=r"open_clip cannot build"):
        build(tmp_path, weights=None)


def test_names_and_networks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unresolved(*args: Any) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unresolved)
    with pytest.raises(WeightsError, match=r"hf download featx/no-such-model.*weights_like=far"):
        build(name, weights="far")
    with pytest.raises(ModelError, match=r"no model 'ViT-B-23'\. Nearest: .*ViT-B-32"):
        build("ViT-B-23", weights="openai")


def test_a_longest_side_is_left_to_open_clip(tmp_path: Path) -> None:
    write_folder(tmp_path, "vit")
    about = json.loads((tmp_path / "open_clip_config.json").read_text())
    about["preprocess_cfg"] = {**preprocess_of("vit"), "resize_mode": "longest"}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(about))
    preprocess = build(tmp_path).preprocess
    assert not preprocess.has_fast_path
    image = make_image(200, 90)
    assert torch.equal(preprocess.reference(image), plain_model(tmp_path)[1](image))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["ViT-B-32", "RN50", "coca_ViT-B-32", "ViT-B-16-SigLIP"])
def test_a_tower_has_the_parameters_of_the_whole_model(architecture: str) -> None:
    backbone = build(architecture, weights=None)
    with torch.device("meta"):
        whole = open_clip.create_model(architecture, load_weights=False, device="meta")
    own = {key: x.shape for key, x in backbone.module.state_dict().items()}
    assert own == {key: x.shape for key, x in whole.visual.state_dict().items()}
