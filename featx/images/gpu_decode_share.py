"""decode=gpu: how many of the pictures the device decodes, and how many the CPU's threads."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace

import numpy as np
import torch

from featx.base.devices import cpu_threads
from featx.base.machine import num_cpus
from featx.errors import ConfigError
from featx.images.decode import EncodedJpeg, coded_jpeg, decode_pixels
from featx.images.decode_settings import SHARES, DecodeSettings
from featx.images.fault_tolerant_decode import FaultTolerantDecoder
from featx.images.gpu_decode import DeviceDecoder
from featx.types import ImageFault, Listing, RegionSource, Source

TRIED_PICTURES = 64
"""Pictures from all over the data set that both decode, and are timed."""


def check_device(decode: str, source: Source, device: torch.device) -> None:
    """Raise ConfigError where decode=gpu has no GPU to decode on, or nothing that one could."""
    if decode != "gpu":
        return
    if isinstance(source, RegionSource):
        raise ConfigError(
            "decode=gpu: a picture that regions are cut from (data.boxes) is decoded once for all "
            "of them, on the CPU. Use decode=fast."
        )
    if device.type != "cuda":
        raise ConfigError(
            f"decode=gpu: the device here is {device.type}, and only CUDA devices decode JPEGs. "
            "Use decode=fast, or device=cuda on a machine that has one."
        )


def with_share(
    decode: str, source: Source, listing: Listing, decoding: DecodeSettings, device: torch.device
) -> tuple[DecodeSettings, dict[str, str]]:
    """The decoding of a run, with a share for the device where it is asked for and has none yet.

    Returns:
        decoding, and what was chosen as `RunContext.choices` has it.
    """
    if decode != "gpu" or decoding.device_share is not None:
        return decoding, {}
    share, why = decode_share(source, listing, decoding, device)
    return replace(decoding, device_share=share), {"decode": why}


def decode_share(
    source: Source, listing: Listing, decoding: DecodeSettings, device: torch.device
) -> tuple[int, str]:
    """Sixteenths of the pictures that the device is to decode, 1 to SHARES, and a line on why.

    Both are at work at the same time, so the share is the one at which they are done together.

    Args:
        source, listing: of the pictures.
        decoding: of the run.
        device: that computes.
    """
    cpus = num_cpus()
    coded = _some_coded(source, listing, decoding)
    if not coded:
        return SHARES, "all JPEGs that it takes (none was found to try)"
    at_least = decoding.preprocess.resize
    assert at_least is not None, "there is a fast path"
    with cpu_threads(1):
        begun = time.perf_counter()
        for picture in coded:
            decoding.preprocess.crop_uint8(decode_pixels(picture.data, decoding.policy, at_least))
        decoded = time.perf_counter()
        for picture in coded:
            coded_jpeg(picture.data, decoding.policy, at_least)
        checked = time.perf_counter()
    here = (decoded - begun) / len(coded) / cpus
    checking = (checked - decoded) / len(coded) / cpus
    decoder = DeviceDecoder(decoding.preprocess, device)
    for _ in range(2):  # the first time loads its kernels
        begun = time.perf_counter()
        with decoder.own_stream():
            decoder.crops(coded)
        there = (time.perf_counter() - begun) / len(coded)
    share = balanced(here, checking, there)
    return share, (
        f"{share} of {SHARES} JPEGs on {device} ({1 / there:.0f} images/s there, "
        f"{1 / here:.0f} on {cpus} CPUs, which check {1 / checking:.0f})"
    )


def balanced(here: float, checking: float, there: float) -> int:
    """The share at which both are done together, 1 to SHARES.

    Args:
        here: seconds that all CPUs together take to decode a picture.
        checking: the same, to check one that the device decodes.
        there: seconds that the device takes to decode one.
    """
    spared = here - checking
    share = here / (there + spared) if there + spared > 0 else 1.0
    return min(SHARES, max(1, round(share * SHARES)))


def _some_coded(source: Source, listing: Listing, decoding: DecodeSettings) -> list[EncodedJpeg]:
    """Of some pictures those that a device may decode; none can hold this up or end it."""
    rows = np.unique(np.linspace(0, len(listing) - 1, TRIED_PICTURES).astype(int))
    keys = [bytes(key) for key in listing.keys[rows]]
    with FaultTolerantDecoder(
        source,
        decoding.policy,
        decoding.preprocess.resize,
        decoding.timeout_s,
        decoding.suspects,
        "featx-share",
    ) as decoder:

        def coded(key: bytes) -> EncodedJpeg | None:
            with contextlib.suppress(ImageFault):  # its own turn says what is wrong
                return decoder.coded(key, decoder.read(key))
            return None

        found = [decoder.submit(coded, key) for key in keys]
        return [picture for future in found if (picture := future.result()) is not None]
