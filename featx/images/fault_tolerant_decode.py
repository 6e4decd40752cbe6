"""Fault-tolerant decoding in threads: no image can crash or hang a run.

If a decoder hangs, its thread is given up and the image is decoded again in a child process. If a
decoder crashes the process, the next process reads from the in-flight journal which images were
being decoded (`crash_journal`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy.typing as npt
from PIL import Image

from featx.base import ReplaceableThreadPool, num_cpus
from featx.errors import RunError
from featx.images.crash_journal import CrashList
from featx.images.decode import (
    EncodedJpeg,
    decode_array,
    decode_box_image,
    decode_pillow,
    prepare_jpeg,
)
from featx.images.decoder_warnings import DecoderWarnings, decoder_warnings_redirected
from featx.images.image_policy import ImagePolicy
from featx.images.subprocess_decode import decode_in_subprocess
from featx.images.tiff_blocks import TiffBlocks
from featx.images.whole_images import cut_out
from featx.types import Box, ImageFault, RegionSource, Source, Status

T = TypeVar("T")

_NOT_RECORDED: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
"""Takes the place of a recording in a journal."""

_RETRY_WAITS_S = (0.1, 0.5, 2.0)
"""Seconds to wait before each repeated attempt to read an image."""


def read_image(source: Source, key: bytes) -> bytes:
    """Read the encoded bytes of the image of a row, with retries for a few seconds.

    Args:
        source: source of the images.
        key: key of the row.

    Raises:
        ImageFault: this image is missing or empty.
        RunError: reading fails repeatedly with an OSError.
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
    """Reads and decodes the images of a data set; a context manager that owns its threads.

    Args:
        source: source of the images.
        policy: treatment of orientation, transparency and size.
        at_least: pixels of the shorter side, as for `decode_pillow`. Ignored if rows are boxes of
            images, because the size of a box is unknown before its image is decoded.
        timeout_s: seconds after which decoding an image is given up and repeated in a child
            process, where the image fails after the same time; None for no limit.
        crash_list: crash list, whose images are decoded in child processes, and the place of the
            in-flight journal.
        name: beginning of the names of the threads.

    Attributes:
        warnings: warnings of the decoders in this process.
    """

    def __init__(
        self,
        source: Source,
        policy: ImagePolicy,
        at_least: int | None,
        timeout_s: float | None,
        crash_list: CrashList,
        name: str,
    ) -> None:
        self.warnings = DecoderWarnings()
        self._source = source
        self._regions = source if isinstance(source, RegionSource) else None
        self._policy = policy
        self._at_least = None if self._regions else at_least
        self._timeout_s = timeout_s
        self._crash_list = crash_list
        self._name = name
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> FaultTolerantDecoder:
        self._stack.enter_context(decoder_warnings_redirected)
        self._journal = self._stack.enter_context(self._crash_list.journal())
        threads = ReplaceableThreadPool(num_cpus(), self._timeout_s, self._name)
        self._threads = self._stack.enter_context(threads)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def is_retry(self) -> bool:
        """Whether the calling thread repeats a call that was given up because its decoder hung."""
        return self._threads.is_retry_of_call

    def submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Call `work`, which reads and decodes, in one of the threads.

        Args:
            work: function to call.
            args: its arguments.
        """
        return self._threads.submit(work, *args)

    def submit_group(
        self, work: Callable[..., T], calls: Sequence[tuple[Any, ...]]
    ) -> Future[list[T]]:
        """Call `work` for several images, one after the other, in one of the threads.

        Args:
            work: function to call, which reads and decodes one image.
            calls: its arguments, for each image.
        """
        return self._threads.submit_group(work, calls)

    def decode_crash_list(self, keys: Iterable[bytes]) -> None:
        """Decode the images that were in flight when a process died, each in a child process.

        Images that crash or hang the child join the crash list.

        Args:
            keys: keys of the rows; in-flight images of other keys are ignored.

        Raises:
            RunError: reading fails repeatedly.
        """
        with self._crash_list.in_flight() as in_flight:
            if not in_flight:
                return
            rows = {self.image_key(bytes(key)): bytes(key) for key in keys}
            for image_key in in_flight & rows.keys():
                with contextlib.suppress(ImageFault):  # its row records the fault later
                    self._decode_in_subprocess(image_key, self.read(rows[image_key]))

    def image_key(self, key: bytes) -> bytes:
        """The key of the image that a row is, or whose box it is."""
        return key if self._regions is None else self._regions.image_key(key)

    def read(self, key: bytes) -> bytes:
        """The encoded bytes of the image of a row.

        Raises:
            ImageFault: this image is missing or empty.
            RunError: reading fails repeatedly.
        """
        return read_image(self._source, key)

    def decode_pillow(self, key: bytes, data: bytes) -> Image.Image:
        """Decode the image of a row into a Pillow image; call it in a thread of this decoder.

        Args:
            key: key of the row.
            data: encoded bytes of its image.

        Raises:
            ImageFault: the image cannot be decoded; its status names the reason.
        """
        image_key = self.image_key(key)
        if self._needs_subprocess(image_key):
            return Image.fromarray(self._decode_in_subprocess(image_key, data))
        return self._decode_recorded(image_key, decode_pillow, data)

    def decode_array(self, key: bytes, data: bytes) -> npt.NDArray[Any]:
        """Decode the image of a row into an array; otherwise like `decode_pillow`."""
        image_key = self.image_key(key)
        if self._needs_subprocess(image_key):
            return self._decode_in_subprocess(image_key, data)
        return self._decode_recorded(image_key, decode_array, data)

    def decode_box_image(
        self, key: bytes, data: bytes
    ) -> Image.Image | npt.NDArray[Any] | TiffBlocks:
        """Decode the image of which a row is a box; otherwise like `decode_pillow`."""
        image_key = self.image_key(key)
        if self._needs_subprocess(image_key):
            return self._decode_in_subprocess(image_key, data)
        return self._decode_recorded(image_key, decode_box_image, data)

    def cut(
        self, key: bytes, decoded: Image.Image | npt.NDArray[Any] | TiffBlocks, box: Box
    ) -> Image.Image | npt.NDArray[Any]:
        """Cut a box out of a result of `decode_box_image`; blocks of the box are decoded.

        Raises:
            ImageFault: the box reaches outside the image, or cannot be decoded.
        """
        if not isinstance(decoded, TiffBlocks):
            return cut_out(decoded, box)
        image_key = self.image_key(key)
        if self._needs_subprocess(image_key):
            return cut_out(self._decode_in_subprocess(image_key, decoded.data), box)
        return self._decode_recorded(image_key, lambda *_: decoded.cut(box), decoded.data)

    def prepare_jpeg(self, key: bytes, data: bytes) -> EncodedJpeg | None:
        """Prepare the image of a row for decoding on a GPU; otherwise like `decode_pillow`.

        Returns:
            The JPEG, or None if the image has to be decoded on the CPU.
        """
        image_key = self.image_key(key)
        if self._at_least is None or self._needs_subprocess(image_key):
            return None
        return self._decode_recorded(image_key, prepare_jpeg, data)

    def _needs_subprocess(self, image_key: bytes) -> bool:
        """Return whether an image needs a child process: it hung before or is on the crash list."""
        return self._threads.is_retry_of_call or image_key in self._crash_list

    def _decode_recorded(self, image_key: bytes, decoder: Callable[..., T], data: bytes) -> T:
        """Decode an image in the calling thread, recorded in the journal and limited in time."""
        journal = self._journal
        recording = _NOT_RECORDED if journal is None else journal.recording(image_key)
        with self.warnings.collecting(image_key), self._threads.timed_section(), recording:
            return decoder(data, self._policy, self._at_least)

    def _decode_in_subprocess(self, image_key: bytes, data: bytes) -> npt.NDArray[Any]:
        """Pixels from a child process; one that crashes or hangs it joins the crash list."""
        try:
            return decode_in_subprocess(data, self._policy, self._at_least, self._timeout_s)
        except ImageFault as fault:
            if fault.status in (Status.TIMEOUT, Status.CRASHES_DECODER):
                self._crash_list.add(image_key)
            raise
