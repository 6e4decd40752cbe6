"""Values of overrides in the grammar of Hydra.

Hydra guesses the type of a value from its form: it reads `out=2024_01` as a number and rejects
`data.root=/a b`. Here the type of the option decides. A text is passed to Hydra in quotes with
every character as it was typed; all other values are left to Hydra.
"""

from __future__ import annotations

import re
from typing import get_args

from featx.config import Kind, Option, option_tree
from featx.errors import ConfigError

_QUOTED = re.compile(r""""(?:\\"|[^"])*"|'(?:\\'|[^'])*'""", re.DOTALL)
_SWEEP = re.compile(r"(?:choice|range|interval|glob|shuffle|sort|tag)\(.*\)", re.DOTALL)
_LIKE_A_NUMBER = re.compile(
    r"[\d+.-][\d_]*\.?[\d_]*(e[+-]?\d+)?|null|true|false|nan|[+-]?inf", re.IGNORECASE
)
_BRACKETS = {"[": "]", "{": "}", "(": ")"}

_SEVERAL_RUNS = "With -m in front of the options, each is a run of its own."


def format_group(key: str, value: str, is_multirun: bool) -> str:
    """Return the choice of a group: one name, or several with -m."""
    if not value or value == "null":
        raise ConfigError(f"{key}={value}: expected a name; leave {key} out for its default.")
    if not is_multirun and len(pieces := pieces_of(value)) > 1:
        raise ConfigError(
            f"{key}={value} names {len(pieces)} of which a run takes one. {_SEVERAL_RUNS}"
        )
    if is_multirun and _SWEEP.fullmatch(value):
        return f"{key}={value}"
    return f"{key}=" + ",".join(_format_text(piece) for piece in pieces_of(value))


def format_value(key: str, value: str, option: Option, is_multirun: bool) -> str:
    """Return the value of an option in the grammar of Hydra."""
    if value == "null" and not option.is_optional:
        raise ConfigError(
            f"{key}=null: expected a value; leave {key} out for its default."
            + (f" For the text null: '{key}=\"null\"'" if option.kind is Kind.TEXT else "")
        )
    if value == "null" or (is_multirun and _SWEEP.fullmatch(value)):
        return value
    if option.kind is Kind.TEXT and not is_multirun:
        if "," in value and set(value.split(",")) <= set(get_args(option.hint)):  # its choices
            raise ConfigError(f"{key}={value}: a run takes one value. {_SEVERAL_RUNS}")
        return _format_text(value)
    if option.kind in (Kind.TEXT, Kind.NAMES, Kind.TEXTS):
        pieces = pieces_of(value)
        if len(pieces) > 1 and not is_multirun:
            raise ConfigError(
                f"{key}={value}: a list is written in brackets: '{key}=[{value}]'. {_SEVERAL_RUNS}"
            )
        formatted = []
        for piece in pieces:
            if piece == "null" and option.is_optional:
                formatted.append(piece)
            elif option.kind is Kind.TEXT:
                formatted.append(_format_text(piece))
            elif option.kind is Kind.NAMES or piece.startswith("["):
                formatted.append(_format_names(key, piece))
            else:
                raise ConfigError(f"{key}={value}: expected a list: '{key}=[{value}]'.")
        return ",".join(formatted)
    if value == "None" and option.is_optional:
        return "null"  # as Python writes it; no other value of such an option is text
    if not is_multirun and "," in value and len(pieces_of(value)) > 1:
        raise ConfigError(f"{key}={value}: a run takes one value. {_SEVERAL_RUNS}")
    return value


def _format_names(key: str, value: str) -> str:
    """Return a text, or a list or mapping of texts, in the grammar of Hydra."""
    if value.startswith("[") and is_closed(value):
        elements = pieces_of(value[1:-1]) if value[1:-1].strip() else []
        if elements and not elements[-1].strip():
            elements.pop()  # [a,b,]
        return "[" + ",".join(_format_text(element.strip()) for element in elements) + "]"
    if value.startswith("{") and is_closed(value):
        entries = pieces_of(value[1:-1]) if value[1:-1].strip() else []
        return "{" + ",".join(_format_entry(key, entry.strip()) for entry in entries) + "}"
    return value if value[:1] in ("[", "{") else _format_text(value)


def _format_entry(key: str, entry: str) -> str:
    """Return an entry `name: value`; the last colon outside of brackets separates the two."""
    *names, value = pieces_of(entry, ":")
    if not names:
        raise ConfigError(f"{key}: expected name: value in {{{entry}}}.")
    name, value = unquoted(":".join(names).strip()), value.strip()

    # Hydra's keys cannot be quoted, and 1.10 is the number 1.1 to it.
    if _LIKE_A_NUMBER.fullmatch(name) and not (name.isdigit() and name == str(int(name))):
        raise ConfigError(
            f"{key}: {name} in a mapping is read as a number. Name it in a list instead: "
            f"'{key}=[{name}]'."
        )
    name = re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", name)

    # The value of a layer is null, a text, or options of `reduce` as a mapping.
    if value == "null":
        return f"{name}: null"
    if not value.startswith("{") or not is_closed(value):
        return f"{name}: {_format_text(value)}"
    entries = []
    for option_name, inner in named_values(key, value):
        if (option := option_tree().get(f"reduce.{option_name}")) is not None:
            inner = format_value(f"{key}: {option_name}", inner, option, False)
        entries.append(f"{option_name}: {inner}")
    return f"{name}: {{{','.join(entries)}}}"


def named_values(key: str, mapping: str) -> list[tuple[str, str]]:
    """Return the names and values of `{name: grid, size: 4}`, whose names contain no colon."""
    named = []
    for entry in pieces_of(mapping[1:-1]):
        name, colon, value = entry.partition(":")
        if not colon:
            raise ConfigError(f"{key}: expected name: value in {mapping}.")
        named.append((name.strip(), value.strip()))
    return named


def _format_text(value: str) -> str:
    """Return a text in quotes for Hydra, without the quotes that may have been typed around it."""
    return value if _QUOTED.fullmatch(value) else quoted(value)


def unquoted(text: str) -> str:
    return text[1:-1] if _QUOTED.fullmatch(text) else text


def quoted(text: str) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text=text, quote=Quote.double).with_quotes()


def is_closed(value: str) -> bool:
    """Return whether the first bracket of a value is closed by its last character."""
    depths = _depths(value)
    return depths[-1] == 0 and all(depths[:-1])


def pieces_of(value: str, separator: str = ",") -> list[str]:
    """Split a value at the commas, or another separator, outside of quotes and brackets."""
    pieces, start = [], 0
    for i, depth in enumerate(_depths(value)):
        if depth == 0 and value[i] == separator:
            pieces.append(value[start:i])
            start = i + 1
    return [*pieces, value[start:]]


def _depths(value: str) -> list[int]:
    """Return the number of brackets and quotes that are open after each character.

    A quote opens only at the beginning of an element: `it's` contains none.
    """
    depths: list[int] = []
    closing: list[str] = []
    previous = ","
    for i, char in enumerate(value):
        if closing and closing[-1] in "'\"":
            if char == closing[-1] and previous != "\\":
                closing.pop()
        elif char in "'\"" and previous in ",[{(:" and char in value[i + 1 :]:
            closing.append(char)
        elif char in _BRACKETS:
            closing.append(_BRACKETS[char])
        elif closing and char == closing[-1]:
            closing.pop()
        depths.append(len(closing))
        previous = previous if char.isspace() else char
    return depths
