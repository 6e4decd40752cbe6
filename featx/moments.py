"""Streaming statistics of a layer in float64: count, mean and scatter, and what is done with them.

    PartMoments       the rows of one part, in batches of any size -> Moments
    MomentsOfParts    the parts of a run as files, merged in one fixed order -> stats.h5
    load_moments      stats.h5 -> Moments of one layer
    principal_components, whitening -> Projection; frechet_distance

Floating-point sums depend on their order, so the order is fixed: a tree over the rows of the
listing. A span of rows is cut at the row in it that is divisible by the highest power of two, down
to leaves of LEAF_ROWS rows, or one part, if that is smaller. A leaf is summed at once, and two
halves are merged, the lower rows first. Neither the batches the rows came in, nor the order of the
parts, nor where a run was interrupted or merged early, changes a bit of the result (same device,
threads and libraries).
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from featx.errors import (
    ConfigError,
    LayerError,
    NonFiniteError,
    ReduceError,
    StoreError,
    StoreMismatchError,
    nearest,
)
from featx.fingerprint import differences, digest
from featx.store import layout
from featx.store.commit import TEMPORARY, Disk
from featx.store.files import check_plain, damage_text, open_for_a_look
from featx.types import LayerSpec, Part, StoreHeader

logger = logging.getLogger(__name__)

KINDS = ("full", "diagonal")

MAX_FULL = 1 << 14
"""Most features of a full scatter matrix: 2 GiB of float64."""

LEAF_ROWS = 256
LEAF_BYTES = 64 << 20
"""A leaf of the tree: this many rows of the listing, fewer where they take more than the bytes."""

STATS_FORMAT = 1

_ARRAYS = ("count", "mean", "scatter")

_SEAL_BYTES = 512
"""HDF5's user block: what lies before the file proper, and is none of HDF5's business."""

_NO_FLOAT64 = ("mps",)
"""Devices without float64; their rows are summed on the CPU."""


@dataclass(eq=False)
class Moments:
    """Count, mean and scatter of some rows: all that linear statistics need, in float64.

    Attributes:
        count: n, rows seen.
        mean: (D,) float64; zero where n is 0.
        scatter: sum over the rows of (x - mean)(x - mean)^T: (D, D) float64, exactly symmetric;
            or (D,), its diagonal only.
    """

    count: int
    mean: torch.Tensor
    scatter: torch.Tensor

    @classmethod
    def empty(cls, dim: int, kind: str = "full", device: torch.device | str = "cpu") -> Moments:
        """The moments of no row; merged with others, it gives those, bit for bit.

        Raises:
            ConfigError: kind='full' of more than MAX_FULL features.
        """
        check_size(dim, kind)
        shape = (dim, dim) if kind == "full" else (dim,)
        options = _float64_on(torch.device(device))
        return cls(0, torch.zeros(dim, **options), torch.zeros(shape, **options))

    @classmethod
    def of(cls, rows: torch.Tensor, kind: str = "full") -> Moments:
        """The moments of (n, D) rows of any float dtype, summed in float64 on their device.

        Raises:
            ConfigError: the rows are no (n, D) floats, or too many features for kind='full'.
            NonFiniteError: a value is NaN or infinite, or its square is.
        """
        if rows.ndim != 2 or not rows.is_floating_point() or rows.shape[1] == 0:
            raise ConfigError(
                f"moments are taken of (n, D) rows of floats; got {tuple(rows.shape)} {rows.dtype}."
            )
        with _plain_tensors():
            total = cls.empty(rows.shape[1], kind, rows.device)
            step = _rows_that_fit(rows.shape[1])
            for start in range(0, len(rows), step):
                block = rows[start : start + step].to(total.mean.device)
                block = block.to(torch.float64, copy=True)
                total = total.merge(_of_block(block, kind, range(start, start + len(block))))
        return total

    def update(self, rows: torch.Tensor) -> None:
        """Add (n, D) rows, in place."""
        total = self.merge(Moments.of(rows, self.kind))
        self.count, self.mean, self.scatter = total.count, total.mean, total.scatter

    def merge(self, other: Moments) -> Moments:
        """The moments of the rows of both; neither is changed.

            d = mean_b - mean_a,  n = n_a + n_b
            mean = mean_a + d n_b / n,  scatter = scatter_a + scatter_b + d d^T n_a n_b / n

        T. F. Chan, G. H. Golub, R. J. LeVeque, Updating Formulae and a Pairwise Algorithm for
        Computing Sample Variances, COMPSTAT 1982, equation 2.1; for the scatter matrix of vectors
        as for the sum of squares of numbers.

        Raises:
            ConfigError: they are of different size or kind.
        """
        if other.scatter.shape != self.scatter.shape:
            raise ConfigError(
                f"moments of {self.dim} features ({self.kind}) and of {other.dim} ({other.kind}) "
                "cannot be merged."
            )
        if other.count == 0:
            return self
        if self.count == 0:
            return other
        count = self.count + other.count
        difference = other.mean.to(self.mean.device) - self.mean
        # outer(d, d) is symmetric to the bit; (w d) d^T would not be.
        scatter = _product(difference, self.kind).mul_(self.count * other.count / count)
        scatter.add_(self.scatter).add_(other.scatter.to(scatter.device))
        return Moments(count, self.mean + difference * (other.count / count), scatter)

    @property
    def dim(self) -> int:
        """D, the number of features."""
        return len(self.mean)

    @property
    def kind(self) -> str:
        """'full' or 'diagonal'."""
        return "full" if self.scatter.ndim == 2 else "diagonal"

    @property
    def second_moment(self) -> torch.Tensor:
        """X^T X: (D, D) float64, or (D,), its diagonal."""
        return _product(self.mean, self.kind).mul_(self.count).add_(self.scatter)

    def covariance(self, ddof: int = 1) -> torch.Tensor:
        """(D, D) float64: scatter / (n - ddof).

        Raises:
            ConfigError: only the diagonal is there, or there are no more than ddof rows.
        """
        self.check_full("a covariance")
        return self.scatter / self._degrees(ddof)

    def variance(self, ddof: int = 1) -> torch.Tensor:
        """(D,) float64. Raises ConfigError where there are no more than ddof rows."""
        squares = self.scatter.diagonal() if self.kind == "full" else self.scatter
        return squares / self._degrees(ddof)

    def std(self, ddof: int = 1) -> torch.Tensor:
        """(D,) float64: the root of the variance."""
        return self.variance(ddof).sqrt()

    def check_full(self, what: str) -> None:
        """Raise ConfigError where only the diagonal of the scatter matrix is there."""
        if self.kind != "full":
            raise ConfigError(
                f"{what} needs the full scatter matrix; these moments hold its diagonal. "
                "Take them again with kind='full'."
            )

    def _degrees(self, ddof: int) -> int:
        if self.count <= ddof:
            raise ConfigError(
                f"a variance with ddof={ddof} needs more than {ddof} rows; there are {self.count}."
            )
        return self.count - ddof


def check_size(dim: int, kind: str, what: str = "a row") -> None:
    """Raise ConfigError unless moments of this kind can be held for `dim` features.

    Args:
        what: has so many features; begins the message.
    """
    if kind not in KINDS:
        raise ConfigError(f"there are no moments of kind {kind!r}; expected one of {KINDS}.")
    if kind == "full" and dim > MAX_FULL:
        raise ConfigError(
            f"{what} has {dim} features: their scatter matrix would take {8 * dim**2 / 2**30:.1f} "
            f"GiB; at most {MAX_FULL} features (2 GiB) are taken. Reduce the layer first "
            "(reduce=avg), take each position as a row, or keep variances only: kind='diagonal'."
        )


@contextlib.contextmanager
def _plain_tensors() -> Iterator[None]:
    """No gradients are recorded, and what is made can be changed in place outside, too.

    Hooks run in inference mode, whose tensors cannot be changed outside of it.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


def _float64_on(device: torch.device) -> dict[str, Any]:
    """Options of a float64 tensor on a device, or on the CPU where the device has none."""
    home = torch.device("cpu") if device.type in _NO_FLOAT64 else device
    return {"dtype": torch.float64, "device": home}


def _rows_that_fit(width: int) -> int:
    return layout.power_of_two_at_most(LEAF_BYTES / (8 * width))


def _product(vector: torch.Tensor, kind: str) -> torch.Tensor:
    """v v^T, or its diagonal."""
    return torch.outer(vector, vector) if kind == "full" else vector * vector


def _of_block(x: torch.Tensor, kind: str, images: Sequence[int]) -> Moments:
    """The moments of (n, D) float64 rows, which are overwritten; two passes.

    Args:
        images: what errors call the rows, n / len(images) rows each.
    """
    if len(x) == 0:
        return Moments.empty(x.shape[1], kind, x.device)
    finite = x.isfinite()
    if not finite.all():
        row, feature = (int(i) for i in (~finite).nonzero()[0])
        image = images[row * len(images) // len(x)]
        raise NonFiniteError(f"row {image}: feature {feature} is {x[row, feature].item()}.")
    # Rows less the first one: nothing is lost of values far from zero, constants give exactly 0.
    origin = x[0].clone()
    x -= origin
    shift = x.mean(0)
    x -= shift
    if kind == "full":
        scatter = (x.T @ x).triu_()  # a product of matrices need not be symmetric to the last bit
        scatter += scatter.triu(1).T
    else:
        scatter = x.square_().sum(0)
    if not scatter.isfinite().all():
        raise NonFiniteError(
            f"rows {images[0]} to {images[-1]}: their squares are beyond the range of float64."
        )
    return Moments(len(x), origin + shift, scatter)


@dataclass(frozen=True)
class StatsLayer:
    """One layer whose statistics are taken.

    Attributes:
        spec: what is captured; spec.shape is that of an image's tensor before flattening.
        kind: 'full' or 'diagonal'.
        positions: how many rows an image gives: None for one, its whole tensor flattened; P where
            each of P spatial positions or tokens is a row.

    Raises:
        ConfigError: the scatter matrix would be too large, or positions do not fit the shape.
    """

    spec: LayerSpec
    kind: str = "full"
    positions: int | None = None

    def __post_init__(self) -> None:
        if self.positions is not None and math.prod(self.spec.shape) % self.positions:
            raise ConfigError(
                f"{self.spec.name}: a tensor of shape {self.spec.shape} has no {self.positions} "
                "positions."
            )
        what = f"{self.spec.name} of shape {self.spec.shape}"
        check_size(self.dim, self.kind, what if self.positions is None else f"a position of {what}")

    @property
    def rows_per_image(self) -> int:
        """Rows that one image gives."""
        return self.positions or 1

    @property
    def dim(self) -> int:
        """D, features of a row."""
        return math.prod(self.spec.shape) // self.rows_per_image

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of an image's tensor, as it may come to `PartMoments.add`."""
        if self.positions is not None:
            return ((self.positions, self.dim),)
        return (tuple(self.spec.shape), (self.dim,))

    @property
    def attributes(self) -> dict[str, Any]:
        """What the file says of it."""
        return {
            **layout.layer_attributes(self.spec),
            "shape": list(self.spec.shape),
            "row": "image" if self.positions is None else "position",
            "rows_per_image": self.rows_per_image,
            "kind": self.kind,
        }


class PartMoments:
    """The moments of one layer over the rows of one part, which come in order, in any batches.

    What is held on the device: a leaf of at most LEAF_BYTES, and one scatter matrix for each level
    of the tree below the part.
    """

    def __init__(self, part: Part, layer: StatsLayer) -> None:
        self.part = part
        self.layer = layer
        self._leaf_rows = min(LEAF_ROWS, _rows_that_fit(layer.rows_per_image * layer.dim))
        self._next = part.start
        self._buffer = torch.empty(0)
        self._kept: list[int] = []
        self._nodes: list[tuple[int, int, Moments]] = []

    def add(self, start: int, rows: torch.Tensor, failed: Collection[int] = ()) -> None:
        """Add the images [start, start + b) of the listing. The rows are copied.

        Args:
            start: the first one; the one after the last of the batch before.
            rows: (b, *spec.shape) or (b, D), of any float dtype, on any device; (b, P, D) where
                each position is a row.
            failed: images among them, by row of the listing, that are left out.

        Raises:
            NonFiniteError: a value of a row that did not fail is NaN or infinite.
        """
        name, stop = self.layer.spec.name, start + len(rows)
        assert start == self._next, f"row {start} came where row {self._next} was due"
        assert stop <= self.part.stop, "a batch crosses its part"
        assert all(start <= row < stop for row in failed), "a failure outside its batch"
        assert rows.is_floating_point(), f"{name} is {rows.dtype}"
        # Another order of the axes could be reshaped as well, and would mix features up unseen.
        assert tuple(rows.shape[1:]) in self.layer.shapes, f"{name} has shape {tuple(rows.shape)}"
        failed = frozenset(failed)
        with _plain_tensors():
            while self._next < stop:
                leaf_stop = (self._next // self._leaf_rows + 1) * self._leaf_rows
                leaf_stop = min(leaf_stop, self.part.stop)
                self._fill(rows[self._next - start : leaf_stop - start], failed)
                if self._next == leaf_stop:
                    self._close_leaf(leaf_stop)

    def finish(self) -> Moments:
        """The moments of the part. All its rows must have come."""
        assert self._next == self.part.stop, f"row {self._next} of the part never came"
        *lower, (_, _, total) = self._nodes
        for _, _, node in reversed(lower):
            total = node.merge(total)
        return total

    def _fill(self, rows: torch.Tensor, failed: frozenset[int]) -> None:
        """Copy images into the leaf's buffer; all of them lie in one leaf."""
        images = range(self._next, self._next + len(rows))
        kept = [image for image in images if image not in failed]
        if len(kept) < len(rows):
            rows = rows[torch.tensor([i - self._next for i in kept], dtype=torch.long)]
        each = self.layer.rows_per_image
        if not len(self._buffer):
            most = min(self._leaf_rows, len(self.part)) * each
            self._buffer = torch.empty((most, self.layer.dim), **_float64_on(rows.device))
        place = len(self._kept) * each
        vectors = rows.reshape(-1, self.layer.dim).to(self._buffer.device)
        self._buffer[place : place + len(vectors)] = vectors
        self._kept += kept
        self._next = images.stop

    def _close_leaf(self, stop: int) -> None:
        """Sum the leaf up, and merge what is whole: two halves of an aligned power of two."""
        num_rows = len(self._kept) * self.layer.rows_per_image
        leaf = _of_block(self._buffer[:num_rows], self.layer.kind, self._kept)
        start = self._nodes[-1][1] if self._nodes else self.part.start
        self._nodes.append((start, stop, leaf))
        self._kept = []
        while len(self._nodes) > 1:
            (start, cut, lower), (_, stop, upper) = self._nodes[-2:]
            if not _is_aligned(start, stop) or _cut(start, stop) != cut:
                break
            self._nodes[-2:] = [(start, stop, lower.merge(upper))]


def _cut(start: int, stop: int) -> int:
    """Where the tree cuts rows [start, stop): the row divisible by the highest power of two."""
    bits = (start ^ (stop - 1)).bit_length() - 1
    return (stop - 1) >> bits << bits


def _is_aligned(start: int, stop: int) -> bool:
    """Whether [start, stop) is a power of two of rows, at a multiple of it."""
    size = stop - start
    return size & (size - 1) == 0 and start % size == 0


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
        self.folder = path.with_name(f"{path.stem}-parts")
        self._header = header
        self._num_rows = num_rows
        self._layers = {layer.spec.name: layer for layer in layers}
        self._spans: dict[tuple[int, int], int] = {}
        self._surveyed = False
        self.complete = False

    @property
    def num_failed(self) -> int:
        """Images left out of the rows that are done."""
        return sum(self._spans.values())

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
            num_failed = self._accepted(self.path, 0, self._num_rows)
            self.complete = num_failed is not None
            if num_failed is not None:
                self._spans[0, self._num_rows] = num_failed
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
                num_failed = self._accepted(path, start, stop)
                if num_failed is not None:
                    self._spans[start, stop] = num_failed

    def has(self, part: Part) -> bool:
        """Whether the rows of a part are done."""
        return self._covered(part.start, part.stop)

    def commit(self, part: Part, num_failed: int, moments: Mapping[str, Moments]) -> None:
        """Keep the moments of a part, durably when this returns.

        Args:
            part: of a grid whose parts are a power of two of rows.
            num_failed: images of the part that were left out.
            moments: name -> moments, all layers of the run.

        Raises:
            RunError: the disk is full or fails; the part is as good as not done.
        """
        assert self._surveyed, "what is there already was not looked for"
        assert set(moments) == set(self._layers), "a layer is missing"
        assert part.start % layout.power_of_two_at_least(len(part)) == 0, f"{part} is off the tree"
        assert _is_aligned(part.start, part.stop) or part.stop == self._num_rows, f"{part} is short"
        for name, layer in self._layers.items():
            expected = (len(part) - num_failed) * layer.rows_per_image
            found = moments[name]
            assert (found.count, found.dim, found.kind) == (expected, layer.dim, layer.kind), name
        if not self.has(part):
            self._publish(part.start, part.stop, num_failed, moments)
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
            root = self._root(0, self._num_rows, self.num_failed, complete=True)
            created = self.disk.publish(self.path, self._file_of(root, moments))
            assert created, f"somebody else wrote {self.path} without the lock"
            self._spans = {(0, self._num_rows): self.num_failed}
            self.complete = True
        self.disk.remove(self.folder)

    def _merge_upwards(self, start: int, stop: int) -> None:
        """Merge a span with its other half, and so on, as long as that is there and whole."""
        while _is_aligned(start, stop):
            size = stop - start
            other = (start ^ size, (start ^ size) + size)
            if other not in self._spans:
                return
            halves = sorted([(start, stop), other])
            start, stop = halves[0][0], halves[1][1]
            num_failed = sum(self._spans[half] for half in halves)
            self._publish(start, stop, num_failed, self._merged(start, stop))
            for half in halves:
                self.disk.remove(self._file(*half))
                del self._spans[half]

    def _merged(self, start: int, stop: int) -> dict[str, Moments]:
        """The moments of a span, from its file or, by the tree, from those within it."""
        if (start, stop) in self._spans:
            path = self._file(start, stop)
            with _reading(path) as file:
                root = _attributes(file)
                self._check(path, root, start, stop)
                return {name: _read_layer(file, path, name, root)[0] for name in self._layers}
        assert stop - start > 1, "a span with rows that no file holds"
        cut = _cut(start, stop)
        lower, upper = self._merged(start, cut), self._merged(cut, stop)
        return {name: lower.pop(name).merge(upper.pop(name)) for name in self._layers}

    def _publish(
        self, start: int, stop: int, num_failed: int, moments: Mapping[str, Moments]
    ) -> None:
        data = self._file_of(self._root(start, stop, num_failed, complete=False), moments)
        self.disk.publish(self._file(start, stop), data)
        self._spans[start, stop] = num_failed

    def _file_of(self, root: Mapping[str, Any], moments: Mapping[str, Moments]) -> memoryview:
        """The bytes of a file, built in memory and read back."""
        buffer = io.BytesIO()
        with h5py.File(buffer, "w", libver=layout.LIBVER, userblock_size=_SEAL_BYTES) as file:
            file.attrs.update(root)
            group = file.create_group("layers")
            for name, layer in self._layers.items():
                _write_layer(group.create_group(name), layer, moments[name])
        with h5py.File(buffer, "r") as file:
            for name in self._layers:
                read = _read_layer(file, self.path, name, root)[0]
                assert torch.equal(read.scatter, moments[name].scatter.cpu()), name
                assert torch.equal(read.mean, moments[name].mean.cpu()), name
        data = buffer.getbuffer()
        data[:_SEAL_BYTES] = _seal(zlib.crc32(data[_SEAL_BYTES:]))
        return data

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

    def _accepted(self, path: Path, start: int, stop: int) -> int | None:
        """How many images a file of this run left out; None where it was damaged and set aside."""
        try:
            with _reading(path) as file:
                root = _attributes(file)
                self._check(path, root, start, stop)
                for name in self._layers:
                    _read_layer(file, path, name, root)
                return int(root["num_failed"])
        except (_DamagedError, LayerError) as error:  # a run's own file has all its layers
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
            raise _DamagedError(
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


class _DamagedError(StoreError):
    """A file of statistics whose contents are not what was written."""


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[h5py.File]:
    """A file of statistics, of a version that this featx reads.

    Raises:
        StoreError: the system cannot read it now, or it is newer.
        _DamagedError: it is damaged.
    """
    _check_seal(path)
    try:
        with open_for_a_look(path) as file:
            version = file.attrs.get("featx_stats")
            if version is None:
                raise _DamagedError(f"{path} is no file of featx statistics.")
            if version > STATS_FORMAT:
                raise StoreError(
                    f"{path} has statistics format {version}, this featx reads up to "
                    f"{STATS_FORMAT}. Upgrade featx: pip install -U featx."
                )
            yield file
    except (StoreError, LayerError):
        raise
    except layout.UNREADABLE as error:
        raise _DamagedError(f"{path} is damaged: {damage_text(path, error)}.") from error


def _write_layer(group: h5py.Group, layer: StatsLayer, moments: Moments) -> None:
    """/layers/<name>: count, mean and scatter, with the layer's attributes."""
    group.create_dataset("count", data=np.int64(moments.count))
    group.create_dataset("mean", data=moments.mean.cpu().numpy())
    group.create_dataset("scatter", data=moments.scatter.cpu().numpy())
    group.attrs.update(layer.attributes)


def _seal(crc: int) -> bytes:
    """The first 512 bytes of a file; the same in every version of the format."""
    text = f"featx statistics; crc32 of the bytes from {_SEAL_BYTES} on: {crc:08x}\n"
    return text.encode().ljust(_SEAL_BYTES, b"\0")


def _check_seal(path: Path) -> None:
    """Raise _DamagedError where a file is not what was written, before HDF5 looks at it.

    HDF5's own checksums leave out what strings are kept in: one flipped bit there, and opening
    the file never ends.
    """
    crc = 0
    try:
        with path.open("rb") as file:
            head = file.read(_SEAL_BYTES)
            while data := file.read(1 << 20):
                crc = zlib.crc32(data, crc)
    except OSError as error:
        raise _DamagedError(f"{path}: {damage_text(path, error)}.") from error
    if head != _seal(crc):
        raise _DamagedError(f"{path} is damaged: it differs from its checksum.")


def _attributes(item: h5py.Group) -> dict[str, Any]:
    """Attributes as JSON types."""
    return {
        key: value.tolist() if isinstance(value, np.generic | np.ndarray) else value
        for key, value in item.attrs.items()
    }


def _read_layer(
    file: h5py.File, path: Path, name: str, root: Mapping[str, Any]
) -> tuple[Moments, dict[str, Any]]:
    """The moments of one layer with its attributes, found to fit each other.

    Args:
        file: open.
        path: of the file, for messages.
        name: of the layer.
        root: the file's own attributes.
    """
    if name not in file["layers"]:
        known = list(file["layers"])
        raise LayerError(
            f"{path} has no statistics of {name!r}; it has {', '.join(known)}."
            f"{nearest(name, known)}"
        )
    try:
        datasets = {key: check_plain(file, f"layers/{name}/{key}") for key in _ARRAYS}
    except StoreError as error:
        raise _DamagedError(str(error)) from error
    if sum(dataset.size for dataset in datasets.values()) * 8 > file.id.get_filesize():
        raise _DamagedError(f"{path}: {name} claims more than the file holds.")
    arrays = {key: dataset[()] for key, dataset in datasets.items()}
    attributes = _attributes(file[f"layers/{name}"])
    if not arrays["mean"].dtype == arrays["scatter"].dtype == np.float64:
        raise _DamagedError(f"{path}: the moments of {name} are not float64.")
    moments = Moments(
        int(arrays["count"]), torch.from_numpy(arrays["mean"]), torch.from_numpy(arrays["scatter"])
    )
    if moments.kind != attributes["kind"] or set(moments.scatter.shape) != {moments.dim}:
        raise _DamagedError(f"{path}: {name} has moments of shape {tuple(moments.scatter.shape)}.")
    images = root["stop"] - root["start"] - root["num_failed"]
    each = attributes["rows_per_image"]
    found = (moments.count, moments.dim * each)
    if found != (images * each, math.prod(attributes["shape"])):
        raise _DamagedError(
            f"{path}: {name} counts {moments.count} rows of {moments.dim} features, which does "
            f"not fit {images} images of shape {attributes['shape']}."
        )
    if not (moments.mean.isfinite().all() and moments.scatter.isfinite().all()):
        raise _DamagedError(f"{path}: the moments of {name} are not finite.")
    return moments, attributes


def load_moments(path: Path, layer: str) -> Moments:
    """The moments of one layer from a finished stats.h5, compared with its checksum.

    Raises:
        StoreError: it is not there, not finished, damaged, or newer than this featx.
        LayerError: it has no such layer.
    """
    return load_layer(path, layer)[0]


def load_layer(path: Path, layer: str) -> tuple[Moments, dict[str, Any]]:
    """As `load_moments`, with what the file says of itself and of the layer.

    Returns:
        the moments, and the root attributes joined with the layer's.
    """
    path = Path(path)
    if not path.is_file():
        raise StoreError(f"there is no statistics file {path}. job=stats makes one.")
    with _reading(path) as file:
        root = _attributes(file)
        moments, attributes = _read_layer(file, path, layer, root)
        if not root["complete"]:
            raise StoreError(
                f"{path} holds rows {root['start']} to {root['stop']} of a run that goes on; its "
                "statistics are in the file beside the folder when it is complete."
            )
    return moments, {**root, **attributes}


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear map of features about their mean: y = components (x - mean).

    Attributes:
        mean: (D,) float64.
        components: (k, D) float64.
        explained_variance: of the principal directions behind it, largest first, float64.
    """

    mean: torch.Tensor
    components: torch.Tensor
    explained_variance: torch.Tensor
    _ready: dict[tuple[torch.device, torch.dtype], tuple[torch.Tensor, ...]] = field(
        default_factory=dict, init=False, repr=False
    )

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """(..., D) on any device -> (..., k) float32 there; float64 for float64.

        Under autocast as without it.

        Raises:
            ReduceError: x has another number of features.
        """
        if x.shape[-1] != len(self.mean):
            raise ReduceError(
                f"a projection of {len(self.mean)} features does not fit a tensor of shape "
                f"{tuple(x.shape)}; its statistics belong to another layer or reduction."
            )
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        high, low, matrix = self._on(x.device, dtype)
        with torch.autocast(x.device.type, enabled=False):
            return (x.to(dtype) - high - low) @ matrix

    def _on(self, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        if (device, dtype) not in self._ready:
            with _plain_tensors():
                # A mean of 1e6 in float32 is off by up to 0.03; what its rounding left follows.
                high = self.mean.to(dtype)
                low = (self.mean - high.double()).to(dtype)
                parts = (high, low, self.components.T.to(dtype).contiguous())
                self._ready[device, dtype] = tuple(part.to(device) for part in parts)
        return self._ready[device, dtype]


def principal_components(moments: Moments, k: int) -> Projection:
    """The k directions of largest variance, as orthonormal rows, largest first.

    The sign of a direction is that which makes its largest entry positive. Variances are over
    n - 1, as in scikit-learn.

    Raises:
        ConfigError: there are not k directions in which the rows vary, or only a diagonal.
    """
    variances, directions = _eigen(moments, "principal components")
    _check_k(moments, variances, k)
    return Projection(moments.mean.cpu(), directions[:k], variances[:k])


def whitening(
    moments: Moments, k: int | None = None, epsilon: float = 0.0, zca: bool = False
) -> Projection:
    """A map after which features are uncorrelated with variance 1.

        PCA: y = (L + epsilon)^(-1/2) U^T (x - mean),  with covariance = U L U^T
        ZCA: y = U (L + epsilon)^(-1/2) U^T (x - mean)

    A. J. Bell, T. J. Sejnowski, The "independent components" of natural scenes are edge filters,
    Vision Research 37(23), 1997, for ZCA: of all whitening maps the one nearest to the identity.

    Args:
        moments: with the full scatter matrix.
        k: directions that are kept, those of largest variance; None for all D. PCA gives k
            features, ZCA D of them.
        epsilon: added to each variance, in its unit; keeps directions of little variance, which
            are mostly noise, from being blown up.
        zca: turn back into the features' own axes.

    Raises:
        ConfigError: k is out of range, or directions without variance are left and epsilon is 0.
    """
    if not 0 <= epsilon < math.inf:
        raise ConfigError(f"epsilon is {epsilon}; expected a number of at least 0.")
    variances, directions = _eigen(moments, "whitening")
    k = moments.dim if k is None else k
    _check_k(moments, variances, k, needs_variance=epsilon == 0)
    kept = directions[:k]
    components = kept / (variances[:k, None] + epsilon).sqrt()
    if zca:
        components = kept.T @ components
    return Projection(moments.mean.cpu(), components, variances[:k])


def frechet_distance(a: Moments, b: Moments) -> float:
    """The squared Fréchet distance of two Gaussians with these means and covariances (FID).

        |mean_a - mean_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2))

    M. Heusel et al., GANs Trained by a Two Time-Scale Update Rule Converge to a Local Nash
    Equilibrium, NeurIPS 2017, equation 6. With C = F F^T, the trace of the root is the sum of the
    singular values of F_a^T F_b; no root of a matrix product is taken, so singular covariances
    (fewer rows than features) need no offset on the diagonal, and nothing becomes complex.

    Args:
        a, b: of the same features; covariances are over n - 1, as in the published FID code.

    Raises:
        ConfigError: different numbers of features, fewer than two rows, or only a diagonal.
    """
    if a.dim != b.dim:
        raise ConfigError(f"a distance between {a.dim} and {b.dim} features is not defined.")
    factors = []
    for moments in (a, b):
        variances, directions = _eigen(moments, "a Fréchet distance")
        factors.append(directions * variances[:, None].sqrt())
    root_trace = torch.linalg.svdvals(factors[0] @ factors[1].T).sum()
    traces = a.variance().sum().cpu() + b.variance().sum().cpu()
    shift = (a.mean.cpu() - b.mean.cpu()).square().sum()
    return max(0.0, float(shift + traces - 2 * root_trace))


def _eigen(moments: Moments, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Variances (D,), largest first, and directions (D, D), one a row; float64, on the CPU."""
    moments.check_full(what)
    values, vectors = torch.linalg.eigh(moments.covariance().cpu())
    variances, directions = values.flip(0).clamp_(min=0), vectors.flip(1).T
    # n rows vary in n - 1 directions; what rounding left in the others would pass for variance.
    variances[moments.count - 1 :] = 0
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    return variances, directions * largest.sign()


def _check_k(
    moments: Moments, variances: torch.Tensor, k: int, needs_variance: bool = True
) -> None:
    """Raise ConfigError where there are not k directions, or where they have no variance."""
    if not 1 <= k <= moments.dim:
        raise ConfigError(f"k is {k}; expected 1 to {moments.dim}, the number of features.")
    floor = float(variances[0]) * moments.dim * torch.finfo(torch.float64).eps
    rank = int((variances > floor).sum())
    if needs_variance and k > rank:
        raise ConfigError(
            f"k is {k}, but the {moments.count} rows of {moments.dim} features vary in {rank} "
            "directions only. Give a smaller k, or take more rows; whitening also takes an epsilon."
        )
