"""Devices: choice of the device, exact settings, streams and synchronisation."""

from __future__ import annotations

import contextlib
import platform
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from featx.base.process import ProcessSetting
from featx.errors import ConfigError, RunError, counted


def choose_device(name: str) -> torch.device:
    """The device that the option `device` means: 'auto', 'cpu', 'mps', 'cuda' or 'cuda:N'.

    Raises ConfigError if the device does not exist on this machine, or inside torch.autocast.
    """
    refuse_autocast()
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            found = f"device={name}: torch finds {counted(count, 'CUDA device')} on this machine"
            raise ConfigError(
                f"{found}, counted from 0. The last one is device=cuda:{count - 1}."
                if count
                else f"{found}. Use device=cpu, or install a CUDA build of torch and check "
                "nvidia-smi."
            )
        return torch.device("cuda", device.index or 0)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device={name}: this machine has no MPS device. Use device=cpu.")
    return device


def refuse_autocast() -> None:
    """Raise ConfigError inside torch.autocast, which rounds products of matrices in this thread."""
    for kind in ("cpu", "cuda", "mps"):
        if torch.is_autocast_enabled(kind):
            raise ConfigError(
                f"torch.autocast({kind!r}) is enabled here and would round results; featx needs "
                "it disabled, and its option `precision` says in what a model is computed. Call "
                f"featx outside of the block, or inside `with torch.autocast({kind!r}, "
                "enabled=False):`."
            )


def check_torch_defaults() -> None:
    """Check that tensors are made as models expect them: float32, on the CPU.

    Raises ConfigError if this process or this thread has other defaults.
    """
    if (dtype := torch.get_default_dtype()) != torch.float32:
        raise ConfigError(
            f"torch.get_default_dtype() is {dtype}; expected torch.float32, in which images and "
            "features are computed. Call torch.set_default_dtype(torch.float32) before, and set "
            "yours again afterwards."
        )
    if (device := torch.get_default_device()).type != "cpu":
        raise ConfigError(
            f"torch.get_default_device() is {device}; expected the CPU, on which images are "
            "decoded. Call featx inside `with torch.device('cpu'):`; its option `device` says "
            "where the model is computed."
        )


def float64_device(device: torch.device) -> torch.device:
    """The device on which to compute in float64: the CPU for MPS, which has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def choose_devices(name: str, workers: int | None) -> list[torch.device]:
    """The device of each worker, for the options `device` and `executor.workers` of executor=local;
    None stands for one. Raises ConfigError if a device does not exist on this machine.
    """
    first = choose_device(name)
    if workers is None or first.type != "cuda" or ":" in name:
        return [first] * (workers or 1)
    if workers > (count := torch.cuda.device_count()):
        raise ConfigError(
            f"executor.workers={workers}: torch finds {counted(count, 'CUDA device')} on this "
            f"machine. Give executor.workers={count}, or device=cuda:0 for {workers} processes on "
            "one device."
        )
    return [torch.device("cuda", number) for number in range(workers)]


@contextlib.contextmanager
def explained_memory(device: torch.device) -> Iterator[None]:
    """Turn a lack of device memory inside the block into a RunError that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        # The part that is left out advises on settings of torch's allocator.
        reason = str(error).strip().partition(" Of the allocated memory")[0].rstrip(".")
        raise RunError(
            f"{device} has too little free memory: {reason}. Nothing committed is lost. If other "
            "programs use it (nvidia-smi), wait for them, or choose another device. Otherwise "
            "lower batch_size, choose fewer layers or a smaller model, or device=cpu."
        ) from error


class OwnStream:
    """A CUDA stream whose work runs in parallel to other streams; without effect on other devices.

    Memory of a tensor made on a stream is reused for that stream once the tensor is freed. If
    another stream reads the tensor and may still do so when it is freed, call `record_use`.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Context in which work of this thread goes to the stream; waits for it at the end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()


def record_use(values: Mapping[str, torch.Tensor]) -> None:
    """Keep the memory of tensors until the current stream of this thread has finished with them.

    They are tensors of another stream, which are already computed.
    """
    for value in values.values():
        if value.is_cuda:
            value.record_stream(torch.cuda.current_stream(value.device))


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished the work of this thread; returns at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


def to_cpu(values: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy tensors of a device to the CPU.

    On CUDA, all copies go to page-locked memory asynchronously, with one wait at the end.
    """
    if device.type != "cuda":
        return [value.cpu() for value in values]
    copies = [
        torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
        for value in values
    ]
    # `synchronize` of a stream would keep a CPU busy that decoders need; this thread sleeps.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    event.synchronize()
    return copies


class DeviceTimer:
    """Context manager that measures how long a device takes for the work of a block.

    On CUDA, events on the stream of the calling thread take the time, without synchronisation.
    On other devices the block ends when its work has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._events: list[torch.cuda.Event] = []

    def __enter__(self) -> DeviceTimer:
        if self._device.type == "cuda":
            self._record()
        else:
            self._seconds = -time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        if self._device.type == "cuda":
            self._record()
        else:
            synchronise(self._device)
            self._seconds += time.perf_counter()

    def seconds(self) -> float:
        """Seconds from the beginning to the end of the work, which must have ended."""
        if not self._events:
            return self._seconds
        first, last = self._events
        return float(first.elapsed_time(last)) / 1000

    def _record(self) -> None:
        """Append an event to the stream of the calling thread."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)


def may_have_bf16() -> bool:
    """Return whether this CPU may be faster in bf16 than in fp32; x86 without AVX-512 is not."""
    below = torch.backends.cpu.get_cpu_capability() in ("AVX2", "DEFAULT", "NO AVX")
    return not (below and platform.machine().lower() in ("x86_64", "amd64"))


_threads_lock = threading.Lock()
_usual_threads: list[int] = []
"""For each block of `cpu_threads` that has not ended, the number of threads before the first."""


@contextlib.contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Set the number of torch's CPU threads inside the block; None leaves it unchanged.

    Threads that start later begin with the number that any thread has set last. So if blocks of
    several threads overlap, the last one restores what was before the first.
    """
    if count is None:
        yield
        return
    with _threads_lock:
        before = torch.get_num_threads()
        _usual_threads.append(_usual_threads[0] if _usual_threads else before)
        torch.set_num_threads(count)
    try:
        yield
    finally:
        with _threads_lock:
            usual = _usual_threads.pop()
            torch.set_num_threads(before if _usual_threads else usual)


# Attributes of torch.backends are made in ways that mypy cannot follow.
_cudnn: Any = torch.backends.cudnn
_matmul: Any = torch.backends.cuda.matmul

# fp32 computes in fp32 on CUDA as well, without TF32, and products add partial sums in fp32.
# Algorithms are not chosen by timing them (benchmark), which other streams could influence, so
# results are reproducible. torch has two sets of names for TF32: `allow_tf32`, and
# `fp32_precision`. If a value is set by the second one only, reading the first raises an error, and
# so does `cudnn.flags`, which models and inductor use. So both are set, the first one first.
_EXACT: Sequence[tuple[Any, str, object]] = (
    (_cudnn, "allow_tf32", False),
    (_matmul, "allow_tf32", False),
    (_cudnn.conv, "fp32_precision", "ieee"),
    (_cudnn.rnn, "fp32_precision", "ieee"),
    (_matmul, "fp32_precision", "ieee"),
    (_cudnn, "deterministic", True),
    (_cudnn, "benchmark", False),
    (_matmul, "allow_fp16_reduced_precision_reduction", False),
    (_matmul, "allow_bf16_reduced_precision_reduction", False),
)
"""Owner and name of a setting of torch for computations on CUDA -> its exact value."""


def _cuda_now() -> list[object]:
    """Values of these settings; None if the two sets of names for TF32 contradict each other."""
    values: list[object] = []
    for owner, name, _ in _EXACT:
        try:
            values.append(getattr(owner, name))
        except RuntimeError:
            values.append(None)
    return values


def _set_cuda(values: Sequence[object]) -> None:
    for (owner, name, _), value in zip(_EXACT, values, strict=True):
        # A precision that is right is left alone: it may follow torch.backends.fp32_precision.
        if value is not None and (name != "fp32_precision" or getattr(owner, name) != value):
            setattr(owner, name, value)


exact_cuda = ProcessSetting(_cuda_now, _set_cuda, [value for *_, value in _EXACT])
"""Context manager with exact and deterministic settings of CUDA."""


@contextlib.contextmanager
def plain_tensors() -> Iterator[None]:
    """Context in which tensors are made without gradients but can later be changed in place.

    Hooks may run in inference mode, whose tensors cannot be changed outside it.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
