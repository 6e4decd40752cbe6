"""Number of threads that suits the fits of a small matrix."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

SMALL_NUMBERS = 1 << 21
"""Number of values of a matrix up to which one thread is used: a product with it ends before a
second thread could help."""


@contextlib.contextmanager
def threads_for(numbers: int, device: torch.device) -> Iterator[None]:
    """Use one thread inside the block if a matrix on the CPU is small.

    With other busy processes, two threads that wait for each other after every small operation took
    60 times as long.
    """
    num_threads = torch.get_num_threads()
    if device.type == "cpu" and numbers <= SMALL_NUMBERS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
