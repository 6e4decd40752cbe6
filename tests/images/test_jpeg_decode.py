"""Damaged JPEGs are failures in libjpeg's words; sound ones of any making are not."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from encoded_images import encode
from image_faults import image_fault
from PIL import Image
from tiny_model import extract, run_job

from featx.config import DataConfig
from featx.errors import StoreMismatchError
from featx.images import (
    PILLOW,
    DecoderPool,
    DecodeSettings,
    ImagePolicy,
    Preprocess,
    decode_pillow,
)
from featx.images.decode import decode_array
from featx.images.decode_settings import ACCEPT, SIMPLEJPEG
from featx.images.jpeg_decode import jpeg_damage
from featx.images.row_loader import RowLoader
from featx.sources import FolderSource, with_views
from featx.types import ImageFault, Status

POLICY = ImagePolicy("apply", (255, 255, 255), 1 << 24, jpeg=SIMPLEJPEG)
PREPROCESS = Preprocess(None, (16, 16), 16, "bilinear", (0, 0, 0), (1, 1, 1))  # type: ignore[arg-type]
END = b"\xff\xd9"
KINDS = {
    "baseline": {},
    "high quality": {"quality": 95},
    "progressive": {"progressive": True, "quality": 90},
    "optimised": {"optimize": True, "quality": 75},
    "restart markers": {"restart_marker_rows": 1},
    "4:4:4": {"subsampling": 0},
}


@functools.cache
def photo(size: tuple[int, int] = (320, 240), seed: int = 0) -> Image.Image:
    """Smooth colours with some noise, as in a photograph."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
    smooth = np.asarray(small.resize(size, Image.Resampling.BICUBIC)).astype(int)
    return Image.fromarray((smooth + rng.integers(-9, 10, smooth.shape)).clip(0, 255).astype("u1"))


def scan_of(data: bytes) -> int:
    """Where the compressed data begin."""
    return data.index(b"\xff\xda") + 14


def damaged(data: bytes) -> dict[str, bytes]:
    """A sound file in every way in which it may be damaged and still have its beginning and end."""
    start, size = scan_of(data), len(data)
    middle, third = (start + size) // 2, (size - start) // 3
    blocks = [data[i : i + 1024] for i in range(0, size, 1024)]
    swapped = [*blocks[:3], blocks[5], blocks[4], blocks[3], *blocks[6:]]
    return {
        "line ends converted": data[:start] + data[start:].replace(b"\n", b"\r\n"),
        "line ends converted in the header, too": data.replace(b"\n", b"\r\n"),
        "line ends shortened": data[:start] + data[start:].replace(b"\r", b""),
        "half lost": data[:middle] + END,
        "second half zeros": data[:middle] + bytes(size - middle - 2) + END,
        "all zeros behind the middle": data[:middle] + bytes(size - middle),
        "middle lost": data[: start + third] + data[start + 2 * third :],
        "blocks swapped": b"".join(swapped),
        "block of zeros": b"".join([*blocks[:4], bytes(1024), *blocks[5:]]),
    }


MAYBE_UNKNOWN = ("blocks swapped", "block of zeros", "line ends shortened")
"""Decoders of Huffman codes may find back to the right place: then libjpeg does not know it."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_damage_is_a_failure(kind: str, mode: str) -> None:
    undetected: Counter[str] = Counter()
    for seed in range(4):
        sound = encode(photo(seed=seed).convert(mode), "JPEG", **KINDS[kind])
        files = damaged(sound)
        for decoder, at_least in itertools.product((SIMPLEJPEG, PILLOW), (None, 20)):
            policy = replace(POLICY, jpeg=decoder)
            assert decode_array(sound, policy, at_least).shape[2] == 3
            for way, data in files.items():
                status = status_of(data, policy, at_least)
                assert status in (Status.OK, Status.DECODE_ERROR, Status.TRUNCATED), way
                undetected[way] += status == Status.OK
    for way, count in undetected.items():
        assert count <= (8 if way in MAYBE_UNKNOWN else 0), way


def status_of(data: bytes, policy: ImagePolicy, at_least: int | None = None) -> Status:
    try:
        decode_array(data, policy, at_least)
    except ImageFault as fault:
        return fault.status
    return Status.OK


def test_the_words_are_those_of_libjpeg() -> None:
    data = encode(photo(), "JPEG")
    files = damaged(data)
    for way, words, status in (
        ("half lost", "Corrupt JPEG data: premature end of data segment", Status.DECODE_ERROR),
        ("all zeros behind the middle", "Premature end of JPEG file", Status.TRUNCATED),
    ):
        with image_fault(status, words):
            decode_array(files[way], POLICY, None)
    with image_fault(Status.DECODE_ERROR, "premature end"):
        decode_array(files["half lost"], replace(POLICY, channels=3), None)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_accepted_and_said(kind: str) -> None:
    accepting = replace(POLICY, damaged=ACCEPT)
    sound = encode(photo(), "JPEG", **KINDS[kind])
    for way in ("half lost", "middle lost"):
        data = damaged(sound)[way]
        with pytest.warns(UserWarning, match="damaged JPEG: "):
            found = decode_array(data, accepting, None)
        assert np.array_equal(found, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    assert np.array_equal(decode_array(sound, accepting, None), decode_array(sound, POLICY, None))


def segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2) + content


@functools.cache
def sound_oddities() -> dict[str, bytes]:
    """JPEGs of which libjpeg warns, or which look odd, and whose pixels are as they were."""
    data = encode(photo(), "JPEG")
    end, table, scan = len(data) - 2, data.index(b"\xff\xdb"), data.index(b"\xff\xda")
    exif = Image.Exif()
    exif[0x0112] = 3
    return {
        "bytes before a table": data[:table] + b"stray bytes" + data[table:],
        "bytes before the scan": data[:scan] + b"\0\0\0" + data[scan:],
        "one byte before the end": data[:end] + b"\x5a" + data[end:],
        "two bytes before the end": data[:end] + b"\x5a\x11" + data[end:],
        "padding of zeros": data[:end] + bytes(70) + data[end:],
        "padding of ones": data[:end] + b"\xff" * 70 + data[end:],
        "bytes behind the end": data + b"trailer" * 90,
        "bytes of a JPEG behind the end": data + data[: len(data) // 2],
        "another version of JFIF": data.replace(b"JFIF\0\1\1", b"JFIF\0\7\7", 1),
        "unknown colours of Adobe": data[:2] + segment(0xEE, b"Adobe\0d\0\0\0\0\x09") + data[2:],
        "damaged profile": data[:2] + segment(0xE2, b"ICC_PROFILE\0\7\3" + bytes(9)) + data[2:],
        "other parameters of the scan": data[: scan + 11] + b"\1\5\x11" + data[scan + 14 :],
        "fill bytes": data[:table] + b"\xff" * 9 + data[table:],
        "XMP and a comment": data[:2] + segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>")
        + segment(0xFE, b"\xff\xda\xff\xd9") + data[2:],
        "a thumbnail in EXIF": encode(photo(), "JPEG", exif=exif.tobytes() + data[:9000]),
        "MPO": encode(photo(), "MPO", save_all=True, append_images=[photo(seed=1)]),
    }  # fmt: skip


@pytest.mark.parametrize("name", sound_oddities())
@pytest.mark.parametrize("jpeg", [PILLOW, SIMPLEJPEG])
def test_an_odd_but_sound_jpeg_is_taken(name: str, jpeg: str) -> None:
    data = sound_oddities()[name]
    found = decode_array(data, replace(POLICY, jpeg=jpeg), None)
    right = np.asarray(Image.open(io.BytesIO(encode(photo(), "JPEG"))))
    assert np.array_equal(found, right if name != "a thumbnail in EXIF" else right[::-1, ::-1])


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_progressive_jpeg_that_lacks_scans(mode: str) -> None:
    """Cut between two scans and ended: libjpeg has no complaint, and the image is blurred."""
    data = encode(photo().convert(mode), "JPEG", progressive=True)
    assert jpeg_damage(data) is None
    scans = [i for i in range(len(data)) if data[i : i + 2] == b"\xff\xda"]
    assert len(scans) > 3
    for scan in scans[1:]:
        # Huffman tables come before their scan.
        tables = data.rfind(b"\xff\xc4", 0, scan)
        for end in {scan, tables} if tables > scans[0] else {scan}:
            cut = data[:end] + END
            for jpeg in (PILLOW, SIMPLEJPEG):
                with pytest.raises(ImageFault, match="last scans are missing"):
                    decode_array(cut, replace(POLICY, jpeg=jpeg), None)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_damaged_jpeg_in_a_tiff(mode: str) -> None:
    data = encode(photo().convert(mode), "TIFF", compression="jpeg", quality=90)
    assert decode_pillow(data, POLICY).size == (320, 240)
    start = data.index(b"\xff\xda") + 400
    broken = data[:start] + bytes(300) + data[start + 300 :]
    for policy in (POLICY, replace(POLICY, channels=len(mode))):
        with image_fault(Status.DECODE_ERROR, "JPEG data"):
            decode_array(broken, policy, None)


@pytest.mark.parametrize(
    ("tag", "stored", "stated", "message"),
    [
        (257, 240, 250, "strip or tile 7 is a JPEG of 320 x 16 pixels; expected 320 x 26"),
        (256, 320, 330, "strip or tile 0 is a JPEG of 320 x 32 pixels; expected 330 x 32"),
    ],
)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_jpeg_in_a_tiff_that_is_smaller_than_its_strip(
    tag: int, stored: int, stated: int, message: str, mode: str
) -> None:
    """libtiff leaves there what was in its memory."""
    options = {"compression": "jpeg", "tiffinfo": {278: 32}}
    data = encode(photo().convert(mode), "TIFF", **options)
    assert decode_pillow(data, POLICY).size == (320, 240)
    entry = struct.pack("<HHI", tag, 3, 1)
    larger = data.replace(entry + struct.pack("<I", stored), entry + struct.pack("<I", stated))
    for policy in (POLICY, replace(POLICY, channels=len(mode)), replace(POLICY, damaged=ACCEPT)):
        with image_fault(Status.TRUNCATED, message):
            decode_array(larger, policy, None)


@pytest.mark.parametrize("can_fork", [True, False])
def test_damage_of_each_row_is_told_by_processes_and_by_threads(
    tmp_path: Path, can_fork: bool
) -> None:
    sound = encode(photo(), "JPEG")
    for name, data in {"0.jpg": sound, "1.jpg": damaged(sound)["half lost"]}.items():
        (tmp_path / name).write_bytes(data)
    views = DataConfig(views=["original", "hflip"])
    told: list[tuple[int, list[str]]] = []
    for source in (FolderSource(tmp_path), with_views(FolderSource(tmp_path), views)):
        settings = DecodeSettings(PREPROCESS, replace(POLICY, damaged=ACCEPT))
        rows = RowLoader(source, source.listing(), settings)
        count = len(rows.keys)
        with DecoderPool([rows], 2, reads_in_decoders=True, can_fork=can_fork) as pool:
            pool.on_warnings = lambda row, messages: told.append((row, messages))
            job = pool.begin(0, np.arange(count), count)
            pool.finish(job)
        assert job.damaged == set(range(count // 2, count))
    assert sorted(row for row, _ in told) == [1, 2, 3]
    assert all(text.startswith("damaged JPEG: ") for _, messages in told for text in messages)


@pytest.mark.slow
@pytest.mark.usefixtures("in_tmp_path")
def test_a_run_refuses_accepts_and_records(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    sound = [encode(photo(seed=i), "JPEG") for i in range(4)]
    half = [damaged(data)["half lost"] for data in sound]
    for i in range(4):
        (photos / f"{i}.jpg").write_bytes(sound[i] if i else half[i])
    store = extract(photos, max_failures=1)
    assert store.ok.tolist() == [False, True, True, True]
    assert "premature end of data segment" in Path("store/failures.csv").read_text()
    accept = {"name": "folder", "root": str(photos), "damaged": "accept"}
    with pytest.raises(StoreMismatchError, match=r"data\.damaged"):
        extract(accept)
    accepted = extract(accept, out="accepted")
    assert "1 image: damaged JPEG: Corrupt JPEG data: premature end" in capfd.readouterr().out
    assert accepted.ok.all()
    assert not accepted.failures
    assert accepted.status.tolist() == [Status.IMAGE_DAMAGED, 0, 0, 0]
    assert np.array_equal(accepted["conv"][1:], store["conv"][1:])
    both = {"layers": ["conv", "pool"], "out": "accepted"}
    extract(accept, **both)
    (photos / "4.jpg").write_bytes(half[0])
    extract(accept, **both, grow=True)
    (photos / "0.jpg").write_bytes(sound[0])
    (photos / "1.jpg").write_bytes(half[0])
    with pytest.raises(StoreMismatchError, match=r"\('layers=\[pool\]'\)"):
        extract(accept, layers=["conv"], out="accepted", refresh=True)
    grown = extract(accept, layers=["pool"], out="accepted", refresh=True)
    assert grown.status.tolist() == [0, Status.IMAGE_DAMAGED, 0, 0, Status.IMAGE_DAMAGED]
    assert grown.ok.all()
    assert run_job("verify", store="accepted") == 0


@pytest.mark.usefixtures("in_tmp_path")
def test_every_box_of_an_accepted_image_says_that_it_is_damaged(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    sound = encode(photo(seed=0), "JPEG")
    (photos / "0.jpg").write_bytes(damaged(sound)["half lost"])
    (photos / "1.jpg").write_bytes(sound)
    lines = [f"{i}.jpg,{4 * k},0,8,8" for i in range(2) for k in range(3)]
    (tmp_path / "boxes.csv").write_text("\n".join(["path,x,y,width,height", *lines]))
    data = {"name": "folder", "root": str(photos), "boxes": "boxes.csv", "damaged": "accept"}
    assert extract(data).status.tolist() == [12, 12, 12, 0, 0, 0]


def test_no_photograph_is_refused(shared_data: Path) -> None:
    files = sorted((shared_data / "caltech101-10").rglob("*.jpg"))[::6]
    assert len(files) > 50
    for path in files:
        data = path.read_bytes()
        assert jpeg_damage(data) is None, path
        right = np.asarray(Image.open(path).convert("RGB"))
        assert np.array_equal(decode_array(data, POLICY, None), right), path


def test_odd_jpegs_of_fuzzers(shared_data: Path) -> None:
    """What Pillow decodes is taken, also 4:4:1; others, such as 5 bits without loss, are not."""
    for path in sorted((shared_data / "odd-images" / "jpeg-variants").iterdir()):
        is_decoded = False
        with contextlib.suppress(OSError, SyntaxError), Image.open(path) as image:
            image.load()
            is_decoded = True
        for jpeg in (PILLOW, SIMPLEJPEG):
            status = status_of(path.read_bytes(), replace(POLICY, jpeg=jpeg))
            assert (status == Status.OK) == is_decoded, path
