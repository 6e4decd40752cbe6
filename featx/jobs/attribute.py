"""job=attribute: heat maps of why the model said so, in a store and as pictures."""

from __future__ import annotations

import io
import os
import re
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from featx.analysis.attribution.contact_sheets import Tile, contact_sheet, feature_map_grid
from featx.analysis.engine_specs import ATTRIBUTIONS
from featx.base.console import log_message, print_result
from featx.config import METHODS, OF_A_LAYER
from featx.config.run_config import Config
from featx.pipeline.extraction import run_extraction, store_exit_code
from featx.pipeline.run_context import RunContext
from featx.pipeline.run_observer import RunObserver
from featx.pipeline.run_summary import describe_end
from featx.storage.s3_path import parse_path
from featx.store import layout
from featx.store.reader import FeatureStore
from featx.store.session import StoreSession

if TYPE_CHECKING:
    from featx.images.loader import Loader


MAX_SHEETS = 50
"""Of a data set with more classes the first ones are drawn."""


def run(config: Config, config_yaml: str) -> int:
    """Attribute, draw, say what happened, and return the exit code."""
    summary = run_extraction(config, config_yaml, ATTRIBUTIONS, observe=ContactSheets)
    print_result(describe_end(summary, config.out, _using(config, summary)))
    return store_exit_code(config, summary)


def _using(config: Config, summary: dict[str, Any]) -> str:
    """Lines that open a heat map, what it explains, and the sheets."""
    method = next(name for name in METHODS if name in summary["layers"])
    lines = [
        f'store["{method}"][0]      # the heat map of the image store.keys[0], NaN where it failed',
        'store["score"][0]      # the number that it explains; names of all datasets: list(store)',
    ]
    if config.attribute.per_class:
        lines.append(f"# the sheets: {parse_path(config.out) / layout.PICTURES}/*.png")
    return "\n".join(lines)


class ContactSheets(RunObserver):
    """Draws the sheets when the store is complete.

    Args:
        context: the run.
        session: its store, held.
    """

    def __init__(self, context: RunContext, session: StoreSession) -> None:
        self._context = context
        self._session = session

    def run_finished(self) -> None:
        """Draw the sheets."""
        _draw(self._context, self._session)


def _draw(context: RunContext, session: StoreSession) -> None:
    """The sheets of a store that is whole, one a class, and feature maps where asked for."""
    config = context.config
    if not config.attribute.per_class:
        return
    folder = session.root / layout.PICTURES
    session.disk.make_folder(folder)
    store = FeatureStore(session.root, verify="rows")
    methods = [method for method in METHODS if method in store]
    labels = np.unique(store.labels[store.ok]).tolist()
    made = []
    with context.loader(1) as loader:
        for label in labels[:MAX_SHEETS]:
            name, rows = _group(store, label, config.attribute.per_class)
            tiles = _tiles(context, store, loader, methods, rows)
            if not tiles:
                continue
            title = name or "pictures without a label"
            sheet = contact_sheet(title, _subtitle(context, store), methods, tiles)
            made.append((f"{_file_name(name)}.png", sheet))
            if config.attribute.feature_map_layer is not None:
                made.append(_feature_maps(context, loader, name, rows[0], tiles[0]))
            for file_name, image in made:
                data = io.BytesIO()
                image.save(data, "PNG")
                session.disk.replace(folder / file_name, data.getvalue())
            log_message(f"drawn {', '.join(str(folder / file_name) for file_name, _ in made)}")
            made.clear()
    if len(labels) > MAX_SHEETS:
        log_message(f"drawn: the first {MAX_SHEETS} of {len(labels)} classes.")


def _group(store: FeatureStore, label: int, most: int) -> tuple[str, list[int]]:
    """The name of a class and its first ok rows; no name for what has no label."""
    rows = np.flatnonzero(store.ok & (store.labels == label))[:most]
    return store.classes[label] if label >= 0 else "", rows.tolist()


def _tiles(
    context: RunContext,
    store: FeatureStore,
    loader: Loader,
    methods: list[str],
    rows: list[int],
) -> list[Tile]:
    """The rows with the crops that the network saw; a picture that went since is left out."""
    tiles = []
    for row in rows:
        images = loader.load([row])
        if len(images):
            maps = [np.asarray(store[method][row], np.float32) for method in methods]
            key = os.fsencode(str(store.keys[row])).decode("utf-8", "replace")
            tiles.append(Tile(_shown(context, images), maps, (key, _said(context, store, row))))
    return tiles


def _shown(context: RunContext, images: Any) -> Any:
    """(1, 3, H, W) of a loader -> (H, W, 3) uint8."""
    x = context.engine.backbone.preprocess.as_uint8(images[0])
    return x.permute(1, 2, 0).contiguous().numpy()


def _said(context: RunContext, store: FeatureStore, row: int) -> str:
    """What was explained in a row, and how sure the model was."""
    target = context.config.target
    score = float(store["score"][row])
    if "target" not in store:
        return f"{target} {score:.3g}"
    number = int(store["target"][row])
    names = context.engine.backbone.classes
    if target in ("label", "loss") and not names:
        names = store.classes
    name = names[number] if number < len(names) else f"class {number}"
    said = f"{name}  {float(store['probability'][row]):.2f}"
    return f"loss {score:.3g} of {said}" if target == "loss" else said


def _subtitle(context: RunContext, store: FeatureStore) -> str:
    """What was explained, of which model and layer."""
    target = context.config.target
    explained = {
        "predicted": "predicted class, probability",
        "label": "class of the label, probability",
    }.get(target, f"class {target}" if isinstance(target, int) else str(target))
    layers = [str(store[method].attrs["layer"]) for method in OF_A_LAYER if method in store]
    of_layer = f", {layers[0]}" if layers else ""
    return f"{context.header.model}{of_layer}: {explained}"


def _feature_maps(
    context: RunContext, loader: Loader, name: str, row: int, tile: Tile
) -> tuple[str, Image.Image]:
    """(file name, grid) of the layer that attribute.feature_map_layer names, for one row."""
    layer = context.config.attribute.feature_map_layer
    from featx.analysis.attribution.attributor import Attributor  # which imports torch

    assert isinstance(context.engine, Attributor)
    maps = context.engine.feature_maps(loader.load([row]))[0].numpy()
    title = f"{layer} of {context.header.model}"
    subtitle = f"{tile.caption[0]}."
    file_name = f"maps-{_file_name(str(layer))}-{_file_name(name)}.png"
    return file_name, feature_map_grid(title, subtitle, tile.picture, maps)


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)[:80].lstrip(".") or "all"
