"""job=report from its config to its file."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.statistics import explain_missing_norms, token_norms
from featx.base import csv_cell
from featx.config import Config, DataConfig
from featx.errors import FeatxError, MissingExtraError, StoreError, counted
from featx.export.report.embedding_plots import (
    LayerPlot,
    RowVectors,
    layer_plot,
    row_vectors,
    same_class_shares,
)
from featx.export.report.failures import Reason, reasons_of
from featx.export.report.heat_maps import similarity_of
from featx.export.report.layer_statistics import layer_statistics
from featx.export.report.near_duplicates import Duplicates, find_duplicates
from featx.export.report.nearest_neighbours import (
    Neighbours,
    Queries,
    hard_queries,
    neighbours_of,
    random_queries,
)
from featx.export.report.page import (
    ERRORS_SHOWN,
    GENERATOR,
    Page,
    render,
)
from featx.export.report.predictions_file import ROLES
from featx.export.report.probe_results import Probes, probes_of
from featx.export.report.provenance import provenance_of
from featx.export.report.throughput import speed_of
from featx.export.report.thumbnails import UNDECODED, Thumbnails
from featx.export.selection import as_utf8, data_of_store
from featx.storage import AtomicFolder
from featx.store import FeatureStore, load_manifest, matching_layers

NAME = "report.html"
"""Default file name."""

MAX_LAYERS = 8
"""Maximum number of layers with embedding plots; the last ones and the best one are used."""

_TEST = ROLES.index("test")


def run_report(config: Config, log: Callable[[str], None]) -> dict[str, Any]:
    """Write the report of a store.

    Args:
        config: checked config with job=report.
        log: called with a line of text before slow steps, and about missing contents.

    Returns:
        file, bytes, rows_used, layers, thumbnails, without_thumbnails (the reason),
        thumbnails_not_decoded, complete and seconds, as JSON types.

    Raises:
        FeatxError: the store or a layer does not exist, or the page cannot be written.
    """
    started = time.perf_counter()
    _require_packages(config)
    store = FeatureStore(config.store_path(), verify="rows")
    layers = _sort_by_execution(store, matching_layers(store, config.layers))
    path = _file_of(config, store)
    disk = AtomicFolder(path.parent)
    disk.make_folder(path.parent)  # first, so that an unusable path fails early
    if not store.complete:
        log(f"{store.root} is not complete; the page says so and shows the existing rows")
    page = _contents(config, store, layers, log)
    page.seconds = time.perf_counter() - started
    text = render(page).encode()
    disk.replace_unlocked(path, text)
    return {
        "file": str(path),
        "bytes": len(text),
        "rows_used": len(page.rows),
        "layers": list(layers),
        "thumbnails": page.thumbnails.num_read,
        "without_thumbnails": page.thumbnails.why_none,
        "thumbnails_not_decoded": len(page.undecoded),
        "complete": store.complete,
        "seconds": round(time.perf_counter() - started, 3),
    }


def _contents(
    config: Config, store: FeatureStore, layers: tuple[str, ...], log: Callable[[str], None]
) -> Page:
    """Compute the contents of the page."""
    options, seed = config.report, config.seed
    ok = np.flatnonzero(store.ok)
    rows = _random_rows(ok, options.rows, seed)
    probes, reasons = probes_of(store), reasons_of(store)
    plotted = _layers_to_plot(layers, probes)
    duplicates = find_duplicates(store, plotted, rows, probes)
    main = probes.layer if probes.layer in plotted else plotted[-1]
    # Images are read before the slow steps, because one that crashes its decoder restarts the job.
    neighbours = None
    if len(ok) > 1:
        log(f"nearest neighbours in {main}")
        neighbours = _neighbours(store, row_vectors(store, main, rows), rows, ok, probes, config)
    sections = _images_of_sections(probes, reasons, duplicates, neighbours)
    thumbnails = _thumbnails_of(config, store, sections, rows, log)
    log(f"statistics of {len(layers)} layers over {len(rows)} of {len(ok)} ok rows")
    statistics = [layer_statistics(store, layer, rows) for layer in layers if len(rows)]
    plots: list[LayerPlot] = []
    for layer in plotted:
        log(f"embedding plot of {layer}")
        # Vectors are read again here, so that those of a single layer are in memory at a time.
        vectors = row_vectors(store, layer, rows)
        plots.append(layer_plot(vectors, store.labels[rows], seed, options.tsne))
    folders = _folders(config, store)
    without_norms = _layers_without_norms(store, layers)
    for layer, reason in without_norms:
        log(f"{layer}: no norms of tokens, as {reason}")
    return Page(
        store=store,
        seed=seed,
        layers=layers,
        plotted=plotted,
        rows=rows,
        num_ok=len(ok),
        folders=folders,
        provenance=provenance_of(
            store, None if probes.predicted is None else probes.predicted.roles, folders
        ),
        speed=speed_of(store),
        reasons=reasons,
        statistics=statistics,
        token_norms=[
            norms for layer in layers if (norms := token_norms(store, layer, rows)) is not None
        ],
        no_token_norms=without_norms,
        plots=plots,
        neighbours=neighbours,
        duplicates=duplicates,
        probes=probes,
        similarity=similarity_of(store, layers, options.rows, seed, config.device),
        thumbnails=thumbnails,
        test_images=_test_images(config, probes, log),
        sprite=thumbnails.sprite(rows.tolist()),
    )


def _layers_without_norms(store: FeatureStore, layers: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the layers whose tokens have no known places, each with the reason."""
    found = []
    for layer in layers:
        array = store[layer]
        if array.tokens is None and (reason := explain_missing_norms(array.shape[1:], array.attrs)):
            found.append((layer, reason))
    return found


def _layers_to_plot(layers: tuple[str, ...], probes: Probes) -> tuple[str, ...]:
    """Return at most MAX_LAYERS layers, among them the best one of the probe."""
    if len(layers) <= MAX_LAYERS:
        return layers
    if probes.layer in layers[:-MAX_LAYERS]:
        return (probes.layer, *layers[1 - MAX_LAYERS :])
    return layers[-MAX_LAYERS:]


def _neighbours(
    store: FeatureStore,
    vectors: RowVectors,
    rows: npt.NDArray[np.int64],
    ok: npt.NDArray[np.int64],
    probes: Probes,
    config: Config,
) -> Neighbours:
    """Choose the queries and search their neighbours."""
    labels = store.labels[rows]
    shares = None
    if vectors.x is not None and (labels >= 0).any():
        shares = same_class_shares(vectors.x, labels)
    tested = np.ones(len(rows), bool)
    if probes.predicted is not None and (probes.predicted.roles == _TEST).any():
        tested = probes.predicted.roles[rows] == _TEST
    hard = hard_queries(rows, shares, tested)
    remaining = np.setdiff1d(rows, hard)
    random = random_queries(store, remaining if len(remaining) else rows, config.seed)
    queries = Queries(hard, random)
    return neighbours_of(store, vectors.layer, ok, queries, config.seed, config.device)


def _images_of_sections(
    probes: Probes,
    reasons: list[Reason],
    duplicates: Duplicates,
    neighbours: Neighbours | None,
) -> list[tuple[list[int], bool]]:
    """Return the rows that each section shows, and whether parts of truncated images are shown."""
    errors = [] if probes.predicted is None else probes.predicted.errors[:ERRORS_SHOWN]
    sections = [([error.row for error in errors if error.row is not None], False)]
    sections += [(reason.shown, reason.partial) for reason in reasons if reason.opened]
    sections += [([pair.first, pair.second], False) for pair in duplicates.pairs]
    strips = [] if neighbours is None else [*neighbours.hard, *neighbours.random]
    sections += [([row, *(each.row for each in nearest)], False) for row, nearest in strips]
    return sections


def _thumbnails_of(
    config: Config,
    store: FeatureStore,
    sections: list[tuple[list[int], bool]],
    rows: npt.NDArray[np.int64],
    log: Callable[[str], None],
) -> Thumbnails:
    """Make the thumbnails of the sections, then tiles of the plotted rows as far as they fit."""
    with Thumbnails(store.key_bytes, config.report.thumbnails) as thumbnails:
        if not thumbnails.why_none:
            log("thumbnails")
            try:
                thumbnails.open(data_of_store(store, config.data))
            except FeatxError as error:
                thumbnails.why_none = str(error)
        for section_rows, partial in sections:
            thumbnails.add(section_rows, partial)
        thumbnails.add_tiles(rows.tolist())
        thumbnails.finish()
    undecoded = [row for row in thumbnails.rows_that(UNDECODED) if store.ok[row]]
    if thumbnails.why_none and config.report.thumbnails:
        log(f"no thumbnails: {thumbnails.why_none}")
    elif undecoded:
        first = as_utf8(str(store.keys[undecoded[0]]))
        log(f"{counted(len(undecoded), 'image')} cannot be decoded now, such as {first}")
    return thumbnails


def _test_images(config: Config, probes: Probes, log: Callable[[str], None]) -> dict[str, str]:
    """Make thumbnails of errors on rows of another store; key -> data URI."""
    predicted = probes.predicted
    if predicted is None or predicted.test_store is None or not config.report.thumbnails:
        return {}
    errors = predicted.errors[:ERRORS_SHOWN]
    try:
        # A stranger's file may name anything, and featx connects to no server because of it.
        if "://" in predicted.test_store:
            raise StoreError(f"{predicted.test_store} is a URL")
        store = FeatureStore(predicted.test_store, verify="rows")
        row_of = {csv_cell(key): row for row, key in enumerate(store.keys.tolist())}
        rows = {e.cell: row_of[e.cell] for e in errors if e.cell in row_of}
        limit = min(len(rows), config.report.thumbnails)
        with Thumbnails(store.key_bytes, limit) as thumbnails:
            thumbnails.open(data_of_store(store, DataConfig()))
            thumbnails.add(rows.values())
            thumbnails.finish()
        reason = thumbnails.why_none
    except FeatxError as error:
        reason = str(error)
    if errors and reason:
        log(f"no thumbnails of probe.test_store: {reason}")
        return {}
    return {key: thumbnails.uris[row] for key, row in rows.items() if row in thumbnails.uris}


def _folders(config: Config, store: FeatureStore) -> tuple[str, ...]:
    """Return the absolute paths that texts of the page could contain."""
    folders = [store.root, store.root.parent, Path.cwd(), Path.home()]
    roots = [config.data.root]
    with contextlib.suppress(FeatxError):  # the store may not record where its images are
        roots.append(data_of_store(store, config.data).root)
    folders += [Path(root).absolute() for root in roots if root and "://" not in root]
    return tuple({as_utf8(str(path)) for path in folders if path.is_absolute()})


def _random_rows(ok: npt.NDArray[np.int64], count: int, seed: int) -> npt.NDArray[np.int64]:
    """Return at most `count` random rows, (n,) int64, increasing."""
    if len(ok) <= count:
        return ok
    return np.sort(np.random.default_rng(seed).choice(ok, count, replace=False))


def _sort_by_execution(store: FeatureStore, layers: tuple[str, ...]) -> tuple[str, ...]:
    """Sort layers in the order of execution, if the store has a manifest."""
    manifest = load_manifest(store.root)[0] if store.root.is_dir() else None
    execution_order = list(manifest.layers) if manifest else []
    return tuple(
        sorted(
            layers, key=lambda name: execution_order.index(name) if name in execution_order else -1
        )
    )


def _file_of(config: Config, store: FeatureStore) -> Path:
    """Return the path of the report."""
    out = config.output_folder(store.root, NAME)
    path = out if out.suffix.lower() in (".html", ".htm") else out / NAME
    if path.is_dir():
        raise StoreError(f"{path} is a folder; give the report another name: out=NAME.html.")
    try:
        with path.open("rb") as file:
            is_report = GENERATOR.encode() in file.read(2000)
    except FileNotFoundError:
        return path
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}. Choose another out.") from error
    if not is_report:
        raise StoreError(
            f"{path} exists and is no report of featx, so it is not replaced. Choose another "
            "out=NAME.html."
        )
    return path


def _require_packages(config: Config) -> None:
    """Check that scikit-learn is installed if it is needed, before anything is read."""
    if config.report.tsne and importlib.util.find_spec("sklearn") is None:
        raise MissingExtraError(
            'report.tsne=true needs scikit-learn: pip install "featx[report]". report.tsne=false '
            "leaves t-SNE out."
        )
