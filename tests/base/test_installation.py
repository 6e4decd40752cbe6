"""Optional packages: returned if they are there, otherwise the command that installs them."""

from __future__ import annotations

import json
import sys

import pytest

from featx.base import import_extra, require_extra
from featx.errors import MissingExtraError

MESSAGE = r'^data=slides needs OpenSlide: pip install "featx\[slides\]"\.$'


def test_a_package_that_is_installed_is_returned() -> None:
    assert import_extra("json", "this test", "JSON", "json") is json
    require_extra("json", "this test", "JSON", "json")


@pytest.mark.parametrize("name", ["no_such_package", "openslide"])
def test_the_extra_of_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "openslide", None)
    with pytest.raises(MissingExtraError, match=MESSAGE):
        import_extra(name, "data=slides", "OpenSlide", "slides")
    with pytest.raises(MissingExtraError, match=MESSAGE):
        require_extra(name, "data=slides", "OpenSlide", "slides")
