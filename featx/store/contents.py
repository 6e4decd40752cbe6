"""Contents of a store: the files, and the rows and layers that each of them holds."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from featx.errors import StoreError, nearest
from featx.storage import is_url
from featx.store import layout
from featx.store.dtypes import dtype_name, memory_dtype
from featx.store.hdf5_files import check_hard_links
from featx.store.layout import geometry_values
from featx.store.manifest import DamagedManifestError, Manifest, Run, load_manifest, num_runs_of
from featx.store.open_files import Handles, OpenFile
from featx.store.part_files import DamageRecord, part_names

NUM_ATTEMPTS = 3
"""Number of attempts to read a folder that is being packed meanwhile."""


@dataclass(frozen=True)
class Segment:
    """File with rows [start, stop) of some layers, and the fingerprint that it must carry."""

    path: Path
    start: int
    stop: int
    fingerprint_sha256: str
    layers: frozenset[str]


@dataclass(frozen=True)
class LayerInfo:
    """Description of a dataset; `stored_dtype` is the type in the file, such as 'bfloat16'."""

    row_shape: tuple[int, ...]
    stored_dtype: str
    attrs: dict[str, object]

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return memory_dtype(self.stored_dtype)


@dataclass(frozen=True)
class Contents:
    """Snapshot of a store.

    Attributes:
        num_rows: number of rows of the listing, computed or not.
        complete: whether every row of every layer is there.
        segments: files with rows; those of earlier runs come first.
        columns: file with /key, /label and /columns of all rows.
    """

    num_rows: int
    complete: bool
    segments: tuple[Segment, ...]
    layers: dict[str, LayerInfo]
    columns: Path
    column_names: tuple[str, ...]
    classes: tuple[str, ...]
    attrs: dict[str, Any]

    @property
    def num_rows_present(self) -> int:
        """Number of rows that the store holds so far, failed ones included."""
        layer = next(iter(self.layers), "")
        return sum(each.stop - each.start for each in self.segments if layer in each.layers)


def find_contents(root: Path, handles: Handles) -> Contents:
    if not root.exists():
        raise StoreError(no_store_at(root))
    if root.is_file():
        if root.name == layout.LISTING or root.suffix in (".json", ".html", ".csv"):
            raise StoreError(f"{root} is no store: give its folder, or its {layout.PACKED}.")
        return _packed_contents(root, handles)[0]
    for _ in range(NUM_ATTEMPTS):
        before = file_state(root / layout.PACKED)
        handles.forget()
        failure: OSError | None = None
        try:
            contents = _folder_contents(root, before is not None, handles)
        except (FileNotFoundError, StoreError) as error:
            failure = error
        if file_state(root / layout.PACKED) == before:
            break
        # The store was packed meanwhile and parts vanished, so its folder is listed again.
    if isinstance(failure, FileNotFoundError):
        raise StoreError(f"{root} holds no store: {failure.filename} is missing.")
    if failure is not None:
        raise failure
    return contents


def no_store_at(root: Path) -> str:
    """Return the sentence that a path does not exist, with the stores of a similar name."""
    return f"there is no store at {root}.{nearest(root.name, _stores_in(root.parent))}"


def _stores_in(folder: Path) -> list[str]:
    if is_url(folder):
        return []
    return sorted(each.parent.name for each in folder.glob(f"*/{layout.MANIFEST}"))


def file_state(path: Path) -> tuple[int, int] | None:
    """Inode and modification time of a file, or None; they change when it is replaced."""
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    return state.st_ino, state.st_mtime_ns


def _folder_contents(root: Path, is_packed: bool, handles: Handles) -> Contents:
    manifest, _ = load_manifest(root)
    packed = None
    if is_packed:
        try:
            packed = _packed_contents(root / layout.PACKED, handles)
        except StoreError:
            # The rows of one that waits for its repair are in the parts, as far as they are sound.
            if layout.PACKED not in DamageRecord.read(root).files:
                raise
    if packed is not None:
        contents, num_runs = packed
        if num_runs is None and manifest is not None:
            num_runs = manifest.num_runs_of(str(contents.attrs.get("fingerprint")))
        if num_runs is None or manifest is None or len(manifest.runs) < num_runs:
            return contents
        # Keys of new rows come from samples.h5, so both files must belong to the same store.
        if contents.attrs.get("fingerprint") != manifest.digest_of(num_runs):
            raise StoreError(
                f"{root / layout.PACKED} belongs to another run than {layout.MANIFEST}."
            )
        if len(manifest.runs) == num_runs:
            return contents
        return _contents_with_parts(root, manifest, contents, num_runs, handles)
    if manifest is None:
        inside = ", ".join(_stores_in(root)[:5])
        raise StoreError(
            f"{root} holds no store: there is no {layout.MANIFEST} in it."
            + (f" Its folders do, such as {inside}." if inside else "")
        )
    return _contents_with_parts(root, manifest, None, 0, handles)


def _packed_contents(path: Path, handles: Handles) -> tuple[Contents, int | None]:
    """Contents of a features.h5, and the number of its runs or None if its manifest is damaged.

    Only this number is taken from the manifest; everything that describes rows has checksums.
    """
    with handles.use(path) as opened:
        attrs = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in opened.file.attrs.items()
        }
        if "featx_format" not in attrs:
            raise StoreError(f"{path} is an HDF5 file, but not a featx store.")
        layout.check_version(path, int(attrs["featx_format"]))
        if "part" in attrs:
            raise StoreError(f"{path} is one part of a store; open the store's folder.")
        num_rows = opened.dataset(layout.KEY).size
        for name, kind in ((layout.KEY, "S"), (layout.LABEL, "i"), (layout.STATUS, "u")):
            column = opened.dataset(name)
            if column.shape != (num_rows,) or column.dtype.kind != kind:
                raise StoreError(
                    f"{path}: /{name} is {column.shape} {column.dtype}; the store has {num_rows} "
                    "rows."
                )
        check_hard_links(opened.file, layout.FEATURES)
        names = sorted(opened.file[layout.FEATURES], key=_by_numbers)
        layers = {name: _layer_info(opened, name, num_rows) for name in names}
        classes = opened.texts(layout.CLASSES)
        column_names = opened.column_names()
        num_runs: int | None = None
        with contextlib.suppress(DamagedManifestError):
            num_runs = num_runs_of(opened.file)
        attrs.pop(layout.MANIFEST_COPY, None)
    segment = Segment(path, 0, num_rows, str(attrs.get("fingerprint")), frozenset(layers))
    complete = bool(attrs.get("complete", False))
    contents = Contents(num_rows, complete, (segment,), layers, path, column_names, classes, attrs)
    return contents, num_runs


def _by_numbers(name: str) -> tuple[list[str | int], str]:
    """Sort key of the names of layers, by which blocks.2 comes before blocks.10."""
    parts = re.split("([0-9]+)", name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], name


def _layer_info(opened: OpenFile, name: str, num_rows: int) -> LayerInfo:
    dataset = opened.dataset(f"{layout.FEATURES}/{name}")
    if dataset.shape[:1] != (num_rows,) or dataset.dtype.kind != "f":
        raise StoreError(
            f"{opened.path}: {name} is {dataset.shape} {dataset.dtype}; expected floats, "
            f"{num_rows} rows."
        )
    attrs = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in dataset.attrs.items()
    }
    return LayerInfo(dataset.shape[1:], dtype_name(dataset), attrs)


def _contents_with_parts(
    root: Path, manifest: Manifest, packed: Contents | None, num_packed: int, handles: Handles
) -> Contents:
    """Contents of the packed runs, if any, together with the parts of later runs.

    New rows become visible as they are committed. New layers become visible when they and all runs
    before them are complete, so that a row that is ok has values in every layer.
    """
    listing = root / layout.LISTING
    with handles.use(listing) as opened:
        classes, names = opened.texts(layout.CLASSES), opened.column_names()
        if (known := opened.dataset(layout.KEY).size) < manifest.num_rows:
            raise StoreError(
                f"{listing} has {known} rows, but {layout.MANIFEST} counts {manifest.num_rows}."
            )
    file_names = part_names(root)
    segments = list(packed.segments) if packed else []
    layers = dict(packed.layers) if packed else {}
    num_rows = packed.num_rows if packed else 0
    complete = packed is None or packed.complete
    hidden: set[str] = set()
    for number, run in enumerate(manifest.runs[num_packed:], num_packed):
        run_segments = _segments(root, run, file_names)
        is_committed = all(layout.part_name(part.index) in file_names for part in run.parts())
        adds_layers = number > 0 and not run.names <= {*layers, *hidden}
        if adds_layers and not (is_committed and complete):
            hidden |= run.names
            continue
        complete = complete and is_committed
        segments += run_segments
        num_rows = max(num_rows, run.grid.stop_row)
        for spec in run.layers:
            if spec.name in hidden:
                continue
            attrs = layout.layer_attributes(spec)
            attrs |= geometry_values(run.tokens.get(spec.name))
            layers.setdefault(spec.name, LayerInfo(spec.shape, spec.dtype, attrs))
    first = manifest.runs[0]
    attrs = layout.root_attributes(first.header, manifest.digest, complete)
    attrs["codec"] = first.codec
    in_order = {name: layers[name] for name in sorted(layers, key=_by_numbers)}
    return Contents(num_rows, complete, tuple(segments), in_order, listing, names, classes, attrs)


def _segments(root: Path, run: Run, file_names: set[str]) -> list[Segment]:
    """Parts of a run that exist."""
    # A path is joined once for each part, and not twice: most of the time of opening very many.
    folder, layers = root / layout.PARTS, run.names
    names = ((layout.part_name(part.index), part) for part in run.parts())
    return [
        Segment(folder / name, part.start, part.stop, run.digest, layers)
        for name, part in names
        if name in file_names
    ]
