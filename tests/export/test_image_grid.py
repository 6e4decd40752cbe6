"""`store.show`: a bounded grid of the images of some rows."""

from __future__ import annotations

import base64
import io
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import Stored
from PIL import Image
from tiny_model import extract

import featx
from featx.errors import ConfigError

pytestmark = pytest.mark.usefixtures("in_tmp_path")


class Tags(HTMLParser):
    """The attributes of every img, and all texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.images: list[dict[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("div", "b", "img", "code")
        if tag == "img":
            self.images.append(dict(attrs))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture
def store(stored: Stored) -> featx.FeatureStore:
    stored()
    return featx.open("store")


@pytest.mark.slow
def test_a_grid_shows_images_of_ok_rows(store: featx.FeatureStore) -> None:
    grid = store.show(4)
    found = Tags(grid._repr_html_())
    keys = [image["alt"] for image in found.images]
    ok = [str(key) for key in store.keys[store.ok]]
    assert len(keys) == 4
    assert keys[0] == ok[0]
    assert keys[-1] == ok[-1]
    assert {"cat row 0", f"dog row {len(store) - 1}"} <= {text.strip() for text in found.texts}
    data = str(found.images[0]["src"]).partition("base64,")[2]
    with (
        Image.open(io.BytesIO(base64.b64decode(data))) as shown,
        Image.open(Path("photos", str(keys[0]))) as original,
    ):
        assert shown.size == original.size  # which is smaller than a thumbnail may be
        assert shown.resize((1, 1)).getpixel((0, 0)) == pytest.approx(
            original.convert("RGB").resize((1, 1)).getpixel((0, 0)), abs=6
        )
    assert repr(grid).startswith("<ImageGrid store: 4 images of 21 rows>")


def test_given_rows_may_have_failed_or_be_gone(photos: Path) -> None:
    failed = "cat/<b>.png"
    (photos / failed).write_bytes(b"no image")
    store = extract(photos, max_failures=1)
    (photos / str(store.keys[2])).unlink()
    rows = [store.keys.tolist().index(failed), -1, 2]
    grid = store.show(rows)
    page = Tags(grid._repr_html_())
    assert [image["alt"] for image in page.images] == [str(store.keys[-1])]
    assert {"cannot be decoded", "cannot be read", failed} <= set(page.texts)
    assert [tile.row for tile in grid.tiles] == [rows[0], len(store) - 1, 2]


def test_a_mask_chooses_rows(store: featx.FeatureStore) -> None:
    mask = store.labels == 1
    mask[5:-2] = False
    assert [tile.row for tile in store.show(mask).tiles] == [len(store) - 2, len(store) - 1]
    with pytest.raises(IndexError, match="rows are chosen by int"):
        store.show([0.5])  # type: ignore[list-item]


def test_images_elsewhere_are_found_with_data(store: featx.FeatureStore) -> None:
    Path("photos").rename("elsewhere")
    assert 'store.show(10, data="DIR")' in repr(store.show(2))
    assert len(Tags(store.show(2, data="elsewhere")._repr_html_()).images) == 2


def test_a_grid_is_bounded(store: featx.FeatureStore) -> None:
    for rows in (0, -3, [], [1] * 101):
        with pytest.raises(ConfigError, match="expected 1 to 100 rows of the 21 ok rows"):
            store.show(rows)
