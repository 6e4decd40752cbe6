"""The keywords of the Python functions: typed, shown, and those that the job reads."""

from __future__ import annotations

import inspect
from typing import get_type_hints

import pytest

import featx
from featx.errors import ConfigError
from featx.jobs import keywords


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("extract", keywords.ExtractOptions),
        ("stats", keywords.StatsOptions),
        ("export_store", keywords.ExportOptions),
        ("write_report", keywords.ReportOptions),
    ],
)
def test_a_signature_has_the_keywords_with_their_types(name: str, options: type) -> None:
    signature = inspect.signature(getattr(featx, name))
    own = ["verbose"] if name in ("extract", "stats") else []
    assert list(signature.parameters) == [*own, *get_type_hints(options)]
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


def test_some_types() -> None:
    shown = str(inspect.signature(featx.extract))
    assert "batch_size: 'int | str'" in shown
    assert "layers: 'str | Sequence[str] | Mapping[str, Any]'" in shown
    assert shown.endswith("-> 'FeatureStore'")
    assert "store" not in inspect.signature(featx.extract).parameters
    assert "model" not in inspect.signature(featx.export_store).parameters


def test_an_unknown_keyword_is_still_one_clear_message() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'layer'\..* layers"):
        featx.extract(layer=["layer4"])  # type: ignore[call-arg]
