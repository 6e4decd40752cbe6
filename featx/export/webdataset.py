"""export.format=webdataset: tar shards with encoded image, features, class and key of each row."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import BinaryIO

from featx.base import as_utf8, name_text
from featx.config import Config
from featx.errors import ConfigError
from featx.export.base import (
    FORMATS,
    ExportFolder,
    FormatMember,
    ShardedFormat,
    ShardOptions,
    literal,
)
from featx.export.selection import EncodedImages, ExportSelection, as_json_values, as_npy

_HEADERS = 512 * 6
"""Approximate bytes of the tar headers and padding of a row."""

_ENDINGS = {
    b"\xff\xd8": ".jpg", b"\x89P": ".png", b"P5": ".pgm", b"P6": ".ppm", b"RI": ".webp",
    b"II": ".tif", b"MM": ".tif", b"GI": ".gif", b"BM": ".bmp", b"\x93N": ".npy",
}  # fmt: skip
"""First bytes of an image -> ending of its name, if its key has none."""


class WebDataset(ShardedFormat):
    """shards-00000-of-0000N.tar; a sample is 000000042.jpg, .<layer>.npy, .cls and .json.

    Member names are row numbers: webdataset divides a name at its first dot and joins consecutive
    members with the same stem, which fails for keys with dots or equal stems. The key is in the
    .json.
    """

    def __init__(self, selection: ExportSelection, config: Config) -> None:
        super().__init__(selection, config)
        lowered = [name.lower() for name in selection.layers]
        if len(set(lowered)) < len(lowered):
            raise ConfigError(
                "webdataset reads endings in lower case, and some layers differ by case only: "
                f"{', '.join(selection.layers)}. Name those you want: 'layers=[...]'."
            )
        self._images = EncodedImages(selection, self.config)
        self._row_bytes = selection.row_bytes() + self._images.mean_bytes + _HEADERS
        self._shards = self.shards(self._row_bytes, "shards-{}.tar")

    @property
    def num_bytes(self) -> int:
        return int(len(self.selection) * self._row_bytes)

    def write(self, folder: ExportFolder) -> None:
        for name, start, stop in self._shards:
            with folder.file(name) as file:
                self._write_shard(file, start, stop)

    def _write_shard(self, file: BinaryIO, start: int, stop: int) -> None:
        selection = self.selection
        with tarfile.TarFile.open(fileobj=file, mode="w") as tar:
            for first, last, values in selection.blocks(start, stop):
                classes = selection.class_texts(first, last)
                columns = {
                    name: as_json_values(column[first:last])
                    for name, column in selection.columns.items()
                }
                for position in range(first, last):
                    row = int(selection.rows[position])
                    key = name_text(bytes(selection.keys[position]))
                    label = int(selection.labels[position])
                    if (encoded := self._images.read(position)) is not None:
                        # webdataset skips names without an ending.
                        ending = Path(key).suffix.lower() or _ENDINGS.get(encoded[:2], ".img")
                        _add(tar, f"{row:09d}{ending}", encoded)
                    for name, layer_values in values.items():
                        _add(tar, f"{row:09d}.{name}.npy", as_npy(layer_values[position - first]))
                    _add(tar, f"{row:09d}.cls", str(label).encode())
                    about = {
                        "key": as_utf8(key),
                        "row": row,
                        "label": label,
                        "class": classes[position - first],
                        "status": int(selection.status[position]),
                    }
                    if columns:
                        about["columns"] = {
                            name: column[position - first] for name, column in columns.items()
                        }
                    _add(tar, f"{row:09d}.json", json.dumps(about).encode())

    def opening(self, out: Path) -> str:
        layer = literal(f"{self.selection.layers[0].lower()}.npy")
        return (
            "import webdataset as wds\n"
            "from pathlib import Path\n"
            # In a text, braces, '$' and '::' would be signs of webdataset; in a list they are not.
            f'shards = sorted(map(str, Path({literal(out)}).glob("shards-*.tar")))\n'
            "rows = wds.WebDataset(shards, shardshuffle=False)\n"
            # Decoding images as well would drop rows whose image cannot be decoded.
            "rows = rows.decode()  # arrays and labels; images stay encoded\n"
            f'for sample in rows: sample[{layer}], sample["cls"]'
        )


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a member without time and owner, so that the same rows give the same bytes."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


FORMATS.register(
    FormatMember(
        "webdataset", "Tar shards with images and their features.", ShardOptions, make=WebDataset
    )
)
