"""Types of options, taken from their fields: text, a list of texts, a group, a number."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum, auto
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from featx.config.all_options import all_options
from featx.config.checks import MAY_BE_EMPTY, NAMES


class Kind(Enum):
    """Kind of the value of an option."""

    TEXT = auto()
    """One text, such as a path: `str`, `str | None`."""
    TEXTS = auto()
    """A list of texts: `list[str] | None`."""
    NAMES = auto()
    """A text, a list of texts, or a mapping of texts: annotated with `NAMES`."""
    MAPPING = auto()
    """A mapping with keys that no field lists: `dict[str, Any]`."""
    GROUP = auto()
    """A group of options that is chosen by its name: `model=resnet50`."""
    SECTION = auto()
    """A group of options without a name of its own: `verify`."""
    OTHER = auto()
    """A number, a truth value, a choice of both, or a list of numbers."""


@dataclass(frozen=True)
class OptionType:
    """The type of one option.

    Attributes:
        kind: kind of its value.
        is_optional: whether its value may be null.
        may_be_empty: whether its value may be an empty text.
    """

    kind: Kind
    is_optional: bool = False
    may_be_empty: bool = False


@functools.cache
def option_types() -> Mapping[str, OptionType]:
    """Return the type of every option by its dotted name: 'out', 'model', 'model.weights', ..."""
    return types.MappingProxyType(_types_of(all_options(), ""))


def _types_of(options: Any, prefix: str) -> dict[str, OptionType]:
    """Return the types of the fields of a dataclass instance, nested ones included."""
    hints = get_type_hints(type(options), include_extras=True)
    option_types: dict[str, OptionType] = {}
    for f in fields(options):
        name, value = prefix + f.name, getattr(options, f.name)
        if is_dataclass(value):
            is_named = any(inner.name == "name" for inner in fields(value))
            option_types[name] = OptionType(Kind.GROUP if is_named else Kind.SECTION)
            option_types |= _types_of(value, f"{name}.")
        else:
            option_types[name] = _type_of(hints[f.name])
    return option_types


def _type_of(hint: Any) -> OptionType:
    if get_origin(hint) is Annotated:
        if NAMES in hint.__metadata__:
            return OptionType(Kind.NAMES, is_optional=True)
        return replace(_type_of(get_args(hint)[0]), may_be_empty=MAY_BE_EMPTY in hint.__metadata__)
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    is_optional = type(None) in options or hint is Any
    options = tuple(option for option in options if option is not type(None))
    if options == (str,):
        return OptionType(Kind.TEXT, is_optional)
    if options == (list[str],):
        return OptionType(Kind.TEXTS, is_optional)
    if get_origin(options[0]) is dict:
        return OptionType(Kind.MAPPING, is_optional)
    return OptionType(Kind.OTHER, is_optional)
