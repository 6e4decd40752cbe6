"""The config that a store keeps: read without trust, with its types and values."""

from __future__ import annotations

import pytest

from featx.config import from_keywords, from_saved, saved_yaml
from featx.errors import ConfigError


@pytest.mark.parametrize("text", ["a", "[1, 2]", "- a", "3"])
def test_anything_but_a_mapping_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot be read: it is a .*, and a mapping was expected"
    ):
        from_saved(text)


@pytest.mark.parametrize("unit", ["[", "{a: ", "- "])
def test_deeply_nested_text_is_refused(unit: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read: it is nested too deeply"):
        from_saved("out: " * (unit != "- ") + unit * 20_000)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_failures", 1),
        ("max_failures", 1.0),
        ("tensorboard", 1),
        ("tensorboard", True),
        ("layers", {"conv": {"name": "avg"}}),
        ("capture", ["output", "input"]),
    ],
)
def test_values_that_resemble_a_default_keep_their_type(key: str, value: object) -> None:
    found = getattr(from_saved(saved_yaml(from_keywords({key: value}))), key)
    assert (found, type(found)) == (value, type(value))


def test_it_keeps_what_makes_values_and_what_was_given() -> None:
    text = saved_yaml(from_keywords({"data": "photos", "probe": {"k": 5, "method": "knn"}}))
    assert "probe:\n  method: knn\n  k: 5\n" in text
    assert "neighbors" not in text
    assert "columns" not in text, "data=folder has no columns"
    assert "  exif: apply\n" in text
    assert "reduce:\n  name: none\n" in text


@pytest.mark.parametrize(
    "text",
    ["off", "Y", "1e5", "0x10", "1_000", "2024-01-01", "1:30", ".inf", "=", "<<", "null", "é"],
)
def test_texts_that_resemble_other_values_stay_texts(text: str) -> None:
    found = from_saved(saved_yaml(from_keywords({"out": text, "layers": [text]})))
    assert (found.out, found.layers) == (text, [text])
