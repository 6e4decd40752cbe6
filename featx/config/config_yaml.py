"""The YAML of saved configs: the text of `OmegaConf.to_yaml`, in a third of its time.

OmegaConf makes a node of every value before it writes or returns it. Only functions import this
module, because it imports PyYAML.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import yaml

_BOOLEANS = frozenset(
    text
    for word in ("y", "n", "yes", "no", "true", "false", "on", "off")
    for text in (word, word.capitalize(), word.upper())
)
"""Texts that YAML 1.1 reads as a truth value."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml is untyped
    """Reader of plain values and paths; a tag for anything else is an error.

    libyaml would be faster, but its composer overflows the stack of the process where a file of a
    stranger nests ten thousand lists.
    """


class _Dumper(yaml.Dumper):  # type: ignore[misc]  # yaml is untyped
    """Writer of plain values and paths."""


def load(text: str) -> dict[Any, Any]:
    """Read a mapping that `dump` wrote; an empty text is an empty mapping.

    Raises:
        yaml.YAMLError: the text is no YAML, or contains a tag that would make an object.
        ValueError: it is something else than a mapping, or nested too deeply.
    """
    try:
        values = yaml.load(text, Loader=_Loader)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(values, dict | None):
        raise ValueError(f"it is a {type(values).__name__}, and a mapping was expected")
    return values or {}


def dump(values: Mapping[str, Any]) -> str:
    """Return options as YAML, in their order."""
    text: str = yaml.dump(
        values, default_flow_style=False, allow_unicode=True, sort_keys=False, Dumper=_Dumper
    )
    return text


def _represent_text(dumper: yaml.Dumper, text: str) -> yaml.ScalarNode:
    """Return the node of a text, in quotes if a reader could take it for another type."""
    style = "'" if text in _BOOLEANS or _is_number(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _is_number(text: str) -> bool:
    for kind in (int, float):
        try:
            kind(text)
        except ValueError:
            continue
        return True
    return False


_Dumper.add_representer(str, _represent_text)
for _name in ("Path", "PosixPath", "WindowsPath"):
    _Loader.add_constructor(
        f"tag:yaml.org,2002:python/object/apply:pathlib.{_name}",
        lambda loader, node: pathlib.Path(*loader.construct_sequence(node)),
    )
