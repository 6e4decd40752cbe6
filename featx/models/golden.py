"""Golden files: images with the features that a user's own code computes of them.

A checkpoint of a look-alike fits a model by names and shapes and computes other values. Only the
code that is known to be right can tell, so it writes what it computes, and featx compares.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from featx.errors import ConfigError
from featx.models.base import eval_mode
from featx.storage import AtomicFolder

_FORMAT = "featx golden 1"

MAX_GOLDEN_IMAGES = 64
"""Largest number of images in a file: each is compared before every new run."""


@dataclass(frozen=True)
class Golden:
    """Content of a golden file.

    Attributes:
        images: (H, W, 3) uint8 RGB images, each of its own size.
        inputs: (n, 3, H, W) float32, what the user's transform made of them.
        expected: (n, ...) float32, what the user's module made of the inputs.
    """

    images: Sequence[npt.NDArray[np.uint8]]
    inputs: torch.Tensor
    expected: torch.Tensor


def write_golden(
    path: str | os.PathLike[str],
    images: Sequence[str | os.PathLike[str] | Image.Image],
    module: Callable[[torch.Tensor], object],
    transform: Callable[[Image.Image], torch.Tensor],
) -> None:
    """Write the features that your own code computes, for the option `model.golden`.

        featx.write_golden("golden.npz", ["a.jpg", "b.jpg"], model, transform)

    Args:
        path: file to write, such as golden.npz.
        images: 1 to 64 paths or Pillow images; a few that are not square are best.
        module: function or module from (B, 3, H, W) to one tensor (B, ...): the output of the
            model, its embedding, or a layer that the run captures. A module is put in eval mode for
            the call.
        transform: function from a Pillow RGB image to a (3, H, W) tensor.

    Raises:
        ConfigError: there are no images or too many, or the result is not one tensor with a row of
            finite numbers for each image.
    """
    if not 1 <= len(images) <= MAX_GOLDEN_IMAGES:
        raise ConfigError(
            f"write_golden was given {len(images)} images; expected 1 to {MAX_GOLDEN_IMAGES}."
        )
    opened = [_rgb_image(image) for image in images]
    inputs = torch.stack([transform(image).float() for image in opened])
    mode = eval_mode(module) if isinstance(module, torch.nn.Module) else contextlib.nullcontext()
    with torch.no_grad(), mode:
        expected = module(inputs)
    if not isinstance(expected, torch.Tensor) or len(expected) != len(inputs):
        shape = tuple(expected.shape) if isinstance(expected, torch.Tensor) else ""
        raise ConfigError(
            f"write_golden: the module returned a {type(expected).__name__} {shape}; expected one "
            f"tensor with {len(inputs)} rows. Pass a function that picks it, such as "
            "lambda x: model(x).pooler_output."
        )
    if not torch.isfinite(expected).all():
        raise ConfigError("write_golden: the module returned values that are not finite.")
    arrays: dict[str, Any] = {f"image_{i}": np.asarray(x) for i, x in enumerate(opened)}
    with AtomicFolder(Path(path).parent).stream_file(Path(path)) as file:
        np.savez_compressed(
            file,
            format=np.array(_FORMAT),
            inputs=inputs.cpu().numpy(),
            expected=expected.float().cpu().numpy(),
            **arrays,
        )


def _rgb_image(image: str | os.PathLike[str] | Image.Image) -> Image.Image:
    """RGB image of a Pillow image, or of a file, which is closed."""
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    with Image.open(image) as opened:
        return opened.convert("RGB")


def read_golden(path: str) -> Golden:
    """Read a golden file; nothing in it is unpickled.

    Raises:
        ConfigError: it does not exist, or is no such file.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"model.golden={path}: no such file (looked in {Path.cwd()}).")
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
            if str(arrays["format"]) != _FORMAT:
                raise ValueError(f"its format is {arrays['format']}")
            inputs, expected = arrays["inputs"], arrays["expected"]
            images = [arrays[f"image_{i}"] for i in range(len(inputs))]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"model.golden={path} is no file of featx.write_golden: {error}."
        ) from error
    return Golden(images, torch.from_numpy(inputs), torch.from_numpy(expected))
