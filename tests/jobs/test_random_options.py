"""Options of job=extract at random: each row is what plain hooks give for the image it names."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from interruptions import Dies, die_at_disk_change, signal_after_commits
from PIL import Image
from tiny_model import KEYS, run_job, write_image
from torch import nn
from torch.nn import functional as F
from torchvision.transforms import functional as TF
from zoo import TwoStageConvNet, vision_transformer

import featx
from featx.pipeline import Interrupted

pytestmark = [pytest.mark.usefixtures("in_tmp_path"), pytest.mark.slow]

Values = dict[str, torch.Tensor]
MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
VIEWS: dict[str, Callable[[npt.NDArray[Any]], npt.NDArray[Any]]] = {
    "original": lambda image: image,
    "hflip": np.fliplr,
    "rot90": np.rot90,
    "transpose": lambda image: image.transpose(1, 0, 2),
}
TOLERANCE = {"float32": 3e-4, "float16": 1.5e-3, "bfloat16": 1e-2}
OF_MAPS = ["none", "flatten", "avg", "max", "grid", "map"]


@dataclass(frozen=True)
class Model:
    """A model, the side of its images, and its layers with the reductions that they take."""

    factory: str
    build: Callable[[], nn.Module]
    side: int
    layers: dict[str, list[str]]


MODELS = [
    Model(
        "zoo:TwoStageConvNet",
        TwoStageConvNet,
        32,
        {"conv": OF_MAPS, "deep": OF_MAPS, "deep:input": OF_MAPS, "head": ["none"]}
        | {"conv:grad_output": OF_MAPS, "deep:grad_output": OF_MAPS, "pool:grad_input": OF_MAPS},
    ),
    Model(
        "zoo:vision_transformer",
        vision_transformer,
        16,
        {"blocks.0": [*OF_MAPS, "cls", "patch_avg"], "blocks.1:input": [*OF_MAPS, "cls"]}
        | {"norm": ["none", "cls"], "head": ["none"], "blocks.1.attn:attention": ["none"]}
        | {"blocks.0:grad_output": ["none", "avg", "cls"]},
    ),
]


def by_hooks(module: nn.Module, x: torch.Tensor, target: str | int, label: int) -> Values:
    """Every tensor of a pass by the name that it has in a store: (1, ...) each."""
    outputs, inputs = {}, {}

    def hook(name: str) -> Callable[..., Any]:
        def after(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> Any:
            inputs[name], outputs[name] = args[0], output
            for tensor in (args[0], output):
                tensor.retain_grad()

        return after

    handles = [
        part.register_forward_hook(hook(name)) for name, part in module.named_modules() if name
    ]
    logits = module(x.requires_grad_())
    loss = F.cross_entropy(logits, torch.tensor([label]))
    numbers: dict[str | int, torch.Tensor] = {
        "loss": loss,
        "label": logits[0, label],
        "predicted": logits.max(),
        1: logits[0, 1],
    }
    numbers[target].backward()
    for handle in handles:
        handle.remove()
    found = dict(outputs)
    for name, tensor in inputs.items():
        found |= {f"{name}:input": tensor, f"{name}:grad_input": tensor.grad}
        found[f"{name}:grad_output"] = outputs[name].grad
        if name.endswith(".attn_drop"):
            found[f"{name.removesuffix('.attn_drop')}:attention"] = tensor
    return {name: tensor.detach() for name, tensor in found.items() if tensor is not None}


def reduced(value: torch.Tensor, reduce: str) -> torch.Tensor:
    """The row of a map (1, C, H, W), or of tokens (1, 1 + H * W, C)."""
    if reduce in ("none", "flatten"):
        return value if reduce == "none" else value.flatten(1)
    is_map = value.ndim == 4
    positions = value.flatten(2) if is_map else value.transpose(1, 2)
    maps = value if is_map else value[:, 1:].transpose(1, 2).unflatten(2, (4, 4))
    rows = {
        "avg": lambda: positions.mean(2),
        "max": lambda: positions.amax(2),
        "cls": lambda: value[:, 0],
        "patch_avg": lambda: value[:, 1:].mean(1),
        "map": lambda: maps,
        "grid": lambda: maps.unflatten(3, (2, -1)).unflatten(2, (2, -1)).mean((3, 5)),
    }
    return rows[reduce]()


class RandomOptions:
    """Images in a folder, options of a run that are chosen at random, and what it has to give."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choice, chance = self.random.choice, self.random.random
        self.model = choice(MODELS)
        self.module = self.model.build().eval()
        for part in self.module.modules():
            if hasattr(part, "fused_attn"):
                part.fused_attn = False
        torch.save(self.module.state_dict(), "weights.pth")
        for number in range(choice([1, 5, 10])):
            write_image(Path(f"photos/{number % 3}/{number:02d}.png"), number)
        Path("photos/0/damaged.png").write_bytes(b"no image")
        self.views = choice([None, ["original"], ["rot90", "hflip"], list(VIEWS)])
        side = self.model.side
        self.resize = choice([side, side + 5, [side, side + 3]])
        self.target: str | int = choice(["label", "loss", "predicted", 1])
        self.dtype = choice(list(TOLERANCE))
        batch_size = choice([1, 2, 3, 4, 64])
        self.keys: dict[str, Any] = {
            **KEYS,
            "model": {"library": "custom", "factory": self.model.factory, "weights": "weights.pth"}
            | {"transform": {"resize": self.resize, "crop": side, "mean": MEAN, "std": STD}},
            "data": {"name": "folder", "root": "photos"}
            | ({"views": self.views} if self.views else {}),
            "batch_size": batch_size,
            "part_rows": choice([64, "auto"] if batch_size > 4 else [4, 8, "auto"]),
            "codec": choice(["none", "gzip", "zstd"]),
            "decode": "reference",
            "pack": choice([True, False]),
            "fold_batchnorm": chance() < 0.5,
            "max_failures": 1.0,
        }

    def extract(self) -> None:
        """Extract some layers; the first run may be cut off and is given again then."""
        choice = self.random.choice
        names = self.random.sample(sorted(self.model.layers), 2)
        layers = {name: choice(self.model.layers[name]) for name in names}
        keys = {**self.keys, "layers": layers, "dtype": self.dtype}
        if any(":grad" in name for name in names):
            keys["target"] = self.target
        with pytest.MonkeyPatch.context() as patch:
            if (cut := self.random.random()) < 0.3:
                signal_after_commits(patch, self.random.randint(1, 3))
            elif cut < 0.6:
                die_at_disk_change(patch, self.random.randint(1, 9))
            try:
                featx.extract(**keys)
            except (Interrupted, Dies):
                patch.undo()
                featx.extract(**keys)

    def check(self) -> None:
        store = featx.open("store")
        views = self.views or [""]
        paths = sorted(str(path.relative_to("photos")) for path in Path("photos").rglob("*.png"))
        keys = [f"{path}#{view}" if view else path for path in paths for view in views]
        assert store.keys.tolist() == sorted(keys)
        for row, key in enumerate(store.keys.tolist()):
            path, _, view = key.partition("#")
            assert store.classes[store.labels[row]] == path[0]
            assert bool(store.ok[row]) == ("damaged" not in path)
            if store.ok[row]:
                self.check_row(store, row, Path("photos", path), view or "original")

    def check_row(self, store: featx.FeatureStore, row: int, path: Path, view: str) -> None:
        with Image.open(path) as image:
            pixels = VIEWS[view](np.asarray(image.convert("RGB")))
        image = TF.resize(Image.fromarray(np.ascontiguousarray(pixels)), self.resize)
        x = TF.normalize(TF.to_tensor(TF.center_crop(image, self.model.side)), MEAN, STD)
        values = by_hooks(self.module, x[None], self.target, int(path.parent.name))
        for name in store:
            expected = reduced(values[name], store[name].attrs["reduce"])[0].numpy()
            found = store[name][row].astype(np.float32)
            assert found.shape == expected.shape, name
            # 3e-5: the numbers next to 0 of float16.
            scale = np.abs(expected).max() + 3e-5
            tolerance = TOLERANCE[self.dtype] * scale
            assert np.abs(found - expected).max() <= tolerance, (name, path)


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_those_of_hooks(seed: int) -> None:
    run = RandomOptions(seed)
    run.extract()
    run.check()
    featx.open("store")
    assert (
        run_job("verify", store="store", model={"library": "custom", "factory": run.model.factory})
        == 0
    )
