"""export.format=npy: one .npy array per layer, which numpy can map into memory, and the listing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

import numpy as np

from featx.base import rows_of_block
from featx.export.base import FORMATS, ExportFolder, Format, FormatMember, literal
from featx.export.selection import write_npy


class Npy(Format):
    """One .npy file per layer and per column of the listing.

    The files are features/<layer>.npy, keys.npy (bytes), labels.npy, status.npy, rows.npy,
    classes.json, and columns/<name>.npy for each column of the store, with texts as bytes. Layers
    of reduce=sample have positions/<layer>.npy as well, (n, k) int32.
    """

    def write(self, folder: ExportFolder) -> None:
        """Write one file per layer and per column of the listing."""
        selection, n = self.selection, len(self.selection)
        for name in selection.layers:
            with folder.file(f"features/{name}.npy") as file:
                blocks = (values[name] for _, _, values in selection.blocks(0, n, [name]))
                write_npy(file, selection.dtype(name), (n, *selection.row_shape(name)), blocks)
            if selection.is_sampled(name):
                with folder.file(f"positions/{name}.npy") as file:
                    self._write_positions(file, name)
        columns = {
            "keys": selection.keys,
            "labels": selection.labels,
            "status": selection.status,
            "rows": selection.rows,
            **{f"columns/{name}": values for name, values in selection.columns.items()},
        }
        for name, column in columns.items():
            with folder.file(f"{name}.npy") as file:
                np.lib.format.write_array(file, column, allow_pickle=False)
        with folder.file("classes.json") as file:
            file.write(json.dumps(selection.classes, ensure_ascii=False).encode())

    def _write_positions(self, file: BinaryIO, layer: str) -> None:
        selection, n = self.selection, len(self.selection)
        num_tokens = selection.row_shape(layer)[0]
        step = rows_of_block(16 * num_tokens)
        starts = range(0, n, step)
        blocks = (selection.positions(layer, start, min(n, start + step)) for start in starts)
        write_npy(file, "<i4", (n, num_tokens), blocks)

    def opening(self, out: Path) -> str:
        layer = self.selection.layers[0]
        return (
            "import numpy as np\n"
            f'X = np.load({literal(f"{out}/features/{layer}.npy")}, mmap_mode="r")\n'
            f"keys = np.load({literal(f'{out}/keys.npy')})\n"
            f"y = np.load({literal(f'{out}/labels.npy')})"
        )


FORMATS.register(
    FormatMember("npy", "One .npy array per layer, which numpy can map into memory.", make=Npy)
)
