"""Temporary files of killed processes: readers ignore them, and the next run deletes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from featx.storage import TEMPORARY_PREFIX, AtomicFolder
from featx.store import layout

_FOLDERS = (
    "",
    layout.PARTS,
    layout.PROBE_HEADS,
    layout.ZEROSHOT_HEADS,
    layout.WORKERS,
    layout.SHEETS,
    layout.TENSORBOARD,
    f"{layout.TENSORBOARD}/*",
    ".hydra",
)
"""Folders of a store, as globs, in which such files may lie."""


def clear_leftovers(disk: AtomicFolder) -> None:
    """Delete the temporary files of a store; only the holder of the store may do this."""
    for path in _leftovers(disk.root):
        disk.remove(path)


def leftover_bytes(root: Path) -> int:
    """Bytes on disk that the next run into a store frees by deleting temporary files."""
    num_bytes = 0
    for path in _leftovers(root):
        with contextlib.suppress(OSError):  # it has got its final name meanwhile
            num_bytes += path.stat().st_blocks * 512
    return num_bytes


def _leftovers(root: Path) -> Iterator[Path]:
    """Paths of temporary files."""
    for folder in _FOLDERS:
        yield from root.glob(f"{folder}/{TEMPORARY_PREFIX}*" if folder else f"{TEMPORARY_PREFIX}*")
