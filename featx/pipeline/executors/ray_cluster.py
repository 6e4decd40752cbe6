"""Connection to a Ray cluster: its address, and whether its head answers."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

from featx.base import import_extra
from featx.errors import ConfigError, RunError

CONNECT_S = 10.0
"""Seconds to wait for an answer at executor.address."""

HEAD_LOST_S = 30.0
"""Seconds without an answer of the head until the run ends.

Ray ends the process of the driver after 60 s, without a chance to say what to do.
"""

_HEAD_CHECK_S = 5.0
"""Seconds between two checks that the head answers."""


def check_cluster(ray: Any, address: str) -> None:
    """Check that a cluster answers at executor.address, as Ray itself would retry for minutes."""
    try:
        _connect(_head_address(ray, address), CONNECT_S)
    except OSError as error:
        raise _no_cluster(address, error) from error


class HeadWatch:
    """Watch on the head of the cluster that Ray is connected to, by connections to its port."""

    def __init__(self, ray: Any, address: str | None) -> None:
        self._address = _address_in_use(ray, address)
        self._answered_at = self._checked_at = time.monotonic()

    def check(self) -> None:
        """Ask the head, at most every _HEAD_CHECK_S seconds."""
        if time.monotonic() - self._checked_at < _HEAD_CHECK_S:
            return
        try:
            _connect(self._address, _HEAD_CHECK_S)
            self._answered_at = time.monotonic()
        except OSError as error:
            lost_s = time.monotonic() - self._answered_at
            if lost_s >= HEAD_LOST_S:
                raise RunError(
                    f"the head of the Ray cluster at {self._address} has not answered for "
                    f"{lost_s:.0f} s ({error.strerror or error}). Nothing committed is lost; start "
                    "the cluster again and run the same command to resume."
                ) from error
        self._checked_at = time.monotonic()


def _connect(address: str, limit_s: float) -> None:
    """Open and close a connection to host:port; do nothing for a text of another form."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), limit_s).close()


def _head_address(ray: Any, address: str) -> str:
    """Host:port that Ray will connect to for executor.address; '' if that is not known."""
    if address != "auto":
        return address.removeprefix("ray://")
    try:
        # Ray has no public function that says which cluster `auto` is, without connecting to it.
        found = ray._private.services.get_ray_address_from_environment(address, None)
    except (AttributeError, TypeError):  # another version of Ray
        return ""
    return str(found).removeprefix("ray://")


def _address_in_use(ray: Any, address: str | None) -> str:
    """Host:port of the head that Ray is connected to; '' if that is not known."""
    if address is not None and address.startswith("ray://"):
        return address.removeprefix("ray://")
    try:
        return str(ray.get_runtime_context().gcs_address)
    except (AttributeError, RuntimeError):  # the caller has connected as a client
        return ""


@contextlib.contextmanager
def connected(ray: Any, address: str | None) -> Iterator[Any]:
    """Connect Ray to a cluster, or start one on this machine.

    A connection of the caller is used as it is and stays open.
    """
    is_ours = not ray.is_initialized()
    if is_ours:
        try:
            ray.init(
                address=address or "local",
                log_to_driver=False,
                logging_level=logging.ERROR,
                **({} if address else {"include_dashboard": False}),
            )
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            raise _no_cluster(address, error) from error
    try:
        yield ray
    finally:
        if is_ours:
            ray.shutdown()


def _no_cluster(address: str | None, error: Exception) -> ConfigError:
    """Error for an address at which no cluster answers, or only to those with a token."""
    given = f"executor.address={address}"
    cause: BaseException | None = error
    while cause is not None:
        # Ray repeats the reason in the text of another error.
        if "AuthenticationError" in f"{type(cause).__name__}: {cause}":
            break
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        return ConfigError(
            f"{given}: the Ray cluster there wants a token. Set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN_PATH to the file with the token of its head; featx stores and prints "
            "no token."
        )
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return ConfigError(
        f"{given}: no Ray cluster answers there ({reason}). Leave it out to start one on this "
        "machine."
    )


def ray_module() -> Any:
    """Import Ray."""
    return import_extra("ray", "executor=ray", "Ray", "ray")
