"""The version of featx, for the package index, `--version` and every store."""

from __future__ import annotations

__version__ = "0.1.0"


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
