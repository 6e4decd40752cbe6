"""Programs of torch.export as users save them, whole and changed."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    """Convolution, BatchNorm and a linear layer for images of any size, with random weights."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.stem = nn.Sequential(nn.Conv2d(3, 8, 8, stride=8), nn.BatchNorm2d(8), nn.ReLU())
            self.block = nn.Conv2d(8, 6, 3, padding=1)
            self.drop = nn.Dropout(0.5)
            self.head = nn.Linear(6, 4)
            nn.init.normal_(self.stem[1].running_mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 3, H, W) float32 -> (B, 4) float32."""
        logits: torch.Tensor = self.head(self.drop(self.block(self.stem(x)).mean((2, 3))))
        return logits


def export(
    path: Path,
    module: nn.Module,
    *images: torch.Tensor,
    sizes: dict[int, Any] | None = None,
    **keywords: torch.Tensor,
) -> Path:
    """Write a module as a program.

    Args:
        path: file.
        module: the module, in the mode in which it is exported.
        images: positional arguments; two images of 32 pixels if there are none of either kind.
        sizes: dimension -> torch.export.Dim of every argument; {} fixes all sizes, None leaves the
            batch size free.
        keywords: keyword arguments.
    """
    if not images and not keywords:
        images = (torch.zeros(2, 3, 32, 32),)
    free = {0: torch.export.Dim("batch")} if sizes is None else sizes
    shapes = (free,) * len(images) or dict.fromkeys(keywords, free)
    program = torch.export.export(module, images, keywords, dynamic_shapes=shapes)
    torch.export.save(program, path)
    return path


def edited(path: Path, source: Path, member: str, change: Callable[[bytes], bytes | None]) -> Path:
    """Write a copy of an archive in which a member is changed, or left out.

    Args:
        path: the new file.
        source: the archive.
        member: end of the name of the member.
        change: function of its bytes; None leaves it out.
    """
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(path, "w") as made:
        for name in archive.namelist():
            data: bytes | None = archive.read(name)
            if name.endswith(member) and data is not None:
                data = change(data)
            if data is not None:
                made.writestr(name, data)
    return path


class TouchFile:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def _with_json(change: Callable[[Any], None]) -> Callable[[bytes], bytes]:
    """Function of the bytes of a JSON file that changes its value in place."""

    def changed(data: bytes) -> bytes:
        value = json.loads(data)
        change(value)
        return json.dumps(value).encode()

    return changed


def _replaced(value: Any, key: str, new: Any) -> None:
    """Set every entry of this key inside a JSON value."""
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, dict | list):
            _replaced(each, key, new)
    if isinstance(value, dict) and key in value:
        value[key] = new


def hostile(folder: Path, source: Path, touched: Path) -> dict[str, Path]:
    """Copies of a program that make a file when torch.export.load or the program runs them.

    Args:
        folder: where they are written.
        source: the program.
        touched: file that they make.
    """
    python = f"__import__('os').system('touch {touched}')"
    pickled = io.BytesIO()
    torch.save(TouchFile(touched), pickled)

    def node(program: Any, **values: Any) -> None:
        program["graph_module"]["graph"]["nodes"][0].update(values)

    def argument(program: Any) -> None:
        _replaced(program, "forward_arg_names", [f"x={python}"])

    def passed(program: Any) -> None:
        inputs = program["graph_module"]["graph"]["nodes"][0]["inputs"]
        inputs[0]["arg"] = {"as_operator": "torch.os.system"}

    def custom(config: Any) -> None:
        config["config"]["thing"] = {"path_name": "custom_obj_0", "use_pickle": False}

    model, weights = "models/model.json", "model_weights_config.json"
    changes: dict[str, list[tuple[str, Callable[[bytes], bytes]]]] = {
        "expression": [(model, _with_json(lambda x: _replaced(x, "expr_str", python)))],
        "function": [(model, _with_json(lambda x: node(x, target="torch.os.system")))],
        "loader": [(model, _with_json(lambda x: node(x, target="torch.ops.load_library")))],
        "file": [(model, _with_json(lambda x: node(x, target="torch.ops.aten.from_file.default")))],
        "guard": [(model, _with_json(lambda x: x.update(guards_code=[f"({python}) == 0"])))],
        "operator": [(model, _with_json(passed))],
        "caller": [(model, _with_json(lambda x: node(x, target="_operator.methodcaller")))],
        "argument": [(model, _with_json(argument))],
        "node": [(model, _with_json(lambda x: node(x, name=f"x={python}")))],
        "parameter": [(model, _with_json(lambda x: _replaced(x, "parameter_name", f'"+{python}')))],
        "weight": [
            (weights, _with_json(lambda x: _replaced(x, "use_pickle", True))),
            ("weights/weight_0", lambda data: pickled.getvalue()),
        ],
        "constant": [("model_constants_config.json", _with_json(custom))],
        "example": [("sample_inputs/model.pt", lambda data: pickled.getvalue())],
    }
    found = {}
    for name, steps in changes.items():
        path = source
        for number, (member, change) in enumerate(steps):
            path = edited(folder / f"{name}{number}.pt2", path, member, change)
        found[name] = path
    return found
