"""export.format=npy: one .npy array per layer, which numpy can map into memory, and the listing."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from featx.export.base import FORMATS, File, Format, FormatMember, literal
from featx.export.selection import BLOCK_BYTES


class Npy(Format):
    """One .npy file per layer and per column of the listing.

    The files are features/<layer>.npy, keys.npy (bytes), labels.npy, status.npy, rows.npy,
    classes.json, and columns/<name>.npy for each column of the store, with texts as bytes. Layers
    of reduce=sample have positions/<layer>.npy as well, (n, k) int32.
    """

    def files(self) -> list[File]:
        """Return one file per layer and per column of the listing."""
        selection, n = self.selection, len(self.selection)
        files = [self._layer(name) for name in selection.layers]
        files += [self._positions(name) for name in selection.layers if selection.is_sampled(name)]
        columns = {
            "keys": selection.keys,
            "labels": selection.labels,
            "status": selection.status,
            "rows": selection.rows,
            **{f"columns/{name}": values for name, values in selection.column_arrays.items()},
        }
        for name, column in columns.items():

            def save(file: BinaryIO, column: Any = column) -> None:
                np.lib.format.write_array(file, column, allow_pickle=False)

            files.append(File(f"{name}.npy", save, 0, n))
        text = json.dumps(selection.classes, ensure_ascii=False).encode()
        files.append(File("classes.json", lambda file: file.write(text), 0, n))
        return files

    def _layer(self, name: str) -> File:
        """Return the file of a layer."""
        write = functools.partial(self.selection.write_npy, layer=name)
        return File(f"features/{name}.npy", write, 0, len(self.selection))

    def _positions(self, name: str) -> File:
        """Return the file of the positions of sampled tokens."""
        selection, n = self.selection, len(self.selection)

        def write(file: BinaryIO) -> None:
            shape = (n, selection.row_shape(name)[0])
            header = {"descr": "<i4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            step = max(1, BLOCK_BYTES // (8 * shape[1]))
            for start in range(0, n, step):
                positions = selection.positions(name, start, min(n, start + step))
                file.write(positions.astype("<i4").data)

        return File(f"positions/{name}.npy", write, 0, n)

    def opening(self, out: Path) -> str:
        """Return lines that load the arrays with numpy."""
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
