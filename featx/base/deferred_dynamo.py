"""Defers the import of torch._dynamo until something is compiled; it takes about two seconds.

torchvision and timm import it for functions that a forward pass of a classification model never
calls: `torchvision.ops.roi_align` takes a test for supported devices from it, and timm decorates a
method with `torch.compiler.disable`, which imports it at once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from featx.base.module_loaders import use_loader

_PACKAGES = ("timm", "torchvision")
_USED = "torch._dynamo.utils"


def defer_dynamo() -> None:
    """Let timm and torchvision, when they are imported, leave torch._dynamo to its first use.

    To be called by a program, before it starts threads and before it imports these packages:
    while they are imported, a stand-in for the module is in `sys.modules`, which other threads
    would find as well.
    """
    use_loader(_Loader, _PACKAGES)


class _Loader(SourceFileLoader):
    """Executes a package, and so everything that it imports, with the stand-ins in place."""

    def exec_module(self, module: ModuleType) -> None:
        with _stand_ins():
            super().exec_module(module)


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Replace what the packages use of torch._dynamo by functions that import it when called."""
    import torch

    def is_compile_supported(*args: Any, **kwargs: Any) -> Any:
        from torch._dynamo import utils

        return utils.is_compile_supported(*args, **kwargs)

    if _USED in sys.modules:
        yield
        return
    stand_in = ModuleType(_USED)
    stand_in.is_compile_supported = is_compile_supported  # type: ignore[attr-defined]
    disable = torch.compiler.disable

    def disabled(fn: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Decorate a function as torch.compiler.disable does, at its first call."""
        if not callable(fn) or isinstance(fn, type) or args or kwargs:
            return disable(fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        return _at_first_call(fn, disable)

    sys.modules[_USED] = stand_in
    torch.compiler.disable = disabled
    try:
        yield
    finally:
        torch.compiler.disable = disable
        if sys.modules.get(_USED) is stand_in:
            del sys.modules[_USED]


def _at_first_call(fn: Callable[..., Any], decorate: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that decorates `fn` when it is called first."""

    decorated: Callable[..., Any] | None = None

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal decorated
        decorated = decorated or decorate(fn)
        return decorated(*args, **kwargs)

    return call
