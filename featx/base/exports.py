"""What packages export, imported when it is first used: their own names, families and functions."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from featx.errors import FeatxError, nearest

if TYPE_CHECKING:
    from featx.base.registry import Member, Registry


def lazy_exports(
    package: str, file: str
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for the `__init__.py` of a package.

    The arguments are its `__name__` and `__file__`; the stub is in the same folder.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    module_of = {
        alias.name: f"{package}.{node.module or alias.name}"
        for node in imports
        for alias in node.names
    }
    modules = {alias.name for node in imports if node.module is None for alias in node.names}
    names = sorted(module_of)

    def get(name: str) -> object:
        if name not in module_of:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}.{nearest(name, names)}"
            )
        module = importlib.import_module(module_of[name])
        return module if name in modules else getattr(module, name)

    return get, lambda: names, names


_REGISTRIES: dict[str, str] = {}
"""Option -> 'module:attribute' of its registry."""

_FUNCTIONS: dict[str, str] = {}
"""Name -> 'module:attribute' of a function."""


def declare(registries: Mapping[str, str], functions: Mapping[str, str]) -> None:
    """Declare where the registries of families, and functions of higher packages, are; nothing is
    imported.

    An option that selects a member, such as 'data' or 'export.format', stands for
    'module:attribute', such as 'featx.sources.registry:SOURCES'; so does the name of a function.
    """
    _REGISTRIES.update(registries)
    _FUNCTIONS.update(functions)


def family_options() -> tuple[str, ...]:
    """Return the options that select a member of a family, such as 'data'."""
    return tuple(_REGISTRIES)


def family(option: str) -> Registry[Member]:
    """Return the registry of the family whose option, such as 'data', selects a member."""
    if option not in _REGISTRIES:
        raise FeatxError(f"no family is declared for {option}; known: {', '.join(_REGISTRIES)}.")
    registry: Registry[Member] = resolve_name(_REGISTRIES[option])
    return registry


def declared_function(name: str) -> Callable[..., object]:
    """Return a function that was declared."""
    function: Callable[..., object] = resolve_name(_FUNCTIONS[name])
    return function
