"""Matrix products of fits, and the number of threads that suits them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

SMALL_NUMBERS = 1 << 21
"""Number of values of a matrix up to which one thread is used: a product with it ends before a
second thread could help."""


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply two matrices, by numpy's BLAS where it is faster than that of torch.

    torch comes with MKL, which took 1.2 to 1.4 times as long as numpy's OpenBLAS for these shapes
    on an AMD EPYC. Small products stay with torch, whose number of threads is set.
    """
    if a.device.type != "cpu" or max(a.numel(), b.numel()) <= SMALL_NUMBERS:
        return a @ b
    return torch.from_numpy(a.numpy() @ b.numpy())


@contextlib.contextmanager
def one_torch_thread(device: torch.device) -> Iterator[None]:
    """Use one thread of torch inside the block if a CPU computes and `product` multiplies.

    After each operation the threads of torch keep spinning for the next one, and take the CPUs
    from the threads of numpy's BLAS, and the other way round. Between products of (2048, 2048) and
    (2048, 100), that made a fit three times as long on two CPUs.

    Args:
        device: device that computes.
    """
    num_threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@contextlib.contextmanager
def threads_for(numbers: int, device: torch.device) -> Iterator[None]:
    """Use one thread inside the block if a matrix on the CPU is small.

    With other busy processes, two threads that wait for each other after every small operation took
    60 times as long.

    Args:
        numbers: number of values of the matrix.
        device: device that computes.
    """
    num_threads = torch.get_num_threads()
    if device.type == "cpu" and numbers <= SMALL_NUMBERS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
