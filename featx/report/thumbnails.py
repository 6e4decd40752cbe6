"""Small pictures of rows as data URIs, read again from where the store's config says they are."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from PIL import Image

from featx.data import open_source
from featx.decode import ImagePolicy, decode
from featx.errors import FeatxError
from featx.export.pictures import data_of_store
from featx.machine import num_cpus
from featx.options import DataConfig
from featx.preprocess import cut_out
from featx.store.reader import FeatureStore
from featx.types import ImageFault, Regional, Source

PIXELS = 112
"""Longer side of a thumbnail."""

MAX_BYTES = 16 << 20
"""Of all thumbnails of a page, as they stand in it."""

_QUALITY = 72
_AT_ONCE = 64

_HOPELESS = 128
"""After so many pictures in vain, and none that could be read, no more are tried."""


class Thumbnails:
    """The pictures of a page, each row once.

    Args:
        store: whose rows they are of.
        data: of the command; a data.root given there is taken.
        limit: how many at the most.

    Attributes:
        uris: row -> data URI.
        why_none: why there are none at all, or nothing.
        unread: rows whose pictures could not be had.
        limit: as given.
    """

    def __init__(self, store: FeatureStore, data: DataConfig, limit: int) -> None:
        self.uris: dict[int, str] = {}
        self.unread: set[int] = set()
        self.limit = limit
        self.why_none = "" if limit else "report.pictures=0 asked for none."
        self._store = store
        self._bytes = 0
        self._said = ""
        self._read: Callable[[bytes], str] = str
        if limit:
            try:
                config = data_of_store(store, data)
                source, policy = open_source(config), ImagePolicy.from_config(config)
            except FeatxError as error:
                self.why_none = str(error)
            else:
                self._read = lambda key: _thumbnail(source, policy, key)

    @property
    def full(self) -> bool:
        """Whether the page takes no more."""
        return len(self.uris) >= self.limit or self._bytes >= MAX_BYTES

    def add(self, rows: Iterable[int]) -> None:
        """Make the pictures of some rows, in this order, until the page is full."""
        if self.why_none:
            return
        wanted = [r for r in dict.fromkeys(rows) if r not in self.uris and r not in self.unread]
        with ThreadPoolExecutor(num_cpus(), thread_name_prefix="featx-thumbnail") as threads:
            for start in range(0, len(wanted), _AT_ONCE):
                if self.full or self.why_none:
                    return
                block = wanted[start : start + _AT_ONCE]
                for row, uri in zip(block, threads.map(self._try, block), strict=True):
                    if uri is None:
                        self.unread.add(row)
                    elif not self.full:
                        self.uris[row] = uri
                        self._bytes += len(uri)
                if not self.uris and len(self.unread) >= _HOPELESS:
                    self.finish()

    def finish(self) -> None:
        """No more will come: say why where not a single picture could be read."""
        if self.unread and not self.uris and not self.why_none:
            self.why_none = (
                f"none of {len(self.unread)} pictures could be read now ({self._said}). If they "
                "lie elsewhere, say where: data=folder data.root=DIR."
            )

    def _try(self, row: int) -> str | None:
        """A data URI, or None where the picture cannot be had."""
        try:
            return self._read(bytes(self._store.key_bytes[row]))
        except FeatxError as error:  # of the whole data set, which is listed at the first picture
            self.why_none = str(error)
        except (ImageFault, OSError, LookupError) as error:
            self._said = str(error)
        return None

    def add_every(self, rows: list[int]) -> None:
        """Pictures of rows spread evenly over the list, as many as there is room for."""
        room = self.limit - len(self.uris)
        missing = [row for row in rows if row not in self.uris]
        if room > 0 and missing:
            step = max(1.0, len(missing) / room)
            self.add(missing[int(i * step)] for i in range(min(room, len(missing))))


def _thumbnail(source: Source, policy: ImagePolicy, key: bytes) -> str:
    """A picture as a data URI. Raises ImageFault or OSError where it cannot be had."""
    if isinstance(source, Regional):
        picture = cut_out(decode(source.read(key), policy), source.box(key))
    else:
        picture = decode(source.read(key), policy, at_least=PIXELS // 2)
    scale = PIXELS / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    small = picture.resize(size, Image.Resampling.BICUBIC, reducing_gap=2) if scale < 1 else picture
    buffer = io.BytesIO()
    small.save(buffer, "WEBP", quality=_QUALITY)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
