"""The file in memory that holds no pages of zeros: it behaves as a file on a disk does."""

from __future__ import annotations

import os
import random
import tracemalloc
from pathlib import Path

from featx.store.chunk_file import SparseImage

PAGE = 1 << 16


def read_all(image: SparseImage) -> bytes:
    image.seek(0)
    return image.read() or b""


def test_it_behaves_as_a_file(tmp_path: Path) -> None:
    rng = random.Random(0)
    image = SparseImage()
    with (tmp_path / "file").open("w+b") as file:
        for _ in range(200):
            at, count = rng.randrange(4 * PAGE), rng.randrange(PAGE)
            if rng.random() < 0.3:
                assert image.truncate(at) == file.truncate(at)
            else:
                data = bytes(count) if rng.random() < 0.3 else rng.randbytes(count)
                assert image.seek(at) == file.seek(at)
                assert image.write(data) == file.write(data)
                assert image.tell() == file.tell()
            file.flush()
            assert read_all(image) == (tmp_path / "file").read_bytes()


def test_neither_zeros_nor_what_was_truncated_take_memory() -> None:
    image = SparseImage()
    tracemalloc.start()
    try:
        image.write(bytes(64 * PAGE))
        image.write(os.urandom(64 * PAGE))
        assert tracemalloc.get_traced_memory()[0] > 60 * PAGE
        image.truncate(64 * PAGE)
        assert tracemalloc.get_traced_memory()[0] < PAGE
    finally:
        tracemalloc.stop()
    assert image.size == 64 * PAGE
