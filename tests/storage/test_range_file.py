"""Ranges of bytes of a file, through the page cache and past it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from featx.errors import StoreError
from featx.storage import RangeFile, supports_direct_io


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "bytes"
    file.write_bytes(np.random.default_rng(0).bytes(100_001))
    return file


@pytest.mark.parametrize("direct", [False, True])
def test_ranges_lie_at_their_offsets_in_one_buffer(path: Path, direct: bool) -> None:
    content = path.read_bytes()
    file = RangeFile(path, direct and supports_direct_io(path))
    at = np.array([0, 4095, 4096, 50_000, 8191, 99_990])
    size = np.array([1, 2, 4096, 30_001, 1, 11])
    buffer, offset = file.read_ranges(at, size)
    found = [bytes(buffer[low : low + n]) for low, n in zip(offset, size, strict=True)]
    assert found == [content[low : low + n] for low, n in zip(at, size, strict=True)]
    assert bytes(file.read(7, 70_000)) == content[7:70_007]


@pytest.mark.parametrize("direct", [False, True])
def test_a_range_behind_the_end_is_an_error(path: Path, direct: bool) -> None:
    file = RangeFile(path, direct and supports_direct_io(path))
    with pytest.raises(StoreError, match="the file ends before byte 100002"):
        file.read_ranges(np.array([5, 100_000]), np.array([10, 2]))
