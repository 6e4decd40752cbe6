"""model=export: programs of torch.export, against the modules that they were made from."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_model
import torch
import torch.nn.functional as F
from conftest import make_image
from PIL import Image
from program_zoo import Net, edited, export
from torch import nn
from torchvision.transforms import v2

import featx
from featx.config import TransformConfig, model_options
from featx.errors import ConfigError, LayerError, ModelError
from featx.jobs import base as jobs
from featx.models import Backbone, build_backbone

pytestmark = [
    # torch.export and torch.jit warn of their own internals.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with net.pt2 for any number of images, and fixed.pt2 for two."""
    folder = tmp_path_factory.mktemp("programs")
    export(folder / "net.pt2", Net().eval())
    export(folder / "fixed.pt2", Net().eval(), sizes={})
    return folder


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of five images, the current folder above it."""
    (tmp_path / "photos").mkdir()
    for i in range(5):
        make_image(60 + i, 50, seed=i).save(tmp_path / "photos" / f"{i}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "photos"


def built(path: Path, **transform: Any) -> Backbone:
    config = TransformConfig(**{"resize": [32, 32], **transform})
    return build_backbone(model_options(library="export", name=str(path), transform=config), 0)


def extract(program: Path, photos: Path, **more: Any) -> featx.FeatureStore:
    model = {"library": "export", "name": str(program), "transform": {"resize": [32, 32]}}
    keys = {"layers": ["embedding"], "dtype": "float32", "decode": "reference", **more}
    return tiny_model.extract(photos, model=model, **keys)


def inputs_of(photos: Path) -> torch.Tensor:
    """(n, 3, 32, 32) images as the options ask, by torchvision alone."""
    transform = v2.Compose([
        v2.Resize([32, 32], antialias=True),
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ])  # fmt: skip
    return torch.stack([transform(Image.open(path)) for path in sorted(photos.iterdir())])


def test_layers_and_embedding_equal_those_of_the_exported_module(
    programs: Path, photos: Path
) -> None:
    layers = {"stem.1": "none", "block": "avg", "head:input": "none", "embedding": "none"}
    store = extract(programs / "net.pt2", photos, layers=layers)
    module, x, found = Net().eval(), inputs_of(photos), {}
    module.stem[1].register_forward_hook(lambda *a: found.update({"stem.1": a[2].clone()}))
    module.block.register_forward_hook(lambda *a: found.update(block=a[2].mean((2, 3))))
    module.head.register_forward_pre_hook(lambda *a: found.update({"head:input": a[1][0]}))
    with torch.no_grad():
        found["embedding"] = module(x)
    for name, values in found.items():
        np.testing.assert_allclose(store[name], values.numpy(), rtol=1e-4, atol=1e-5)
    fingerprint = json.loads(Path("store/featx.json").read_text())["fingerprint"]
    digest = hashlib.sha256((programs / "net.pt2").read_bytes()).hexdigest()
    assert fingerprint["model.program_sha256"] == digest


def test_a_program_of_two_images_gives_five_rows(programs: Path, photos: Path) -> None:
    store = extract(programs / "fixed.pt2", photos, batch_size=3)
    with torch.no_grad():
        expected = Net().eval()(inputs_of(photos)).numpy()
    assert store["embedding"].shape == (5, 4)
    np.testing.assert_allclose(store["embedding"], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(LayerError, match="head"):
        extract(programs / "fixed.pt2", photos, layers=["head"], out="inner")
    with pytest.raises(LayerError, match="its first dimension is not the batch"):
        extract(programs / "fixed.pt2", photos, layers=["relu"], out="inner")


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_fixed_program_takes_any_number_of_images(size: int, tmp_path: Path) -> None:
    path = export(tmp_path / "f.pt2", Net().eval(), torch.zeros(size, 3, 32, 32), sizes={})
    x = torch.randn(7, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    backbone = built(path)
    with torch.no_grad():
        for count in (1, 2, 3, 7):
            torch.testing.assert_close(backbone.module(x[:count]), Net().eval()(x[:count]))
    assert f"{size} image" in backbone.choices["batch"]


@pytest.mark.slow
def test_gradients_pass_through_a_program(programs: Path, photos: Path) -> None:
    layers = ["block:grad_output"]
    store = extract(programs / "net.pt2", photos, layers=layers, target="logsumexp")
    module, found = Net().eval(), []
    module.block.register_full_backward_hook(lambda *a: found.append(a[2][0]))
    module(inputs_of(photos).requires_grad_()).logsumexp(1).sum().backward()
    np.testing.assert_allclose(store[layers[0]], found[0].numpy(), rtol=1e-4, atol=1e-6)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y).mean((2, 3))


class ByKeyword(nn.Module):
    def forward(self, *, pixel_values: torch.Tensor) -> torch.Tensor:
        return pixel_values.mean((2, 3))


class Random(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)) + torch.rand(3)


class AlwaysDrops(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5).mean((2, 3))


class Counts(nn.Module):
    """Changes a buffer in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x.mean((2, 3)) + self.count


class Several(nn.Module):
    """Gives a map and a vector, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.conv(x)
        return {"map": y, "pooled": y.mean((2, 3))}


class Standardised(nn.Module):
    """Standardises its weights by F.batch_norm, as NFNets do, in eval mode as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = F.batch_norm(self.weight.reshape(1, 4, -1), None, None, training=True)
        return F.conv2d(x, weight.reshape(4, 3, 8, 8)).mean((2, 3))


class OfTheBatch(nn.Module):
    """Takes the statistics of each batch, in eval mode as well."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).amax((2, 3))


IMAGES = torch.zeros(2, 3, 32, 32)
GREY = torch.zeros(2, 1, 32, 32)
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "train mode": (
        lambda p: export(p, Net()),
        r"batch_norm \(train=True\), dropout \(train=True\)",
    ),
    "dropout that ignores eval": (lambda p: export(p, AlwaysDrops().eval()), "dropout"),
    "random numbers": (lambda p: export(p, Random().eval()), r"rand \(random\)"),
    "changed buffer": (lambda p: export(p, Counts().eval()), "changes count in every"),
    "two inputs": (lambda p: export(p, Doubled(), IMAGES, IMAGES), r"takes x: .*; y: .*float32"),
    "keyword": (lambda p: export(p, ByKeyword(), pixel_values=IMAGES), "pixel_values by keyword"),
    "float64": (lambda p: export(p, Net().eval().double(), IMAGES.double()), "float64"),
    "one channel": (lambda p: export(p, nn.Flatten(), GREY), r"takes \w+: \(any, 1, 32, 32\)"),
    "TorchScript": (lambda p: torch.jit.trace(Net().eval(), IMAGES).save(p), "TorchScript"),
    "state dict": (lambda p: torch.save(Net().state_dict(), p), r"of torch\.save, not"),
    "ONNX": (lambda p: p.write_bytes(b"\x08\x07\x12\x07pytorch" + bytes(99)), "ONNX"),
    "empty file": (lambda p: p.write_bytes(b""), "is no archive"),
    "no file": (lambda p: None, "no such file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_program_for_images_is_refused(case: str, tmp_path: Path) -> None:
    write, message = REFUSED[case]
    write(tmp_path / "x.pt2")
    with pytest.raises(ModelError, match=message):
        built(tmp_path / "x.pt2")


def test_a_program_of_at_most_four_images_gives_five_rows(photos: Path, tmp_path: Path) -> None:
    path = export(tmp_path / "x.pt2", Net().eval(), sizes={0: torch.export.Dim("b", max=4)})
    store = extract(path, photos, batch_size=4)
    with torch.no_grad():
        expected = Net().eval()(inputs_of(photos)).numpy()
    np.testing.assert_allclose(store["embedding"], expected, rtol=1e-4, atol=1e-5)


def test_outputs_without_a_value_of_images_are_no_layers(photos: Path, tmp_path: Path) -> None:
    class WithConstants(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), 3, None

    path = export(tmp_path / "x.pt2", WithConstants().eval())
    assert list(extract(path, photos, layers=["output"]).layers) == ["output"]


def test_a_program_of_several_outputs_has_layers_and_no_embedding(tmp_path: Path) -> None:
    for sizes in (None, {}):
        backbone = built(export(tmp_path / "x.pt2", Several().eval(), sizes=sizes))
        assert backbone.embedding is None
        with torch.no_grad():
            assert backbone.module(torch.zeros(3, 3, 32, 32))["pooled"].shape == (3, 4)


def test_batch_norm_of_weights_is_no_train_mode(tmp_path: Path) -> None:
    module = Standardised().eval()
    x = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        backbone = built(export(tmp_path / "x.pt2", module))
        torch.testing.assert_close(backbone.module(x), module(x))


@pytest.mark.parametrize("sizes", [None, {}], ids=["any", "fixed"])
def test_statistics_of_the_batch_are_refused(
    sizes: dict[int, Any] | None, photos: Path, tmp_path: Path
) -> None:
    path = export(tmp_path / "x.pt2", OfTheBatch().eval(), sizes=sizes)
    with pytest.raises(ModelError, match=r"changes by .* with the other images of its batch"):
        extract(path, photos)


def test_an_output_without_a_row_per_image_is_refused_with_a_fixed_batch(tmp_path: Path) -> None:
    class WithScale(Several):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return super().forward(x) | {"weight": self.conv.weight}

    with pytest.raises(ModelError, match=r"also returns \(4, 3, 8, 8\), which has no row"):
        built(export(tmp_path / "x.pt2", WithScale().eval(), sizes={}))
    assert built(export(tmp_path / "x.pt2", WithScale().eval())).embedding is None


def zip_of(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"{}")
    return path


def test_archives_of_other_kinds_are_named(programs: Path, tmp_path: Path) -> None:
    aoti = zip_of(tmp_path / "a.pt2", "a/archive_format", "a/data/aotinductor/model/x.so")
    with pytest.raises(ModelError, match="AOTInductor"):
        built(aoti)
    old = zip_of(tmp_path / "b.pt2", "version", "serialized_exported_program.json")
    with pytest.raises(ModelError, match=r"torch 2\.7 or older"):
        built(old)
    with pytest.raises(ModelError, match="is an archive, but not of"):
        built(zip_of(tmp_path / "c.pt2", "photos/1.png"))
    cuda = edited(
        tmp_path / "d.pt2", programs / "net.pt2", "model.json",
        lambda data: data.replace(b'"type": "cpu"', b'"type": "cuda"'),
    )  # fmt: skip
    with pytest.raises(ModelError, match="exported on cuda"):
        built(cuda)


def test_damaged_files_end_in_one_message(programs: Path, tmp_path: Path) -> None:
    """Cut anywhere, or with a flipped byte: every member has a checksum."""
    whole = (programs / "net.pt2").read_bytes()
    for step in range(1, 12):
        place = len(whole) * step // 12
        (tmp_path / "cut.pt2").write_bytes(whole[:place])
        with pytest.raises(ModelError, match=r"cut\.pt2"):
            built(tmp_path / "cut.pt2")
    config = whole.index(b'"use_pickle"')
    (tmp_path / "flip.pt2").write_bytes(
        whole[:config] + bytes([whole[config] ^ 4]) + whole[config + 1 :]
    )
    with pytest.raises(ModelError, match="is damaged"):
        built(tmp_path / "flip.pt2")


def test_the_size_of_the_images_follows_from_the_program(programs: Path, tmp_path: Path) -> None:
    net = programs / "net.pt2"
    assert built(net).preprocess.crop == (32, 32)
    assert built(net, resize=40, mean=[0.5] * 3).preprocess.mean == (0.5, 0.5, 0.5)
    with pytest.raises(ConfigError, match="exported for images of 32 x 32"):
        built(net, crop=24)
    with pytest.raises(ConfigError, match=r"Give model\.transform\.resize, such as \[32,32\]"):
        built(net, resize=None)
    side = {n: torch.export.Dim(name, min=16, max=512) for n, name in ((2, "h"), (3, "w"))}
    free = export(tmp_path / "free.pt2", Net().eval(), sizes=side | {0: torch.export.Dim("b")})
    assert built(free, resize=None).preprocess.crop == (224, 224)
    assert built(free, resize=[40, 48], crop=[40, 48]).preprocess.crop == (40, 48)
    with pytest.raises(ModelError, match="does not take one image of 8 x 8 pixels"):
        built(free, resize=8, crop=8)


@pytest.mark.slow
def test_conditions_of_the_export_hold_in_the_run(tmp_path: Path) -> None:
    """torch.export.unflatten leaves out that height and width are multiples of 8."""

    class Unshuffled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.pixel_unshuffle(x, 8).mean((2, 3))

    any_size = {0: torch.export.Dim("b"), **dict.fromkeys((2, 3), torch.export.Dim.AUTO)}
    path = export(tmp_path / "x.pt2", Unshuffled().eval(), sizes=any_size)
    x = torch.randn(3, 3, 40, 48, generator=torch.Generator().manual_seed(1))
    backbone = built(path, resize=[40, 48], crop=[40, 48])
    torch.testing.assert_close(backbone.module(x), Unshuffled()(x))
    with pytest.raises(ModelError, match=r"does not take .* of 36 x 40 pixels \(Guard failed"):
        built(path, resize=[36, 40], crop=[36, 40])


@pytest.mark.parametrize("values", [{"weights": None}, {"weights": "x.pth"}, {"init": "reset"}])
def test_weights_of_a_program_cannot_be_replaced(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the weights are part of the program"):
        model_options(library="export", name="x.pt2", **values)
    with pytest.raises(ConfigError, match="needs model"):
        model_options(library="export", name="")


def test_a_store_does_not_lead_to_a_program(programs: Path, photos: Path) -> None:
    extract(programs / "net.pt2", photos)
    config, text = jobs.config_of_call(
        "verify", {"store": "store", "verify": {"reextract_rows": 2}}
    )
    with pytest.raises(ConfigError, match=r"featx imports no code.*add model=export model\.name="):
        jobs.run(config, text)
