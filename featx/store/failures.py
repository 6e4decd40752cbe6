"""Failed rows of a store: /failures in its HDF5 files, and failures.csv."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import h5py
import numpy as np

from featx.base import csv_line, name_text
from featx.store import layout
from featx.types import Failure, Status


def write_failures(file: h5py.File, failures: Iterable[Failure]) -> None:
    """Write /failures: row, exception name and message of each failed row, with a checksum."""
    ordered = sorted(failures, key=lambda failure: failure.row)
    printable = [f.message.encode("utf-8", "backslashreplace").decode() for f in ordered]
    columns = (
        np.array([f.row for f in ordered], dtype=np.int64),
        layout.text_array([f.error for f in ordered]),
        layout.text_array(printable),
    )
    group = file.create_group(layout.FAILURES)
    for name, values in zip(layout.FAILURE_COLUMNS, columns, strict=True):
        group[name] = values
    file[f"{layout.CHECKSUMS}/{layout.FAILURES}"] = np.array([layout.checksum(*columns)], np.uint64)


def read_failures(file: h5py.File) -> list[Failure]:
    """Read /failures, joined with the keys and statuses of the same file."""
    if not file.attrs.get("num_failures", 1):
        return []
    group = file[layout.FAILURES]
    start = int(file.attrs.get("start", 0))
    keys, status = file[layout.KEY], file[layout.STATUS]
    return [
        Failure(
            row=int(row),
            key=bytes(keys[row - start]),
            status=Status(int(status[row - start])),
            error=error.decode("utf-8", "surrogateescape"),
            message=message.decode("utf-8", "surrogateescape"),
        )
        for row, error, message in zip(
            group["row"][:], group["error"][:], group["message"][:], strict=True
        )
    ]


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
