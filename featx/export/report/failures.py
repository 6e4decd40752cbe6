"""Failed rows by reason, with a few examples of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from featx.export.selection import as_utf8
from featx.store import FeatureStore
from featx.types import Status

SHOWN = 8
"""Maximum number of rows that are shown per reason."""

NOT_OPENED = frozenset({"crashes decoder", "timeout", "too large"})
"""Labels of statuses whose images are not opened again, because that could crash or hang."""


@dataclass(frozen=True)
class FailedRow:
    """One failed row.

    Attributes:
        row: row of the store.
        key: key as UTF-8 text.
        error: name of the exception.
        message: message of the exception.
    """

    row: int
    key: str
    error: str
    message: str


@dataclass(frozen=True)
class Reason:
    """All rows that failed for one reason.

    Attributes:
        status: label of the status.
        count: number of rows.
        opened: whether their images may be read again.
        messages: (message, number of rows), the most frequent first.
        shown: the first rows.
    """

    status: str
    count: int
    opened: bool
    messages: list[tuple[str, int]]
    shown: list[FailedRow]


def reasons_of(store: FeatureStore) -> list[Reason]:
    """Return the reasons of all failed rows, the most frequent first."""
    failures = store.failures
    counts = Counter(failure["status"] for failure in failures)
    # Merged files may have a status without a message.
    told = {failure["row"] for failure in failures}
    failed = np.flatnonzero(~store.ok & (store.status != Status.ABSENT))
    untold = [row for row in failed.tolist() if row not in told]
    failures += [
        {"row": row, "key": str(store.keys[row]), "status": _label(store, row), "error": "",
         "message": ""}
        for row in untold
    ]  # fmt: skip
    counts = Counter(failure["status"] for failure in failures)
    found = []
    for status, count in counts.most_common():
        mine = [failure for failure in failures if failure["status"] == status]
        said = Counter(f"{f['error']}: {f['message']}".strip(": ") for f in mine)
        shown = [
            FailedRow(f["row"], as_utf8(f["key"]), f["error"], f["message"]) for f in mine[:SHOWN]
        ]
        found.append(Reason(status, count, status not in NOT_OPENED, said.most_common(5), shown))
    return found


def _label(store: FeatureStore, row: int) -> str:
    """Return the label of a row's status, also of a status that this featx does not know."""
    value = int(store.status[row])
    return Status(value).label if value in set(Status) else f"status {value}"
