"""Failed rows by reason, with a few of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from featx.export.selection import as_utf8
from featx.store.reader import FeatureStore
from featx.types import Status

SHOWN = 8
"""Rows of a reason that are shown, at the most."""

NOT_OPENED = frozenset(
    {"crashes decoder", "timeout", "too large"}
)  # labels of featx.types.Status: to open them again would do harm once more


@dataclass(frozen=True)
class FailedRow:
    """One failed row: where, which picture, and what the exception said."""

    row: int
    key: str
    error: str
    message: str


@dataclass(frozen=True)
class Reason:
    """All rows that failed for one reason.

    Attributes:
        status: its name, as in /status.
        count: rows.
        opened: whether their pictures may be read again.
        messages: (message, rows), the most frequent ones first.
        shown: the first rows.
    """

    status: str
    count: int
    opened: bool
    messages: list[tuple[str, int]]
    shown: list[FailedRow]


def reasons_of(store: FeatureStore) -> list[Reason]:
    """The reasons, the most frequent one first."""
    failures = store.failures
    counts = Counter(failure["status"] for failure in failures)
    # A merged file may have a status and no message.
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
    value = int(store.status[row])
    return Status(value).label if value in set(Status) else f"status {value}"
