"""Folders that travel with featx."""

from __future__ import annotations

from pathlib import Path


def shipped(name: str) -> Path:
    """A folder that travels with featx: 'conf' or 'data'.

    In a wheel they lie inside the package; in a checkout and an editable install beside it.
    """
    package = Path(__file__).resolve().parents[1]
    inside = package / "_shipped" / name
    return inside if inside.is_dir() else package.parent / name
