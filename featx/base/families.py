"""Families: the registry behind each option that selects a member, such as `data`.

The top of the package, `featx/__init__.py`, declares where each registry is. Packages below a
family, such as config, reach it by the name of its option and import nothing that lies above them.
The same holds for functions that methods of lower packages offer, such as `FeatureStore.show`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from featx.errors import FeatxError

if TYPE_CHECKING:
    from featx.base.registry import Member, Registry

_REGISTRIES: dict[str, str] = {}
"""Option -> 'module:attribute' of its registry."""

_FUNCTIONS: dict[str, str] = {}
"""Name -> 'module:attribute' of a function."""


def declare_families(registries: Mapping[str, str]) -> None:
    """Declare where the registries are; nothing is imported.

    Args:
        registries: option that selects a member, such as 'data' or 'export.format' -> registry as
            'module:attribute', such as 'featx.sources.registry:SOURCES'.
    """
    _REGISTRIES.update(registries)


def family_options() -> tuple[str, ...]:
    """Return the options that select a member of a family, such as 'data'."""
    return tuple(_REGISTRIES)


def family(option: str) -> Registry[Member]:
    """Return the registry of a family.

    Args:
        option: option that selects a member, such as 'data'.

    Raises:
        FeatxError: no family is declared for this option.
    """
    if option not in _REGISTRIES:
        raise FeatxError(f"no family is declared for {option}; known: {', '.join(_REGISTRIES)}.")
    registry: Registry[Member] = _import_name(_REGISTRIES[option])
    return registry


def declare_functions(functions: Mapping[str, str]) -> None:
    """Declare where functions are that lower packages offer; nothing is imported.

    Args:
        functions: name -> 'module:attribute'.
    """
    _FUNCTIONS.update(functions)


def declared_function(name: str) -> Callable[..., Any]:
    """Return a function that was declared."""
    function: Callable[..., Any] = _import_name(_FUNCTIONS[name])
    return function


def _import_name(place: str) -> Any:
    """Return what 'module:attribute' names."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)
