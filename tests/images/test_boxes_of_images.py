"""Images from which boxes are cut are decoded once, by one decoder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from featx.images import DecodeSettings, ImagePolicy, Loader, Preprocess
from featx.sources import FolderSource
from featx.sources.views import BoxedSource
from featx.types import Part


@pytest.mark.parametrize("ending", ["png", "tif", "jpg"])
def test_boxes_of_an_image_are_read_once_and_are_its_pixels(tmp_path: Path, ending: str) -> None:
    """Also those of an image that cannot be decoded; each box equals the tile saved as PNG."""
    pixels = np.random.default_rng(0).integers(0, 256, (300, 200, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / f"a.{ending}")
    (tmp_path / "b.png").write_bytes(b"no image")
    corners = [(x, y) for x in range(0, 168, 24) for y in range(0, 264, 24)]
    lines = [f"{name},{x},{y},32,32" for name in (f"a.{ending}", "b.png") for x, y in corners]
    table = tmp_path / "boxes.csv"
    table.write_text("\n".join(["path,x,y,width,height", *lines]))
    reads = tmp_path / "reads"

    class Counted(FolderSource):
        def read(self, key: bytes) -> bytes:
            with reads.open("ab") as file:  # decoders read, each in its own process
                file.write(key + b"\n")
            return super().read(key)

    images = tmp_path / "images"
    images.mkdir()
    for name in (f"a.{ending}", "b.png"):
        (tmp_path / name).rename(images / name)
    source = BoxedSource(Counted(images), table)
    listing = source.listing()
    preprocess = Preprocess(lambda image: None, (32, 32), 32, "bilinear", (0, 0, 0), (1, 1, 1))  # type: ignore[arg-type,return-value]
    decoding = DecodeSettings(preprocess, ImagePolicy("apply", (0, 0, 0), 1 << 20))
    with Loader(source, listing, decoding) as loader:
        batches = [batch for _, batch in loader.batches([Part(0, 0, len(listing))], 8)]
    assert sorted(reads.read_text().splitlines()) == [f"a.{ending}", "b.png"]
    whole = np.asarray(Image.open(images / f"a.{ending}"))
    failed = {failure.row for batch in batches for failure in batch.failures}
    assert failed == {row for row, key in enumerate(listing.keys) if key.startswith(b"b.png")}
    for batch in batches:
        for i in range(batch.count):
            if (row := batch.start + i) not in failed:
                box = source.view(bytes(listing.keys[row])).box
                assert box is not None
                tile = whole[box.y : box.y + 32, box.x : box.x + 32]
                assert np.array_equal(batch.images[i].numpy(), tile.transpose(2, 0, 1))
