"""Tar shards made by Python's tarfile, for the tests of data=webdataset."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from tiny_model import write_image


def write_tar(path: Path, files: Mapping[str, bytes], **options: object) -> Path:
    """A tar of some files, in their order; gzip where the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = "w:gz" if path.name.endswith(("gz", "tgz")) else "w"
    with tarfile.open(path, mode, **options) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def images(folder: Path, count: int) -> dict[str, bytes]:
    """PNG files by name, with a class number beside each."""
    files: dict[str, bytes] = {}
    for i in range(count):
        write_image(folder / f"{i:04d}.png", i)
        files[f"{i:04d}.png"] = (folder / f"{i:04d}.png").read_bytes()
        files[f"{i:04d}.cls"] = str(i % 3).encode()
    return files


def write_shards(folder: Path, count: int = 21, shards: int = 3, ending: str = "tar") -> Path:
    """Shards of equal size, train-000.tar and so on."""
    per_shard = -(-count // shards)
    files = images(folder.parent / "loose", count)
    for shard in range(shards):
        inside = {name: data for name, data in files.items() if int(name[:4]) // per_shard == shard}
        write_tar(folder / f"train-{shard:03d}.{ending}", inside)
    return folder


def header_of_size(field: bytes) -> bytes:
    """Header of a member whose size field holds any 12 bytes, with the right checksum."""
    header = bytearray(tarfile.TarInfo("a.png").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = field
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + sum(header[156:512]) + 256)
    return bytes(header)


def pax_header(records: dict[str, str]) -> bytes:
    """Headers of an empty member with pax records."""
    info = tarfile.TarInfo("a.png")
    info.pax_headers = records
    return info.tobuf(tarfile.PAX_FORMAT)
