"""Fingerprints: mappings of all settings that change values, to be hashed and compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def digest(values: Mapping[str, object]) -> str:
    """SHA-256 (hex) of a mapping of JSON types, independent of the order of its keys."""
    return hashlib.sha256(_canonical(values).encode()).hexdigest()


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The entries in which two fingerprints differ, as (key, old value, new value), sorted by key.

    The result is empty exactly if the digests are equal. A missing entry has the value 'not there'.
    """
    return [
        (key, before.get(key, "not there"), now.get(key, "not there"))
        for key in sorted(set(before) | set(now))
        if key not in before or key not in now or _canonical(before[key]) != _canonical(now[key])
    ]


def _canonical(value: object) -> str:
    """JSON text that is equal for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
