"""The device that computes: which one, and what makes it exact and quick."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from featx.base.process_setting import ProcessSetting
from featx.errors import ConfigError


def choose_device(name: str) -> torch.device:
    """The device for the key `device`.

    Raises:
        ConfigError: it is not there.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(
                f"device={name}: torch sees {count} CUDA devices here. "
                "Use device=cpu, or install a CUDA build of torch and check nvidia-smi."
            )
        return torch.device("cuda", device.index or 0)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device={name}: torch has no MPS device here. Use device=cpu.")
    return device


def float64_home(device: torch.device) -> torch.device:
    """Where float64 is computed of what is on a device: there, but Apple's GPUs have none."""
    return torch.device("cpu") if device.type == "mps" else device


def choose_devices(name: str, devices: Any) -> list[torch.device]:
    """The device of each worker, for the keys `device` and `devices`.

    Args:
        name: as in choose_device.
        devices: None, how many, or the numbers of GPUs.

    Raises:
        ConfigError: one of them is not there.
    """
    if isinstance(devices, list | tuple):
        return [choose_device(f"cuda:{number}") for number in devices]
    first = choose_device(name)
    if devices is None or first.type != "cuda" or ":" in name:
        return [first] * (devices or 1)
    if devices > (count := torch.cuda.device_count()):
        raise ConfigError(
            f"devices={devices}: torch sees {count} CUDA devices here. Give devices={count}, or "
            f"device=cuda:0 for {devices} processes on one."
        )
    return [torch.device("cuda", number) for number in range(devices)]


@contextlib.contextmanager
def away(module: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Take a model off its device, whose memory others need meanwhile; it comes back at the end."""
    if device.type == "cuda":
        module.cpu()
        torch.cuda.empty_cache()
    try:
        yield
    finally:
        module.to(device)


class OwnStream:
    """Work that a CUDA device does beside what others give it; other devices have one queue.

    What is made on a stream is freed for that stream: who uses it on another one, and does not wait
    until that is done before letting go of it, calls `used_here`.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """What this thread gives the device in the block has been done when the block ends."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()


def used_here(values: Mapping[str, torch.Tensor]) -> None:
    """Keep the memory of tensors of another stream until what this thread does with them is done.

    Args:
        values: that are there: whoever made them has waited.
    """
    for value in values.values():
        if value.is_cuda:
            value.record_stream(torch.cuda.current_stream(value.device))


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what this thread gave it; a CPU has already."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


def to_cpu(values: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Copies on the CPU; from CUDA all of them into pinned memory with one wait at the end."""
    if device.type != "cuda":
        return {name: value.cpu() for name, value in values.items()}
    copies = {
        name: torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(
            value, non_blocking=True
        )
        for name, value in values.items()
    }
    torch.cuda.current_stream(device).synchronize()
    return copies


def may_have_bf16() -> bool:
    """Whether this CPU may compute in bf16 faster than in fp32: no x86 below AVX-512 does."""
    below = torch.backends.cpu.get_cpu_capability() in ("AVX2", "DEFAULT", "NO AVX")
    return not (below and platform.machine().lower() in ("x86_64", "amd64"))


@contextlib.contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Compute with so many threads on the CPU while the block runs; None leaves it as it is."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)


def _cuda_now() -> tuple[str, str, bool, bool]:
    cudnn: Any = torch.backends.cudnn  # its attributes are made in ways that mypy cannot follow
    matmul = torch.backends.cuda.matmul.fp32_precision
    return cudnn.conv.fp32_precision, matmul, cudnn.deterministic, cudnn.benchmark


def _set_cuda(settings: tuple[str, str, bool, bool]) -> None:
    cudnn: Any = torch.backends.cudnn
    cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision = settings[:2]
    cudnn.deterministic, cudnn.benchmark = settings[2:]


# fp32 means fp32 on CUDA as well (no TF32), and the same algorithm gives the same bits: it is not
# chosen by a race, which another stream may decide.
exact_cuda = ProcessSetting(_cuda_now, _set_cuda, ("ieee", "ieee", True, False))


@contextlib.contextmanager
def plain_tensors() -> Iterator[None]:
    """No gradients are recorded, and what is made can be changed in place outside, too.

    Hooks run in inference mode, whose tensors cannot be changed outside of it.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
