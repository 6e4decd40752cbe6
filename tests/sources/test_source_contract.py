"""Every source passes the contract."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_sources
import numpy as np
import pytest
from PIL import Image
from tiny_model import write_images

from featx.config import DataConfig
from featx.sources import SOURCES, open_source, source_of
from featx.testing import SourceContract
from featx.types import Source

pytestmark = pytest.mark.usefixtures("in_tmp_path", "cache_folder")

NUM_IMAGES = 7


def encoded_images() -> dict[str, bytes]:
    """Key -> bytes of images in two class folders, one of which is empty."""
    root = write_images(Path("written"), NUM_IMAGES)
    (root / "cat" / "000.png").write_bytes(b"")
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*.png"))}


def sound_images() -> dict[str, bytes]:
    return {key: data for key, data in encoded_images().items() if data}


def folder() -> dict[str, Any]:
    encoded_images()
    return {"name": "folder", "root": "written"}


def boxes() -> dict[str, Any]:
    names = encoded_images()
    with Path("boxes.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("path", "x", "y", "width", "height"))
        writer.writerows((name, x, 0, 20, 30) for name in names for x in (0, 8))
    return {"name": "folder", "root": "written", "boxes": "boxes.csv"}


def views() -> dict[str, Any]:
    return {**boxes(), "views": ["original", "rot90"], "crops": 2}


def slides() -> dict[str, Any]:
    """Tiled TIFFs, of which one is broken and one is empty."""
    pytest.importorskip("openslide", reason="OpenSlide is not installed")
    tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed")
    pixels = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    names = ["a/0.tif", "a/1.tif", "b/2.tif", "b/3.tif"]
    for name in names:
        Path("slides", name).parent.mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(Path("slides", name), pixels, photometric="rgb", tile=(32, 32))
    Path("slides", names[1]).write_bytes(b"")
    Path("slides", names[2]).write_bytes(Path("slides", names[2]).read_bytes()[:9000])
    lines = [f"{name},{x},0,20,80" for name in names for x in (0, 40)]
    Path("boxes.csv").write_text("\n".join(["path,x,y,width,height", *lines]))
    return {"name": "slides", "root": "slides", "boxes": "boxes.csv"}


def webdataset() -> dict[str, Any]:
    return made_sources.tar_gz(encoded_images())


def table() -> dict[str, Any]:
    rows = [(key, key[:3], i, i / 2) for i, key in enumerate(encoded_images())]
    with Path("table.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("path", "label", "age", "weight"), *rows])
    columns = ["age", "weight"]
    return {"name": "table", "root": "table.csv", "image_root": "written", "columns": columns}


def parquet() -> dict[str, Any]:
    return made_sources.parquet(encoded_images())


def hdf5() -> dict[str, Any]:
    return made_sources.hdf5(sound_images())


def huggingface() -> dict[str, Any]:
    return made_sources.huggingface(sound_images())


def sample() -> dict[str, Any]:
    return {"name": "sample", "limit": 5}


def textiles() -> dict[str, Any]:
    if importlib.util.find_spec("conformal_clip_data") is None:
        pytest.skip("the package conformal_clip_data is not installed")
    return {"name": "textiles"}


@pytest.mark.parametrize(
    "data",
    [folder, boxes, views, slides, webdataset, table, parquet, hdf5, huggingface, sample, textiles],
    ids=lambda make: make.__name__,
)
class TestSourcesOfOptions(SourceContract):
    @pytest.fixture
    def source(self, data: Callable[[], dict[str, Any]]) -> Source:
        options = data()
        kind = SOURCES.get(options["name"]).options
        self.config = (
            DataConfig(**options)
            if kind is None
            else kind(**{key: value for key, value in options.items() if key != "name"})
        )
        return open_source(self.config)

    def copy_for_worker(self, source: Source) -> Source:
        return open_source(self.config)


class Squares:
    """Map-style data set of a user, whose items are images and labels."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, row: int) -> tuple[Image.Image, int]:
        squares = np.random.default_rng(row).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        return Image.fromarray(squares.repeat(8, 0).repeat(8, 1)), row % 2


class TestMapStyleDataSet(SourceContract):
    @pytest.fixture
    def source(self) -> Source:
        return source_of(Squares())
