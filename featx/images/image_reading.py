"""Reading of encoded images from a source, with retries."""

from __future__ import annotations

import time

from featx.base import name_text
from featx.errors import DataError, ObjectStoreError, RunError
from featx.types import Source

RETRY_WAITS_S = (0.1, 0.5, 2.0)
"""Seconds to wait before each repeated attempt to read an image."""


def read_image(source: Source, key: bytes) -> bytes:
    """Read the encoded bytes of the image of a row, with retries for a few seconds.

    Raises:
        ImageFault: this image is missing or empty.
        RunError: reading fails repeatedly with an OSError, or an object store refuses it or has not
            answered for longer than a run waits.
        DataError: the source returned something else, which a plug-in may do.
    """
    for wait_s in (*RETRY_WAITS_S, None):
        try:
            image = source.read(key)
        except OSError as error:
            # The disk, not the image: such a failure never becomes a row.
            was_repeated = isinstance(error, ObjectStoreError)
            if wait_s is None or was_repeated:
                times = "" if was_repeated else f", {len(RETRY_WAITS_S) + 1} times"
                raise RunError(
                    f"reading {name_text(key)} failed: {error.strerror or error}{times}. Nothing "
                    "committed is lost; when the images can be read again, give the same command "
                    "again."
                ) from error
            time.sleep(wait_s)
        else:
            if not isinstance(image, bytes | bytearray | memoryview):
                raise DataError(
                    f"read({key!r}) of the source returned {type(image).__name__}; expected the "
                    "encoded bytes of the image."
                )
            return image
    raise AssertionError("unreachable")
