"""Options that several sources share; a source with one of them derives its own from these."""

from __future__ import annotations

from typing import Annotated

from annotated_types import MinLen

from featx.config import MAY_BE_EMPTY, DataConfig, options


@options("data")
class LinkOptions(DataConfig):
    """Options of a source that reads files, which may be symbolic links."""

    follow_links: bool = False
    """Follow symbolic links that lead out of data.root, and paths of a table that do."""


@options("data")
class FileOptions(LinkOptions):
    """Options of a source that lists files by their extensions."""

    extensions: Annotated[list[str], MinLen(1)] | None = None
    """File name extensions that count as images, or as videos for data=video, such as [jpg,png];
    null takes every format that featx reads."""


@options("data")
class ColumnOptions(LinkOptions):
    """Options of a source that reads columns of a table."""

    path_column: str | None = None
    """Column of paths or of encoded images; null takes the column path, or else the column
    image."""
    label_column: Annotated[str | None, MAY_BE_EMPTY] = None
    """Column of labels; null takes the column label if there is one, an empty name takes none."""
