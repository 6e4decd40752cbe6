"""JSON files that describe a model, such as config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from featx.errors import WeightsError


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object.

    Raises:
        WeightsError: it does not, or it cannot be read.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no JSON
        raise WeightsError(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} holds a {type(value).__name__}; expected one JSON object.")
    return value


def find_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON file that holds one object; None if there is no such file or it holds none."""
    try:
        return read_json(path)
    except WeightsError:
        return None
