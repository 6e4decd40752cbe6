"""Statistics while a run goes on: the parts as files, merged in one fixed order -> stats.h5."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from featx.errors import LayerError, StoreError, StoreMismatchError
from featx.fingerprint import differences, digest
from featx.moments import Moments, StatsLayer, cut_row, is_aligned
from featx.stats_file import (
    PARTS_FOLDER,
    STATS_FORMAT,
    DamagedError,
    attributes_of,
    file_bytes,
    read_failures,
    read_layer,
    reading,
)
from featx.store import layout
from featx.store.commit import TEMPORARY, Disk
from featx.types import Failure, Part, StoreHeader

logger = logging.getLogger(__name__)


class MomentsOfParts:
    """The moments of a run while it goes on: small files below PATH-parts/, in the end one PATH.

    A file holds all layers over one span of rows, begins as one part, and is named for its rows.
    As soon as both halves of an aligned span are there they are merged into one file, so that
    a handful of files stay, not one a part. One process at a time may use it: the one that holds
    the store's lock.

    Args:
        disk: of the folder of `path`.
        path: of the file that is wanted, stats.h5.
        header: of the run; its fingerprint holds whatever changes values, the layers included.
        num_rows: of the listing.
        layers: whose statistics are taken.

    Attributes:
        complete: whether the one file is there, made by this run; known after `survey`.
    """

    def __init__(
        self,
        disk: Disk,
        path: Path,
        header: StoreHeader,
        num_rows: int,
        layers: Sequence[StatsLayer],
    ) -> None:
        self.disk = disk
        self.path = path
        self.folder = path.with_name(PARTS_FOLDER)
        self._header = header
        self._num_rows = num_rows
        self._layers = {layer.spec.name: layer for layer in layers}
        self._spans: dict[tuple[int, int], tuple[Failure, ...]] = {}
        self._surveyed = False
        self.complete = False

    @property
    def failures(self) -> list[Failure]:
        """The images left out of the rows that are done, in order of rows."""
        return [failure for span in sorted(self._spans) for failure in self._spans[span]]

    def survey(self) -> None:
        """Find what is done. What is damaged is set aside, to be done again; leftovers go.

        Raises:
            StoreMismatchError: a file is there that other settings made.
            StoreError: a file cannot be read now.
        """
        self._spans = {}
        self._surveyed = True
        self.disk.make_folder(self.path.parent)  # what a killed process put there becomes durable
        if self.path.exists():
            failures = self._accepted(self.path, 0, self._num_rows)
            self.complete = failures is not None
            if failures is not None:
                self._spans[0, self._num_rows] = failures
                self.disk.remove(self.folder)
                return
        self.disk.make_folder(self.folder)
        for leftover in self.folder.glob(f"{TEMPORARY}*"):
            self.disk.remove(leftover)
        found = [_span_of(path) for path in sorted(self.folder.glob("rows-*.h5"))]
        for start, stop in sorted(found, key=lambda span: span[0] - span[1]):
            path = self._file(start, stop)
            if self._covered(start, stop):
                self.disk.remove(path)  # merged into a larger one, and then the process was killed
            else:
                failures = self._accepted(path, start, stop)
                if failures is not None:
                    self._spans[start, stop] = failures

    def has(self, part: Part) -> bool:
        """Whether the rows of a part are done."""
        return self._covered(part.start, part.stop)

    def commit(
        self, part: Part, failures: Sequence[Failure], moments: Mapping[str, Moments]
    ) -> None:
        """Keep the moments of a part, durably when this returns.

        Args:
            part: of a grid whose parts are a power of two of rows.
            failures: images of the part that were left out.
            moments: name -> moments, all layers of the run.

        Raises:
            RunError: the disk is full or fails; the part is as good as not done.
        """
        assert self._surveyed, "what is there already was not looked for"
        assert set(moments) == set(self._layers), "a layer is missing"
        assert part.start % layout.power_of_two_at_least(len(part)) == 0, f"{part} is off the tree"
        assert is_aligned(part.start, part.stop) or part.stop == self._num_rows, f"{part} is short"
        for name, layer in self._layers.items():
            expected = (len(part) - len(failures)) * layer.rows_per_image
            found = moments[name]
            assert (found.count, found.dim, found.kind) == (expected, layer.dim, layer.kind), name
        if not self.has(part):
            in_order = sorted(failures, key=lambda failure: failure.row)
            self._publish(part.start, part.stop, in_order, moments)
            self._merge_upwards(part.start, part.stop)

    def finish(self) -> None:
        """Merge all parts into the one file, and remove them.

        Raises:
            StoreError: rows are missing, or a file is damaged; `survey` sets it aside.
            RunError: the disk is full or fails; the same call goes on.
        """
        assert self._surveyed, "what is there already was not looked for"
        if not self.complete:
            nodes = sorted(self._spans)
            edges = [0, *(stop for _, stop in nodes)]
            if [start for start, _ in nodes] + [self._num_rows] != edges:
                raise StoreError(
                    f"{self.folder} does not hold all {self._num_rows} rows yet; give the same "
                    "command again."
                )
            moments = self._merged(0, self._num_rows)
            failures = self.failures
            root = self._root(0, self._num_rows, len(failures), complete=True)
            data = file_bytes(root, self._layers, moments, failures)
            created = self.disk.publish(self.path, data)
            assert created, f"somebody else wrote {self.path} without the lock"
            self._spans = {(0, self._num_rows): tuple(failures)}
            self.complete = True
        self.disk.remove(self.folder)

    def _merge_upwards(self, start: int, stop: int) -> None:
        """Merge a span with its other half, and so on, as long as that is there and whole."""
        while is_aligned(start, stop):
            size = stop - start
            other = (start ^ size, (start ^ size) + size)
            if other not in self._spans:
                return
            halves = sorted([(start, stop), other])
            start, stop = halves[0][0], halves[1][1]
            failures = [failure for half in halves for failure in self._spans[half]]
            self._publish(start, stop, failures, self._merged(start, stop))
            for half in halves:
                self.disk.remove(self._file(*half))
                del self._spans[half]

    def _merged(self, start: int, stop: int) -> dict[str, Moments]:
        """The moments of a span, from its file or, by the tree, from those within it."""
        if (start, stop) in self._spans:
            path = self._file(start, stop)
            with reading(path) as file:
                root = attributes_of(file)
                self._check(path, root, start, stop)
                return {name: read_layer(file, path, name, root)[0] for name in self._layers}
        assert stop - start > 1, "a span with rows that no file holds"
        cut = cut_row(start, stop)
        lower, upper = self._merged(start, cut), self._merged(cut, stop)
        return {name: lower.pop(name).merge(upper.pop(name)) for name in self._layers}

    def _publish(
        self,
        start: int,
        stop: int,
        failures: Sequence[Failure],
        moments: Mapping[str, Moments],
    ) -> None:
        root = self._root(start, stop, len(failures), complete=False)
        self.disk.publish(
            self._file(start, stop), file_bytes(root, self._layers, moments, failures)
        )
        self._spans[start, stop] = tuple(failures)

    def _root(self, start: int, stop: int, num_failed: int, complete: bool) -> dict[str, Any]:
        """Root attributes: the store's, with those of statistics."""
        identity = digest(self._header.fingerprint)
        attributes = layout.root_attributes(self._header, identity, complete)
        del attributes["featx_format"]  # no store: featx.open must not take it for one
        return {
            "featx_stats": STATS_FORMAT,
            **attributes,
            "settings": json.dumps(dict(self._header.fingerprint), sort_keys=True),
            "start": start,
            "stop": stop,
            "num_failed": num_failed,
        }

    def _file(self, start: int, stop: int) -> Path:
        return self.folder / f"rows-{start:010d}-{stop:010d}.h5"

    def _covered(self, start: int, stop: int) -> bool:
        return any(first <= start and stop <= last for first, last in self._spans)

    def _accepted(self, path: Path, start: int, stop: int) -> tuple[Failure, ...] | None:
        """The images that a file of this run left out; None where it was damaged and set aside."""
        try:
            with reading(path) as file:
                root = attributes_of(file)
                self._check(path, root, start, stop)
                for name in self._layers:
                    read_layer(file, path, name, root)
                return read_failures(file, path, root)
        except (DamagedError, LayerError) as error:  # a run's own file has all its layers
            target = self.disk.set_aside(path, self.path.parent / layout.QUARANTINE)
            logger.warning("%s Moved to %s; its rows are done again.", error, target)
            return None

    def _check(self, path: Path, attributes: Mapping[str, Any], start: int, stop: int) -> None:
        """Raise where a file belongs to another run or to other rows."""
        asked = dict(self._header.fingerprint)
        if attributes["fingerprint"] != digest(asked):
            made = json.loads(attributes["settings"])
            lines = [f"{key}: {old!r}, now {new!r}" for key, old, new in differences(made, asked)]
            raise StoreMismatchError(
                f"{path} was made with other settings: {'; '.join(lines)}. Give those, choose "
                "another out=DIR, or overwrite=true."
            )
        if (attributes["start"], attributes["stop"]) != (start, stop):
            raise DamagedError(
                f"{path} holds rows {attributes['start']} to {attributes['stop']}, expected "
                f"{start} to {stop}."
            )


def _span_of(path: Path) -> tuple[int, int]:
    """The rows a file is named for."""
    try:
        _, start, stop = path.stem.split("-")
        return int(start), int(stop)
    except ValueError as error:
        raise StoreError(f"{path} is no file of featx; move it away.") from error
