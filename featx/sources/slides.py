"""Source data=slides: boxes of whole-slide images and tiled TIFFs, read by OpenSlide.

A slide has up to 10^10 pixels, so it is never read as a whole: a row is a box of data.boxes, whose
pixels are read from the tiles that it touches.
"""

from __future__ import annotations

import itertools
import os
import re
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
import numpy.typing as npt

from featx.base import LruCache, require_extra
from featx.config import options
from featx.errors import ConfigError
from featx.sources.base import FolderSource, endings
from featx.sources.pixel_encoding import encode_image
from featx.sources.registry import SOURCES, FileOptions, source_member
from featx.types import Box, ImageFault, Listing, Source, Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from openslide import OpenSlide, OpenSlideCache
    from PIL import Image
    from tifffile import TiffPage

EXTENSIONS = frozenset(b".svs .ndpi .tif .tiff .vms .vmu .scn .mrxs .svslide .bif .czi".split())
"""File name extensions that count as slides, compared without regard to case. The content is
checked only when a slide is opened."""

_NUM_OPEN = 4
"""Number of slides that stay open; rows in the order of their keys need one or two."""


_CACHE_BYTES = 128 << 20
"""Size of the cache of decoded tiles, for all slides together. Rows go down a column of boxes, and
each tile should be decoded once: OpenSlide's own 32 MiB hold 32 tiles of 512 x 512 pixels."""


_OME_CHANNELS = re.compile(r'<Pixels\b[^>]*?\bSizeC="(\d+)"')
"""Number of channels in the description of an OME-TIFF."""


@options("data")
class SlideOptions(FileOptions):
    """Options of data=slides."""

    root_help: ClassVar[str] = "data.root=DIR, the folder of your slides"

    name: str = "slides"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.boxes is None:
            raise ConfigError(
                "data=slides needs data.boxes=FILE.csv, the boxes of the slides that become rows: "
                "path,x,y,width,height in pixels of level 0."
            )


def open_source(config: SlideOptions) -> Source:
    """Open the slides below data.root; raises MissingExtraError without OpenSlide."""
    require_extra("openslide", "data=slides", "OpenSlide", "slides")
    return SlideSource(config)


class SlideSource:
    """Slides below a folder, of which boxes are read; the first sub-folder is the label."""

    def __init__(self, config: SlideOptions) -> None:
        extensions = endings(config.extensions, EXTENSIONS)
        self._folder = FolderSource(config.path, config.follow_links, extensions, what="slides")
        self._max_pixels = config.max_pixels
        self._open: LruCache[bytes, OpenSlide] = LruCache(_NUM_OPEN)
        self._cache: OpenSlideCache | None = None

    def listing(self) -> Listing:
        """List the slides. Raises DataError as `FolderSource.listing` does."""
        return self._folder.listing()

    def read(self, key: bytes) -> bytes:
        """Refuse to read a slide as a whole."""
        raise ImageFault(Status.TOO_LARGE, "a slide is read in boxes only (data.boxes)")

    def read_box(self, image_key: bytes, box: Box) -> bytes:
        """Read a box of level 0, as PPM, or as PNG with alpha if a pixel is transparent."""
        if box.width * box.height > self._max_pixels:
            raise ImageFault(
                Status.TOO_LARGE, f"{box.width} x {box.height} pixels, over {self._max_pixels}"
            )
        from openslide import OpenSlideError, OpenSlideUnsupportedFormatError

        try:
            try:
                slide = self._open.get_or_make(image_key, lambda: self._open_slide(image_key))
                image = _region(slide, box)
            except OpenSlideError:
                # After an error every call of this object fails, also those of other threads, whose
                # boxes may be sound. So each is read again by an object of its own.
                self._open.drop(lambda key: key == image_key)
                image = _region(self._open_slide(image_key), box)
        except OpenSlideError as error:
            is_unknown = isinstance(error, OpenSlideUnsupportedFormatError)
            hint = "; a TIFF has to be tiled, and little-endian unless it is a BigTIFF"
            raise ImageFault(
                Status.UNSUPPORTED if is_unknown else Status.DECODE_ERROR,
                f"{str(error)[:200]}{hint if is_unknown else ''}",
                type(error).__name__,
            ) from error
        is_opaque = image.getchannel("A").getextrema() == (255, 255)
        return encode_image(image.convert("RGB") if is_opaque else image)

    def states(self, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.void]:
        """Return the states of the files of some slides."""
        return self._folder.states(keys)

    def _open_slide(self, key: bytes) -> OpenSlide:
        """Open a slide, from which several threads may read at the same time."""
        from openslide import OpenSlide, OpenSlideCache

        path = os.path.join(self._folder.root, os.fsdecode(key))
        if not os.path.isfile(path):  # noqa: PTH113 - unusual bytes
            self._folder.check_root()
            raise ImageFault(Status.MISSING, "no such file", "FileNotFoundError")
        slide = OpenSlide(path)
        _check_page(slide, path)
        if self._cache is None:
            self._cache = OpenSlideCache(_CACHE_BYTES)
        slide.set_cache(self._cache)
        return slide


def _check_page(slide: OpenSlide, path: str) -> None:
    """Check that OpenSlide reads the first page of a generic TIFF as it is meant.

    OpenSlide 4 leaves channels and planes in other pages out, and gives the upper 8 bits of
    numbers, also of signed ones. It lets libtiff decode tiles other than JPEGs, which turns each of
    them in its own place as the tag Orientation says.
    """
    if slide.properties["openslide.vendor"] != "generic-tiff":
        return
    from tifffile import COMPRESSION, TiffFile

    with TiffFile(path) as file:
        page = file.pages.first
        others = cast("Iterator[TiffPage]", itertools.islice(file.pages, 1, None))
        # Bits 1 and 4 of the tag NewSubfileType: a smaller version, a mask.
        is_stack = any(each.shape == page.shape and not each.subfiletype & 5 for each in others)
    stated = _OME_CHANNELS.search(page.description)
    if stated is not None and int(stated[1]) > page.samplesperpixel:
        raise ImageFault(
            Status.UNSUPPORTED,
            f"its {stated[1]} channels are pages, of which OpenSlide reads the first only; "
            "data=folder with data.boxes and model.transform.scale reads them as channels",
        )
    if is_stack:
        raise ImageFault(
            Status.UNSUPPORTED,
            "its pages of one size are a stack, of which OpenSlide reads the first only; save the "
            "plane that you mean as a file of its own",
        )
    if page.dtype not in (np.uint8, np.bool_):
        raise ImageFault(
            Status.UNSUPPORTED,
            f"its numbers are {page.dtype}, of which OpenSlide gives 8 bits; data=folder with "
            "data.boxes reads them, with model.transform.scale as they are",
        )
    turn = page.tags.valueof("Orientation", default=1)
    if turn in range(2, 9) and page.compression != COMPRESSION.JPEG:
        raise ImageFault(
            Status.UNSUPPORTED,
            f"its Orientation is {turn}, by which OpenSlide turns each tile in its own place; save "
            "it upright, without this tag",
        )


def _region(slide: OpenSlide, box: Box) -> Image.Image:
    """A box of level 0 of a slide, mode RGBA."""
    width, height = slide.dimensions
    if box.x + box.width > width or box.y + box.height > height:
        raise ImageFault(
            Status.TRANSFORM_ERROR, f"the box reaches outside the slide of {width} x {height}"
        )
    image: Image.Image = slide.read_region((box.x, box.y), 0, (box.width, box.height))
    return image


SOURCES.register(
    source_member(
        "slides",
        "Boxes of whole-slide images and tiled TIFFs, read by OpenSlide.",
        SlideOptions,
        open_source,
        extra="slides",
    )
)
