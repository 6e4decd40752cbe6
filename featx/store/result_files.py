"""Results next to the rows: failures.csv, and JSON files that carry their own SHA-256."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import h5py
import numpy as np

from featx.base import csv_line, digest, name_text
from featx.errors import StoreError
from featx.store import layout
from featx.store.hdf5_files import write_values
from featx.types import Failure, Json, Status

_CHECKSUM = "sha256"


def result_json(values: Mapping[str, object], indent: int) -> bytes:
    """Content of a file of results: the values, and the SHA-256 of them as the last entry."""
    text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    sealed = {**values, _CHECKSUM: digest(json.loads(text))}
    data = io.BytesIO()
    # A byte of a name that is not UTF-8 becomes an escape of JSON, \udcff, which reads back as it.
    file = io.TextIOWrapper(data, "utf-8", "backslashreplace", newline="")
    # `dumps` would hold a string of 70 bytes for each number.
    json.dump(sealed, file, indent=indent, ensure_ascii=False, allow_nan=False)
    file.write("\n")
    file.flush()
    return data.getvalue()


def read_result(path: Path) -> dict[str, Any]:
    """Read a file of results; one without a checksum is read as it is.

    Raises StoreError if the file is damaged, and an OSError if it is missing or cannot be read.
    """
    return parse_result(path, path.read_bytes())


def parse_result(path: Path, data: bytes) -> dict[str, Any]:
    """Read the content of a file of results; see `read_result`."""
    try:
        values = dict(json.loads(data.decode("utf-8", "surrogateescape")))
        is_intact = values.pop(_CHECKSUM, None) in (None, digest(values))
    except (ValueError, TypeError) as error:
        raise StoreError(f"{path} is damaged: {error}.") from error
    if not is_intact:
        raise StoreError(
            f"{path} differs from its own sha256: it has changed since it was written. The job "
            "that made it writes it again."
        )
    return values


def result_problems(root: Path) -> Iterator[tuple[Path, str]]:
    """Files of results in the folder of a store that are damaged, each with the problem."""
    for name in layout.RESULTS:
        path = root / name
        if not path.exists():
            continue
        try:
            values = read_result(path)
        except StoreError as error:
            yield path, str(error).removeprefix(f"{path} ").rstrip(".")
            continue
        if name == layout.PROBE:
            # The probe as a whole is made again, so its description is what a repair sets aside.
            for changed in _changed_files(root, values):
                yield path, f"{changed.name} differs from the sha256 in it"


def _changed_files(root: Path, probe: Json) -> Iterator[Path]:
    """Files that probe.json names with a SHA-256, and that differ from it."""
    layers = probe.get("layers", {})
    entries = [probe.get("predictions"), probe.get("few_shot_predictions")]
    entries += [about.get("head") for about in layers.values()]
    for entry in filter(None, entries):
        # Only files that job=probe writes: a stranger's probe.json could name any file.
        path = root / layout.PROBE_HEADS / PurePosixPath(entry["file"]).name
        if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
            yield path


def write_failures(file: h5py.File, failures: Iterable[Failure]) -> None:
    """Write /failures: row, exception name and message of each failed row, with a checksum."""
    ordered = sorted(failures, key=lambda failure: failure.row)
    printable = [f.message.encode("utf-8", "backslashreplace").decode() for f in ordered]
    columns = (
        np.array([f.row for f in ordered], dtype=np.int64),
        layout.text_array([f.error for f in ordered]),
        layout.text_array(printable),
    )
    file.create_group(layout.FAILURES)
    for name, values in zip(layout.FAILURE_COLUMNS, columns, strict=True):
        write_values(file, f"{layout.FAILURES}/{name}", values)
    checksum = np.array([layout.checksum(*columns)], np.uint64)
    write_values(file, f"{layout.CHECKSUMS}/{layout.FAILURES}", checksum)


def read_failures(file: h5py.File) -> list[Failure]:
    """Read /failures, joined with the keys and statuses of the same file."""
    if not file.attrs.get("num_failures", 1):
        return []
    group, sources = file[layout.FAILURES], (file[layout.KEY], file[layout.STATUS])
    rows, *texts = (group[name][:] for name in layout.FAILURE_COLUMNS)
    if not len(rows):
        return []
    places, step = rows - int(file.attrs.get("start", 0)), layout.COLUMN_CHUNK_ROWS
    keys, status = found = [np.zeros(len(rows), source.dtype) for source in sources]
    # Chunk by chunk, as h5py takes 100 us for a single value.
    order = np.argsort(places, kind="stable")
    for some in np.split(order, np.flatnonzero(np.diff(places[order] // step)) + 1):
        first = int(places[some[0]]) // step * step
        for values, source in zip(found, sources, strict=True):
            values[some] = source[first : first + step][places[some] - first]
    columns = (map(name_text, values.tolist()) for values in texts)
    cells = zip(rows.tolist(), keys.tolist(), status.tolist(), *columns, strict=True)
    return [Failure(row, key, Status(number), *text) for row, key, number, *text in cells]


def failures_csv(failures: Sequence[Failure]) -> bytes:
    """Content of failures.csv."""
    text = "row,key,status,error,message\r\n" + csv_rows(failures)
    return text.encode()


def csv_rows(failures: Sequence[Failure]) -> str:
    """Lines of failures.csv: row, key, status name, exception name, message (`csv_cell`)."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    for failure in failures:
        key = name_text(failure.key)
        line = failure.row, key, failure.status.label, failure.error, failure.message
        writer.writerow(csv_line(line))
    return buffer.getvalue()


def read_failures_csv(path: Path) -> dict[int, tuple[str, str, str, str]]:
    """Content of a failures.csv as far as it is readable; see `parse_failures_csv`."""
    try:
        return parse_failures_csv(path.read_bytes().decode("utf-8", "surrogateescape"))
    except OSError:
        return {}


def parse_failures_csv(text: str) -> dict[int, tuple[str, str, str, str]]:
    """Row -> key, status name, exception name and message, as `csv_rows` writes them."""
    found = {}
    with contextlib.suppress(csv.Error):
        for line in csv.reader(io.StringIO(text, newline="")):
            with contextlib.suppress(ValueError):  # the header, or a line that is cut
                row, key, status, error, message = line
                found[int(row)] = (key, status, error, message)
    return found
