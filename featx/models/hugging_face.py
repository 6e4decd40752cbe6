"""The Hugging Face Hub: names of its models, and whether it can be reached."""

from __future__ import annotations

import re
import socket
import urllib.request
from urllib.parse import urlparse

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""owner/model of the Hugging Face Hub."""


def resolve_hub() -> None:
    """Look up the address of the hub, unless a proxy does so.

    Without a network the client of the hub would repeat the same for most of a minute.

    Raises:
        OSError: there is none.
    """
    from huggingface_hub.constants import ENDPOINT

    if not urllib.request.getproxies():
        socket.getaddrinfo(urlparse(ENDPOINT).hostname, 443)
