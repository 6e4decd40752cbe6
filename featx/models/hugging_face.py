"""The Hugging Face Hub: names of its models, its cache, its JSON files, and whether it is there."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from featx.errors import WeightsError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""owner/model of the Hugging Face Hub."""


def is_cached(repository: str, files: Iterable[str]) -> bool:
    """Return whether one of some files of a repository is in this machine's cache of the hub."""
    from huggingface_hub import try_to_load_from_cache

    return any(isinstance(try_to_load_from_cache(repository, file), str) for file in files)


def resolve_hub() -> None:
    """Look up the address of the hub, unless a proxy does so; an OSError if there is no network.

    Without a network the client of the hub would repeat the same for most of a minute.
    """
    from huggingface_hub.constants import ENDPOINT

    if not urllib.request.getproxies():
        socket.getaddrinfo(urlparse(ENDPOINT).hostname, 443)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object, such as config.json."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no JSON
        raise WeightsError(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} holds a {type(value).__name__}; expected one JSON object.")
    return value


def find_json(path: Path) -> dict[str, object] | None:
    """Read a JSON file that holds one object; None if there is no such file or it holds none."""
    try:
        return read_json(path)
    except WeightsError:
        return None
