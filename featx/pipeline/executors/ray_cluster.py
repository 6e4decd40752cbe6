"""Connection to a Ray cluster: its address, whether its head answers, and what Ray prints."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from featx.base import import_extra
from featx.errors import ConfigError, RunError

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
"""Seconds to wait for an answer at executor.address."""

HEAD_LOST_S = 30.0
"""Seconds without an answer of the head until the run ends.

Ray ends the process of the driver after 60 s, without a chance to say what to do.
"""

_HEAD_CHECK_S = 5.0
"""Seconds between two checks that the head answers."""


_LOG_LINE = re.compile(rb"\[\d{4}-\d\d-\d\d [\d:,]+ [IWE] \d+ \d+\] ")
"""Start of a log line of Ray's C++ code, below the level FATAL."""


def check_cluster(ray: Any, address: str) -> None:
    """Check that a cluster answers at an address, as Ray itself would retry for minutes.

    Args:
        ray: the module.
        address: option executor.address.

    Raises:
        ConfigError: no cluster answers there.
    """
    try:
        _connect(_head_address(ray, address), CONNECT_S)
    except OSError as error:
        raise _no_cluster(address, error) from error


class HeadWatch:
    """Watch on the head of a Ray cluster, by connections to its port.

    Args:
        address: host:port of the head; the empty text is not watched.
        clock: returns seconds, as time.monotonic does.
    """

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._clock = clock
        self._answered_at = self._checked_at = clock()

    def check(self) -> None:
        """Ask the head, at most every _HEAD_CHECK_S seconds.

        Raises:
            RunError: it has not answered for HEAD_LOST_S seconds.
        """
        if self._clock() - self._checked_at < _HEAD_CHECK_S:
            return
        try:
            _connect(self._address, _HEAD_CHECK_S)
        except OSError as error:
            lost_s = self._clock() - self._answered_at
            if lost_s >= HEAD_LOST_S:
                raise RunError(
                    f"the head of the Ray cluster at {self._address} has not answered for "
                    f"{lost_s:.0f} s ({error.strerror or error}). Nothing committed is lost; start "
                    "the cluster again and run the same command to resume."
                ) from error
        else:
            self._answered_at = self._clock()
        self._checked_at = self._clock()


def _connect(address: str, limit_s: float) -> None:
    """Open and close a connection to host:port; do nothing for a text of another form.

    Raises:
        OSError: no process accepts connections at this address.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), limit_s).close()


def _head_address(ray: Any, address: str) -> str:
    """Host:port that Ray will connect to for executor.address; '' if that is not known.

    Raises:
        ConnectionError: `auto` finds no cluster on this machine.
    """
    if address != "auto":
        return address.removeprefix("ray://")
    try:
        # Ray has no public function that says which cluster `auto` is, without connecting to it.
        found = ray._private.services.get_ray_address_from_environment(address, None)
    except (AttributeError, TypeError):  # another version of Ray
        return ""
    return str(found).removeprefix("ray://")


def address_in_use(ray: Any, address: str | None) -> str:
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

    Args:
        ray: the module.
        address: option executor.address; None starts a cluster.

    Raises:
        ConfigError: no cluster answers there.
    """
    is_ours = not ray.is_initialized()
    if is_ours:
        try:
            with _without_log_lines():
                ray.init(
                    address=address or "local",
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    **({} if address else {"include_dashboard": False}),
                )
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            raise _no_cluster(address, error) from error
    with _without_notices(ray) if is_ours else contextlib.nullcontext():
        try:
            yield ray
        finally:
            if is_ours:
                ray.shutdown()


@contextlib.contextmanager
def _without_log_lines() -> Iterator[None]:
    """Keep the log lines of Ray's C++ code out of the terminal as long as the block runs.

    Until Ray is connected, this code writes to file descriptor 2, whatever the logging level is.
    All other lines are printed when the block ends.
    """
    sys.stderr.flush()
    terminal = os.dup(2)
    try:
        with tempfile.TemporaryFile() as kept:
            os.dup2(kept.fileno(), 2)
            try:
                yield
            finally:
                sys.stderr.flush()
                os.dup2(terminal, 2)
                kept.seek(0)
                lines = kept.read().splitlines(keepends=True)
                os.write(2, b"".join(line for line in lines if not _LOG_LINE.match(line)))
    finally:
        os.close(terminal)


@contextlib.contextmanager
def _without_notices(ray: Any) -> Iterator[None]:
    """Keep notices about nodes of the cluster out of the result on stdout.

    Ray prints there that a node has died, whatever its logging options are (Ray 2.60,
    `listen_error_messages`). The driver reports the actors that died with it. The notices go to the
    logger of this module instead.
    """
    try:
        worker = ray._private.worker
        printed = worker.print_to_stdstream
    except AttributeError:  # another version of Ray
        yield
        return

    def log(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        logger.debug("Ray: %s", "\n".join(data["lines"]))

    worker.print_to_stdstream = log
    try:
        yield
    finally:
        worker.print_to_stdstream = printed


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
    """Import Ray.

    Raises:
        MissingExtraError: Ray is not installed.
    """
    return import_extra("ray", "executor=ray", "Ray", "ray")
