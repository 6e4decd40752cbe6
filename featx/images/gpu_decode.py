"""Decoding, resizing and cropping of JPEGs on the device of the model; nvJPEG on CUDA.

libjpeg has decoded each image at an eighth of its size (`EncodedJpeg`), so its bytes are sound, and
the pixels from the device are compared with that. An image that differs, for example because of an
unusual colour space, is decoded on the CPU. So the decoder of the device never decides whether a
row fails, and no row is made from an image that it decodes wrongly.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from featx.base import OwnStream, synchronise
from featx.errors import ConfigError, RunError
from featx.images.decode import EncodedJpeg
from featx.images.orientation import turn_tensor
from featx.images.preprocess import Preprocess

MAX_PIXELS = 1 << 26
"""Largest number of pixels that are decoded in one call; as uint8 and float32 they take 1 GiB."""

MEAN_DIFFERENCE, LARGEST_DIFFERENCE, COLOUR_DIFFERENCE = 2.0, 24.0, 6.0
"""Largest accepted differences to libjpeg at an eighth of the size, in grey levels of 255: mean and
maximum over the brightness of blocks of 8 x 8 pixels, and maximum over the mean colours. Decoders
differ in how they upsample the colour channels. Between libjpeg at full size and at an eighth, 290
photographs differ by at most 0.9, 4.8 and 2.0."""

_BRIGHTNESS = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in the brightness."""

_IMAGE_ERROR = re.compile(
    r"Failed to (get image info|(parse|decode) jpeg stream|decode batch|transfer jpeg to device): "
    r"[2349]\b"
)
"""Messages of torchvision about an image that nvJPEG rejects: its status is that of an invalid
parameter, a bad JPEG, or an unsupported one. Other messages concern the device, for example when
memory is short for a moment, and must not decide which decoder an image gets."""


class DeviceDecoder:
    """Decodes many JPEGs at once on a device.

    Args:
        preprocess: transform of the backbone, which must have a fast path.
        device: CUDA device. On 'cpu' torchvision decodes with libjpeg, for tests of everything but
            nvJPEG.

    Raises:
        ConfigError: the installed torchvision has no decoder of JPEGs.
    """

    def __init__(self, preprocess: Preprocess, device: torch.device) -> None:
        _torchvision_decoder()
        self.device = device
        self._preprocess = preprocess
        self._brightness = torch.tensor(_BRIGHTNESS, device=device).view(3, 1, 1)
        synchronise(device)  # the decoder's own stream uses it
        self._stream = OwnStream(device)

    def own_stream(self) -> contextlib.AbstractContextManager[None]:
        """Context in which work runs on the decoder's own CUDA stream; waits at its end."""
        return self._stream.activate()

    def crops(self, jpegs: Sequence[EncodedJpeg]) -> list[torch.Tensor | None]:
        """Decode and crop images as `Preprocess.crop_uint8` does.

        The crop of an image does not depend on the other images.

        Returns:
            For each image (3, *crop) uint8 on the device, or None if the device decodes it
            differently from libjpeg or not at all.

        Raises:
            RunError: the device has too little memory, or cannot decode JPEGs.
        """
        crops: dict[int, torch.Tensor] = {}
        for group in _groups_of_few(jpegs):
            try:
                crops |= self._crop({i: jpegs[i] for i in group})
            except torch.OutOfMemoryError as error:
                raise RunError(
                    f"out of memory on {self.device} while decoding {len(group)} images on it. "
                    "Nothing committed is lost: give the same command again with decode=fast and "
                    "another out=DIR, or when other processes use less of the device's memory."
                ) from error
        return [crops.get(i) for i in range(len(jpegs))]

    def _crop(self, jpegs: dict[int, EncodedJpeg]) -> dict[int, torch.Tensor]:
        """Number -> crop of the images that agree with libjpeg.

        Images of equal size and orientation are cropped together.
        """
        members_of_shape: dict[tuple[tuple[int, int], int], list[tuple[int, torch.Tensor]]] = {}
        for i, pixels in self._decode(jpegs).items():
            width, height = jpegs[i].size
            if pixels.shape == (3, height, width):
                members_of_shape.setdefault((jpegs[i].size, jpegs[i].turn), []).append((i, pixels))
        crops: dict[int, torch.Tensor] = {}
        agreements: list[torch.Tensor] = []
        for (_, turn), members in members_of_shape.items():
            numbers = [i for i, _ in members]
            images = torch.stack([pixels for _, pixels in members])
            agreements.append(self._agrees(images, [jpegs[i] for i in numbers]))
            cropped = self._preprocess.crops_on_device(turn_tensor(images, turn))
            crops |= zip(numbers, cropped, strict=True)
        # One transfer to the host for all sizes: each waits for the device.
        verdicts = torch.cat(agreements).tolist() if agreements else []
        return {i: crops[i] for i, is_right in zip(crops, verdicts, strict=True) if is_right}

    def _decode(self, jpegs: dict[int, EncodedJpeg]) -> dict[int, torch.Tensor]:
        """Number -> (3, H, W) uint8 of the images that the device can decode."""
        try:
            encoded = [
                torch.frombuffer(bytearray(p.data), dtype=torch.uint8) for p in jpegs.values()
            ]
            return dict(zip(jpegs, decode_jpegs(encoded, self.device), strict=True))
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # the device has failed, not an image
        except RuntimeError as error:
            if self.device.type == "cuda" and not _IMAGE_ERROR.search(str(error)):
                raise RunError(
                    f"{self.device} cannot decode JPEGs: {' '.join(str(error).split())[:300]}. "
                    "Nothing committed is lost: give the same command again, or with decode=fast "
                    "and another out=DIR."
                ) from error
            if len(jpegs) == 1:
                return {}
        # The message does not say which image is rejected, so each half is decoded separately.
        halves = list(jpegs.items())
        middle = len(halves) // 2
        first, second = dict(halves[:middle]), dict(halves[middle:])
        return self._decode(first) | self._decode(second)

    def _agrees(self, images: torch.Tensor, jpegs: Sequence[EncodedJpeg]) -> torch.Tensor:
        """Compare decoded images with libjpeg's at an eighth of their size.

        Args:
            images: (N, 3, H, W) uint8 on the device.
            jpegs: the N encoded images.

        Returns:
            (N,) bool on the device: whether all differences are within the limits.
        """
        eighths = torch.stack([torch.from_numpy(jpeg.eighth) for jpeg in jpegs])
        blocks = F.avg_pool2d(images.float(), 8)
        height, width = blocks.shape[2:]  # number of whole blocks
        expected = eighths.to(self.device).permute(0, 3, 1, 2)[:, :, :height, :width]
        differences = blocks - expected
        brightness = (differences * self._brightness).sum(1).abs().flatten(1)
        colours = differences.mean((2, 3)).abs().amax(1)
        return (
            (brightness.mean(1) <= MEAN_DIFFERENCE)
            & (brightness.amax(1) <= LARGEST_DIFFERENCE)
            & (colours <= COLOUR_DIFFERENCE)
        )


def decode_jpegs(encoded: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Decode JPEGs on a device, without turning them upright.

    Args:
        encoded: 1-D uint8 CPU tensors, the encoded bytes.
        device: 'cuda' or 'cpu'.

    Returns:
        (3, H, W) uint8 RGB for each image, on the device.

    Raises:
        RuntimeError: one of them cannot be decoded there; the message does not say which.
    """
    from torchvision.io import ImageReadMode

    decoded: list[torch.Tensor] = _torchvision_decoder()(encoded, ImageReadMode.RGB, device)
    return decoded


def _torchvision_decoder() -> Any:
    """torchvision.io.decode_jpeg, which torchvision 0.29 announces to remove.

    Raises:
        ConfigError: the installed torchvision does not have it.
    """
    try:
        from torchvision.io import decode_jpeg
    except ImportError as error:
        raise ConfigError(
            "decode=gpu: the installed torchvision cannot decode JPEGs on a GPU. Use decode=fast, "
            "or torchvision 0.26 to 0.29, which can."
        ) from error
    return decode_jpeg


def _groups_of_few(jpegs: Sequence[EncodedJpeg]) -> Iterator[list[int]]:
    """Split images, in their order, into groups of at most MAX_PIXELS pixels; yields numbers."""
    group: list[int] = []
    num_pixels = 0
    for i, jpeg in enumerate(jpegs):
        width, height = jpeg.size
        if group and num_pixels + width * height > MAX_PIXELS:
            yield group
            group, num_pixels = [], 0
        group.append(i)
        num_pixels += width * height
    if group:
        yield group
