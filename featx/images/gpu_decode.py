"""JPEGs decoded, resized and cropped on the device that computes; on CUDA by nvJPEG.

libjpeg has read each image at an eighth of its size (`EncodedJpeg`), so its bytes are sound, and
the pixels from the device are compared with that. An image that differs, such as one with an
unusual colour space, is decoded on the CPU. So a device's decoder never decides whether a row
fails, and never makes a row of an image that it decodes wrongly.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from featx.base.devices import OwnStream
from featx.errors import ConfigError, RunError
from featx.images.decode import EncodedJpeg
from featx.images.preprocess import Preprocess

MAX_PIXELS = 1 << 26
"""Of the pictures that are decoded at a time; as uint8 and floats they take 1 GiB."""

MEAN_DIFFERENCE, LARGEST_DIFFERENCE, COLOUR_DIFFERENCE = 2.0, 24.0, 6.0
"""Of 255: between the brightness of blocks of 8 x 8 pixels and libjpeg's at an eighth of the size,
on average and at the most, and between the mean colours of both. Decoders differ where they fill in
the colours between their samples: libjpeg at both sizes, on 290 photographs, by 0.9, 4.8 and 2.0 at
the most. A picture beyond is not taken."""

_BRIGHTNESS = (0.299, 0.587, 0.114)

_OF_THE_PICTURE = re.compile(
    r"Failed to (get image info|(parse|decode) jpeg stream|decode batch|transfer jpeg to device): "
    r"[2349]\b"
)
"""What torchvision says of a picture that nvJPEG does not take: its status is that of an invalid
parameter, a bad JPEG, or one that is not supported. All else is the device's fault, such as memory
that is short for a moment, and must not decide by whom a picture is decoded."""


class DeviceDecoder:
    """Decodes JPEGs many at a time on a device.

    Args:
        preprocess: of the backbone; it has a fast path.
        device: 'cuda'; torchvision decodes with libjpeg on 'cpu', for tests of all but nvJPEG.

    Raises:
        ConfigError: this torchvision has no decoder of JPEGs.
    """

    def __init__(self, preprocess: Preprocess, device: torch.device) -> None:
        _torchvision_decoder()
        self.device = device
        self._preprocess = preprocess
        self._stream = OwnStream(device)

    def own_stream(self) -> contextlib.AbstractContextManager[None]:
        """What is done in the block runs beside the model, and has been done when it ends."""
        return self._stream.at_work()

    def crops(self, pictures: Sequence[EncodedJpeg]) -> list[torch.Tensor | None]:
        """What `Preprocess.crop_uint8` makes of each picture.

        A picture's crop does not depend on what is decoded with it.

        Returns:
            (3, *crop) uint8 on the device; None where the device has another picture than libjpeg.

        Raises:
            RunError: the device's memory does not suffice.
        """
        found: dict[int, torch.Tensor] = {}
        for some in _few_at_a_time(pictures):
            try:
                found |= self._cropped({i: pictures[i] for i in some})
            except torch.OutOfMemoryError as error:
                raise RunError(
                    f"out of memory on {self.device} while decoding {len(some)} pictures there. "
                    "Nothing committed is lost: give the same command again with decode=fast into "
                    "a new out, or with less else on the device."
                ) from error
        return [found.get(i) for i in range(len(pictures))]

    def _cropped(self, pictures: dict[int, EncodedJpeg]) -> dict[int, torch.Tensor]:
        """Number -> crop, of those that are right; pictures of one size are cropped together."""
        same: dict[tuple[tuple[int, int], int], list[tuple[int, torch.Tensor]]] = {}
        for i, pixels in self._decoded(pictures).items():
            width, height = pictures[i].size
            if pixels.shape == (3, height, width):
                same.setdefault((pictures[i].size, pictures[i].turn), []).append((i, pixels))
        crops: dict[int, torch.Tensor] = {}
        right: list[torch.Tensor] = []
        for (_, turn), members in same.items():
            numbers = [i for i, _ in members]
            images = torch.stack([pixels for _, pixels in members])
            right.append(self._agrees(images, [pictures[i] for i in numbers]))
            cropped = self._preprocess.crops_on_device(turned(images, turn))
            crops |= zip(numbers, cropped, strict=True)
        verdicts = torch.cat(right).tolist() if right else []
        return {i: crops[i] for i, is_right in zip(crops, verdicts, strict=True) if is_right}

    def _decoded(self, pictures: dict[int, EncodedJpeg]) -> dict[int, torch.Tensor]:
        """Number -> (3, H, W) uint8, of those that the device's decoder takes."""
        try:
            coded = [
                torch.frombuffer(bytearray(p.data), dtype=torch.uint8) for p in pictures.values()
            ]
            return dict(zip(pictures, decode_jpegs(coded, self.device), strict=True))
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # the device, not a picture
        except RuntimeError as error:
            if self.device.type == "cuda" and not _OF_THE_PICTURE.search(str(error)):
                raise RunError(
                    f"{self.device} cannot decode JPEGs: {' '.join(str(error).split())[:300]}. "
                    "Nothing committed is lost: give the same command again, or with decode=fast "
                    "into a new out."
                ) from error
            if len(pictures) == 1:
                return {}
        halves = list(pictures.items())
        middle = len(halves) // 2
        first, second = dict(halves[:middle]), dict(halves[middle:])
        return self._decoded(first) | self._decoded(second)

    def _agrees(self, images: torch.Tensor, pictures: Sequence[EncodedJpeg]) -> torch.Tensor:
        """(N,) bool: which of (N, 3, H, W) uint8 are the pictures that libjpeg sees."""
        eighths = torch.stack([torch.from_numpy(picture.eighth) for picture in pictures])
        blocks = F.avg_pool2d(images.float(), 8)
        height, width = blocks.shape[2:]  # of whole blocks
        expected = eighths.to(self.device).permute(0, 3, 1, 2)[:, :, :height, :width]
        differences = blocks - expected
        weights = torch.tensor(_BRIGHTNESS, device=self.device).view(3, 1, 1)
        brightness = (differences * weights).sum(1).abs().flatten(1)
        colours = differences.mean((2, 3)).abs().amax(1)
        return (
            (brightness.mean(1) <= MEAN_DIFFERENCE)
            & (brightness.amax(1) <= LARGEST_DIFFERENCE)
            & (colours <= COLOUR_DIFFERENCE)
        )


def decode_jpegs(coded: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """(3, H, W) uint8 RGB of each, on a device; none is turned.

    Raises:
        RuntimeError: one of them, the text does not say which, cannot be decoded there.
    """
    from torchvision.io import ImageReadMode

    decoded: list[torch.Tensor] = _torchvision_decoder()(coded, ImageReadMode.RGB, device)
    return decoded


def _torchvision_decoder() -> Any:
    """torchvision's, which torchvision 0.29 says it will do without some day.

    Raises:
        ConfigError: it does.
    """
    try:
        from torchvision.io import decode_jpeg
    except ImportError as error:
        raise ConfigError(
            "decode=gpu: the installed torchvision decodes no JPEGs on a GPU. Use decode=fast, or "
            "an older torchvision (0.26 to 0.29 do)."
        ) from error
    return decode_jpeg


def turned(images: torch.Tensor, orientation: int) -> torch.Tensor:
    """(N, C, H, W) upright, by the EXIF orientation in which it was stored."""
    if orientation >= 5:  # the first row of what is stored is a column
        images = images.transpose(2, 3)
    mirrored = {2: [3], 3: [2, 3], 4: [2], 6: [3], 7: [2, 3], 8: [2]}.get(orientation, [])
    return images.flip(mirrored) if mirrored else images


def _few_at_a_time(pictures: Sequence[EncodedJpeg]) -> Iterator[list[int]]:
    """The numbers of some pictures in their order, of at most MAX_PIXELS together."""
    some: list[int] = []
    pixels = 0
    for i, picture in enumerate(pictures):
        width, height = picture.size
        if some and pixels + width * height > MAX_PIXELS:
            yield some
            some, pixels = [], 0
        some.append(i)
        pixels += width * height
    if some:
        yield some
