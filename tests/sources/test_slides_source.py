"""Boxes of slides by data=slides, against OpenSlide itself and against the tiles as PNG."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from image_faults import fault_of
from PIL import Image

import featx
from featx.errors import ConfigError, MissingExtraError
from featx.images import ImagePolicy
from featx.images.decode import decode_array
from featx.sources import open_source
from featx.sources.slides import SlideOptions
from featx.types import ImageFault, Source, Status

WHITE = ImagePolicy("apply", (255, 255, 255), 10**6)


def test_what_the_options_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"needs data\.boxes=FILE\.csv"):
        SlideOptions(root="slides")
    options = SlideOptions(root="slides", boxes="boxes.csv")
    monkeypatch.setitem(sys.modules, "openslide", None)
    with pytest.raises(MissingExtraError, match=r'pip install "featx\[slides\]"'):
        open_source(options)


@pytest.fixture
def pixels() -> npt.NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (700, 900, 3), dtype=np.uint8)


def written(path: Path, pixels: npt.NDArray[np.uint8]) -> None:
    """A pyramid of tiles without loss, the format of many exporters of slides."""
    tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed")
    pytest.importorskip("openslide", reason="OpenSlide is not installed")
    options: dict[str, Any] = {"tile": (128, 128), "compression": "zlib", "photometric": "rgb"}
    path.parent.mkdir(exist_ok=True)
    with tifffile.TiffWriter(path) as file:
        file.write(pixels, **options)
        file.write(pixels[::2, ::2], subfiletype=1, **options)


def boxed(tmp_path: Path, boxes: list[tuple[int, int, int, int]], name: str = "a.tif") -> Source:
    lines = [f"{name},{x},{y},{w},{h}" for x, y, w, h in boxes]
    (tmp_path / "boxes.csv").write_text("\n".join(["path,x,y,width,height", *lines]))
    return open_source(
        SlideOptions(root=str(tmp_path / "slides"), boxes=str(tmp_path / "boxes.csv"))
    )


def test_boxes_are_openslides_regions(tmp_path: Path, pixels: npt.NDArray[np.uint8]) -> None:
    written(tmp_path / "slides" / "a.tif", pixels)
    boxes = [(x, y, 224, 200) for x in (0, 100, 676) for y in (0, 77, 500)]
    source = boxed(tmp_path, boxes)
    import openslide

    slide = openslide.OpenSlide(tmp_path / "slides" / "a.tif")
    assert slide.level_count == 2
    keys = source.listing().keys.tolist()
    assert len(keys) == len(boxes)
    with ThreadPoolExecutor(4) as threads:
        found = dict(zip(keys, threads.map(source.read, keys), strict=True))
    for x, y, w, h in boxes:
        tile = decode_array(found[b"a.tif#%d,%d,%d,%d" % (x, y, w, h)], WHITE, None)
        region = slide.read_region((x, y), 0, (w, h)).convert("RGB")
        np.testing.assert_array_equal(tile, np.asarray(region))
        np.testing.assert_array_equal(tile, pixels[y : y + h, x : x + w])


@pytest.mark.slow
def test_rows_are_those_of_tiles_saved_as_png(
    tmp_path: Path, pixels: npt.NDArray[np.uint8]
) -> None:
    written(tmp_path / "slides" / "a.tif", pixels)
    boxes = [(x, y, 180, 180) for x in range(0, 700, 180) for y in (0, 300)]
    boxed(tmp_path, boxes)
    tiles = tmp_path / "tiles"
    tiles.mkdir()
    for x, y, w, h in boxes:
        name = f"a.tif#{x},{y},{w},{h}.png"
        Image.fromarray(pixels[y : y + h, x : x + w]).save(tiles / name)
    model = {"library": "timm", "name": "test_resnet", "weights": None}
    more = {"precision": "fp32", "dtype": "float32", "batch_size": 4}
    slides = {
        "name": "slides",
        "root": str(tmp_path / "slides"),
        "boxes": str(tmp_path / "boxes.csv"),
    }
    out = str(tmp_path / "run")
    store = featx.extract(data=slides, model=model, layers=["embedding"], out=out, **more)
    plain = featx.extract(
        data=str(tiles), model=model, layers=["embedding"], out=str(tmp_path / "plain"), **more
    )
    assert [f"{key}.png" for key in store.keys] == [str(key) for key in plain.keys]
    np.testing.assert_array_equal(store["embedding"][:], plain["embedding"][:])
    assert featx.extract(data=slides, model=model, layers=["embedding"], out=out, **more).ok.all()


def test_a_broken_tile_fails_its_boxes_only(tmp_path: Path, pixels: npt.NDArray[np.uint8]) -> None:
    path = tmp_path / "slides" / "a.tif"
    written(path, pixels)
    import tifffile

    with tifffile.TiffFile(path) as file:
        offset = file.pages.first.dataoffsets[9]  # the second column of the second line
    data = bytearray(path.read_bytes())
    data[offset : offset + 2000] = bytes(2000)
    path.write_bytes(data)
    boxes = [(128 * x, 128 * y, 128, 128) for x in range(4) for y in range(4)]
    source = boxed(tmp_path, [*boxes, (800, 600, 200, 90)])
    keys = source.listing().keys.tolist()

    def outcome(key: bytes) -> Status:
        try:
            source.read(key)
        except ImageFault as found:
            return found.status
        return Status.OK

    with ThreadPoolExecutor(4) as threads:
        found = dict(zip(keys * 5, threads.map(outcome, keys * 5), strict=False))
    expected = dict.fromkeys(keys, Status.OK)
    expected |= {
        b"a.tif#128,128,128,128": Status.DECODE_ERROR,
        b"a.tif#800,600,200,90": Status.TRANSFORM_ERROR,
    }
    assert found == expected


def test_files_that_are_no_slides(tmp_path: Path, pixels: npt.NDArray[np.uint8]) -> None:
    written(tmp_path / "slides" / "a.tif", pixels)
    Image.fromarray(pixels).save(tmp_path / "slides" / "striped.tif")
    source = boxed(tmp_path, [(0, 0, 9, 9)], "striped.tif")
    found = fault_of(source, source.listing().keys[0])
    assert found.status == Status.UNSUPPORTED
    assert "; a TIFF has to be tiled, and little-endian" in str(found)
    source = boxed(tmp_path, [(0, 0, 9, 9), (0, 0, 40000, 40000)])
    assert fault_of(source, b"a.tif#0,0,40000,40000").status == Status.TOO_LARGE
    (tmp_path / "slides" / "a.tif").unlink()
    assert fault_of(source, b"a.tif#0,0,9,9").status == (Status.MISSING)


def test_pages_that_openslide_reads_otherwise_are_refused(
    tmp_path: Path, pixels: npt.NDArray[np.uint8]
) -> None:
    path = tmp_path / "slides" / "a.tif"
    written(path, pixels)
    import tifffile

    def fault(image: npt.NDArray[np.uint8], **options: Any) -> str:
        tifffile.imwrite(path, image, tile=(128, 128), **options)
        found = fault_of(boxed(tmp_path, [(0, 0, 9, 9)]), b"a.tif#0,0,9,9")
        assert found.status == Status.UNSUPPORTED
        return str(found)

    channels = {"photometric": "minisblack", "ome": True, "metadata": {"axes": "CYX"}}
    assert "its 3 channels are pages" in fault(pixels.transpose(2, 0, 1).copy(), **channels)
    planes = np.stack([pixels, pixels])
    assert "its pages of one size are a stack" in fault(planes, photometric="rgb")
    deep = (pixels[:, :, 0].astype(np.int16) - 128).copy()
    for numbers in (deep, deep.astype(np.uint16)):
        assert f"its numbers are {numbers.dtype}, of" in fault(numbers, photometric="minisblack")
    turned = {"photometric": "rgb", "extratags": [(274, "H", 1, 3, True)]}
    assert "its Orientation is 3" in fault(pixels, **turned)
    # JPEGs are read as stored, and channels of one page are the colours.
    for options in ({**turned, "compression": "jpeg"}, {"photometric": "rgb", "ome": True}):
        tifffile.imwrite(path, pixels, tile=(128, 128), **options)
        tile = decode_array(boxed(tmp_path, [(7, 130, 9, 9)]).read(b"a.tif#7,130,9,9"), WHITE, None)
        np.testing.assert_array_equal(tile, tifffile.imread(path)[130:139, 7:16])
