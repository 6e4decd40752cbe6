"""Packages that not every installation has: they come with an extra of featx."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from featx.errors import MissingExtraError


def import_extra(module: str, what: str, title: str, extra: str) -> Any:
    """Import and return a module of an optional package.

    Args:
        what: what needs the package, such as 'export.format=zarr'.
        title: name of the package for people.
        extra: extra of featx that installs it.

    Raises:
        MissingExtraError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(what, title, extra) from error


def require_extra(package: str, what: str, title: str, extra: str) -> None:
    """Raise MissingExtraError if an optional package is not installed, without importing it."""
    if importlib.util.find_spec(package) is None:
        raise _missing(what, title, extra)


def _missing(what: str, title: str, extra: str) -> MissingExtraError:
    return MissingExtraError(f'{what} needs {title}: pip install "featx[{extra}]".')
