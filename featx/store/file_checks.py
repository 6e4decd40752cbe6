"""Checks of one file of a store: attributes, columns, failures and every chunk of its layers."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt

from featx.errors import StoreError
from featx.store import layout
from featx.store.chunk_table import find_table
from featx.store.dtypes import dtype_name, from_raw
from featx.store.hdf5_files import (
    check_hard_links,
    chunks_with_verdict,
    classes_agree,
    damage_text,
    failures_agree,
    open_hdf5,
    open_plain_dataset,
    open_raw,
)
from featx.store.layout import geometry_values
from featx.store.listing import is_column_type, row_values, same_values
from featx.store.result_files import read_failures
from featx.store.row_file import RowFile
from featx.types import Array, Failure, Listing, Status, with_features


@dataclass(frozen=True)
class Damage:
    """Problem found in a store.

    Rows [start, stop) are affected, none if the two are equal; `layer` is None for all layers.
    """

    path: Path
    what: str
    start: int = 0
    stop: int = 0
    layer: str | None = None


@dataclass
class DamageReport:
    """Result of checking a store.

    Attributes:
        num_chunks: number of chunks that were compared with their checksums.
        num_bytes: size of these chunks when decoded, in bytes.
        missing: file names of missing parts.
        failures: row -> failure, of all files that were read.
    """

    root: Path
    num_rows: int = 0
    num_files: int = 0
    num_chunks: int = 0
    num_bytes: int = 0
    missing: list[str] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    failures: dict[int, Failure] = field(default_factory=dict)

    def add(
        self, path: Path, what: str, start: int = 0, stop: int = 0, layer: str | None = None
    ) -> None:
        """Record a `Damage`."""
        self.damages.append(Damage(path, what, start, stop, layer))

    @property
    def complete(self) -> bool:
        """Whether nothing is missing and nothing is damaged."""
        return not self.missing and not self.damages

    @property
    def has_sound_rows(self) -> bool:
        """Whether at most results of jobs are damaged."""
        return all(damage.path.name in layout.RESULTS for damage in self.damages)

    def as_dict(self) -> dict[str, object]:
        """Content of the report as JSON types."""
        return {
            "store": str(self.root),
            "complete": self.complete,
            "rows": self.num_rows,
            "files": self.num_files,
            "chunks": self.num_chunks,
            "bytes": self.num_bytes,
            "missing": self.missing,
            "damages": [
                {"file": d.path.name, "what": d.what, "rows": [d.start, d.stop]}
                for d in self.damages
            ],
        }


def check_file(
    path: Path, expected: RowFile, listing: Listing | None, report: DamageReport
) -> None:
    """Check one file with rows and record its damages."""
    all_rows = (expected.start, expected.stop)
    report.num_files += 1
    try:
        with open_hdf5(path) as file:
            _check_attributes(path, file, expected, report)
            status = _check_columns(path, file, expected, listing, report)
            _check_failures(path, file, expected, status, report)
            if not classes_agree(file):
                report.add(path, f"/{layout.CLASSES} differs from its checksum")
            if layout.CHUNK_TABLE in file:
                with contextlib.closing(open_raw(path)) as raw:
                    if find_table(raw) is None:
                        report.add(path, f"/{layout.CHUNK_TABLE} is damaged")
            check_hard_links(file, layout.FEATURES)
            for name in file[layout.FEATURES]:
                if name not in expected.layers:
                    report.add(path, f"the store has no layer {name}")
            for name in expected.layers:
                _check_layer(path, file, name, expected, status, report)
    except layout.UNREADABLE as error:
        report.add(path, damage_text(path, error), *all_rows)


def _check_attributes(path: Path, file: h5py.File, expected: RowFile, report: DamageReport) -> None:
    """Check the root attributes; some identify the rows, the others only describe them."""
    for name, value in expected.attributes.items():
        # An empty value means that featx.json does not contain it.
        if value != "" and (stored := file.attrs.get(name)) != value:
            identifies_rows = name in ("fingerprint", "complete", "part", "start")
            rows = (expected.start, expected.stop) if identifies_rows else ()
            what = f"its attribute {name} is {_short(stored)}, expected {_short(value)}"
            report.add(path, what, *rows)


def _short(value: object) -> str:
    """Value as text of at most 80 characters, since a config may have a hundred lines."""
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_columns(
    path: Path,
    file: h5py.File,
    expected: RowFile,
    listing: Listing | None,
    report: DamageReport,
) -> npt.NDArray[np.uint8]:
    """Compare /key, /label and /columns with the listing; return /status, (n,) uint8."""
    rows = slice(expected.start, expected.stop)
    num_rows = len(expected)
    columns: dict[str, Array] = {}
    column_paths = []
    if layout.COLUMNS in file:
        check_hard_links(file, layout.COLUMNS)
        column_paths = [f"{layout.COLUMNS}/{name}" for name in file[layout.COLUMNS]]
    kinds = {
        layout.KEY: "S",
        layout.LABEL: "<i8",
        layout.STATUS: "u1",
        layout.IMAGE_CHECKSUM: "<u8",
    }
    for name in (*kinds, *column_paths):
        dataset = open_plain_dataset(file, name)
        kind = kinds.get(name)
        found = dataset.dtype
        is_valid = is_column_type(found) if kind is None else kind in (found.kind, found)
        if dataset.shape != (num_rows,) or not is_valid:
            wanted = kind or "bytes, bool, int64 or float64"
            raise StoreError(
                f"/{name} is {dataset.shape} {dataset.dtype}, expected {num_rows} {wanted}"
            )
        chunks = []
        for start, values, good in chunks_with_verdict(file, name):
            chunks.append(values)
            _count_chunk(report, values)
            if not good:
                # Without a valid status the rows are unusable; keys can be read from samples.h5.
                length = len(values) if name == layout.STATUS else 0
                first = expected.start + start
                what = f"/{name} differs from its checksum at row {first}"
                report.add(path, what, first, first + length)
        columns[name] = np.concatenate(chunks)
    if listing is not None:
        listed = row_values(listing)
        if set(listed) - {layout.KEY, layout.LABEL} != set(column_paths):
            report.add(path, f"/{layout.COLUMNS} are not those of the listing")
        for name in [name for name in listed if name in columns]:
            if not same_values(columns[name], listed[name][rows]):
                report.add(path, f"/{name} is not that of the listing")
        open_plain_dataset(file, layout.CLASSES)
        classes = layout.text_array(listing.classes).tolist()
        stored_classes = file[layout.CLASSES][:].tolist()
        # Rows that were added later may have added classes.
        is_short = expected.stop == len(listing) and len(stored_classes) < len(classes)
        if stored_classes != classes[: len(stored_classes)] or is_short:
            report.add(path, f"/{layout.CLASSES} is not that of the listing")
    status: npt.NDArray[np.uint8] = columns[layout.STATUS]
    known = [int(s) for s in Status if s != Status.ABSENT]
    for row in np.flatnonzero(~np.isin(status, known))[:1]:
        first = expected.start + int(row)
        what = f"row {first} has status {status[row]}, which no row of a file can have"
        report.add(path, what, first, first + 1)
    return status


def _check_failures(
    path: Path,
    file: h5py.File,
    expected: RowFile,
    status: npt.NDArray[np.uint8],
    report: DamageReport,
) -> None:
    """Compare /failures with /status and with its checksum."""
    failed = np.flatnonzero(~with_features(status)) + expected.start
    columns = {}
    for name in layout.FAILURE_COLUMNS:
        columns[name] = open_plain_dataset(file, f"{layout.FAILURES}/{name}")[:]
    failed_rows = columns["row"]
    lengths = {len(values) for values in columns.values()}
    if not np.array_equal(failed_rows, failed) or len(lengths) > 1:
        what = f"/failures names {len(failed_rows)} rows, /status {len(failed)}"
        report.add(path, what, expected.start, expected.stop)
    # A reader that finds 0 here does not read /failures.
    elif (count := file.attrs.get("num_failures")) != len(failed):
        what = f"its attribute num_failures is {count}, /status names {len(failed)}"
        report.add(path, what, expected.start, expected.stop)
    elif not failures_agree(file):
        what = f"/{layout.FAILURES} differs from its checksum"
        touched = (int(failed[0]), int(failed[-1]) + 1) if len(failed) else ()
        report.add(path, what, *touched)
    else:
        for failure in read_failures(file):
            report.failures.setdefault(failure.row, failure)


def _check_layer(
    path: Path,
    file: h5py.File,
    layer: str,
    expected: RowFile,
    status: npt.NDArray[np.uint8],
    report: DamageReport,
) -> None:
    """Check every chunk of a layer: its checksum, values in ok rows, and NaN in failed rows."""
    (spec, run), name = expected.layers[layer], f"{layout.FEATURES}/{layer}"
    dataset = open_plain_dataset(file, name)
    shape = (len(expected), *spec.shape)
    if dataset.shape != shape or dtype_name(dataset) != spec.dtype:
        raise StoreError(
            f"/{name} is {dataset.shape} {dtype_name(dataset)}, expected {shape} {spec.dtype}"
        )
    wanted = layout.layer_attributes(spec)
    if "token_grid" in dataset.attrs:  # a file packed by an older release has no places of tokens
        wanted |= geometry_values(run.tokens.get(layer))
    for attribute, value in wanted.items():
        stored = dataset.attrs.get(attribute)
        if (stored.tolist() if isinstance(stored, np.ndarray) else stored) != value:
            report.add(path, f"/{name} has {attribute} {stored}, expected {value}")
    for start, raw, good in chunks_with_verdict(file, name):
        _count_chunk(report, raw)
        first = expected.start + start
        if not good:
            what = f"/{name} differs from its checksum at row {first}"
            report.add(path, what, first, first + len(raw), layer)
            continue
        values = from_raw(raw, spec.dtype).reshape(len(raw), -1)
        ok = with_features(status[start : start + len(raw)])
        wrong = ok & ~np.isfinite(values).all(1)
        if len(expected.runs) == 1:
            # With several runs, a row may have failed in another run than that of this layer.
            wrong |= ~ok & ~np.isnan(values).all(1)
        for row in np.flatnonzero(wrong)[:1]:
            label = Status(int(status[start + row])).label
            what = (
                f"/{name}: row {first + int(row)} has status {label}, which contradicts its values"
            )
            report.add(path, what, first, first + len(raw), layer)


def _count_chunk(report: DamageReport, values: Array) -> None:
    report.num_chunks += 1
    report.num_bytes += values.nbytes
