"""Options of model=open_clip."""

from __future__ import annotations

from dataclasses import field

from featx.config import CheckpointConfig, ModelConfig, TransformConfig, options
from featx.errors import ConfigError


@options("model")
class OpenClipOptions(ModelConfig):
    """Options of model=open_clip."""

    name: str = ""
    library: str = "open_clip"
    weights_like: str | None = None
    """Tag of the library whose preprocessing and activation belong to a file in model.weights."""
    normalize: bool = False
    """Whether the embedding is divided by its length, as by encode_image(normalize=True)."""
    transform: TransformConfig = field(default_factory=TransformConfig)
    """Preprocessing of the images, by default that of the weights."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Choice and conversion of the tensors of a file in model.weights."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError(
                "model=open_clip needs model.name=NAME, such as ViT-B-32, or model.name=FOLDER "
                "with open_clip_config.json."
            )
        super().__post_init__()
