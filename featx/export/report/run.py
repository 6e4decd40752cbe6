"""job=report from its config to its file."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.config import Config
from featx.errors import MissingExtraError, StoreError, counted
from featx.export.report.embedding_maps import layer_map
from featx.export.report.failures import Reason, reasons_of
from featx.export.report.layer_similarity import similarity_of
from featx.export.report.layer_statistics import layer_statistics
from featx.export.report.nearest_neighbours import Strips, chosen_queries, nearest_strips
from featx.export.report.page import GENERATOR, Page, render
from featx.export.report.probe_results import probes_of
from featx.export.report.provenance import provenance_of
from featx.export.report.throughput import speed_of
from featx.export.report.thumbnails import Thumbnails
from featx.export.selection import as_utf8
from featx.storage import AtomicFolder
from featx.store import FeatureStore, load_manifest, matching_layers

NAME = "report.html"
"""Default file name."""

MAX_LAYERS = 8
"""Maximum number of layers with maps and nearest rows; the last ones are used."""

_PACKAGES = ("plotly", "jinja2", "sklearn")
"""Packages of the extra `report`."""


def run_report(config: Config, tell: Callable[[str], None]) -> dict[str, Any]:
    """Write the report of a store.

    Args:
        config: checked config with job=report.
        tell: called with a line of text before slow steps, and about missing contents.

    Returns:
        file, bytes, rows_looked_at, layers, thumbnails, without_thumbnails (the reason),
        thumbnails_not_decoded, complete and seconds, as JSON types.

    Raises:
        FeatxError: the store or a layer does not exist, or the page cannot be written.
    """
    begun = time.perf_counter()
    _require_packages()
    assert config.store is not None, "the config was checked"
    store = FeatureStore(config.store, verify="rows")
    layers = _in_order(store, matching_layers(store, config.layers))
    path = _file_of(config, store)
    disk = AtomicFolder(path.parent)
    disk.make_folder(path.parent)  # first, so that an unusable path fails early
    if not store.complete:
        tell(f"{store.root} is not complete; the page says so and shows the existing rows")
    page = _looked_at(config, store, layers, tell)
    page.seconds = time.perf_counter() - begun
    text = render(page)
    disk.replace_unlocked(path, text.encode())
    return {
        "file": str(path),
        "bytes": len(text.encode()),
        "rows_looked_at": len(page.rows),
        "layers": list(layers),
        "thumbnails": len(page.thumbnails.uris),
        "without_thumbnails": page.thumbnails.why_none,
        "thumbnails_not_decoded": len(page.thumbnails.undecoded),
        "complete": store.complete,
        "seconds": round(time.perf_counter() - begun, 3),
    }


def _looked_at(
    config: Config, store: FeatureStore, layers: tuple[str, ...], tell: Callable[[str], None]
) -> Page:
    """Compute the contents of the page."""
    options, seed = config.report, config.seed
    ok = np.flatnonzero(store.ok)
    rows = _chosen(ok, options.rows, seed)
    mapped = layers[-MAX_LAYERS:]
    reasons = reasons_of(store)
    strips = []
    if len(ok) > 1:
        tell("nearest rows")
        queries = chosen_queries(store, rows, seed)
        strips = [nearest_strips(store, name, ok, queries, seed, config.device) for name in mapped]
    # Thumbnails come before the slow steps, because an image that crashes its decoder restarts the
    # job.
    thumbnails = _thumbnails_of(config, store, reasons, strips, rows, tell)
    tell(f"statistics of {len(layers)} layers over {len(rows)} of {len(ok)} ok rows")
    statistics = [layer_statistics(store, layer, rows) for layer in layers if len(rows)]
    maps = []
    for layer in mapped:
        tell(f"map of {layer}")
        maps.append(layer_map(store, layer, rows, seed, options.tsne))
    similarity = similarity_of(store, layers, options.rows, seed, config.device)
    return Page(
        store=store,
        seed=seed,
        layers=layers,
        mapped=mapped,
        rows=rows,
        num_ok=len(ok),
        provenance=provenance_of(store),
        speed=speed_of(store),
        reasons=reasons,
        statistics=statistics,
        maps=maps,
        strips=strips,
        probes=probes_of(store),
        similarity=similarity,
        thumbnails=thumbnails,
    )


def _thumbnails_of(
    config: Config,
    store: FeatureStore,
    reasons: list[Reason],
    strips: list[Strips],
    rows: npt.NDArray[np.int64],
    tell: Callable[[str], None],
) -> Thumbnails:
    """Make the thumbnails of failed rows and nearest rows, then of map points as far as they
    fit."""
    with Thumbnails(store, config.data, config.report.thumbnails) as thumbnails:
        if not thumbnails.why_none:
            tell("thumbnails")
        thumbnails.add(each.row for reason in reasons if reason.opened for each in reason.shown)
        for one in strips:
            for row, nearest in one.strips:
                thumbnails.add([row, *(each.row for each in nearest)])
        thumbnails.add_every(rows.tolist())
        thumbnails.finish()
    if thumbnails.why_none and config.report.thumbnails:
        tell(f"no thumbnails: {thumbnails.why_none}")
    elif thumbnails.undecoded:
        first = as_utf8(str(store.keys[thumbnails.undecoded[0]]))
        what = counted(len(thumbnails.undecoded), "image")
        tell(f"{what} cannot be decoded now, such as {first}")
    return thumbnails


def _chosen(ok: npt.NDArray[np.int64], count: int, seed: int) -> npt.NDArray[np.int64]:
    """Return at most `count` random rows, (n,) int64, increasing."""
    if len(ok) <= count:
        return ok
    return np.sort(np.random.default_rng(seed).choice(ok, count, replace=False))


def _in_order(store: FeatureStore, layers: tuple[str, ...]) -> tuple[str, ...]:
    """Sort layers in the order of execution, if the store has a manifest."""
    manifest = load_manifest(store.root)[0] if store.root.is_dir() else None
    known = list(manifest.layers) if manifest else []
    return tuple(sorted(layers, key=lambda name: known.index(name) if name in known else -1))


def _file_of(config: Config, store: FeatureStore) -> Path:
    """Return the path of the report.

    Raises:
        StoreError: the path is a folder, or a file that is not a report.
    """
    asked = config.out_beside(store.root, NAME)
    path = asked if asked.suffix.lower() in (".html", ".htm") else asked / NAME
    if path.is_dir():
        raise StoreError(f"{path} is a folder; give the report another name: out=NAME.html.")
    try:
        with path.open("rb") as file:
            ours = GENERATOR.encode() in file.read(2000)
    except FileNotFoundError:
        return path
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}. Choose another out.") from error
    if not ours:
        raise StoreError(
            f"{path} exists and is no report of featx, so it is not replaced. Choose another "
            "out=NAME.html."
        )
    return path


def _require_packages() -> None:
    """Check that all packages are installed, before anything is read.

    Raises:
        MissingExtraError: one of them is missing.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f'job=report needs the package {missing[0]}: pip install "featx[report]".'
        )
