"""model=transformers: what a folder may hold, and what is refused before anything runs."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_image
from safetensors.torch import load_file, save_file
from saved_weights import RunsCode
from tiny_model import run_job
from transformers_zoo import SMALL, quiet, small_model, tf, write_folder

import featx
from featx.config import model_options
from featx.errors import ConfigError, FeatxError, ModelError, WeightsError
from featx.models import Backbone, build_backbone

X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def build(folder: Path | str, **options: Any) -> Backbone:
    return build_backbone(model_options(library="transformers", name=str(folder), **options), 0)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("saved") / "vit", "vit")


@pytest.fixture
def folder(vit: Path, tmp_path: Path) -> Path:
    """A copy of the folder, to be changed by the test."""
    return Path(shutil.copytree(vit, tmp_path / "vit"))


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def change_weights(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file)


def test_a_classification_folder_has_no_pooler_and_its_head_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path, "vit", "ViTForImageClassification")
    backbone = build(tmp_path)
    plain = small_model("vit", "ViTForImageClassification").vit
    assert backbone.embedding is not None
    with torch.no_grad():
        expected = plain(X).last_hidden_state[:, 0]
        assert torch.equal(backbone.embedding.compute(X), expected)
    assert not any("pooler" in name for name in backbone.module.state_dict())
    assert "2 tensors left out, as no part of a ViTModel: classifier (2)" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_are_loaded_as_float32(folder: Path, dtype: Any) -> None:
    change_weights(folder, lambda state: {k: x.to(dtype) for k, x in state.items()})
    change_config(folder, dtype=str(dtype)[6:])
    backbone = build(folder)
    assert {x.dtype for x in backbone.module.parameters()} == {torch.float32}
    assert backbone.choices["parameters"].startswith(f"{str(dtype)[6:]} in the folder")


def test_weights_in_several_files_are_those_in_one(vit: Path, tmp_path: Path) -> None:
    with quiet():
        small_model("vit").save_pretrained(tmp_path, max_shard_size="40KB")
    shutil.copy(vit / "preprocessor_config.json", tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert build(tmp_path).weights_sha256 == build(vit).weights_sha256
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(WeightsError, match=r"model-00002-of-\d+\.safetensors is missing"):
        build(tmp_path)


def test_an_index_that_leads_out_of_the_folder_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "other.safetensors")
    index = {"weight_map": {"cls_token": "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"\.\./other\.safetensors is missing in the folder"):
        build(folder)


def test_random_weights_are_those_of_the_seed(vit: Path) -> None:
    one, same = (build(vit, weights=None) for _ in range(2))
    assert one.weights == "random (seed 0)"
    assert one.weights_sha256 == same.weights_sha256 != build(vit).weights_sha256
    reset = build(vit, init="reset")
    assert reset.weights.startswith("random (seed 0), reset from ")


def _without(part: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda state: {name: x for name, x in state.items() if part not in name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("layer.1.layernorm_after.bias"), r"1 tensor missing \(layers\.1\.layernorm_aft"),
        (
            lambda state: {**state, "encoder.layer.3.layernorm_after.bias": torch.zeros(32)},
            r"1 left over \(\S*3\.layernorm_after\.bias\)",
        ),
        (
            lambda state: {**state, "layernorm.bias": torch.full((32,), float("inf"))},
            r"damaged: NaN or infinity in 1 tensor \(layernorm\.bias\)",
        ),
        (
            lambda state: {**state, "layernorm.bias": torch.zeros(32, dtype=torch.int8)},
            r"quantised: 1 tensor \(layernorm\.bias is int8\)",
        ),
        (lambda state: {**state, "layernorm.bias": torch.zeros(7)}, r"do not fit|another shape"),
    ],
    ids=["missing", "too many", "infinity", "int8", "shape"],
)
def test_weights_that_are_not_those_of_the_model_are_refused(
    folder: Path, change: Any, message: str
) -> None:
    change_weights(folder, change)
    with pytest.raises(WeightsError, match=message):
        build(folder)


def test_damaged_and_missing_files_are_named(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:5000])
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read .* It has 5000 byt"):
        build(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"there is no model\.safetensors in this folder"):
        build(folder)
    (folder / "preprocessor_config.json").rename(folder / "other.json")
    with pytest.raises(WeightsError, match=r"no image processor \(preprocessor_config\.json\)"):
        build(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"config\.json cannot be read: Expecting"):
        build(folder)
    (folder / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"there is no config\.json in this folder"):
        build(folder)


def test_pickled_weights_are_not_opened(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    witness = tmp_path / "ran"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(RunsCode(witness)))
    with pytest.raises(WeightsError, match=r"are pickled \(pytorch_model\.bin\)"):
        build(folder)
    assert not witness.exists()


@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json"])
def test_code_of_a_folder_does_not_run(folder: Path, tmp_path: Path, file: str) -> None:
    witness = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(witness)!r}, 'w')\nclass Own: ...\n")
    text = json.loads((folder / file).read_text())
    names = {"AutoModel": "own.Own", "AutoConfig": "own.Own", "AutoImageProcessor": "own.Own"}
    (folder / file).write_text(json.dumps({**text, "auto_map": names}))
    with pytest.raises(ModelError, match=r"names Python code .* runs no such code"):
        build(folder)
    assert not witness.exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "yolos"}, r"cannot open the model_type yolos: it is a detector"),
        ({"model_type": "siglip2"}, r"NaFlex\).* have the model_type siglip"),
        ({"model_type": "bert"}, r"a BertModel \(model_type bert\) reads input_ids"),
        ({"model_type": "vitt"}, r"no image model of the model_type vitt\. Update it"),
        ({"model_type": None, "architecture": "vit_small"}, r"cannot open|no image model"),
        ({"hidden_size": "wide"}, r"config\.json describes no vit model"),
        ({"hidden_size": 33}, r"ViTModel of this config\.json|do not fit"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, r"is quantised"),
        ({"image_size": 64}, r"takes images of 64 x 64 pixels, and the image processor .* 32 x 32"),
    ],
)
def test_a_config_that_is_no_such_model_is_refused(
    folder: Path, config: dict[str, Any], message: str
) -> None:
    change_config(folder, **config)
    with pytest.raises(FeatxError, match=message):
        build(folder)


def test_models_of_other_libraries_are_named(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"architecture": "resnet18"}))
    with pytest.raises(ModelError, match=r"model=timm model\.name=local-dir:"):
        build(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds an adapter"):
        build(folder)


def test_entries_that_choose_kernels_and_files_are_ignored(vit: Path, folder: Path) -> None:
    change_config(
        folder,
        attn_implementation="someone/kernels",
        _attn_implementation="someone/kernels",
        transformers_weights="../elsewhere.safetensors",
        return_dict=False,
        output_hidden_states=True,
    )
    assert build(folder).weights_sha256 == build(vit).weights_sha256


def test_another_config_with_the_same_weights_is_another_model(vit: Path, folder: Path) -> None:
    change_config(folder, transformers_version="0")
    assert build(folder).provenance == build(vit).provenance
    change_config(folder, hidden_act="relu")
    assert build(folder).weights_sha256 == build(vit).weights_sha256
    assert build(folder).provenance != build(vit).provenance


def test_arguments_are_those_of_the_attention(vit: Path) -> None:
    eager, usual = build(vit, args={"attn_implementation": "eager"}), build(vit)
    assert eager.args == {"attn_implementation": "eager"}
    assert eager.embedding is not None
    assert usual.embedding is not None
    with torch.no_grad():
        torch.testing.assert_close(eager.embedding.compute(X), usual.embedding.compute(X))
    for args in ({"trust_remote_code": True}, {"attn_implementation": "flash_attention_2"}):
        with pytest.raises(ConfigError, match=r"attn_implementation=eager or sdpa"):
            build(vit, args=args)
    with pytest.raises(ConfigError, match=r"lie in the folder model\.name"):
        build(vit, weights="other.safetensors")
    with pytest.raises(ModelError, match=r"takes images of 32 x 32 pixels only"):
        build(vit, input_size=[64, 64])


def test_another_size_changes_model_and_images(tmp_path: Path) -> None:
    backbone = build(write_folder(tmp_path, "dinov2"), input_size=[64, 96])
    assert backbone.preprocess.crop == (64, 96)
    assert backbone.preprocess.resize == 111, "37 of 32 pixels, so that tall images are covered"
    with torch.no_grad():
        tokens = backbone.module(torch.zeros(1, 3, 64, 96))["last_hidden_state"]
    assert tokens.shape == (1, 1 + 8 * 12, 32)


def test_a_name_of_the_hub_needs_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def unresolved(*args: Any) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unresolved)
    with pytest.raises(WeightsError, match=r"hf download someone/model --local-dir FOLDER"):
        build("someone/model")
    with pytest.raises(WeightsError, match=r"there is no such folder"):
        build("no/such/folder")


def test_a_run_stores_what_transformers_computes(tmp_path: Path) -> None:
    """Files of other proportions, through the processor and the model of transformers alone."""
    saved = write_folder(tmp_path / "clip", "clip")
    sizes = [(225, 301), (501, 225), (90, 41)]
    images = [make_image(*size, seed=number) for number, size in enumerate(sizes)]
    (tmp_path / "images").mkdir()
    for number, image in enumerate(images):
        image.save(tmp_path / "images" / f"{number}.png")
    keys = {
        "model": {"library": "hf", "name": str(saved)},
        "layers": {"embedding": "none", "encoder": "patch_avg"},
        "data": str(tmp_path / "images"),
        "decode": "reference",
        "dtype": "float32",
        "precision": "fp32",
        "out": str(tmp_path / "out"),
    }
    assert run_job("extract", **keys) == 0
    store = featx.open(tmp_path / "out")
    processor = tf.AutoImageProcessor.from_pretrained(saved, backend="pil")
    with quiet(), torch.no_grad():
        model = tf.CLIPModel.from_pretrained(saved).vision_model
        output = model(**processor(images=images, return_tensors="pt"))
    np.testing.assert_allclose(store["embedding"][:], output.pooler_output, atol=2e-5)
    expected = output.last_hidden_state[:, 1:].mean(1)
    np.testing.assert_allclose(store["encoder"][:], expected, atol=2e-5)
    fingerprint = json.loads((tmp_path / "out" / "featx.json").read_text())["fingerprint"]
    assert fingerprint["model.embedding"] == "pooler_output"
    assert fingerprint["model.prefix_tokens"] == 1
    assert fingerprint["model.processor"] == "CLIPImageProcessor, pil"
    assert fingerprint["version.transformers"] == tf.__version__


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SMALL)
def test_one_missing_tensor_is_refused_in_every_family(model_type: str, tmp_path: Path) -> None:
    write_folder(tmp_path, model_type)
    names = list(load_file(tmp_path / "model.safetensors"))
    norm = next(n for n in reversed(names) if "norm" in n and "text" not in n)
    change_weights(tmp_path, lambda state: {k: x for k, x in state.items() if k != norm})
    with pytest.raises(WeightsError, match=r"1 tensor missing"):
        build(tmp_path)
