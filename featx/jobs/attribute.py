"""job=attribute: heat maps that explain the model's output, in a store and as PNG files."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping

import numpy as np
from PIL import Image

from featx.analysis import ATTRIBUTIONS
from featx.analysis.attribution import Tile, contact_sheet, feature_map_grid
from featx.base import log_message, name_bytes, print_result
from featx.config import METHODS, OF_A_LAYER, AttributeConfig, Config, names_tuple
from featx.errors import ConfigError, InternalError
from featx.jobs.base import JOBS, RUN_OPTIONS, Input, Job
from featx.pipeline import RunContext, RunObserver, describe_end, run_extraction, store_exit_code
from featx.storage import parse_path
from featx.store import FeatureStore, StoreSession, layout

MAX_SHEETS = 50
"""Largest number of classes for which contact sheets are drawn."""


def run(config: Config, config_yaml: str) -> int:
    """Compute heat maps, draw contact sheets and print a summary; returns the exit code."""
    summary = run_extraction(config, config_yaml, ATTRIBUTIONS, observe=ContactSheets)
    method = next(name for name in METHODS if name in summary["layers"])
    lines = [
        f'store["{method}"][0]      # heat map of the image store.keys[0], NaN where it failed',
        'store["score"][0]      # the scalar that it explains; list(store) names all datasets',
    ]
    if config.attribute.per_class:
        lines.append(f"# the sheets: {parse_path(config.out) / layout.SHEETS}/*.png")
    print_result(describe_end(summary, config.out, lines))
    return store_exit_code(config, summary)


class ContactSheets(RunObserver):
    """Observer that draws the contact sheets when the store is complete."""

    def __init__(self, context: RunContext, session: StoreSession) -> None:
        self._context = context
        self._session = session

    def run_finished(self) -> None:
        """Draw one contact sheet per class, and feature maps if requested."""
        context, session = self._context, self._session
        config = context.config
        folder = session.root / layout.SHEETS
        if not config.attribute.per_class:
            return
        # Those of earlier rows, of which a class or a layer may not be drawn now.
        for earlier in list(folder.glob("*.png")):
            session.disk.remove(earlier)
        session.disk.make_folder(folder)
        store = FeatureStore(session.root, verify="rows")
        methods = [method for method in METHODS if method in store]
        labels, taken = np.unique(store.labels[store.ok]).tolist(), set[str]()
        for label in labels[:MAX_SHEETS]:
            name = store.classes[label] if label >= 0 else ""
            rows = np.flatnonzero(store.ok & (store.labels == label))[: config.attribute.per_class]
            tiles = _tiles(context, store, methods, rows.tolist())
            if not tiles:
                continue
            title = name or "images without a label"
            sheet = contact_sheet(title, _subtitle(context, store), methods, [*tiles.values()])
            file = _file_name(name)
            while file.casefold() in taken:  # "a b" and "a_b" would have one file
                file += "_"
            taken.add(file.casefold())
            sheets = {f"{file}.png": sheet}
            if (layer := config.attribute.feature_map_layer) is not None:
                maps = f"maps-{_file_name(str(layer))}-{file}.png"
                sheets[maps] = _feature_maps(context, *next(iter(tiles.items())))
            for file_name, image in sheets.items():
                data = io.BytesIO()
                image.save(data, "PNG")
                session.disk.replace(folder / file_name, data.getvalue())
            log_message(f"drawn {', '.join(str(folder / file_name) for file_name in sheets)}")
        if len(labels) > MAX_SHEETS:
            log_message(f"drawn: the first {MAX_SHEETS} of {len(labels)} classes.")


def _tiles(
    context: RunContext,
    store: FeatureStore,
    methods: list[str],
    rows: list[int],
) -> dict[int, Tile]:
    """Return the rows with the crops that the model saw, without images that were deleted since."""
    tiles = {}
    for row in rows:
        images = context.loader.load([row])
        if len(images):
            x = context.engine.backbone.preprocess.as_uint8(images[0])
            pixels = x.permute(1, 2, 0).contiguous().numpy()
            maps = [np.asarray(store[method][row], np.float32) for method in methods]
            key = name_bytes(store.key_of(row)).decode("utf-8", "replace")
            tiles[row] = Tile(pixels, maps, (key, _caption(context, store, row)))
    return tiles


def _caption(context: RunContext, store: FeatureStore, row: int) -> str:
    """Describe what a heat map explains, with the probability or the loss."""
    target = context.config.target
    score = float(store["score"][row])
    if "target" not in store:
        return f"{target} {score:.3g}"
    number = int(store["target"][row])
    names = context.engine.backbone.classes
    name = names[number] if number < len(names) else f"class {number}"
    if target in ("label", "loss") and not names:
        name = store.classes[int(store.labels[row])]
    caption = f"{name}  {float(store['probability'][row]):.2f}"
    return f"loss {score:.3g} of {caption}" if target == "loss" else caption


def _subtitle(context: RunContext, store: FeatureStore) -> str:
    """Describe what the maps of a sheet explain, and of which model and layer."""
    target = context.config.target
    explained = {
        "predicted": "predicted class, probability",
        "label": "class of the label, probability",
    }.get(str(target), f"class {target}" if isinstance(target, int) else str(target))
    layers = [str(store[method].attrs["layer"]) for method in OF_A_LAYER if method in store]
    of_layer = f", {layers[0]}" if layers else ""
    return f"{context.header.model}{of_layer}: {explained}"


def _feature_maps(context: RunContext, row: int, tile: Tile) -> Image.Image:
    """Draw the feature maps of attribute.feature_map_layer for a row."""
    from featx.analysis.attribution import Attributor  # which imports torch

    if not isinstance(context.engine, Attributor):
        raise InternalError(f"heat maps were asked of a {type(context.engine).__qualname__}")
    maps = context.engine.feature_maps(context.loader.load([row]))[0].numpy()
    title = f"{context.config.attribute.feature_map_layer} of {context.header.model}"
    return feature_map_grid(title, f"{tile.caption[0]}.", tile.pixels, maps)


def _file_name(name: str) -> str:
    """Return a class or layer name without characters that a file name must not contain."""
    return re.sub(r"[^\w.-]+", "_", name)[:80].lstrip(".") or "all"


def _check(config: Config) -> None:
    if config.model.window.size is not None:
        raise ConfigError(
            "model.window.size does not go with job=attribute: a heat map explains the output for "
            "an image at the input size of the model. Leave it out."
        )
    if config.layers is None:
        return
    if not set(OF_A_LAYER) & set(config.attribute.methods):
        raise ConfigError(
            f"layers has an effect with attribute.method={' or '.join(OF_A_LAYER)} only."
        )
    if isinstance(config.layers, Mapping) or len(names_tuple(config.layers)) > 1:
        raise ConfigError(
            f"layers={config.layers}: job=attribute takes the name of one module, such as "
            "'layers=[layer4]'."
        )


JOBS.register(
    Job(
        "attribute",
        "Compute heat maps that explain the model's output, and draw them.",
        AttributeConfig,
        run=run,
        input=Input.IMAGES,
        reads=(*RUN_OPTIONS, "executor", "retry_failed", "refresh", "log.metrics", "profile"),
        ignores=("capture", "reduce"),
        why="attribute.method and layers say what is computed",
        makes_store=True,
        takes_gradients=True,
        check=_check,
    )
)
