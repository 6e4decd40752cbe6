"""model=transformers: embedding, tokens and stages of every family; the docs say them."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import slow_except
from timm_survey import documented_rows
from transformers_survey import survey
from transformers_zoo import SMALL, tf, write_folder

from featx.models.transformers.families import FAMILIES

ROWS = documented_rows("transformers")
FAST = ("dinov2_with_registers", "siglip")


def test_the_table_has_every_family() -> None:
    assert set(SMALL) == set(FAMILIES)
    assert set(FAMILIES) <= set(tf.CONFIG_MAPPING)
    assert [row.split(" | ")[0] for row in ROWS] == [f"| `{name}`" for name in SMALL]


def test_the_class_tokens_of_pixio_are_those_of_its_config() -> None:
    for number in (1, 8):
        assert FAMILIES["pixio"].num_prefix_tokens(tf.PixioConfig(n_cls_tokens=number)) == number


@pytest.mark.parametrize("model_type", slow_except(SMALL, *FAST))
def test_a_family_is_as_the_table_says(model_type: str, tmp_path: Path, one_thread: None) -> None:
    row = survey(model_type, write_folder(tmp_path, model_type))
    assert row == next(each for each in ROWS if each.startswith(f"| `{model_type}` |"))
