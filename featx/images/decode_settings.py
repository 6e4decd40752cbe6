"""Settings by which a run decodes: the transform, decoders, and time limit.

A resumed run keeps the decoders of its resume state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from featx.config import Config
from featx.errors import ConfigError, require
from featx.images.image_policy import PILLOW, SIMPLEJPEG, ImagePolicy, heif_version
from featx.images.preprocess import Preprocess
from featx.types import Listing, ResumeState


@dataclass(frozen=True)
class DecodeSettings:
    """Settings by which encoded bytes become the images of a run.

    Attributes:
        preprocess: transform of the backbone.
        policy: treatment of orientation, transparency and size.
        reference: whether the library's own transform is used instead of the fast path on uint8;
            always true for a transform that the fast path cannot follow. With a scale both paths
            are the same, in float32.
        timeout_s: seconds after which the decoder of an image is ended. The image is decoded again,
            and fails after the same time; None for no limit.
        workers: number of decoders, or None for one per CPU.
    """

    preprocess: Preprocess
    policy: ImagePolicy
    reference: bool = False
    timeout_s: float | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        require(self.reference or self.preprocess.has_fast_path, "the pixels would differ")

    @classmethod
    def of_run(
        cls,
        config: Config,
        preprocess: Preprocess,
        listing: Listing,
        resume_state: ResumeState | None = None,
    ) -> DecodeSettings:
        """The settings that a config asks for, with the decoders of the resume state.

        Args:
            listing: listing, whose keys show whether there may be HEIC images.

        Raises:
            ConfigError: data.white and a scale are given, the background is no colour, a recorded
                decoder is not installed, or the transform has no place for random crops.
        """
        reference = config.decode == "reference" or not preprocess.has_fast_path
        scale = preprocess.scale
        resolved = resume_state.resolved if resume_state else {"jpeg": None}
        if scale is not None and config.data.white is not None:
            raise ConfigError(
                f"data.white={config.data.white:g} has no effect with model.transform.scale, which "
                "says what pixels are divided by. Leave one of them out."
            )
        if config.data.crops is not None and not preprocess.is_resize_and_crop:
            raise ConfigError(
                f"data.crops={config.data.crops}: a random crop takes the place of the resize and "
                "the crop of a transform, and that of this model is no bilinear or bicubic resize "
                "with a centre crop. Leave data.crops out; data.views=[original,hflip] works."
            )
        policy = replace(
            ImagePolicy.from_config(config.data),
            jpeg=PILLOW if reference else resolved.get("jpeg", PILLOW) or SIMPLEJPEG,
            heif=heif_version(listing.keys, resolved.get("heif"), new=resume_state is None),
            channels=None if scale is None else scale.channels,
        )
        data = config.data
        return cls(preprocess, policy, reference, data.timeout_s, data.workers)
