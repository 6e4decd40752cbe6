"""Views of images: the same operation by numpy, and random crops by torchvision."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import ks_2samp
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms import functional as TF

from featx.config import DataConfig
from featx.images import DecodeSettings, ImagePolicy, Loader, Preprocess
from featx.images.views import random_box
from featx.models.preprocessing import pillow_preprocess
from featx.sources import FolderSource, with_views
from featx.sources.views import BoxedSource
from featx.types import Part, RandomCrop

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)

PREPROCESS = pillow_preprocess(
    resize=40,
    crop=(32, 24),
    interpolation="bicubic",
    mean=(0.4, 0.5, 0.6),
    std=(0.2, 0.3, 0.4),
    offset="round",
)


def write_photos(root: Path) -> Path:
    """Smooth images of three sizes; in a BMP and a PNG, so that the decoder changes nothing."""
    root.mkdir()
    for number, (width, height) in enumerate(((64, 48), (50, 90), (41, 41))):
        small = np.random.default_rng(number).integers(0, 256, (6, 5, 3), np.uint8)
        image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
        image.save(root / f"{number}.{('png', 'bmp')[number % 2]}")
    return root


def loaded(
    root: Path, batch_size: int = 4, reference: bool = False, workers: int = 2, **data: object
) -> dict[bytes, torch.Tensor]:
    """Key -> image of the loader."""
    source = with_views(FolderSource(root), DataConfig(**data))  # type: ignore[arg-type]
    listing = source.listing()
    policy = ImagePolicy("apply", (0, 0, 0), 1 << 20)
    decoding = DecodeSettings(PREPROCESS, policy, reference, workers=workers)
    images: dict[bytes, torch.Tensor] = {}
    with Loader(source, listing, decoding) as loader:
        for _, batch in loader.batches([Part(0, 0, len(listing))], batch_size):
            assert not batch.failures
            rows = range(batch.start, batch.start + batch.count)
            images |= {
                bytes(listing.keys[row]): batch.images[i].clone() for i, row in enumerate(rows)
            }
    return images


TURNED = {
    "original": lambda x: x,
    "hflip": np.fliplr,
    "vflip": np.flipud,
    "rot90": np.rot90,
    "rot180": lambda x: np.rot90(x, 2),
    "rot270": lambda x: np.rot90(x, 3),
    "transpose": lambda x: x.transpose(1, 0, 2),
    "transverse": lambda x: np.rot90(x, 2).transpose(1, 0, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("reference", [False, True])
def test_a_view_is_the_image_turned_by_numpy_and_saved(tmp_path: Path, reference: bool) -> None:
    root = write_photos(tmp_path / "photos")
    views = loaded(root, reference=reference, views=list(TURNED))
    assert len(views) == 3 * len(TURNED)
    for name, turn in TURNED.items():
        saved = tmp_path / "turned" / name
        saved.mkdir(parents=True)
        for path in root.iterdir():
            pixels = np.ascontiguousarray(turn(np.asarray(Image.open(path))))
            Image.fromarray(pixels).save(saved / path.name)
    for key, image in loaded(tmp_path / "turned", reference=reference).items():
        name, _, photo = key.partition(b"/")
        assert torch.equal(views[photo + b"#" + name], image)


@pytest.mark.parametrize("reference", [False, True])
def test_a_crop_is_what_torchvision_makes_of_its_rectangle(tmp_path: Path, reference: bool) -> None:
    root = write_photos(tmp_path / "photos")
    data = DataConfig(crops=5, crop_scale=[0.2, 0.7])
    source = with_views(FolderSource(root), data)
    crops = loaded(root, reference=reference, crops=5, crop_scale=[0.2, 0.7])
    rectangles = set()
    for key, image in crops.items():
        photo = Image.open(root / key.decode().partition("#")[0])
        crop = source.view(key).crop  # type: ignore[attr-defined]
        box = random_box(crop, *photo.size)
        rectangles.add(box)
        expected = TF.resized_crop(
            photo, box.y, box.x, box.height, box.width, [32, 24], InterpolationMode.BICUBIC
        )
        if reference:
            x = TF.normalize(TF.to_tensor(expected), [0.4, 0.5, 0.6], [0.2, 0.3, 0.4])
            torch.testing.assert_close(image, x, atol=2e-6, rtol=0)
        else:  # as close as any image of the fast path
            assert (image.int() - TF.pil_to_tensor(expected).int()).abs().max() <= 1
    assert len(rectangles) == len(crops) == 15


def test_rectangles_are_distributed_as_those_of_torchvision() -> None:
    """In 300 x 200 pixels large areas of most quotients do not fit, so that others are drawn."""
    ours, theirs = [], []
    torch.manual_seed(0)
    image = torch.zeros(3, 200, 300)
    for seed in range(4000):
        ours.append(random_box(RandomCrop(seed, SCALE, RATIO), 300, 200))
        y, x, height, width = RandomResizedCrop.get_params(image, [*SCALE], [*RATIO])
        theirs.append((x, y, width, height))
    a, b = np.array(ours, float), np.array(theirs, float)
    for of in (
        lambda box: box[:, 2] * box[:, 3],
        lambda box: box[:, 2] / box[:, 3],
        lambda box: box[:, 0] / np.maximum(1, 300 - box[:, 2]),
        lambda box: box[:, 1] / np.maximum(1, 200 - box[:, 3]),
    ):
        assert ks_2samp(of(a), of(b)).pvalue > 0.01


@pytest.mark.parametrize("size", [(1000, 10), (10, 1000), (7, 7), (1, 90)])
def test_without_a_rectangle_that_fits_the_centre_is_that_of_torchvision(
    size: tuple[int, int],
) -> None:
    width, height = size
    ratio = (1.5, 1.6) if size == (7, 7) else RATIO
    box = random_box(RandomCrop(3, (1.0, 1.0), ratio), width, height)
    expected = RandomResizedCrop.get_params(torch.zeros(3, height, width), [1.0, 1.0], [*ratio])
    assert (box.y, box.x, box.height, box.width) == expected


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**64 - 1),
    width=st.integers(1, 500),
    height=st.integers(1, 500),
    scale=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)).map(sorted),
    ratio=st.tuples(st.floats(0.05, 20), st.floats(0.05, 20)).map(sorted),
)
def test_a_rectangle_lies_in_its_image(
    seed: int, width: int, height: int, scale: list[float], ratio: list[float]
) -> None:
    random.seed(1)
    crop = RandomCrop(seed, scale, ratio)
    box = random_box(crop, width, height)
    assert 0 <= box.x <= box.x + box.width <= width
    assert 0 <= box.y <= box.y + box.height <= height
    assert min(box.width, box.height) > 0
    random.seed(2)  # the state of the process has no part in it
    assert random_box(crop, width, height) == box


@pytest.mark.slow
def test_pixels_depend_on_key_view_and_bounds_only(tmp_path: Path) -> None:
    root = write_photos(tmp_path / "photos")
    some = loaded(root, workers=1, views=["hflip"], crops=2)
    more = loaded(root, batch_size=7, workers=3, views=["rot90", "hflip", "original"], crops=12)
    assert some.keys() < more.keys()
    assert all(torch.equal(image, more[key]) for key, image in some.items())
    others = loaded(root, crops=2, crop_scale=[0.3, 0.9])
    assert not any(torch.equal(image, some[key]) for key, image in others.items())
    (root / "0.png").rename(root / "9.png")  # a key is a name
    renamed = loaded(root, crops=1)
    assert not torch.equal(renamed[b"9.png#crop1"], some[b"0.png#crop1"])


class Counted(FolderSource):
    """Notes each image that is read in a file beside its folder."""

    def read(self, key: bytes) -> bytes:
        with self.root.with_name("reads").open("ab") as file:  # decoders read, in processes
            file.write(key + b"\n")
        return super().read(key)


def test_an_image_is_read_once_for_its_views(tmp_path: Path) -> None:
    source = with_views(
        Counted(write_photos(tmp_path / "photos")), DataConfig(views=["original", "vflip"], crops=6)
    )
    listing = source.listing()
    policy = ImagePolicy("apply", (0, 0, 0), 1 << 20)
    with Loader(source, listing, DecodeSettings(PREPROCESS, policy)) as loader:
        assert len([*loader.batches([Part(0, 0, len(listing))], 5)]) == 5
    assert sorted((tmp_path / "reads").read_text().splitlines()) == ["0.png", "1.bmp", "2.png"]


@pytest.mark.parametrize("ending", ["png", "tif", "jpg"])
def test_boxes_of_an_image_are_read_once_and_are_its_pixels(tmp_path: Path, ending: str) -> None:
    """Also those of an image that cannot be decoded; each box equals the tile saved as PNG."""
    pixels = np.random.default_rng(0).integers(0, 256, (300, 200, 3), np.uint8)
    images = tmp_path / "images"
    images.mkdir()
    Image.fromarray(pixels).save(images / f"a.{ending}")
    (images / "b.png").write_bytes(b"no image")
    corners = [(x, y) for x in range(0, 168, 24) for y in range(0, 264, 24)]
    lines = [f"{name},{x},{y},32,32" for name in (f"a.{ending}", "b.png") for x, y in corners]
    table = tmp_path / "boxes.csv"
    table.write_text("\n".join(["path,x,y,width,height", *lines]))
    source = BoxedSource(Counted(images), table)
    listing = source.listing()
    preprocess = Preprocess(lambda image: None, (32, 32), 32, "bilinear", (0, 0, 0), (1, 1, 1))  # type: ignore[arg-type,return-value]
    decoding = DecodeSettings(preprocess, ImagePolicy("apply", (0, 0, 0), 1 << 20))
    with Loader(source, listing, decoding) as loader:
        batches = [batch for _, batch in loader.batches([Part(0, 0, len(listing))], 8)]
    assert sorted((tmp_path / "reads").read_text().splitlines()) == [f"a.{ending}", "b.png"]
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
