"""Choice of the number of parallel batches, and of the CPU threads that compute each.

On CUDA each parallel batch has its own stream: one batch is copied to or from the device while
another is computed, and the device is busy while Python prepares the next operation.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from featx.base import free_memory, is_kept_in_threads, resident_memory
from featx.engine.row_checks import same_bits
from featx.types import ResumeState

if TYPE_CHECKING:
    from featx.engine.engine import Engine

USUAL_REPLICAS = 4
"""Number of parallel batches on a CPU with at least as many cores."""

CUDA_STREAMS = 2
"""Number of parallel batches on CUDA, if they fit into memory and give equal bits."""

_TRIES = 3
"""Number of batches of each replica that are compared with those of the engine alone."""


def trial_threads(cpus: int | None, resume_state: ResumeState | None) -> int | None:
    """Number of threads for trial passes and compilation, or None on other devices.

    All CPUs, unless the resumed run is compiled: a compiled forward pass keeps the number of
    threads that it was compiled with, so the recorded number is used.
    """
    if cpus is None or resume_state is None or not resume_state.resolved.get("compile"):
        return cpus
    return int(resume_state.resolved.get("threads", cpus))


def room_for_batches(bytes_before: int | None, bytes_after: int | None, limit: int) -> int:
    """Largest number of parallel batches that half of the free memory allows."""
    free = free_memory()
    if bytes_before is None or bytes_after is None or free is None:
        return min(limit, USUAL_REPLICAS)
    batch_bytes = max(1, bytes_after - bytes_before)
    return int(min(limit, 1 + free / (2 * batch_bytes)))


@dataclass(frozen=True)
class BatchParallelism:
    """The number of threads and replicas of a run.

    Attributes:
        threads: number of CPU threads that compute one batch, or None on other devices.
        replicas: number of engine replicas that compute parallel batches.
        computes_ahead: whether the next batch is computed while the batch sink takes the rows of
            one.
        choices: option name -> the choice and its reason, as printed before the run.
    """

    threads: int | None
    replicas: int
    computes_ahead: bool
    choices: dict[str, str]


_NO_ROOM = "1 (there is not enough memory for parallel batches)"
"""The choice `streams` where the memory of the device or the host is short."""


def decide(
    engine: Engine,
    cpus: int | None,
    resume_state: ResumeState | None,
    memory_before: int | None,
    make_batch: Callable[[int], torch.Tensor],
) -> BatchParallelism:
    """Choose threads per batch and parallel batches; `cpus` are those of a CPU that computes.

    Threads that share a batch wait for each other after every operation, above all while other
    threads decode images. Threads with a batch each do not. The last bits of a row depend on the
    number of threads of its batch, so a resumed run keeps that number.
    """
    if cpus is None:
        return _decide_on_device(engine, make_batch)
    room = room_for_batches(memory_before, resident_memory(), cpus)
    # Threads whose freed memory is not kept ask the kernel for it in every layer, so there one
    # batch at a time has all CPUs.
    if not engine.can_be_replicated or not is_kept_in_threads():
        room = 1
    default_threads = -(-cpus // min(room, USUAL_REPLICAS))
    resolved = resume_state.resolved if resume_state else {}
    threads = int(resolved.get("threads", default_threads))
    replicas = max(1, min(room, cpus // threads))
    text = f"{threads}" + (f", and {replicas} parallel batches" if replicas > 1 else "")
    if threads != default_threads:
        assert resume_state is not None
        other = f"{default_threads} here would give other last bits"
        text += f" (as {resume_state.what} started; {other})"
    return BatchParallelism(threads, replicas, replicas > 1, {"threads": text})


def _decide_on_device(
    engine: Engine, make_batch: Callable[[int], torch.Tensor]
) -> BatchParallelism:
    """Choose the number of parallel batches on a device; on CUDA each has its own stream.

    A module that is not known to be reentrant gets one batch at a time, computed when its rows are
    taken: its next forward pass may overwrite the memory of the rows of the last one.
    """
    if engine.device.type != "cuda":
        return BatchParallelism(None, 1, False, {})
    if not engine.backbone.reentrant:
        return BatchParallelism(None, 1, False, {"streams": "1"})
    batch = make_batch(engine.compute.batch_size)
    if not _has_room(engine, batch):
        return BatchParallelism(None, 1, False, {"streams": _NO_ROOM})
    if not engine.can_be_replicated:
        return BatchParallelism(None, 1, True, {"streams": "1"})
    try:
        are_equal = replicas_agree(engine, batch, CUDA_STREAMS)
    except torch.OutOfMemoryError:  # another process took the memory that was free
        return BatchParallelism(None, 1, False, {"streams": _NO_ROOM})
    finally:
        torch.cuda.empty_cache()
    if not are_equal:
        why = "parallel batches give other last bits here"
        return BatchParallelism(None, 1, True, {"streams": f"1 ({why})"})
    return BatchParallelism(
        None, CUDA_STREAMS, True, {"streams": f"{CUDA_STREAMS}, a batch in each"}
    )


def _has_room(engine: Engine, batch: torch.Tensor) -> bool:
    """Return whether device and host can hold the parallel batches in half of their free memory."""
    device = engine.device
    engine.run(batch)
    bytes_before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    values = engine.run(batch)
    batch_bytes = torch.cuda.max_memory_allocated(device) - bytes_before
    # Memory that torch has reserved but not allocated is free for batches as well.
    free_bytes = (
        torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - bytes_before
    )
    if 2 * CUDA_STREAMS * batch_bytes > free_bytes:
        return False
    # In addition to the batches being computed, one waits and one is read by the batch sink.
    host_bytes = (CUDA_STREAMS + 2) * sum(value.nbytes for value in values.values())
    free_host_bytes = free_memory()
    return free_host_bytes is None or 2 * host_bytes <= free_host_bytes


def replicas_agree(engine: Engine, batch: torch.Tensor, count: int) -> bool:
    """Return whether replicas at work at the same time give the bits of the engine alone."""
    batches = [batch.roll(i, 0) for i in range(count)]
    expected = [engine.run(x) for x in batches]

    def agrees(i: int) -> bool:
        for _ in range(_TRIES):
            with replicas[i].own_stream():
                values = replicas[i].run(batches[i])
            if not all(same_bits(value, expected[i][name]) for name, value in values.items()):
                return False
        return True

    with engine.replicas(count) as replicas, ThreadPoolExecutor(count) as threads:
        return all(threads.map(agrees, range(count)))
