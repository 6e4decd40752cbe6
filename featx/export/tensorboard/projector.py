"""Embedding projector of TensorBoard: rows of a store as points that show their images.

Features come from the store and images are read again, so a projector can be written for any store.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from featx.base import free_title, log_message
from featx.config import ReduceConfig
from featx.errors import ReduceError, counted
from featx.export.selection import with_texts
from featx.storage import AtomicFolder
from featx.store import FeatureStore, layout
from featx.types import Failure

if TYPE_CHECKING:
    from featx.pipeline import RunContext

SPRITE_PIXELS = 64
"""Maximum of the longer side of a sprite in pixels; MAX_PROJECTOR_IMAGES of them fill a sheet."""

_MAX_LAYERS = 8
"""Maximum number of layers; the last ones are used, which separate classes best."""

MAX_WIDTH = 8192
"""Maximum number of values of a vector, since vectors are sent to the browser as text."""

_BATCH_ROWS = 64
"""Rows that are read at a time."""
_CONFIG = "projector_config.pbtxt"
_FILES = "projector"
_GREY = 128
"""Grey level of a sprite without an image."""
_SPELLED = str.maketrans({"\t": r"\t", "\n": r"\n", "\r": r"\r"})
"""Replacements for characters that no cell of a TSV file can contain."""


def write_projector(
    disk: AtomicFolder,
    context: RunContext,
    store: FeatureStore,
    layers: Sequence[str],
    num_rows: int,
) -> None:
    """Write vectors, labels and sprites of some rows of a store, for the projector.

    `SummaryWriter.add_embedding` would write labels and sprites again for each layer.
    """
    from google.protobuf.text_format import MessageToString
    from PIL import Image
    from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig

    folder = disk.root / layout.TENSORBOARD
    disk.remove(folder / _CONFIG)
    disk.remove(folder / _FILES)
    ok = np.flatnonzero(store.ok)
    if not len(ok):
        log_message("tensorboard: no row is ok, so there is no projector")
        return
    rows = ok[np.round(np.linspace(0, len(ok) - 1, min(num_rows, len(ok)))).astype(np.int64)]
    disk.make_folder(folder / _FILES)
    config = ProjectorConfig()
    for number, name in enumerate(layers[-_MAX_LAYERS:]):
        if (vectors := _vectors(context, store, name, rows)) is None:
            continue
        path = f"{_FILES}/vectors-{number}.tsv"
        disk.replace(folder / path, _lines(vectors.tolist(), "{:.6g}".format))
        config.embeddings.add(
            tensor_name=name,
            tensor_path=path,
            tensor_shape=vectors.shape,
            metadata_path=f"{_FILES}/metadata.tsv",
        )
    if len(layers) > _MAX_LAYERS:
        log_message(f"tensorboard: the projector has the last {_MAX_LAYERS} layers of the store")
    if not config.embeddings:
        return
    disk.replace(folder / _FILES / "metadata.tsv", _lines(_metadata(store, rows), _cell))
    sheet, size = _sprite_sheet(context, rows)
    buffer = io.BytesIO()
    Image.fromarray(sheet).save(buffer, "PNG")
    disk.replace(folder / _FILES / "sprites.png", buffer.getvalue())
    for embedding in config.embeddings:
        embedding.sprite.image_path = f"{_FILES}/sprites.png"
        embedding.sprite.single_image_dim.extend(size)
    disk.replace(folder / _CONFIG, MessageToString(config).encode())


def _lines(rows: Iterable[Iterable[object]], cell: Callable[[object], str]) -> bytes:
    r"""Format rows as TSV. TensorBoard reads UTF-8 only, so other bytes are written as \xff."""
    lines = ["\t".join(map(cell, row)) for row in rows]
    raw = "\n".join([*lines, ""]).encode("utf-8", "surrogateescape")
    return raw.decode("utf-8", "backslashreplace").encode()


def _cell(value: object) -> str:
    """Format a cell of the metadata; NaN, a missing number, is an empty cell."""
    return "" if value != value else str(value).translate(_SPELLED)


def _metadata(store: FeatureStore, rows: npt.NDArray[np.int64]) -> list[tuple[object, ...]]:
    """Return titles, and label, key, row and the store's columns of each point.

    A column with the name of another one is called column.NAME.
    """
    labels = store.labels[rows].tolist()
    columns: dict[str, Sequence[object]] = {
        "label": [store.classes[label] if label >= 0 else "(none)" for label in labels],
        "key": [store.key_of(row) for row in rows.tolist()],
        "row": rows.tolist(),
    }
    for name in store.columns:
        columns[free_title(name, columns)] = list(with_texts(store.stored_column(name)[rows]))
    return [tuple(columns), *zip(*columns.values(), strict=True)]


def _vectors(
    context: RunContext, store: FeatureStore, name: str, rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32] | None:
    """Return (n, C) vectors of a layer, or None after logging the reason.

    Maps and tokens are averaged over positions.
    """
    import torch

    from featx.layers import RowLayout, reduction

    layer, backbone = store[name], context.engine.backbone
    shape = layer.shape[1:]
    reduce = ReduceConfig("none" if len(shape) == 1 else "avg")
    try:
        reduce_to_vectors = reduction(
            reduce,
            RowLayout(
                name,
                shape,
                backbone.preprocess.crop,
                backbone.num_prefix_tokens,
                # A map of reduce=grid or reduce=align has any proportions.
                is_map=layer.tokens is not None and layer.tokens.channels_first(shape) is True,
            ),
        )
    except ReduceError:
        log_message(
            f"tensorboard: {name} {shape} is not in the projector, its channels are unknown"
        )
        return None
    blocks = []
    for start in range(0, len(rows), _BATCH_ROWS):
        read = layer[rows[start : start + _BATCH_ROWS]].astype(np.float32)
        blocks.append(reduce_to_vectors(torch.from_numpy(read)).numpy())
        if blocks[0].shape[1] > MAX_WIDTH:
            log_message(
                f"tensorboard: {name} is not in the projector, over {MAX_WIDTH} numbers wide"
            )
            return None
    vectors = np.concatenate(blocks)
    if not np.isfinite(vectors).all():
        log_message(f"tensorboard: {name} is not in the projector, it is not complete")
        return None
    return vectors


def _sprite_sheet(
    context: RunContext, rows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint8], tuple[int, int]]:
    """Arrange the images of some rows, as the model receives them, in a square grid, by lines.

    An image that cannot be read is grey, so that the others keep their positions. Returns the
    sheet, (H, W, 3) uint8, and the (width, height) of one sprite.
    """
    from PIL import Image

    side = math.ceil(math.sqrt(len(rows)))
    preprocess = context.engine.backbone.preprocess
    height, width = preprocess.crop
    longest = min(SPRITE_PIXELS, max(height, width))
    h, w = (max(1, round(n * longest / max(height, width))) for n in (height, width))
    places = np.full((side * side, h, w, 3), _GREY, dtype=np.uint8)
    num_missing = 0
    for place, x in enumerate(context.loader.results(rows.tolist())):
        if isinstance(x, Failure):
            num_missing += 1
            continue
        image = Image.fromarray(preprocess.as_uint8(x).permute(1, 2, 0).contiguous().numpy())
        sprite = image.resize((w, h), Image.Resampling.BILINEAR, reducing_gap=2)
        places[place] = np.asarray(sprite)
    if num_missing:
        images_text = counted(num_missing, "image")
        log_message(f"tensorboard: {images_text} cannot be read now; the sprites are grey")
    sheet = places.reshape(side, side, h, w, 3).transpose(0, 2, 1, 3, 4)
    return sheet.reshape(side * h, side * w, 3), (w, h)
