"""Decoded images from which boxes are cut; each is decoded once, by one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, overload

import numpy.typing as npt
from PIL import Image

from featx.images.tiff_blocks import TiffBlocks
from featx.types import Box, ImageFault, Status

NUM_IMAGES = 2
"""Number of decoded images that are kept while boxes are cut from them.

Threads that are at the last boxes of one image and those at the first ones of the next both find
theirs.
"""

DecodedImage = Image.Image | npt.NDArray[Any]
"""Upright image: a Pillow image, (H, W, 3) uint8 RGB, or (H, W, channels) of any numbers for a
transform with a scale. The fast path takes arrays, the reference Pillow images."""


@overload
def cut_out(decoded: Image.Image, box: Box) -> Image.Image: ...


@overload
def cut_out(decoded: npt.NDArray[Any], box: Box) -> npt.NDArray[Any]: ...


def cut_out(decoded: Image.Image | npt.NDArray[Any], box: Box) -> Image.Image | npt.NDArray[Any]:
    """Cut a box out of an upright image.

    Args:
        decoded: (H, W, C), or a Pillow image.
        box: pixels to cut out.

    Returns:
        A copy of the box, of the type of `decoded`.

    Raises:
        ImageFault: the box reaches outside the image.
    """
    if isinstance(decoded, Image.Image):
        width, height = decoded.size
    else:
        height, width, _ = decoded.shape
    right, bottom = box.x + box.width, box.y + box.height
    if right > width or bottom > height:
        raise ImageFault(
            Status.TRANSFORM_ERROR, f"the box reaches outside the image of {width} x {height}"
        )
    if isinstance(decoded, Image.Image):
        return decoded.crop((box.x, box.y, right, bottom))
    return decoded[box.y : bottom, box.x : right].copy()


@dataclass(frozen=True)
class WholeImage:
    """An image that was read and decoded, or the reason why not, which holds for all its boxes.

    Attributes:
        checksum: checksum of the encoded bytes, or NO_IMAGE.
        decoded: the image, the blocks of a large TIFF, or the fault.
    """

    checksum: int
    decoded: DecodedImage | TiffBlocks | ImageFault

    def image(self) -> DecodedImage | TiffBlocks:
        """Return the image.

        Raises:
            ImageFault: it could not be read or decoded.
        """
        if isinstance(self.decoded, ImageFault):
            fault = self.decoded
            # A new one for each row, as each thread adds its own traceback.
            raise ImageFault(fault.status, str(fault), fault.error)
        return self.decoded


class _Entry:
    """An image that a thread loads while others wait for it."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.whole: WholeImage | None = None
        self.error: Exception | None = None


class WholeImages:
    """The last images of a loader, shared by its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}

    def get(self, name: bytes, load: Callable[[], WholeImage], is_retry: bool) -> WholeImage:
        """Return an image; the first thread that asks for it loads it, and others wait.

        Two threads that decode the same image of 20,000 x 20,000 pixels would need twice its
        memory.

        Args:
            name: key of the image.
            load: reads and decodes it.
            is_retry: whether the calling thread repeats a call that was given up because it
                hung. It loads the image itself, since the thread that was loading it hangs.

        Raises:
            Exception: what `load` raised, in the thread that called it and in those that wait.
        """
        with self._lock:
            entry = self._entries.get(name)
            is_first = entry is None
            if entry is None:
                while len(self._entries) >= NUM_IMAGES:
                    # Threads that cut boxes from a dropped image hold it until they are done.
                    del self._entries[next(iter(self._entries))]
                entry = self._entries[name] = _Entry()
        if is_first or (is_retry and not entry.done.is_set()):
            try:
                entry.whole = load()
            except Exception as error:
                entry.error = error
                self._forget(name, entry)
                raise
            finally:
                # A call that is given up ends with a BaseException: its repetition takes over.
                if entry.whole is not None or entry.error is not None:
                    entry.done.set()
        entry.done.wait()
        if entry.whole is None:
            assert entry.error is not None, "an image is done without a result"
            raise entry.error
        return entry.whole

    def clear(self) -> None:
        """Drop all images; called when no thread asks for one any more."""
        with self._lock:
            self._entries.clear()

    def _forget(self, name: bytes, entry: _Entry) -> None:
        """Remove an image whose loading failed for a reason that does not lie in the image."""
        with self._lock:
            if self._entries.get(name) is entry:
                del self._entries[name]
