"""Failed rows by reason, with a few examples of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from featx.store import FeatureStore
from featx.types import Status

SHOWN = 8
"""Maximum number of rows that are shown per reason."""

NOT_OPENED = frozenset({"crashes decoder", "timeout", "too large"})
"""Labels of statuses whose images are not opened again, because that could crash or hang."""


_EXPLAINED = {
    Status.MISSING: ("Missing", "The file is listed and cannot be found."),
    Status.EMPTY: ("Empty", "The file has no bytes."),
    Status.UNSUPPORTED: ("Not an image", "The file has no known image format."),
    Status.DECODE_ERROR: ("Not decodable", "The format is known, its data are damaged."),
    Status.TRUNCATED: (
        "Truncated",
        "The file ends early, as after an interrupted download or copy. The missing part is grey.",
    ),
    Status.TOO_LARGE: ("Too large", "The image has more pixels than data.max_pixels allows."),
    Status.TRANSFORM_ERROR: ("Not preprocessed", "The transform of the model failed."),
    Status.NON_FINITE: ("Not finite", "The model returned NaN or infinity for this image."),
    Status.TIMEOUT: ("Too slow", "Decoding took longer than data.timeout_s."),
    Status.CRASHES_DECODER: ("Crashes the decoder", "Decoding ended the process."),
}
"""Status -> title and explanation for people."""

_PLAIN = frozenset({"empty", "unsupported", "truncated"})
"""Labels of statuses whose messages add nothing to the explanation."""


@dataclass(frozen=True)
class Reason:
    """All rows that failed for one reason.

    Attributes:
        title: name of the status for people.
        opened: whether their images may be read again.
        partial: whether a part of their images may be readable.
        plain: whether the explanation says all that the messages say.
        messages: (message, number of rows), the most frequent first.
        shown: the first rows.
    """

    status: str
    title: str
    explanation: str
    count: int
    opened: bool
    partial: bool
    plain: bool
    messages: list[tuple[str, int]]
    shown: list[int]


def reasons_of(store: FeatureStore) -> list[Reason]:
    """Return the reasons of all failed rows, the most frequent first."""
    failures = store.failures
    # Merged files may have a status without a message.
    with_message = {failure["row"] for failure in failures}
    failed = np.flatnonzero(~store.ok & (store.status != Status.ABSENT))
    failures += [
        {"row": row, "status": _label(store, row), "error": "", "message": ""}
        for row in failed.tolist()
        if row not in with_message
    ]
    reasons, titles = [], {status.label: texts for status, texts in _EXPLAINED.items()}
    for status, count in Counter(failure["status"] for failure in failures).most_common():
        rows = [failure for failure in failures if failure["status"] == status]
        title, explanation = titles.get(status, (status.capitalize(), ""))
        reasons.append(
            Reason(
                status,
                title,
                explanation,
                count,
                opened=status not in NOT_OPENED,
                partial=status == Status.TRUNCATED.label,
                plain=status in _PLAIN,
                messages=Counter(str(f["message"] or f["error"]) for f in rows).most_common(3),
                shown=[failure["row"] for failure in rows[:SHOWN]],
            )
        )
    return reasons


def _label(store: FeatureStore, row: int) -> str:
    """Return the label of a row's status, also of a status that a later version of featx wrote."""
    value = int(store.status[row])
    return Status(value).label if value in set(Status) else f"status {value}"
