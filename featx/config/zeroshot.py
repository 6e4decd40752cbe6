"""Options of job=zeroshot."""

from __future__ import annotations

from featx.config.checks import options
from featx.errors import ConfigError


@options("zeroshot")
class ZeroshotConfig:
    """Classifier of class names that job=zeroshot builds from the text tower of a CLIP model."""

    classes: str | None = None
    """Names of the classes as the texts have them: a text file with one a line, or a .json file
    that maps classes of the store to their names; null takes the classes of the store."""
    templates: str = "a photo of a {}."
    """Texts of a class, {} being its name: one such text, a text file with one a line, or openai
    (80 texts) or simple (7), of open_clip. The vectors of the texts are averaged."""

    def __post_init__(self) -> None:
        if not self.templates.strip():
            raise ConfigError("zeroshot.templates is empty: give a text with {}, or a file.")
