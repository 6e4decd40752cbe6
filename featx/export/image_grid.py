"""Grid of images of a store's rows for notebooks: `store.show(10)`."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from featx.base import as_utf8, printable, shown_path
from featx.config import from_composed, from_keywords
from featx.errors import ConfigError, counted
from featx.export.selection import data_of_store
from featx.store import FeatureStore, row_indices

MAX_IMAGES = 100
"""Maximum number of images in a grid."""

MAX_BYTES = 1 << 20
"""Maximum bytes of the images of a grid, which a notebook keeps in its file."""

_TILE = "display:inline-block;width:9rem;margin:0 .6rem .8rem 0;vertical-align:top"
_LINE = "overflow:hidden;text-overflow:ellipsis;white-space:nowrap"


@dataclass(frozen=True)
class Tile:
    """One row of a grid: its image as a data URI, or the reason why there is none."""

    row: int
    key: str
    class_name: str
    uri: str
    reason: str


class ImageGrid:
    """Images of some rows, which a notebook shows as a grid and a console as text. If there is no
    image at all, `why_none` is the reason, else ''.
    """

    def __init__(self, title: str, tiles: Sequence[Tile], why_none: str) -> None:
        self.title = title
        self.tiles = tuple(tiles)
        self.why_none = why_none

    def __repr__(self) -> str:
        lines = [f"<ImageGrid {self.title}>"]
        for tile in self.tiles:
            lines.append(f"  {tile.row}  {tile.key}  {tile.reason or tile.class_name}".rstrip())
        return "\n".join([*lines, *([f"  {self.why_none}"] if self.why_none else [])])

    def _repr_html_(self) -> str:
        """Return the grid as HTML with inline styles, without scripts and fixed colours."""
        why = f"<div>{html.escape(self.why_none)}</div>" if self.why_none else ""
        tiles = "".join(map(_tile_html, self.tiles))
        return f"<div><div><b>{html.escape(self.title)}</b></div>{why}<div>{tiles}</div></div>"


def image_grid(
    store: FeatureStore,
    rows: int | Sequence[int] = 10,
    data: str | os.PathLike[str] | None = None,
) -> ImageGrid:
    """Make a grid of images of a store; see `FeatureStore.show`."""
    chosen = _rows_to_show(store, rows)
    data_options = from_composed(
        from_keywords({} if data is None else {"data": os.fspath(data)})
    ).data
    from featx.export.report.thumbnails import Thumbnails  # which imports torch

    with Thumbnails(store.key_bytes, len(chosen), MAX_BYTES) as thumbnails:
        thumbnails.open(data_of_store(store, data_options))
        thumbnails.add(chosen)
    tiles = [
        Tile(
            row=row,
            key=as_utf8(store.key_of(row)),
            class_name=as_utf8(store.classes[store.labels[row]]) if store.labels[row] >= 0 else "",
            uri=thumbnails.uris.get(row, ""),
            reason="" if row in thumbnails.uris else thumbnails.unread.get(row, "left out"),
        )
        for row in chosen
    ]
    count = counted(len(thumbnails.uris), "image")
    title = f"{shown_path(store.root)}: {count} of {counted(len(store), 'row')}"
    why_none = thumbnails.why_none
    if why_none and data is None:
        why_none += ' Here: store.show(10, data="DIR").'
    return ImageGrid(title, tiles, why_none)


def _rows_to_show(store: FeatureStore, rows: int | Sequence[int]) -> list[int]:
    """Return the rows to show: the given rows, or the given number of rows, evenly spaced."""
    if isinstance(rows, int | np.integer):
        ok = np.flatnonzero(store.ok)
        count = min(max(0, int(rows)), MAX_IMAGES + 1, len(ok))
        chosen = ok[np.linspace(0, len(ok) - 1, count).astype(int)] if count else ok[:0]
    else:
        chosen = row_indices(rows, len(store))[0]
    if not 0 < len(chosen) <= MAX_IMAGES:
        raise ConfigError(
            f"store.show({rows}): expected 1 to {MAX_IMAGES} rows of the {int(store.ok.sum())} ok "
            "rows, as a number or as a list of rows."
        )
    return [int(row) for row in chosen]


def _tile_html(tile: Tile) -> str:
    """Return one tile: the image or the reason why there is none, key and class."""
    key, name, reason = (
        html.escape(printable(text)) for text in (tile.key, tile.class_name, tile.reason)
    )
    image = (
        f'<img src="{tile.uri}" alt="{key}" style="max-width:100%;height:8rem;object-fit:contain">'
        if tile.uri
        else f'<div style="height:8rem">{reason}</div>'
    )
    return (
        f'<div style="{_TILE}">{image}<div style="{_LINE}" title="{key}"><code>{key}</code></div>'
        f'<div style="{_LINE};opacity:.7">{name} row {tile.row}</div></div>'
    )
