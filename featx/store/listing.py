"""Listing of a store (samples.h5), and how a data set that has grown is merged into it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

import h5py
import numpy as np
import numpy.typing as npt

from featx.errors import StoreMismatchError, counted
from featx.storage import AtomicFolder, S3File, is_url, paths_in
from featx.store import layout
from featx.store.chunk_file import STREAMED_BYTES, ChunkFile
from featx.store.hdf5_files import (
    damage_text,
    map_values,
    open_metadata,
    open_raw,
    raise_unless_damage,
    write_values,
)
from featx.store.manifest import Manifest
from featx.types import Array, Listing

_ROWS_AT_ONCE = 1 << 18
"""Rows that are compared together, so that 10^8 rows need no second copy in memory."""


def listing_identity(listing: Listing) -> str:
    """Number of rows and digest of the listing, as the fingerprint records them.

    The digest, SHA-256 over keys, labels, classes and columns, identifies the rows and their order.
    """
    sha = hashlib.sha256(f"{listing.keys.dtype.itemsize} {len(listing)}".encode())
    sha.update(np.ascontiguousarray(listing.keys).data)
    sha.update(np.ascontiguousarray(listing.labels.astype("<i8", copy=False)).data)
    sha.update(json.dumps(listing.classes).encode())
    for name, values in listing.columns.items():
        sha.update(json.dumps([name, values.dtype.str]).encode())
        sha.update(np.ascontiguousarray(values).view(np.uint8).data)
    return f"{len(listing)} rows, sha256 {sha.hexdigest()}"


def matches_manifest(listing: Listing | None, manifest: Manifest) -> TypeGuard[Listing]:
    """Return whether the manifest allows that a listing is the one that the store was made with."""
    return listing is not None and manifest.listing_identity in (None, listing_identity(listing))


def content_tags_digest(listing: Listing) -> str | None:
    """SHA-256 over the content tags of all rows; None for a listing without tags."""
    if listing.content_tags is None:
        return None
    content_tags = np.ascontiguousarray(listing.content_tags.astype("<i8", copy=False))
    return hashlib.sha256(content_tags.data).hexdigest()


def row_values(listing: Listing) -> dict[str, Array]:
    """Values of the listing for each row; dataset path -> (N,) array."""
    columns = {f"{layout.COLUMNS}/{name}": values for name, values in listing.columns.items()}
    return {layout.KEY: listing.keys, layout.LABEL: listing.labels, **columns}


def same_values(some: Array, others: Array) -> bool:
    """Return whether two arrays of `row_values` are equal; NaN equals NaN."""
    if some.dtype.kind == others.dtype.kind == "f":
        return np.array_equal(some, others, equal_nan=True)
    return some.dtype.kind == others.dtype.kind and np.array_equal(some, others)


def make_groups(file: h5py.File, listing: Listing) -> None:
    """Create the groups for a listing; groups that HDF5 creates by itself store the time."""
    names = [layout.CHECKSUMS]
    if listing.columns:
        names += [layout.COLUMNS, f"{layout.CHECKSUMS}/{layout.COLUMNS}"]
    for name in names:
        file.create_group(name)


def write_classes(file: h5py.File, classes: Sequence[str]) -> None:
    """Write /classes, (C,) fixed-length UTF-8 bytes, and its checksum."""
    values = layout.text_array(classes)
    write_values(file, layout.CLASSES, values)
    checksum = np.array([layout.checksum(values)], np.uint64)
    write_values(file, f"{layout.CHECKSUMS}/{layout.CLASSES}", checksum)


def write_listing(
    disk: AtomicFolder, path: Path, listing: Listing, streamed_bytes: int = STREAMED_BYTES
) -> None:
    """Write a listing as samples.h5, in place of one that is there.

    The file has /key, /label, /classes and /columns of all rows, with checksums. The values of a
    listing of `streamed_bytes` or more on a disk exist once in memory. Raises RunError if the disk
    is full or fails, or the file reads back differently.
    """
    num_bytes = sum(values.nbytes for values in row_values(listing).values())
    if num_bytes < streamed_bytes or is_url(disk.root):
        target, name = None, Path(layout.LISTING)
    else:
        target, name = disk.begin_file(path, replace=True), path
    with ChunkFile(name, target) as file:
        file.hdf5.attrs["featx_format"] = layout.FORMAT
        make_groups(file.hdf5, listing)
        for dataset, values in row_values(listing).items():
            file.write_array(dataset, values)
        write_classes(file.hdf5, listing.classes)
        if target is not None:
            file.save()
            return
        data = file.content()
    disk.replace(path, data)


def compare_listing(path: Path, listing: Listing) -> tuple[int, str | None]:
    """Number of rows in samples.h5, and the reason why the common rows differ, or None."""
    try:
        with open_metadata(path) as file:
            keys, labels = file[layout.KEY], file[layout.LABEL]
            num_rows = len(keys)
            if len(labels) != num_rows:
                return num_rows, f"it has {num_rows} keys and {len(labels)} labels"
            if tuple(file.get(layout.COLUMNS, ())) != tuple(listing.columns):
                return num_rows, f"its /{layout.COLUMNS} are not those of this store"
            invalid = []
            for name, values in row_values(listing).items():
                is_same, agrees = _compare_rows(file, name, values)
                if not is_same or len(file[name]) != num_rows:
                    return num_rows, f"its dataset /{name} is not that of this store"
                invalid += [] if agrees else [name]
            # Either of them may have further classes, of rows that the other does not have.
            pairs = zip(_read_classes(file), listing.classes, strict=False)
            if any(listed != known for listed, known in pairs):
                return num_rows, f"its dataset /{layout.CLASSES} is not that of this store"
            _, agrees = _compare_rows(file, layout.CLASSES)
            invalid += [] if agrees else [layout.CLASSES]
            if invalid:
                return num_rows, f"its dataset /{invalid[0]} differs from its checksum"
            return num_rows, None
    except layout.UNREADABLE as error:
        return 0, damage_text(path, error)


def is_listing_of(path: Path, listing: Listing) -> bool:
    """Return whether samples.h5 is undamaged and has exactly the rows of a listing.

    Raises StoreError if the file cannot be read now.
    """
    if not path.exists():
        return False
    num_rows, problem = compare_listing(path, listing)
    return problem is None and num_rows == len(listing)


def _compare_rows(file: h5py.File, name: str, expected: Array | None = None) -> tuple[bool, bool]:
    """Compare a dataset of samples.h5 with its checksum and with other values, in one reading."""
    dataset, checksum = file[name], layout.running_checksum()
    for start in range(0, len(dataset), _ROWS_AT_ONCE):
        rows = dataset[start : start + _ROWS_AT_ONCE]
        if expected is not None:
            known = expected[start : start + len(rows)]
            if not same_values(rows[: len(known)], known):
                return False, False
        checksum.update(np.ascontiguousarray(rows).data)
    sums = file[f"{layout.CHECKSUMS}/{name}"]
    return True, sums[:].tolist() == [checksum.intdigest()]


def read_listing(root: Path, num_rows: int, identity: str | None = None) -> Listing | None:
    """Read the first rows of the listing of a store from samples.h5, features.h5, or the parts.

    The first of these sources with `identity`, the digest in the fingerprint, is used, or else the
    first one with enough rows; None if there is none. Raises StoreError if a file cannot be read
    now.
    """
    second_best = None
    for read, path in (
        (read_listing_file, root / layout.LISTING),
        (read_listing_file, root / layout.PACKED),
        (_read_from_parts, root),
    ):
        listing = read(path, num_rows)
        if listing is not None and identity in (None, listing_identity(listing)):
            return listing
        second_best = second_best or listing
    return second_best


def read_listing_file(path: Path, num_rows: int) -> Listing | None:
    """Read the first rows of the listing in a file; None if it is damaged or has fewer rows.

    Large datasets of samples.h5 are mapped; see `map_values`.
    """
    try:
        with open_raw(path) as raw, open_metadata(path, lambda: raw) as file:

            def first_rows(name: str) -> Array:
                dataset = file[name]
                values = None
                if not isinstance(raw, S3File):
                    values = map_values(dataset, raw.fileno())
                rows: Array = (dataset if values is None else values)[:num_rows]
                return rows

            keys, labels = first_rows(layout.KEY), first_rows(layout.LABEL)
            classes = _read_classes(file)
            names = file.get(layout.COLUMNS, ())
            columns = {name: first_rows(f"{layout.COLUMNS}/{name}") for name in names}
    except FileNotFoundError:
        return None
    except layout.UNREADABLE as error:
        raise_unless_damage(path, error)
        return None
    is_valid = len(keys) == len(labels) == num_rows
    is_valid = is_valid and keys.dtype.kind == "S" and labels.dtype == np.dtype("<i8")
    is_valid = is_valid and all(
        values.shape == (num_rows,) and is_column_type(values.dtype) for values in columns.values()
    )
    return Listing(keys, labels, classes, columns=columns) if is_valid else None


def is_ascending(keys: npt.NDArray[np.bytes_]) -> bool:
    """Return whether each key is greater than the one before it, so that none occurs twice."""
    for start in range(0, len(keys) - 1, _ROWS_AT_ONCE):
        some = keys[start : start + _ROWS_AT_ONCE + 1]
        if not (some[1:] > some[:-1]).all():
            return False
    return True


def is_column_type(dtype: np.dtype[np.generic]) -> bool:
    """Return whether a column of the listing may have this dtype: bytes, bool, int64 or float64."""
    return dtype.kind in "Sb" or dtype.str in ("<i8", "<f8")


def _read_from_parts(root: Path, num_rows: int) -> Listing | None:
    """Concatenate the rows of the listing in all parts; parts of several runs overlap."""
    pieces: list[tuple[int, Listing]] = []
    for path in paths_in(root / layout.PARTS, layout.PART_GLOB):
        try:
            with open_metadata(path) as file:
                start, count = int(file.attrs["start"]), len(file[layout.KEY])
        except layout.UNREADABLE as error:
            raise_unless_damage(path, error)
            continue
        if (piece := read_listing_file(path, count)) is not None:
            pieces.append((start, piece))
    taken: list[dict[str, Array]] = []
    row = 0
    for start, piece in sorted(pieces, key=lambda pair: pair[0]):
        if start <= row < start + len(piece):
            taken.append({path: rows[row - start :] for path, rows in row_values(piece).items()})
            row = start + len(piece)
    if row < num_rows or not taken or len({tuple(piece) for piece in taken}) > 1:
        return None
    whole = {path: np.concatenate([piece[path] for piece in taken]) for path in taken[0]}
    classes = max((piece.classes for _, piece in pieces), key=len)
    keys, labels = whole.pop(layout.KEY), whole.pop(layout.LABEL)
    columns = {path.removeprefix(f"{layout.COLUMNS}/"): rows for path, rows in whole.items()}
    return Listing(keys, labels, classes, columns=columns).head(num_rows)


def _read_classes(file: h5py.File) -> tuple[str, ...]:
    names: list[bytes] = file[layout.CLASSES][:].tolist()
    return tuple(name.decode("utf-8", "surrogateescape") for name in names)


def merge_listing(root: Path, stored: Listing, listed: Listing) -> Listing:
    """Reorder a listing: rows of the store first, in its order, then new rows.

    Rows of the store keep their position, label and columns. New rows follow in bytewise order of
    their keys, as in `listed`, and new classes follow the known ones. Raises StoreMismatchError if
    rows of the store are missing, or have another label or other columns.
    """
    _refuse_other_columns(root, stored, listed)
    before, now = row_values(stored), row_values(listed)
    if stored.classes == listed.classes and all(same_values(before[p], now[p]) for p in before):
        return listed
    position = np.searchsorted(listed.keys, stored.keys)
    is_present = listed.keys[np.minimum(position, len(listed) - 1)] == stored.keys
    if not is_present.all():
        removed = stored.keys[~is_present]
        if is_present.any():
            advice = "Put the missing images back, or choose out=DIR for a new store."
        else:
            first = listed.keys[0].decode("utf-8", "replace")
            advice = (
                f"None of its rows is in it: the store is of other images than {first}. Choose "
                "out=DIR for a new store."
            )
        raise StoreMismatchError(
            f"{root} has {counted(len(removed), 'row whose image is', 'rows whose images are')} no "
            f"longer in the data set, such as {removed[0].decode('utf-8', 'replace')}. {advice}"
        )
    known = set(stored.classes)
    classes = (*stored.classes, *(name for name in listed.classes if name not in known))
    labels = _renumber_labels(listed, classes)
    changed = np.flatnonzero(labels[position] != stored.labels)
    if len(changed):
        row = int(changed[0])
        was, is_now = (
            classes[label] if label >= 0 else "no label"
            for label in (int(stored.labels[row]), int(labels[position[row]]))
        )
        raise StoreMismatchError(
            f"{root} has other labels: {stored.keys[row].decode('utf-8', 'replace')} was {was} "
            f"and is {is_now} now. Choose out=DIR for a new store."
        )
    for name, values in stored.columns.items():
        _refuse_changed_column(root, name, stored.keys, values, listed.columns[name][position])
    is_new = np.ones(len(listed), dtype=bool)
    is_new[position] = False
    return Listing(
        np.concatenate([stored.keys, listed.keys[is_new]]),
        np.concatenate([stored.labels, labels[is_new]]),
        classes,
        listed.skipped,
        None
        if listed.content_tags is None
        else np.concatenate([listed.content_tags[position], listed.content_tags[is_new]]),
        {
            name: np.concatenate([values, listed.columns[name][is_new]])
            for name, values in stored.columns.items()
        },
        label_note=listed.label_note,
    )


def _refuse_other_columns(root: Path, stored: Listing, listed: Listing) -> None:
    """Raise StoreMismatchError if the columns have other names or types."""
    words = {"S": "text", "b": "booleans", "i": "whole numbers", "f": "numbers"}
    before, now = (
        {name: words[values.dtype.kind] for name, values in listing.columns.items()}
        for listing in (stored, listed)
    )
    if before != now:
        was, is_now = (
            ", ".join(f"{name} ({kind})" for name, kind in columns.items()) or "none"
            for columns in (before, now)
        )
        raise StoreMismatchError(
            f"{root} has other columns (data.columns): it has {was}; the data set now gives "
            f"{is_now}. Give those of the store to resume it, or choose out=DIR for a new one."
        )


def _refuse_changed_column(
    root: Path,
    name: str,
    keys: npt.NDArray[np.bytes_],
    before: Array,
    now: Array,
) -> None:
    """Raise StoreMismatchError if a row has another value in a column."""
    if same_values(before, now):
        return
    row = int(np.flatnonzero((before != now) & ~((before != before) & (now != now)))[0])
    was, is_now = (
        values[row].decode("utf-8", "replace") if values.dtype.kind == "S" else values[row].item()
        for values in (before, now)
    )
    raise StoreMismatchError(
        f"{root} has other values in the column {name}: {keys[row].decode('utf-8', 'replace')} had "
        f"{was!r} and has {is_now!r} now. Choose out=DIR for a new store."
    )


def _renumber_labels(listed: Listing, classes: tuple[str, ...]) -> npt.NDArray[np.int64]:
    """Labels of a listing as indices into other classes."""
    number = {name: i for i, name in enumerate(classes)}
    table = np.array([*(number[name] for name in listed.classes), -1], dtype=np.int64)
    labels: npt.NDArray[np.int64] = table[listed.labels]  # -1 picks the last entry
    return labels
