"""Import of single modules by a loader that changes how they are executed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType


def use_loader(loader: type[SourceFileLoader], modules: Iterable[str]) -> None:
    """Execute modules by a loader when they are imported, for the rest of the process.

    A module that is imported already, or that is not a Python source file, is left as it is.

    Args:
        loader: class of the loader.
        modules: full names of the modules.
    """
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.loaders.update(dict.fromkeys(modules, loader))


class _Finder(MetaPathFinder):
    """Finds modules as Python does, and gives some of them another loader.

    Attributes:
        loaders: class of the loader of each module, by full name.
    """

    def __init__(self) -> None:
        self.loaders: dict[str, type[SourceFileLoader]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module with another loader; None for all other modules."""
        if fullname not in self.loaders:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = self.loaders[fullname](fullname, spec.loader.path)
        return spec


_FINDER = _Finder()
