"""A run changes no parameter, no buffer, and leaves a module of the user's own as it was found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import MODEL, extract, run_job
from torch import nn
from zoo import LIVING

from featx.config import TransformConfig
from featx.engine import Compute, Engine
from featx.errors import RunError
from featx.models import Backbone, state_sha256, stated_preprocess

pytestmark = pytest.mark.usefixtures("in_tmp_path")


class Net(nn.Module):
    """BatchNorm and dropout, a frozen part, a part in eval mode, buffers of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 8, stride=8)
        self.bn = nn.BatchNorm2d(8)
        self.frozen = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)).eval()
        self.frozen[0].requires_grad_(False)
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(128, 4))
        self.register_buffer("table", torch.arange(4))
        self.register_buffer("mask", torch.tensor([True, False, True, True]), persistent=False)
        self.fail = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fail:
            raise RunError("made to fail")
        x = self.frozen(self.bn(self.conv(x)))
        return self.head(x)[:, self.table] * self.mask


OWN = Net()


KEYS: dict[str, Any] = {
    "model": {**MODEL, "factory": "zoo:living", "weights": "default"},
    "layers": ["conv", "bn", "frozen", "head"],
}


@pytest.fixture(autouse=True)
def own_module_lives() -> None:
    LIVING[:] = [OWN]


def facts(module: nn.Module) -> dict[str, Any]:
    """All that a run might change."""
    return {
        "state": state_sha256(module),
        "tensors": [(x.dtype, x.device, x.stride(), x.data_ptr()) for x in _tensors(module)],
        "modes": [m.training for m in module.modules()],
        "flags": [p.requires_grad for p in module.parameters()],
        "gradients": [
            (id(p.grad), p.grad is not None and p.grad.dtype) for p in module.parameters()
        ],
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()),
    }


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_extract_leaves_the_users_module_as_it_was(photos: Path, precision: str) -> None:
    before = facts(OWN)
    assert len(set(before["modes"])) == len(set(before["flags"])) == 2
    store = extract(photos, **KEYS, precision=precision)
    assert store.complete
    assert facts(OWN) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_memory_format_and_shared_memory_stay(photos: Path, dtype: torch.dtype) -> None:
    """As in a training loop: weights in channels-last, all in one vector, with gradients."""
    module = Net().to(dtype).to(memory_format=torch.channels_last)
    for x in module.parameters():
        x.grad = torch.ones_like(x)
    bn = torch.zeros(16, dtype=dtype)
    module.bn.weight.data, module.bn.bias.data = bn[:8], bn[8:]
    LIVING[:] = [module]
    before = facts(module)
    assert extract(photos, **KEYS).complete
    assert facts(module) == before


@pytest.mark.parametrize(("job", "keys"), [("layers", {"model": KEYS["model"]}), ("plan", KEYS)])
def test_the_jobs_that_look_leave_it_too(photos: Path, job: str, keys: dict[str, Any]) -> None:
    before = facts(OWN)
    assert run_job(job, data=str(photos), **keys) == 0
    assert facts(OWN) == before


def test_so_does_a_run_that_fails(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = facts(OWN)
    monkeypatch.setattr(OWN, "fail", True)
    with pytest.raises(RunError, match="made to fail"):
        extract(photos, **KEYS)
    assert facts(OWN) == before


def test_batch_statistics_do_not_move_and_whole_numbers_stay_whole() -> None:
    """In the midst of a run, in every precision and memory format."""
    module = Net()
    before = state_sha256(module)
    preprocess = stated_preprocess(TransformConfig(resize=32, crop=32))
    backbone = Backbone(module, "net", "made", preprocess)
    with Engine(backbone, torch.device("cpu"), "float32") as engine:
        for precision in ("fp32", "bf16", "fp16"):
            for channels_last in (False, True):
                engine.configure_compute(Compute(precision, False, channels_last, 2))
                with engine.module_and_input(
                    torch.full((2, 3, 32, 32), 200, dtype=torch.uint8)
                ) as run:
                    run[0](run[1])
                assert state_sha256(module) == before == backbone.weights_sha256
                assert module.bn.num_batches_tracked.dtype == torch.int64
                assert module.table.dtype == torch.int64
                assert module.mask.dtype == torch.bool
                assert not any(m.training for m in module.modules())
    assert state_sha256(module) == before


@pytest.mark.gpu
def test_a_module_comes_back_from_the_gpu(photos: Path) -> None:
    before = facts(OWN)
    assert extract(photos, **KEYS, device="cuda").complete
    assert facts(OWN) == before
