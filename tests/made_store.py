"""Made-up runs for the store's tests: their rows are known, so what is read can be compared."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from featx.storage import AtomicFolder, exclusive_lock
from featx.store import (
    FeatureStore,
    PartBuilder,
    Run,
    StoreSession,
    layout,
    listing_identity,
    merge_listing,
    pack_parts,
    write_listing,
)
from featx.store.hdf5_files import seal_texts
from featx.store.pack import pack
from featx.types import (
    Failure,
    LayerSpec,
    Listing,
    Part,
    Status,
    StoreHeader,
    TokenGeometry,
)


def make_spec(name: str, shape: tuple[int, ...], dtype: str = "float32") -> LayerSpec:
    return LayerSpec(name, name, "output", "gem", {"p": 3.0}, shape, dtype, "float32")


def make_header(**fingerprint: Any) -> StoreHeader:
    return StoreHeader(
        fingerprint={"model": "toy", "size": [224, 224], **fingerprint},
        config="model: toy\n",
        model="toy",
        weights="random",
        weights_sha256="ab" * 32,
        transform="resize 224",
        versions={"featx": "0", "torch": "2"},
    )


def make_listing(num_rows: int) -> Listing:
    keys = np.array(sorted(b"%s/%04d.jpg" % ((b"cat", b"dog")[i % 2], i) for i in range(num_rows)))
    labels = np.arange(num_rows, dtype=np.int64) % 3 - 1
    return Listing(keys.astype("S12"), labels, ("cat", "dög"))


def listing_file(listing: Listing) -> bytes:
    """Content of samples.h5 for a listing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / layout.LISTING
        write_listing(AtomicFolder(path.parent), path, listing)
        return path.read_bytes()


@dataclass(frozen=True)
class MadeRun:
    """One run with all its rows; `features` holds what the engine would return.

    With `streamed` the rows of its parts go to the disk as they come, however small a part is.
    """

    listing: Listing
    specs: tuple[LayerSpec, ...]
    header: StoreHeader
    part_rows: int
    codec: str
    features: Mapping[str, np.ndarray]
    failures: tuple[Failure, ...] = ()
    resolved: Mapping[str, Any] = field(default_factory=dict)
    tokens: Mapping[str, TokenGeometry] = field(default_factory=dict)
    streamed: bool = False
    damaged: tuple[int, ...] = ()

    @property
    def grid(self) -> layout.Grid:
        return layout.Grid(len(self.listing), self.part_rows)

    def as_run(self) -> Run:
        settings = self.header, self.specs, self.grid, self.codec, self.resolved
        return Run(*settings, tokens=self.tokens)

    def expected(self, name: str) -> np.ndarray:
        """What the store must give back: NaN in failed rows."""
        rows = self.features[name].copy()
        rows[[failure.row for failure in self.failures]] = np.nan
        return rows

    def status(self) -> np.ndarray:
        status = np.zeros(len(self.listing), dtype=np.uint8)
        for failure in self.failures:
            status[failure.row] = failure.status
        status[list(self.damaged)] = Status.IMAGE_DAMAGED
        return status

    def session(self, root: Path, grow: bool = False) -> StoreSession:
        return StoreSession(root, self.as_run(), self.listing, grow)

    def builder(self, part: Part, batch: int | None = None) -> PartBuilder:
        """A part with all its rows, added in batches."""
        return self._filled(PartBuilder(part, self.specs), batch)

    def part_of(self, session: StoreSession, part: Part, batch: int | None = None) -> PartBuilder:
        """A part of a session with all its rows, added in batches."""
        least = 0 if self.streamed else 1 << 60
        return self._filled(session.begin_part(part, self.specs, least), batch)

    def _filled(self, builder: PartBuilder, batch: int | None) -> PartBuilder:
        part = builder.part
        batch = batch or len(part)
        for start in range(part.start, part.stop, batch):
            stop = min(start + batch, part.stop)
            rows = {name: values[start:stop] for name, values in self.features.items()}
            failed = [f for f in self.failures if start <= f.row < stop]
            damaged = [row for row in self.damaged if start <= row < stop]
            builder.add(start, rows, failed, damaged=damaged)
        return builder

    def compute_lost(self, session: StoreSession) -> list[int]:
        """Compute the rows that were lost with damaged chunks, put to the sound ones."""
        rows = session.lost_rows()
        for part in session.parts_with(rows):
            etag, sound = session.etag(part), session.read_part(part)
            stored, failures, images = sound.features, sound.failures, sound.images
            lost = sorted({*rows} & {*range(part.start, part.stop)})
            for name, values in stored.items():
                values[[row - part.start for row in lost]] = self.features[name][lost]
            failures += [failure for failure in self.failures if failure.row in lost]
            builder = PartBuilder(part, self.specs)
            damaged = sound.damaged | ({*self.damaged} & {*lost})
            builder.add(part.start, stored, failures, images, damaged)
            session.replace(builder, etag)
        if rows:
            session.survey_again()
        return rows

    def write(self, root: Path, parts: Iterable[int] | None = None, packed: bool = False) -> Path:
        """Commit parts, all of them unless some are named, in the order given; then pack."""
        session = self.session(root)
        with session.hold():
            self.compute_lost(session)
            order = range(len(self.grid)) if parts is None else parts
            for index in order:
                session.commit(self.part_of(session, self.grid.part(index)))
            if packed:
                pack(root)
                session.finish_packing()
        return root

    def finish(
        self, root: Path, grow: bool = False, at_most: int | None = None, packed: bool = False
    ) -> Path:
        """Commit what the session says is missing, or the first parts of it; then pack."""
        with self.session(root, grow).hold() as session:
            self.compute_lost(session)
            for part in session.missing()[:at_most]:
                session.commit(self.part_of(session, part))
            if packed and not session.is_packed:
                pack(root)
                session.finish_packing()
        return root

    def copied(self, root: Path, packed: bool = False) -> Path:
        """Put a copy of the complete store into an empty folder; `finish` makes it once a process.

        For tests of what is done with a store: a copy takes 1 ms, writing one 50 ms. A test that
        patches what writes a store needs `finish`.
        """
        root.mkdir(parents=True, exist_ok=True)
        assert not any(root.iterdir()), f"{root} is not empty"
        # All that decides on the bytes: tests make the chunks smaller.
        chunks = (layout.CHUNK_BYTES, layout.CHUNK_BYTES_COMPRESSED)
        made = _templates() / hashlib.sha256(pickle.dumps((self, packed, chunks))).hexdigest()
        if not made.exists():
            self.finish(made, packed=packed)
        shutil.copytree(made, root, dirs_exist_ok=True)
        return root

    def identified(self) -> MadeRun:
        """The same run with a fingerprint that says what a real one does of layers and rows."""
        return self.changed(
            layers=[spec.name for spec in self.specs],
            listing=listing_identity(self.listing),
            part_rows=self.part_rows,
            codec=self.codec,
        )

    def changed(self, **fingerprint: Any) -> MadeRun:
        """The same run with another fingerprint."""
        header = replace(self.header, fingerprint={**self.header.fingerprint, **fingerprint})
        return replace(self, header=header)


def as_bfloat16(run: MadeRun) -> MadeRun:
    """The same run with the upper half of its float32 numbers."""
    specs = tuple(replace(spec, dtype="bfloat16") for spec in run.specs)
    bits = {n: (rows.view(np.uint32) >> 16).astype("<u2") for n, rows in run.features.items()}
    return replace(run, specs=specs, features=bits)


@functools.cache
def _templates() -> Path:
    """Folder of the stores that `MadeRun.copied` copies; it is deleted with the process."""
    folder = Path(tempfile.mkdtemp(prefix="featx-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def stored_sums(dataset: h5py.Dataset) -> list[int]:
    """The checksums that the chunks of a dataset should have."""
    dataset.file.flush()
    rest = (0,) * (dataset.ndim - 1)
    starts = range(0, len(dataset), dataset.chunks[0])
    return [layout.checksum(dataset.id.read_direct_chunk((i, *rest))[1]) for i in starts]


@contextlib.contextmanager
def edited(path: Path) -> Iterator[h5py.File]:
    """A file of a store, open for changes; the checksums of its texts fit them in the end."""
    with h5py.File(path, "r+") as file, path.open("rb", buffering=0) as raw:
        yield file
        seal_texts(file, raw)


def make_run(
    num_rows: int = 21,
    part_rows: int = 8,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    dtype: str = "float32",
    codec: str = "none",
    failed: Iterable[int] = (),
    seed: int = 0,
    damaged: Iterable[int] = (),
) -> MadeRun:
    """A run with random rows; some failed, for reasons in turn, or are of damaged images."""
    shapes = {"flat": (5,), "map": (3, 2, 2)} if shapes is None else shapes
    rng = np.random.default_rng(seed)
    listing, damaged = make_listing(num_rows), tuple(damaged)
    accepts = {"data.damaged": "accept"} if damaged else {}
    reasons = [Status.MISSING, Status.DECODE_ERROR, Status.NON_FINITE]
    failures = tuple(
        Failure(
            row, bytes(listing.keys[row]), reasons[row % 3], "OSError", f"row {row}: bröken, \n 'x'"
        )
        for row in failed
    )
    return MadeRun(
        listing,
        tuple(make_spec(name, shape, dtype) for name, shape in shapes.items()),
        make_header(seed=seed, **accepts),
        part_rows,
        codec,
        {name: rng.normal(size=(num_rows, *shape)).astype(dtype) for name, shape in shapes.items()},
        failures,
        damaged=damaged,
    )


def make_added(
    run: MadeRun,
    shapes: Mapping[str, tuple[int, ...]],
    part_rows: int = 8,
    dtype: str = "float32",
    codec: str = "none",
    failed: Iterable[int] = (),
    seed: int = 1,
) -> MadeRun:
    """A later run that adds layers to all rows of a store."""
    made = make_run(len(run.listing), part_rows, shapes, dtype, codec, seed=seed)
    failures = tuple(
        Failure(row, bytes(run.listing.keys[row]), Status.TIMEOUT, "TimeoutError", f"again {row}")
        for row in failed
    )
    same = {"listing": run.listing, "header": run.header, "damaged": run.damaged}
    added = replace(made, failures=failures, **same)
    return added.identified()


def make_grown(
    run: MadeRun,
    new_rows: int,
    part_rows: int = 8,
    codec: str = "none",
    failed: Iterable[int] = (),
) -> MadeRun:
    """The same layers of a data set that has new images; their keys fall between the old ones.

    Args:
        run: what the store has; `grown.features` begin with its rows.
        new_rows: how many images came.
        part_rows, codec: of the run that adds them.
        failed: of the new rows, counted in the whole store.
    """
    old, count = run.listing, len(run.listing)
    new = [b"%s/%d-%04d.jpg" % ((b"ant", b"cow", b"zebra")[i % 3], count, i)
           for i in range(new_rows)]  # fmt: skip
    keys = np.array(sorted([*old.keys.tolist(), *new]))
    names = tuple(sorted({*old.classes, "ant"}))
    label_of = {
        key: names.index(old.classes[label]) if label >= 0 else -1
        for key, label in zip(old.keys.tolist(), old.labels.tolist(), strict=True)
    }
    ant = names.index("ant")
    labels = [label_of.get(key, ant if key.startswith(b"ant/") else -1) for key in keys.tolist()]
    found = Listing(keys, np.array(labels, np.int64), names)
    listing = merge_listing(Path("made"), old, found)
    rng = np.random.default_rng(count + new_rows)
    features = {
        spec.name: np.concatenate(
            [
                run.features[spec.name],
                rng.normal(size=(new_rows, *spec.shape)).astype(run.features[spec.name].dtype),
            ]
        )
        for spec in run.specs
    }
    failures = tuple(
        Failure(row, bytes(listing.keys[row]), Status.EMPTY, "ImageFault", f"new {row}")
        for row in failed
    )
    grown = replace(
        run,
        listing=listing,
        features=features,
        part_rows=part_rows,
        codec=codec,
        failures=(*run.failures, *failures),
    )
    return grown.identified()


def joined(*runs: MadeRun) -> MadeRun:
    """One run with the layers of several over the same rows, the first one's settings."""
    first = runs[0]
    failures = {f.row: f for run in reversed(runs) for f in run.failures}
    return replace(
        first,
        specs=tuple(spec for run in runs for spec in run.specs),
        features={name: rows for run in runs for name, rows in run.features.items()},
        failures=tuple(failures[row] for row in sorted(failures)),
    ).identified()


def dataset_digests(path: str | Path) -> dict[str, str]:
    """sha256 of the values of every dataset of a file or packed store, with shape and type."""
    found = {}

    def visit(name: str, item: Any) -> None:
        # The chunk table says where things lie, which depends on how a file came to be.
        if isinstance(item, h5py.Dataset) and name != layout.CHUNK_TABLE:
            text = f"{item.shape} {item.dtype} ".encode() + np.ascontiguousarray(item[()]).tobytes()
            found[name] = hashlib.sha256(text).hexdigest()

    packed = Path(path, "features.h5")
    with h5py.File(packed if packed.exists() else path, "r") as file:
        file.visititems(visit)
    return found


def temporary_files(root: Path) -> list[Path]:
    return sorted(root.rglob(".tmp-*"))


def pack_alone(root: Path) -> None:
    """Pack a store under its lock."""
    with exclusive_lock(root / layout.LOCK):
        pack_parts(root)


def make_labelled(
    features: Mapping[str, np.ndarray],
    labels: Iterable[int],
    classes: Iterable[str],
    failed: Iterable[int] = (),
) -> MadeRun:
    """A run whose rows are given, layer by layer, with their labels; keys are 00000.jpg and so on.

    There are several parts, but few: each costs some milliseconds. The header says that the network
    saw 32 x 32 pixels.
    """
    labels = np.array(list(labels), np.int64)
    part_rows = max(8, 1 << (len(labels) // 4).bit_length())
    shapes = {name: rows.shape[1:] for name, rows in features.items()}
    run = make_run(len(labels), part_rows, shapes, failed=failed)
    keys = np.array([b"%05d.jpg" % i for i in range(len(labels))])
    header = replace(run.header, transform="resize 32 bilinear antialias, crop 32x32, mean, std")
    return replace(
        run,
        header=header,
        listing=Listing(keys, labels, tuple(classes)),
        features={name: rows.astype(np.float32) for name, rows in features.items()},
    )


def ok_vectors(store: FeatureStore, layer: str) -> npt.NDArray[np.float32]:
    """Features of all ok rows of a layer as (n, D) float32, with and without a label."""
    features = store[layer][store.ok]
    return features.reshape(len(features), -1).astype(np.float32)


def flip_byte_of_row(path: Path, layer: str, row: int) -> None:
    """One bit of one stored row, in the chunk's bytes on the disk."""
    with h5py.File(path) as file:
        dataset = file[f"features/{layer}"]
        step = dataset.chunks[0]
        chunk = dataset.id.get_chunk_info_by_coord(
            (row // step * step,) + (0,) * (dataset.ndim - 1)
        )
        row_bytes = int(np.prod(dataset.shape[1:])) * dataset.dtype.itemsize
    with path.open("r+b") as raw:
        raw.seek(chunk.byte_offset + row % step * row_bytes)
        byte = raw.read(1)[0]
        raw.seek(-1, os.SEEK_CUR)
        raw.write(bytes([byte ^ 1]))
