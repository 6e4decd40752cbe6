"""How many batches are computed side by side, and on a CPU with how many threads each.

On CUDA a batch has a stream of its own, so it is copied to the device and back while another is
computed, and what Python takes between two operations is not lost.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from featx.base.allocator import is_kept_in_threads
from featx.base.machine import free_memory, num_cpus, resident_memory
from featx.config.run_config import Config
from featx.engine.row_checks import same_bits
from featx.types import ResumeState

if TYPE_CHECKING:
    from featx.engine.engine import Engine

MAX_REPLICAS = 4
"""Batches that are computed side by side on a CPU, at the most."""

CUDA_STREAMS = 2
"""Batches that are on their way on a CUDA device, where memory and bits allow it."""

_TRIES = 3
"""Batches of each replica that are compared with those of the engine alone."""


def cpus_that_compute(config: Config, device: torch.device) -> int | None:
    """CPUs that this process computes on; None where another device computes."""
    if device.type != "cpu":
        return None
    cpus = config.cpus_of_worker(num_cpus())
    return cpus if config.executor.name != "local" else min(torch.get_num_threads(), cpus)


def calibration_threads(cpus: int | None, begun: ResumeState | None) -> int | None:
    """Threads for what is tried and compiled: all; a compiled pass keeps those it was made with.

    So one that a store was begun with is compiled for the threads of that store.
    """
    if cpus is None or begun is None or not begun.resolved.get("compile"):
        return cpus
    return int(begun.resolved.get("threads", cpus))


def room_for_batches(before: int | None, after: int | None) -> int:
    """How many batches may be computed at once, by what the passes of the probe left in memory.

    Freed memory is kept, so that is about what a pass needs. Half of what is free stays free.
    """
    free = free_memory()
    if before is None or after is None or free is None:
        return MAX_REPLICAS
    each = max(1, after - before)
    return int(min(MAX_REPLICAS, 1 + free / (2 * each)))


@dataclass(frozen=True)
class BatchParallelism:
    """What is computed at the same time.

    Attributes:
        threads: of the CPU that compute a batch; None where another device does.
        replicas: of the engine, that compute batches side by side.
        ahead: whether the next batch is computed while one is taken.
        choices: a line on the choice, by its name.
    """

    threads: int | None
    replicas: int
    ahead: bool
    choices: dict[str, str]


def decide(
    engine: Engine,
    cpus: int | None,
    begun: ResumeState | None,
    memory_before: int | None,
    filled: Callable[[int], torch.Tensor],
) -> BatchParallelism:
    """What a run computes at the same time.

    Args:
        engine: settled.
        cpus: that compute; None where another device does.
        begun: what is gone on with.
        memory_before: of this process, before the engine was tried.
        filled: so many images, as a batch of them.
    """
    if cpus is None:
        return _on_device(engine, filled)
    return _on_cpu(cpus, engine, room_for_batches(memory_before, resident_memory()), begun)


def _on_cpu(cpus: int, engine: Engine, room: int, begun: ResumeState | None) -> BatchParallelism:
    """Threads that compute a batch, and how many batches side by side.

    Two threads that share a batch wait for each other after every operation, above all while others
    decode; two that have a batch each do not. The last bits of a row depend on the threads of its
    batch, so a store that is gone on with keeps their number.

    Args:
        cpus: that compute.
        engine: settled.
        room: batches at once, at the most.
        begun: what is gone on with.
    """
    if not engine.replicable:
        room = 1
    here = -(-cpus // room) if is_kept_in_threads() else cpus
    threads = int(begun.resolved.get("threads", here)) if begun else here
    replicas = max(1, min(room, cpus // threads))
    text = f"{threads}" + (f", and {replicas} batches side by side" if replicas > 1 else "")
    if threads != here:
        assert begun is not None
        text += f" (as {begun.what} begun; here it would be {here}, and other last bits)"
    return BatchParallelism(threads, replicas, replicas > 1, {"threads": text})


def _on_device(engine: Engine, filled: Callable[[int], torch.Tensor]) -> BatchParallelism:
    """How many batches are on their way at once on a device; on CUDA in a stream each.

    Of a user's module there is one, computed when it is taken: it may use the memory of what it
    gave again.

    Args:
        engine: settled.
        filled: so many images, as a batch of them.
    """
    if engine.device.type != "cuda":
        return BatchParallelism(None, 1, False, {})
    if not engine.backbone.reentrant:
        return BatchParallelism(None, 1, False, {"streams": "1"})
    batch = filled(engine.compute.batch_size)
    if not _has_room(engine, batch):
        why = "memory does not suffice for more batches at once"
        return BatchParallelism(None, 1, False, {"streams": f"1 ({why})"})
    if not engine.replicable:
        return BatchParallelism(None, 1, True, {"streams": "1"})
    try:
        same = replicas_agree(engine, batch, CUDA_STREAMS)
    except torch.OutOfMemoryError:  # another process took what was free
        why = "memory did not suffice for more batches at once"
        return BatchParallelism(None, 1, False, {"streams": f"1 ({why})"})
    finally:
        torch.cuda.empty_cache()
    if not same:
        why = "beside each other batches come to other last bits here"
        return BatchParallelism(None, 1, True, {"streams": f"1 ({why})"})
    return BatchParallelism(
        None, CUDA_STREAMS, True, {"streams": f"{CUDA_STREAMS}, a batch in each"}
    )


def _has_room(engine: Engine, batch: torch.Tensor) -> bool:
    """Whether device and host have memory for batches on their way; half of what is free stays."""
    device = engine.device
    engine.run(batch)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    values = engine.run(batch)
    each = torch.cuda.max_memory_allocated(device) - before
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - before
    if 2 * CUDA_STREAMS * each > free:
        return False
    # Beside those that are computed one is waiting and one is taken.
    on_host = (CUDA_STREAMS + 2) * sum(value.nbytes for value in values.values())
    free_on_host = free_memory()
    return free_on_host is None or 2 * on_host <= free_on_host


def replicas_agree(engine: Engine, batch: torch.Tensor, count: int) -> bool:
    """Whether replicas that compute at the same time give the bits that the engine gives alone.

    Args:
        engine: settled, and replicable.
        batch: (B, 3, H, W); each replica has its images in another order.
        count: of the replicas.
    """
    batches = [batch.roll(i, 0) for i in range(count)]
    expected = [engine.run(x) for x in batches]

    def agrees(i: int) -> bool:
        return all(
            same_bits(value, expected[i][name])
            for _ in range(_TRIES)
            for name, value in _run_on_own_stream(replicas[i], batches[i]).items()
        )

    with engine.replicas(count) as replicas, ThreadPoolExecutor(count) as threads:
        return all(threads.map(agrees, range(count)))


def _run_on_own_stream(replica: Engine, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    with replica.own_stream():
        values: dict[str, torch.Tensor] = replica.run(batch)
    return values
