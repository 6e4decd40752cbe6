"""model=transformers: embedding, tokens and stages of every family; the docs say them."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import slow_except
from transformers_survey import documented_rows, survey
from transformers_zoo import SMALL, tf, write_folder

from featx.models.transformers.families import FAMILIES

FAST = ("dinov2_with_registers", "siglip")


def test_the_table_has_every_family() -> None:
    assert set(SMALL) == set(FAMILIES)
    assert set(FAMILIES) <= set(tf.CONFIG_MAPPING)
    rows = [row.split(" | ")[0] for row in documented_rows()]
    assert rows == [f"| `{name}`" for name in SMALL]


def _documented(model_type: str) -> str:
    return next(row for row in documented_rows() if row.startswith(f"| `{model_type}` |"))


@pytest.mark.parametrize("model_type", slow_except(SMALL, *FAST))
def test_a_family_is_as_the_table_says(model_type: str, tmp_path: Path, one_thread: None) -> None:
    assert str(survey(model_type, write_folder(tmp_path, model_type))) == _documented(model_type)
