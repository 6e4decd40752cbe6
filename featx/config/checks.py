"""Checks that several options share, and annotations of their types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from featx.errors import ConfigError, nearest

NAMES = "a text, a list of texts, or a mapping of texts"
"""Annotates an option whose type OmegaConf cannot hold: `layers: Annotated[Any, NAMES]`."""

MAY_BE_EMPTY = "an empty text is a value"
"""Annotates an option that may be an empty text; for all others that is an error."""


_ONLY_WITH = "only_with"
"""Key of the metadata of a dataclass field that holds its `OnlyWith`."""


@dataclass(frozen=True)
class OnlyWith:
    """Condition under which an option has an effect.

    Attributes:
        option: another option of the same group.
        values: values of it, one of which it must have or contain; empty for any value.
    """

    option: str
    values: tuple[str, ...]

    def holds(self, options: Any) -> bool:
        """Return whether the condition holds for the options of the group."""
        given = getattr(options, self.option)
        if not self.values:
            return given not in (None, "", (), [])
        return bool(set(self.values) & set(names_tuple(given)))


def only_with(option: str, *values: str) -> dict[str, OnlyWith]:
    """Return the metadata of an option that has an effect under an `OnlyWith` only.

    `folds: int | None = field(default=None, metadata=only_with("split", "kfold"))`
    """
    return {_ONLY_WITH: OnlyWith(option, values)}


def check_effects(group: str, options: Any) -> None:
    """Refuse options that differ from their defaults and have no effect.

    Args:
        group: name of the group, for the message.
        options: its dataclass, some of whose fields have the metadata of `only_with`.

    Raises:
        ConfigError: there is one.
    """
    for each in fields(options):
        condition = each.metadata.get(_ONLY_WITH)
        if condition is None or getattr(options, each.name) == each.default:
            continue
        if not condition.holds(options):
            values = f"={' or '.join(condition.values)}" if condition.values else ""
            raise ConfigError(
                f"{group}.{each.name} has an effect with {group}.{condition.option}{values} only."
            )


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
