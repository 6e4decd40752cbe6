"""Verification of a store: every chunk against its checksum, every row against its status."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from featx.errors import StoreError
from featx.store import layout
from featx.store.checksums import chunks_with_verdict, classes_agree, failures_agree
from featx.store.chunk_table import has_chunk_table
from featx.store.dtypes import from_raw, name_of
from featx.store.hdf5_files import check_hard, check_plain, damage_text, open_hdf5
from featx.store.listing import (
    column_names,
    compare_listing,
    is_column_type,
    listing_identity,
    listing_in,
    read_listing,
    row_values,
    same_values,
)
from featx.store.manifest import (
    DamagedManifestError,
    Manifest,
    Run,
    load_manifest,
    num_runs_of,
    read_manifest,
)
from featx.store.pieces import Pieces
from featx.types import LayerSpec, Listing, Part, Status, StoreHeader


@dataclass(frozen=True)
class Damage:
    """Problem found in a store.

    Attributes:
        path: path of the file.
        what: description of the problem.
        start: first row of the store that is affected.
        stop: row after the last one; equal to `start` if no features are affected.
        layer: only layer that is affected, or None for all.
    """

    path: Path
    what: str
    start: int = 0
    stop: int = 0
    layer: str | None = None


@dataclass
class Report:
    """Result of checking a store.

    Attributes:
        root: folder or file that was checked.
        num_rows: number of rows of the listing.
        num_files: number of checked files.
        num_chunks: number of chunks that were compared with their checksums.
        num_bytes: size of these chunks when decoded, in bytes.
        missing: file names of missing parts.
        damages: problems that were found.
    """

    root: Path
    num_rows: int = 0
    num_files: int = 0
    num_chunks: int = 0
    num_bytes: int = 0
    missing: list[str] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing and nothing is damaged."""
        return not self.missing and not self.damages

    def as_dict(self) -> dict[str, Any]:
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


def check_store(root: Path) -> Report:
    """Check everything in a store.

    Args:
        root: folder of a store, or a features.h5 alone.

    Raises:
        StoreError: there is no store, it has a newer format, or cannot be read now; or a single
            file is no features.h5.
    """
    report = Report(root)
    if root.is_file():
        manifest = _manifest_of_file(root, report)
        listing = _listing_of_file(root, manifest, report) if manifest else None
    else:
        manifest = _manifest_of_folder(root, report)
        listing = _check_listing(root, manifest, report) if manifest else None
    if manifest is None:
        return report
    report.num_rows = manifest.num_rows
    for path, expected in list(_files(root, manifest, report)):
        _check_file(path, expected, listing, report)
    return report


@dataclass(frozen=True)
class _Expected:
    """What a file of the store must contain.

    Attributes:
        start: first row in the store.
        stop: row after the last one.
        header: header of the run.
        identity: digest that the file must carry as its fingerprint.
        codec: codec of the run.
        specs: datasets of the file.
        part: index of the part, or None for features.h5.
        num_runs: number of runs that the file holds.
    """

    start: int
    stop: int
    header: StoreHeader
    identity: str
    codec: str
    specs: tuple[LayerSpec, ...]
    part: int | None
    num_runs: int


def _manifest_of_file(path: Path, report: Report) -> Manifest | None:
    """Manifest that a single features.h5 carries; None and a damage if it is not valid."""
    try:
        with open_hdf5(path) as file:
            if "featx_format" not in file.attrs:
                raise StoreError(f"{path} is an HDF5 file, but not a featx store.")
            if "part" in file.attrs:
                raise StoreError(f"{path} is one part of a store; verify the store's folder.")
            if layout.MANIFEST not in file.attrs:
                raise DamagedManifestError(
                    f"{path} has no attribute {layout.MANIFEST}, which records how its rows were "
                    "made."
                )
            text = bytes(file.attrs[layout.MANIFEST])
        return Manifest.from_json(text, path)
    except DamagedManifestError as error:
        report.damages.append(Damage(path, str(error)))
    except StoreError:
        raise
    except layout.UNREADABLE as error:
        report.damages.append(Damage(path, damage_text(path, error)))
    return None


def _listing_of_file(path: Path, manifest: Manifest, report: Report) -> Listing | None:
    """Listing in a single features.h5; None and a damage if it is not that of the manifest."""
    listing = listing_in(path, manifest.num_rows)
    if listing is not None and manifest.listing_identity not in (None, listing_identity(listing)):
        what = "its keys, labels, classes or columns are not those of the extracted rows"
        report.damages.append(Damage(path, what))
        return None
    return listing


def _manifest_of_folder(root: Path, report: Report) -> Manifest | None:
    """Manifest of a store; None and a damage if no copy of it is valid."""
    manifest, intact = None, True
    path = root / layout.DESCRIPTOR
    try:
        manifest, intact = load_manifest(root)
    except DamagedManifestError as error:
        report.damages.append(Damage(path, str(error)))
        return None
    if manifest is None:
        raise StoreError(f"{root} holds no store: there is no {layout.DESCRIPTOR} in it.")
    if not intact:
        try:
            what = "it is missing" if read_manifest(root) is None else "it is damaged"
        except DamagedManifestError:
            what = "it is damaged"
        report.damages.append(Damage(path, f"{what}; the files of the store hold copies of it"))
    return manifest


def _check_listing(root: Path, manifest: Manifest, report: Report) -> Listing | None:
    """Check samples.h5; return the listing that the runs were made with, or None if it is lost."""
    path = root / layout.LISTING
    identity = manifest.listing_identity
    listing = read_listing(root, manifest.num_rows, identity)
    strange = listing is None or identity not in (None, listing_identity(listing))
    if not path.exists():
        report.damages.append(Damage(path, "it is missing"))
    elif listing is None:
        report.damages.append(Damage(path, f"it does not hold {manifest.num_rows} rows"))
    elif strange:
        report.damages.append(Damage(path, "it is not the listing that the rows were made from"))
    else:
        num_rows, problem = compare_listing(path, listing)
        if problem is None and num_rows < len(listing):
            problem = f"it has {num_rows} rows, the store {len(listing)}"
        if problem is not None:
            report.damages.append(Damage(path, problem))
    if listing is None or strange:
        return None  # the files cannot be compared with it
    if len(np.unique(listing.keys)) != len(listing):
        report.damages.append(Damage(path, "it holds a key twice"))
    return listing


def _files(root: Path, manifest: Manifest, report: Report) -> Iterator[tuple[Path, _Expected]]:
    """Files with rows that a store has, and what they must contain; missing ones are recorded."""
    packed = root if root.is_file() else root / layout.PACKED
    num_packed = 0
    if packed.is_file():
        try:
            with open_hdf5(packed) as file:
                num_packed = num_runs_of(file)
            if num_packed > len(manifest.runs):
                raise StoreError(f"it holds {num_packed} runs, the store {len(manifest.runs)}")
        except (StoreError, *layout.UNREADABLE) as error:
            what = damage_text(packed, error)
            report.damages.append(Damage(packed, what, 0, manifest.num_rows))
            num_packed = 0  # parts that still exist may hold its rows
        else:
            yield packed, _expected_packed(manifest, num_packed)
    if root.is_file():
        return
    files = sorted((root / layout.PARTS).glob(layout.PART_OR_PIECE_GLOB))
    there, pieces = {path.name: path for path in files}, Pieces(path.name for path in files)
    for number, run in enumerate(manifest.runs):
        for part in run.parts():
            name = layout.part_name(part.index)
            if (path := there.pop(name, None)) is not None:
                yield path, _expected_part(run, part)
            elif number >= num_packed:
                report.missing.append(name)
                for rows in pieces.of(part):
                    yield there.pop(layout.piece_name(rows)), _expected_part(run, rows)
    for path in there.values():
        piece = layout.piece_of(path.name)
        if piece is not None and manifest.part_of(piece) is not None:
            continue  # a piece of an existing part, which the next run deletes
        report.damages.append(Damage(path, "the store has no such part"))


def _expected_packed(manifest: Manifest, num_runs: int) -> _Expected:
    """What a features.h5 with the first runs must contain."""
    runs = manifest.runs[:num_runs]
    return _Expected(
        start=0,
        stop=max(run.grid.stop_row for run in runs),
        header=runs[0].header,
        identity=manifest.digest_of(num_runs),
        codec=runs[0].codec,
        specs=tuple({s.name: s for run in reversed(runs) for s in run.layers}.values()),
        part=None,
        num_runs=num_runs,
    )


def _expected_part(run: Run, part: Part) -> _Expected:
    """What the file of a part or piece must contain."""
    return _Expected(
        part.start, part.stop, run.header, run.digest, run.codec, run.layers, part.index, 1
    )


def _check_file(path: Path, expected: _Expected, listing: Listing | None, report: Report) -> None:
    """Check one file with rows and record its damages."""
    whole = (expected.start, expected.stop)
    report.num_files += 1
    try:
        with open_hdf5(path) as file:
            _check_attributes(path, file, expected, report)
            status = _check_columns(path, file, expected, listing, report)
            _check_failures(path, file, expected, status, report)
            if not classes_agree(file):
                what = f"/{layout.CLASSES} differs from its checksum"
                report.damages.append(Damage(path, what))
            if layout.CHUNK_TABLE in file and not has_chunk_table(path):
                report.damages.append(Damage(path, f"/{layout.CHUNK_TABLE} is damaged"))
            check_hard(file, layout.FEATURES)
            names = {spec.name for spec in expected.specs}
            for name in file[layout.FEATURES]:
                if name not in names:
                    report.damages.append(Damage(path, f"the store has no layer {name}"))
            for spec in expected.specs:
                _check_layer(path, file, spec, expected, status, report)
    except layout.UNREADABLE as error:
        report.damages.append(Damage(path, damage_text(path, error), *whole))


def _check_attributes(path: Path, file: h5py.File, expected: _Expected, report: Report) -> None:
    """Check the root attributes; some identify the rows, the others only describe them."""
    wanted = layout.root_attributes(
        expected.header, expected.identity, complete=expected.part is None
    )
    wanted["codec"] = expected.codec
    if expected.part is not None:
        wanted |= {"part": expected.part, "start": expected.start}
    for name, value in wanted.items():
        # An empty value means that featx.json does not contain it.
        if value != "" and (found := file.attrs.get(name)) != value:
            of_rows = name in ("fingerprint", "complete", "part", "start")
            rows = (expected.start, expected.stop) if of_rows else ()
            what = f"its attribute {name} is {_short(found)}, expected {_short(value)}"
            report.damages.append(Damage(path, what, *rows))


def _short(value: object) -> str:
    """Value as text of at most 80 characters, since a config may have a hundred lines."""
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_columns(
    path: Path, file: h5py.File, expected: _Expected, listing: Listing | None, report: Report
) -> npt.NDArray[np.uint8]:
    """Compare /key, /label and /columns with the listing; return /status, (n,) uint8."""
    rows = slice(expected.start, expected.stop)
    num_rows = expected.stop - expected.start
    columns: dict[str, npt.NDArray[Any]] = {}
    if layout.COLUMNS in file:
        check_hard(file, layout.COLUMNS)
    given = [f"{layout.COLUMNS}/{name}" for name in column_names(file)]
    kinds = {
        layout.KEY: "S",
        layout.LABEL: "<i8",
        layout.STATUS: "u1",
        layout.IMAGE_CHECKSUM: "<u8",
    }
    for name in (*kinds, *given):
        found = check_plain(file, name)
        kind = kinds.get(name)
        right = is_column_type(found.dtype) if kind is None else kind in _kinds(found)
        if found.shape != (num_rows,) or not right:
            wanted = kind or "bytes, bool, int64 or float64"
            raise StoreError(
                f"/{name} is {found.shape} {found.dtype}, expected {num_rows} {wanted}"
            )
        chunks = []
        for start, values, good in chunks_with_verdict(file, name):
            chunks.append(values)
            _count(report, values)
            if not good:
                # Without a valid status the rows are unusable; keys can be read from samples.h5.
                length = len(values) if name == layout.STATUS else 0
                first = expected.start + start
                what = f"/{name} differs from its checksum at row {first}"
                report.damages.append(Damage(path, what, first, first + length))
        columns[name] = np.concatenate(chunks)
    if listing is not None:
        of_listing = row_values(listing)
        if set(of_listing) - {layout.KEY, layout.LABEL} != set(given):
            report.damages.append(Damage(path, f"/{layout.COLUMNS} are not those of the listing"))
        for name in [name for name in of_listing if name in columns]:
            if not same_values(columns[name], of_listing[name][rows]):
                report.damages.append(Damage(path, f"/{name} is not that of the listing"))
        check_plain(file, layout.CLASSES)
        classes = layout.text_array(listing.classes).tolist()
        found = file[layout.CLASSES][:].tolist()
        # Rows that were added later may have added classes.
        lacking = expected.stop == len(listing) and len(found) < len(classes)
        if found != classes[: len(found)] or lacking:
            report.damages.append(Damage(path, f"/{layout.CLASSES} is not that of the listing"))
    status: npt.NDArray[np.uint8] = columns[layout.STATUS]
    known = [int(s) for s in Status if s != Status.ABSENT]
    for row in np.flatnonzero(~np.isin(status, known))[:1]:
        first = expected.start + int(row)
        what = f"row {first} has status {status[row]}, which no row of a file can have"
        report.damages.append(Damage(path, what, first, first + 1))
    return status


def _kinds(dataset: h5py.Dataset) -> tuple[Any, ...]:
    """Kind and dtype of a dataset; either may be what is expected."""
    return dataset.dtype.kind, dataset.dtype


def _check_failures(
    path: Path,
    file: h5py.File,
    expected: _Expected,
    status: npt.NDArray[np.uint8],
    report: Report,
) -> None:
    """Compare /failures with /status and with its checksum."""
    failed = np.flatnonzero(status != Status.OK) + expected.start
    columns = {}
    for name in layout.FAILURE_COLUMNS:
        columns[name] = check_plain(file, f"{layout.FAILURES}/{name}")[:]
    found = columns["row"]
    if not np.array_equal(found, failed) or len({len(values) for values in columns.values()}) > 1:
        what = f"/failures names {len(found)} rows, /status {len(failed)}"
        report.damages.append(Damage(path, what, expected.start, expected.stop))
    # A reader that finds 0 here does not read /failures.
    elif (count := file.attrs.get("num_failures")) != len(failed):
        what = f"its attribute num_failures is {count}, /status names {len(failed)}"
        report.damages.append(Damage(path, what, expected.start, expected.stop))
    elif not failures_agree(file):
        what = f"/{layout.FAILURES} differs from its checksum"
        touched = (int(failed[0]), int(failed[-1]) + 1) if len(failed) else ()
        report.damages.append(Damage(path, what, *touched))


def _check_layer(
    path: Path,
    file: h5py.File,
    spec: LayerSpec,
    expected: _Expected,
    status: npt.NDArray[np.uint8],
    report: Report,
) -> None:
    """Check every chunk of a layer: its checksum, values in ok rows, and NaN in failed rows."""
    name = f"{layout.FEATURES}/{spec.name}"
    dataset = check_plain(file, name)
    shape = (expected.stop - expected.start, *spec.shape)
    if dataset.shape != shape or name_of(dataset) != spec.dtype:
        raise StoreError(
            f"/{name} is {dataset.shape} {name_of(dataset)}, expected {shape} {spec.dtype}"
        )
    for attribute, value in layout.layer_attributes(spec).items():
        if (found := dataset.attrs.get(attribute)) != value:
            what = f"/{name} has {attribute} {found}, expected {value}"
            report.damages.append(Damage(path, what))
    for start, raw, good in chunks_with_verdict(file, name):
        _count(report, raw)
        first = expected.start + start
        if not good:
            what = f"/{name} differs from its checksum at row {first}"
            report.damages.append(Damage(path, what, first, first + len(raw), spec.name))
            continue
        values = from_raw(raw, spec.dtype).reshape(len(raw), -1)
        ok = status[start : start + len(raw)] == Status.OK
        wrong = ok & ~np.isfinite(values).all(1)
        if expected.num_runs == 1:
            # With several runs, a row may have failed in another run than that of this layer.
            wrong |= ~ok & ~np.isnan(values).all(1)
        for row in np.flatnonzero(wrong)[:1]:
            at = first + int(row)
            said = Status(int(status[start + row])).label
            what = f"/{name}: row {at} has status {said}, which contradicts its values"
            report.damages.append(Damage(path, what, first, first + len(raw), spec.name))


def _count(report: Report, values: npt.NDArray[Any]) -> None:
    """Count a chunk that was compared."""
    report.num_chunks += 1
    report.num_bytes += values.nbytes
