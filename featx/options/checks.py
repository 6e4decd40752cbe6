"""What several options check in the same way."""

from __future__ import annotations

from featx.errors import ConfigError


def check_choice(key: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value}: expected one of {', '.join(choices)}.")
