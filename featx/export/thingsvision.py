"""export.format=thingsvision: features.npy with file_names.txt, as thingsvision writes them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, BinaryIO

from featx.errors import ConfigError
from featx.export.base import FORMATS, File, Format, FormatMember, literal
from featx.export.selection import as_utf8


class ThingsVision(Format):
    """features.npy, (n, ...) in the dtype of the store, and file_names.txt with one key a line.

    With several layers, each has a folder <layer>/features.npy, as `extract_features` of
    thingsvision with `output_dir` and `save_in_one_file` makes them.

    Raises:
        ConfigError: a key contains a line end.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        broken = [key for key in self.selection.keys.tolist() if b"\n" in key or b"\r" in key]
        if broken:
            raise ConfigError(
                f"the key {as_utf8(broken[0].decode('utf-8', 'surrogateescape'))!r} contains a "
                "line end, and file_names.txt has one key a line. Choose another export.format."
            )

    def files(self) -> list[File]:
        """Return one file per layer, and the names."""
        layers, n = self.selection.layers, len(self.selection)
        files = [
            File(self._name(layer), functools.partial(self._write, layer), 0, n) for layer in layers
        ]
        return [*files, File("file_names.txt", self._write_names, 0, n)]

    def _name(self, layer: str) -> str:
        """Return the file name of a layer."""
        return "features.npy" if len(self.selection.layers) == 1 else f"{layer}/features.npy"

    def _write(self, layer: str, file: BinaryIO) -> None:
        """Write the rows of a layer block by block."""
        self.selection.write_npy(file, layer)

    def _write_names(self, file: BinaryIO) -> None:
        """Write the keys in the order of the rows."""
        for name in self.selection.key_texts(0, len(self.selection)):
            file.write(f"{name}\n".encode())

    def opening(self, out: Path) -> str:
        """Return lines that load rows and names."""
        return (
            "import numpy as np\nfrom pathlib import Path\n"
            f"X = np.load({literal(f'{out}/{self._name(self.selection.layers[0])}')})\n"
            f"text = Path({literal(f'{out}/file_names.txt')}).read_text('utf-8')\n"
            "names = text.split('\\n')[:-1]"
        )


FORMATS.register(
    FormatMember(
        "thingsvision",
        "features.npy and file_names.txt, as thingsvision writes them.",
        make=ThingsVision,
        holds_failed_rows=False,
    )
)
