"""A row depends on its own image only, and what would break that is found before the first row.

The images are brighter than the noise on which a model is first seen.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tiny_engine import assert_refused, backbone_of, bound
from tiny_model import KEYS, extract
from torch import nn

from featx.engine import Compute
from featx.engine.attached_captures import ValueReads
from featx.errors import FeatxError, ModelError, RunError

IMAGES = torch.randint(150, 256, (16, 3, 8, 8), generator=torch.Generator().manual_seed(5)).byte()
"""Every normalised mean is above 0.3; that of noise is not."""


def _bright(x: torch.Tensor) -> torch.Tensor:
    """(B,) bool: of which images the mean is one that noise does not have."""
    return x.mean((1, 2, 3)) > 0.3


class Net(nn.Module):
    """conv -> bn -> block -> head; what is wrong with it comes with the subclass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(3, 8, 4, stride=4)
        self.bn = nn.BatchNorm2d(8)
        self.block = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)
        self.bn.running_mean.uniform_(-1, 1)
        self.bn.running_var.uniform_(0.5, 2)

    def stem(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.bn(self.conv(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.block(self.stem(x))).mean((2, 3)))


class Branch(Net):
    """Reads the convolution's output beside its BatchNorm, where all images are bright."""

    def stem(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        z = self.bn(y)
        return z + y if bool(_bright(x).any()) else z


class Masked(Net):
    """The same without a branch: the reader's result is masked for dark images."""

    def stem(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        z = self.bn(y)
        return torch.where(_bright(x)[:, None, None, None], z + y, z)


class Loop(Net):
    """The block runs twice where an image of the batch is bright."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.stem(x)
        for _ in range(1 + int(_bright(x).any())):
            z = self.block(z)
        return self.head(z.mean((2, 3)))


class OwnLoop(Net):
    """Does to an image what its own brightness asks for: right, with a course that follows data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self._one(image[None]) for image in x]))

    def _one(self, image: torch.Tensor) -> torch.Tensor:
        z = self.stem(image)
        return (z * 2 if bool(_bright(image)) else z).mean((2, 3))


class Sorting(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[x.mean((1, 2, 3)).argsort()])


class Reversing(Net):
    """Any permutation that does not depend on the images."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flip(0))


class OneScale(Net):
    """What dynamic quantisation does to a whole batch."""

    def stem(self, x: torch.Tensor) -> torch.Tensor:
        z = super().stem(x)
        scale = z.abs().amax() / 127
        return (z / scale).round() * scale


class Statistics(Net):
    """Takes the statistics of the batch, as it has no others."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(8, track_running_stats=False)


class Forgetful(Net):
    """`F.dropout(x)` forgets about eval mode."""

    def stem(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().stem(x))


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("images_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.images_seen += len(x)
        return super().forward(x)


class Ema(Net):
    """A mean that moves by less than any row shows in a few passes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(8))

    def stem(self, x: torch.Tensor) -> torch.Tensor:
        z = super().stem(x)
        self.ema = self.ema.lerp(z.mean((0, 2, 3)), 1e-5)
        return z - self.ema[:, None, None]


class Cached(Net):
    """A buffer that the first pass of a size fills, and none after it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.zeros(0), persistent=False)

    def stem(self, x: torch.Tensor) -> torch.Tensor:
        z = super().stem(x)
        if self.positions.shape != z.shape[2:]:
            self.positions = torch.ones(z.shape[2:])
        return z + self.positions


@pytest.mark.parametrize(
    ("make", "layer", "error", "message"),
    [
        (Loop, "block", RunError, "'block' is called 2 times in a pass over images, .* once"),
        (Sorting, "head", ModelError, "head: the row of an image changes"),
        (Reversing, "head", ModelError, "its position in the batch"),
        (Statistics, "bn", ModelError, "bn: the row of an image changes by"),
        (Forgetful, "head", ModelError, "head: the row of an image changes"),
        (OneScale, "head", ModelError, "a scale of the whole batch"),
        (Counting, "head", ModelError, "writes to its buffer images_seen"),
        (Ema, "head", ModelError, "writes to its buffer ema"),
    ],
)
def test_what_breaks_rows_is_refused(
    make: Callable[[], nn.Module], layer: str, error: type[FeatxError], message: str
) -> None:
    assert_refused(error, message, backbone_of(make()), layer, images=IMAGES)


def test_dynamic_quantisation_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.ao.quantization.quantize_dynamic(
            nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 8)).eval(),
            {nn.Linear},
        )
    assert_refused(
        ModelError, "3: the row of an image changes", backbone_of(module), "3", images=IMAGES
    )


def test_a_loop_that_neighbours_prolong_is_refused_where_only_its_result_is_taken() -> None:
    images = IMAGES.clone()
    images[::2] = 100  # dark ones, that are computed otherwise among bright ones
    assert_refused(
        ModelError, "head: the row of an image changes", backbone_of(Loop()), "head", images=images
    )


def test_what_is_right_is_taken() -> None:
    for make, layer in ((Net, "head"), (Cached, "head"), (OwnLoop, "head"), (Statistics, "conv")):
        with bound(backbone_of(make()), layer, images=IMAGES) as engine:
            assert len(engine.run(IMAGES)[layer]) == 16


@pytest.mark.parametrize("make", [Branch, Masked])
def test_a_reader_that_noise_does_not_show_keeps_a_convolution_from_being_folded(
    make: type[Net],
) -> None:
    module = make()
    with torch.no_grad():
        x = (IMAGES / 255 - 0.5) / 0.5
        assert not torch.equal(module.eval().stem(x), Net().eval().stem(x)), "images do not show it"
    with bound(backbone_of(module), "block", images=IMAGES) as engine:
        plain = engine.run(IMAGES)["block"]
        found = engine.formats(IMAGES)
        assert not found.fold_batchnorm
        engine.configure_compute(
            Compute("fp32", False, False, 16, fold_batchnorm=True)
        )  # folds what it may: nothing
        torch.testing.assert_close(engine.run(IMAGES)["block"], plain)
    with bound(backbone_of(Net()), "block", images=IMAGES) as engine:
        assert engine.formats(IMAGES).fold_batchnorm


def test_a_run_notices_a_layer_that_fires_again_behind_the_last_one() -> None:
    """A pass that ended after `block` would not see that the block runs once more."""
    dark = torch.full_like(IMAGES, 100)
    with bound(backbone_of(Loop()), "block", images=dark) as engine:
        assert engine.run(dark)["block"].shape == (16, 8, 2, 2)
        with pytest.raises(RunError, match="'block' is called 2 times"):
            engine.run(IMAGES)
        assert engine.run(dark)["block"].shape == (16, 8, 2, 2)


def test_a_call_that_is_asked_for_by_its_number_counts_the_others() -> None:
    class Twice(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = self.stem(x)
            for _ in range(2 + int(_bright(x).any())):
                z = self.block(z)
            return self.head(z.mean((2, 3)))

    assert_refused(
        RunError,
        r"'block' is called 3 times .* called 2 times",
        backbone_of(Twice()),
        "block@2",
        images=IMAGES,
    )


@pytest.mark.usefixtures("in_tmp_path")
def test_a_run_says_why_a_model_that_follows_its_data_is_not_folded(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {**KEYS["model"], "factory": "test_attached_captures:OwnLoop"}
    extract(photos, model=model, layers=["head"])
    assert "fold_batchnorm  false (the control flow of the model may" in capsys.readouterr().err


def test_a_model_that_reads_no_values_still_stops_early() -> None:
    calls: list[int] = []
    module = Net()
    module.head.register_forward_pre_hook(lambda m, args: calls.append(1))
    with bound(backbone_of(module), "block", images=IMAGES) as engine:
        calls.clear()
        engine.run(IMAGES)
    assert not calls


@pytest.mark.parametrize(
    "read",
    [
        lambda x: bool(x.sum() > 0),
        lambda x: range(x.argmax()),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        np.asarray,
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: f"{x.sum():.1f}",
    ],
)
def test_reads_of_values_are_seen(read: Callable[[torch.Tensor], Any]) -> None:
    x = torch.arange(4.0)
    with ValueReads().watch() as reads:
        x[torch.tensor([0, 2])] + x.sum() * len(x)
        assert not reads.has_reads
        read(x)
    assert reads.has_reads


def test_timed_passes_compare_rows_at_the_precision_of_the_run() -> None:
    """A model that goes wrong in half precision only, where the proof in fp32 sees nothing."""

    class HalfScale(Net):
        def stem(self, x: torch.Tensor) -> torch.Tensor:
            z = super().stem(x)
            if self.conv(x).dtype == torch.float32:
                return z
            scale = z.abs().amax() / 3
            return (z / scale).round() * scale

    images = (IMAGES.float() * torch.linspace(0.1, 1, 16)[:, None, None, None]).byte()
    with bound(backbone_of(HalfScale()), "block", images=images) as engine:
        engine.time_passes(images)
        engine.configure_compute(Compute("bf16", False, False, 16))
        with pytest.raises(ModelError, match="block: the row of an image changes"):
            engine.time_passes(images)
    with bound(backbone_of(Net()), "block", images=images) as engine:
        for precision in ("fp32", "bf16", "fp16"):
            engine.configure_compute(Compute(precision, False, True, 16))
            engine.time_passes(images)


@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.parametrize(
    ("name", "layer", "error"), [("Sorting", "head", ModelError), ("Loop", "block", RunError)]
)
def test_a_run_is_refused_before_anything_is_written(
    photos: Path, name: str, layer: str, error: type[FeatxError]
) -> None:
    for path in photos.rglob("*.png"):  # bright ones
        pixels = np.asarray(Image.open(path))
        Image.fromarray(200 + pixels // 8).save(path)
    model = {**KEYS["model"], "factory": f"test_attached_captures:{name}"}
    with pytest.raises(error):
        extract(photos, model=model, layers=[layer])
    assert not Path("store").exists()
