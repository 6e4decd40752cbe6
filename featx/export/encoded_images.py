"""Encoded images of the rows of an export, read again from the data set of the store."""

from __future__ import annotations

import numpy as np

from featx.base import name_text
from featx.config import Config
from featx.errors import ConfigError, DataError
from featx.export.selection import ExportSelection, data_of_store
from featx.sources import open_source
from featx.types import NO_IMAGE, UNKNOWN_IMAGE, ImageFault, Status, image_checksum

_SAMPLED = 64
"""Number of images whose mean size is that of all."""


class EncodedImages:
    """Images of the rows of an export; the group `data` of the config says where they are now.
    Raises ConfigError if the rows are boxes, views or frames, not whole images.
    """

    def __init__(self, selection: ExportSelection, config: Config) -> None:
        self._selection = selection
        self.data = data_of_store(selection.store, config.data)
        name = config.export.format
        if self.data.boxes is not None:
            raise ConfigError(
                f"the rows of this store are boxes of images (data.boxes), and {name} holds whole "
                "images. Choose another export.format, in which keys name image and box."
            )
        if self.data.has_views:
            raise ConfigError(
                "the rows of this store are views of images (data.views, data.crops), and "
                f"{name} holds images as they are. Choose another export.format, in which keys "
                "name image and view."
            )
        if self.data.name == "video":
            raise ConfigError(
                f"the rows of this store are frames of videos, and {name} holds images. "
                "Choose another export.format, in which keys name video and time."
            )
        self._source = open_source(self.data)

    @property
    def mean_bytes(self) -> float:
        """Mean size of a few evenly spaced images; reading all would take too long."""
        n = len(self._selection)
        positions = np.unique(np.linspace(0, n - 1, min(n, _SAMPLED)).astype(np.int64))
        sizes = [len(self.read(position) or b"") for position in positions.tolist()]
        return float(np.mean(sizes)) if sizes else 0.0

    def read(self, position: int) -> bytes | None:
        """Return the encoded image of a row; None if the row failed and has no readable image.
        Raises DataError if the image of a row with features cannot be read, or has changed.
        """
        key = bytes(self._selection.keys[position])
        has_features = Status(self._selection.status[position]).has_features
        try:
            encoded = self._source.read(key)
        except (ImageFault, OSError) as error:
            if not has_features and isinstance(error, ImageFault):
                return None
            raise DataError(
                f"{name_text(key)} is a row of the store, and its image cannot be read now: "
                f"{error}. If the images are in another folder, give data=folder data.root=DIR."
            ) from error
        computed_from = self._selection.image_checksums[position]
        known = (UNKNOWN_IMAGE, NO_IMAGE, image_checksum(encoded))
        if has_features and computed_from not in known:
            raise DataError(
                f"{name_text(key)} has changed since its row was computed: the export would hold "
                "an image with the features of another one. The command of the store's run with "
                "refresh=true computes the rows of changed images again."
            )
        return encoded
