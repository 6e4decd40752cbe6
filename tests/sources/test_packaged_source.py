"""The data sets that come with a package: textiles and the sample images."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from featx.config import DataConfig
from featx.errors import MissingExtraError
from featx.images import ImagePolicy, decode_pillow
from featx.sources import open_source
from featx.types import Source


@pytest.fixture(scope="module")
def textiles() -> Source:
    pytest.importorskip("conformal_clip_data", reason="the extra demo is not installed")
    return open_source(DataConfig(name="textiles"))


def test_textiles_are_2000_labelled_images(textiles: Source) -> None:
    listing = textiles.listing()
    assert len(listing) == len(set(listing.keys.tolist())) == 2000
    assert listing.classes == ("global", "local", "nominal")
    assert np.bincount(listing.labels).tolist() == [500, 500, 1000]
    for key, label in zip(listing.keys.tolist(), listing.labels.tolist(), strict=True):
        assert key.startswith(listing.classes[label].encode() + b"/")


def test_textiles_decode(textiles: Source) -> None:
    policy = ImagePolicy.from_config(DataConfig())
    for key in textiles.listing().keys[::400]:
        image = decode_pillow(textiles.read(bytes(key)), policy)
        assert min(image.size) > 30
        assert np.asarray(image).std() > 1


def test_textiles_without_the_extra_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "conformal_clip_data", None)  # import fails
    with pytest.raises(MissingExtraError, match=r'pip install "featx\[demo\]".*data=sample'):
        open_source(DataConfig(name="textiles"))


def test_the_sample_is_there_without_any_extra() -> None:
    listing = open_source(DataConfig(name="sample")).listing()
    assert listing.classes == ("checks", "circles", "stripes")
    assert np.bincount(listing.labels).tolist() == [4, 4, 4]
    assert listing.skipped == {}


def test_every_sample_image_decodes() -> None:
    source = open_source(DataConfig(name="sample"))
    policy = ImagePolicy.from_config(DataConfig())
    for key in source.listing().keys.tolist():
        image = decode_pillow(source.read(key), policy)
        assert image.mode == "RGB"
        assert 200 <= min(image.size) <= max(image.size) <= 320
        assert np.asarray(image).std() > 30, key
