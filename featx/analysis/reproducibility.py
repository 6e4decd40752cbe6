"""Rows extracted again from their pictures, as they were the first time, and compared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.engine_specs import engine_spec
from featx.config import PROJECTIONS, ReduceConfig
from featx.config.layer_requests import layer_requests, with_statistics_at
from featx.config.run_config import Config, in_this_process
from featx.config.saved_config import data_of_saved, from_saved
from featx.errors import ConfigError, FeatxError, LayerError, StoreError, StoreMismatchError
from featx.pipeline.feature_sink import compute_rows
from featx.pipeline.image_changes import image_changes
from featx.pipeline.run_context import RunContext, build_run_context
from featx.sources import open_source
from featx.storage.s3_path import is_url
from featx.store.dtypes import from_raw
from featx.store.listing import read_listing
from featx.store.manifest import Manifest, Run
from featx.store.reader import FeatureStore
from featx.store.session import missing_parts
from featx.types import Batch, LayerSpec, Part, Status

MIN_AGREEMENT = 0.999
"""Another device or library version may change bits, never more than this."""

_OF_THE_MODEL = ("model", "weights_sha256", "transform", "decode")
"""Settings without which no row can be what it was."""


@dataclass
class ReproducibilityReport:
    """What came of extracting rows again.

    Attributes:
        rows: that were extracted again.
        identical: rows with the very same bits in every layer, or the same failure.
        close: others with an agreement of at least MIN_AGREEMENT in every layer.
        different: a line for each of the rest.
    """

    rows: int = 0
    identical: int = 0
    close: int = 0
    different: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """JSON types."""
        return asdict(self)


def recheck_rows(
    config: Config, root: Path, manifest: Manifest, count: int
) -> ReproducibilityReport:
    """Extract random rows of a store again and compare.

    Whole batches are computed, as they were: a row's last bits depend on its batch.

    Args:
        config: of the command; its device, seed and data.root are taken where they are given.
        root: the store's folder.
        manifest: its runs.
        count: how many rows, at most all that are there.

    Raises:
        FeatxError: the pictures or the model are not to be had as they were.
    """
    store = FeatureStore(root, verify="rows")
    there = np.flatnonzero(store.status != Status.ABSENT)
    chosen = np.random.default_rng(config.seed).permutation(there)[:count].tolist()
    lacking = missing_parts(root, manifest)
    unfinished = frozenset(name for run, _ in lacking for name in run.names)
    worst: dict[int, float] = {}
    notes: dict[int, str] = {}
    for run in manifest.runs:
        absent = [part for other, parts in lacking if other is run for part in parts]
        inside = [row for row in sorted(chosen) if _holds(run, absent, row)]
        for specs in _layers_at_once(run, store, unfinished):
            # Pictures that are new in the data set are none of our business here.
            before = config_of_run(config, root, manifest, run)
            again = replace(before, grow=True)
            if before.job.name != "attribute":  # whose datasets are named by the config alone
                # The names of the datasets say what is captured.
                layers = {spec.name: request_of(spec, before) for spec in specs}
                again = replace(again, layers=layers, capture="output")
            if not inside:
                continue
            spec = engine_spec(before.job.name)
            with build_run_context(again, run.header.config, spec) as prepared:
                _refuse_another_model(root, run, prepared)
                for row, features, status in _extracted(prepared, run, inside):
                    found, note = _compared(store, row, specs, features, status)
                    if found < worst.get(row, np.inf):
                        notes[row] = f"row {row} ({store.keys[row]}): {note}"
                    worst[row] = min(worst.get(row, np.inf), found)
    return ReproducibilityReport(
        rows=len(worst),
        identical=sum(value == np.inf for value in worst.values()),
        close=sum(MIN_AGREEMENT <= value < np.inf for value in worst.values()),
        different=[notes[row] for row, value in worst.items() if value < MIN_AGREEMENT],
    )


@dataclass
class ImagesReport:
    """What became of the images of a store, as far as that can be told from here.

    Attributes:
        compared: rows whose image is known to be the one they were computed from, or not to be.
        read: of them, those whose bytes were compared; of the others size and times are the same.
        changed: keys of rows whose image has changed since.
        gone: keys of rows whose image is not there any more.
        unknown: rows that do not say which image they were computed from.
        not_compared: why no image was looked at, None where they were.
    """

    compared: int = 0
    read: int = 0
    changed: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    unknown: int = 0
    not_compared: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON types."""
        return asdict(self)


def check_images(config: Config, root: Path, manifest: Manifest) -> ImagesReport:
    """Compare the images of a store with what its rows were computed from.

    Args:
        config: of the command; its data.root is taken where it is given.
        root: the store's folder.
        manifest: its runs.
    """
    try:
        listing = read_listing(root, manifest.num_rows, manifest.listing_identity)
        if listing is None:
            return ImagesReport(not_compared="the store has no listing that can be read")
        saved = from_saved(manifest.runs[-1].header.config)
        source = open_source(data_of_saved(saved, config.data, str(root)))
        present = np.isin(listing.keys, source.listing().keys)
        found = image_changes(source, listing.keys, root, manifest, present, read_all=True)
    except FeatxError as error:
        return ImagesReport(not_compared=str(error))
    except OSError as error:
        return ImagesReport(not_compared=f"the images cannot be read now: {error}")
    return ImagesReport(
        compared=found.num_rows - len(found.gone),
        read=found.num_read,
        changed=[os.fsdecode(key) for key in listing.keys[found.rows].tolist()],
        gone=[os.fsdecode(key) for key in listing.keys[found.gone].tolist()],
        unknown=found.num_unknown,
    )


def config_of_run(config: Config, root: Path, manifest: Manifest, run: Run) -> Config:
    """The config of a run of a store, to go on with it or do it again.

    The data set is the last run's: an earlier one may have seen fewer rows of it.

    Args:
        config: of the command now; a device, data.root or reduce.stats given there is taken.
        root: where the store lies now.
        manifest: its runs.
        run: one of them.
    """
    before = from_saved(run.header.config)
    refuse_unnamed_code(config, before, str(root))
    latest = from_saved(manifest.runs[-1].header.config)
    data = data_of_saved(latest, config.data, str(root))
    device = before.device if config.device == "auto" else config.device
    before = with_statistics_at(before, config.reduce.stats)
    return replace(
        in_this_process(before),
        data=data,
        device=device,
        out=str(root),
        pack="auto" if is_url(root) else before.pack,  # it may have been copied to a bucket
    )


def refuse_unnamed_code(config: Config, before: Config, what: str) -> None:
    """Raise ConfigError where a saved config names code that the user does not name now.

    Args:
        config: of the command.
        before: read from a file, maybe a stranger's.
        what: the file or the store, for the message.
    """
    target = before.model.target
    if target is not None and config.model.target != target:
        raise ConfigError(
            f"{what} was made with model=custom model.target={target}. featx imports no code "
            "because a file names it: if you trust it, add model=custom "
            f"model.target={target} (featx.predict: model_target)."
        )


def _holds(run: Run, absent: list[Part], row: int) -> bool:
    """Whether a row is one of a run's, and its part is there."""
    return run.grid.holds(row) and not any(part.start <= row < part.stop for part in absent)


def _layers_at_once(
    run: Run, store: FeatureStore, unfinished: frozenset[str]
) -> list[list[LayerSpec]]:
    """The layers of a run that can be compared, in groups that `build_run_context` keeps together.

    It leaves out what is finished where it is asked for layers of both kinds.
    """
    specs = [spec for spec in run.layers if spec.name in store]
    groups = [
        [spec for spec in specs if (spec.name in unfinished) == wanted] for wanted in (False, True)
    ]
    return [group for group in groups if group]


def request_of(spec: LayerSpec, before: Config) -> ReduceConfig:
    """The reduction that makes this very dataset.

    Args:
        spec: of the dataset.
        before: the config of its run, which says where statistics were.
    """
    args: dict[str, Any] = dict(spec.reduce_args)
    if spec.reduce not in PROJECTIONS:
        return ReduceConfig(spec.reduce, **args)
    identity = args["stats_sha256"]
    paths = {r.stats: None for _, r in layer_requests(before) if r.name == spec.reduce}
    notes = []
    for path in paths:
        assert path is not None, "the config was checked"
        try:
            if statistics_sha256(path, spec.name) == identity:
                known = {key: args[key] for key in ("k", "epsilon", "zca") if key in args}
                return ReduceConfig(spec.reduce, stats=path, **known)
            notes.append(f"{path} has other numbers.")
        except (StoreError, LayerError) as error:
            notes.append(str(error))
    raise StoreError(
        f"{spec.name} was stored with reduce={spec.reduce} by statistics of sha256 {identity}, "
        f"which are not there any more: {' '.join(notes)} Put that file back, or say where it is: "
        f"reduce={spec.reduce} reduce.stats=FILE."
    )


def statistics_sha256(path: str, layer: str) -> str:
    """The identity of a layer's statistics; see `Moments.sha256`."""
    from featx.analysis.statistics.stats_file import Statistics  # which imports torch

    return Statistics(path)[layer].sha256


def _refuse_another_model(root: Path, run: Run, prepared: RunContext) -> None:
    """Rows of other weights say nothing of the pictures."""
    before, now = run.header.fingerprint, prepared.header.fingerprint
    changed = [
        f"  {key}: the store has {before[key]!r}, now {now[key]!r}"
        for key in _OF_THE_MODEL
        if key in before and before[key] != now[key]
    ]
    if changed:
        raise StoreMismatchError(
            f"rows of {root} cannot be compared, what extracts them has changed:\n"
            + "\n".join(changed)
        )


def _extracted(
    prepared: RunContext, run: Run, rows: list[int]
) -> Iterator[tuple[int, dict[str, npt.NDArray[Any]], int]]:
    """Each of some rows: its features in every layer, as stored, and its status."""
    size = prepared.engine.compute.batch_size
    spans: dict[int, list[int]] = {}
    for row in rows:
        spans.setdefault(row - (row - run.grid.part_of(row).start) % size, []).append(row)
    parts = [
        Part(0, start, min(start + size, run.grid.part_of(start).stop)) for start in sorted(spans)
    ]
    with prepared.loader(size) as loader:
        for _, batch in loader.batches(parts):
            yield from _rows_of(prepared, batch, spans[batch.start])


def _rows_of(
    prepared: RunContext, batch: Batch, rows: list[int]
) -> Iterator[tuple[int, dict[str, npt.NDArray[Any]], int]]:
    computed = compute_rows(prepared, prepared.engine, batch)
    status = {failure.row: int(failure.status) for failure in computed.failures}
    for row in rows:
        values = {name: value[row - batch.start] for name, value in computed.features.items()}
        yield row, values, status.get(row, int(Status.OK))


def _compared(
    store: FeatureStore,
    row: int,
    specs: list[LayerSpec],
    features: dict[str, npt.NDArray[Any]],
    status: int,
) -> tuple[float, str]:
    """Infinity where stored and new row are the same, else the smallest agreement; and a note."""
    before = {spec.name: np.asarray(store[spec.name][row], np.float64).ravel() for spec in specs}
    # A row that has values here may have failed in another run; the store knows one status only.
    failed = all(np.isnan(values).all() for values in before.values())
    said = int(store.status[row]) if failed else int(Status.OK)
    if status != said:
        return -1.0, f"was {Status(said).label}, is {Status(status).label} now"
    if status != Status.OK:
        return np.inf, ""
    smallest = np.inf
    for spec in specs:
        now = from_raw(features[spec.name], spec.dtype).astype(np.float64).ravel()
        if not np.array_equal(before[spec.name], now):
            smallest = min(smallest, agreement(before[spec.name], now))
    return smallest, f"agrees with the picture's features now by {smallest:.5f}"


def agreement(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """1 - |a - b|^2 / (2 |a| |b|): the cosine of two vectors, less where their lengths differ.

    -1 where it has no value: one of them is zero, or not finite.
    """
    product = float(np.linalg.norm(a) * np.linalg.norm(b))
    if not 0 < product < np.inf:
        return -1.0
    return float(1 - np.sum((a - b) ** 2) / (2 * product))
