"""Temporary files of processes that were killed: no reader looks at them, and the next run deletes
them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from featx.storage.local_folder import TEMPORARY, AtomicFolder
from featx.store import layout

_FOLDERS = (
    "",
    layout.PARTS,
    layout.PROBE_HEADS,
    layout.WORKERS,
    layout.PICTURES,
    layout.TENSORBOARD,
    f"{layout.TENSORBOARD}/*",
    ".hydra",
)


def clear_leftovers(disk: AtomicFolder) -> None:
    """Delete the temporary files of a store; only who holds it may."""
    for path in _leftovers(disk.root):
        disk.remove(path)


def leftover_bytes(root: Path) -> int:
    """Bytes on the disk that the next run into a store frees by deleting temporary files."""
    found = 0
    for path in _leftovers(root):
        with contextlib.suppress(OSError):  # it has its final name by now
            found += path.stat().st_blocks * 512
    return found


def _leftovers(root: Path) -> Iterator[Path]:
    for folder in _FOLDERS:
        yield from root.glob(f"{folder}/{TEMPORARY}*" if folder else f"{TEMPORARY}*")
