"""export.format=trident: one HDF5 file per slide with features and coordinates of its tiles.

The layout is that of TRIDENT (https://github.com/mahmoodlab/TRIDENT, `WSI.extract_patch_features`
and `coords_to_h5`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from annotated_types import Len

from featx.config import Config, ExportConfig, Positive, options
from featx.errors import ConfigError
from featx.export.base import FORMATS, ExportFolder, FormatMember, literal, only_layer_of
from featx.export.selection import ExportSelection, with_texts
from featx.export.slides import Slide, SlideFormat

_SIZES = ("level0_width", "level0_height")
"""Columns of the store that become attributes of the coordinates, if they exist."""


_Magnification = Annotated[
    Positive | Annotated[list[Positive | None], Len(2, 2)] | None,
    "a number above 0, [of the images,of the boxes], of which one may be null, or null",
]


@options("export")
class TridentOptions(ExportConfig):
    """Options of export.format=trident."""

    format: str = "trident"
    magnification: _Magnification = None
    """Magnification of the whole images (level 0), such as 40, or [40,20] with the one at which
    TRIDENT is told that the boxes were read: a box of 512 pixels at 40 is a patch of 256 at 20. A
    store does not contain it; null takes the column level0_magnification of the data set."""
    encoder: str | None = None
    """Name of the encoder, such as uni_v1: files are written to features_<encoder>, where the slide
    encoders of TRIDENT search them. null takes the name of the layer."""

    def __post_init__(self) -> None:
        if self.encoder is not None and "/" in self.encoder:
            raise ConfigError(f"export.encoder={self.encoder}: expected a name without '/'.")

    @property
    def magnifications(self) -> Sequence[float | None]:
        """Those of the whole images and of the boxes; None if it is not given."""
        given = self.magnification
        return given if isinstance(given, list) else (given, None)


class Trident(SlideFormat):
    """features_<encoder>/<slide>.h5 for each layer and slide."""

    def __init__(self, selection: ExportSelection, config: Config) -> None:
        super().__init__(selection, config)
        self._options = self.own_options(TridentOptions)
        if self._options.encoder:
            only_layer_of(selection, "export.encoder")
        self._attributes = {slide.name: self._attributes_of(slide) for slide in self.slides}

    def write(self, folder: ExportFolder) -> None:
        """Write the files, slide by slide for each layer; a slide is held in memory."""
        for layer in self.selection.layers:
            encoder = self._options.encoder or layer
            name = f"features_{encoder}"
            for slide in self.slides:
                attributes: dict[str, dict[str, object]] = {
                    "features": {"name": slide.name, "savetodir": name, "encoder": encoder},
                    "coords": {**self._attributes[slide.name], "savetodir": name},
                }
                self.write_h5(folder, name, slide, self.rows_of(slide, layer), attributes)

    def _attributes_of(self, slide: Slide) -> dict[str, object]:
        """Return the attributes of `coords`, as TRIDENT's `coords_to_h5` writes them."""
        level0, target = self._options.magnifications
        level0 = level0 or self._value_of("level0_magnification", slide)
        if level0 is None:
            raise ConfigError(
                "TRIDENT needs the magnification of the slides, which a store does not contain. "
                "Give it with export.magnification=40, or extract with a column "
                "level0_magnification (data.columns)."
            )
        target = target or level0
        patch = slide.size * target / level0
        if not patch.is_integer():
            raise ConfigError(
                f"export.magnification=[{level0:g},{target:g}]: boxes of {slide.size} pixels at "
                f"{level0:g} are {patch:g} pixels at {target:g}: expected a whole number."
            )
        sizes = {column: self._value_of(column, slide) for column in _SIZES}
        return {
            "patch_size": int(patch),
            "patch_size_level0": slide.size,
            "level0_magnification": _as_whole(level0),
            "target_magnification": _as_whole(target),
            "overlap": round(_overlap(slide.coords, slide.size) * target / level0),
            "name": slide.name,
            **{column: int(value) for column, value in sizes.items() if value is not None},
        }

    def _value_of(self, column: str, slide: Slide) -> float | None:
        """Return the number of a slide in a column, or None if there is no such column."""
        values = self.selection.columns.get(column)
        if values is None:
            return None
        distinct = np.unique(with_texts(values[slide.places]))
        if len(distinct) > 1 or distinct.dtype.kind not in "if" or not distinct[0] > 0:
            values_text = ", ".join(map(str, distinct[:3]))
            raise ConfigError(
                f"the column {column} of {slide.image} holds {values_text}: expected one number "
                "above 0 for all boxes of a slide."
            )
        return float(distinct[0])

    def opening(self, out: Path) -> str:
        encoder = self._options.encoder or self.selection.layers[0]
        first = f"features_{encoder}/{self.slides[0].name}.h5"
        return (
            "import h5py\n"
            f"with h5py.File({literal(f'{out}/{first}')}) as file:\n"
            '    X, coords = file["features"][:], file["coords"][:]\n'
            '    attributes = dict(file["coords"].attrs)'
        )


def _overlap(positions: npt.NDArray[np.int64], size: int) -> int:
    """Return by how many pixels tiles overlap the next ones of their row or column at most; 0 if
    there are none.
    """
    step = size
    for axis, other in (positions.T, positions.T[::-1]):
        order = np.lexsort((axis, other))
        distances = np.diff(axis[order])[np.diff(other[order]) == 0]
        step = int(distances[distances > 0].min(initial=step))
    return size - step


def _as_whole(number: float) -> int | float:
    """Return a whole number as int, as TRIDENT writes magnifications."""
    return int(number) if float(number).is_integer() else number


FORMATS.register(
    FormatMember(
        "trident",
        "HDF5 files of tiles and coordinates per slide, for TRIDENT.",
        TridentOptions,
        make=Trident,
        holds_failed_rows=False,
    )
)
