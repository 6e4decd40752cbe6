"""Origin of a store, its runs and its rows, without reading features."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from featx.base import size_text
from featx.export.selection import as_utf8
from featx.store import FeatureStore, Run, layout, load_manifest
from featx.types import Status

CLASSES_SHOWN = 30
"""Maximum number of classes in the table of rows by class."""


@dataclass(frozen=True)
class RunFacts:
    """One run that wrote to a store.

    Attributes:
        layers: names of its datasets.
        rows: its rows of the store, as text.
        config: its config as YAML, as the store contains it, without secrets.
        resolved: (option, value) for each option that was `auto`.
    """

    layers: tuple[str, ...]
    rows: str
    config: str
    resolved: list[tuple[str, str]]


@dataclass(frozen=True)
class ClassRows:
    """Rows of one class.

    Attributes:
        name: name of the class.
        rows: number of its rows.
        ok: number of those that did not fail.
    """

    name: str
    rows: int
    ok: int


@dataclass(frozen=True)
class Provenance:
    """Origin of a store, and counts of its rows.

    Attributes:
        facts: (name, value) of the store, the model and the versions.
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

    facts: list[tuple[str, str]]
    runs: list[RunFacts]
    num_rows: int
    num_ok: int
    num_failed: int
    num_absent: int
    classes: list[ClassRows]
    num_classes: int
    num_unlabelled: int
    pending: list[str]


def provenance_of(store: FeatureStore) -> Provenance:
    """Collect everything that is known without reading features."""
    manifest = load_manifest(store.root)[0] if store.root.is_dir() else None
    runs = [_run_facts(run) for run in manifest.runs] if manifest else []
    if not runs:
        runs = [RunFacts(store.layers, "all", str(store.attrs.get("config", "")), [])]
    ok, absent = store.ok, store.status == Status.ABSENT
    labelled = store.labels >= 0
    rows = np.bincount(store.labels[labelled], minlength=len(store.classes))
    fine = np.bincount(store.labels[labelled & ok], minlength=len(store.classes))
    order = np.argsort(-rows, kind="stable")[:CLASSES_SHOWN]
    return Provenance(
        facts=_facts(store),
        runs=runs,
        num_rows=len(store),
        num_ok=int(ok.sum()),
        num_failed=int((~ok & ~absent).sum()),
        num_absent=int(absent.sum()),
        classes=[
            ClassRows(as_utf8(store.classes[i]), int(rows[i]), int(fine[i])) for i in order.tolist()
        ],
        num_classes=len(store.classes),
        num_unlabelled=int((~labelled).sum()),
        pending=[name for run in runs for name in run.layers if name not in store],
    )


def _facts(store: FeatureStore) -> list[tuple[str, str]]:
    """Return names and values of the store, the model and the versions."""
    attrs = store.attrs
    names = {"model": "model", "weights": "weights", "weights_sha256": "sha256 of the weights"}
    names |= {"transform": "transform", "fingerprint": "fingerprint"}
    facts = [("store", as_utf8(str(store.root)))]
    facts += [(shown, str(attrs.get(name, "not told"))) for name, shown in names.items()]
    facts.append(("versions", _versions(attrs)))
    packed = store.root.is_file() or (store.root / layout.PACKED).exists()
    files = [store.root] if store.root.is_file() else _files(store)
    kind = "one packed file" if packed else f"{len(files)} parts, not packed"
    facts.append(("on disk", f"{size_text(sum(f.stat().st_size for f in files))}, {kind}"))
    return facts


def _files(store: FeatureStore) -> list[Any]:
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
        return "not told"


def _run_facts(run: Run) -> RunFacts:
    """Convert a run of the manifest."""
    return RunFacts(
        layers=tuple(spec.name for spec in run.layers),
        rows=f"{run.grid.first_row} to {run.grid.stop_row - 1}",
        config=run.header.config,
        resolved=[(name, str(value)) for name, value in run.resolved.items()],
    )
