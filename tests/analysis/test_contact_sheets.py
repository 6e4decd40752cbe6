"""Heat maps over images: scales, colours, and what fits on a sheet."""

from __future__ import annotations

import numpy as np
import pytest

from featx.analysis.attribution import Tile, contact_sheet, feature_map_grid
from featx.analysis.attribution.contact_sheets import overlay, scale_values


def test_a_scale_ends_at_the_largest_number() -> None:
    values = np.array([[0.0, 2.0], [-4.0, 1.0]], np.float32)
    positive, _ = scale_values(values, signed=False)
    assert positive == pytest.approx(np.array([[0, 1], [0, 0.5]]), abs=0.02)
    up, largest = scale_values(values, signed=True)
    assert largest == pytest.approx(4, rel=0.02)
    assert up[1, 0] == -1
    flat, nothing = scale_values(np.zeros((2, 2), np.float32), signed=True)
    assert nothing == 0
    assert not flat.any()


def test_heat_shows_where_it_is() -> None:
    image = np.full((64, 64, 3), 128, np.uint8)
    values = np.zeros((8, 8), np.float32)
    values[2, 5] = 1
    drawn = overlay(image, values, signed=False).astype(int)
    bright = np.unravel_index(drawn.sum(2).argmax(), (64, 64))
    assert 16 <= bright[0] < 24
    assert 40 <= bright[1] < 48
    against = overlay(image, -values, signed=True).astype(int)
    row, column, _ = np.argwhere(against == against[..., 0].min())[0]
    assert against[row, column, 2] > against[row, column, 0], "against is blue"


@pytest.mark.slow
def test_long_and_odd_names_stay_within_the_sheet() -> None:
    name = "a very long name / of ümläuts \udcff 漢字 " * 10
    tile = Tile(np.zeros((40, 60, 3), np.uint8), [np.ones((3, 4))], (name, name))
    sheet = np.asarray(contact_sheet(name, name, ["gradcam"], [tile] * 9))
    assert (sheet[:, -8:] == 255).all()


def test_the_strongest_channels_come_first() -> None:
    maps = np.zeros((100, 4, 4), np.float32)
    maps[70], maps[3, 0, 0] = 2, 1
    sheet = np.asarray(feature_map_grid("t", "s", np.zeros((9, 9, 3), np.uint8), maps, most=2))
    first, second = sheet[96 + 44, 240 + 44], sheet[96 + 44, 240 + 94 + 44]
    assert first.sum() > 600, "all of channel 70 is bright"
    assert second.sum() < 30, "of channel 3 a corner only"
