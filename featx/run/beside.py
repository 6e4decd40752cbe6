"""How many batches are computed side by side, and on a CPU with how many threads each.

On CUDA a batch has a stream of its own, so it is copied to the device and back while another is
computed, and what Python takes between two operations is not lost.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from featx.allocator import is_kept_in_threads
from featx.config import Config
from featx.machine import free_memory, num_cpus
from featx.types import Begun

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


def threads_of_probe(cpus: int | None, begun: Begun | None) -> int | None:
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


def threads_and_replicas(
    cpus: int | None, engine: Any, room: int, begun: Begun | None
) -> tuple[int | None, int, dict[str, str]]:
    """Threads that compute a batch, how many batches side by side, and a line on the choice.

    Two threads that share a batch wait for each other after every operation, above all while others
    decode; two that have a batch each do not. The last bits of a row depend on the threads of its
    batch, so a store that is gone on with keeps their number.

    Args:
        cpus: that compute; None where another device does.
        engine: settled.
        room: batches at once, at the most.
        begun: what is gone on with.

    Returns:
        None for the threads where another device computes.
    """
    if cpus is None:
        return None, 1, {}
    if not engine.replicable:
        room = 1
    here = -(-cpus // room) if is_kept_in_threads() else cpus
    threads = int(begun.resolved.get("threads", here)) if begun else here
    replicas = max(1, min(room, cpus // threads))
    text = f"{threads}" + (f", and {replicas} batches side by side" if replicas > 1 else "")
    if threads != here:
        assert begun is not None
        text += f" (as {begun.what} begun; here it would be {here}, and other last bits)"
    return threads, replicas, {"threads": text}


def streams(engine: Any, batch: torch.Tensor) -> tuple[int, dict[str, str]]:
    """How many batches are on their way at once on CUDA, and a line on the choice.

    Args:
        engine: settled.
        batch: (B, 3, H, W), as large as those of the run.
    """
    device = engine.device
    if device.type != "cuda":
        return 1, {}
    if not engine.replicable:
        return 1, {"streams": "1"}
    engine.run(batch)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    engine.run(batch)
    each = torch.cuda.max_memory_allocated(device) - before
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - before
    if 2 * CUDA_STREAMS * each > free:  # half of what is free stays free
        return 1, {"streams": "1 (memory does not suffice for more batches at once)"}
    if not same_beside(engine, batch, CUDA_STREAMS):
        return 1, {"streams": "1 (beside each other batches come to other last bits here)"}
    return CUDA_STREAMS, {"streams": f"{CUDA_STREAMS}, a batch in each"}


def same_beside(engine: Any, batch: torch.Tensor, count: int) -> bool:
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
            torch.equal(_bits(value), _bits(expected[i][name]))
            for _ in range(_TRIES)
            for name, value in _run_on_own_stream(replicas[i], batches[i]).items()
        )

    with engine.replicas(count) as replicas, ThreadPoolExecutor(count) as threads:
        return all(threads.map(agrees, range(count)))


def _run_on_own_stream(replica: Any, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    with replica.own_stream():
        values: dict[str, torch.Tensor] = replica.run(batch)
    return values


def _bits(value: torch.Tensor) -> torch.Tensor:
    """As bytes, of which NaN is equal to NaN."""
    return value.contiguous().view(torch.uint8)
