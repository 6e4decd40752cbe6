"""A command imports torch without garbage collection, and torch._dynamo at its first use."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from conftest import run_python
from tiny_model import write_images

from featx.base import paused_collection

COMMON = """
import sys
from featx.base import speed_up_imports

finders = len(sys.meta_path)
speed_up_imports()
speed_up_imports()
assert len(sys.meta_path) == finders + 1
import torch
disable = torch.compiler.disable
"""

TORCHVISION = """
import torchvision
from torchvision.ops import roi_align

assert "torch._dynamo" not in sys.modules and "torch._dynamo.utils" not in sys.modules
boxes = [torch.tensor([[0.0, 0.0, 4.0, 4.0]])]
assert roi_align(torch.ones(1, 1, 8, 8), boxes, (2, 2)).unique().tolist() == [1.0]
stand_in = sys.modules["torchvision.ops.roi_align"].is_compile_supported
import torch._dynamo.utils as real

assert stand_in is not real.is_compile_supported
assert stand_in("cpu") == real.is_compile_supported("cpu")
"""

TIMM = """
import timm

assert torch.compiler.disable is disable
assert "torch._dynamo" not in sys.modules
model = timm.create_model("naflexvit_base_patch16_gap", depth=1, embed_dim=12, num_heads=2).eval()
with torch.no_grad():
    patches = torch.rand(1, 6, 768)
    places = torch.tensor([[[i // 3, i % 3] for i in range(6)]])
    valid = torch.ones(1, 6, dtype=torch.bool)
    first = model({"patches": patches, "patch_coord": places, "patch_valid": valid})
assert "torch._dynamo" in sys.modules, "the method was called, and is excluded from compiling"
assert torch.isfinite(first).all()
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [TORCHVISION, TIMM], ids=["torchvision", "timm"])
def test_packages_work_and_import_it_when_they_use_it(code: str) -> None:
    run_python("-c", COMMON + code)


@pytest.mark.slow
def test_packages_that_are_imported_after_it_find_it() -> None:
    code = """
import torch._dynamo.utils as real
import torchvision
assert sys.modules["torchvision.ops.roi_align"].is_compile_supported is real.is_compile_supported
"""
    run_python("-c", COMMON + code)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet18", "vit_b_32", "test_vit", "test_resnet"])
def test_a_run_that_compiles_nothing_does_not_import_it(tmp_path: Path, model: str) -> None:
    write_images(tmp_path / "photos", 3)
    arguments = ("model.weights=null", "data=folder", "data.root=photos", "out=store")
    command = ("-X", "importtime", "-m", "featx", f"model={model}", *arguments)
    done = run_python(*command, cwd=tmp_path)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "torchvision" in imported, "the modules of the process that computes are listed"
    assert {name for name in imported if name.startswith(("torch._dynamo", "sympy"))} == set()


@pytest.mark.slow
def test_torch_is_imported_without_garbage_collection() -> None:
    code = "import gc; assert gc.isenabled() and gc.get_freeze_count() > 100_000"
    run_python("-c", COMMON + code)


def test_the_collector_is_on_again_after_an_error() -> None:
    with pytest.raises(KeyError), paused_collection():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    with paused_collection(), paused_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
