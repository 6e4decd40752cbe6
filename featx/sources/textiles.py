"""Source data=textiles: 2000 labelled images of woven textile from a pip package.

The package conformal-clip-data 0.1.4 (MIT licence) contains simulated images: 500 with a global
defect, 500 with a local defect and 1000 without a defect.
"""

from __future__ import annotations

from featx.config import DataConfig
from featx.errors import MissingExtraError
from featx.sources.base import FolderSource
from featx.sources.registry import SOURCES, source_member
from featx.types import Source


def open_source(config: DataConfig) -> Source:
    """Open the textile images, whose classes are global, local and nominal.

    Raises MissingExtraError if the package conformal-clip-data is not installed.
    """
    try:
        import conformal_clip_data
    except ImportError as error:
        raise MissingExtraError(
            'data=textiles comes with the extra demo: pip install "featx[demo]". Without it, '
            "data=sample works offline, and data=folder data.root=DIR takes your own images."
        ) from error
    return FolderSource(conformal_clip_data.textile_simulated_root())


SOURCES.register(
    source_member(
        "textiles",
        "2000 labelled images of woven textile from a package.",
        DataConfig,
        open_source,
        extra="demo",
    )
)
