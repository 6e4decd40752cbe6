"""Faster imports of a command: without garbage collection, and without triton.

Almost everything that a package defines lives until the process ends. The cyclic garbage collector
looks at it again and again while it is made, which is a fifth of the time of importing torch.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from types import ModuleType

from featx.base.module_loaders import use_loader

_TORCH = "torch"
_FLOP_COUNTER = "torch.utils.flop_counter"
_TRITON = "triton.runtime.jit"


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Leave the garbage collector off inside the block; it never looks at older objects again.

    For the process of a command only, whose objects at this time stay anyway: garbage in reference
    cycles that exists when the block ends is never freed.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def speed_up_imports() -> None:
    """Import torch without garbage collection, and its formulas of FLOPs without triton.

    To be called by a program before it starts threads and before it imports torch.
    """
    use_loader(_PausedLoader, [_TORCH])
    use_loader(_WithoutTriton, [_FLOP_COUNTER])


class _PausedLoader(SourceFileLoader):
    """Executes a module, and so everything that it imports, without garbage collection."""

    def exec_module(self, module: ModuleType) -> None:
        with paused_collection():
            super().exec_module(module)


class _WithoutTriton(SourceFileLoader):
    """Executes a module that needs the type of triton's kernels only to recognise them.

    No kernel exists while triton is not imported, so a type without instances is as good.
    """

    def exec_module(self, module: ModuleType) -> None:
        if _TRITON in sys.modules:
            super().exec_module(module)
            return
        stand_in = ModuleType(_TRITON)
        stand_in.JITFunction = type("JITFunction", (), {})  # type: ignore[attr-defined]
        sys.modules[_TRITON] = stand_in
        try:
            super().exec_module(module)
        finally:
            if sys.modules.get(_TRITON) is stand_in:
                del sys.modules[_TRITON]
