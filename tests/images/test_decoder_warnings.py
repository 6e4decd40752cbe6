"""Warnings of decoders are counted by reason and not printed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from encoded_images import encode
from PIL import Image
from tiny_model import extract, run_job

from featx.images.decoder_warnings import MAX_REASONS, OTHER, count_warnings


def tiff() -> bytes:
    """LZW, which libtiff decodes."""
    pixels = np.random.default_rng(0).integers(0, 256, (48, 48, 3), dtype=np.uint8)
    return encode(Image.fromarray(pixels), "TIFF", compression="tiff_lzw")


def damaged(data: bytes) -> bytes:
    """LZW codes that the table does not have."""
    return data[:600] + b"\xff" * 64 + data[664:]


def truncated_ifd(data: bytes) -> bytes:
    """Its directory ends early, of which Pillow warns."""
    start = int.from_bytes(data[4:8], "little")
    return data[: start + 2 + 5]


@pytest.mark.slow
def test_a_folder_of_odd_tiffs_prints_nothing_and_says_how_many(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    photos = tmp_path / "photos"
    photos.mkdir()
    for i in range(6):
        (photos / f"{i}.tif").write_bytes(tiff())
    for i in range(10, 15):
        (photos / f"{i}.tif").write_bytes(damaged(tiff()))
    (photos / "20.tif").write_bytes(truncated_ifd(tiff()))
    store = extract(photos, max_failures=20)
    assert store.ok.tolist() == [not 10 <= int(str(key)[:-4]) <= 20 for key in store.keys]
    counts = json.loads(Path("store/summary.json").read_text())["decoder_warnings"]
    of_libtiff = {reason: count for reason, count in counts.items() if "tempfile.tif" in reason}
    of_pillow = {reason: count for reason, count in counts.items() if "tempfile.tif" not in reason}
    assert list(of_libtiff.values()) == [5]
    assert sum(of_pillow.values()) == 1
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) <= len(counts)  # a process logs a reason once
    assert sum(".tif: tempfile.tif" in message for message in logged) <= 1
    printed = capfd.readouterr()
    assert "UserWarning" not in printed.err
    assert f"warnings  5 images: {next(iter(of_libtiff))}" in printed.out
    assert run_job("verify", out="store") == 0


def test_reasons_are_counted_once_an_image_and_are_few() -> None:
    counts: Counter[str] = Counter()
    for i in range(100):
        messages = [f"tag {i * n} has a wrong size 0x{n}" for n in range(3)]
        count_warnings(counts, b"%d.tif" % i, [*messages, f"reason {chr(97 + i % 26)}"])
    assert counts["tag N has a wrong size N"] == 100
    assert len(counts) == MAX_REASONS + 1
    assert sum(counts.values()) == 200
    assert counts[OTHER] > 0
