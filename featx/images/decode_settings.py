"""How a run decodes: who, on what, and which pictures; what a store was begun with is kept."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace

from featx.config.run_config import Config
from featx.errors import ConfigError, require
from featx.images.crash_journal import CrashList
from featx.images.decode import PILLOW, ImagePolicy, heif_version, jpeg_decoder
from featx.images.preprocess import Preprocess
from featx.types import Listing, ResumeState

SHARES = 16
"""A device decodes so many sixteenths of the pictures."""


@dataclass(frozen=True)
class DecodeSettings:
    """How bytes become the images of a run.

    Attributes:
        preprocess: of the backbone.
        policy: for orientation, transparency and size.
        reference: by the weights' own transform, instead of on uint8; also of a transform that the
            fast path cannot follow.
        timeout_s: an image that takes longer to be decoded is decoded again in a process of its
            own, and fails where that takes as long; None waits for ever.
        suspects: which images are decoded each in a process of its own, and where is noted what is
            being decoded.
        device_share: sixteenths of the pictures that the device decodes; None where it is not to
            decode any. A picture's key decides, so it is decoded alike in every run.
    """

    preprocess: Preprocess
    policy: ImagePolicy
    reference: bool = False
    timeout_s: float | None = None
    suspects: CrashList = field(default_factory=lambda: CrashList(None))
    device_share: int | None = None

    def __post_init__(self) -> None:
        require(self.reference or self.preprocess.has_fast_path, "its pixels would be others")

    @classmethod
    def of_run(
        cls,
        config: Config,
        preprocess: Preprocess,
        listing: Listing,
        suspects: CrashList,
        begun: ResumeState | None = None,
    ) -> DecodeSettings:
        """What a config asks for, with the decoders that the run was begun with.

        Raises:
            ConfigError: the background is no colour, such a decoder is not installed, or the device
                is to decode for a transform that only its library can do.
        """
        reference = config.decode == "reference" or not preprocess.has_fast_path
        if config.decode == "gpu" and reference:
            raise ConfigError(
                "decode=gpu: the transform of these weights is done by its library alone, on the "
                "CPU. Use decode=fast."
            )
        before = begun.resolved if begun else {"jpeg": None}
        policy = replace(
            ImagePolicy.from_config(config.data),
            jpeg=PILLOW if reference else jpeg_decoder(before.get("jpeg", PILLOW)),
            heif=heif_version(listing.keys, before.get("heif"), new=begun is None),
        )
        share = before.get("gpu_share") if config.decode == "gpu" else None
        return cls(preprocess, policy, reference, config.data.timeout_s, suspects, share)

    def is_for_device(self, key: bytes) -> bool:
        """Whether the device decodes the picture of a key, where it can."""
        return self.device_share is not None and zlib.crc32(key) % SHARES < self.device_share
