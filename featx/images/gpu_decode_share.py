"""decode=gpu: choice of the share of images that the GPU decodes, the rest going to the CPU."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace

import numpy as np
import torch

from featx.base import cpu_threads, num_cpus
from featx.errors import ConfigError, FeatxError
from featx.images.decode import EncodedJpeg, decode_array, prepare_jpeg
from featx.images.decode_settings import SHARES, DecodeSettings
from featx.images.fault_tolerant_decode import FaultTolerantDecoder
from featx.images.gpu_decode import DeviceDecoder
from featx.types import ImageFault, Listing, RegionSource, Source

NUM_MEASURED_IMAGES = 64
"""Number of images, evenly spread over the data set, that CPU and GPU decode to be timed."""


def check_device(decode: str, source: Source, device: torch.device) -> None:
    """Check that decode=gpu has a CUDA device and images that it can decode.

    Args:
        decode: value of the option `decode`.
        source: source of the images.
        device: device of the model.

    Raises:
        ConfigError: the device is not CUDA, or rows are boxes of images.
    """
    if decode != "gpu":
        return
    if isinstance(source, RegionSource):
        raise ConfigError(
            "decode=gpu: with data.boxes an image is decoded once for all of its boxes, on the "
            "CPU. Use decode=fast."
        )
    if device.type != "cuda":
        raise ConfigError(
            f"decode=gpu: device={device.type}, but only CUDA devices decode JPEGs. "
            "Use decode=fast, or device=cuda on a machine that has one."
        )


def with_share(
    decode: str, source: Source, listing: Listing, decoding: DecodeSettings, device: torch.device
) -> tuple[DecodeSettings, dict[str, str]]:
    """Measure and add the share of the GPU if decode=gpu and no share is recorded.

    Args:
        decode: value of the option `decode`.
        source: source of the images.
        listing: listing of the data set.
        decoding: settings of the run.
        device: device of the model.

    Returns:
        The settings, and the choices to add to `RunContext.choices`.
    """
    if decode != "gpu" or decoding.device_share is not None:
        return decoding, {}
    share, why = decode_share(source, listing, decoding, device)
    return replace(decoding, device_share=share), {"decode": why}


def decode_share(
    source: Source, listing: Listing, decoding: DecodeSettings, device: torch.device
) -> tuple[int, str]:
    """Measure the share of images that the GPU should decode.

    CPU and GPU decode at the same time, so the best share is that at which both finish together.

    Args:
        source: source of the images.
        listing: listing of the data set.
        decoding: settings of the run.
        device: CUDA device.

    Returns:
        Number of shares (sixteenths), 1 to SHARES, and a line with the measurements.
    """
    cpus = num_cpus()
    encoded = _some_encoded(source, listing, decoding)
    if not encoded:
        return SHARES, "all JPEGs that the device supports (found none to measure)"
    at_least = decoding.preprocess.shortest_side
    if at_least is None:
        raise FeatxError("decode=gpu was asked of a transform that has no fast path.")
    # One thread for an image, as in the loader: the CPUs decode different images in parallel.
    with cpu_threads(1):
        started_at = time.perf_counter()
        for jpeg in encoded:
            decoding.preprocess.crop_uint8(decode_array(jpeg.data, decoding.policy, at_least))
        decoded_at = time.perf_counter()
        for jpeg in encoded:
            prepare_jpeg(jpeg.data, decoding.policy, at_least)
        prepared_at = time.perf_counter()
    cpu_s = (decoded_at - started_at) / len(encoded) / cpus
    prepare_s = (prepared_at - decoded_at) / len(encoded) / cpus
    decoder = DeviceDecoder(decoding.preprocess, device)
    for _ in range(2):  # the first round loads the kernels
        started_at = time.perf_counter()
        with decoder.own_stream():
            decoder.crops(encoded)
        gpu_s = (time.perf_counter() - started_at) / len(encoded)
    share = balanced_share(cpu_s, prepare_s, gpu_s)
    return share, (
        f"{share} of {SHARES} JPEGs on {device} ({1 / gpu_s:.0f} images/s there, "
        f"{1 / cpu_s:.0f} on {cpus} CPUs, which check {1 / prepare_s:.0f})"
    )


def balanced_share(cpu_s: float, prepare_s: float, gpu_s: float) -> int:
    """The number of shares at which CPU and GPU finish together, 1 to SHARES.

    With a share s on the GPU, the GPU takes s * gpu_s and the CPUs (1 - s) * cpu_s + s * prepare_s.

    Args:
        cpu_s: seconds per image in which all CPUs together decode.
        prepare_s: seconds per image in which all CPUs together prepare it for the GPU.
        gpu_s: seconds per image in which the GPU decodes.
    """
    spared = cpu_s - prepare_s
    share = cpu_s / (gpu_s + spared) if gpu_s + spared > 0 else 1.0
    return min(SHARES, max(1, round(share * SHARES)))


def _some_encoded(source: Source, listing: Listing, decoding: DecodeSettings) -> list[EncodedJpeg]:
    """The images among NUM_MEASURED_IMAGES that a GPU can decode; damaged ones are left out."""
    rows = np.unique(np.linspace(0, len(listing) - 1, NUM_MEASURED_IMAGES).astype(int))
    keys = [bytes(key) for key in listing.keys[rows]]
    with FaultTolerantDecoder(
        source,
        decoding.policy,
        decoding.preprocess.shortest_side,
        decoding.timeout_s,
        decoding.crash_list,
        "featx-share",
    ) as decoder:

        def prepare(key: bytes) -> EncodedJpeg | None:
            with contextlib.suppress(ImageFault):  # the run reports it
                return decoder.prepare_jpeg(key, decoder.read(key))
            return None

        futures = [decoder.submit(prepare, key) for key in keys]
        return [jpeg for future in futures if (jpeg := future.result()) is not None]
