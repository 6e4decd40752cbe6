"""Contact sheets of heat maps over images, and grids of feature maps; drawn with Pillow only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

Pixels = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.floating]

SIGNED = ("input_x_gradient", "integrated_gradients", "guided_gradcam", "occlusion")
"""Methods whose heat maps have both signs, for (red) and against (blue) the class; the others are 0
and above."""

_HEAT = ("000004", "280b53", "65156e", "9f2a63", "d44842", "f57d15", "fac228", "fcffa4")
_AGAINST_FOR = ("1f4e9c", "4a86c5", "a7cde6", "f4f4f4", "f5b69a", "d9604c", "a31222")
"""Stops of the colour scales as RGB: `_HEAT` from dark to bright, `_AGAINST_FOR` from blue over
white to red."""

_PANEL = 192
"""Width of an image on a sheet in pixels."""
_GAP, _MARGIN = 6, 24
_NARROWEST, _WIDEST = 820, 1640
_BAR = 7
_PAPER = (255, 255, 255)
_CLIP = 99.5
"""Percentile of magnitudes that gets the last colour; larger values are clipped."""

_CELL = 3
"""Side in pixels of the squares over which maps of single pixels are averaged, to avoid speckle."""


@dataclass(frozen=True)
class _TextStyle:
    """Style of a line of text."""

    size: int
    colour: tuple[int, int, int]


_INK, _GREY = (34, 34, 34), (120, 120, 120)
_TITLE = _TextStyle(24, _INK)
_TARGET = _TextStyle(16, _INK)
_LABEL = _TextStyle(13, _GREY)
_NUMBER = _TextStyle(11, _GREY)


@dataclass(frozen=True)
class Tile:
    """One image of a sheet.

    Attributes:
        pixels: (H, W, 3) uint8, the crop that the model received.
        maps: one (h, w) heat map of any size for each column of the sheet.
        caption: two lines: the image, and the explained target.
    """

    pixels: Pixels
    maps: Sequence[Numbers]
    caption: tuple[str, str]


def contact_sheet(
    title: str, subtitle: str, methods: Sequence[str], tiles: Sequence[Tile]
) -> Image.Image:
    """Draw images with their heat maps next to them; below each map is its own scale."""
    width = _PANEL * (1 + len(methods)) + _GAP * len(methods)
    across = max(1, min(len(tiles), (_WIDEST - _MARGIN) // (width + _MARGIN)))
    panel_height = _height_of(tiles[0].pixels)
    height = panel_height + 84
    top, down = 96, -(-len(tiles) // across)
    if set(methods) & set(SIGNED):
        subtitle += "; red: in favour, blue: against"
    across_px = max(_NARROWEST, across * (width + _MARGIN) + _MARGIN)
    sheet = _paper(across_px, top + down * height, title, subtitle)
    draw = ImageDraw.Draw(sheet)
    for i, tile in enumerate(tiles):
        x = _MARGIN + (i % across) * (width + _MARGIN)
        y = top + (i // across) * height
        if i < across:
            for column, name in enumerate(["image", *methods]):
                _write(draw, (x + column * (_PANEL + _GAP), y - 20), name, _LABEL, _PANEL)
        sheet.paste(_resize(tile.pixels, panel_height), (x, y))
        for column, (name, values) in enumerate(zip(methods, tile.maps, strict=True), 1):
            left = x + column * (_PANEL + _GAP)
            _draw_map(sheet, (left, y), tile.pixels, values, name)
        _write(draw, (x, y + panel_height + 25), tile.caption[0], _LABEL, width)
        _write(draw, (x, y + panel_height + 41), tile.caption[1], _TARGET, width)
    return sheet


def feature_map_grid(
    title: str, subtitle: str, pixels: Pixels, maps: Numbers, most: int = 64
) -> Image.Image:
    """Draw an image (H, W, 3) uint8 and the strongest channels of a layer, each on its own scale.
    Of the maps (C, h, w) at most `most` are drawn, chosen by mean magnitude; the subtitle gets the
    number of channels.
    """
    strongest = np.argsort(-np.abs(maps).mean((1, 2)), kind="stable")[:most]
    across = min(16, max(1, round((2 * len(strongest)) ** 0.5)))
    side, top = 88, 96
    cell_height = round(side * maps.shape[1] / maps.shape[2])
    down = -(-len(strongest) // across)
    left = _MARGIN + _PANEL + _MARGIN
    signed = bool((maps < 0).any())
    scale = "blue below 0, red above" if signed else "dark 0, bright the largest"
    subtitle += (
        f"   {len(strongest)} of {len(maps)} channels, strongest first, each on its own scale: "
        f"{scale}"
    )
    inner = max(_height_of(pixels), down * (cell_height + 20))
    width = max(_NARROWEST, left + across * (side + _GAP) + _MARGIN)
    sheet = _paper(width, top + inner + 16, title, subtitle)
    sheet.paste(_resize(pixels, _height_of(pixels)), (_MARGIN, top))
    draw = ImageDraw.Draw(sheet)
    for i, channel in enumerate(strongest.tolist()):
        x = left + (i % across) * (side + _GAP)
        y = top + (i // across) * (cell_height + 20)
        values, _ = scale_values(maps[channel], signed)
        colours = _colour((values + 1) / 2, _AGAINST_FOR) if signed else _colour(values, _HEAT)
        sheet.paste(
            Image.fromarray(colours).resize((side, cell_height), Image.Resampling.NEAREST), (x, y)
        )
        _write(draw, (x, y + cell_height + 1), str(channel), _NUMBER, side)
    return sheet


def overlay(pixels: Pixels, values: Numbers, signed: bool) -> Pixels:
    """Blend a heat map with its image, (H, W, 3) uint8."""
    height, width = pixels.shape[:2]
    scale, _ = scale_values(coarse(values), signed)
    enlarged = Image.fromarray(scale).resize((width, height), Image.Resampling.BILINEAR)
    heat = np.asarray(enlarged, np.float32)
    grey = pixels.astype(np.float32) @ np.array([0.299, 0.587, 0.114], np.float32)
    strength: Numbers
    background: Numbers
    if signed:
        strength = np.abs(heat)[..., None] ** 0.6
        background = 150 + 0.4 * grey[..., None].repeat(3, 2)
        colours = _colour((heat + 1) / 2, _AGAINST_FOR)
    else:
        strength = 0.25 + 0.55 * heat[..., None]
        background = 0.5 * grey[..., None] + 0.5 * pixels
        colours = _colour(heat, _HEAT)
    mixed = background * (1 - strength) + colours * strength
    return np.clip(mixed, 0, 255).astype(np.uint8)


def coarse(values: Numbers) -> Numbers:
    """Average a map of single pixels over small squares, to avoid speckle.

    Maps below 64 pixels of height or width are returned as they are.
    """
    height, width = values.shape
    if min(height, width) < 64:
        return values
    size = (width // _CELL, height // _CELL)
    small = Image.fromarray(values.astype(np.float32)).resize(size, Image.Resampling.BOX)
    return np.asarray(small, np.float32)


def scale_values(values: Numbers, signed: bool) -> tuple[Numbers, float]:
    """Scale values to [0, 1], or [-1, 1] if signed; return float32 and the value that became 1."""
    magnitude = np.abs(values) if signed else values.clip(0)
    largest = float(np.percentile(magnitude, _CLIP)) or float(magnitude.max())
    if largest <= 0:
        return np.zeros(values.shape, np.float32), 0.0
    return (values / largest).clip(-1 if signed else 0, 1).astype(np.float32), largest


def _draw_map(
    sheet: Image.Image, place: tuple[int, int], pixels: Pixels, values: Numbers, method: str
) -> None:
    """Draw a heat map over its image, with a scale bar below."""
    x, y = place
    signed = method in SIGNED
    height = _height_of(pixels)
    sheet.paste(_resize(overlay(pixels, values, signed), height), place)
    _, largest = scale_values(coarse(values), signed)
    ramp = np.linspace(0, 1, _PANEL)[None].repeat(_BAR, 0)
    bar = _colour(ramp, _AGAINST_FOR if signed else _HEAT)
    sheet.paste(Image.fromarray(bar), (x, y + height + 3))
    draw = ImageDraw.Draw(sheet)
    label_y = y + height + 3 + _BAR
    number = f"{largest:.2g}"
    _write(draw, (x, label_y), f"-{number}" if signed else "0", _NUMBER, _PANEL)
    font = ImageFont.load_default(_NUMBER.size)
    number_x = x + _PANEL - round(draw.textlength(number, font))
    _write(draw, (number_x, label_y), number, _NUMBER, _PANEL)


def _colour(values: Numbers, stops: Sequence[str]) -> Pixels:
    """Map (H, W) values in [0, 1] to (H, W, 3) uint8 on a colour scale."""
    colours = np.array([list(bytes.fromhex(stop)) for stop in stops], np.float32)
    places = np.linspace(0, 1, len(stops))
    channels = [np.interp(values, places, colours[:, i]) for i in range(3)]
    return np.stack(channels, -1).round().astype(np.uint8)


def _paper(width: int, height: int, title: str, subtitle: str) -> Image.Image:
    """Create an empty sheet with a title and a subtitle."""
    sheet = Image.new("RGB", (width, height), _PAPER)
    draw = ImageDraw.Draw(sheet)
    _write(draw, (_MARGIN, 16), title, _TITLE, width - 2 * _MARGIN)
    _write(draw, (_MARGIN, 47), subtitle, _LABEL, width - 2 * _MARGIN)
    return sheet


def _height_of(pixels: Pixels) -> int:
    return max(1, round(_PANEL * int(pixels.shape[0]) / int(pixels.shape[1])))


def _resize(pixels: Pixels, height: int) -> Image.Image:
    return Image.fromarray(pixels).resize((_PANEL, height), Image.Resampling.BICUBIC)


def _write(
    draw: ImageDraw.ImageDraw, place: tuple[int, int], text: str, style: _TextStyle, width: int
) -> None:
    """Draw one line of text, shortened in the middle if it is wider than `width` pixels."""
    font = ImageFont.load_default(style.size)
    text = text.encode("utf-8", "replace").decode()
    shortened = text
    while len(shortened) > 3 and draw.textlength(shortened, font) > width:
        half = (len(shortened) - 4) // 2 if "..." in shortened else len(text) // 2
        shortened = f"{text[:half]}...{text[len(text) - half :]}"
    draw.text(place, shortened, style.colour, font)
