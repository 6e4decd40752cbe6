"""Image processors of transformers as featx's preprocessing.

A processor is a Python class with options. If it can be stated in the values of the fast path
(`statements.py`), images are computed there; otherwise the processor computes them itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featx.errors import ModelError, WeightsError, one_line
from featx.models.hugging_face import read_json
from featx.models.transformers.folder import CONFIG, PROCESSORS
from featx.models.transformers.loading import import_transformers, quiet
from featx.models.transformers.statements import (
    MADE_SIZES,
    RESAMPLING,
    Reference,
    is_proven,
    made_image,
    name_of,
    normalisation,
    plain_sizes,
    statement_of,
)

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from featx.images import Preprocess


@dataclass(frozen=True)
class ProcessorChoice:
    """The preprocessing of a folder, and the class and backend of its processor.

    It is proven if the fast path states what the processor does.
    """

    preprocess: Preprocess
    name: str
    is_proven: bool


def processor_choice(folder: Path, size: tuple[int, int] | None) -> ProcessorChoice:
    """Return the preprocessing that the processor of a folder asks for.

    `size` is (height, width) of the images in pixels, or None for that of the processor.
    """
    processor = _open_processor(folder, {})
    if size is not None:
        processor = _open_processor(folder, _options_of_size(processor, size))
    reference = _reference(processor)
    kind = name_of(processor)
    crop, name = _size_of(reference, kind), f"{kind}, {processor.backend}"
    statement = statement_of(processor)
    if (
        statement is not None
        and statement.crop == crop
        and is_proven(processor, reference, statement)
    ):
        return ProcessorChoice(replace(statement, reference=reference), name, True)
    return ProcessorChoice(_by_the_processor(processor, kind, reference, crop), name, False)


def _open_processor(folder: Path, options: Mapping[str, Any]) -> Any:
    """Return the processor of a folder, the one of Pillow if it has one.

    The backends of transformers differ by several levels of 255, so one is chosen for good. Pillow
    resizes like the transforms of torchvision and timm do on images.
    """
    transformers = import_transformers()
    nested, plain = (folder / name for name in PROCESSORS)
    has_nested = nested.is_file() and "image_processor" in read_json(nested)
    if not (has_nested or plain.is_file()):
        raise WeightsError(
            f"{folder} has no image processor ({PROCESSORS[1]}), so its preprocessing is unknown. "
            "Copy the file from where the model comes from; without the right one the features "
            "would be wrong."
        )
    read_json(nested if has_nested else plain)
    try:
        with quiet():
            return transformers.AutoImageProcessor.from_pretrained(
                str(folder),
                backend="pil",
                trust_remote_code=False,
                local_files_only=True,
                **options,
            )
    except Exception as error:  # of many kinds: unknown classes, wrong values, missing keys
        reason = one_line(error)
        raise WeightsError(
            f"the image processor of {folder} ({(nested if has_nested else plain).name}, {CONFIG}) "
            f"cannot be opened: {reason}"
        ) from error


def _reference(processor: Any) -> Reference:
    """Return the processor as a function from an RGB image to (3, H, W) float32."""
    import torch

    def reference(image: Image.Image) -> torch.Tensor:
        x = processor(images=image, return_tensors="pt")["pixel_values"][0]
        return torch.as_tensor(x).float()

    return reference


def _size_of(reference: Reference, name: str) -> tuple[int, int]:
    """Return (height, width) of the images that a processor makes."""
    shapes = []
    for size in MADE_SIZES:
        try:
            shapes.append(tuple(reference(made_image(size)).shape))
        except Exception as error:  # of the processor
            reason = one_line(error)
            raise ModelError(
                f"the image processor {name} fails for an RGB image of {size[0]} x {size[1]} "
                f"pixels: {reason}"
            ) from error
    if len(set(shapes)) > 1 or len(shapes[0]) != 3 or shapes[0][0] != 3:
        made = ", ".join(f"{width}x{height}" for width, height in MADE_SIZES[:2])
        raise ModelError(
            f"the image processor {name} makes tensors {shapes[0]} and {shapes[1]} of images of "
            f"{made} pixels; featx needs (3, height, width) of one size. Give its size as height "
            f"and width, or a crop_size, in {PROCESSORS[1]}."
        )
    return shapes[0][1], shapes[0][2]


def _by_the_processor(
    processor: Any, kind: str, reference: Reference, crop: tuple[int, int]
) -> Preprocess:
    """The preprocessing that the processor computes for every image."""
    from featx.images import Preprocess

    mean, std = normalisation(processor)
    return Preprocess(
        reference=reference,
        crop=crop,
        resize=None,
        interpolation=RESAMPLING.get(int(processor.resample or 0), "other"),
        mean=mean,  # mean and standard deviation describe the images; the processor applies them
        std=std,
    )


def _options_of_size(processor: Any, size: tuple[int, int]) -> dict[str, Any]:
    """Options with which a processor makes images of another size.

    The share of the image that is cropped stays the same.
    """
    name = name_of(processor)
    height, width = size
    crop = {"height": height, "width": width}
    adds_margin = name in ("ConvNextImageProcessor", "LevitImageProcessor")
    if adds_margin and height == width:
        return {"size": {"shortest_edge": height}, "crop_size": crop}
    sizes = None if adds_margin else plain_sizes(processor)
    if sizes is None:
        raise ModelError(
            f"model.input_size={list(size)}: the image processor {name} takes no such size. Change "
            f"{PROCESSORS[1]}, or leave the option out."
        )
    resize, (old_height, old_width) = sizes
    if isinstance(resize, int):
        # The larger scale: the shorter side of any image then covers the crop.
        scale = max(height / old_height, width / old_width)
        return {"size": {"shortest_edge": round(resize * scale)}, "crop_size": crop}
    exact = {
        "height": round(resize[0] * height / old_height),
        "width": round(resize[1] * width / old_width),
    }
    return {"size": exact, "crop_size": crop}
