"""The Hugging Face Hub: names of its models, its cache, and whether it can be reached."""

from __future__ import annotations

import re
import socket
import urllib.request
from collections.abc import Iterable
from urllib.parse import urlparse

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""owner/model of the Hugging Face Hub."""


def is_cached(repository: str | None, files: Iterable[str]) -> bool:
    """Return whether one of some files of a repository is in this machine's cache of the hub."""
    from huggingface_hub import try_to_load_from_cache

    if not repository:
        return False
    return any(isinstance(try_to_load_from_cache(repository, file), str) for file in files)


def resolve_hub() -> None:
    """Look up the address of the hub, unless a proxy does so.

    Without a network the client of the hub would repeat the same for most of a minute.

    Raises:
        OSError: there is none.
    """
    from huggingface_hub.constants import ENDPOINT

    if not urllib.request.getproxies():
        socket.getaddrinfo(urlparse(ENDPOINT).hostname, 443)
