"""Pictures decoded in threads, none of which can end a run or hold it up.

A decoder that hangs is left behind and its picture decoded again in a process of its own; what a
process was decoding when it crashed is found out by the next one, from notes (crash_journal.py).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from featx.base.machine import num_cpus
from featx.base.thread_pool import ReplaceableThreadPool
from featx.errors import RunError
from featx.images.crash_journal import CrashList
from featx.images.decode import EncodedJpeg, ImagePolicy, coded_jpeg, decode, decode_pixels
from featx.images.decoder_warnings import DecoderWarnings, decoder_warnings_redirected
from featx.images.subprocess_decode import decode_in_subprocess
from featx.types import ImageFault, RegionSource, Source, Status

T = TypeVar("T")

_RETRY_WAITS_S = (0.1, 0.5, 2.0)


def read_image(source: Source, key: bytes) -> bytes:
    """The encoded bytes of a row's picture; what fails is tried again for a few seconds.

    Raises:
        ImageFault: this image cannot be had.
        RunError: the images' disk fails, and goes on failing.
    """
    for wait_s in (*_RETRY_WAITS_S, None):
        try:
            return source.read(key)
        except OSError as error:
            # The disk, not the image: such a failure never becomes a row.
            if wait_s is None:
                raise RunError(
                    f"reading {os.fsdecode(key)} failed: {error.strerror or error}, "
                    f"{len(_RETRY_WAITS_S) + 1} times. Nothing committed is lost; when the "
                    "images can be read again, give the same command again."
                ) from error
            time.sleep(wait_s)
    raise AssertionError("unreachable")


class FaultTolerantDecoder:
    """Reads and decodes the pictures of a data set; a context manager that owns its threads.

    Args:
        source: of the pictures.
        policy: for orientation, transparency and size.
        at_least: of the shorter side, as for `decode`; has no effect where rows are cut from
            pictures, as a region's share of its picture is not known before that is decoded.
        timeout_s: a picture that takes longer to be decoded is decoded again in a process of its
            own, and fails where that takes as long; None waits for ever.
        suspects: which pictures are decoded each in a process of its own, and where is noted what
            is being decoded.
        name: of the threads begins with it.

    Attributes:
        warnings: what the decoders of this process warned of.
    """

    def __init__(
        self,
        source: Source,
        policy: ImagePolicy,
        at_least: int | None,
        timeout_s: float | None,
        suspects: CrashList,
        name: str,
    ) -> None:
        self.warnings = DecoderWarnings()
        self._source = source
        self._regions = source if isinstance(source, RegionSource) else None
        self._policy = policy
        self._at_least = None if self._regions else at_least
        self._timeout_s = timeout_s
        self._suspects = suspects
        self._name = name
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> FaultTolerantDecoder:
        self._stack.enter_context(decoder_warnings_redirected)
        self._notes = self._stack.enter_context(self._suspects.notes())
        threads = ReplaceableThreadPool(num_cpus(), self._timeout_s, self._name)
        self._threads = self._stack.enter_context(threads)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Call `work`, which reads and decodes, in one of the threads."""
        return self._threads.submit(work, *args)

    def retry_suspects(self, keys: Iterable[bytes]) -> None:
        """Decode what a process was decoding when it died, each in a process of its own.

        Args:
            keys: of the rows; others are none of the data set any more.

        Raises:
            RunError: the images' disk fails, and goes on failing.
        """
        with self._suspects.left_behind() as noted:
            if not noted:
                return
            rows = {self.picture_of(bytes(key)): bytes(key) for key in keys}
            for picture in noted & rows.keys():
                with contextlib.suppress(ImageFault):  # what it is, is recorded when its turn comes
                    self._decoded_alone(picture, self.read(rows[picture]))

    def picture_of(self, key: bytes) -> bytes:
        """The key of the whole picture that a row is, or is cut from."""
        return key if self._regions is None else self._regions.picture(key)

    def read(self, key: bytes) -> bytes:
        """The encoded bytes of a row's picture.

        Raises:
            ImageFault: this image cannot be had.
            RunError: the images' disk fails, and goes on failing.
        """
        return read_image(self._source, key)

    def image(self, key: bytes, data: bytes) -> Image.Image:
        """The whole picture of a row as `decode` gives it, in a thread of this decoder.

        Raises:
            ImageFault: with the status that names the reason.
        """
        picture = self.picture_of(key)
        if self._to_be_alone(picture):
            return Image.fromarray(self._decoded_alone(picture, data))
        with self._noted(picture):
            return decode(data, self._policy, self._at_least)

    def pixels(self, key: bytes, data: bytes) -> npt.NDArray[np.uint8]:
        """The whole picture of a row, (H, W, 3), as `decode_pixels` gives it; else as `image`."""
        picture = self.picture_of(key)
        if self._to_be_alone(picture):
            return self._decoded_alone(picture, data)
        with self._noted(picture):
            return decode_pixels(data, self._policy, self._at_least)

    def coded(self, key: bytes, data: bytes) -> EncodedJpeg | None:
        """The picture of a row for another device, as `coded_jpeg` has it; else as `image`."""
        picture = self.picture_of(key)
        if self._at_least is None or self._to_be_alone(picture):
            return None
        with self._noted(picture):
            return coded_jpeg(data, self._policy, self._at_least)

    def _to_be_alone(self, picture: bytes) -> bool:
        return self._threads.again or picture in self._suspects

    @contextlib.contextmanager
    def _noted(self, picture: bytes) -> Iterator[None]:
        """This thread is decoding a picture, and may be given up, as long as the block runs."""
        noted = contextlib.nullcontext() if self._notes is None else self._notes.noted(picture)
        with self.warnings.collecting(picture), self._threads.watched(), noted:
            yield

    def _decoded_alone(self, picture: bytes, data: bytes) -> npt.NDArray[np.uint8]:
        """(H, W, 3) from a process of its own; an image that ends or hangs it is remembered."""
        try:
            return decode_in_subprocess(data, self._policy, self._at_least, self._timeout_s)
        except ImageFault as fault:
            if fault.status in (Status.TIMEOUT, Status.CRASHES_DECODER):
                self._suspects.remember(picture)
            raise
