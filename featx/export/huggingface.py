"""export.format=huggingface: a data set for `datasets.load_from_disk`, written without a cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

from featx.base import digest, import_extra
from featx.config import Config
from featx.export import arrow
from featx.export.base import (
    FORMATS,
    ExportFolder,
    FormatMember,
    ShardedFormat,
    ShardOptions,
    literal,
)
from featx.export.selection import ExportSelection
from featx.types import Json

_LISTING = ("key", "row", "label", "status")

_VALUES = {"S": "string", "i": "int64", "f": "float64", "b": "bool"}
"""Kind of NumPy dtype of a store's column -> name of the type in `datasets`."""


class HuggingFace(ShardedFormat):
    """data-*.arrow with dataset_info.json and state.json, as `save_to_disk` writes them.

    `datasets` itself would write all data twice, to its cache and to the folder.
    """

    def __init__(self, selection: ExportSelection, config: Config) -> None:
        super().__init__(selection, config)
        import_extra("datasets", "export.format=huggingface", "the package datasets", "huggingface")
        self._columns = self.selection.named_columns(_LISTING)

    def write(self, folder: ExportFolder) -> None:
        """Write the Arrow shards and the two JSON files."""
        row_bytes = self.selection.row_bytes() + arrow.OTHER_ROW_BYTES
        shards = self.shards(row_bytes, "data-{}.arrow")
        for name, start, stop in shards:
            with folder.file(name) as file:
                self._write_shard(file, start, stop)
        about = self.selection.about
        info = {
            "citation": "",
            "description": f"{', '.join(self.selection.layers)} of {about['model']}, "
            f"{about['weights']}",
            "features": self._features().to_dict(),
            "homepage": "",
            "license": "",
        }
        state: Json = {
            "_data_files": [{"filename": name} for name, _, _ in shards],
            "_fingerprint": digest(self.selection.fingerprint)[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        for name, values in (("dataset_info.json", info), ("state.json", state)):
            with folder.file(name) as file:
                file.write(json.dumps(values, indent=2).encode())

    def _features(self) -> Any:
        """Return the description of the columns for `datasets`; rows of a map are nested lists."""
        from datasets import ClassLabel, Features, List, Value

        selection = self.selection
        columns: dict[str, object] = {"key": Value("string"), "row": Value("int64")}
        names = selection.classes
        columns["label"] = ClassLabel(names=names) if names else Value("int64")
        columns["status"] = Value("uint8")
        for name, values in self._columns.items():
            columns[name] = Value(_VALUES[values.dtype.kind])
        for name in selection.layers:
            kind = Value(str(selection.dtype(name)))
            for size in reversed(selection.row_shape(name)):
                kind = List(kind, length=size)
            columns[name] = kind
        return Features(columns)

    def _write_shard(self, file: BinaryIO, start: int, stop: int) -> None:
        import pyarrow as pa

        schema = self._features().arrow_schema
        with pa.ipc.new_stream(file, schema) as writer:
            for first, last, values in self.selection.blocks(start, stop):
                columns = arrow.listing(self.selection, first, last, _LISTING, self._columns)
                columns |= {name: arrow.lists(rows, nested=True) for name, rows in values.items()}
                writer.write_table(pa.table(columns).cast(schema))

    def opening(self, out: Path) -> str:
        return (
            "from datasets import load_from_disk\n"
            f'rows = load_from_disk({literal(out)}).with_format("numpy")\n'
            f'rows[:10][{literal(self.selection.layers[0])}], rows[:10]["label"]'
        )


FORMATS.register(
    FormatMember(
        "huggingface",
        "A data set that datasets.load_from_disk reads.",
        ShardOptions,
        extra="huggingface",
        make=HuggingFace,
    )
)
