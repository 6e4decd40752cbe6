"""Checks that several options share, and annotations of their types."""

from __future__ import annotations

from collections.abc import Sequence

from featx.errors import ConfigError, nearest

NAMES = "a text, a list of texts, or a mapping of texts"
"""Annotates an option whose type OmegaConf cannot hold: `layers: Annotated[Any, NAMES]`."""

MAY_BE_EMPTY = "an empty text is a value"
"""Annotates an option that may be an empty text; for all others that is an error."""


def check_choice(key: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless an option has one of its values."""
    if value not in choices:
        near = nearest(value, choices) if isinstance(value, str) else ""
        raise ConfigError(f"{key}={value}: expected one of {', '.join(choices)}.{near}")


def names_tuple(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return an option that is a text or a list of texts as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def column_name_problem(names: list[str]) -> str | None:
    """Return why columns cannot have these names in a store, or None if they can."""
    for name in names:
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            return f"a column cannot be called {name!r} in a store; give it a name without '/'."
        if names.count(name) > 1:
            return f"{name} is named twice."
    return None
