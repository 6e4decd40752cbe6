"""Thumbnails of rows as data URIs, from images that are read again through the store's config."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterable

from PIL import Image

from featx.config import DataConfig
from featx.errors import FeatxError
from featx.export.source_images import data_of_store
from featx.images import CrashList, FaultTolerantDecoder, ImagePolicy, cut_out
from featx.sources import open_source
from featx.store import FeatureStore
from featx.types import ImageFault, RegionSource, Status

PIXELS = 112
"""Longer side of a thumbnail in pixels."""

MAX_BYTES = 16 << 20
"""Maximum bytes of all data URIs of a page."""

_QUALITY = 72
"""Quality of the WebP encoder."""
_AT_ONCE = 64
"""Images that are submitted to the decoder at a time."""

_HOPELESS = 128
"""Number of unreadable images, without a single readable one, after which no more are tried."""

UNDECODED, UNREAD = "cannot be decoded", "cannot be read"
"""Reasons why a row has no thumbnail."""


class Thumbnails:
    """Thumbnails of a page, one per row; a context manager while images are decoded.

    Images are decoded as in a run: one that crashes or hangs its decoder has no thumbnail, and the
    others are not affected.

    Args:
        store: store of the rows.
        data: options of the command; its data.root is used if given.
        limit: maximum number of thumbnails.

    Attributes:
        uris: row -> data URI.
        why_none: reason why there are none at all, or ''.
        unread: row -> UNREAD or UNDECODED, for images that could not be read or decoded.
        limit: as given.
    """

    def __init__(self, store: FeatureStore, data: DataConfig, limit: int) -> None:
        self.uris: dict[int, str] = {}
        self.unread: dict[int, str] = {}
        self.limit = limit
        self.why_none = "" if limit else "report.thumbnails=0 leaves them out."
        self._store = store
        self._data = data
        self._bytes = 0
        self._said = ""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Thumbnails:
        if self.why_none:
            return self
        try:
            config = data_of_store(self._store, self._data)
            self._source = open_source(config)
            decoder = FaultTolerantDecoder(
                self._source,
                ImagePolicy.from_config(config),
                PIXELS // 2,
                config.timeout_s,
                CrashList(None),
                "featx-thumbnail",
            )
            self._decoder = self._stack.enter_context(decoder)
            decoder.decode_crash_list(self._store.key_bytes)
        except FeatxError as error:
            self.why_none = str(error)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def full(self) -> bool:
        """Whether a limit is reached."""
        return len(self.uris) >= self.limit or self._bytes >= MAX_BYTES

    def add(self, rows: Iterable[int]) -> None:
        """Make the thumbnails of some rows in this order, until a limit is reached."""
        if self.why_none:
            return
        wanted = [r for r in dict.fromkeys(rows) if r not in self.uris and r not in self.unread]
        for start in range(0, len(wanted), _AT_ONCE):
            if self.full or self.why_none:
                return
            block = wanted[start : start + _AT_ONCE]
            found = [self._decoder.submit(self._try, row) for row in block]
            for row, future in zip(block, found, strict=True):
                uri, why_not = future.result()
                if why_not:
                    self.unread[row] = why_not
                elif not self.full:
                    self.uris[row] = uri
                    self._bytes += len(uri)
            if not self.uris and len(self.unread) >= _HOPELESS:
                self.finish()

    def finish(self) -> None:
        """End the addition of thumbnails, and set `why_none` if no image could be read."""
        if self.unread and not self.uris and not self.why_none:
            self.why_none = (
                f"none of {len(self.unread)} images can be read now ({self._said}). If they are in "
                "another folder, give data=folder data.root=DIR."
            )

    @property
    def undecoded(self) -> list[int]:
        """Rows that did not fail in the run, but whose image cannot be decoded now."""
        ok = self._store.ok
        return [row for row, why_not in self.unread.items() if why_not == UNDECODED and ok[row]]

    @property
    def num_unread(self) -> int:
        """Number of rows whose image cannot be read now."""
        return sum(why_not == UNREAD for why_not in self.unread.values())

    def _try(self, row: int) -> tuple[str, str]:
        """Return the data URI of a row, and '' or the reason why there is none."""
        try:
            return self._uri(bytes(self._store.key_bytes[row])), ""
        except FeatxError as error:  # the data set, which is listed with the first image
            self.why_none = str(error)
        except ImageFault as fault:
            self._said = str(fault)
            if fault.status not in (Status.MISSING, Status.EMPTY):
                return "", UNDECODED
        except (OSError, LookupError, MemoryError) as error:
            self._said = str(error) or "out of memory"
        return "", UNREAD

    def _uri(self, key: bytes) -> str:
        """Return the data URI of a row.

        Raises:
            ImageFault: the image is missing or cannot be decoded.
            OSError: the disk or mount fails.
        """
        decoded = self._decoder.image(key, self._source.read(key))
        if isinstance(self._source, RegionSource):
            decoded = cut_out(decoded, self._source.box(key))
        return _thumbnail(decoded)

    def add_every(self, rows: list[int]) -> None:
        """Make thumbnails of rows that are evenly spaced in a list, as many as the limit allows."""
        room = self.limit - len(self.uris)
        missing = [row for row in rows if row not in self.uris]
        if room > 0 and missing:
            step = max(1.0, len(missing) / room)
            self.add(missing[int(i * step)] for i in range(min(room, len(missing))))


def _thumbnail(decoded: Image.Image) -> str:
    """Return an image as a small WebP in a data URI."""
    scale = PIXELS / max(decoded.size)
    size = (max(1, round(decoded.width * scale)), max(1, round(decoded.height * scale)))
    small = decoded.resize(size, Image.Resampling.BICUBIC, reducing_gap=2) if scale < 1 else decoded
    buffer = io.BytesIO()
    small.save(buffer, "WEBP", quality=_QUALITY)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
