"""job=export: writes all files of an export into a temporary folder, then renames them.

The record lists the files before they get their names, so that an export that lacks any of them is
known to be incomplete: the command that was killed starts again.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from featx.base import CountProgress, differences, log_message, size_text
from featx.config import Config
from featx.errors import ConfigError, RunError, StoreError, StoreMismatchError, counted
from featx.export.base import FORMATS, ExportFolder, Format
from featx.export.selection import ExportSelection, is_utf8
from featx.storage import (
    TEMPORARY_PREFIX,
    AtomicFolder,
    exclusive_lock,
    storage_errors,
    sync_entries,
)
from featx.store import FeatureStore, layout, matching_layers
from featx.types import Json, with_features

RECORD = "_export.json"
"""File that describes an export. Readers of Parquet folders ignore names with an underscore."""


def run_export(config: Config) -> dict[str, Any]:
    """Write an export, unless it is complete.

    Returns:
        folder, format, layers, columns, rows, failures (failed rows that the export holds),
        left_out (failed and missing rows that it does not hold), files, bytes, seconds, already
        (whether the export was complete before) and opening (lines of code that open it).

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
    disk = AtomicFolder(out)
    with CountProgress("B") as progress:
        selection = ExportSelection(store, layers, rows, progress.step)
        export_format = member.make(selection, config)
        disk.make_folder(out)
        with exclusive_lock(out / layout.LOCK):
            return _export(disk, export_format, progress)


def _export(disk: AtomicFolder, export_format: Format, progress: CountProgress) -> dict[str, Any]:
    """Write the export unless it is complete; the caller holds the lock of the folder."""
    started_at = time.perf_counter()
    selection, config = export_format.selection, export_format.config
    fingerprint = _fingerprint_of(export_format)
    for left_by_killed in list(disk.root.glob(f"{TEMPORARY_PREFIX}*")):
        disk.remove(left_by_killed)
    record: Json = {"files": {}}
    already = False
    if (path := disk.root / RECORD).exists():
        record = _read(path)
        if not config.overwrite:
            _refuse_other_export(disk.root, record["fingerprint"], fingerprint)
            already = record["files"] == _sizes(disk.root, record["files"])
    if not already:
        if (free := disk.free_bytes()) < export_format.num_bytes:
            raise RunError(
                f"{disk.root} needs about {size_text(export_format.num_bytes)} and "
                f"{size_text(free)} are free. Make room, or choose another out=DIR."
            )
        if num_odd := sum(not is_utf8(key) for key in selection.each_key()):
            log_message(
                f"{counted(num_odd, 'key is', 'keys are')} not UTF-8. npy and safetensors keep "
                "their bytes; where a format holds text, such bytes are spelled as \\xff.",
                level="warning",
            )
        progress.begin(len(selection) * selection.row_bytes())
        new_record = {"fingerprint": fingerprint, "about": selection.about}
        record = _write_all(disk, export_format, record["files"], new_record)
    return {
        "folder": str(disk.root),
        "format": config.export.format,
        "layers": list(selection.layers),
        "columns": list(selection.columns),
        "rows": len(selection),
        "failures": int((~with_features(selection.status)).sum()),
        "left_out": len(selection.store) - len(selection),
        "files": len(record["files"]),
        "bytes": sum(record["files"].values()),
        "seconds": time.perf_counter() - started_at,
        "already": already,
        "opening": export_format.opening(disk.root),
    }


def _refuse_other_folders(out: Path) -> None:
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


def _fingerprint_of(export_format: Format) -> dict[str, object]:
    """Return the description that two exports with the same content share.

    It is converted to JSON and back, so that tuples and NumPy numbers compare equal to those of a
    record.
    """
    options = asdict(export_format.config.export)
    # What these say is in the rows.
    options = {name: options[name] for name in options if name not in ("ok_only", "incomplete")}
    fingerprint: dict[str, Any] = json.loads(json.dumps({**options, **export_format.fingerprint}))
    return fingerprint


def _refuse_other_export(root: Path, old: Json, fingerprint: Json) -> None:
    changed = differences(old, fingerprint)
    if changed:
        lines = [
            f"  {key}: {', '.join(old)}; now {', '.join(new)}"
            if key == "layers" and set(old) != set(new)
            else f"  {key}: {_shorten(old)}, now {_shorten(new)}"
            for key, old, new in changed
        ]
        raise StoreMismatchError(
            f"{root} holds an export of something else:\n"
            + "\n".join(lines)
            + "\nChoose another out=DIR, or replace it with overwrite=true."
        )


def _write_all(
    disk: AtomicFolder,
    export_format: Format,
    old_names: Iterable[str],
    record: Json,
) -> Json:
    """Write a temporary folder, put its files in the place of those of an old export.

    Returns the record with the sizes of all files.
    """
    root, temporary = disk.root, disk.root / f"{TEMPORARY_PREFIX}export"
    try:
        disk.make_folder(temporary)
        folder = ExportFolder(temporary)
        export_format.write(folder)
        if not folder.names:
            raise RunError(f"export.format={export_format.config.export.format} wrote no file.")
        # The old files go before the record changes, and the new ones come after: a process that is
        # killed here leaves a record whose files are missing, and never one of other files.
        for name in reversed(list(old_names)):
            disk.remove(root / name)
            disk.remove_best_effort(root / name)  # also its folder, if that is empty now
        record = {**record, "files": _sizes(temporary, folder.names)}
        disk.replace(root / RECORD, json.dumps(record, indent=2).encode())
        paths = [root / name for name in folder.names]
        for name, path in zip(folder.names, paths, strict=True):
            disk.make_folder(path.parent)
            with storage_errors(path):
                (temporary / name).rename(path)
        for parent in {path.parent for path in paths}:
            sync_entries(parent, parent)
    finally:
        # Where the disk fails, the error at hand says so, and the next export deletes the rest.
        shutil.rmtree(temporary, ignore_errors=True)
    return record


def _read(path: Path) -> Json:
    try:
        record: Json = json.loads(path.read_bytes())
        if not all(isinstance(record[entry], dict) for entry in ("fingerprint", "files")):
            raise ValueError("it has other entries")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StoreError(
            f"{path} cannot be read: {error}. It records what the folder holds. Choose another "
            "out=DIR, or delete the folder."
        ) from error
    for name in record["files"]:
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or name.startswith("/"):
            raise StoreError(f"{path} names a file that is not below its folder: {name!r}.")
    return record


def _sizes(root: Path, names: Iterable[str]) -> dict[str, int]:
    """Return name -> bytes of files and folders; -1 for those that do not exist."""
    sizes = {}
    for name in names:
        path = root / name
        if path.is_dir():
            sizes[name] = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
        else:
            sizes[name] = path.stat().st_size if path.is_file() else -1
    return sizes


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:100]} ..."
