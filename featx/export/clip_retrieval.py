"""export.format=clip_retrieval: shards of unit vectors and of metadata, as clip-retrieval has them.

The layout is that of `clip_retrieval.clip_inference.writer`
(https://github.com/rom1504/clip-retrieval); embedding_reader and autofaiss read it too.
"""

from __future__ import annotations

from pathlib import Path

from featx.base import import_extra
from featx.config import Config
from featx.export import arrow
from featx.export.base import (
    FORMATS,
    ExportFolder,
    FormatMember,
    ShardedFormat,
    ShardOptions,
    literal,
    only_layer_of,
    refuse_maps,
)
from featx.export.selection import ExportSelection, unit_rows, write_npy

_LISTING = ("image_path", "row", "label", "class")
_VECTORS = "img_emb/img_emb_{}.npy"
_METADATA = "metadata/metadata_{}.parquet"


class ClipRetrieval(ShardedFormat):
    """img_emb/img_emb_<k>.npy with metadata/metadata_<k>.parquet.

    Rows are divided by their Euclidean length in float32 and rounded to float16; a row of zeros
    stays as it is. Readers sort the names of both folders, so k has leading zeros.
    """

    def __init__(self, selection: ExportSelection, config: Config) -> None:
        super().__init__(selection, config)
        option = "export.format=clip_retrieval"
        self._layer = only_layer_of(self.selection, option)
        refuse_maps(self.selection, "clip-retrieval holds one vector per image")
        import_extra("pyarrow.parquet", option, "the package pyarrow", "export")
        self._columns = self.selection.named_columns(_LISTING)
        self._width = self.selection.row_shape(self._layer)[0]
        shards = self.shards(2 * self._width)
        digits = len(str(len(shards) - 1))
        self._shards = [
            (f"{i:0{digits}d}", start, stop) for i, (_, start, stop) in enumerate(shards)
        ]

    def write(self, folder: ExportFolder) -> None:
        """Write the shards, vectors before metadata."""
        import pyarrow as pa

        for number, start, stop in self._shards:
            with folder.file(_VECTORS.format(number)) as file:
                blocks = self.selection.blocks(start, stop)
                rows = (unit_rows(values[self._layer]) for _, _, values in blocks)
                write_npy(file, "<f2", (stop - start, self._width), rows)
            tables = (
                pa.table(arrow.listing(self.selection, *span, _LISTING, self._columns))
                for span in self.selection.spans(start, stop)
            )
            with folder.file(_METADATA.format(number)) as file:
                arrow.write_parquet(file, tables)

    def opening(self, out: Path) -> str:
        first = self._shards[0][0]
        return (
            "import numpy as np, pandas as pd  # or embedding_reader, autofaiss, clip-retrieval\n"
            f"X = np.load({literal(f'{out}/{_VECTORS.format(first)}')})\n"
            f"paths = pd.read_parquet({literal(f'{out}/{_METADATA.format(first)}')})['image_path']"
        )


FORMATS.register(
    FormatMember(
        "clip_retrieval",
        "Unit vectors and metadata in the shards of clip-retrieval, for autofaiss as well.",
        ShardOptions,
        extra="export",
        make=ClipRetrieval,
        holds_failed_rows=False,
    )
)
