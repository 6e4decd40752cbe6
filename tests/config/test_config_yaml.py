"""The YAML of a saved config is that of OmegaConf, which wrote the first stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from featx.config import config_yaml, from_keywords, from_saved, saved_yaml
from featx.errors import ConfigError

PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0${}?"))
SCALARS = st.one_of(
    PLAIN,
    st.integers(),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.sampled_from(["off", "Y", "1e5", "0x10", "1_000", "2024-01-01", "1:30", ".inf", "=", "<<"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(PLAIN, VALUES, max_size=4))
@example({"path": Path("/photos"), "empty": [], "none": {}, "long": "word " * 40, "é": "日本 😀"})
@settings(max_examples=60)
def test_text_and_values_are_those_of_omegaconf(values: dict[str, Any]) -> None:
    text = config_yaml.dump(values)
    assert text == OmegaConf.to_yaml(OmegaConf.create(values))
    assert config_yaml.load(text) == OmegaConf.to_container(OmegaConf.create(text))


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


def test_options_that_are_gone_are_left_out_of_the_config_of_a_store() -> None:
    config = from_saved("export: {format: parquet, push: me/photos}\nbench: {runs: 2}\nseed: 3\n")
    assert (config.export.format, config.seed) == ("parquet", 3)
