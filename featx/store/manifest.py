"""Manifest of a store (featx.json): the runs that made it.

It is written before the first row, and every part carries a copy. A store is made by one run. A
later run may add layers to all rows, or rows to all layers; each run is a rectangle in the table
of rows and layers, with its own parts and settings.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import h5py

from featx.base import digest
from featx.errors import ConfigError, StoreError
from featx.storage import is_url, paths_in
from featx.store import layout
from featx.store.hdf5_files import open_metadata
from featx.store.layout import geometry_of, geometry_values
from featx.types import ITEM_BYTES, Json, LayerSpec, Part, StoreHeader, TokenGeometry

_REQUIRED = ("fingerprint", "fingerprint_sha256", "num_rows", "part_rows", "codec", "layers")
_HEADER = ("config", "model", "weights", "weights_sha256", "transform", "versions")

_CONFORMANCE = "conformance"
"""Entry of a run with its comparison with the library's own path; stores made before lack it."""

_TOKENS = "tokens"
"""Entry of a run with the places of tokens.

It is no part of `layers`, in which older releases refuse names that they do not know.
"""

_CHECKSUM = "sha256"
"""Entry with the SHA-256 of all other entries of featx.json."""

_MAX_PARTS = 1_000_000
"""Largest number of parts, as names of parts have six digits.

A damaged manifest with a larger number could demand endless work.
"""


class DamagedManifestError(StoreError):
    """featx.json exists, and its content is not valid."""


@dataclass(frozen=True)
class Run:
    """Run that wrote to a store: some layers of some rows, computed with the same settings.

    Attributes:
        header: settings and versions, as every part of the run records them.
        grid: rows of the run and their division into parts.
        resolved: name -> value of every `auto`.
        conformance: comparison with the model library's own path, as JSON types; empty if there was
            none.
        tokens: dataset name -> places of its tokens, for layers of tokens and maps.
    """

    header: StoreHeader
    layers: tuple[LayerSpec, ...]
    grid: layout.Grid
    codec: str
    resolved: Json
    conformance: Json = field(default_factory=dict)
    tokens: Mapping[str, TokenGeometry] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the fingerprint, which every part of the run carries."""
        return digest(self.header.fingerprint)

    @property
    def model_settings(self) -> Json:
        """Entries of the fingerprint that decide, besides the weights, what the model computes."""
        settings = self.header.fingerprint
        return {key: settings[key] for key in settings if key.startswith("model.")}

    @property
    def names(self) -> frozenset[str]:
        """Names of the datasets."""
        return frozenset(spec.name for spec in self.layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows without compression."""
        return self.grid.num_rows * sum(spec.row_bytes for spec in self.layers)

    def parts(self) -> list[Part]:
        """All parts of the run, in order."""
        return [self.grid.part(i) for i in range(len(self.grid))]

    def as_dict(self) -> dict[str, object]:
        """JSON types for featx.json: its top level or, for later runs, an entry of `additions`."""
        tokens = {name: geometry_values(geometry) for name, geometry in self.tokens.items()}
        return {
            "fingerprint": dict(self.header.fingerprint),
            "fingerprint_sha256": self.digest,
            "first_row": self.grid.first_row,
            "num_rows": self.grid.num_rows,
            "first_part": self.grid.first_part,
            "part_rows": self.grid.part_rows,
            "codec": self.codec,
            "layers": [asdict(spec) for spec in self.layers],
            "resolved": dict(self.resolved),
            **({_CONFORMANCE: dict(self.conformance)} if self.conformance else {}),
            **({_TOKENS: tokens} if tokens else {}),
            **{name: getattr(self.header, name) for name in _HEADER},
        }

    @classmethod
    def from_dict(cls, values: Json) -> Run:
        """Create a run from the result of `as_dict`; raises ValueError, TypeError, LookupError."""
        missing = set(_REQUIRED) - set(values)
        if missing:
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        header = {name: values.get(name, "") for name in _HEADER}
        run = cls(
            header=StoreHeader(fingerprint=values["fingerprint"], **header),
            layers=tuple(
                LayerSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in values["layers"]
            ),
            grid=layout.Grid(
                num_rows=int(values["num_rows"]),
                part_rows=int(values["part_rows"]),
                first_row=int(values.get("first_row", 0)),
                first_part=int(values.get("first_part", 0)),
            ),
            codec=str(values["codec"]),
            resolved=values.get("resolved", {}),
            conformance=dict(values.get(_CONFORMANCE, {})),
            tokens={
                name: geometry
                for name, entry in values.get(_TOKENS, {}).items()
                if (geometry := geometry_of(entry)) is not None
            },
        )
        if run.digest != values["fingerprint_sha256"]:
            raise ValueError("its fingerprint differs from the recorded sha256")

        # A damaged manifest may also claim what is impossible.
        grid, num_parts = run.grid, run.grid.first_part + len(run.grid)
        if grid.part_rows < 1 or grid.part_rows & (grid.part_rows - 1):
            raise ValueError(f"part_rows is {grid.part_rows}, no power of two")
        if min(grid.num_rows, grid.first_row, grid.first_part) < 0 or num_parts > _MAX_PARTS:
            raise ValueError(f"it claims {grid.num_rows} rows in {num_parts} parts")
        if len(run.names) < len(run.layers):
            raise ValueError("it names a layer twice")
        for spec in run.layers:
            is_shape = all(type(n) is int and n > 0 for n in spec.shape)
            if spec.dtype not in ITEM_BYTES or not is_shape:
                raise ValueError(f"layer {spec.name} is {spec.shape} {spec.dtype}")
        return run


@dataclass(frozen=True)
class Manifest:
    """Runs of a store in the order in which they were started; at least one."""

    runs: tuple[Run, ...]

    def __post_init__(self) -> None:
        if self.num_parts > _MAX_PARTS:
            raise ConfigError(
                f"part_rows={self.runs[-1].grid.part_rows}: the store would have {self.num_parts} "
                f"parts, and at most {_MAX_PARTS} are supported. Give a larger part_rows, or leave "
                "it out."
            )

    @property
    def num_rows(self) -> int:
        """Number of rows of the listing."""
        return max(run.grid.stop_row for run in self.runs)

    @property
    def num_parts(self) -> int:
        """Number of parts of all runs, which share one numbering."""
        return sum(len(run.grid) for run in self.runs)

    @cached_property
    def layers(self) -> dict[str, LayerSpec]:
        """Every dataset of the store by name."""
        return {spec.name: spec for run in reversed(self.runs) for spec in run.layers}

    @property
    def digest(self) -> str:
        """SHA-256 that identifies the store: that of its only run, or of all runs together."""
        return self.digest_of(len(self.runs))

    def digest_of(self, num_runs: int) -> str:
        """SHA-256 that identified the store after its first `num_runs` runs."""
        if num_runs == 1:
            return self.runs[0].digest
        return digest({"runs": [run.digest for run in self.runs[:num_runs]]})

    def num_runs_of(self, fingerprint_sha256: str) -> int | None:
        """Number of runs after which the store had this SHA-256, or None if it never had."""
        counts = range(1, len(self.runs) + 1)
        return next(
            (count for count in counts if self.digest_of(count) == fingerprint_sha256), None
        )

    @property
    def listing_identity(self) -> str | None:
        """Digest of the listing in the fingerprint of the run with the last rows, or None."""
        latest = max(self.runs, key=lambda run: run.grid.stop_row)
        identity = latest.header.fingerprint.get("listing")
        return None if identity is None else str(identity)

    def first_run_with(self, layer: str) -> Run:
        """First run that computes a dataset."""
        return next(run for run in self.runs if layer in run.names)

    def run_of(self, part: Part) -> Run:
        """Run that a part belongs to."""
        return next(run for run in reversed(self.runs) if run.grid.first_part <= part.index)

    def to_json(self) -> bytes:
        """Content of featx.json, which every part carries."""
        return self._json

    @cached_property
    def _json(self) -> bytes:
        first, *others = self.runs
        values = {"featx_format": layout.FORMAT, **first.as_dict()}
        if others:
            values["additions"] = [run.as_dict() for run in others]
        values[_CHECKSUM] = digest(values)
        return (json.dumps(values, indent=2) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes, path: Path) -> Manifest:
        """Parse the content of featx.json.

        Raises DamagedManifestError if it is not valid, and StoreError if it has another format.
        """
        try:
            values = json.loads(data)
            version = int(values["featx_format"])
            if values.pop(_CHECKSUM, None) not in (None, digest(values)):
                raise ValueError("it differs from its own sha256")
            if version == layout.FORMAT:
                runs = [Run.from_dict(run) for run in (values, *values.get("additions", []))]
                counts = itertools.accumulate([len(run.grid) for run in runs], initial=0)
                if any(run.grid.first_part != n for run, n in zip(runs, counts, strict=False)):
                    raise ValueError("its parts are not numbered consecutively")
                return cls(tuple(runs))
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            raise DamagedManifestError(
                f"{path} is damaged ({error}), and no part of the store has an intact copy. "
                "overwrite=true deletes the store and extracts it again; until then h5py can "
                "still open its parts."
            ) from error
        layout.check_version(path, version)
        raise AssertionError("unreachable")


def read_manifest(root: Path) -> Manifest | None:
    """Read featx.json of a store; None if there is no such file.

    Raises StoreError if the file cannot be read, is damaged, or has a newer format, or files of the
    store are links to where there is nothing now: a run would start again next to them.
    """
    path = root / layout.MANIFEST
    for name in (layout.MANIFEST, layout.LISTING, layout.PACKED, layout.PARTS):
        link = root / name
        if not is_url(link) and link.is_symlink() and not link.exists():
            raise StoreError(
                f"{link} is a link to {link.readlink()}, which is not there now. If it is on "
                "another disk, mount that first; delete the link if its rows are to be computed "
                "again."
            )
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}.") from error
    return Manifest.from_json(data, path)


def load_manifest(root: Path) -> tuple[Manifest | None, bool]:
    """Read the manifest of a store, from a copy if featx.json is lost or damaged.

    Return the manifest or None, and whether featx.json itself is intact. Raises StoreError if it is
    damaged and there is no copy, or it has a newer format.
    """
    try:
        manifest = read_manifest(root)
    except DamagedManifestError:
        if (copy := _find_copy(root)) is None:
            raise
        return copy, False
    if manifest is not None:
        return manifest, True
    copy = _find_copy(root)
    return copy, copy is None


def _find_copy(root: Path) -> Manifest | None:
    """Manifest with the most runs among the copies in features.h5 and the parts, or None."""
    copies: list[Manifest] = []
    for path in [root / layout.PACKED, *paths_in(root / layout.PARTS, layout.PART_GLOB)]:
        try:
            with open_metadata(path) as file:
                copies.append(Manifest.from_json(bytes(file.attrs[layout.MANIFEST_COPY]), path))
        except (StoreError, *layout.UNREADABLE):
            continue  # one of them is enough
    return max(copies, key=lambda manifest: len(manifest.runs), default=None)


def require_manifest(root: Path) -> Manifest:
    """Read the manifest of a store as `load_manifest`; raise StoreError if there is none."""
    manifest, _ = load_manifest(root)
    if manifest is None:
        raise StoreError(f"{root} holds no store: there is no {layout.MANIFEST} in it.")
    return manifest


def num_runs_of(packed: h5py.File) -> int:
    """Number of runs that a features.h5 holds, by its copy of the manifest."""
    if layout.MANIFEST_COPY not in packed.attrs:
        return 1
    copy = bytes(packed.attrs[layout.MANIFEST_COPY])
    return len(Manifest.from_json(copy, Path(packed.filename)).runs)
