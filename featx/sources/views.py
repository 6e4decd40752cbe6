"""Rows that are views of the images of another source: data.views and data.crops, and data.boxes.

A key is the key of the image, '#', and the view: 'cat/001.jpg#hflip', 'cat/001.jpg#10,20,64,48'.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from featx.config import DataConfig, ViewName, names_tuple
from featx.sources.row_keys import sorting_order
from featx.types import Listing, RandomCrop, Source, Stateful, View, ViewSource

_SEPARATOR = b"#"
"""Separator between the key of the image and the view."""

_ORIENTATIONS: dict[ViewName, int] = {
    "original": 1,
    "hflip": 2,
    "rot180": 3,
    "vflip": 4,
    "transpose": 5,
    "rot270": 6,
    "transverse": 7,
    "rot90": 8,
}
"""View -> EXIF orientation from which an image is turned so."""


class DerivedSource(ABC):
    """Source whose rows are made of the rows of another source."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def reads_in_decoders(self) -> bool:
        """Whether decoders read the images."""
        return getattr(self._source, "reads_in_decoders", False)

    @abstractmethod
    def listing(self) -> Listing:
        """List all rows."""

    @abstractmethod
    def view(self, key: bytes) -> View:
        """View of the image that a row is."""

    def read(self, key: bytes) -> bytes:
        """Read the encoded image that a row shows. Raises as `Source.read` does."""
        return self._source.read(parent_key(key))

    def states(self, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.void] | None:
        """Return the states of the images that rows show, or None if the source has none."""
        if not isinstance(self._source, Stateful):
            return None
        parents, which = np.unique([parent_key(key) for key in keys], return_inverse=True)
        states = self._source.states(parents)
        return None if states is None else states[which]

    def image_key(self, key: bytes) -> bytes:
        """Return the key of the image that a row shows."""
        parent = parent_key(key)
        return self._source.image_key(parent) if isinstance(self._source, ViewSource) else parent


class ViewedSource(DerivedSource):
    """Several views of each row of another source, which are whole images or boxes."""

    def __init__(self, source: Source, config: DataConfig) -> None:
        super().__init__(source)
        crops = [f"crop{number}" for number in range(1, (config.crops or 0) + 1)]
        self._names = [name.encode() for name in (*names_tuple(config.views), *crops)]
        self._scale, self._ratio = config.crop_bounds

    def listing(self) -> Listing:
        """List the views of all rows; each has the label and the columns of its row."""
        rows = self._source.listing()
        keys = np.array(
            [key + _SEPARATOR + name for key in rows.keys.tolist() for name in self._names],
            dtype=np.bytes_,
        )
        order = sorting_order(keys, "the data set has some views")
        return replace(rows.take(order // len(self._names)), keys=keys[order])

    def view(self, key: bytes) -> View:
        """View of the image that a row is; a random crop is decided by the key."""
        name = key.rpartition(_SEPARATOR)[2].decode()
        parent = View()
        if isinstance(self._source, ViewSource):
            parent = self._source.view(parent_key(key))
        if name in _ORIENTATIONS:
            return parent._replace(orientation=_ORIENTATIONS[name])
        seed = int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
        return parent._replace(crop=RandomCrop(seed, self._scale, self._ratio))


def parent_key(key: bytes) -> bytes:
    """Return the key of the row of the other source from which a row is made."""
    return key.rpartition(_SEPARATOR)[0]
