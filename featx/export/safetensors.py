"""export.format=safetensors: shards of rows with one tensor per layer, which can be mapped.

A file consists of a length (8 bytes), a JSON header and the tensors in sequence, so it is written
block by block here; the library's own `save_file` needs a whole shard in memory.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from featx.export.base import FORMATS, File, FormatMember, ShardedFormat, ShardOptions, literal
from featx.export.selection import about_text

_NAMES = {
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Name of a NumPy dtype -> name in safetensors."""

_LISTING_BYTES = 8 + 8 + 1
"""Bytes of the row number, label and status of a row."""

_TAKEN = ("row", "label", "status", "key", "__metadata__")
"""Names that no column and no layer can have."""


class Safetensors(ShardedFormat):
    """features-*.safetensors with the layers, row, label, status, key and the store's columns.

    Texts are uint8 tensors padded with 0.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        arrays = self.selection.column_arrays
        names = zip(self.selection.named_columns(_TAKEN), arrays, strict=True)
        self._columns = {column_name: arrays[name] for column_name, name in names}

    def files(self) -> list[File]:
        """Return the shards."""
        row_bytes = self.selection.row_bytes() + _LISTING_BYTES + self.selection.keys.dtype.itemsize
        row_bytes += sum(values.dtype.itemsize for values in self._columns.values())
        return self.shards("features", "safetensors", row_bytes, self._write)

    def _write(self, file: BinaryIO, start: int, stop: int) -> None:
        """Write rows [start, stop)."""
        selection = self.selection
        leading: dict[str, npt.NDArray[Any]] = {
            "row": selection.rows[start:stop],
            "label": selection.labels[start:stop],
            **self._part_of_columns(start, stop, "if"),
        }
        # Tensors are sorted by falling item size, so each one is aligned to its item size.
        layers = sorted(selection.layers, key=lambda name: -selection.dtype(name).itemsize)
        trailing: dict[str, npt.NDArray[Any]] = {
            "status": selection.status[start:stop],
            "key": _as_bytes(selection.keys[start:stop]),
            **self._part_of_columns(start, stop, "Sb"),
        }
        shapes = {name: (values.dtype, values.shape) for name, values in leading.items()}
        for name in layers:
            shapes[name] = selection.dtype(name), (stop - start, *selection.row_shape(name))
        shapes |= {name: (values.dtype, values.shape) for name, values in trailing.items()}
        file.write(_header(shapes, {"featx": about_text(selection)}))
        for values in leading.values():
            file.write(np.ascontiguousarray(values).data)
        for name in layers:
            for _, _, layer_values in selection.blocks(start, stop, [name]):
                file.write(layer_values[name].data)
        for values in trailing.values():
            file.write(np.ascontiguousarray(values).data)

    def _part_of_columns(self, start: int, stop: int, kinds: str) -> dict[str, npt.NDArray[Any]]:
        """Return rows [start, stop) of the columns whose dtype has one of some kinds."""
        columns = {
            name: values[start:stop]
            for name, values in self._columns.items()
            if values.dtype.kind in kinds
        }
        return {
            name: _as_bytes(values) if values.dtype.kind == "S" else values
            for name, values in columns.items()
        }

    def opening(self, out: Path) -> str:
        """Return lines that load the first shard."""
        first = self.files()[0].name
        return (
            "from safetensors.numpy import load_file\n"
            f"shard = load_file({literal(f'{out}/{first}')})\n"
            f'X, y = shard[{literal(self.selection.layers[0])}], shard["label"]'
        )


def _as_bytes(texts: npt.NDArray[np.bytes_]) -> npt.NDArray[np.uint8]:
    """Convert (n,) texts of at most W bytes to (n, W) uint8; shorter texts are padded with 0."""
    raw = np.ascontiguousarray(texts).view(np.uint8)
    return raw.reshape(len(texts), texts.dtype.itemsize)


def _header(
    shapes: dict[str, tuple[np.dtype[Any], tuple[int, ...]]], metadata: dict[str, str]
) -> bytes:
    """Return the length and the header for tensors in sequence.

    Args:
        shapes: name -> dtype and shape, in the order of the file.
        metadata: texts for the entry __metadata__.
    """
    entries: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape) in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": _NAMES[dtype.name],
            "shape": shape,
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(entries).encode()
    # Padded with spaces so that the tensors start at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


FORMATS.register(
    FormatMember(
        "safetensors",
        "safetensors files of keys, labels and features.",
        ShardOptions,
        make=Safetensors,
    )
)
