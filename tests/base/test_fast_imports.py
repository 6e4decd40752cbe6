"""A command imports torch without garbage collection, and neither triton nor another FLOP count."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from featx.base import paused_collection

IMPORTS = """
import gc, sys
from featx.base import speed_up_imports

finders = len(sys.meta_path)
speed_up_imports()
speed_up_imports()
assert len(sys.meta_path) == finders + 1
collections = []
gc.callbacks.append(lambda phase, info: collections.append("torch.nn" in sys.modules))
import torch

assert True not in collections
assert gc.isenabled() and gc.get_freeze_count() > 100_000
from torch.utils.flop_counter import FlopCounterMode

assert "triton" not in sys.modules and "triton.runtime.jit" not in sys.modules
with FlopCounterMode(display=False) as counter:
    torch.ones(2, 3) @ torch.ones(3, 5)
assert counter.get_total_flops() == 2 * 2 * 3 * 5
"""


@pytest.mark.slow
def test_torch_and_its_flops() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)


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
