"""job=report from its config to its file."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from featx.config import Config
from featx.errors import MissingExtraError, StoreError
from featx.export.report.page import GENERATOR, Page, render
from featx.storage import AtomicFolder
from featx.store import FeatureStore, load_manifest, matching_layers

NAME = "report.html"
"""Default file name."""


def run_report(config: Config, log: Callable[[str], None]) -> dict[str, Any]:
    """Write the report of a store.

    Args:
        log: called with a line of text before slow steps, and about missing contents.

    Returns:
        file, bytes, rows_used, layers, thumbnails, without_thumbnails (the reason),
        thumbnails_not_decoded, complete and seconds, as JSON types.

    Raises:
        FeatxError: the store or a layer does not exist, or the page cannot be written.
    """
    started = time.perf_counter()
    if config.report.tsne and importlib.util.find_spec("sklearn") is None:
        raise MissingExtraError(
            'report.tsne=true needs scikit-learn: pip install "featx[report]". report.tsne=false '
            "leaves t-SNE out."
        )
    store = FeatureStore(config.store_path(), verify="rows")
    manifest = load_manifest(store.root)[0] if store.root.is_dir() else None
    place = {name: i for i, name in enumerate(manifest.layers if manifest else ())}
    layers = matching_layers(store, config.layers)
    layers = tuple(sorted(layers, key=lambda name: place.get(name, -1)))  # in order of execution
    path = _file_of(config, store)
    disk = AtomicFolder(path.parent)
    disk.make_folder(path.parent)  # first, so that an unusable path fails early
    if not store.complete:
        log(f"{store.root} is not complete; the page says so and shows the existing rows")
    page = Page(config, store, layers, log)
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


def _file_of(config: Config, store: FeatureStore) -> Path:
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
