"""job=export: writes the missing files of an export, one by one.

A file appears under its name when it is complete, and is then added to the record of the export.
Files that are not in the record are written again, so the same command resumes an export that was
killed.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import numpy as np

from featx.base import CountProgress, differences, facts, log_message, size_text
from featx.config import Config
from featx.errors import ConfigError, RunError, StoreError, StoreMismatchError, counted
from featx.export.base import FORMATS, File, Folder, Format
from featx.export.hub import check_push, push
from featx.export.selection import ExportSelection
from featx.storage import TEMPORARY_PREFIX, AtomicFolder, exclusive_lock
from featx.store import FeatureStore, layout, matching_layers
from featx.types import Status

_SAVE_EVERY_S = 1.0
"""Seconds between two saves of the record: it names all files, of which there may be thousands."""

RECORD = "_export.json"
"""File that describes an export. Readers of Parquet folders ignore names with an underscore."""


def run_export(config: Config) -> dict[str, Any]:
    """Start or resume an export until it is complete.

    Args:
        config: checked config with job=export.

    Returns:
        folder, format, layers, columns, rows, failures (failed rows that the export holds),
        left_out (failed and missing rows that it does not hold), files, bytes, seconds, already
        (whether the export was complete before), pushed (URL of the repository, or None), and
        opening (lines of code that open it).

    Raises:
        FeatxError: the store, the format or the folder is not suitable, or the disk failed.
    """
    assert config.store is not None, "the config was checked"
    store = FeatureStore(config.store, verify="rows")
    if not store.complete and not config.export.incomplete:
        raise StoreError(
            f"{store.root} is not complete: {store.num_rows_present} of {len(store)} rows are "
            "there. Complete it with the command that started it, or export the existing rows "
            "with export.incomplete=true."
        )
    name = config.export.format
    out = config.output_folder(store.root, f"export-{name}")
    _refuse_other_folders(out)
    member = FORMATS.get(name)
    ok_only = config.export.ok_only or not member.holds_failed_rows
    rows = np.flatnonzero(store.ok) if ok_only else np.arange(len(store))
    if not len(rows):
        raise StoreError(f"{store.root} has no row that is ok: there is nothing to export.")
    layers = matching_layers(store, config.layers)
    if config.export.push is not None:
        check_push()
    disk = AtomicFolder(out)
    with CountProgress("B") as progress:
        selection = ExportSelection(store, layers, rows, progress.step)
        export_format = member.make(selection, config)
        disk.make_folder(out)
        with exclusive_lock(out / layout.LOCK):
            return _write_all(disk, export_format, progress)


def _write_all(
    disk: AtomicFolder, export_format: Format, progress: CountProgress
) -> dict[str, Any]:
    """Write the missing files; the caller holds the lock of the folder."""
    started_at = time.perf_counter()
    selection, config, files = export_format.selection, export_format.config, export_format.files()
    fingerprint = _fingerprint_of(export_format, files)
    _clear(disk, config.overwrite and not _was_overwriting(disk.root / RECORD, fingerprint))
    record = _Record(disk, selection, fingerprint, files, config.overwrite)
    missing = record.missing()
    if missing:
        share = sum(map(len, missing)) / max(1, sum(map(len, files)))
        _check_room(disk, share * export_format.num_bytes)
        progress.begin(int(share * len(selection) * selection.row_bytes()))
        _warn_of_odd_keys(selection)
    for file in missing:
        _write(disk, file)
        # Recorded only when the file is in place; a kill in between writes the file again.
        record.add(file)
    record.close()
    failed = int((selection.status != Status.OK).sum())
    return {
        "folder": str(disk.root),
        "format": config.export.format,
        "layers": list(selection.layers),
        "columns": list(selection.columns),
        "rows": len(selection),
        "failures": failed,
        "left_out": len(selection.store) - len(selection),
        "files": len(files),
        "bytes": sum(record.sizes.values()),
        "seconds": time.perf_counter() - started_at,
        "already": not missing,
        "pushed": _push(disk.root, record, export_format),
        "opening": export_format.opening(disk.root),
    }


def _push(folder: Path, record: _Record, export_format: Format) -> str | None:
    """Upload a complete export if `export.push` is set; return the URL of the repository."""
    repository = export_format.config.export.push
    return None if repository is None else push(folder, record.sizes, repository, export_format)


def _refuse_other_folders(out: Path) -> None:
    """Check that a folder contains nothing but an export.

    Raises:
        ConfigError: it is the folder of a store.
        StoreError: it contains other files.
    """
    if any((out / name).exists() for name in (layout.MANIFEST, layout.PACKED)):
        raise ConfigError(f"out={out} is the folder of a store. Choose another out for the export.")
    if out.is_dir() and not (out / RECORD).exists():
        # Names with a leading dot are not data: featx's own lock, or files of a desktop.
        other_files = [path.name for path in out.iterdir() if not path.name.startswith(".")]
        if other_files:
            raise StoreError(
                f"{out} holds {other_files[0]} and is no export. Choose an empty folder or a new "
                "one."
            )


def _clear(disk: AtomicFolder, overwrite: bool) -> None:
    """Delete temporary files, and with overwrite the files of the existing export."""
    for leftover in list(disk.root.rglob(f"{TEMPORARY_PREFIX}*")):
        disk.remove(leftover)
    record = disk.root / RECORD
    if overwrite and record.exists():
        # The record is deleted last: after a kill, it still names the files to delete.
        for name in _read(record)["planned"]:
            disk.remove(_path_inside(disk.root, name))
        disk.remove(record)


def _fingerprint_of(export_format: Format, files: Sequence[File | Folder]) -> dict[str, Any]:
    """Return the description that two exports with the same content share.

    It is converted to JSON and back, so that tuples and NumPy numbers compare equal to those of a
    record.
    """
    entries = {
        "format": export_format.config.export.format,
        **export_format.selection.fingerprint,
        **({"options": settings} if (settings := export_format.settings) else {}),
        "files": {file.name: [file.start, file.stop] for file in files},
    }
    fingerprint: dict[str, Any] = json.loads(json.dumps(entries))
    return fingerprint


def _was_overwriting(path: Path, fingerprint: dict[str, Any]) -> bool:
    """Return whether overwrite=true has started this same export before and not completed it."""
    if not path.exists():
        return False
    record = _read(path)
    was_started = record.get("overwrite") is True and record.get("complete") is False
    return was_started and not differences(record["fingerprint"], fingerprint)


class _Record:
    """File that describes an export and lists its complete files.

    Args:
        disk: folder of the export.
        selection: rows and layers.
        fingerprint: description of the content.
        files: all files of the export.
        overwrite: whether the export was started with overwrite=true.

    Attributes:
        sizes: name -> size in bytes of each complete file.

    Raises:
        StoreMismatchError: the folder holds an export of something else.
        StoreError: the existing record is damaged.
    """

    def __init__(
        self,
        disk: AtomicFolder,
        selection: ExportSelection,
        fingerprint: dict[str, Any],
        files: Sequence[File | Folder],
        overwrite: bool,
    ) -> None:
        self.sizes: dict[str, int] = {}
        self._disk, self._files = disk, files
        self._path = disk.root / RECORD
        self._fingerprint = fingerprint
        self._overwrite = overwrite
        self._about = selection.about
        self._saved_at = -math.inf
        if self._path.exists():
            self._take_over()

    def _take_over(self) -> None:
        """Continue the existing record; a file whose size differs from the record is written again.

        Raises:
            StoreMismatchError: it describes an export of something else.
        """
        record = _read(self._path)
        changed = differences(record["fingerprint"], self._fingerprint)
        if changed:
            lines = [f"  {key}: {_shorten(old)}, now {_shorten(new)}" for key, old, new in changed]
            raise StoreMismatchError(
                f"{self._disk.root} holds an export of something else:\n"
                + "\n".join(lines)
                + "\nChoose another out=DIR, or replace it with overwrite=true."
            )
        self._overwrite = self._overwrite or record.get("overwrite") is True
        for name, size in record["whole"].items():
            if size == _size(_path_inside(self._disk.root, name)):
                self.sizes[name] = size

    def missing(self) -> list[File | Folder]:
        """Return the files that are not complete, in order."""
        files = [file for file in self._files if file.name not in self.sizes]
        if files:
            self._save(complete=False)
        return files

    def add(self, file: File | Folder) -> None:
        """Record that a file is complete; a kill within a second writes it again."""
        self.sizes[file.name] = _size(self._disk.root / file.name)
        if time.monotonic() - self._saved_at > _SAVE_EVERY_S:
            self._save(complete=False)

    def close(self) -> None:
        """Record that all files are complete."""
        self._save(complete=True)

    def _save(self, complete: bool) -> None:
        """Replace the file atomically."""
        record = {
            "complete": complete,
            "overwrite": self._overwrite,
            "fingerprint": self._fingerprint,
            "planned": [file.name for file in self._files],
            "whole": self.sizes,
            "about": self._about,
        }
        self._disk.replace(self._path, json.dumps(record, indent=2).encode())
        self._saved_at = time.monotonic()


def _read(path: Path) -> dict[str, Any]:
    """Read a record.

    Raises:
        StoreError: it cannot be read, or lacks an entry.
    """
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
        has_entries = isinstance(record["fingerprint"], dict) and isinstance(record["whole"], dict)
        if not has_entries or not isinstance(record["planned"], list):
            raise ValueError("it has other entries")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StoreError(
            f"{path} cannot be read: {error}. It records what the folder holds. Choose another "
            "out=DIR, or delete the folder."
        ) from error
    return record


def _path_inside(root: Path, name: object) -> Path:
    """Return the path of a file that a record names.

    Raises:
        StoreError: it would be outside the export.
    """
    parts = PurePosixPath(str(name)).parts
    if not parts or ".." in parts or str(name).startswith("/"):
        raise StoreError(f"{root / RECORD} names a file that is not below it: {name!r}.")
    return root / str(name)


def _size(path: Path) -> int:
    """Return the bytes of a file, or of all files of a folder; -1 if it does not exist."""
    if path.is_dir():
        return sum(inner.stat().st_size for inner in path.rglob("*") if inner.is_file())
    return path.stat().st_size if path.is_file() else -1


def _write(disk: AtomicFolder, file: File | Folder) -> None:
    """Write one file or folder atomically."""
    path = disk.root / file.name
    if not path.parent.is_dir():
        disk.make_folder(path.parent)
    if isinstance(file, Folder):
        disk.remove(path)  # complete, but the process was killed before it was recorded
        with disk.fill_folder(path) as folder:
            file.write(folder)
        return
    if file.reserved_bytes is not None:
        with disk.reserve_file(path, file.reserved_bytes, replace=True) as stream:
            # h5py calls the methods of a file that ReservedFile has.
            file.write(cast(BinaryIO, stream))
        return
    with disk.stream_file(path) as stream:
        file.write(stream)


def _check_room(disk: AtomicFolder, needed: float) -> None:
    """Check that the free space is sufficient, as far as the size is known.

    Raises:
        RunError: it is not.
    """
    free = disk.free_bytes()
    if free < needed:
        raise RunError(
            f"{disk.root} needs about {size_text(needed)} and {size_text(free)} are free. Make "
            "room, or choose another out=DIR."
        )


def _warn_of_odd_keys(selection: ExportSelection) -> None:
    """Warn if keys are not UTF-8."""
    num_odd = 0
    for key in selection.keys.tolist():
        try:
            key.decode()
        except UnicodeDecodeError:
            num_odd += 1
    if num_odd:
        log_message(
            f"{counted(num_odd, 'key is', 'keys are')} not UTF-8. npy and safetensors keep their "
            "bytes; where a format holds text, such bytes are spelled as \\xff.",
            level="warning",
        )


def _shorten(value: object) -> str:
    """Return a value as text of limited length."""
    text = str(value)
    return text if len(text) <= 100 else f"{text[:100]} ..."


def describe_export(summary: dict[str, Any]) -> str:
    """Format the result of `run_export` for people."""
    failed, left_out = summary["failures"], summary["left_out"]
    about_rows = f"{summary['rows']}"
    if failed:
        about_rows += f", {failed} of them failed: NaN"
    if left_out:
        about_rows += f"; {counted(left_out, 'row', 'rows')} without features left out"
    rows = [
        ("format", summary["format"]),
        ("layers", ", ".join(summary["layers"])),
        *([("columns", ", ".join(columns))] if (columns := summary["columns"]) else []),
        ("rows", about_rows),
        ("files", f"{summary['files']}, {size_text(summary['bytes'])}"),
        (
            "seconds",
            "already complete" if summary["already"] else f"{summary['seconds']:.1f}",
        ),
        ("folder", summary["folder"]),
        *([("pushed", summary["pushed"])] if summary["pushed"] else []),
    ]
    return f"{facts(rows)}\n\n{summary['opening']}"
