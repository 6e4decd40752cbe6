"""data/sample holds what data/README.md says."""

from __future__ import annotations

import re
from pathlib import Path

from conftest import REPOSITORY
from PIL import Image

SAMPLE = REPOSITORY / "data" / "sample"
README = REPOSITORY / "data" / "README.md"


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_the_sample_is_small() -> None:
    assert sum(map(len, contents(SAMPLE).values())) < 300_000


def test_the_sample_has_the_formats_and_modes_it_promises() -> None:
    found = set()
    for path in SAMPLE.rglob("*.*"):
        with Image.open(path) as image:
            found.add((image.format, image.mode))
            turned = image.getexif().get(0x0112)
            assert turned == (6 if path.name == "turned-by-exif.jpg" else None)
    assert found == {
        ("JPEG", "RGB"),
        ("JPEG", "L"),
        ("JPEG", "CMYK"),
        ("PNG", "RGBA"),
        ("PNG", "P"),
        ("PNG", "I;16"),
        ("WEBP", "RGB"),
        ("GIF", "P"),
        ("BMP", "L"),
        ("TIFF", "RGB"),
    }


def test_the_readme_names_every_file() -> None:
    named = set(re.findall(r"^\| `(\S+/\S+)` \|", README.read_text(), re.MULTILINE))
    assert named == contents(SAMPLE).keys()
