"""Registry of sources: each is one module that registers itself under its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from featx.base import Member, Registry, for_options
from featx.config import DataConfig
from featx.types import Source

OptionsT = TypeVar("OptionsT", bound=DataConfig)


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
