"""Formats with files for each slide, an image whose boxes (data.boxes) are rows."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

import numpy as np
import numpy.typing as npt

from featx.base import as_utf8, name_text
from featx.config import Config
from featx.errors import ConfigError
from featx.export.base import ExportFolder, Format, refuse_maps
from featx.export.selection import ExportSelection
from featx.sources import parse_box_key
from featx.types import Array

_INDEX_BYTES = 256
"""Largest share of a row in the chunk indices of both datasets, in bytes; HDF5 needs 60 to 164."""

_HEADER_BYTES = 1 << 16
"""Bytes reserved for the headers and attributes of a file."""


@dataclass(frozen=True)
class Slide:
    """Tiles of one image, squares of `size` pixels: their places in the selection, and their order
    in the file.
    """

    image: str
    name: str
    size: int
    places: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64]
    coords: npt.NDArray[np.int64]


class SlideFormat(Format):
    """A format with files for each slide, whose tiles are rows; the base of Trident and Clam."""

    def __init__(self, selection: ExportSelection, config: Config) -> None:
        super().__init__(selection, config)
        refuse_maps(selection, "TRIDENT's and CLAM's files hold one vector per tile")
        self.slides = [
            self._slide(image, np.array(tiles, np.int64).reshape(-1, 5))
            for image, tiles in self._tiles().items()
        ]
        names = [slide.name for slide in self.slides]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(
                f"two slides are called {twice}. TRIDENT and CLAM find a slide by its file name "
                "without folder and ending; rename one of the images."
            )

    @property
    def num_bytes(self) -> int:
        size = super().num_bytes + len(self.selection) * _INDEX_BYTES
        return size + _HEADER_BYTES * len(self.slides)

    def _tiles(self) -> dict[bytes, array[int]]:
        """Return image -> place, x, y, width and height of each of its tiles, one after the other.

        Objects of Python would take 300 bytes a tile.
        """
        tiles: dict[bytes, array[int]] = {}
        for place, key in enumerate(self.selection.each_key()):
            parsed = parse_box_key(key)
            if parsed is None:
                raise ConfigError(
                    f"{name_text(key)} is no box of an image, and TRIDENT's and CLAM's files hold "
                    "tiles of slides. Extract boxes of the slides with data.boxes=FILE alone."
                )
            image, box = parsed
            numbers = (place, box.x, box.y, box.width, box.height)
            tiles.setdefault(image, array("q")).extend(numbers)
        return tiles

    def _slide(self, image: bytes, tiles: npt.NDArray[np.int64]) -> Slide:
        """Return the tiles of an image in the order of its file."""
        image_name = as_utf8(name_text(image))
        sizes = np.unique(tiles[:, 3:], axis=0).tolist()
        if len(sizes) > 1 or sizes[0][0] != sizes[0][1]:
            sizes_text = ", ".join(f"{width} x {height}" for width, height in sizes[:3])
            raise ConfigError(
                f"the boxes of {image_name} are {sizes_text} pixels; TRIDENT and CLAM have one "
                "patch size for a slide: expected squares of equal size."
            )
        name = PurePosixPath(image_name).stem
        places, positions = tiles[:, 0].copy(), tiles[:, 1:3]
        order = np.lexsort((positions[:, 0], positions[:, 1]))
        return Slide(image_name, name, sizes[0][0], places, order, positions[order])

    def rows_of(self, slide: Slide, layer: str) -> Array:
        """Return the features of a slide in the order of its file."""
        tiles = replace(self.selection, rows=self.selection.rows[slide.places])
        blocks = [values[layer] for _, _, values in tiles.blocks(0, len(tiles), [layer])]
        return np.concatenate(blocks)[slide.order]

    def write_h5(
        self,
        folder: ExportFolder,
        name: str,
        slide: Slide,
        rows: Array,
        attributes: dict[str, dict[str, object]],
    ) -> None:
        """Write features and coordinates of a slide, with the attributes of both."""
        most_bytes = rows.nbytes + len(rows) * (16 + _INDEX_BYTES) + _HEADER_BYTES
        with folder.hdf5_file(f"{name}/{slide.name}.h5", most_bytes) as file:
            # Chunks of one row and unlimited rows, as TRIDENT's save_h5 makes them.
            for dataset, values in (("features", rows), ("coords", slide.coords)):
                width = values.shape[1]
                file.create_dataset(dataset, data=values, chunks=(1, width), maxshape=(None, width))
            for dataset, about in attributes.items():
                file[dataset].attrs.update(about)
