"""Sources: the options that they share, their registration, and how they are opened.

A new source is a module of this package, or of a plug-in: a dataclass of options, a class with
`listing()` and `read(key)` (`featx.types.Source`), and a call of `source_member`. docs/plugins.md
has an example.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from annotated_types import MinLen

from featx.base import Member, Registry, for_options
from featx.config import MAY_BE_EMPTY, DataConfig, options
from featx.errors import DataError
from featx.sources.views import BoxedSource, ReadBoxes, ViewedSource
from featx.types import BoxReader, Source

OptionsT = TypeVar("OptionsT", bound=DataConfig)


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


@dataclass(frozen=True, kw_only=True)
class SourceMember(Member):
    """A source as it is registered; made by `source_member`.

    Attributes:
        open: opens the data set that the options of this source describe.
    """

    open: Callable[[DataConfig], Source]


SOURCES: Registry[SourceMember] = Registry("data", "featx.sources", "featx.sources")
"""All sources by their names."""


def source_member(
    name: str,
    help: str,
    options: type[OptionsT],
    open_source: Callable[[OptionsT], Source],
    extra: str | None = None,
) -> SourceMember:
    """Describe a source for `SOURCES.register` or for an entry point of the group `featx.sources`.

    Args:
        name: value of the option `data` that selects the source.
        help: one sentence for `--help`.
        options: dataclass of its options, `DataConfig` or a subclass whose field `name` has `name`
            as its default.
        open_source: opens the data set that such options describe.
        extra: extra of featx that installs the packages it needs.
    """
    own = None if options is DataConfig else options
    return SourceMember(
        name, help, own, extra, open=for_options(f"data={name}", options, open_source)
    )


def open_source(config: DataConfig) -> Source:
    """Open the data set that the option group `data` describes.

    Args:
        config: options of the group; `name` selects the kind, `boxes`, `views` and `crops` say what
            of its images are rows.

    Raises:
        ConfigError: there is no source of this name.
        DataError: the data set does not exist or cannot be read.
        MissingExtraError: the kind needs a package that is not installed.
    """
    source = SOURCES.get(config.name).open(config)
    if not isinstance(source, Source):
        raise DataError(
            f"data={config.name} opens {type(source).__name__}; expected an object with listing() "
            "and read(key)."
        )
    return with_views(source, config)


def with_views(source: Source, config: DataConfig) -> Source:
    """Apply the options data.boxes, data.views and data.crops to a source.

    Returns:
        a source with one row per box (`BoxedSource`, or `ReadBoxes` if the source reads boxes
        itself) and view (`ViewedSource`); or `source` itself if none of them is set.
    """
    if config.boxes is not None:
        boxed = BoxedSource(source, Path(config.boxes).expanduser())
        source = ReadBoxes(boxed, source) if isinstance(source, BoxReader) else boxed
    if config.has_views:
        source = ViewedSource(source, config)
    return source
