"""Origin of a store, its runs and its rows, without reading features."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.base import size_text
from featx.export.report.predictions_file import ROLES
from featx.export.report.redaction import without_folders, without_folders_in_yaml
from featx.export.selection import as_utf8
from featx.store import FeatureStore, Run, layout, load_manifest
from featx.types import Status

CLASSES_SHOWN = 40
"""Maximum number of classes in the table of rows by class."""


@dataclass(frozen=True)
class RunFacts:
    """One run that wrote to a store.

    `config` is YAML without secrets and absolute paths; `resolved` has each option that was `auto`.
    """

    layers: tuple[str, ...]
    rows: str
    config: str
    resolved: list[tuple[str, str]]


@dataclass(frozen=True)
class ClassRows:
    """Rows of one class.

    `roles` has the number of rows in each role of a probe's split, in the order of ROLES.
    """

    name: str
    rows: int
    ok: int
    roles: tuple[int, ...]


@dataclass(frozen=True)
class Provenance:
    """Origin of a store, and counts of its rows.

    Attributes:
        model: (name, value) of the model, its weights and preprocessing.
        versions: versions of the packages, as text.
        size: size and form of the store on the disk, as text.
        runs: runs in the manifest, or one entry from the store's attributes without a manifest.
        num_rows: number of rows.
        num_ok: rows that did not fail.
        num_failed: rows that failed.
        num_absent: rows that are not computed yet.
        classes: the largest classes, at most CLASSES_SHOWN.
        num_classes: number of all classes.
        num_unlabelled: rows without a label.
        pending: layers of an unfinished run, which are not readable yet.
    """

    model: list[tuple[str, str]]
    versions: str
    size: str
    runs: list[RunFacts]
    num_rows: int
    num_ok: int
    num_failed: int
    num_absent: int
    classes: list[ClassRows]
    num_classes: int
    num_unlabelled: int
    pending: list[str]


def provenance_of(
    store: FeatureStore, roles: npt.NDArray[np.int8] | None, folders: Sequence[str]
) -> Provenance:
    """Collect everything that is known without reading features."""
    manifest = load_manifest(store.root)[0] if store.root.is_dir() else None
    runs = [_run_facts(run, folders) for run in manifest.runs] if manifest else []
    if not runs:
        config = _redacted_config(str(store.attrs.get("config", "")), folders)
        runs = [RunFacts(store.layers, "all", config, [])]
    ok, absent = store.ok, store.status == Status.ABSENT
    labelled = store.labels >= 0
    num_classes = len(store.classes)
    rows = np.bincount(store.labels[labelled], minlength=num_classes)
    fine = np.bincount(store.labels[labelled & ok], minlength=num_classes)
    rows_of_role = [
        np.bincount(store.labels[labelled & (roles == role)], minlength=num_classes)
        for role in range(len(ROLES) if roles is not None else 0)
    ]
    order = np.argsort(-rows, kind="stable")[:CLASSES_SHOWN]
    return Provenance(
        model=_model_facts(store, folders),
        versions=_versions(store.attrs),
        size=_size(store),
        runs=runs,
        num_rows=len(store),
        num_ok=int(ok.sum()),
        num_failed=int((~ok & ~absent).sum()),
        num_absent=int(absent.sum()),
        classes=[
            ClassRows(
                as_utf8(store.classes[i]),
                int(rows[i]),
                int(fine[i]),
                tuple(int(counts[i]) for counts in rows_of_role),
            )
            for i in order.tolist()
        ],
        num_classes=num_classes,
        num_unlabelled=int((~labelled).sum()),
        pending=[name for run in runs for name in run.layers if name not in store],
    )


_MODEL = {
    "model": "Model",
    "weights": "Weights",
    "weights_sha256": "SHA-256",
    "transform": "Preprocessing",
    "fingerprint": "Fingerprint",
}
"""Attribute of the store -> its name for people."""


def _model_facts(store: FeatureStore, folders: Sequence[str]) -> list[tuple[str, str]]:
    """Return names and values of the model and its preprocessing."""
    return [
        (shown, without_folders(as_utf8(str(store.attrs.get(name, "unknown"))), folders))
        for name, shown in _MODEL.items()
    ]


def _size(store: FeatureStore) -> str:
    """Describe the size and the form of a store on the disk."""
    packed = store.root.is_file() or (store.root / layout.PACKED).exists()
    files = [store.root] if store.root.is_file() else _files(store)
    kind = "one packed file" if packed else f"{len(files)} parts, not packed"
    return f"{size_text(sum(f.stat().st_size for f in files))}, {kind}"


def _files(store: FeatureStore) -> list[Path]:
    """Return the packed file of a store, or the files of its parts."""
    if (packed := store.root / layout.PACKED).exists():
        return [packed]
    return sorted((store.root / layout.PARTS).glob(layout.PART_GLOB))


def _versions(attrs: Mapping[str, Any]) -> str:
    """Format the versions of packages that the store records."""
    try:
        versions = json.loads(str(attrs.get("versions", "")))
        return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    except (ValueError, AttributeError):
        return "unknown"


def _redacted_config(config: str, folders: Sequence[str]) -> str:
    """Return the YAML of a config without data.root and without absolute paths."""
    without_root = re.sub(r"(?m)^(data:\n(?: .*\n)*?  root): .*$", r"\1: (left out)", config)
    return without_folders_in_yaml(without_root, folders)


def _run_facts(run: Run, folders: Sequence[str]) -> RunFacts:
    """Convert a run of the manifest."""
    return RunFacts(
        layers=tuple(spec.name for spec in run.layers),
        rows=f"{run.grid.first_row} to {run.grid.stop_row - 1}",
        config=_redacted_config(run.header.config, folders),
        resolved=[(name, without_folders(str(v), folders)) for name, v in run.resolved.items()],
    )
