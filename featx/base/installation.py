"""What is installed: packages and their versions, the files of featx; and its cache."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType

from featx.base.version import __version__
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


def installed_version(name: str) -> str | None:
    """Return the version of a package as pip knows it, or None if it is not installed.

    That of featx is `__version__`, which is right in a clone that was installed as another version
    as well.
    """
    if name == "featx":
        return __version__
    from importlib.metadata import PackageNotFoundError, version  # 10 ms, which `--version` saves

    try:
        return version(name)
    except PackageNotFoundError:
        return None


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
