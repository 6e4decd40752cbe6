"""What several options check in the same way."""

from __future__ import annotations

from featx.errors import ConfigError


def check_choice(key: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value}: expected one of {', '.join(choices)}.")


def column_name_problem(names: list[str]) -> str | None:
    """Why columns cannot be called so in a store, or None."""
    for name in names:
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            return f"a column cannot be called {name!r} in a store; give it a name without '/'."
        if names.count(name) > 1:
            return f"{name} is named twice."
    return None
