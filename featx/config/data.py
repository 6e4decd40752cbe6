"""Options of the group `data` that every source has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Len

from featx.config.checks import Count, OneOrMore, OnlyWith, Positive, options
from featx.errors import ConfigError
from featx.storage import is_url

OBJECT_SOURCE = "python"
"""Source of a data set that a Python program passes as an object; the command cannot name it."""

_SOURCE_OF_ENDING = {
    **dict.fromkeys((".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".parquet"), "table"),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "table"),  # whose error says how to save the sheet
    **dict.fromkeys((".tar", ".tar.gz", ".tgz"), "webdataset"),
    **dict.fromkeys((".h5", ".hdf5"), "hdf5"),
    **dict.fromkeys(("/state.json", "/dataset_dict.json"), "huggingface"),  # of save_to_disk
}
"""Ending of the name of a file -> source that reads such files."""


def source_of_path(path: str) -> str:
    """Return the source that `data=PATH` stands for: 'folder', or that of a file of this name."""
    if not Path(path).expanduser().is_dir():
        for ending, source in _SOURCE_OF_ENDING.items():
            if path.lower().endswith(ending):
                return source
    return "folder"


ViewName = Literal[
    "original", "hflip", "vflip", "rot90", "rot180", "rot270", "transpose", "transverse"
]
_Shares = Annotated[list[Annotated[float, Gt(0), Le(1)]], Len(2, 2)]


@options("data")
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
    views: OneOrMore[ViewName] | None = None
    """Views that become rows of each image or box: original, hflip, vflip, rot90, rot180, rot270
    (counterclockwise), transpose and transverse (over the main diagonal and the other one)."""
    crops: Annotated[int, Ge(1), Le(1_000_000)] | None = None
    """Number of random resized crops of each image or box that become rows, besides data.views; the
    key of a row decides its crop. The quotient of width and height is from 3/4 to 4/3."""
    crop_scale: Annotated[
        _Shares | None, OnlyWith("crops"), "[smallest,largest], above 0 and of at most 1, or null"
    ] = None
    """Smallest and largest share of the area that a crop of data.crops covers; null takes
    [0.08,1]."""
    exif: Literal["apply", "ignore"] = "apply"
    """apply turns an image upright as its EXIF orientation asks, ignore leaves it as stored."""
    background: str = "white"
    """Colour under transparent pixels: a name or #rrggbb."""
    white: Annotated[Positive | None, "a number above 0, such as 1, 255 or 65535"] = None
    """Number that is white, over black at 0, in images whose file does not say it: TIFF and PFM of
    floats, and TIFF of 32-bit or signed whole numbers. Without it they are recorded failures
    (unsupported)."""
    damaged: Literal["refuse", "accept"] = "refuse"
    """refuse makes a JPEG with damaged data a recorded failure (decode error), accept takes it as
    its decoder repairs it, and counts it as a warning."""
    max_pixels: Count = 89_478_485
    """Largest number of pixels of an image. A larger image is a recorded failure (too large), found
    before it is decoded."""
    timeout_s: Annotated[Positive | None, "seconds above 0, or null for no limit"] = 30.0
    """Seconds that decoding an image may take. An image that takes longer, also when it is decoded
    again, is a recorded failure (timeout). null waits for ever."""
    workers: Annotated[int, Ge(1), Le(1024)] | None = None
    """Number of processes that decode images; null takes one for each CPU that this process may
    use."""
    limit: Count | None = None
    """Number of rows to take from the beginning of the listing; null takes all."""
    sample: Count | None = None
    """Number of rows to take from the whole listing, equally many of each class that has them, and
    spread evenly over its rows; null takes all."""

    def __post_init__(self) -> None:
        if self.root_help is not None and not self.root:
            raise ConfigError(f"data={self.name} needs {self.root_help}.")
        if self.limit is not None and self.sample is not None:
            raise ConfigError("data.limit takes the first rows and data.sample others; give one.")
        if self.crop_scale is not None and self.crop_scale[0] > self.crop_scale[1]:
            raise ConfigError(
                f"data.crop_scale={self.crop_scale}: expected the smaller number first."
            )
        if self.root_help is None and self.root:
            raise ConfigError(
                f"data.root has no effect with data={self.name}; for a folder of images add "
                "data=folder."
            )

    @property
    def has_views(self) -> bool:
        """Whether rows are views of images or boxes."""
        return self.views is not None or self.crops is not None

    @property
    def crop_bounds(self) -> tuple[list[float], list[float]]:
        """Bounds of the share of the area and of width by height, by default torchvision's."""
        return self.crop_scale or [0.08, 1.0], [3 / 4, 4 / 3]

    @property
    def location(self) -> str:
        """data.root as it was given, of a source that needs one."""
        if self.root is None:
            raise ConfigError(f"data={self.name} takes no data.root.")
        return self.root

    @property
    def folder_name(self) -> str:
        """Name of the data set in the default of `out`: of its folder or files, or of the source.

        `data.root=photos/` and `data=table data.root=a/photos.csv` are 'photos', and so are
        `photos-{000..012}.tar` and a URL of it, without its query.
        """
        if self.root is None:
            return self.name
        name = self.root.partition("?")[0].rstrip("/").rpartition("/")[2]
        if name in ("", ".", ".."):
            name = self.path.resolve().name
        if self.name != "folder":
            name = re.split(r"[.{*\[]", name.lstrip("."), maxsplit=1)[0].strip("-_ ")
        return name or self.name

    @property
    def path(self) -> Path:
        """data.root as a path, in which '~' is expanded; ConfigError if it is a URL."""
        path = Path(self.location).expanduser()
        if is_url(self.location) and not path.exists():
            raise ConfigError(
                f"data.root={self.location}: data={self.name} reads from a disk. From S3 or the "
                "web, featx reads tar shards: data=webdataset data.root=URL."
            )
        return path
