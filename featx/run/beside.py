"""How many batches are computed side by side, and with how many threads each."""

from __future__ import annotations

from typing import Any

import torch

from featx.allocator import is_kept_in_threads
from featx.config import Config
from featx.machine import free_memory, num_cpus
from featx.types import Begun

MAX_REPLICAS = 4
"""Batches that are computed side by side on a CPU, at the most."""


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
