"""Fingerprints: mappings of everything that changes values, hashed and compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def digest(values: Mapping[str, Any]) -> str:
    """sha256 of a mapping of JSON types, whatever the order of its keys."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The keys in which two fingerprints differ, with both values, in order of their names."""
    keys = sorted(set(before) | set(now))
    return [(key, before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)]
