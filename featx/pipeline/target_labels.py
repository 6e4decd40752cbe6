"""Labels of a data set as classes of the model, for target=label and target=loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from featx.base import name_text
from featx.errors import DataError, counted
from featx.types import Listing

if TYPE_CHECKING:
    from featx.models import Backbone

_LABELS_HINT = (
    "Give labels that are numbers of the model's classes, with data=folder by a file such as "
    'data.classes=FILE.json with {"cat": 281}, or choose target=predicted or target=NUMBER'
)


def target_labels(
    target: str | int | None, listing: Listing, backbone: Backbone
) -> npt.NDArray[np.int64]:
    """Return (N,) int64, the model's class of every row, for the targets 'label' and 'loss'.

    Classes whose names are all whole numbers are the model's classes of these numbers. Others are
    matched by name with the model's classes: in any case, with blanks for underscores, by any of
    the synonyms between commas, or by the identifier of a class (n01440764). For other targets
    the labels themselves are returned.
    """
    labels = listing.labels
    if target not in ("label", "loss"):
        return labels
    unlabelled = np.flatnonzero(labels < 0)
    if len(unlabelled):
        key = name_text(bytes(listing.keys[unlabelled[0]]))
        num_rows = counted(len(unlabelled), "image has", "images have")
        raise DataError(f"target={target}: {num_rows} no label, such as {key}. {_LABELS_HINT}.")
    used = np.unique(labels).tolist()
    names = [listing.classes[label] for label in used]
    table = np.full(len(listing.classes), -1, dtype=np.int64)
    table[used] = _match_classes(f"target={target}", names, backbone)
    return table[labels]


def _match_classes(origin: str, names: Sequence[str], backbone: Backbone) -> list[int]:
    """Return the class of the model for each name; raises DataError as `target_labels` does."""
    if all(name.isascii() and name.isdecimal() for name in names):
        return [int(name) for name in names]
    if not backbone.classes:
        raise DataError(
            f"{origin}: the classes of the data set are {_shown(names)}, and {backbone.name} with "
            f"weights {backbone.weights} has no names of its classes to compare them with. "
            f"{_LABELS_HINT}."
        )
    known: dict[str, set[int]] = {}
    for number, name in enumerate(backbone.classes):
        for text in {name, *name.split(",")}:
            known.setdefault(_normal(text), set()).add(number)
    for number, identifier in enumerate(backbone.class_ids):
        known.setdefault(_normal(identifier), set()).add(number)
    counts = Counter(backbone.classes)
    exact = {name: i for i, name in enumerate(backbone.classes) if counts[name] == 1}
    found = [{exact[n]} if n in exact else known.get(_normal(n), set()) for n in names]
    wrong = [name for name, numbers in zip(names, found, strict=True) if len(numbers) != 1]
    if wrong:
        raise DataError(
            f"{origin}: {len(wrong)} of {counted(len(names), 'class', 'classes')} of the data set "
            f"match no single class of {backbone.name}, such as {_shown(wrong)}. The model's "
            f"{len(backbone.classes)} classes are {_shown(backbone.classes)}. {_LABELS_HINT}."
        )
    return [numbers.pop() for numbers in found]


def _normal(name: str) -> str:
    """Return a name in lower case, with single blanks for underscores and blanks."""
    return " ".join(name.replace("_", " ").casefold().split())


def _shown(names: Sequence[str]) -> str:
    """Return the first names of a list, for a message."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
