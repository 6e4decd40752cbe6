"""Options of the group `model.transform`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, get_args

from annotated_types import Ge, Gt, Le, Len, MinLen

from featx.config.checks import Count, NaturalNumber, options
from featx.errors import ConfigError

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
        self._check_scale()
        for key in ("mean", "std"):
            value = getattr(self, key)
            if value is not None and len(value) != 3 and (self.scale is None or not value):
                raise ConfigError(
                    f"model.transform.{key}: expected three numbers, one a channel (R, G, B). "
                    "Images of other channels need model.transform.scale as well."
                )

    def _check_scale(self) -> None:
        """Check scale, channels and bands."""
        if self.scale is None:
            for key in ("channels", "bands"):
                if getattr(self, key) is not None:
                    raise ConfigError(
                        f"model.transform.{key} has no effect without model.transform.scale: "
                        "images are read as RGB of 8 bits. Give the number by which pixels are "
                        "divided, such as model.transform.scale=65535, or dtype."
                    )
            return
        if self.interpolation == "nearest":
            raise ConfigError(
                "model.transform.interpolation=nearest: with model.transform.scale expected "
                "bilinear or bicubic."
            )
        if self.bands is None:
            return
        if self.channels is None:
            raise ConfigError(
                f"model.transform.bands={self.bands} needs model.transform.channels, the number "
                "of channels of the images, of which these are taken."
            )
        if any(band >= self.channels for band in self.bands):
            raise ConfigError(
                f"model.transform.bands={self.bands}: expected numbers from 0 to "
                f"{self.channels - 1}, as the images have {self.channels} channels."
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
