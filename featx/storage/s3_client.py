"""Requests to an object store that speaks S3: each one done, or an error that says why not.

Every request goes through `request`. Credentials, region and endpoint come from where AWS' tools
look for them (AWS_* in the environment, ~/.aws, the machine's role); featx asks for none, keeps
none, and prints none.

A server that does not answer is an error at once for those who only read, and before a run has
begun. A run waits for it: see `patience`.
"""

from __future__ import annotations

import contextlib
import contextvars
import errno
import functools
import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from featx.errors import MissingExtraError, ObjectStoreError

CONNECTIONS = 16
"""Requests of one process that are under way at once."""

ATTEMPTS = 4
"""How often a request is made that gets no answer, or one that asks for patience, before that is
an outage."""

PATIENCE_S = 600.0
"""How long a run waits for a server that does not answer, or answers that it cannot now."""

_LONGEST_PAUSE_S = 20.0
_SLICE_S = 0.5
"""Waiting threads look this often whether the run was told to stop."""

_QUIET_S = 60.0
"""A server that comes and goes is reported no more often than this."""

_MISSING = ("NoSuchKey", "404", "NotFound")
_TAKEN = ("PreconditionFailed", "412")
_WAIT = ("ConditionalRequestConflict", "OperationAborted", "SlowDown", "409", "503")
_REFUSED = (
    "AccessDenied", "AllAccessDisabled", "InvalidAccessKeyId", "SignatureDoesNotMatch",
    "ExpiredToken", "InvalidToken", "403", "401",
)  # fmt: skip


logger = logging.getLogger(__name__)


class TakenError(OSError):
    """A request whose condition does not hold: the name is taken, or holds something else now."""


class EmptyError(OSError):
    """A part was asked for of an object that ends before it begins."""


@dataclass(frozen=True)
class Entry:
    """An object as it is at one moment.

    Attributes:
        size: in bytes.
        etag: changes with its content.
        modified: when it was written, in seconds since 1970, by the server's clock.
    """

    size: int
    etag: str
    modified: float


class _Outage:
    """Whether the server answers this process now; shared by all of its threads.

    Attributes:
        limit_s: seconds that a request waits for it; 0 outside of `patience`.
    """

    def __init__(self) -> None:
        self.limit_s = 0.0
        self._lock = threading.Lock()
        self._began: float | None = None
        self._reported: float | None = None
        self._is_reported = self._stopped = False

    def start(self, limit_s: float) -> None:
        """Requests wait so long from now on."""
        self.limit_s, self._stopped = limit_s, False

    def stop(self) -> None:
        """End every wait. A signal handler may call it, so it takes no lock."""
        self._stopped = True

    def answered(self) -> None:
        """A request got an answer."""
        if self._began is None:
            return
        with self._lock:
            began, self._began = self._began, None
            was_reported, self._is_reported = self._is_reported, False
        if began is not None and was_reported:
            logger.warning("the object store answers again after %.0f s", time.monotonic() - began)

    def wait(self, error: ObjectStoreError, since: float, pause_s: float) -> bool:
        """Pause before a request is made again.

        Args:
            error: what it failed with.
            since: when it first failed, by time.monotonic.
            pause_s: how long to pause at most.

        Returns:
            False where the limit is over, or the run was told to stop.
        """
        now = time.monotonic()
        with self._lock:
            if self._began is None:
                self._began = since
            left_s = min(since, self._began) + self.limit_s - now
            if left_s <= 0 or self._stopped:
                return False
            is_new = not self._is_reported and (
                self._reported is None or now - self._reported > _QUIET_S
            )
            if is_new:
                self._is_reported, self._reported = True, now
        if is_new:
            logger.warning(
                "%s The run waits until the object store answers, at most %.0f s; nothing "
                "committed is lost.", error, self.limit_s,
            )  # fmt: skip
        until = now + min(pause_s, left_s)
        while (left_s := until - time.monotonic()) > 0:
            if self._stopped:
                return False
            time.sleep(min(left_s, _SLICE_S))
        return True


_outage = _Outage()
_waits = contextvars.ContextVar("waits", default=True)


@contextlib.contextmanager
def patience(limit_s: float | None = None) -> Iterator[None]:
    """Have the requests of this process wait for a server that does not answer.

    For the time of a run, whose work would be lost otherwise. One line on the log says that it
    waits, and one that the server answers again.

    Args:
        limit_s: seconds from the first request that failed; None means PATIENCE_S.
    """
    before = _outage.limit_s
    _outage.start(PATIENCE_S if limit_s is None else limit_s)
    try:
        yield
    finally:
        _outage.limit_s = before


@contextlib.contextmanager
def without_patience() -> Iterator[None]:
    """Have the requests of this thread fail at once: what they write is of no use later."""
    token = _waits.set(False)
    try:
        yield
    finally:
        _waits.reset(token)


def stop_waiting() -> None:
    """Have all requests that wait for the server fail now; a signal handler may call it."""
    _outage.stop()


def request(operation: str, **parameters: Any) -> dict[str, Any]:
    """Make one request; what it gives back as `Body` is read to its end.

    Raises:
        FileNotFoundError: there is no such object.
        TakenError: its condition does not hold.
        EmptyError: it has no such range.
        ObjectStoreError: the server refuses it, has no such bucket, or does not answer, within
            `patience` for as long as that says.
    """
    own = client(os.getpid())  # which says what to install
    url = f"s3://{parameters['Bucket']}/{parameters.get('Key', parameters.get('Prefix', ''))}"
    since: float | None = None
    pause_s = 1.0
    while True:
        try:
            answer = _asked(own, operation, parameters, url)
        except ObjectStoreError as error:
            if error.errno != errno.EAGAIN:
                _outage.answered()
                raise
            since = time.monotonic() if since is None else since
            # Workers of a cluster meet the same outage, and should not come back in one moment.
            pause = pause_s * random.uniform(0.5, 1.0)
            if not (_outage.limit_s and _waits.get() and _outage.wait(error, since, pause)):
                raise
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except OSError:
            _outage.answered()
            raise
        else:
            _outage.answered()
            return answer


def _asked(own: Any, operation: str, parameters: dict[str, Any], url: str) -> dict[str, Any]:
    """The answer to a request that is made ATTEMPTS times.

    Raises:
        OSError: as `request`; with errno EAGAIN where the server may answer later.
    """
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        ConnectionError,
        HTTPClientError,
        IncompleteReadError,
        NoCredentialsError,
    )

    for attempt in range(1, ATTEMPTS + 1):
        try:
            answer: dict[str, Any] = getattr(own, operation)(**parameters)
            try:
                if "Body" in answer:
                    answer["Body"] = answer["Body"].read()
            except (HTTPClientError, IncompleteReadError, OSError):
                # botocore makes requests again by itself, but none whose answer breaks off.
                if attempt < ATTEMPTS:
                    continue
                raise
            return answer
        except ClientError as error:
            meaning = _meaning(error.response, url)
            # botocore has made those again that failed with 500 or more.
            asks = error.response.get("Error", {}).get("Code") in _WAIT
            if asks and attempt < ATTEMPTS:
                time.sleep(0.1 * 2**attempt)
                continue
            raise meaning from error
        except (BotoCoreError, OSError) as error:
            text = f"{type(error).__name__}: {error}".rstrip(".")
            if isinstance(error, NoCredentialsError):
                text += "; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            passing = (ConnectionError, HTTPClientError, IncompleteReadError, OSError)
            number = errno.EAGAIN if isinstance(error, passing) else errno.EIO
            raise ObjectStoreError(number, text, url) from error
    raise AssertionError("unreachable")


def _meaning(response: dict[str, Any], url: str) -> OSError:
    """The OSError that stands for what a server answered."""
    found = response.get("Error", {})
    code = str(found.get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    text = f"{code}: {found.get('Message', '')}".rstrip(".: ")
    if code in _MISSING:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
    if code in _TAKEN:
        return TakenError(errno.EEXIST, text, url)
    if code == "InvalidRange":
        return EmptyError(errno.EINVAL, text, url)
    if code in _WAIT or status >= 500:
        return ObjectStoreError(errno.EAGAIN, text, url)
    if code in _REFUSED:
        return ObjectStoreError(errno.EACCES, f"the server refuses it ({text})", url)
    if code == "NoSuchBucket":
        return ObjectStoreError(errno.ENODEV, f"there is no such bucket ({text})", url)
    return ObjectStoreError(errno.EIO, text, url)


@functools.lru_cache(maxsize=1)
def client(process: int) -> Any:
    """botocore's client of this process; connections do not survive a fork.

    Raises:
        MissingExtraError: botocore is not installed.
    """
    try:
        import botocore.session
        from botocore.config import Config
    except ImportError as error:
        raise MissingExtraError(
            'stores in s3://... need the extra remote: pip install "featx[remote]".'
        ) from error
    config = Config(
        retries={"mode": "standard", "max_attempts": ATTEMPTS},
        connect_timeout=10,
        read_timeout=60,
        max_pool_connections=CONNECTIONS,
    )
    return botocore.session.get_session().create_client("s3", config=config)


@functools.lru_cache(maxsize=1)
def threads(process: int) -> ThreadPoolExecutor:
    """The threads of this process that wait for answers."""
    return ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="featx-s3")


def read(bucket: str, key: str, span: tuple[int, int] | None = None, etag: str | None = None) -> (
    tuple[bytes, Entry]
):  # fmt: skip
    """The bytes of an object, or those of [start, stop) as far as it goes, and what it is.

    Args:
        bucket: its name.
        key: of the object.
        span: start and stop, which is more than start.
        etag: the object must still have; None takes it as it is.
    """
    conditions = {} if etag is None else {"IfMatch": etag}
    if span is not None:
        conditions["Range"] = f"bytes={span[0]}-{span[1] - 1}"
    answer = request("get_object", Bucket=bucket, Key=key, **conditions)
    entry = _entry(answer, "ContentLength")
    if "ContentRange" in answer:
        total = int(answer["ContentRange"].rpartition("/")[2])
        entry = Entry(total, entry.etag, entry.modified)
    return answer["Body"], entry


def look(bucket: str, key: str) -> Entry:
    """What an object is."""
    return _entry(request("head_object", Bucket=bucket, Key=key), "ContentLength")


def write(bucket: str, key: str, data: bytes | memoryview, **condition: str) -> None:
    """Put an object in place, whole or not at all; it is durable then.

    Args:
        bucket: its name.
        key: of the object.
        data: at most 5 GiB.
        condition: IfNoneMatch="*", where there must be none yet, or IfMatch=etag.
    """
    request("put_object", Bucket=bucket, Key=key, Body=bytes(data), **condition)


def delete(bucket: str, key: str, **condition: str) -> None:
    """Delete an object, if it is there.

    Args:
        bucket: its name.
        key: of the object.
        condition: IfMatch=etag.
    """
    try:
        request("delete_object", Bucket=bucket, Key=key, **condition)
    except FileNotFoundError:
        return


def copy(bucket: str, key: str, target: str, etag: str) -> None:
    """Copy an object within its bucket, as long as it has this etag."""
    source = {"Bucket": bucket, "Key": key}
    request("copy_object", Bucket=bucket, Key=target, CopySource=source, CopySourceIfMatch=etag)


def names(bucket: str, prefix: str, most: int | None = None) -> Iterator[tuple[str, Entry]]:
    """The keys that begin with `prefix` in bytewise order, at most so many, and what they are."""
    parameters: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix}
    if most is not None:
        parameters["MaxKeys"] = most
    while True:
        answer = request("list_objects_v2", **parameters)
        for found in answer.get("Contents", []):
            yield found["Key"], _entry(found, "Size")
        if most is not None or not answer.get("IsTruncated"):
            return
        parameters["ContinuationToken"] = answer["NextContinuationToken"]


def _entry(found: dict[str, Any], size: str) -> Entry:
    return Entry(int(found[size]), str(found["ETag"]), found["LastModified"].timestamp())
