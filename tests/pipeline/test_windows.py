"""Windows of images of their own size, against a plain loop of PyTorch over the same windows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from conftest import make_image
from made_store import dataset_digests
from PIL import Image
from torch import nn

import featx
from featx.errors import ConfigError, DataError, LayerError, ReduceError, StoreMismatchError
from featx.jobs.verify import JOBS
from featx.torch import TokenDataset

pytestmark = pytest.mark.usefixtures("in_tmp_path")

MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)


def plain_map(
    maps_of: Callable[[torch.Tensor], torch.Tensor],
    image: Image.Image,
    window: tuple[int, int],
    step: tuple[int, int],
    align: int,
) -> np.ndarray[Any, Any]:
    """The blended map of an image, (C, rows, columns): windows one by one, sums in float64.

    Args:
        maps_of: (1, 3, height, width) normalised window -> (1, C, rows, columns).
        image: an image.
        window: height and width of a window in pixels.
        step: pixels between windows along each axis.
        align: pixels of which the covered height and width are multiples.
    """
    pixels = (np.asarray(image.convert("RGB"), np.float32) / 255 - MEAN) / STD
    x = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    (height, width), (rows, columns) = window, (side // align * align for side in x.shape[2:])
    tops, top = [], 0
    while top + height < rows:
        tops.append(top)
        top += step[0]
    lefts, left = [], 0
    while left + width < columns:
        lefts.append(left)
        left += step[1]
    total = weights = None
    for y, x0 in itertools.product([*tops, rows - height], [*lefts, columns - width]):
        with torch.no_grad():
            part = maps_of(x[:, :, y : y + height, x0 : x0 + width])[0].double()
        pixels_of_cell = height // part.shape[1]
        i, j = (torch.arange(n).double() for n in part.shape[1:])
        weight_i = (part.shape[1] / 2 - (i + 0.5 - part.shape[1] / 2).abs())[:, None]
        weight_j = part.shape[2] / 2 - (j + 0.5 - part.shape[2] / 2).abs()
        if total is None or weights is None:
            total = torch.zeros(len(part), rows // pixels_of_cell, columns // pixels_of_cell)
            total, weights = total.double(), torch.zeros_like(total[0]).double()
        place = (
            slice(y // pixels_of_cell, y // pixels_of_cell + part.shape[1]),
            slice(x0 // pixels_of_cell, x0 // pixels_of_cell + part.shape[2]),
        )
        total[:, place[0], place[1]] += weight_i * weight_j * part
        weights[place] += weight_i * weight_j
    assert total is not None
    assert weights is not None
    return (total / weights).numpy()


def hooked(model: nn.Module, layer: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The output of a layer of a model, by a hook of PyTorch."""

    def maps_of(x: torch.Tensor) -> torch.Tensor:
        kept = []
        with model.get_submodule(layer).register_forward_hook(lambda *args: kept.append(args[2])):
            model(x)
        return kept[0].clone()

    return maps_of


def vit() -> nn.Module:
    """A ViT of 160 pixels, patches of 16 and a class token, which interpolates its positions."""
    return timm.create_model("test_vit", dynamic_img_size=True)


def vit_maps(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    tokens_of = hooked(model, "blocks.4")

    def maps_of(x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape[2] // 16, x.shape[3] // 16
        return tokens_of(x)[:, 1:].reshape(1, rows, columns, -1).permute(0, 3, 1, 2)

    return maps_of


def extract(model: nn.Module | dict[str, Any], data: object, **more: Any) -> featx.FeatureStore:
    """featx.extract of a module in fp32, with nothing left to be measured."""
    settings = {
        "model": {"factory": model} if isinstance(model, nn.Module) else model,
        "data": str(data) if isinstance(data, Path) else data,
        "dtype": "float32",
        "precision": "fp32",
        "compile": False,
        "device": "cpu",
        "batch_size": 4,
        "part_rows": 1,
        "max_failures": 1.0,
        "out": "store",
    }
    return featx.extract(**{**settings, **more})


class Stem(nn.Module):
    """A map of 8 x 8 pixels a position, which depends on where a pixel is in its window."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 5, 8, stride=8)
        self.deep = nn.Conv2d(5, 4, 3, stride=2, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.deep(self.stem(x)).mean((2, 3)))


WINDOWS = {"model_window_size": 32}


def write(folder: Path, *sizes: tuple[int, int]) -> Path:
    """Images of the given widths and heights."""
    folder.mkdir(exist_ok=True)
    for number, (width, height) in enumerate(sizes):
        make_image(width, height, number).save(folder / f"{number}.png")
    return folder


@pytest.fixture
def same_size(tmp_path: Path) -> Path:
    """Three images of 75 x 50 pixels."""
    return write(tmp_path / "same", (75, 50), (75, 50), (75, 50))


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Images of several sizes, one of them smaller than a window and one broken."""
    folder = write(tmp_path / "mixed", (75, 50), (64, 64), (40, 90), (31, 60))
    (folder / "4.png").write_bytes(b"no image")
    return folder


# Against a plain loop


@pytest.mark.parametrize(
    ("model", "layer", "maps_of", "window", "overlap", "step"),
    [
        (vit, "blocks.4", vit_maps, (64, 64), 0.5, (32, 32)),
        pytest.param(
            *(vit, "blocks.4", vit_maps, (64, 96), 0.25, (48, 64)), marks=pytest.mark.slow
        ),
        pytest.param(
            lambda: timm.create_model("test_convnext", num_classes=0),
            *("stages.2", lambda model: hooked(model, "stages.2"), (64, 64), 0.5, (32, 32)),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: torchvision.models.resnet18(weights=None),
            *("layer2", lambda model: hooked(model, "layer2"), (64, 64), 0.4, (32, 32)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["vit", "vit of wide windows", "convnext", "resnet"],
)
def test_maps_equal_a_plain_loop_over_windows(
    tmp_path: Path,
    model: Callable[[], nn.Module],
    layer: str,
    maps_of: Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]],
    window: tuple[int, int],
    overlap: float,
    step: tuple[int, int],
) -> None:
    torch.manual_seed(0)
    module = model().eval()
    photos = write(tmp_path / "photos", (150, 103), (150, 103))
    store = extract(
        module, photos, layers=[layer], model_window_size=list(window), model_window_overlap=overlap
    )
    plain = maps_of(module)
    with Image.open(photos / "0.png") as image, torch.no_grad():
        rows = plain(torch.zeros(1, 3, *window)).shape[2]
        align = window[0] // rows
        steps = tuple(int(side * (1 - overlap)) // align * align for side in window)
        if layer == "blocks.4":
            assert steps == step
        expected = plain_map(plain, image, window, (steps[0], steps[1]), align)
    assert store.complete
    assert not store.failures
    assert store[layer].shape == (2, *expected.shape)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(store[layer][0] / scale, expected / scale, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_layers_of_several_strides_share_their_windows(same_size: Path) -> None:
    model = Stem().eval()
    store = extract(model, same_size, layers=["stem", "deep"], **WINDOWS)
    with Image.open(same_size / "1.png") as image:
        for layer in ("stem", "deep"):  # both by the patch of `deep`, 16 pixels
            expected = plain_map(hooked(model, layer), image, (32, 32), (16, 16), 16)
            np.testing.assert_allclose(store[layer][1], expected, rtol=0, atol=1e-5)
    assert store["stem"].shape == (3, 5, 6, 8)
    places = store["deep"].tokens
    assert places is not None
    assert (places.grid, places.input_size) == ((3, 4), (48, 64))


@pytest.mark.slow
def test_a_window_of_the_size_of_the_image_gives_the_plain_map(same_size: Path) -> None:
    model = Stem().eval()
    transform = {"resize": [48, 64], "crop": [48, 64]}
    for path in same_size.iterdir():
        with Image.open(path) as image:
            image.crop((0, 0, 64, 48)).save(path)
    plain = extract(
        {"factory": model, "transform": transform},
        same_size,
        layers=["stem"],
        out="plain",
        part_rows=4,
    )
    store = extract(model, same_size, layers=["stem"], model_window_size=[48, 64])
    np.testing.assert_array_equal(store["stem"][:], plain["stem"][:])


def test_without_overlap_windows_are_tiles(same_size: Path) -> None:
    model = Stem().eval()
    store = extract(model, same_size, layers=["deep"], model_window_overlap=0, **WINDOWS)
    with Image.open(same_size / "2.png") as image:
        expected = plain_map(hooked(model, "deep"), image, (32, 32), (32, 32), 16)
    np.testing.assert_allclose(store["deep"][2], expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_values_hardly_depend_on_how_many_windows_are_computed_together(same_size: Path) -> None:
    one, *others = (
        extract(Stem(), same_size, layers=["deep"], batch_size=size, out=f"by{size}", **WINDOWS)
        for size in (1, 3, 16)
    )
    for store in others:
        np.testing.assert_allclose(store["deep"][:], one["deep"][:], rtol=0, atol=1e-6)


def test_grey_images_and_a_palette_are_rgb(tmp_path: Path) -> None:
    folder = write(tmp_path / "grey", (75, 50), (75, 50))
    for number, mode in enumerate(("L", "P")):
        with Image.open(folder / f"{number}.png") as image:
            image.convert(mode).save(folder / f"{number}.png")
    model = Stem().eval()
    store = extract(model, folder, layers=["deep"], **WINDOWS)
    for number in range(2):
        with Image.open(folder / f"{number}.png") as image:
            expected = plain_map(hooked(model, "deep"), image, (32, 32), (16, 16), 16)
        np.testing.assert_allclose(store["deep"][number], expected, rtol=0, atol=1e-5)


def test_numbers_of_sixteen_bits_keep_their_values(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 8, stride=8), nn.Flatten(), nn.LazyLinear(2)).eval()
    model(torch.zeros(1, 1, 32, 32))
    folder = tmp_path / "deep"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 65536, (48, 64), np.uint16)
    Image.fromarray(pixels).save(folder / "0.png")
    transform = {"scale": "dtype", "channels": 1, "mean": [0.5], "std": [0.25]}
    factory = {"factory": model, "transform": transform, "window": {"size": 32}}
    store = extract(factory, folder, layers=["0"])
    x = (torch.from_numpy(pixels.astype(np.float32)) / 65535 - 0.5) / 0.25
    with torch.no_grad():
        expected = model[0](x[None, None])[0]  # positions do not see beyond their patch
    np.testing.assert_allclose(store["0"][0], expected, rtol=0, atol=1e-5)


def test_a_resize_that_is_asked_for_comes_first(mixed: Path) -> None:
    model = Stem().eval()
    transform = {"resize": [48, 80]}
    store = extract(
        {"factory": model, "transform": transform, "window": {"size": 32}},
        mixed,
        layers=["deep"],
        decode="reference",
    )
    assert [failure["key"] for failure in store.failures] == ["4.png"]
    with Image.open(mixed / "3.png") as image:
        resized = image.resize((80, 48), Image.Resampling.BILINEAR)
    expected = plain_map(hooked(model, "deep"), resized, (32, 32), (16, 16), 16)
    np.testing.assert_allclose(store["deep"][3], expected, rtol=0, atol=1e-5)


def test_a_box_of_an_image_goes_through_windows_of_its_own(same_size: Path) -> None:
    Path("boxes.csv").write_text("path,x,y,width,height\n0.png,5,2,64,48\n1.png,0,0,16,16\n")
    data = {"name": "folder", "root": str(same_size), "boxes": "boxes.csv"}
    model = Stem().eval()
    store = extract(model, data, layers=["deep"], **WINDOWS)
    with Image.open(same_size / "0.png") as image:
        expected = plain_map(
            hooked(model, "deep"), image.crop((5, 2, 69, 50)), (32, 32), (16, 16), 16
        )
    np.testing.assert_allclose(store["deep"][0], expected, rtol=0, atol=1e-5)
    assert "16 x 16 pixels are smaller than a window" in store.failures[0]["message"]


# Images of several sizes


@pytest.mark.slow
def test_images_of_several_sizes_end_in_the_same_grid(mixed: Path) -> None:
    model = Stem().eval()
    reduce = {"name": "grid", "rows": 2, "columns": 2}
    store = extract(model, mixed, layers=["deep"], reduce=reduce, **WINDOWS)
    assert store["deep"].shape == (5, 4, 2, 2)
    for number in range(3):
        with Image.open(mixed / f"{number}.png") as image:
            expected = plain_map(hooked(model, "deep"), image, (32, 32), (16, 16), 16)
        grid = nn.functional.adaptive_avg_pool2d(torch.from_numpy(expected), 2)
        np.testing.assert_allclose(store["deep"][number], grid, rtol=0, atol=1e-5)
    assert np.isnan(store["deep"][3:]).all()
    small, broken = store.failures
    assert small["status"] == "transform error"
    assert "31 x 60 pixels are smaller than a window of 32 x 32" in small["message"]
    assert "model.transform.resize" in small["message"]
    assert broken["key"] == "4.png"
    assert broken["status"] == "unsupported"


SAMPLE = {"name": "sample", "k": 2}


@pytest.mark.parametrize(
    ("reduce", "kinds"),
    [
        ("none", r"have the shape \(4, 3, 4\) and the shape \(4, 4, 4\)"),
        (SAMPLE, "2 of 3 x 4 positions and 2 of 4 x 4 positions"),
    ],
)
def test_rows_of_images_of_several_sizes_are_refused_before_the_run(
    mixed: Path, reduce: object, kinds: str
) -> None:
    sizes = rf"several sizes, such as 75 x 50 and 64 x 64 .*{kinds}.*grid, rows: 3, columns: 2}}"
    with pytest.raises(ReduceError, match=sizes):
        extract(Stem(), mixed, layers=["deep"], reduce=reduce, **WINDOWS)
    assert not Path("store/parts").exists()


@pytest.mark.parametrize(
    ("reduce", "kinds"),
    [
        ("none", "a row with the shape (4, 3, 4), and the other images one with the shape (4, 4"),
        (SAMPLE, "a row with 2 of 3 x 4 positions, and the other images one with 2 of 4 x 4"),
    ],
)
def test_a_later_image_of_another_size_fails_with_the_reason(
    tmp_path: Path, reduce: object, kinds: str
) -> None:
    """Of nine images that with the number 7 is not among the eight of the trial."""
    folder = write(tmp_path / "photos", *[(64, 64)] * 7, (64, 48), (64, 64))
    store = extract(Stem(), folder, layers=["deep"], reduce=reduce, **WINDOWS)
    (failure,) = store.failures
    assert failure["key"] == "7.png"
    assert f"64 x 48 pixels give deep {kinds}" in failure["message"]
    assert np.isfinite(store["deep"][[0, 8]]).all()


def test_a_grid_has_no_place_in_pixels(tmp_path: Path) -> None:
    """Images of any size have the same grid, also one that is not among the eight of the trial."""
    folder = write(tmp_path / "photos", *[(64, 64)] * 7, (64, 96), (64, 64))
    reduce = {"name": "grid", "size": 2}
    store = extract(Stem(), folder, layers=["deep"], reduce=reduce, **WINDOWS)
    assert store.ok.all()
    tokens = TokenDataset(store, "deep", batch_size=1)
    assert tokens.grid == (2, 2)
    with pytest.raises(ValueError, match="position 3 of deep has no known place"):
        tokens.patch_box(7, 3)


def test_more_cells_than_positions_fail_the_image(tmp_path: Path) -> None:
    folder = write(tmp_path / "photos", (64, 64), (64, 32))
    reduce = {"name": "grid", "size": 3}
    store = extract(Stem(), folder, layers=["deep"], reduce=reduce, **WINDOWS)
    (failure,) = store.failures
    assert "3 x 3 cells are more than its 2 x 4 positions" in failure["message"]
    assert store["deep"].shape == (2, 4, 3, 3)


def test_images_all_smaller_than_a_window_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none of 2 images that were tried fits.*31 x 31"):
        extract(Stem(), write(tmp_path / "small", (31, 31), (20, 40)), layers=["deep"], **WINDOWS)


# What has no map


@pytest.mark.parametrize(
    ("layer", "error", "text"),
    [
        ("head", ReduceError, r"head: its rows have shape \(3,\), expected a map or patch tokens"),
        ("output", ReduceError, "expected a map or patch tokens"),
        ("embedding", ReduceError, "layers=stages"),
        ("deep:grad_output", LayerError, "has no map that windows can be blended in"),
    ],
)
def test_layers_without_a_map_are_refused(
    same_size: Path, layer: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"model.window.*{text}"):
        extract(Stem(), same_size, layers=[layer], **WINDOWS)


def test_no_advice_is_a_reduction_that_is_refused_as_well(same_size: Path) -> None:
    model = Shrunk(lambda x: x.flatten(2)[..., :7])  # five tokens, which are no grid
    with pytest.raises(ReduceError, match=r"the proportions of the input\. Name layers with maps"):
        extract(model, same_size, layers=["output"], model_window_size=36)


@pytest.mark.parametrize("reduce", ["cls", "patch_avg"])
def test_reductions_of_tokens_are_refused(same_size: Path, reduce: str) -> None:
    advice = r"expected tokens \(T, C\)\. Use avg, max, gem or align\.$"
    with pytest.raises(ReduceError, match=advice):
        extract(Stem(), same_size, layers=["deep"], reduce=reduce, **WINDOWS)


@pytest.mark.parametrize(
    ("layer", "size", "text"),
    [
        ("deep", 27, "2 x 2 positions in a window"),
        ("stem", 30, "stem takes every 8 x 8 positions of 30 x 30"),  # 3 positions in 24 pixels
        ("deep", 24, "deep takes every 2 x 2 positions of 3 x 3"),
        ("stem", 24, None),  # deep, which is not captured, has 2 positions in 3
    ],
)
def test_windows_of_other_than_whole_positions_are_refused(
    same_size: Path, layer: str, size: int, text: str | None
) -> None:
    if text is None:
        assert len(extract(Stem(), same_size, layers=[layer], model_window_size=size)) > 0
        return
    with pytest.raises(ReduceError, match=f"{text}.*multiple"):
        extract(Stem(), same_size, layers=[layer], model_window_size=size)


class Shrunk(nn.Module):
    """A function of the map of a stem of 4 x 4 pixels a position."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.stem, self.function = nn.Conv2d(3, 5, 4, stride=4), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.stem(x))


def swin() -> nn.Module:
    """Maps of 12, 6, 3 and 2 positions of 48 pixels; the last one is padded from 3 to 4."""
    return timm.models.SwinTransformer(
        img_size=48, embed_dim=8, depths=(1,) * 4, num_heads=(1,) * 4, num_classes=0
    )


# By their number in a window, positions would be 9, 7 and 24 pixels apart; they are 8, 4 and 32.
@pytest.mark.parametrize(
    ("model", "layer", "size", "text"),
    [
        (lambda: Shrunk(lambda x: F.max_pool2d(x, 2)), "output", 36, "of 9 x 9, and gives 4 x 4"),
        (lambda: Shrunk(lambda x: F.avg_pool2d(x, 2)), "output", 36, "of 9 x 9, and gives 4 x 4"),
        (lambda: Shrunk(lambda x: x[..., 1::2, 1::2]), "output", 36, "2 positions of 9, and gives"),
        (
            lambda: Shrunk(lambda x: F.interpolate(x, scale_factor=0.5)),
            *("output", 36, "of 9 x 9, and gives 4 x 4"),
        ),
        (
            lambda: Shrunk(lambda x: F.conv2d(x, torch.ones(6, 5, 2, 2), stride=2)),
            *("output", 36, "of 9 x 9, and gives 4 x 4"),
        ),
        (
            lambda: nn.Sequential(
                nn.Conv2d(3, 4, 5), nn.MaxPool2d(2), nn.Conv2d(4, 6, 5), nn.MaxPool2d(2)
            ),
            *("3", 28, "0 takes every 1 x 1 positions of 28 x 28, and gives 24 x 24"),
        ),
        (swin, "layers.3", 48, "layers.3.downsample fills 3 positions up to 4"),
    ],
    ids=["max_pool2d", "avg_pool2d", "slice", "interpolate", "conv2d", "no padding", "swin"],
)
def test_strides_outside_of_layers_that_do_not_fit_are_refused(
    same_size: Path, model: Callable[[], nn.Module], layer: str, size: int, text: str
) -> None:
    with pytest.raises(ReduceError, match=f"model.window.size.*{text}.*multiple"):
        extract(model(), same_size, layers=[layer], model_window_size=size)


def test_a_side_branch_of_its_former_size_leaves_out_nothing(same_size: Path) -> None:
    model = Shrunk(lambda x: x * F.interpolate(F.avg_pool2d(x, 2), x.shape[2:])).eval()
    store = extract(model, same_size, layers=["output"], model_window_size=36)
    with Image.open(same_size / "0.png") as image:
        expected = plain_map(model, image, (36, 36), (16, 16), 4)
    np.testing.assert_allclose(store["output"][0], expected, rtol=0, atol=1e-5)


def test_padding_before_a_stride_is_that_of_the_stride(same_size: Path) -> None:
    model = nn.Sequential(
        Shrunk(lambda x: torch.cat(x.split(2, 1), 1)),
        nn.ZeroPad2d((0, 1, 0, 1)),
        nn.Conv2d(5, 3, 3, stride=2),
    ).eval()
    store = extract(model, same_size, layers=["2"], **WINDOWS)
    with Image.open(same_size / "0.png") as image:
        expected = plain_map(hooked(model, "2"), image, (32, 32), (16, 16), 8)
    np.testing.assert_allclose(store["2"][0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"model_window_overlap": 0.2}, "no effect without model.window.size"),
        ({"model_window_size": 32, "model_window_overlap": 1.0}, "below 1"),
        ({"model_window_size": 32, "model_golden": "a.npz"}, "model.golden has no effect with"),
        ({"model_window_size": 32, "model_transform_crop": 32}, "transform.crop has no effect"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    same_size: Path, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        extract(Stem(), same_size, layers=["deep"], **options)


def test_the_size_of_the_input_and_of_the_windows_exclude_each_other(same_size: Path) -> None:
    model = {"name": "test_vit", "library": "timm", "weights": None, "input_size": [64, 64]}
    with pytest.raises(ConfigError, match=r"model.input_size has no effect with model.window.size"):
        extract({**model, "window": {"size": 64}}, same_size)


def test_a_model_of_one_input_size_names_it(same_size: Path) -> None:
    model = {"name": "resnet18", "library": "torchvision", "weights": None}
    with pytest.raises(ConfigError, match=r"model.window.size=\[64, 32\] builds.*squares"):
        extract({**model, "window": {"size": [64, 32]}}, same_size, layers=["layer2"])


@pytest.mark.parametrize("job", ["stats", "attribute"])
def test_jobs_without_windows_say_why(same_size: Path, job: str) -> None:
    from tiny_model import job_config

    with pytest.raises(ConfigError, match=f"model.window.size does not go with .*job={job}"):
        job_config(job, model={"name": "resnet18", "window": {"size": 32}}, data=str(same_size))


# Stores


@pytest.mark.slow
def test_a_resume_gives_the_bits_of_a_whole_run(same_size: Path) -> None:
    whole = extract(Stem(), same_size, layers=["stem", "deep"], out="whole", **WINDOWS)
    extract(Stem(), same_size, layers=["stem", "deep"], pack=False, **WINDOWS)
    Path("store/parts/part-000001.h5").unlink()
    store = extract(Stem(), same_size, layers=["stem", "deep"], **WINDOWS)
    assert store.complete
    assert dataset_digests(store.root) == dataset_digests(whole.root / "features.h5")


@pytest.mark.slow
def test_other_windows_are_refused_on_resume(same_size: Path) -> None:
    extract(Stem(), same_size, layers=["deep"], pack=False, **WINDOWS)
    for other in ({"model_window_size": 48}, {**WINDOWS, "model_window_overlap": 0.25}):
        with pytest.raises(StoreMismatchError, match=r"windows 32x32 overlap 0.5"):
            extract(Stem(), same_size, layers=["deep"], **other)


@pytest.mark.slow
def test_failed_images_are_retried_and_changed_ones_refreshed(same_size: Path) -> None:
    content = (same_size / "1.png").read_bytes()
    whole = extract(Stem(), same_size, layers=["deep"], out="whole", **WINDOWS)["deep"][:]
    (same_size / "1.png").write_bytes(b"no image")
    store = extract(Stem(), same_size, layers=["deep"], **WINDOWS)
    assert np.isnan(store["deep"][1]).all()
    (same_size / "1.png").write_bytes(content)
    store = extract(Stem(), same_size, layers=["deep"], retry_failed=True, **WINDOWS)
    np.testing.assert_array_equal(store["deep"][:], whole)
    make_image(75, 50, 9).save(same_size / "2.png")
    store = extract(Stem(), same_size, layers=["deep"], refresh=True, **WINDOWS)
    np.testing.assert_array_equal(store["deep"][:2], whole[:2])
    assert not np.array_equal(store["deep"][2], whole[2])


def test_a_row_that_is_not_finite_is_recorded(same_size: Path) -> None:
    model = Stem()
    model.deep.weight.data *= 1e6
    store = extract(
        model, same_size, layers=["deep"], dtype="float16", nonfinite="record", **WINDOWS
    )
    assert {failure["status"] for failure in store.failures} == {"non finite"}
    assert "over 65504, the largest float16" in store.failures[0]["message"]


def test_new_images_and_other_layers_go_through_the_windows_of_the_store(same_size: Path) -> None:
    """One layer of two is computed by the same windows, though its own patch is smaller."""
    model = Stem()
    store = extract(model, same_size, layers=["stem", "deep"], **WINDOWS)
    with Image.open(same_size / "1.png") as image:
        found = featx.embed([image], store="store", layers=["stem"], model_factory=model)
    np.testing.assert_allclose(found["stem"][0], store["stem"][1], rtol=0, atol=1e-6)


def test_a_plan_names_windows_and_writes_nothing(
    same_size: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tiny_model import MODEL, run_job

    model = {key: MODEL[key] for key in ("name", "library", "factory", "weights")}
    keys = {"model": {**model, "window": {"size": 32}}, "data": str(same_size), "out": "planned"}
    assert run_job("plan", **keys, layers=["deep"], precision="fp32", compile=False) == 0
    printed = capsys.readouterr().out
    assert "32 x 32 pixels every 16 x 16: 8 of an image of 75 x 50" in printed
    assert not Path("planned").exists()


@pytest.mark.slow
def test_verification_extracts_rows_again(
    same_size: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tiny_model import MODEL, run_job

    model = {key: MODEL[key] for key in ("name", "library", "factory", "weights")}
    extract({**model, "window": {"size": 32}}, same_size, layers=["conv", "deep"])
    assert "verify" in JOBS
    assert run_job("verify", store="store", verify={"reextract_rows": 3}) == 0
    assert "3 rows" in capsys.readouterr().out
