"""What is installed with featx: packages of its extras, its own files; and its cache."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType

from featx.errors import MissingExtraError


def import_extra(module: str, what: str, title: str, extra: str) -> ModuleType:
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


def shipped_folder(name: str) -> Path:
    """Path of a folder that is installed with featx: 'conf' or 'data'.

    In a wheel it is inside the package; in a checkout and an editable install, next to it.
    """
    package = Path(__file__).resolve().parents[1]
    inside = package / "_shipped" / name
    return inside if inside.is_dir() else package.parent / name


def cache_folder(name: str) -> Path:
    """Folder of featx in the user's cache, `$XDG_CACHE_HOME/featx/NAME`; it may not exist."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "featx" / name
