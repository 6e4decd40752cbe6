"""Settings by which a run decodes: the transform, decoders, time limit, and the share of the GPU.

A resumed run keeps the decoders and the share of its resume state.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace

from featx.config import Config
from featx.errors import ConfigError, require
from featx.images.crash_journal import CrashList
from featx.images.image_policy import PILLOW, ImagePolicy, heif_version, jpeg_decoder
from featx.images.preprocess import Preprocess
from featx.types import Listing, ResumeState

SHARES = 16
"""Number of equal shares of the images; a GPU decodes `device_share` of them."""


@dataclass(frozen=True)
class DecodeSettings:
    """Settings by which encoded bytes become the images of a run.

    Attributes:
        preprocess: transform of the backbone.
        policy: treatment of orientation, transparency and size.
        reference: whether the library's own transform is used instead of the fast path on uint8;
            always true for a transform that the fast path cannot follow. With a scale both paths
            are the same, in float32.
        timeout_s: seconds after which decoding an image is given up and repeated in a child
            process, where the image fails after the same time; None for no limit.
        crash_list: crash list, whose images are decoded in child processes, and the place of the
            in-flight journal.
        device_share: number of shares (sixteenths) of the images that the GPU decodes, or None for
            decoding on the CPU only. The key of an image decides, so it is decoded by the same
            decoder in every run.
    """

    preprocess: Preprocess
    policy: ImagePolicy
    reference: bool = False
    timeout_s: float | None = None
    crash_list: CrashList = field(default_factory=lambda: CrashList(None))
    device_share: int | None = None

    def __post_init__(self) -> None:
        require(self.reference or self.preprocess.has_fast_path, "the pixels would differ")

    @classmethod
    def of_run(
        cls,
        config: Config,
        preprocess: Preprocess,
        listing: Listing,
        crash_list: CrashList,
        resume_state: ResumeState | None = None,
    ) -> DecodeSettings:
        """The settings that a config asks for, with the decoders of the resume state.

        Args:
            config: configuration of the run.
            preprocess: transform of the backbone.
            listing: listing, whose keys show whether there may be HEIC images.
            crash_list: crash list of the run.
            resume_state: resume state, or None for a new run.

        Raises:
            ConfigError: the background is no colour, a recorded decoder is not installed, or
                decode=gpu is requested for a transform that only its library can do.
        """
        reference = config.decode == "reference" or not preprocess.has_fast_path
        scale = preprocess.scale
        if config.decode == "gpu" and scale is not None:
            raise ConfigError(
                "decode=gpu: images with model.transform.scale are decoded on the CPU. Use "
                "decode=fast."
            )
        if config.decode == "gpu" and reference:
            raise ConfigError(
                "decode=gpu: only the library of these weights can run their transform, on the "
                "CPU. Use decode=fast."
            )
        resolved = resume_state.resolved if resume_state else {"jpeg": None}
        policy = replace(
            ImagePolicy.from_config(config.data),
            jpeg=PILLOW if reference else jpeg_decoder(resolved.get("jpeg", PILLOW)),
            heif=heif_version(listing.keys, resolved.get("heif"), new=resume_state is None),
            channels=None if scale is None else scale.channels,
        )
        share = resolved.get("gpu_share") if config.decode == "gpu" else None
        return cls(preprocess, policy, reference, config.data.timeout_s, crash_list, share)

    def is_for_device(self, key: bytes) -> bool:
        """Return whether the GPU decodes the image of a key, provided that it can."""
        return self.device_share is not None and zlib.crc32(key) % SHARES < self.device_share
