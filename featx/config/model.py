"""Options of the groups `model`, `model.transform`, `model.window` and `model.checkpoint`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from typing import Annotated, Any, ClassVar, Literal, get_args

from annotated_types import Ge, Gt, Le, Len, Lt, MinLen, Predicate

from featx.base import family
from featx.config.checks import MAY_BE_EMPTY, Count, NaturalNumber, default_of_field, options
from featx.config.members import MemberGroup, make_member
from featx.errors import ConfigError

AUTO_LIBRARY = "auto"
"""Library that stands for the first one that knows the name of the model."""

Interpolation = Literal["nearest", "bilinear", "bicubic"]
INTERPOLATIONS: tuple[str, ...] = get_args(Interpolation)

USUAL_RESIZE, USUAL_CROP = 256, 224
"""Shorter side after resizing and side of the crop in pixels, for models that bring neither."""

Pixels = Annotated[int, Ge(1), Le(16_384)]
"""Side of an image: one of 16,384 x 16,384 takes 3 GiB as float32."""

Side = Annotated[
    Pixels | Annotated[list[Pixels], Len(2, 2)] | None,
    "a whole number of pixels, [height,width] (16384 at most), or null",
]
_Scale = Annotated[
    Annotated[float, Ge(1e-37), Le(1e38)] | Literal["dtype"] | None,  # finite in float32
    "a number above 0, by which pixels are divided (1e-37 to 1e+38), dtype (255 for uint8, 65535 "
    "for uint16), or null",
]

InputSize = Annotated[list[Pixels], Len(2, 2), "[height, width] in pixels (16384 at most)"]

_WEIGHT_FILES = (".safetensors", ".pth", ".pt", ".th", ".bin", ".ckpt", ".tar")
"""File extensions by which `model.weights` is recognised as a file."""

_USUAL_OVERLAP = 0.5

_Sha256 = Annotated[
    Annotated[str, Predicate(re.compile("[0-9a-fA-F]{64}").fullmatch)] | None,
    "the 64 hex digits that `sha256sum FILE` prints",
]


@options("model.transform")
class TransformConfig:
    """Preprocessing of the images; what is not given is that of the weights."""

    resize: Side = None
    """Shorter side in pixels after resizing, or [height,width], which may change the proportions;
    null takes that of the weights, 256 with model=custom, hub and export."""
    crop: Side = None
    """Side of the square centre crop in pixels, or [height,width]; null takes the input size of the
    model, 224 with model=custom, hub and export. Models of a library have model.input_size."""
    mean: list[float] | None = None
    """Mean of each channel (R, G, B), of values in [0, 1]; null takes that of the weights, that of
    ImageNet with model=custom, hub and export. With scale one number a channel, of values after the
    division."""
    std: list[Annotated[float, Gt(0)]] | None = None
    """Standard deviation of each channel (R, G, B), of values in [0, 1]; null as for mean."""
    interpolation: Interpolation | None = None
    """Interpolation of resizing: nearest, bilinear or bicubic, with antialiasing; null takes that
    of the weights, bilinear with model=custom, hub and export."""
    offset: Literal["round", "floor"] | None = None
    """Offset of a crop that would begin at half a pixel: round (torchvision, timm) or floor
    (processors of transformers); null takes round."""
    scale: _Scale = None
    """Number by which pixels are divided, such as 65535 or 10000; images then keep their dtype and
    channels until they are float32. dtype divides uint8 by 255 and uint16 by 65535, and refuses
    other numbers. null reads every image as RGB of 8 bits."""
    channels: Count | None = None
    """Number of channels of the images, with scale; null takes that of the model."""
    bands: Annotated[list[NaturalNumber], MinLen(1)] | None = None
    """Channels that the model gets, in its order, counted from 0, with scale: [0,0,0] repeats grey
    for a model of RGB images. null takes all."""

    def __post_init__(self) -> None:
        has_scale = self.scale is not None
        for key in ("channels", "bands"):
            if not has_scale and getattr(self, key) is not None:
                raise ConfigError(
                    f"model.transform.{key} has no effect without model.transform.scale: images "
                    "are read as RGB of 8 bits. Give the number by which pixels are divided, such "
                    "as model.transform.scale=65535, or dtype."
                )
        if has_scale and self.interpolation == "nearest":
            raise ConfigError(
                "model.transform.interpolation=nearest: with model.transform.scale expected "
                "bilinear or bicubic."
            )

        if self.bands is not None:
            if self.channels is None:
                raise ConfigError(
                    f"model.transform.bands={self.bands} needs model.transform.channels, the "
                    "number of channels of the images, of which these are taken."
                )
            if max(self.bands) >= self.channels:
                raise ConfigError(
                    f"model.transform.bands={self.bands}: expected numbers from 0 to "
                    f"{self.channels - 1}, as the images have {self.channels} channels."
                )

        for key in ("mean", "std"):
            value = getattr(self, key)
            if value is not None and len(value) != 3 and (not has_scale or not value):
                raise ConfigError(
                    f"model.transform.{key}: expected three numbers, one a channel (R, G, B). "
                    "Images of other channels need model.transform.scale as well."
                )

    def check_sizes(self, resize: int | tuple[int, int], crop: int | tuple[int, int]) -> None:
        """Check that the crop lies within the resized image. `resize` and `crop` are the sizes
        where the options of these names are not given.
        """
        resized = resize if self.resize is None else self.resize
        sides = _both(crop if self.crop is None else self.crop)
        if any(inner > outer for inner, outer in zip(sides, _both(resized), strict=True)):
            raise ConfigError(
                f"model.transform.crop={'x'.join(map(str, sides))}: expected at most "
                f"model.transform.resize={resized} pixels; give both."
            )


def _both(side: int | Sequence[int]) -> tuple[int, int]:
    """Return (height, width) of a side, or of a pair of sides."""
    return (side, side) if isinstance(side, int) else (side[0], side[1])


@options("model.checkpoint")
class CheckpointConfig:
    """Choice and conversion of the tensors of a file in `model.weights`."""

    prefix: Annotated[str | None, MAY_BE_EMPTY] = None
    """Text before the names of the model in the file, such as 'teacher/backbone.', in which '/'
    stands for nesting; null finds it, unless several state dicts fit."""
    convert: Literal["auto", "none", "timm", "resample"] = "auto"
    """Conversion of a file whose names are not those of the model: timm uses checkpoint_filter_fn
    of the family (model=timm only), auto does so where the family has one, none refuses the file,
    resample is timm that may interpolate position embeddings and patch embeddings of another size,
    which changes the features."""
    sha256: _Sha256 = None
    """SHA-256 that the file must have, in 64 hex digits; it is checked before the file is read."""

    def __post_init__(self) -> None:
        if self.sha256 is not None:
            object.__setattr__(self, "sha256", self.sha256.lower())

    def check_effect(self, has_file: bool, is_converted: bool) -> None:
        """Refuse options that would have no effect.

        Args:
            has_file: whether `model.weights` is a file of the user's own.
            is_converted: whether the library of the model can convert the names of a file.
        """
        given = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        if given and not has_file:
            raise ConfigError(
                f"model.checkpoint.{given[0]} has an effect with a file of your own in "
                "model.weights only."
            )
        if not is_converted and self.convert in ("timm", "resample"):
            raise ConfigError(
                f"model.checkpoint.convert={self.convert} has an effect with model=timm only, "
                "which has functions that convert files."
            )


@options("model.window")
class WindowConfig:
    """Windows in which an image goes through the model at its own size."""

    size: Side = None
    """Side of square windows in pixels, or [height,width], for which the model is built: an image
    keeps its own size and goes through the model in windows, whose maps are blended into one. null
    resizes and crops images instead."""
    overlap: Annotated[float, Ge(0), Lt(1)] = _USUAL_OVERLAP
    """Share of a window that the next one repeats, along each axis; rounded up to whole patches."""

    def __post_init__(self) -> None:
        if self.size is None and self.overlap != _USUAL_OVERLAP:
            raise ConfigError(
                f"model.window.overlap={self.overlap:g} has no effect without model.window.size, "
                "the side of the windows in pixels."
            )

    @property
    def sides(self) -> tuple[int, int] | None:
        """(height, width) of a window in pixels; None without windows."""
        if self.size is None or isinstance(self.size, int):
            return None if self.size is None else (self.size, self.size)
        return self.size[0], self.size[1]


@options("model")
class ModelConfig:
    """Backbone and its weights.

    A library with options of its own has them in a subclass in its own module, such as
    `featx.models.libraries.custom.CustomOptions`.
    """

    name: str = "efficientnet_lite0"
    """Name of the model in its library; set by the option `model` itself unless that names a
    library."""
    library: str = AUTO_LIBRARY
    """Library that builds the model."""
    weights: str | None = "default"
    """Weights: a tag of the library, a path (.safetensors, .pth), 'default', or null for random
    weights of `seed`."""
    init: Literal["loaded", "reset"] = "loaded"
    """loaded keeps these weights; reset replaces them by the model's own random initialisation with
    `seed`, as an untrained baseline that is the same in all else."""
    golden: str | None = None
    """File of featx.write_golden with images and the features that your own code computes of them.
    A run whose model or transform gives others is refused; a resume compares nothing."""
    window: WindowConfig = field(default_factory=WindowConfig)
    """Windows in which images larger than the input of the model go through it."""

    required: ClassVar[tuple[str, ...]] = ("name",)
    """Options that have to be given, if they have no default."""
    needs: ClassVar[str] = "model.name=NAME, the name of a model of this library"
    """What they are, for the message that one of them is missing."""

    def __post_init__(self) -> None:
        if not all(getattr(self, option) for option in self.required):
            raise ConfigError(f"model={self.library} needs {self.needs}.")
        if self.weights == "None":  # as Python writes it; no library has a tag of this name
            object.__setattr__(self, "weights", None)
        if self.init == "reset" and self.weights is None:
            raise ConfigError(
                "model.init=reset has no effect with model.weights=null, whose weights are random."
            )

        # Options that windows leave without effect; some libraries do not have all of them.
        crop = getattr(getattr(self, "transform", None), "crop", None)
        given = {
            "golden": self.golden,
            "input_size": getattr(self, "input_size", None),
            "transform.crop": crop,
        }
        for name, value in given.items():
            if self.window.size is not None and value is not None:
                raise ConfigError(
                    f"model.{name} has no effect with model.window.size, for which the model is "
                    "built, and without which images are cropped. Leave one of them out."
                )

    @property
    def weights_file(self) -> str | None:
        """Value of `model.weights` if it is a path; None for a tag of a library and for null."""
        if self.weights is None:
            return None
        is_file = self.weights.endswith(_WEIGHT_FILES) or "/" in self.weights
        return self.weights if is_file else None

    @property
    def code(self) -> str | None:
        """Options that name the code from outside that builds the model; None if there is none.

        A store or a head alone never leads to such code: the command has to give these options.
        """
        return None

    def code_sha256(self) -> str | None:
        """SHA-256 of the files of this code, which may change between two commands.

        None if there is no such code, or if its files are not found.
        """
        return None


def check_weights_like(weights_like: str | None, has_file: bool) -> None:
    """Refuse a tag of weights unless `model.weights` is a file of the user's own."""
    if weights_like is not None and not has_file:
        raise ConfigError(
            "model.weights_like has an effect with a file of your own in model.weights only; tags "
            "and folders bring their preprocessing."
        )


@options("model")
class LibraryModelConfig(ModelConfig):
    """Options of a model that a library builds, of torchvision and timm."""

    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments with which the library builds the model, such as
    {dynamic_img_size: true}. A resume refuses other values."""
    input_size: InputSize | None = None
    """Height and width of the images in pixels, such as [448,448]: the model is built for it, and
    the preprocessing follows; null takes the size of the weights."""
    weights_like: str | None = None
    """Tag of the library whose preprocessing belongs to a file in model.weights; null takes that of
    the default weights, or of the tag in model.name."""
    transform: TransformConfig = field(default_factory=TransformConfig)
    """Preprocessing of the images, by default that of the weights."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Choice and conversion of the tensors of a file in model.weights."""

    def refuse_args(self, refused: Mapping[str, str]) -> None:
        """Refuse arguments that featx gives itself or that change what a model is; `refused` has
        name of an argument -> what to do instead.
        """
        for name in self.args:
            if name in refused:
                raise ConfigError(f"model.args.{name} cannot be given: {refused[name]}.")


@options("model")
class UnpreparedModelConfig(ModelConfig):
    """Options of a model that brings no preprocessing, such as that of model=export."""

    transform: TransformConfig = field(default_factory=TransformConfig)
    """Preprocessing of the images, by default a resize to 256 pixels, a centre crop of 224 and the
    mean and standard deviation of ImageNet."""


@options("model")
class CodeModelConfig(UnpreparedModelConfig):
    """Options of a model that code of the user makes, of model=custom and model=hub."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Choice and conversion of the tensors of a file in model.weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window.size is None:
            self.transform.check_sizes(USUAL_RESIZE, USUAL_CROP)
        has_file = self.weights not in (None, "default")
        self.checkpoint.check_effect(has_file, is_converted=False)


def model_options(**values: object) -> ModelConfig:
    """Return the options of a model, those of its library included, by their names without prefix,
    such as name='resnet50' and weights=None.
    """
    defaults = {f.name: default_of_field(f) for f in fields(ModelConfig)}
    group = MemberGroup("model", "library", "model.library", ModelConfig)
    return make_member(group, {**defaults, **values})  # type: ignore[no-any-return]


def model_choice(text: str) -> dict[str, str]:
    """Return the options that `model=TEXT` sets: the name of a model, such as 'resnet50', or a
    library, such as 'timm', which may have a default model.
    """
    libraries = family("model.library")
    if text == AUTO_LIBRARY or text not in libraries:
        return {"name": text}
    library = libraries.get(text)
    default = {f.name: f.default for f in fields(library.options or ModelConfig)}["name"]
    return {"library": library.name, "name": str(default)}
