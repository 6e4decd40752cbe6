"""Requests to an object store that speaks S3: each one done, or an error that says why not.

Every request goes through `request`. Credentials, region and endpoint come from where AWS' tools
look for them (AWS_* in the environment, ~/.aws, the machine's role); featx asks for none, keeps
none, and prints none.
"""

from __future__ import annotations

import errno
import functools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from featx.errors import MissingExtraError, ObjectStoreError

CONNECTIONS = 16
"""Requests of one process that are under way at once."""

ATTEMPTS = 4
"""How often a request is made that gets no answer, or one that asks for patience."""

_MISSING = ("NoSuchKey", "404", "NotFound")
_TAKEN = ("PreconditionFailed", "412")
_WAIT = ("ConditionalRequestConflict", "OperationAborted", "SlowDown", "409", "503")
_REFUSED = (
    "AccessDenied", "AllAccessDisabled", "InvalidAccessKeyId", "SignatureDoesNotMatch",
    "ExpiredToken", "InvalidToken", "403", "401",
)  # fmt: skip


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


def request(operation: str, **parameters: Any) -> dict[str, Any]:
    """Make one request; what it gives back as `Body` is read to its end.

    Raises:
        FileNotFoundError: there is no such object.
        TakenError: its condition does not hold.
        EmptyError: it has no such range.
        ObjectStoreError: the server refuses it, is not to be reached, or has no such bucket.
    """
    own = client(os.getpid())  # which says what to install
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        HTTPClientError,
        IncompleteReadError,
        NoCredentialsError,
    )

    url = f"s3://{parameters['Bucket']}/{parameters.get('Key', parameters.get('Prefix', ''))}"
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
            meaning = _meaning(error.response.get("Error", {}), url)
            if meaning.errno == errno.EAGAIN and attempt < ATTEMPTS:
                time.sleep(0.1 * 2**attempt)
                continue
            raise meaning from error
        except (BotoCoreError, OSError) as error:
            text = f"{type(error).__name__}: {error}".rstrip(".")
            if isinstance(error, NoCredentialsError):
                text += "; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            raise ObjectStoreError(errno.EIO, text, url) from error
    raise AssertionError("unreachable")


def _meaning(found: dict[str, Any], url: str) -> OSError:
    """The OSError that stands for what a server answered."""
    code = str(found.get("Code", ""))
    text = f"{code}: {found.get('Message', '')}".rstrip(".: ")
    if code in _MISSING:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
    if code in _TAKEN:
        return TakenError(errno.EEXIST, text, url)
    if code == "InvalidRange":
        return EmptyError(errno.EINVAL, text, url)
    if code in _WAIT:
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
