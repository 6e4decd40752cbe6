"""Results of other jobs in the folder of a store, as report and exports read them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from featx.base import csv_cell
from featx.errors import StoreError
from featx.store import FeatureStore, read_result


def result_path(store: FeatureStore, file: str) -> Path:
    """Return the path of a file of results, which is named below the folder of the store."""
    from featx.analysis.probe import output_folder  # which imports torch

    return output_folder(store) / file


def result_of(store: FeatureStore, file: str, log: Callable[[str], None]) -> dict[str, Any] | None:
    """Read the result file of a job, whose name has that of the job as its stem. Return None if the
    job has not run, or on another state of the store, which is logged.
    """
    path = result_path(store, file)
    try:
        result = read_result(path)
    except FileNotFoundError:
        return None
    if result["fingerprint"] != str(store.attrs.get("fingerprint", "")):
        log(f"{path} belongs to another state of the store: run job={path.stem} again")
        return None
    return result


def lines_of(store: FeatureStore, job: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Read the table of a job, line by line, with the row of the store that each is of. Raises
    StoreError if the table is missing.
    """
    path = result_path(store, f"{job}/{job}.csv")
    if not path.is_file():
        raise StoreError(f"{path} is missing: run job={job} again, which writes it.")
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            row = int(line["row"])
            if csv_cell(str(store.keys[row])) == line["key"]:
                yield row, line
