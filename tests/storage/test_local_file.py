"""Which files may be mapped into memory, and files that end early."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from featx.errors import StoreError
from featx.storage import RawFile, is_local


def test_only_file_systems_known_to_be_local_are_mapped(tmp_path: Path) -> None:
    def mounted(number: str, kind: str) -> Path:
        path = tmp_path / f"{kind} {number}"
        path.write_text(f"36 35 {number} / /mnt rw shared:1 - {kind} source rw\n")
        return path

    device = os.makedev(0, 77)
    kinds = ("ext4", "nfs4", "fuse.sshfs", "lustre", "tmpfs")
    local = [kind for kind in kinds if is_local(device, mounted("0:77", kind))]
    assert local == ["ext4", "tmpfs"]
    assert not is_local(device, mounted("0:78", "ext4")), "an unknown device"
    assert not is_local(device, tmp_path / "nothing")


def test_a_range_behind_the_end_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(100)))
    with path.open("rb") as stream:
        file = RawFile(stream.fileno(), may_map=False)
    buffer = np.zeros(10, np.uint8)
    file.pread_into(buffer, 90, "bytes")
    assert buffer.tolist() == list(range(90, 100))
    with pytest.raises(StoreError, match="the file ends before byte 101"):
        file.pread_into(buffer, 91, "bytes")
