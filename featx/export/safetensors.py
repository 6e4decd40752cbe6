"""export.format=safetensors: shards of rows with one tensor per layer, which can be mapped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from featx.config import Config
from featx.export.base import (
    FORMATS,
    ExportFolder,
    FormatMember,
    ShardedFormat,
    ShardOptions,
    literal,
)
from featx.export.selection import ExportSelection, about_text
from featx.types import Array

_LISTING_BYTES = 8 + 8 + 1
"""Bytes of the row number, label and status of a row."""

_TAKEN = ("row", "label", "status", "key", "__metadata__")
"""Names that no column and no layer can have."""


class Safetensors(ShardedFormat):
    """features-*.safetensors with the layers, row, label, status, key and the store's columns.

    Texts are uint8 tensors padded with 0.
    """

    def __init__(self, selection: ExportSelection, config: Config) -> None:
        super().__init__(selection, config)
        self._columns = self.selection.named_columns(_TAKEN)
        row_bytes = self.selection.row_bytes() + _LISTING_BYTES + self.selection.keys.dtype.itemsize
        row_bytes += sum(values.dtype.itemsize for values in self._columns.values())
        self._shards = self.shards(row_bytes, "features-{}.safetensors")

    def write(self, folder: ExportFolder) -> None:
        """Write the shards, each of which is held in memory twice."""
        from safetensors.numpy import save

        for name, start, stop in self._shards:
            with folder.file(name) as file:
                metadata = {"featx": about_text(self.selection)}
                file.write(save(self._tensors(start, stop), metadata))

    def _tensors(self, start: int, stop: int) -> dict[str, Array]:
        selection = self.selection
        tensors: dict[str, Array] = {
            "row": selection.rows[start:stop],
            "label": selection.labels[start:stop],
            "status": selection.status[start:stop],
            "key": _as_bytes(selection.keys[start:stop]),
        }
        for name, values in self._columns.items():
            is_text = values.dtype.kind == "S"
            tensors[name] = _as_bytes(values[start:stop]) if is_text else values[start:stop]
        for name in selection.layers:
            shape = (stop - start, *selection.row_shape(name))
            tensors[name] = np.empty(shape, selection.dtype(name))
        for first, last, block in selection.blocks(start, stop):
            for name, rows in block.items():
                tensors[name][first - start : last - start] = rows
        return tensors

    def opening(self, out: Path) -> str:
        first, _, _ = self._shards[0]
        return (
            "from safetensors.numpy import load_file\n"
            f"shard = load_file({literal(f'{out}/{first}')})\n"
            f'X, y = shard[{literal(self.selection.layers[0])}], shard["label"]'
        )


def _as_bytes(texts: npt.NDArray[np.bytes_]) -> npt.NDArray[np.uint8]:
    """Convert (n,) texts of at most W bytes to (n, W) uint8; shorter texts are padded with 0."""
    raw = np.ascontiguousarray(texts).view(np.uint8)
    return raw.reshape(len(texts), texts.dtype.itemsize)


FORMATS.register(
    FormatMember(
        "safetensors",
        "safetensors files of keys, labels and features.",
        ShardOptions,
        make=Safetensors,
    )
)
