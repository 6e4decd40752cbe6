"""Files of the jobs that compare rows and layers: the store that they read, and their results."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from featx.base import Table, log_message, number_text, printable, write_csv
from featx.config import Config
from featx.storage import AtomicFolder
from featx.store import FeatureStore, layout, only_layer, read_result, result_json
from featx.types import Json

NUM_SHOWN = 10
"""Number of rows of a ranking that are printed and shown in the report; its table has all."""


def open_input(path: str | Path) -> FeatureStore:
    """Open a store, and warn on stderr if rows are missing.

    A job whose store is refreshed and packed meanwhile ends with an error: rows of both states are
    told apart by the checksums of their images, which the store knows once they were read.
    """
    store = FeatureStore(path, verify="rows")
    _ = store.rows_sha256  # which the store remembers
    if not store.complete:
        log_message(f"{store.root} is not complete; {int(store.ok.sum())} rows are there and ok")
    return store


def chosen_layer(store: FeatureStore, config: Config) -> str:
    """Return the layer that `layers` names; without it that of job=probe, or `embedding`."""
    if config.layers is None and len(store.layers) > 1:
        probed = None
        if (path := store.folder / layout.PROBE).exists():
            probed = read_result(path).get("layer")
        for name in (probed, "embedding"):
            if name in store.layers:
                return str(name)
    return only_layer(store, config.layers)


def result_folder(store: FeatureStore, config: Config) -> AtomicFolder:
    """Create the folder for results: `out`, or one with the name of the job in the store's."""
    disk = AtomicFolder(config.output_folder(store.root, config.job.name))
    disk.make_folder(disk.root)
    return disk


def class_name(store: FeatureStore, row: int) -> str | None:
    """Return the class of a row, or None if it has no label."""
    label = int(store.labels[row])
    return str(store.classes[label]) if label >= 0 else None


def write_json(disk: AtomicFolder, name: str, store: FeatureStore, summary: Json) -> None:
    """Write a result with the digest of the rows of its store, for job=report.

    `open_input` read it before the rows: a store that changes later is then refused by its reader.
    """
    result = {"rows_sha256": store.rows_sha256, **summary}
    disk.replace_unlocked(disk.root / name, result_json(result, indent=1))


def write_ranking(disk: AtomicFolder, name: str, entries: Iterator[Json]) -> Json:
    """Write entries that describe rows as CSV, a line for each after its rank from 1. See
    `write_table`.
    """
    first = next(entries)
    lines = (
        (rank, *(_cell(value, "{:.6g}".format, "") for value in entry.values()))
        for rank, entry in enumerate(chain([first], entries), 1)
    )
    return write_table(disk, name, ("rank", *first), lines)


def write_table(
    disk: AtomicFolder, name: str, header: tuple[str, ...], rows: Iterable[tuple[object, ...]]
) -> Json:
    """Write a CSV file; return the entries of the JSON result that name it. The two are written one
    after the other, so a command that was killed, or ran next to another one, may leave a table
    that does not belong to the result.
    """
    path = disk.root / name
    with disk.stream_file(path) as file:
        write_csv(file, chain([header], rows))
        file.seek(0)
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": str(path), "file_sha256": sha256}


def entries_table(
    header: Sequence[str], names: Sequence[str], entries: Iterable[Json], digits: int
) -> Table:
    """Make a table of some values of entries that describe rows."""
    cells = [
        [printable(_cell(entry[name], lambda x: number_text(x, digits), "-")) for name in names]
        for entry in entries
    ]
    return Table(header, cells, left=2)


def _cell(value: object, number: Callable[[float], str], none: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        return number(value)
    return none if value is None else str(value)
