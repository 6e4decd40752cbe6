"""Faster imports of a command: without garbage collection, and torch._dynamo at its first use.

Almost everything that a package defines lives until the process ends. The cyclic garbage collector
looks at it again and again while it is made, and once more at the end of the process: importing
torch takes 1.92 s of processor time with it and 1.35 s without (two cores, 26 November 2026).

torch._dynamo takes about two seconds. torchvision and timm import it for functions that a forward
pass of a classification model never calls: `torchvision.ops.roi_align` takes a test for supported
devices from it, and timm decorates a method with `torch.compiler.disable`, which imports it at
once.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_DYNAMO_UTILS = "torch._dynamo.utils"


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
    """Import torch, torchvision and timm in this way from now on.

    To be called by a program, before it starts threads and before it imports these packages: while
    they are imported, a stand-in for a module is in `sys.modules`, which other threads would find
    as well.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds modules as Python does, and gives three packages another loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a package with another loader; None for all other modules."""
        if fullname not in _CONTEXTS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Executes a package, and so everything that it imports, in its context."""

    def exec_module(self, module: ModuleType) -> None:
        with _CONTEXTS[self.name]():
            super().exec_module(module)


@contextlib.contextmanager
def _deferred_dynamo() -> Iterator[None]:
    """Replace what packages use of torch._dynamo by functions that import it when called."""
    import torch

    def is_compile_supported(*args: Any, **kwargs: Any) -> object:
        from torch._dynamo import utils

        return utils.is_compile_supported(*args, **kwargs)

    if _DYNAMO_UTILS in sys.modules:
        yield
        return
    stand_in = ModuleType(_DYNAMO_UTILS)
    stand_in.is_compile_supported = is_compile_supported  # type: ignore[attr-defined]
    disable = torch.compiler.disable

    def disabled(fn: object = None, *args: object, **kwargs: object) -> object:
        """Decorate a function as torch.compiler.disable does, at its first call."""
        if not callable(fn) or isinstance(fn, type) or args or kwargs:
            return disable(fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        return _at_first_call(fn, disable)

    sys.modules[_DYNAMO_UTILS] = stand_in
    torch.compiler.disable = disabled
    try:
        yield
    finally:
        torch.compiler.disable = disable
        if sys.modules.get(_DYNAMO_UTILS) is stand_in:
            del sys.modules[_DYNAMO_UTILS]


_CONTEXTS = {"torch": paused_collection, "torchvision": _deferred_dynamo, "timm": _deferred_dynamo}
"""Package -> context in which it is executed."""


def _at_first_call(fn: Callable[P, R], decorate: Callable[..., Callable[P, R]]) -> Callable[P, R]:
    """Return a function that decorates `fn` when it is called first."""
    decorated: Callable[P, R] | None = None

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal decorated
        decorated = decorated or decorate(fn)
        return decorated(*args, **kwargs)

    return call
