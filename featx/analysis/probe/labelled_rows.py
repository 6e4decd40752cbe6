"""The rows of one layer as a probe takes them: labelled, ok, one float32 vector each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from featx.errors import DataError, ReduceError, StoreError, counted
from featx.layers.reductions import channels_last
from featx.store.reader import FeatureStore

MAX_FLAT = 8192
"""Numbers of a map or of tokens that are taken as they are; larger ones are averaged."""

BLOCK_BYTES = 64 << 20
"""Of float32 values that are read at once."""


@dataclass(frozen=True)
class Labelled:
    """The rows of a store that a probe can use.

    Attributes:
        store: whose rows they are.
        rows: (n,) int64, increasing positions in the store.
        y: (n,) int64 class of each, in [0, C).
        classes: C names, those with at least one row.
        notes: what was left out.
    """

    store: FeatureStore
    rows: npt.NDArray[np.int64]
    y: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    notes: tuple[str, ...]


def labelled_rows(store: FeatureStore, column: str | None = None) -> Labelled:
    """The ok rows with a label, and the classes that have any.

    Args:
        store: whose rows they are.
        column: of the store, whose values are taken for labels; None takes its own labels.

    Raises:
        StoreError: rows are missing, or there is no such column.
        DataError: there are no labels.
    """
    if not store.complete:
        raise StoreError(
            f"{store.root} is not complete: {store.num_rows_present} of {len(store)} rows are "
            "there. The command that began it goes on; then probe it."
        )
    labels, classes = (store.labels, store.classes) if column is None else _from(store, column)
    rows = np.flatnonzero(store.ok & (labels >= 0))
    if not len(rows):
        raise DataError(
            f"{store.root} has no labels{'' if column is None else f' in {column}'}, so there is "
            "nothing to probe for. With data=folder the first sub-folder of a picture is its label."
        )
    present, y = np.unique(labels[rows], return_inverse=True)
    notes = []
    if failed := int((~store.ok).sum()):
        notes.append(f"{counted(failed, 'failed row is', 'failed rows are')} left out")
    if unlabelled := int((store.ok & (labels < 0)).sum()):
        notes.append(
            counted(unlabelled, "row without a label is", "rows without a label are") + " left out"
        )
    if absent := len(classes) - len(present):
        notes.append(f"classes without a row, left out: {absent}")
    names = tuple(classes[label] for label in present.tolist())
    return Labelled(store, rows, y.astype(np.int64), names, tuple(notes))


def _from(store: FeatureStore, column: str) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """The values of a column as labels, (N,) into class names; -1 where there is none."""
    values = store.column(column)
    if values.dtype.kind == "f":
        known = ~np.isnan(values)
        if (values[known] != np.floor(values[known])).any():
            raise DataError(
                f"probe.label_column={column} holds numbers that are not whole; expected text, "
                "whole numbers or booleans."
            )
        names, numbers = np.unique(values[known].astype(np.int64), return_inverse=True)
    else:
        known = values != "" if values.dtype.kind == "U" else np.ones(len(values), dtype=bool)
        names, numbers = np.unique(values[known], return_inverse=True)
    labels = np.full(len(values), -1, dtype=np.int64)
    labels[known] = numbers
    return labels, tuple(str(name) for name in names.tolist())


def matched_by_name(test: Labelled, classes: tuple[str, ...]) -> Labelled:
    """The rows of another store under these class numbers; those of other classes left out.

    Raises:
        DataError: the stores have no class in common.
    """
    number = {name: i for i, name in enumerate(classes)}
    as_here = np.array([number.get(name, -1) for name in test.classes], np.int64)[test.y]
    known = as_here >= 0
    if not known.any():
        raise DataError(
            f"{test.store.root} has the classes {', '.join(test.classes[:5])}, none of "
            f"{', '.join(classes[:5])}: classes are matched by name."
        )
    notes = list(test.notes)
    if others := int((~known).sum()):
        one, many = "row of a class", "rows of classes"
        notes.append(f"{counted(others, one, many)} not trained on: left out")
    notes = [f"probe.test_store: {note}" for note in notes]
    return Labelled(test.store, test.rows[known], as_here[known], classes, tuple(notes))


@dataclass(frozen=True)
class LayerRows:
    """One layer of a store, some rows of it, and how each becomes a vector.

    Attributes:
        pooled: None where a row is taken as it is, flattened; else the axes (of a batch of rows)
            over which it is averaged.
        width: D, numbers of a vector.
    """

    store: FeatureStore
    layer: str
    rows: npt.NDArray[np.int64]
    pooled: tuple[int, ...] | None
    width: int

    @property
    def reduction(self) -> str:
        """What becomes of a row: none, flatten or avg."""
        if self.pooled is not None:
            return "avg"
        return "none" if self.store[self.layer].ndim == 2 else "flatten"

    def vectors(self, values: torch.Tensor) -> torch.Tensor:
        """Stored rows (n, ...) -> (n, D) float32."""
        return as_vectors(values, self.pooled, self.width)

    def read(self, places: npt.NDArray[np.int64]) -> torch.Tensor:
        """Vectors of some of the rows, (n, D) float32 on the CPU.

        Raises:
            StoreError: a value is not finite, though its row is marked ok.
        """
        rows = self.rows[places]
        values = np.asarray(self.store[self.layer][rows])
        found = self.vectors(torch.from_numpy(values.astype(np.float32, copy=False)))
        self.check(found, rows)
        return found

    def check(self, vectors: torch.Tensor, rows: npt.NDArray[np.int64]) -> None:
        """Raise StoreError where a vector has a value that is not finite."""
        finite = torch.isfinite(vectors).all(1)
        if not bool(finite.all()):
            row = int(rows[int((~finite).nonzero()[0, 0])])
            raise StoreError(
                f"{self.store.root}: row {row} ({self.store.keys[row]}) of {self.layer} is marked "
                "ok and has values that are not finite. job=verify says what is damaged."
            )


def as_vectors(values: torch.Tensor, pooled: tuple[int, ...] | None, width: int) -> torch.Tensor:
    """Stored rows (n, ...) -> (n, width) float32; see LayerRows."""
    values = values.to(torch.float32)
    if pooled:
        values = values.mean(pooled)
    return values.reshape(len(values), width)


def layer_rows(labelled: Labelled, layer: str) -> LayerRows:
    """How the rows of a layer become vectors.

    A vector stays as it is. Maps and tokens are flattened up to MAX_FLAT numbers, and averaged
    over their positions above.

    Raises:
        ReduceError: a large map whose channels cannot be told from its positions.
    """
    store = labelled.store
    shape = store[layer].shape[1:]
    numbers = int(np.prod(shape, dtype=np.int64))
    if len(shape) < 2 or numbers <= MAX_FLAT:
        return LayerRows(store, layer, labelled.rows, None, numbers)
    if len(shape) == 2:  # tokens (T, C), the class token among them
        return LayerRows(store, layer, labelled.rows, (1,), shape[1])
    crop = re.search(r"crop (\d+)x(\d+)", str(store.attrs.get("transform", "")))
    if len(shape) != 3 or crop is None:
        raise ReduceError(
            f"{layer} has rows of shape {shape}, {numbers} numbers: too many to take as they are, "
            "and no map to average. Extract it with a reduction, or leave it out with layer=."
        )
    size = int(crop.group(1)), int(crop.group(2))
    last = channels_last("averaging before a probe", layer, shape, size)
    axes, width = ((1, 2), shape[2]) if last else ((2, 3), shape[0])
    return LayerRows(store, layer, labelled.rows, axes, width)


class Features:
    """The vectors of one layer, those of training and of another store's rows one after the other.

    In memory, on the device, where they fit with their standardised copy into the room given; else
    read from the store block by block.

    Args:
        parts: of the same layer and width.
        device: that computes.
        memory_bytes: the room.
    """

    def __init__(self, parts: list[LayerRows], device: torch.device, memory_bytes: float) -> None:
        self.parts = parts
        self.device = device
        self.width = parts[0].width
        self._starts = np.cumsum([0, *(len(part.rows) for part in parts)])
        self.whole: torch.Tensor | None = None
        if 2 * 4 * len(self) * self.width <= memory_bytes:
            whole = torch.empty((len(self), self.width))
            for places in self._spans(np.arange(len(self))):
                whole[places[0] : places[-1] + 1] = self._read(places)
            self.whole = whole.to(device)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def blocks(
        self, places: npt.NDArray[np.int64]
    ) -> Iterator[tuple[npt.NDArray[np.int64], torch.Tensor]]:
        """The vectors of some places, in their order: (places, (n, D) float32 on the device)."""
        for span in self._spans(places):
            if self.whole is None:
                yield span, self._read(span).to(self.device)
            else:
                yield span, self.whole[torch.from_numpy(span).to(self.device)]

    def take(self, places: npt.NDArray[np.int64]) -> torch.Tensor:
        """(n, D) float32 on the device, a copy."""
        found = torch.empty((len(places), self.width), device=self.device)
        done = 0
        for span, block in self.blocks(places):
            found[done : done + len(span)] = block
            done += len(span)
        return found

    def _spans(self, places: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
        size = max(1, BLOCK_BYTES // (4 * self.width))
        for start in range(0, len(places), size):
            yield places[start : start + size]

    def _read(self, places: npt.NDArray[np.int64]) -> torch.Tensor:
        found = torch.empty((len(places), self.width))
        part_of = np.searchsorted(self._starts, places, side="right") - 1
        for number, part in enumerate(self.parts):
            mine = np.flatnonzero(part_of == number)
            if len(mine):
                found[torch.from_numpy(mine)] = part.read(places[mine] - self._starts[number])
        return found


def output_folder(store: FeatureStore) -> Path:
    """Where a store keeps what is computed from it: its folder, or that of its file."""
    return store.root if store.root.is_dir() else store.root.parent
