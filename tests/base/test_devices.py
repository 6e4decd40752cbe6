"""Settings of CUDA, which exist without a GPU; what they do to values is tested on one (`gpu`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from featx.base import DeviceTimer, choose_device, exact_cuda, explained_memory, to_cpu
from featx.errors import ConfigError, RunError

CUDNN: Any = torch.backends.cudnn
MATMUL: Any = torch.backends.cuda.matmul


@pytest.mark.parametrize(
    ("count", "answer"),
    [
        (0, r"0 CUDA devices on this machine\. Use device=cpu, or install a CUDA build"),
        (1, r"1 CUDA device on this machine, counted from 0\. The last one is device=cuda:0\."),
        (2, r"2 CUDA devices on this machine, .* The last one is device=cuda:1\."),
    ],
)
def test_a_device_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, count: int, answer: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    with pytest.raises(ConfigError, match=answer):
        choose_device("cuda:3")


def state() -> dict[str, Any]:
    """All settings that decide about TF32, and the others of `exact_cuda`."""
    found: dict[str, Any] = {
        "generic": torch.backends.fp32_precision,
        "conv": CUDNN.conv.fp32_precision,
        "rnn": CUDNN.rnn.fp32_precision,
        "matmul": MATMUL.fp32_precision,
        "deterministic": CUDNN.deterministic,
        "benchmark": CUDNN.benchmark,
        "fp16 sums": MATMUL.allow_fp16_reduced_precision_reduction,
        "bf16 sums": MATMUL.allow_bf16_reduced_precision_reduction,
    }
    for name, owner in (("cudnn", CUDNN), ("matmul", MATMUL)):
        try:
            found[f"{name}.allow_tf32"] = owner.allow_tf32
        except RuntimeError:
            found[f"{name}.allow_tf32"] = "contradicts"
    return found


def generic_tf32() -> None:
    torch.backends.fp32_precision = "tf32"


def conv_ieee() -> None:
    CUDNN.conv.fp32_precision = "ieee"


def matmul_tf32() -> None:
    MATMUL.fp32_precision = "tf32"


def old_names() -> None:
    CUDNN.allow_tf32, MATMUL.allow_tf32 = False, True


@pytest.fixture
def clean_settings() -> Iterator[None]:
    """Bring the settings of torch back to their defaults after the test."""
    yield
    torch.backends.fp32_precision = "none"
    CUDNN.allow_tf32, MATMUL.allow_tf32 = True, False
    MATMUL.fp32_precision = "none"


@pytest.mark.usefixtures("clean_settings")
@pytest.mark.parametrize(
    "change",
    [lambda: None, generic_tf32, conv_ieee, matmul_tf32, old_names],
    ids=lambda f: f.__name__,
)
def test_fp32_means_fp32_and_the_settings_come_back(change: Callable[[], object]) -> None:
    change()
    before = state()
    with exact_cuda:
        inside = state()
        # Both sets of names can be read, and cudnn.flags works: models and inductor use them.
        assert inside["cudnn.allow_tf32"] is inside["matmul.allow_tf32"] is False
        with CUDNN.flags(enabled=True):
            pass
        assert {inside["conv"], inside["rnn"], inside["matmul"]} <= {"none", "ieee"}
        assert (inside["deterministic"], inside["benchmark"]) == (True, False)
        assert (inside["fp16 sums"], inside["bf16 sums"]) == (False, False)
    assert state() == before


def test_a_timer_measures_the_work_of_its_block() -> None:
    began_at = time.perf_counter()
    with DeviceTimer(torch.device("cpu")) as timer:
        time.sleep(0.05)
    ended_after_s = time.perf_counter() - began_at
    time.sleep(0.1)
    assert 0.05 <= timer.seconds() <= ended_after_s


def test_copies_to_the_cpu_keep_their_order_and_dtype() -> None:
    values = [torch.arange(3), torch.ones(2, 2, dtype=torch.bfloat16)]
    copies = to_cpu(values, torch.device("cpu"))
    assert [copy.dtype for copy in copies] == [torch.int64, torch.bfloat16]
    assert all(torch.equal(a, b) for a, b in zip(copies, values, strict=True))


def test_a_full_device_is_named_with_the_programs_that_fill_it() -> None:
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 139.81 GiB "
        "of which 1.19 MiB is free. Process 17 has 139.80 GiB memory in use. Of the allocated "
        "memory 1.00 GiB is allocated by PyTorch, and 2.00 MiB is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF."
    )
    expected = (
        r"^cuda:1 has too little free memory: CUDA out of memory\. Tried .* Process 17 has 139\.80 "
        r"GiB memory in use\. Nothing committed is lost\. .*, or device=cpu\.$"
    )
    with pytest.raises(RunError, match=expected), explained_memory(torch.device("cuda", 1)):
        raise error


@pytest.mark.gpu
def test_a_timer_takes_the_time_of_the_device() -> None:
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device)
    with DeviceTimer(device) as timer:
        for _ in range(20):
            x @ x
    torch.cuda.synchronize()
    assert 1e-4 < timer.seconds() < 10
