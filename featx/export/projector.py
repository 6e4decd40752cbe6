"""export.format=projector: vectors and metadata as TSV for TensorBoard's stand-alone projector."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

from featx.errors import ConfigError
from featx.export.base import FORMATS, File, Format, FormatMember, refuse_maps
from featx.export.tensorboard.projector import metadata_text, vectors_text
from featx.types import Status

_TEXT_BYTES = 12
"""Approximate bytes of one number as text."""


class Projector(Format):
    """vectors-<layer>.tsv for each layer, and one metadata.tsv with label, key, row and columns.

    Raises:
        ConfigError: a layer holds maps, or a row has failed.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        selection = self.selection
        refuse_maps(selection, "the projector shows vectors")
        if (selection.status != Status.OK).any():
            raise ConfigError(
                "the projector cannot show rows without features. Leave them out with "
                "export.ok_only=true."
            )

    @property
    def num_bytes(self) -> int:
        """Approximate size of the export in bytes."""
        numbers = sum(self.selection.row_shape(name)[0] for name in self.selection.layers)
        return len(self.selection) * numbers * _TEXT_BYTES

    def files(self) -> list[File]:
        """Return one file per layer, and the metadata."""
        n = len(self.selection)
        files = [
            File(f"vectors-{name}.tsv", self._vectors(name), 0, n) for name in self.selection.layers
        ]
        return [*files, File("metadata.tsv", self._metadata, 0, n)]

    def _vectors(self, name: str) -> Any:
        """Return the function that writes the vectors of a layer."""

        def write(file: BinaryIO) -> None:
            selection = self.selection
            rows_per_block = max(1, selection.block_rows([name]) // _TEXT_BYTES)
            for _, _, values in selection.blocks(0, len(selection), [name], rows_per_block):
                file.write(vectors_text(values[name].astype("float32")))

        return write

    def _metadata(self, file: BinaryIO) -> None:
        """Write metadata.tsv."""
        file.write(metadata_text(self.selection.store, self.selection.rows))

    def opening(self, out: Path) -> str:
        """Return a sentence on how to load the files."""
        return (
            "Load vectors-<layer>.tsv and metadata.tsv at projector.tensorflow.org (they stay in "
            "your browser)\nor in any copy of TensorBoard's stand-alone projector."
        )


FORMATS.register(
    FormatMember(
        "projector", "vectors.tsv and metadata.tsv for TensorBoard's projector.", make=Projector
    )
)
