"""export.format=clam: the tiles of each slide as CLAM reads them.

The layout is that of CLAM (https://github.com/mahmoodlab/CLAM, `Generic_MIL_Dataset`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from featx.config import Config
from featx.export.base import FORMATS, ExportFolder, FormatMember, literal, only_layer_of
from featx.export.selection import ExportSelection
from featx.export.slides import SlideFormat


class Clam(SlideFormat):
    """h5_files/<slide>.h5 and pt_files/<slide>.pt of each slide, in float32."""

    def __init__(self, selection: ExportSelection, config: Config) -> None:
        super().__init__(selection, config)
        self._layer = only_layer_of(selection, "export.format=clam")

    @property
    def num_bytes(self) -> int:
        bytes_of_both = 2 * 4 * self.selection.row_shape(self._layer)[0]
        return super().num_bytes + len(self.selection) * bytes_of_both

    def write(self, folder: ExportFolder) -> None:
        """Write the files, slide by slide; a slide is held in memory."""
        import torch

        for slide in self.slides:
            rows = self.rows_of(slide, self._layer).astype(np.float32)
            self.write_h5(folder, "h5_files", slide, rows, {})
            with folder.file(f"pt_files/{slide.name}.pt") as file:
                torch.save(torch.from_numpy(rows), file)

    def opening(self, out: Path) -> str:
        return (
            f"import torch\nX = torch.load({literal(f'{out}/pt_files/{self.slides[0].name}.pt')})"
        )


FORMATS.register(
    FormatMember(
        "clam",
        "HDF5 files and tensors of tiles per slide, for CLAM.",
        make=Clam,
        holds_failed_rows=False,
    )
)
