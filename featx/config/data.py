"""Options of the group `data` that every source has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from featx.config.checks import check_choice
from featx.errors import ConfigError

OBJECT_SOURCE = "python"
"""Source of a data set that a Python program passes as an object; the command cannot name it."""


@dataclass
class DataConfig:
    """Location of the images, and treatment of unusual ones.

    A source with options of its own has them in a subclass in its own module, such as
    `featx.sources.folder.FolderOptions`.

    Attributes:
        root_help: what data.root is for this source, such as 'data.root=FILE, the HDF5 file'; None
            if the source takes no data.root.
    """

    root_help: ClassVar[str | None] = None

    name: str = "textiles"
    """Name of the source; set by the option `data` itself."""
    root: str | None = None
    """Location of the images: a folder, tar shards or their URLs, tables, or an HDF5 file."""
    boxes: str | None = None
    """CSV file with the columns path, x, y, width, height and, for labels, label. Each line makes a
    row of that box of an image (tiles, detections)."""
    exif: str = "apply"
    """apply turns an image upright as its EXIF orientation asks, ignore leaves it as stored."""
    background: str = "white"
    """Colour under transparent pixels: a name or #rrggbb."""
    white: float | None = None
    """Number that is white, over black at 0, in images whose file does not say it: TIFF and PFM of
    floats, and TIFF of 32-bit or signed whole numbers. Without it they are recorded failures
    (unsupported)."""
    damaged: str = "refuse"
    """refuse makes a JPEG with damaged data a recorded failure (decode error), accept takes it as
    its decoder repairs it, and counts it as a warning."""
    max_pixels: int = 89_478_485
    """Largest number of pixels of an image. A larger image is a recorded failure (too large), found
    before it is decoded."""
    timeout_s: float | None = 30
    """Seconds that decoding an image may take. An image that takes longer, also when it is decoded
    again, is a recorded failure (timeout). null waits for ever."""
    workers: int | None = None
    """Number of processes that decode images; null takes one for each CPU that this process may
    use."""
    limit: int | None = None
    """Number of rows to take from the beginning of the listing; null takes all."""

    def __post_init__(self) -> None:
        check_choice("data.exif", self.exif, ("apply", "ignore"))
        check_choice("data.damaged", self.damaged, ("refuse", "accept"))
        if self.white is not None and not 0 < self.white < float("inf"):
            raise ConfigError(
                f"data.white={self.white}: expected a number above 0, such as 1, 255 or 65535."
            )
        if self.root_help is not None and not self.root:
            raise ConfigError(f"data={self.name} needs {self.root_help}.")
        if self.root_help is None and self.root:
            raise ConfigError(
                f"data.root has no effect with data={self.name}; for a folder of images add "
                "data=folder."
            )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(
                f"data.timeout_s={self.timeout_s}: expected seconds above 0, or null for no limit."
            )
        for key in ("max_pixels", "workers", "limit"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"data.{key}={value}: expected a whole number of at least 1.")

    @property
    def location(self) -> str:
        """data.root as it was given, of a source that needs one.

        Raises:
            ConfigError: this source takes no data.root.
        """
        if self.root is None:
            raise ConfigError(f"data={self.name} takes no data.root.")
        return self.root

    @property
    def path(self) -> Path:
        """data.root as a path, in which '~' is expanded."""
        return Path(self.location).expanduser()
