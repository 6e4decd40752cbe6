"""Requests to an object store that speaks S3.

All requests go through `request`, which succeeds or raises an OSError with an errno. Credentials,
region and endpoint come from where AWS tools look for them (AWS_* in the environment, ~/.aws, the
role of the machine); featx does not ask for, keep or print credentials.

If the server does not answer, readers and starting runs get an error at once; a run in progress
waits, see `s3_outage.waiting_limit`.
"""

from __future__ import annotations

import errno
import functools
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

A request is repeated if it gets no answer, or one that asks to retry.
"""

_MAX_PAUSE_S = 20.0
"""Longest pause in seconds between two attempts during an outage."""

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

    Attributes:
        size: size in bytes.
        etag: entity tag; changes with the content.
        modified: time of the last write in seconds since 1970, by the clock of the server.
    """

    size: int
    etag: str
    modified: float


def request(operation: str, **parameters: Any) -> dict[str, Any]:
    """Perform one request.

    Returns:
        the answer; its `Body` is read completely, as bytes.
    """
    s3 = client(os.getpid())  # raises an error with the name of a missing extra
    url = f"s3://{parameters['Bucket']}/{parameters.get('Key', parameters.get('Prefix', ''))}"
    since: float | None = None
    pause_s = 1.0
    while True:
        try:
            answer = _attempt_request(s3, operation, parameters, url)
        except ObjectStoreError as error:
            if error.errno != errno.EAGAIN:
                s3_outage.record_answer()
                raise
            since = time.monotonic() if since is None else since
            # The jitter keeps the workers of a cluster from repeating their requests all at once.
            pause = pause_s * random.uniform(0.5, 1.0)
            if not s3_outage.wait(error, since, pause):
                raise
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        except OSError:
            s3_outage.record_answer()
            raise
        else:
            s3_outage.record_answer()
            return answer


def _attempt_request(
    s3: Any, operation: str, parameters: dict[str, Any], url: str
) -> dict[str, Any]:
    """Perform a request with up to ATTEMPTS attempts."""
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
            answer: dict[str, Any] = getattr(s3, operation)(**parameters)
            try:
                if "Body" in answer:
                    answer["Body"] = answer["Body"].read()
            except (HTTPClientError, IncompleteReadError, OSError):
                # botocore repeats failed requests, but not those whose answer breaks off.
                if attempt < ATTEMPTS:
                    continue
                raise
            return answer
        except ClientError as error:
            described = _error_of(error.response, url)
            # botocore has already repeated requests that failed with status 500 or more.
            should_retry = error.response.get("Error", {}).get("Code") in _RETRYABLE
            if should_retry and attempt < ATTEMPTS:
                time.sleep(0.1 * 2**attempt)
                continue
            raise described from error
        except (BotoCoreError, OSError) as error:
            text = f"{type(error).__name__}: {error}".rstrip(".")
            if isinstance(error, NoCredentialsError):
                text += "; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            transient = (ConnectionError, HTTPClientError, IncompleteReadError, OSError)
            number = errno.EAGAIN if isinstance(error, transient) else errno.EIO
            raise ObjectStoreError(number, text, url) from error
    raise AssertionError("unreachable")


def _error_of(response: dict[str, Any], url: str) -> OSError:
    """OSError for an error response of the server."""
    details = response.get("Error", {})
    code = str(details.get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
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


@functools.lru_cache(maxsize=1)
def client(process: int) -> Any:
    """S3 client of botocore for a process; forked children do not share connections."""
    session = import_extra("botocore.session", "stores in s3://...", "the extra remote", "remote")
    from botocore.config import Config

    config = Config(
        retries={"mode": "standard", "max_attempts": ATTEMPTS},
        connect_timeout=10,
        read_timeout=60,
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
    """Read an object, or the bytes [start, stop) of it as far as they exist.

    Returns:
        the bytes, and the metadata of the whole object.
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
    """Metadata of an object."""
    return _metadata(request("head_object", Bucket=bucket, Key=key), "ContentLength")


def write(bucket: str, key: str, data: bytes | memoryview, **condition: str) -> None:
    """Create or replace an object, completely or not at all; it is committed when this returns."""
    request("put_object", Bucket=bucket, Key=key, Body=bytes(data), **condition)


def delete(bucket: str, key: str, **condition: str) -> None:
    """Delete an object, if it exists."""
    try:
        request("delete_object", Bucket=bucket, Key=key, **condition)
    except FileNotFoundError:
        return


def list_objects(
    bucket: str, prefix: str, max_keys: int | None = None
) -> Iterator[tuple[str, ObjectMetadata]]:
    """List the keys that begin with a prefix, in bytewise order.

    Yields:
        key and metadata of each object.
    """
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
    """Metadata from an answer; `size` names its entry with the size."""
    return ObjectMetadata(
        int(answer[size]), str(answer["ETag"]), answer["LastModified"].timestamp()
    )
