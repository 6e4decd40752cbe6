"""The keywords of the Python functions: typed, shown, and those that the job reads."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import get_type_hints

import pytest

import featx
from featx.config import Config
from featx.errors import ConfigError
from featx.jobs import keywords


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("extract", keywords.ExtractOptions),
        ("stats", keywords.StatsOptions),
        ("export_store", keywords.ExportOptions),
        ("write_report", keywords.ReportOptions),
        ("probe", keywords.ProbeOptions),
    ],
)
def test_a_signature_has_the_keywords_with_their_types(name: str, options: type) -> None:
    signature = inspect.signature(getattr(featx, name))
    own = ["data", "verbose"] if name in ("extract", "stats") else ["store"]
    hints = get_type_hints(options)
    assert "data_limit" in hints or name not in ("extract", "stats")
    keywords = [each for each in hints if each not in own and hasattr(Config(), each)]
    assert list(signature.parameters) == [*own, *keywords]
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    assert set(kinds[1:]) == {inspect.Parameter.KEYWORD_ONLY}
    assert kinds[0] == inspect.Parameter.POSITIONAL_OR_KEYWORD


def test_some_types() -> None:
    signature = inspect.signature(featx.extract)
    types = {name: each.annotation for name, each in signature.parameters.items()}
    assert types["batch_size"] == "Literal['auto'] | int"
    assert types["layers"] == "str | Sequence[str] | Mapping[str, Any] | None"
    assert types["model"] == "ModelConfig | str | Callable[..., object] | Mapping[str, Any]"
    assert signature.return_annotation == "FeatureStore"
    assert "store" not in inspect.signature(featx.extract).parameters
    assert "model" not in inspect.signature(featx.export_store).parameters


@pytest.mark.parametrize("name", ["extract", "stats", "export_store", "write_report", "probe"])
def test_help_shows_the_defaults_and_describes_what_the_signature_has(name: str) -> None:
    function = getattr(featx, name)
    parameters = inspect.signature(function).parameters
    assert ... not in [each.default for each in parameters.values()]
    entries = function.__doc__.split("Args:")[1].split("Returns:")[0]
    described = re.findall(r"^ {8}(\w+):", entries, re.MULTILINE)
    assert described
    assert set(described) <= set(parameters)


def test_some_defaults() -> None:
    defaults = {
        name: each.default for name, each in inspect.signature(featx.extract).parameters.items()
    }
    assert defaults["precision"] == "auto"
    assert defaults["max_failures"] == 0.01
    assert defaults["layers"] is None
    assert (defaults["model"], defaults["reduce"]) == ("efficientnet_lite0", "none")
    assert defaults["conformance"] == {}


def test_an_unknown_keyword_is_still_one_clear_message() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'layer'\..* layers"):
        featx.extract(layer=["layer4"])  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: featx.open(5), "path is a int; expected a path"),
        (lambda: featx.open_stats(b"stats.h5"), "path is a bytes; expected a path"),
        (lambda: featx.embed(["a.jpg"], 5), "store is a int; expected a path"),
        (lambda: featx.predict(None, ["a.jpg"]), "head is a NoneType; expected a path"),
        (lambda: featx.similarity.search(5, "a cat"), "store is a int; expected a path"),
        (lambda: featx.similarity.search("store", 5), "text=5: expected a text, or a list"),
        (lambda: featx.similarity.compare_stores(5), "store is a int; expected a path"),
        (lambda: featx.write_report([5]), "store is a int; expected a path"),
        (lambda: featx.probe([]), "store is a list; expected a path"),
    ],
)
def test_a_wrong_type_is_one_sentence_that_names_the_argument(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
