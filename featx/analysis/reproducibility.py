"""Reproducibility check: stored rows are extracted again from their images and compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from featx.analysis.engine_specs import engine_spec
from featx.analysis.value_settings import refuse_changes
from featx.base import name_text
from featx.config import (
    Config,
    ReduceConfig,
    data_of_saved,
    from_saved,
    in_this_process,
    layer_requests,
    make_reduce,
    reduction_of_args,
    with_statistics_at,
)
from featx.errors import ConfigError, FeatxError, LayerError, StoreError
from featx.layers import REDUCTIONS
from featx.pipeline import FeatureOutput, RunContext, build_run_context, compute_rows, image_changes
from featx.sources import open_source
from featx.storage import is_url
from featx.store import FeatureStore, Manifest, Run, from_raw, missing_parts, read_listing
from featx.types import Array, Json, LayerSpec, Part, Status

MIN_AGREEMENT = 0.999
"""Minimum agreement of a stored and a new row. Another device or library version may change bits,
but never more than this."""

_OF_THE_MODEL = ("model", "weights_sha256", "transform", "decode")
"""Fingerprint entries without which no row can be reproduced."""


@dataclass
class ReproducibilityReport:
    """Result of extracting rows again.

    Attributes:
        identical: rows with the same bits in every layer, or the same failure.
        close: other rows whose agreement is at least MIN_AGREEMENT in every layer.
        different: one line of text for each remaining row.
    """

    rows: int = 0
    identical: int = 0
    close: int = 0
    different: list[str] = field(default_factory=list)


def recheck_rows(
    config: Config, root: Path, manifest: Manifest, count: int
) -> ReproducibilityReport:
    """Extract random rows of a store again and compare them.

    Whole batches are computed as in the run, because the last bits of a row depend on its batch.

    Args:
        config: config of the command, of which device, seed and data.root are used if given.
        count: number of rows, limited to those that are present.

    Raises:
        FeatxError: the images or the model are not available as they were.
    """
    store = FeatureStore(root, verify="rows")
    present = np.flatnonzero(store.status != Status.ABSENT)
    chosen = np.random.default_rng(config.seed).permutation(present)[:count].tolist()
    missing_of_run = missing_parts(root, manifest)
    unfinished = frozenset(name for run, _ in missing_of_run for name in run.names)
    worst: dict[int, float] = {}
    notes: dict[int, str] = {}
    for run in manifest.runs:
        absent = [part for other, parts in missing_of_run if other is run for part in parts]
        rows = [
            row
            for row in sorted(chosen)
            if run.grid.holds(row) and not any(part.start <= row < part.stop for part in absent)
        ]
        stored = [spec for spec in run.layers if spec.name in store]
        finished = [spec for spec in stored if spec.name not in unfinished]
        # Apart, because `build_run_context` leaves out the finished layers of a mixed request.
        others = [spec for spec in stored if spec.name in unfinished]
        for specs in filter(None, (finished, others)):
            # grow=True, because images that were added to the data set do not matter here.
            saved = config_of_run(config, root, manifest, run)
            run_config = replace(saved, grow=True)
            engine = engine_spec(saved.job.name)
            if engine.captures_layers:
                # The names of the datasets include the captures.
                layers = {spec.name: request_of(spec, saved) for spec in specs}
                run_config = replace(run_config, layers=layers, capture="output")
            if not rows:
                continue
            output = FeatureOutput(run_config)
            with build_run_context(run_config, run.header.config, engine, output) as context:
                before, now = run.header.fingerprint, context.header.fingerprint
                refuse_changes(
                    {key: (before[key], now[key]) for key in _OF_THE_MODEL if key in before},
                    "the store has {!r}, now {!r}",
                    f"rows of {root} cannot be compared, what extracts them has changed",
                )
                for row, features, status in _extract_rows(context, run, rows):
                    row_agreement, note = _compare_row(store, row, specs, features, status)
                    if row_agreement < worst.get(row, np.inf):
                        notes[row] = f"row {row} ({store.key_of(row)}): {note}"
                    worst[row] = min(worst.get(row, np.inf), row_agreement)
    return ReproducibilityReport(
        rows=len(worst),
        identical=sum(value == np.inf for value in worst.values()),
        close=sum(MIN_AGREEMENT <= value < np.inf for value in worst.values()),
        different=[notes[row] for row, value in worst.items() if value < MIN_AGREEMENT],
    )


@dataclass
class ImagesReport:
    """Result of comparing the images of a store with the data set.

    Attributes:
        compared: rows for which it is known whether their image has changed.
        read: those of them whose bytes were compared; for the others, size and times are unchanged.
        changed: keys of rows whose image has changed.
        gone: keys of rows whose image is missing.
        unknown: rows without a record of their image.
        not_compared: reason why no image was compared, or None.
    """

    compared: int = 0
    read: int = 0
    changed: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    unknown: int = 0
    not_compared: str | None = None


def check_images(config: Config, root: Path, manifest: Manifest) -> ImagesReport:
    """Compare the images of a store, below data.root if given, with those its rows were computed
    from.
    """
    try:
        listing = read_listing(root, manifest.num_rows, manifest.listing_identity)
        if listing is None:
            return ImagesReport(not_compared="the store has no listing that can be read")
        saved = from_saved(manifest.runs[-1].header.config)
        source = open_source(data_of_saved(saved, config.data, str(root)))
        present = np.isin(listing.keys, source.listing().keys)
        changes = image_changes(source, listing.keys, root, manifest, present, read_all=True)
    except FeatxError as error:
        return ImagesReport(not_compared=str(error))
    except OSError as error:
        return ImagesReport(not_compared=f"the images cannot be read now: {error}")
    return ImagesReport(
        compared=changes.num_rows - len(changes.gone),
        read=changes.num_read,
        changed=[name_text(key) for key in listing.keys[changes.rows].tolist()],
        gone=[name_text(key) for key in listing.keys[changes.gone].tolist()],
        unknown=changes.num_unknown,
    )


def config_of_run(config: Config, root: Path, manifest: Manifest, run: Run) -> Config:
    """Return the config that resumes or repeats a run of a store.

    The data set is that of the last run, since an earlier one may have listed fewer rows. Device,
    data.root and reduce.stats of the command's config are used if given. Raises ConfigError if the
    run needs code that the command does not name.
    """
    run_config = from_saved(run.header.config)
    refuse_unnamed_code(config, run_config, str(root))
    latest = from_saved(manifest.runs[-1].header.config)
    data = data_of_saved(latest, config.data, str(root))
    device = run_config.device if config.device == "auto" else config.device
    run_config = with_statistics_at(run_config, config.reduce.statistics_path)
    return replace(
        in_this_process(run_config),
        data=data,
        device=device,
        out=str(root),
        # The store may have been copied to a bucket since.
        pack="auto" if is_url(root) else run_config.pack,
    )


def refuse_unnamed_code(config: Config, saved: Config, origin: str) -> None:
    """Check that a saved config names no code that the command does not name."""
    code = saved.model.code
    given = config.model.code
    if code is not None and given != code:
        advice = (
            f"featx imports no code because a file names it: if you trust it, add {code} "
            "(in Python model_factory, for a factory)."
        )
        if code.startswith("model_factory="):  # an object, which no command can name
            advice = "Give that object, from Python, as model_factory."
        raise ConfigError(
            f"{origin} was made with {code}{f', not with {given}' if given else ''}. {advice}"
        )


def request_of(spec: LayerSpec, before: Config) -> ReduceConfig:
    """Return the options of the reduction that makes a dataset."""
    args: Json = dict(spec.reduce_args)
    if not REDUCTIONS.get(spec.reduce).needs_statistics:
        # The others follow from the layer (TokenSample.bound_args), and are compared with those
        # of the new rows.
        return reduction_of_args(spec.reduce, args)
    from featx.analysis.statistics.reader import Statistics  # imports torch

    identity = args["stats_sha256"]
    paths = [r.statistics_path for _, r in layer_requests(before) if r.name == spec.reduce]
    notes = []
    for path in dict.fromkeys(path for path in paths if path is not None):
        try:
            if Statistics(path)[spec.name].sha256 == identity:
                arguments = {key: args[key] for key in ("k", "epsilon", "zca") if key in args}
                return make_reduce(spec.reduce, stats=path, **arguments)
            notes.append(f"{path} has other numbers.")
        except (StoreError, LayerError) as error:
            notes.append(str(error))
    raise StoreError(
        f"{spec.name} was stored with reduce={spec.reduce} by statistics of sha256 {identity}, "
        f"which cannot be found: {' '.join(notes)} Put that file back, or give its path with "
        f"reduce={spec.reduce} reduce.stats=FILE."
    )


def _extract_rows(
    context: RunContext, run: Run, rows: list[int]
) -> Iterator[tuple[int, dict[str, Array], int]]:
    """Yield each row with its features in every layer, as stored, and its status."""
    size = context.batch_rows
    spans: dict[int, list[int]] = {}
    for row in rows:
        spans.setdefault(row - (row - run.grid.part_of(row).start) % size, []).append(row)
    parts = [
        Part(0, start, min(start + size, run.grid.part_of(start).stop)) for start in sorted(spans)
    ]
    for _, batch in context.loader.batches(parts, size):
        computed = compute_rows(context, context.engine, batch)
        status = {failure.row: int(failure.status) for failure in computed.failures}
        for row in spans[batch.start]:
            values = {name: value[row - batch.start] for name, value in computed.features.items()}
            yield row, values, status.get(row, int(Status.OK))


def _compare_row(
    store: FeatureStore, row: int, specs: list[LayerSpec], features: dict[str, Array], status: int
) -> tuple[float, str]:
    stored = {spec.name: np.asarray(store[spec.name][row], np.float64).ravel() for spec in specs}
    # One status per row: a row with values in these layers may have failed in another run.
    failed = all(np.isnan(values).all() for values in stored.values())
    stored_status = int(store.status[row]) if failed else int(Status.OK)
    if status != stored_status:
        return -1.0, f"was {Status(stored_status).label}, is {Status(status).label} now"
    if status != Status.OK:
        return np.inf, ""
    smallest = np.inf
    for spec in specs:
        now = from_raw(features[spec.name], spec.dtype).astype(np.float64).ravel()
        if not np.array_equal(stored[spec.name], now):
            smallest = min(smallest, agreement(stored[spec.name], now))
    return smallest, f"has an agreement of {smallest:.5f} with the features of its image now"


def agreement(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """Compute the agreement 1 - |a - b|^2 / (2 |a| |b|) of two vectors.

    It is their cosine, reduced if their norms differ; -1 if a norm is zero or not finite.
    """
    product = float(np.linalg.norm(a) * np.linalg.norm(b))
    if not 0 < product < np.inf:
        return -1.0
    return float(1 - np.sum((a - b) ** 2) / (2 * product))
