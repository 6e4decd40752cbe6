"""Requests to an object store that speaks S3.

All requests go through `request`, which succeeds or raises an OSError with an errno. Credentials,
region and endpoint come from where AWS tools look for them (AWS_* in the environment, ~/.aws, the
role of the machine); featx does not ask for, keep or print credentials.

If the server does not answer, readers and starting runs get an error after a few attempts; a run in
progress waits, see `s3_outage.waiting_limit`.

The client is botocore and not obstore (0.12.1): a process that was forked from one that used
obstore, as the workers of a DataLoader are, hangs at its first request without an error
(tests/store/test_object_reading.py:test_other_processes_read_too[fork]). It also reads no
credentials from ~/.aws, so that botocore would be needed besides.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from featx.base import import_extra
from featx.errors import ObjectStoreError
from featx.storage import s3_outage

CONNECTIONS = 16
"""Number of concurrent requests of one process."""

ATTEMPTS = 4
"""Number of attempts until the server counts as unavailable.

A request is repeated if it gets no answer, one that breaks off, or one that asks to retry.
"""

FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 20.0
"""Shortest and longest pause in seconds between two attempts; each is twice the one before."""

TIMEOUT_S, BEST_EFFORT_TIMEOUT_S = 60.0, 10.0
"""Seconds without a byte of an answer until an attempt fails; the second for requests inside
`s3_outage.without_waiting`."""

MAX_PUT_BYTES = 5 << 30
"""Largest object that one request writes."""

# Error codes of S3 by what they mean for the caller. HEAD requests have no body, so botocore
# reports their HTTP status instead of a code.
_NOT_FOUND = ("NoSuchKey", "404", "NotFound")
_PRECONDITION_FAILED = ("PreconditionFailed", "412")
_RETRYABLE = (
    "ConditionalRequestConflict", "OperationAborted", "SlowDown", "TooManyRequests", "Throttling",
    "ThrottlingException", "RequestLimitExceeded", "RequestTimeout", "409", "429", "503",
)  # fmt: skip
_ACCESS_DENIED = (
    "AccessDenied", "AllAccessDisabled", "InvalidAccessKeyId", "SignatureDoesNotMatch",
    "ExpiredToken", "InvalidToken",
)  # fmt: skip


class PreconditionFailedError(OSError):
    """The condition of a request does not hold: the name is taken, or the content has changed."""


class InvalidRangeError(OSError):
    """The requested range starts behind the end of the object."""


@dataclass(frozen=True)
class ObjectMetadata:
    """Metadata of an object at one moment.

    `etag` changes with the content; `modified` is the time of the last write in seconds since 1970,
    by the clock of the server.
    """

    size: int
    etag: str
    modified: float


def request(operation: str, **parameters: Any) -> dict[str, Any]:
    """Perform one request; the `Body` of the answer is read completely, as bytes."""
    timeout_s = TIMEOUT_S if s3_outage.may_wait() else BEST_EFFORT_TIMEOUT_S
    s3 = client(os.getpid(), timeout_s)  # raises an error with the name of a missing extra
    from botocore.exceptions import BotoCoreError, ClientError

    url = f"s3://{parameters['Bucket']}/{parameters.get('Key', parameters.get('Prefix', ''))}"
    since = 0.0
    for attempt in itertools.count():
        try:
            answer: dict[str, Any] = getattr(s3, operation)(**parameters)
            if "Body" in answer:
                answer["Body"] = answer["Body"].read()
        except (BotoCoreError, ClientError, OSError) as error:
            described = _error_of(error, url)
            try:
                if not isinstance(described, ObjectStoreError) or described.errno != errno.EAGAIN:
                    s3_outage.record_answer()
                    raise described from error
                since = since or time.monotonic()
                # The jitter keeps the workers of a cluster from repeating their requests at once.
                # 2**1024 is no float; a server that refuses at once is asked very often.
                longest_s = min(FIRST_PAUSE_S * 2 ** min(attempt, 99), MAX_PAUSE_S)
                pause_s = longest_s * random.uniform(0.5, 1)
                if attempt + 1 < ATTEMPTS and not s3_outage.is_stopped():
                    time.sleep(pause_s)
                elif not s3_outage.wait(described, since, pause_s):
                    raise described from error
            finally:
                del described  # a cycle with its traceback would keep the connection open
        else:
            s3_outage.record_answer()
            return answer
    raise AssertionError("unreachable")


def _error_of(error: Exception, url: str) -> OSError:
    """OSError for a request without an answer, or for an error response of the server.

    Its errno is EAGAIN if the same request may succeed later.
    """
    from botocore import exceptions

    if not isinstance(error, exceptions.ClientError):
        text = f"{type(error).__name__}: {error}".rstrip(".")
        if isinstance(error, exceptions.NoCredentialsError):
            text += "; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        transient = (
            exceptions.ConnectionError, exceptions.HTTPClientError, exceptions.IncompleteReadError,
            OSError,
        )  # fmt: skip
        return ObjectStoreError(
            errno.EAGAIN if isinstance(error, transient) else errno.EIO, text, url
        )
    details = error.response.get("Error", {})
    code = str(details.get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    text = f"{code}: {details.get('Message', '')}".rstrip(".: ")
    if code in _NOT_FOUND:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
    if code in _PRECONDITION_FAILED:
        return PreconditionFailedError(errno.EEXIST, text, url)
    if code == "InvalidRange":
        return InvalidRangeError(errno.EINVAL, text, url)
    if code in _RETRYABLE or status >= 500:
        return ObjectStoreError(errno.EAGAIN, text, url)
    if code in _ACCESS_DENIED or status in (401, 403):
        return ObjectStoreError(errno.EACCES, f"the server refuses it ({text})", url)
    if code == "NoSuchBucket":
        return ObjectStoreError(errno.ENODEV, f"there is no such bucket ({text})", url)
    return ObjectStoreError(errno.EIO, text, url)


@functools.lru_cache(maxsize=2)  # one for each timeout
def client(process: int, timeout_s: float) -> Any:
    """S3 client of botocore for a process; forked children do not share connections."""
    session = import_extra("botocore.session", "stores in s3://...", "the extra remote", "remote")
    from botocore.config import Config

    config = Config(
        retries={"mode": "standard", "total_max_attempts": 1},  # `request` repeats
        connect_timeout=10,
        read_timeout=timeout_s,
        max_pool_connections=CONNECTIONS,
    )
    return session.get_session().create_client("s3", config=config)


@functools.lru_cache(maxsize=1)
def threads(process: int) -> ThreadPoolExecutor:
    """Thread pool for concurrent requests of a process; threads do not survive a fork."""
    return ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="featx-s3")


def read(
    bucket: str, key: str, byte_range: tuple[int, int] | None = None, etag: str | None = None
) -> tuple[bytes, ObjectMetadata]:
    """Read an object, or its bytes [start, stop) as far as they exist.

    The metadata is that of the whole object.
    """
    conditions = {} if etag is None else {"IfMatch": etag}
    if byte_range is not None:
        conditions["Range"] = f"bytes={byte_range[0]}-{byte_range[1] - 1}"
    answer = request("get_object", Bucket=bucket, Key=key, **conditions)
    metadata = _metadata(answer, "ContentLength")
    # Some servers ignore the condition of a GET and return the bytes of the new object.
    if etag is not None and metadata.etag != etag:
        raise PreconditionFailedError(
            errno.EEXIST, f"it has the entity tag {metadata.etag}", f"s3://{bucket}/{key}"
        )
    if "ContentRange" in answer:
        total = int(answer["ContentRange"].rpartition("/")[2])
        metadata = ObjectMetadata(total, metadata.etag, metadata.modified)
    return answer["Body"], metadata


def head(bucket: str, key: str) -> ObjectMetadata:
    return _metadata(request("head_object", Bucket=bucket, Key=key), "ContentLength")


def write(bucket: str, key: str, data: bytes | memoryview, **condition: str) -> None:
    """Create or replace an object, completely or not at all; it is committed when this returns."""
    request("put_object", Bucket=bucket, Key=key, Body=bytes(data), **condition)


def delete(bucket: str, key: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        request("delete_object", Bucket=bucket, Key=key)


def list_objects(
    bucket: str, prefix: str, max_keys: int | None = None
) -> Iterator[tuple[str, ObjectMetadata]]:
    """Yield the keys that begin with a prefix, in bytewise order, with their metadata."""
    parameters: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix}
    if max_keys is not None:
        parameters["MaxKeys"] = max_keys
    while True:
        answer = request("list_objects_v2", **parameters)
        for details in answer.get("Contents", []):
            yield details["Key"], _metadata(details, "Size")
        if max_keys is not None or not answer.get("IsTruncated"):
            return
        parameters["ContinuationToken"] = answer["NextContinuationToken"]


def _metadata(answer: dict[str, Any], size: str) -> ObjectMetadata:
    return ObjectMetadata(
        int(answer[size]), str(answer["ETag"]), answer["LastModified"].timestamp()
    )
