"""Paths of the files that are installed with featx."""

from __future__ import annotations

from pathlib import Path


def shipped(name: str) -> Path:
    """Path of a folder that is installed with featx.

    In a wheel it is inside the package; in a checkout and an editable install beside it.

    Args:
        name: 'conf' or 'data'.
    """
    package = Path(__file__).resolve().parents[1]
    inside = package / "_shipped" / name
    return inside if inside.is_dir() else package.parent / name
