"""export.format=zarr: one zarr v3 group with an array per layer, in chunks of the store's rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from featx.base import import_extra
from featx.config import Config
from featx.errors import ConfigError
from featx.export.base import FORMATS, ExportFolder, Format, FormatMember, literal
from featx.export.selection import ExportSelection, with_texts
from featx.types import Array

if TYPE_CHECKING:
    import zarr

_NAME = "features.zarr"
_OWN_FILE = "zarr.json"
"""Metadata file that zarr keeps in each folder."""
_ROW = "row"
"""Name of the first dimension of all arrays, which xarray needs, and of the array of row numbers.
Other dimensions have the name of their layer, as one name has one size in xarray."""
_COLUMN_ROWS = 1 << 14
"""Rows per chunk of an array with one value per row."""


class Zarr(Format):
    """features.zarr with features/<layer>, columns/<name>, key, label, status and row.

    The origin of the rows is in the attributes of the group.
    """

    def __init__(self, selection: ExportSelection, config: Config) -> None:
        super().__init__(selection, config)
        import_extra("zarr", "export.format=zarr", "the package zarr", "export")
        for name in (*self.selection.layers, *self.selection.columns):
            if name == _OWN_FILE or "\\" in name:
                raise ConfigError(
                    f"zarr cannot hold an array called {name}: each of its folders has a file "
                    f"{_OWN_FILE}, and it takes '\\' for '/'. Choose another export.format."
                )

    def write(self, folder: ExportFolder) -> None:
        import zarr

        with folder.folder(_NAME) as path:
            self._fill(zarr.open_group(path, mode="w", zarr_format=3))

    def _fill(self, group: zarr.Group) -> None:
        selection, n = self.selection, len(self.selection)
        group.attrs["featx"] = selection.about
        for name in selection.layers:
            rows = selection.store[name].chunk_rows
            shape = selection.row_shape(name)
            array = group.create_array(
                f"features/{name}",
                shape=(n, *shape),
                chunks=(max(1, min(rows, n)), *shape),
                dtype=selection.dtype(name),
                fill_value=float("nan"),
                dimension_names=(_ROW, *(f"{name}.axis{i}" for i in range(1, len(shape) + 1))),
            )
            # Whole chunks are written at a time: a partial chunk would be read and written again.
            rows_per_block = max(rows, selection.block_rows([name]) // rows * rows)
            for start, stop, values in selection.blocks(0, n, [name], rows_per_block):
                array[start:stop] = values[name]
        columns: dict[str, Array] = {
            "label": selection.labels,
            "status": selection.status,
            _ROW: selection.rows,
            **{f"columns/{name}": values for name, values in selection.columns.items()},
        }
        for name, column in columns.items():
            if column.dtype.kind == "S":
                self._write_texts(group, name, column)
                continue
            array = group.create_array(
                name, shape=(n,), chunks=_chunks(n), dtype=column.dtype, dimension_names=(_ROW,)
            )
            array[:] = column
        self._write_texts(group, "key", None)

    def _write_texts(
        self, group: zarr.Group, name: str, texts: npt.NDArray[np.bytes_] | None
    ) -> None:
        """Write an array of texts block by block; None writes the keys."""
        n = len(self.selection)
        array = group.create_array(
            name, shape=(n,), chunks=_chunks(n), dtype=str, dimension_names=(_ROW,)
        )
        for start in range(0, n, _COLUMN_ROWS):
            stop = min(n, start + _COLUMN_ROWS)
            block = self.selection.key_texts(start, stop)
            if texts is not None:
                block = with_texts(texts[start:stop]).tolist()
            array[start:stop] = np.array(block, np.dtypes.StringDType())

    def opening(self, out: Path) -> str:
        return (
            "import zarr\n"
            f'group = zarr.open_group({literal(f"{out}/{_NAME}")}, mode="r")\n'
            f'X, y = group[{literal(f"features/{self.selection.layers[0]}")}], group["label"][:]'
        )


def _chunks(num_rows: int) -> tuple[int]:
    return (max(1, min(_COLUMN_ROWS, num_rows)),)


FORMATS.register(
    FormatMember("zarr", "A Zarr store with one array per layer.", extra="export", make=Zarr)
)
