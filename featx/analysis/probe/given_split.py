"""Split that a column of the store or a CSV file states (probe.split=column)."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.probe import splits
from featx.analysis.probe.labelled_rows import LabelledRows
from featx.analysis.probe.splits import Split
from featx.base import csv_cell
from featx.config import Config
from featx.errors import DataError, counted

ROLES = {"train": "train", "test": "test", "validation": "validation", "val": "validation"}
"""Texts that a split file or column may contain, and their meaning."""


def given_split(
    config: Config,
    training: LabelledRows,
    groups: npt.NDArray[np.int64] | None,
    notes: list[str],
) -> Split:
    """Make a split from probe.split_column or probe.split_file."""
    keys = training.store.keys[training.rows]
    if (column := config.probe.split_column) is not None:
        where = f"probe.split_column={column}"
        roles = roles_of(training.store.column(column)[training.rows], where)
        if unnamed := int((roles == "").sum()):
            notes.append(
                counted(unnamed, "labelled row", "labelled rows")
                + f" for which {column} is empty: left out"
            )
    else:
        path = Path(config.probe.split_file or "").expanduser()
        where = f"probe.split_file={path}"
        roles, unknown = read_split_file(path, keys.tolist())
        if unknown:
            notes.append(
                f"{counted(unknown, f'key of {path} is', f'keys of {path} are')} not among the "
                "labelled rows of the store"
            )
        if unnamed := int((roles == "").sum()):
            notes.append(f"{counted(unnamed, 'labelled row')} without a split in {path}: left out")
    sides = {role: np.flatnonzero(roles == role) for role in ("train", "validation", "test")}
    for role in ("train", "test"):
        if not len(sides[role]):
            raise DataError(
                f"{where} names no labelled row of the store for {role}. Keys are those of the "
                f"store, such as {str(keys[0])!r}."
            )
    return splits.split_from_places(
        training.y,
        sides["train"],
        sides["validation"],
        sides["test"],
        config.probe.validation_share,
        config.seed,
        groups,
    )


def roles_of(texts: npt.NDArray[Any], where: str) -> npt.NDArray[np.str_]:
    """Parse a column of a store as roles.

    Returns:
        (n,) 'train', 'validation', 'test', or '' for an empty value.
    """
    roles = np.empty(len(texts), dtype="U10")
    for text in np.unique(texts).tolist():
        if text != "" and text not in ROLES:
            raise DataError(f"{where} is {text!r}; expected train, validation or test.")
        roles[texts == text] = ROLES.get(text, "")
    return roles


def read_split_file(path: Path, keys: Sequence[str]) -> tuple[npt.NDArray[np.str_], int]:
    """Read a CSV file with the columns `key` and `split`.

    Returns:
        (n,) 'train', 'validation', 'test', or '' for a key that the file gives no split; and the
        number of keys with a split in the file that are not among `keys`.
    """
    try:
        with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            reader = csv.DictReader(file)
            missing_columns = {"key", "split"} - set(reader.fieldnames or ())
            if missing_columns:
                raise DataError(
                    f"probe.split_file={path} has no column "
                    f"{' and '.join(sorted(missing_columns))}; its "
                    f"first line is {','.join(reader.fieldnames or ())!r}."
                )
            role_of_key: dict[str, str] = {}
            for line in reader:
                key, role = line["key"], (line["split"] or "").strip()
                if role == "" and line["split"] is not None:
                    continue  # a row without a split; a line that ends before it is an error
                if role not in ROLES:
                    raise DataError(
                        f"probe.split_file={path}, line {reader.line_num}: split is {role!r}, "
                        "expected train, validation or test."
                    )
                if role_of_key.setdefault(key, ROLES[role]) != ROLES[role]:
                    raise DataError(f"probe.split_file={path} names {key!r} for two splits.")
    except OSError as error:
        raise DataError(f"probe.split_file={path} cannot be read: {error.strerror}.") from error
    except csv.Error as error:
        raise DataError(f"probe.split_file={path} is no CSV file: {error}.") from error
    # predictions.csv has the cells of `csv_cell`, a file of a user may have the keys themselves.
    names = [name if (name := csv_cell(key)) in role_of_key else key for key in keys]
    roles = np.array([role_of_key.get(name, "") for name in names], dtype=np.str_)
    return roles, len(role_of_key.keys() - set(names))
