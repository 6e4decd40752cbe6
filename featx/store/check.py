"""Is a store what it says? Every chunk against its checksum, every row against its status."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from featx.errors import StoreError
from featx.store import layout
from featx.store.dtypes import from_raw, name_of, read_raw
from featx.store.files import check_hard, check_plain, damage_text, open_hdf5
from featx.store.listing import compare_listing, listing_identity, read_listing
from featx.store.manifest import (
    DamagedManifestError,
    Manifest,
    load_manifest,
    num_runs_of,
    read_manifest,
)
from featx.types import LayerSpec, Listing, Status


@dataclass(frozen=True)
class Damage:
    """Something in a store that is not as it should be.

    Attributes:
        path: the file.
        what: the trouble in words.
        start, stop: the rows of the store that it touches; equal where no feature is touched.
        layer: the only layer it touches, None for all.
    """

    path: Path
    what: str
    start: int = 0
    stop: int = 0
    layer: str | None = None


@dataclass
class Report:
    """What was found in a store.

    Attributes:
        num_rows: of the listing.
        missing: names of the parts that are not there.
        num_chunks, num_bytes: compared with their checksums, as decoded.
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
        """JSON types."""
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


def check_store(root: Path, tell: Callable[[int, int], None] | None = None) -> Report:
    """Look at everything in a store.

    Args:
        root: its folder, or a packed file alone.
        tell: called with (files done, files in all) after each file.

    Raises:
        StoreError: there is no store, it is of a newer format, or cannot be read now.
    """
    report = Report(root)
    if root.is_file():
        manifest = _manifest_of_file(root, report)
        listing = None
    else:
        manifest = _manifest_of_folder(root, report)
        listing = _check_listing(root, manifest, report) if manifest else None
    if manifest is None:
        return report
    report.num_rows = manifest.num_rows
    files = list(_files(root, manifest, report))
    for number, (path, expected) in enumerate(files):
        _check_file(path, expected, listing, report)
        if tell is not None:
            tell(number + 1, len(files))
    return report


@dataclass(frozen=True)
class _Expected:
    """What a file of the store has to be."""

    start: int
    stop: int
    identity: str
    specs: tuple[LayerSpec, ...]
    part: int | None
    num_runs: int


def _manifest_of_file(path: Path, report: Report) -> Manifest | None:
    """The runs of a packed file that stands alone."""
    try:
        with open_hdf5(path) as file:
            text = file.attrs[layout.MANIFEST]
        return Manifest.from_json(bytes(text), path)
    except (DamagedManifestError, *layout.UNREADABLE) as error:
        report.damages.append(Damage(path, damage_text(path, error)))
        return None


def _manifest_of_folder(root: Path, report: Report) -> Manifest | None:
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
        report.damages.append(Damage(path, f"{what}; the files of the store carry copies of it"))
    return manifest


def _check_listing(root: Path, manifest: Manifest, report: Report) -> Listing | None:
    """The listing, after a look whether it is the one that the runs were made with."""
    path = root / layout.LISTING
    listing = read_listing(root, manifest.num_rows)
    if not path.exists():
        report.damages.append(Damage(path, "it is missing"))
    elif listing is None or (problem := compare_listing(path, listing)[1]) is not None:
        what = "it cannot be read" if listing is None else problem
        report.damages.append(Damage(path, str(what)))
    if listing is None:
        return None
    if len(np.unique(listing.keys)) != len(listing):
        report.damages.append(Damage(path, "keys stand in it twice"))
    latest = max(manifest.runs, key=lambda run: run.grid.stop_row)
    identity = latest.header.fingerprint.get("listing")
    if identity is not None and identity != listing_identity(listing):
        report.damages.append(Damage(path, "it is not the listing that the rows were made from"))
    return listing


def _files(root: Path, manifest: Manifest, report: Report) -> Iterator[tuple[Path, _Expected]]:
    """The files with rows that a store should have; those that are not there are noted."""
    packed = root if root.is_file() else root / layout.PACKED
    num_packed = 0
    if packed.is_file():
        try:
            with open_hdf5(packed) as file:
                num_packed = num_runs_of(file)
        except (StoreError, *layout.UNREADABLE) as error:
            what = damage_text(packed, error)
            report.damages.append(Damage(packed, what, 0, manifest.num_rows))
            num_packed = len(manifest.runs)
        else:
            runs = manifest.runs[:num_packed]
            stop = max(run.grid.stop_row for run in runs)
            specs = tuple({s.name: s for run in reversed(runs) for s in run.layers}.values())
            identity = manifest.digest_of(num_packed)
            yield packed, _Expected(0, stop, identity, specs, None, num_packed)
    known = set()
    for run in manifest.runs[num_packed:]:
        for part in run.parts():
            path = root / layout.PARTS / layout.part_name(part.index)
            known.add(path.name)
            if path.exists():
                yield path, _Expected(part.start, part.stop, run.digest, run.layers, part.index, 1)
            else:
                report.missing.append(path.name)
    if root.is_dir():
        for path in sorted((root / layout.PARTS).glob(layout.PART_GLOB)):
            if path.name not in known:
                report.damages.append(Damage(path, "the store has no such part"))


def _check_file(path: Path, expected: _Expected, listing: Listing | None, report: Report) -> None:
    whole = (expected.start, expected.stop)
    report.num_files += 1
    try:
        with open_hdf5(path) as file:
            for what in _wrong_attributes(file, expected):
                report.damages.append(Damage(path, what, *whole))
            status = _check_columns(path, file, expected, listing, report)
            _check_failures(path, file, expected, status, report)
            check_hard(file, layout.FEATURES)
            names = {spec.name for spec in expected.specs}
            for name in file[layout.FEATURES]:
                if name not in names:
                    report.damages.append(Damage(path, f"the store has no layer {name}"))
            for spec in expected.specs:
                _check_layer(path, file, spec, expected, status, report)
    except layout.UNREADABLE as error:
        report.damages.append(Damage(path, damage_text(path, error), *whole))


def _wrong_attributes(file: h5py.File, expected: _Expected) -> Iterator[str]:
    wanted: Mapping[str, Any] = {
        "fingerprint": expected.identity,
        "complete": expected.part is None,
        **({} if expected.part is None else {"part": expected.part, "start": expected.start}),
    }
    for name, value in wanted.items():
        if (found := file.attrs.get(name)) != value:
            yield f"its attribute {name} is {found}, expected {value}"


def _check_columns(
    path: Path, file: h5py.File, expected: _Expected, listing: Listing | None, report: Report
) -> npt.NDArray[np.uint8]:
    """Compare /key and /label with the listing; returns /status."""
    rows = slice(expected.start, expected.stop)
    num_rows = expected.stop - expected.start
    columns: dict[str, npt.NDArray[Any]] = {}
    for name in (layout.KEY, layout.LABEL, layout.STATUS):
        check_plain(file, name)
        if file[name].shape != (num_rows,):
            raise StoreError(f"/{name} has shape {file[name].shape}, expected ({num_rows},)")
        chunks = []
        for start, values, good in chunks_with_verdict(file, name):
            chunks.append(values)
            _count(report, values)
            if not good:
                # A status that cannot be trusted says nothing of the rows; keys are in samples.h5.
                length = len(values) if name == layout.STATUS else 0
                first = expected.start + start
                what = f"/{name} differs from its checksum at row {first}"
                report.damages.append(Damage(path, what, first, first + length))
        columns[name] = np.concatenate(chunks)
    if listing is not None:
        for name, values in ((layout.KEY, listing.keys), (layout.LABEL, listing.labels)):
            if not np.array_equal(columns[name], values[rows]):
                report.damages.append(Damage(path, f"/{name} is not that of {layout.LISTING}"))
    status: npt.NDArray[np.uint8] = columns[layout.STATUS]
    known = [int(s) for s in Status if s != Status.ABSENT]
    for row in np.flatnonzero(~np.isin(status, known))[:1]:
        first = expected.start + int(row)
        what = f"row {first} has status {status[row]}, which no row of a file can have"
        report.damages.append(Damage(path, what, first, first + 1))
    return status


def _check_failures(
    path: Path,
    file: h5py.File,
    expected: _Expected,
    status: npt.NDArray[np.uint8],
    report: Report,
) -> None:
    check_plain(file, f"{layout.FAILURES}/row")
    found = file[f"{layout.FAILURES}/row"][:]
    failed = np.flatnonzero(status != Status.OK) + expected.start
    if not np.array_equal(found, failed):
        what = f"/failures names {len(found)} rows, /status {len(failed)}"
        report.damages.append(Damage(path, what, expected.start, expected.stop))


def _check_layer(
    path: Path,
    file: h5py.File,
    spec: LayerSpec,
    expected: _Expected,
    status: npt.NDArray[np.uint8],
    report: Report,
) -> None:
    """Every chunk of a layer: its checksum, no NaN where the row is ok, NaN where it failed."""
    name = f"{layout.FEATURES}/{spec.name}"
    dataset = check_plain(file, name)
    shape = (expected.stop - expected.start, *spec.shape)
    if dataset.shape != shape or name_of(dataset) != spec.dtype:
        raise StoreError(
            f"/{name} is {dataset.shape} {name_of(dataset)}, expected {shape} {spec.dtype}"
        )
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
            # In a store of several runs a row may have failed in another run than this layer's.
            wrong |= ~ok & ~np.isnan(values).all(1)
        for row in np.flatnonzero(wrong)[:1]:
            at = first + int(row)
            said = Status(int(status[start + row])).label
            what = f"/{name}: row {at} is {said} by its status, and its values say otherwise"
            report.damages.append(Damage(path, what, first, first + len(raw), spec.name))


def _count(report: Report, values: npt.NDArray[Any]) -> None:
    report.num_chunks += 1
    report.num_bytes += values.nbytes


def row_datasets(file: h5py.File) -> list[str]:
    """Every dataset with one entry per row: the columns, then the features."""
    features = [f"{layout.FEATURES}/{name}" for name in file[layout.FEATURES]]
    return [layout.KEY, layout.LABEL, layout.STATUS, *features]


def chunks_with_verdict(
    file: h5py.File, path: str, first_row: int = 0
) -> Iterator[tuple[int, npt.NDArray[Any], bool]]:
    """The rows of a dataset, chunk by chunk, and whether they agree with their checksum.

    Args:
        file: a part or a packed file.
        path: of the dataset.
        first_row: where to begin, the first row of a chunk.

    Yields:
        the first row of a chunk, its rows as they are stored (bfloat16 as uint16), the verdict.
    """
    dataset, sums = file[path], file[f"{layout.CHECKSUMS}/{path}"][:]
    step = dataset.chunks[0]
    if len(sums) != -(-len(dataset) // step):
        raise StoreError(f"/{path} has {len(sums)} checksums for {len(dataset)} rows")
    for start in range(first_row, len(dataset), step):
        try:
            rows = read_raw(dataset, start, min(start + step, len(dataset)))
        except OSError as error:
            if not layout.is_damage(error):
                raise
            # A chunk that its filter cannot decode; the rows stand in for what is lost.
            shape = (min(step, len(dataset) - start), *dataset.shape[1:])
            yield start, np.zeros(shape, dataset.dtype), False
            continue
        yield start, rows, bool(layout.chunk_checksums(rows, step)[0] == sums[start // step])


def good_chunks(
    file: h5py.File, path: str, first_row: int = 0
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """The rows of a dataset, chunk by chunk. Raises StoreError at the first that is damaged."""
    for start, rows, good in chunks_with_verdict(file, path, first_row):
        if not good:
            raise StoreError(f"/{path} differs from its checksum at row {start}.")
        yield start, rows


def check_chunks(file: h5py.File) -> None:
    """Compare all chunks with their checksums. Raises StoreError at the first that is damaged."""
    for path in row_datasets(file):
        for _ in good_chunks(file, path):
            pass
