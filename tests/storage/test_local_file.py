"""Which files may be mapped into memory."""

from __future__ import annotations

import os
from pathlib import Path

from featx.storage import is_local


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
