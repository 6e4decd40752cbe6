"""data/sample is what scripts/make_sample_images draws."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import PIL
import pytest
from PIL import Image

from featx.config import DataConfig
from featx.images import ImagePolicy, decode_pillow

REPOSITORY = Path(__file__).resolve().parent.parent
SAMPLE = REPOSITORY / "data" / "sample"
README = REPOSITORY / "data" / "README.md"


def draw(folder: Path) -> dict[str, bytes]:
    """Run the script; relative path -> bytes of what it wrote."""
    script = REPOSITORY / "scripts" / "make_sample_images"
    subprocess.run([sys.executable, script, folder], check=True, capture_output=True)
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return draw(tmp_path_factory.mktemp("sample"))


def test_the_committed_files_are_the_scripts(drawn: dict[str, bytes]) -> None:
    """Byte for byte with the Pillow that wrote them, else image for image."""
    committed = contents(SAMPLE)
    assert committed.keys() == drawn.keys()
    made_with = re.search(r"those of Pillow (\S+)\.\s", README.read_text())
    assert made_with is not None
    if made_with[1] == PIL.__version__:
        assert committed == drawn
    policy = ImagePolicy.from_config(DataConfig())
    for name, data in committed.items():
        expected, found = (np.asarray(decode_pillow(d, policy), int) for d in (drawn[name], data))
        assert np.abs(expected - found).mean() < 1, name


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
