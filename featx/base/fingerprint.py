"""Fingerprints: mappings of everything that changes values, hashed and compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def digest(values: Mapping[str, Any]) -> str:
    """sha256 of a mapping of JSON types, whatever the order of its keys."""
    return hashlib.sha256(_canonical(values).encode()).hexdigest()


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The keys in which two fingerprints differ, with both values, in order of their names.

    Empty exactly when the digests are equal; a key that one of them lacks shows as 'not there'.
    """
    pairs = [
        (key, before.get(key, "not there"), now.get(key, "not there"))
        for key in sorted(set(before) | set(now))
    ]
    return [
        (key, old, new)
        for key, old, new in pairs
        if key not in before or key not in now or _canonical(old) != _canonical(new)
    ]


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
