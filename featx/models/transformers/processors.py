"""Image processors of transformers as featx's preprocessing.

A processor is a Python class with options. If these can be stated in values that the fast path
follows, images are computed there; otherwise the processor computes them itself. A statement is
derived from class and options, and then proven: processor and statement are computed for made
images of odd sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms import functional as TF

from featx.errors import FeatxError, ModelError, WeightsError, one_line
from featx.images import Preprocess, centre_crop
from featx.models.hugging_face import read_json
from featx.models.preprocessing import pillow_preprocess
from featx.models.transformers.folder import CONFIG, PROCESSORS
from featx.models.transformers.loading import import_transformers, quiet

if TYPE_CHECKING:
    from transformers import BaseImageProcessor


Reference: TypeAlias = "Callable[[Image.Image], torch.Tensor]"
"""Function from an RGB image to (3, H, W) float32, normalised."""

MADE_SIZES = ((225, 301), (100, 37), (501, 225), (600, 90), (400, 400))
"""(width, height) of the made images: odd margins, small, wide, tall and square."""

_CLOSE = 0.01
"""Largest accepted difference of processor and statement, in levels of 255. They differ by the
rounding of float32, or by whole levels."""

_PLAIN = frozenset(
    {
        "BeitImageProcessor",
        "MobileNetV2ImageProcessor",
        "PvtImageProcessor",
        "SegformerImageProcessor",
    }
)
"""Processors that override methods for labels and segmentation maps only."""

_LARGE = 384
"""Side from which the processor of ConvNeXt resizes to a square instead of cropping."""

RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers of interpolations."""


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
    try:
        return _choice(folder, size)
    except FeatxError:  # some are a ValueError as well
        raise
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise WeightsError(
            f"the image processor of {folder} has options that featx cannot read: "
            f"{one_line(error)}. Compare {PROCESSORS[1]} with the original."
        ) from error


def _choice(folder: Path, size: tuple[int, int] | None) -> ProcessorChoice:
    """Return the preprocessing of `processor_choice`; wrong options raise errors of many kinds."""
    processor = _open_processor(folder, {})
    if size is not None:
        processor = _open_processor(folder, _options_of_size(processor, size))
    reference = _reference(processor)
    kind = name_of(processor)
    crop, name = _size_of(reference, kind), f"{kind}, {processor.backend}"
    if size is not None and crop != size:  # the class ignores one of the options
        raise _no_such_size(kind, size)
    statement = statement_of(processor)
    if (
        statement is not None
        and statement.crop == crop
        and is_proven(processor, reference, statement)
    ):
        return ProcessorChoice(replace(statement, reference=reference), name, True)
    return ProcessorChoice(_by_the_processor(processor, reference, crop), name, False)


def _open_processor(folder: Path, options: Mapping[str, object]) -> BaseImageProcessor:
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
        raise WeightsError(
            f"the image processor of {folder} ({(nested if has_nested else plain).name}, {CONFIG}) "
            f"cannot be opened: {one_line(error)}"
        ) from error


def _reference(processor: BaseImageProcessor) -> Reference:
    """Return the processor as a function from an RGB image to (3, H, W) float32."""

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
            raise ModelError(
                f"the image processor {name} fails for an RGB image of {size[0]} x {size[1]} "
                f"pixels: {one_line(error)}"
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
    processor: BaseImageProcessor, reference: Reference, crop: tuple[int, int]
) -> Preprocess:
    """The preprocessing that the processor computes for every image."""
    mean, std = normalisation(processor)
    return Preprocess(
        reference=reference,
        crop=crop,
        resize=None,
        interpolation=RESAMPLING.get(int(processor.resample or 0), "other"),
        mean=mean,  # mean and standard deviation describe the images; the processor applies them
        std=std,
    )


def _options_of_size(processor: BaseImageProcessor, size: tuple[int, int]) -> dict[str, object]:
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
        raise _no_such_size(name, size)
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


def _no_such_size(name: str, size: tuple[int, int]) -> ModelError:
    return ModelError(
        f"model.input_size={list(size)}: the image processor {name} takes no such size. Change "
        f"{PROCESSORS[1]}, or leave the option out."
    )


# Statements: what a processor does, derived from its class and options, and proven


@functools.cache
def made_image(size: tuple[int, int]) -> Image.Image:
    """Return an RGB image with structure at several scales, edges and noise."""
    width, height = size
    y, x = np.mgrid[0:height, 0:width]
    waves = np.stack([np.sin(x / 9 + y / 31), np.cos(x / 40), np.sin(y / 7)], axis=-1)
    edges = 60 * ((x // 23 + y // 17) % 2)[..., None]
    noise = np.random.default_rng(0).normal(0, 12, (height, width, 3))
    return Image.fromarray(np.clip(97 + 80 * waves + edges + noise, 0, 255).astype(np.uint8))


def statement_of(processor: BaseImageProcessor) -> Preprocess | None:
    """State what a processor does; None for one that this module does not know."""
    name = name_of(processor)
    rule = _RULES.get(name, plain_sizes if _is_plain(processor, name) else None)
    if rule is None or not processor.do_resize or getattr(processor, "do_pad", None):
        return None
    sizes = rule(processor)
    interpolation = RESAMPLING.get(int(processor.resample))
    if sizes is None or interpolation is None:
        return None
    resize, crop = sizes
    is_bgr = name == "MobileViTImageProcessor" and processor.do_flip_channel_order
    mean, std = normalisation(processor)
    return pillow_preprocess(
        resize=resize,
        crop=crop,
        interpolation=interpolation,
        mean=mean,
        std=std,
        offset="floor",
        channels="bgr" if is_bgr else "rgb",
    )


def name_of(processor: BaseImageProcessor) -> str:
    """Name of the class of a processor, whatever its backend."""
    return type(processor).__name__.removesuffix("Pil")


def _is_plain(processor: BaseImageProcessor, name: str) -> bool:
    """Return whether a processor does what its options say in the order resize, crop, normalise."""
    own = vars(type(processor))
    return name in _PLAIN or not {"_preprocess", "preprocess", "resize", "rescale"} & set(own)


Sizes: TypeAlias = tuple[int | tuple[int, int], tuple[int, int]]
"""`resize` and `crop` of a `Preprocess`."""


def plain_sizes(processor: BaseImageProcessor) -> Sizes | None:
    """Sizes of a processor that resizes and then may crop."""
    size, crop = processor.size, _crop_size(processor)
    if size is None:
        return None
    if size.height and size.width:
        exact = (int(size.height), int(size.width))
        return exact, crop or exact
    if size.shortest_edge and not size.longest_edge and crop:
        return int(size.shortest_edge), crop
    return None


def _crop_size(processor: BaseImageProcessor) -> tuple[int, int] | None:
    """(height, width) of the crop of a processor, or None if it does not crop."""
    crop = getattr(processor, "crop_size", None)
    if not getattr(processor, "do_center_crop", None) or not (crop and crop.height and crop.width):
        return None
    return int(crop.height), int(crop.width)


def _convnext_sizes(processor: BaseImageProcessor) -> Sizes | None:
    """Sizes of the processor of ConvNeXt, ResNet and RegNet: a crop up to 383 pixels."""
    side = processor.size.shortest_edge
    if not side or getattr(processor, "do_center_crop", None):
        return None
    square = (int(side), int(side))
    return (square if side >= _LARGE else int(side / processor.crop_pct)), square


def _levit_sizes(processor: BaseImageProcessor) -> Sizes | None:
    """Sizes of the processor of LeViT: 256 pixels for a crop of 224."""
    side, crop = processor.size.shortest_edge, _crop_size(processor)
    return (int(256 / 224 * side), crop) if side and crop else None


_RULES = {
    "ConvNextImageProcessor": _convnext_sizes,
    "DINOv3ViTImageProcessor": plain_sizes,
    "LevitImageProcessor": _levit_sizes,
    "MobileViTImageProcessor": plain_sizes,
}
"""Processors with an own way of resizing -> their sizes."""

Triple: TypeAlias = tuple[float, float, float]


def normalisation(processor: BaseImageProcessor) -> tuple[Triple, Triple]:
    """Mean and standard deviation for values in [0, 1], whatever the scale of the processor."""
    factor = 255 * (processor.rescale_factor if processor.do_rescale else 1.0)
    is_normalised = processor.do_normalize and name_of(processor) != "MobileViTImageProcessor"
    mean = _triple(processor.image_mean if is_normalised else 0.0)
    std = _triple(processor.image_std if is_normalised else 1.0)
    return _triple([x / factor for x in mean]), _triple([x / factor for x in std])


def _triple(value: float | Sequence[float]) -> Triple:
    if isinstance(value, int | float):
        return float(value), float(value), float(value)
    red, green, blue = (float(x) for x in value)
    return red, green, blue


def is_proven(processor: BaseImageProcessor, reference: Reference, statement: Preprocess) -> bool:
    """Return whether the statement makes the images of the processor, of all made images."""
    resizes_floats = name_of(processor) == "DINOv3ViTImageProcessor"
    if resizes_floats and not statement.has_fast_path:
        return False
    stated = _float_reference(statement) if resizes_floats else statement.reference
    scale = 255 * torch.tensor(statement.std).view(3, 1, 1)
    return all(
        bool(((reference(image) - stated(image)) * scale).abs().max() <= _CLOSE)
        for image in map(made_image, (*MADE_SIZES, *_sizes_of_half_margins(statement)))
    )


def _sizes_of_half_margins(statement: Preprocess) -> list[tuple[int, int]]:
    """(width, height) of two images at whose crop rounding and cutting of half a pixel differ.

    The offset of a margin of 3, 7, 11 ... pixels is 2, 4, 6 ... if it is rounded to even, and 1, 3,
    5 ... if it is cut.
    """
    if not isinstance(statement.resize, int):
        return []
    short, (height, width) = statement.resize, statement.crop
    wide = short + (3 - (short - width)) % 4
    tall = short + (3 - (short - height)) % 4
    return [(wide, short), (short, tall)]


def _float_reference(statement: Preprocess) -> Reference:
    """The statement computed on floats, which are not rounded after resizing."""

    def reference(image: Image.Image) -> torch.Tensor:
        x = TF.pil_to_tensor(image).float()[None] / 255
        size, mode = statement.resize, statement.interpolation
        if isinstance(size, int):
            short = min(x.shape[2:])
            size = (size * x.shape[2] // short, size * x.shape[3] // short)
        x = F.interpolate(x, size=size, mode=mode, antialias=True, align_corners=False)
        cropped = centre_crop(x[0], statement.crop, "floor")
        normalised: torch.Tensor = TF.normalize(cropped, [*statement.mean], [*statement.std])
        return normalised

    return reference
