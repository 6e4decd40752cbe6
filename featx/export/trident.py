"""export.format=trident: one HDF5 file per slide with features and coordinates of its tiles.

The layout is that of TRIDENT (https://github.com/mahmoodlab/TRIDENT, `WSI.extract_patch_features`
and `coords_to_h5`), and with export.clam=true that of CLAM (https://github.com/mahmoodlab/CLAM,
`Generic_MIL_Dataset`) as well. A slide is the image whose boxes (data.boxes) are rows.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.base import as_utf8, name_text
from featx.config import Config, ExportConfig, Positive, options
from featx.errors import ConfigError
from featx.export.base import (
    FORMATS,
    ExportFolder,
    Format,
    FormatMember,
    literal,
    only_layer_of,
    refuse_maps,
)
from featx.export.selection import ExportSelection, with_texts
from featx.sources import parse_box_key
from featx.types import Array

_INDEX_BYTES = 256
"""Largest share of a row in the chunk indices of both datasets, in bytes; HDF5 needs 60 to 164."""

_HEADER_BYTES = 1 << 16
"""Bytes reserved for the headers and attributes of a file."""

_SIZES = ("level0_width", "level0_height")
"""Columns of the store that become attributes of the coordinates, if they exist."""


@options("export")
class TridentOptions(ExportConfig):
    """Options of export.format=trident."""

    magnification: Positive | None = None
    """Magnification of the whole images (level 0), such as 40. A store does not contain it; null
    takes the column level0_magnification of the data set."""
    target_magnification: Positive | None = None
    """Magnification at which TRIDENT is told that the boxes were read; null is that of the whole
    images. A box of 512 pixels at 40 is a patch of 256 at 20."""
    encoder: str | None = None
    """Name of the encoder, such as uni_v1: files are written to features_<encoder>, where the slide
    encoders of TRIDENT search them. null takes the name of the layer."""
    clam: bool = False
    """Also write h5_files and pt_files as CLAM reads them, in float32."""

    def __post_init__(self) -> None:
        if self.encoder is not None and "/" in self.encoder:
            raise ConfigError(f"export.encoder={self.encoder}: expected a name without '/'.")


@dataclass(frozen=True)
class _Slide:
    """Tiles of one image: their places in the selection, and their order in the file."""

    name: str
    places: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64]
    coords: npt.NDArray[np.int64]
    attributes: dict[str, Any]


class Trident(Format):
    """features_<encoder>/<slide>.h5 for each layer and slide; with clam, h5_files and pt_files."""

    def __init__(self, selection: ExportSelection, config: Config) -> None:
        super().__init__(selection, config)
        options = self._options = self.own_options(TridentOptions)
        refuse_maps(selection, "TRIDENT's files hold one vector per tile")
        for asked in ("clam", "encoder"):
            if getattr(options, asked):
                only_layer_of(selection, f"export.{asked}")
        self._slides = [
            self._slide(image, np.array(tiles, np.int64).reshape(-1, 5))
            for image, tiles in self._tiles().items()
        ]
        names = [slide.name for slide in self._slides]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(
                f"two slides are called {twice}. TRIDENT and CLAM find a slide by its file name "
                "without folder and ending; rename one of the images."
            )

    @property
    def num_bytes(self) -> int:
        row_bytes = _INDEX_BYTES
        if self._options.clam:
            row_bytes += 2 * 4 * self.selection.row_shape(self.selection.layers[0])[0]
        size = super().num_bytes + len(self.selection) * row_bytes
        return size + _HEADER_BYTES * len(self._slides)

    def write(self, folder: ExportFolder) -> None:
        """Write the files, slide by slide for each layer; a slide is held in memory."""
        for layer in self.selection.layers:
            encoder = self._options.encoder or layer
            name = f"features_{encoder}"
            for slide in self._slides:
                rows = self._rows(slide, layer)
                attributes = {
                    "features": {"name": slide.name, "savetodir": name, "encoder": encoder},
                    "coords": {**slide.attributes, "savetodir": name},
                }
                self._write_h5(folder, name, slide, rows, attributes)
                if self._options.clam:
                    import torch

                    rows = rows.astype(np.float32)
                    self._write_h5(folder, "h5_files", slide, rows, {})
                    with folder.file(f"pt_files/{slide.name}.pt") as file:
                        torch.save(torch.from_numpy(rows), file)

    def _tiles(self) -> dict[bytes, array[int]]:
        """Return image -> place, x, y, width and height of each of its tiles, one after the other.

        Objects of Python would take 300 bytes a tile.
        """
        tiles: dict[bytes, array[int]] = {}
        for place, key in enumerate(self.selection.each_key()):
            parsed = parse_box_key(key)
            if parsed is None:
                raise ConfigError(
                    f"{name_text(key)} is a whole image, and TRIDENT's files hold tiles of "
                    "slides. Extract boxes of the slides with data.boxes=FILE."
                )
            image, box = parsed
            numbers = (place, box.x, box.y, box.width, box.height)
            tiles.setdefault(image, array("q")).extend(numbers)
        return tiles

    def _slide(self, image: bytes, tiles: npt.NDArray[np.int64]) -> _Slide:
        """Return the tiles of an image in the order of its file."""
        image_name = as_utf8(name_text(image))
        sizes = np.unique(tiles[:, 3:], axis=0).tolist()
        if len(sizes) > 1 or sizes[0][0] != sizes[0][1]:
            sizes_text = ", ".join(f"{width} x {height}" for width, height in sizes[:3])
            raise ConfigError(
                f"the boxes of {image_name} are {sizes_text} pixels; TRIDENT has one patch size "
                "for a slide: expected squares of equal size."
            )
        name = PurePosixPath(image_name).stem
        places, positions = tiles[:, 0].copy(), tiles[:, 1:3]
        order = np.lexsort((positions[:, 0], positions[:, 1]))
        attributes = self._attributes(image_name, name, tiles)
        return _Slide(name, places, order, positions[order], attributes)

    def _attributes(self, image: str, name: str, tiles: npt.NDArray[np.int64]) -> dict[str, object]:
        """Return the attributes of `coords`, as TRIDENT's `coords_to_h5` writes them."""
        options, places, size = self._options, tiles[:, 0], int(tiles[0, 3])
        level0 = options.magnification or self._value_of("level0_magnification", image, places)
        if level0 is None:
            raise ConfigError(
                "TRIDENT needs the magnification of the slides, which a store does not contain. "
                "Give it with export.magnification=40, or extract with a column "
                "level0_magnification (data.columns)."
            )
        target = options.target_magnification or level0
        patch = size * target / level0
        if not patch.is_integer():
            raise ConfigError(
                f"boxes of {size} pixels at magnification {level0:g} are {patch:g} pixels at "
                f"export.target_magnification={target:g}: expected a whole number."
            )
        sizes = {column: self._value_of(column, image, places) for column in _SIZES}
        return {
            "patch_size": int(patch),
            "patch_size_level0": size,
            "level0_magnification": _as_whole(level0),
            "target_magnification": _as_whole(target),
            "overlap": round(_overlap(tiles[:, 1:3], size) * target / level0),
            "name": name,
            **{column: int(value) for column, value in sizes.items() if value is not None},
        }

    def _value_of(self, column: str, image: str, places: npt.NDArray[np.int64]) -> float | None:
        """Return the number of a slide in a column, or None if there is no such column."""
        values = self.selection.columns.get(column)
        if values is None:
            return None
        distinct = np.unique(with_texts(values[places]))
        if len(distinct) > 1 or distinct.dtype.kind not in "if" or not distinct[0] > 0:
            values_text = ", ".join(map(str, distinct[:3]))
            raise ConfigError(
                f"the column {column} of {image} holds {values_text}: expected one number above 0 "
                "for all boxes of a slide."
            )
        return float(distinct[0])

    def _rows(self, slide: _Slide, layer: str) -> Array:
        """Return the features of a slide in the order of its file."""
        tiles = replace(self.selection, rows=self.selection.rows[slide.places])
        blocks = [values[layer] for _, _, values in tiles.blocks(0, len(tiles), [layer])]
        return np.concatenate(blocks)[slide.order]

    def _write_h5(
        self,
        folder: ExportFolder,
        name: str,
        slide: _Slide,
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

    def opening(self, out: Path) -> str:
        encoder = self._options.encoder or self.selection.layers[0]
        first = f"features_{encoder}/{self._slides[0].name}.h5"
        return (
            "import h5py\n"
            f"with h5py.File({literal(f'{out}/{first}')}) as file:\n"
            '    X, coords = file["features"][:], file["coords"][:]\n'
            '    attributes = dict(file["coords"].attrs)'
        )


def _overlap(positions: npt.NDArray[np.int64], size: int) -> int:
    """Return by how many pixels tiles of a grid overlap the next ones; 0 if there is none."""
    steps = np.concatenate([np.diff(np.unique(axis)) for axis in positions.T])
    return max(0, size - int(steps.min(initial=size)))


def _as_whole(number: float) -> int | float:
    """Return a whole number as int, as TRIDENT writes magnifications."""
    return int(number) if float(number).is_integer() else number


FORMATS.register(
    FormatMember(
        "trident",
        "HDF5 files of tiles and coordinates per slide, for TRIDENT and CLAM.",
        TridentOptions,
        make=Trident,
        holds_failed_rows=False,
    )
)
