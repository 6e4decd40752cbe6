"""export.format=hloc: global descriptors as hloc reads them for retrieval.

The layout is that of `extract_features` and `pairs_from_retrieval` of hloc
(https://github.com/cvg/Hierarchical-Localization): a group per image with `global_descriptor`.
"""

from __future__ import annotations

from pathlib import Path

from featx.base import log_message, name_text
from featx.config import Config
from featx.errors import ConfigError, counted
from featx.export.base import FORMATS, ExportFolder, Format, FormatMember, literal, refuse_maps
from featx.export.selection import ExportSelection, is_utf8, unit_rows

_NAME = "global_descriptor"
_FILE = "global-feats-{}.h5"

_GROUP_BYTES = 2048
"""Largest size of the group and the dataset of one image, without key and values; HDF5 needs about
600 bytes, and more for the folders in keys."""


class Hloc(Format):
    """global-feats-<layer>.h5 with <key>/global_descriptor, (D,) float16, of length 1.

    hloc ranks images by inner products, and its own descriptors have length 1 (L2).
    """

    def __init__(self, selection: ExportSelection, config: Config) -> None:
        super().__init__(selection, config)
        refuse_maps(self.selection, "hloc has one global descriptor per image")
        spaces = 0
        for key in self.selection.each_key():
            has_odd_part = not {b"", b".", b"..", _NAME.encode()}.isdisjoint(key.split(b"/"))
            if has_odd_part or not is_utf8(key) or b"\0" in key:
                raise ConfigError(
                    f"the key {name_text(key)!r} cannot be the name of a group in HDF5: expected "
                    "UTF-8 text without empty parts, '.' or '..' between its '/'."
                )
            spaces += len(key.split()) > 1
        if spaces:
            log_message(
                f"{counted(spaces, 'key has', 'keys have')} spaces. hloc divides the lines of its "
                "lists of pairs at spaces.",
                level="warning",
            )

    def write(self, folder: ExportFolder) -> None:
        """Write one file per layer, with the descriptors in the order of the store."""
        selection, n = self.selection, len(self.selection)
        # Groups of this version of the format take 0.6 instead of 3 KB; HDF5 reads it since 1.10.
        libver = ("v110", "v110")
        for layer in selection.layers:
            row_bytes = 2 * selection.row_shape(layer)[0] + 4 * selection.keys.dtype.itemsize
            most_bytes = n * (row_bytes + _GROUP_BYTES) + (1 << 20)
            with folder.hdf5_file(_FILE.format(layer), most_bytes, libver) as file:
                for start, stop, values in selection.blocks(0, n, [layer]):
                    rows = unit_rows(values[layer]).astype("f2")
                    for key, row in zip(selection.keys[start:stop].tolist(), rows, strict=True):
                        file.create_group(key).create_dataset(_NAME, data=row)

    def opening(self, out: Path) -> str:
        path = literal(f"{out}/{_FILE.format(self.selection.layers[0])}")
        key = literal(self.selection.key_texts(0, 1)[0])
        return (
            "import h5py  # or hloc.pairs_from_retrieval.main(descriptors=..., output=..., ...)\n"
            f'with h5py.File({path}) as file:\n    x = file[{key}]["{_NAME}"][:]'
        )


FORMATS.register(
    FormatMember(
        "hloc",
        "Global descriptors in one HDF5 file per layer, for hloc.",
        make=Hloc,
        holds_failed_rows=False,
    )
)
