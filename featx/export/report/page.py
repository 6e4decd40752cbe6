"""Page of job=report: its contents, their rendering, and its file."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jinja2 import UndefinedError

from featx.analysis import compare_stores
from featx.analysis.statistics import explain_missing_norms, token_norms
from featx.base import as_utf8, csv_cell
from featx.config import Config, DataConfig, listed_stores
from featx.errors import ConfigError, FeatxError, MissingExtraError, StoreError, counted
from featx.export.report.charts import CLASSES_SHOWN, cka_map, probe_contents
from featx.export.report.html import render_page, without_folder, without_folders
from featx.export.report.layers import (
    Matrix,
    Rows,
    layer_plot,
    layer_statistics,
    perplexity_of,
    row_vectors,
    same_class_shares,
    similarity_of,
)
from featx.export.report.probe_results import ROLES, TEST, Probes, malformed, probes_of
from featx.export.report.provenance import STAGES, provenance_of, reasons_of, speed_of
from featx.export.report.similar_rows import (
    find_duplicates,
    hard_queries,
    nearest_to_texts,
    neighbours_of,
    random_queries,
)
from featx.export.report.thumbnails import UNDECODED, UNREAD, Thumbnails
from featx.export.results import rankings_of
from featx.export.selection import data_of_store
from featx.sources import origins_of
from featx.storage import AtomicFolder
from featx.store import FeatureStore, manifest_of, matching_layers
from featx.types import Json

NAME = "report.html"
"""Default file name."""

GENERATOR = '<meta name="generator" content="featx job=report">'
"""Element by which a report is recognised, so that no other file is overwritten."""

ERRORS_SHOWN = 24
"""Maximum number of misclassified images."""

MAX_LAYERS = 8
"""Maximum number of layers with embedding plots; the last ones and the best one are used."""


def run_report(config: Config, log: Callable[[str], None]) -> Json:
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
    manifest = manifest_of(store)
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
    if out.suffix.lower() == ".pdf":
        raise ConfigError(f"out={out}: the report is HTML, which a browser prints: out=NAME.html.")
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


class Page:
    """Contents of a report; the templates read its attributes. `log` is called with a line of text
    before slow steps, and about missing contents. `origins_text` has the number of images or videos
    whose boxes, views or frames the rows are; it is '' if the rows are images.
    """

    def __init__(
        self,
        config: Config,
        store: FeatureStore,
        layers: tuple[str, ...],
        log: Callable[[str], None],
    ) -> None:
        self.store, self.layers, self.seed = store, layers, config.seed
        self.seconds = 0.0
        self._log = log
        # These come first, because they may be refused.
        self.comparison = _comparison(store, config)
        self.texts = nearest_to_texts(store, config)
        ok = np.flatnonzero(store.ok)
        self.num_ok = len(ok)
        self.rows, most = ok, config.report.rows
        if len(ok) > most:
            self.rows = np.sort(np.random.default_rng(self.seed).choice(ok, most, replace=False))
        origins, kind = origins_of(store.key_bytes)
        self.images = np.unique(origins[self.rows], return_inverse=True)[1]
        self.origins_text = "" if kind is None else counted(len(np.unique(origins)), kind)
        self.probes, self.reasons = probes_of(store), reasons_of(store)
        self.plotted = _layers_to_plot(layers, self.probes)
        self.duplicates = find_duplicates(store, self.plotted, self.rows, self.images, self.probes)
        self.neighbours = self._neighbours(ok, config) if len(ok) > 1 else None
        self.rankings = rankings_of(store, log)
        self.thumbnails = self._thumbnails(config)
        used = f"{len(self.rows)} of {len(ok)} ok rows"
        log(f"statistics of {counted(len(layers), 'layer')} over {used}")
        self.statistics = {
            layer: layer_statistics(store, layer, self.rows) for layer in layers if len(self.rows)
        }
        self.plots = {}
        for layer in self.plotted:
            log(f"embedding plot of {layer}")
            # Vectors are read again here, so that those of a single layer are in memory at a time.
            vectors = row_vectors(store, layer, self.rows)
            labels = store.labels[self.rows]
            tsne = config.report.tsne
            self.plots[layer] = layer_plot(vectors, labels, self.images, self.seed, tsne)
        self.folders = _folders(config, store)
        norms = [token_norms(store, layer, self.rows) for layer in layers]
        self.token_norms = [each for each in norms if each is not None]
        self.no_token_norms = self._layers_without_norms()
        predicted = self.probes.predicted
        roles = None if predicted is None else predicted.roles
        self.provenance = provenance_of(store, roles, self.folders)
        self.speed = speed_of(store)
        self.similarity = similarity_of(store, layers, config.report.rows, self.seed, config.device)
        self.test_images = self._test_images(config)
        self.sprite = self.thumbnails.sprite(self.rows.tolist())

    def key(self, row: int) -> str:
        """Return the key of a row as UTF-8 text."""
        return without_folder(as_utf8(str(self.store.keys[row])))

    def class_of(self, row: int) -> str:
        """Return the class name of a row, or ''."""
        number = int(self.store.labels[row])
        return as_utf8(self.store.classes[number]) if number >= 0 else ""

    def role_of(self, row: int) -> str:
        """Return the role of a row in the probe's split, or ''."""
        predicted = self.probes.predicted
        return "" if predicted is None else ROLES[int(predicted.roles[row])]

    def image_of_error(self, error: Json) -> str:
        """Return the thumbnail of a misclassified image as a data URI, or ''."""
        if error["row"] is None:
            return self.test_images.get(error["cell"], "")
        return self.thumbnails.uris.get(error["row"], "")

    def redact(self, text: str) -> str:
        """Return a text without absolute paths."""
        return without_folders(text, self.folders)

    @property
    def errors(self) -> list[Json]:
        """Misclassified test rows, the most confident error first."""
        return [] if self.probes.predicted is None else self.probes.predicted.errors

    @property
    def undecoded(self) -> list[int]:
        """Rows that did not fail in the run, but whose image cannot be decoded now."""
        return [row for row in self.thumbnails.rows_that(UNDECODED) if self.store.ok[row]]

    @property
    def num_unread(self) -> int:
        """Number of rows that did not fail in the run, but whose image cannot be read now."""
        return sum(bool(self.store.ok[row]) for row in self.thumbnails.rows_that(UNREAD))

    def _neighbours(self, ok: Rows, config: Config) -> Json:
        store, rows, probes = self.store, self.rows, self.probes
        layer = probes.layer if probes.layer in self.plotted else self.plotted[-1]
        self._log(f"nearest neighbours in {layer}")
        labels, shares = store.labels[rows], None
        vectors = row_vectors(store, layer, rows)
        if vectors.x is not None and (labels >= 0).any():
            shares = same_class_shares(vectors.x, labels, self.images)
        tested = np.ones(len(rows), bool)
        if probes.predicted is not None and (probes.predicted.roles == TEST).any():
            tested = probes.predicted.roles[rows] == TEST
        hard = hard_queries(rows, shares, tested)
        remaining = np.setdiff1d(rows, hard)
        random = random_queries(store, remaining if len(remaining) else rows, config.seed)
        return neighbours_of(store, layer, ok, hard, random, config.seed, config.device)

    def _thumbnails(self, config: Config) -> Thumbnails:
        """Make the thumbnails of all sections, then tiles of the plotted rows as far as they fit.

        Each section has its rows, and whether parts of truncated images are shown.
        """
        store = self.store
        errors = [error["row"] for error in self.errors[:ERRORS_SHOWN]]
        sections = [([row for row in errors if row is not None], False)]
        sections += [(each["shown"], each["partial"]) for each in self.reasons if each["opened"]]
        sections += [([each["first"], each["second"]], False) for each in self.duplicates["pairs"]]
        sections += [([row for row, _ in nearest], False) for _, nearest in self.texts]
        sections += [(list(each.captions), False) for each in self.rankings]
        near = self.neighbours or {"hard": [], "random": []}
        sections += [
            ([row, *(each["row"] for each in nearest)], False)
            for row, nearest in (*near["hard"], *near["random"])
        ]
        with Thumbnails(store.key_bytes, config.report.thumbnails) as thumbnails:
            if not thumbnails.why_none:
                self._log("thumbnails")
                try:
                    thumbnails.open(data_of_store(store, config.data))
                except FeatxError as error:
                    thumbnails.why_none = str(error)
            for section_rows, partial in sections:
                thumbnails.add(section_rows, partial)
            thumbnails.add_tiles(self.rows.tolist())
        undecoded = [row for row in thumbnails.rows_that(UNDECODED) if store.ok[row]]
        if thumbnails.why_none and config.report.thumbnails:
            self._log(f"no thumbnails: {thumbnails.why_none}")
        elif undecoded:
            first = as_utf8(str(store.keys[undecoded[0]]))
            self._log(f"{counted(len(undecoded), 'image')} cannot be decoded now, such as {first}")
        return thumbnails

    def _test_images(self, config: Config) -> dict[str, str]:
        """Make thumbnails of errors on rows of another store; key -> data URI."""
        predicted = self.probes.predicted
        if predicted is None or predicted.test_store is None or not config.report.thumbnails:
            return {}
        cells = [error["cell"] for error in predicted.errors[:ERRORS_SHOWN]]
        try:
            # A stranger's file may name anything, and featx connects to no server because of it.
            if "://" in predicted.test_store:
                raise StoreError(f"{predicted.test_store} is a URL")
            store = FeatureStore(predicted.test_store, verify="rows")
            row_of = {csv_cell(key): row for row, key in enumerate(store.keys.tolist())}
            rows = {cell: row_of[cell] for cell in cells if cell in row_of}
            limit = min(len(rows), config.report.thumbnails)
            with Thumbnails(store.key_bytes, limit) as thumbnails:
                thumbnails.open(data_of_store(store, DataConfig()))
                thumbnails.add(rows.values())
            reason = thumbnails.why_none
        except FeatxError as error:
            reason = str(error)
        if cells and reason:
            self._log(f"no thumbnails of probe.test_store: {reason}")
            return {}
        return {key: thumbnails.uris[row] for key, row in rows.items() if row in thumbnails.uris}

    def _layers_without_norms(self) -> list[tuple[str, str]]:
        """Return the layers whose tokens have no known places, each with the reason."""
        found = []
        for layer in self.layers:
            array = self.store[layer]
            reason = explain_missing_norms(array.shape[1:], array.attrs)
            if array.tokens is None and reason:
                found.append((layer, reason))
                self._log(f"{layer}: no norms of tokens, as {reason}")
        return found


def _comparison(store: FeatureStore, config: Config) -> Json | None:
    """Compare the store with others; names have no folder above the one that contains them all."""
    others = listed_stores(str(config.store))[1:]
    if not others:
        return None
    found = compare_stores([store, *others])
    parents = [os.path.dirname(each["store"]) for each in found.stores]  # noqa: PTH120
    root = os.path.commonpath(parents)
    stores = [
        {**each, "store": as_utf8(os.path.relpath(each["store"], root))} for each in found.stores
    ]
    return {"stores": stores, "notes": found.notes}


def _layers_to_plot(layers: tuple[str, ...], probes: Probes) -> tuple[str, ...]:
    """Return at most MAX_LAYERS layers, among them the best one of the probe."""
    if len(layers) <= MAX_LAYERS:
        return layers
    if probes.layer in layers[:-MAX_LAYERS]:
        return (probes.layer, *layers[1 - MAX_LAYERS :])
    return layers[-MAX_LAYERS:]


def _folders(config: Config, store: FeatureStore) -> tuple[str, ...]:
    """Return the absolute paths that texts of the page could contain."""
    folders = [store.root, store.root.parent, Path.cwd()]
    with contextlib.suppress(RuntimeError):  # a container may have no user with a home folder
        folders.append(Path.home())
    roots = [config.data.root]
    with contextlib.suppress(FeatxError):  # the store may not record where its images are
        roots.append(data_of_store(store, config.data).root)
    folders += [Path(root).absolute() for root in roots if root and "://" not in root]
    return tuple({as_utf8(str(path)) for path in folders if path.is_absolute()})


def render(page: Page) -> str:
    """Render a page as HTML, without the probe if its files are not as job=probe writes them."""
    try:
        return _render(page)
    except (LookupError, TypeError, ValueError, AttributeError, UndefinedError) as error:
        if page.probes.result is None:
            raise
        page.probes = malformed(error)
        return _render(page)


def _title(store: FeatureStore) -> str:
    """Name of the store's folder; of DATA/MODEL, as folders are called by default, both."""
    model = str(store.attrs.get("model", "")).rpartition("/")[2]
    return "/".join(store.root.parts[-2:] if store.root.name == model else store.root.parts[-1:])


def _render(page: Page) -> str:
    return render_page(
        "report.html",
        ["gallery.js", "embedding.js"],
        _data(page),
        page=page,
        generator=GENERATOR,
        name=as_utf8(_title(page.store)),
        model=page.redact(str(page.store.attrs.get("model", ""))),
        errors_shown=ERRORS_SHOWN,
        num_classes_in_plot=CLASSES_SHOWN,
        cka=cka_map(page.similarity),
        fails=page.provenance["num_failed"],
        stages=STAGES,
        perplexity=f"{perplexity_of(len(page.rows)):.0f}",
        **probe_contents(page.probes, page.layers),
    )


def _data(page: Page) -> dict[str, object]:
    rows = page.rows.tolist()
    predicted = page.probes.predicted
    number = {row: place for place, row in enumerate(rows)}
    plots = [each for each in page.plots.values() if each["pca"] is not None]
    layers = []
    for each in plots:
        wrong = {} if predicted is None else predicted.wrong.get(each["name"], {})
        planes = {kind: each[kind] for kind in ("pca", "tsne")}
        layers.append(
            {
                "name": each["name"],
                "wrong": {str(number[row]): name for row, name in wrong.items() if row in number},
                **{kind: None if plane is None else _points(plane)
                   for kind, plane in planes.items()},
            }
        )  # fmt: skip
    names = [each["name"] for each in plots]
    return {
        "rows": rows,
        "keys": [page.key(row) for row in rows],
        "labels": page.store.labels[page.rows].tolist(),
        "classes": [as_utf8(name) for name in page.store.classes],
        "roles": [] if predicted is None else predicted.roles[page.rows].tolist(),
        "role_names": ROLES,
        # The layer that is plotted first: the best one of the probe, else the last one.
        "best": page.probes.layer if page.probes.layer in names else (names or [""])[-1],
        "sprite": page.sprite,
        "unread": {
            str(number[row]): why_not
            for row, why_not in page.thumbnails.unread.items()
            if row in number
        },
        "layers": layers,
    }


def _points(plane: Matrix) -> list[list[int]]:
    """Return (n, 2) points as columns of whole numbers in [0, 2000], with one scale for both."""
    low = plane.min(0)
    scale = float((plane.max(0) - low).max()) or 1.0
    points = np.rint((plane - low) / scale * 2000).astype(int).T.tolist()
    return [list(column) for column in points]
