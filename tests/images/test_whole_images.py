"""Images from which boxes are cut are decoded once, whatever the threads do."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from featx.images import DecodeSettings, ImagePolicy, Loader, Preprocess
from featx.images.decode import decode_image
from featx.images.whole_images import WholeImage, WholeImages
from featx.sources import FolderSource
from featx.sources.boxes import BoxedSource
from featx.types import ImageFault, Part, Status

IMAGE = WholeImage(7, np.zeros((2, 2, 3), np.uint8))


class Loads:
    """A load that waits until the test lets it end, and counts its calls."""

    def __init__(self, result: WholeImage | Exception = IMAGE) -> None:
        self.result, self.count = result, 0
        self.began, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> WholeImage:
        self.count += 1
        self.began.set()
        assert self.may_end.wait(10)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def test_threads_wait_for_the_one_that_loads() -> None:
    images, load = WholeImages(), Loads()
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(images.get, b"a", load, False) for _ in range(4)]
        assert load.began.wait(10)
        load.may_end.set()
        assert all(future.result(10) is IMAGE for future in asked)
    assert load.count == 1


def test_another_image_is_loaded_meanwhile() -> None:
    images, slow, quick = WholeImages(), Loads(), Loads()
    quick.may_end.set()
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(images.get, b"a", slow, False)
        assert slow.began.wait(10)
        assert threads.submit(images.get, b"b", quick, False).result(10) is IMAGE
        assert not waiting.done()
        slow.may_end.set()
        waiting.result(10)


def test_the_last_two_images_are_kept() -> None:
    images, load = WholeImages(), Loads()
    load.may_end.set()
    for name in (b"a", b"b", b"a", b"b", b"c", b"b", b"c"):
        images.get(name, load, False)
    assert load.count == 3
    images.get(b"a", load, False)
    assert load.count == 4


def test_a_repeated_call_does_not_wait_for_the_one_that_hangs() -> None:
    images, hung, again = WholeImages(), Loads(), Loads()
    again.may_end.set()
    with ThreadPoolExecutor(2) as threads:
        given_up = threads.submit(images.get, b"a", hung, False)
        assert hung.began.wait(10)
        waiting = threads.submit(images.get, b"a", hung, False)
        assert images.get(b"a", again, True) is IMAGE
        assert waiting.result(10) is IMAGE
        hung.may_end.set()
        given_up.result(10)
    assert (hung.count, again.count) == (1, 1)


def test_a_fault_is_that_of_every_box_and_an_error_of_the_machine_is_tried_again() -> None:
    images = WholeImages()
    broken = Loads(WholeImage(7, ImageFault(Status.TRUNCATED, "too short", "OSError")))
    broken.may_end.set()
    for _ in range(3):
        with pytest.raises(ImageFault, match="too short") as raised:
            images.get(b"a", broken, False).image()
        assert (raised.value.status, raised.value.error) == (Status.TRUNCATED, "OSError")
    assert broken.count == 1
    full = Loads(MemoryError())
    full.may_end.set()
    for _ in range(2):
        with pytest.raises(MemoryError):
            images.get(b"b", full, False)
    assert full.count == 2


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
    reads: list[bytes] = []

    class Counted(FolderSource):
        def read(self, key: bytes) -> bytes:
            reads.append(key)
            return super().read(key)

    images = tmp_path / "images"
    images.mkdir()
    for name in (f"a.{ending}", "b.png"):
        (tmp_path / name).rename(images / name)
    source = BoxedSource(Counted(images), table)
    listing = source.listing()
    preprocess = Preprocess(lambda image: None, (32, 32), 32, "bilinear", (0, 0, 0), (1, 1, 1))  # type: ignore[arg-type,return-value]
    decoding = DecodeSettings(preprocess, ImagePolicy("apply", (0, 0, 0), 1 << 20))
    with Loader(source, listing, decoding, 8) as loader:
        batches = [batch for _, batch in loader.batches([Part(0, 0, len(listing))])]
    assert sorted(reads) == [f"a.{ending}".encode(), b"b.png"]
    whole = np.asarray(Image.open(images / f"a.{ending}"))
    failed = {failure.row for batch in batches for failure in batch.failures}
    assert failed == {row for row, key in enumerate(listing.keys) if key.startswith(b"b.png")}
    for batch in batches:
        for i in range(batch.count):
            if (row := batch.start + i) not in failed:
                box = source.box(bytes(listing.keys[row]))
                tile = whole[box.y : box.y + 32, box.x : box.x + 32]
                assert np.array_equal(batch.images[i].numpy(), tile.transpose(2, 0, 1))


@pytest.mark.parametrize("ending", ["png", "tif", "jpg"])
@pytest.mark.parametrize("jpeg", ["pillow", "simplejpeg"])
@pytest.mark.parametrize("is_reference", [False, True])
def test_a_whole_image_is_not_copied(
    tmp_path: Path, ending: str, jpeg: str, is_reference: bool
) -> None:
    """It stays in the type of its decoder, and boxes take that of the transform."""
    if jpeg == "simplejpeg":
        pytest.importorskip("simplejpeg", reason="simplejpeg is not installed")
    pixels = np.random.default_rng(0).integers(0, 256, (90, 80, 3), np.uint8)
    images = tmp_path / "images"
    images.mkdir()
    path = images / f"a.{ending}"
    Image.fromarray(pixels).save(path)
    policy = ImagePolicy("apply", (0, 0, 0), 1 << 20, jpeg=jpeg)
    whole = decode_image(path.read_bytes(), policy, None)
    assert isinstance(whole, np.ndarray) == (ending == "jpg" and jpeg == "simplejpeg")
    table = tmp_path / "boxes.csv"
    table.write_text(f"path,x,y,width,height\na.{ending},7,5,32,32\n")
    source = BoxedSource(FolderSource(images), table)
    taken: list[type] = []

    def reference(image: Image.Image) -> torch.Tensor:
        taken.append(type(image))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float()

    preprocess = Preprocess(reference, (32, 32), 32, "bilinear", (0, 0, 0), (1, 1, 1))
    with Loader(
        source, source.listing(), DecodeSettings(preprocess, policy, is_reference), 1
    ) as loader:
        (row,) = loader.each([0])
    expected = np.asarray(Image.open(path))[5:37, 7:39]
    assert row is not None
    np.testing.assert_array_equal(row.numpy(), expected.transpose(2, 0, 1))
    assert taken == [Image.Image] * is_reference
