"""Options are checked by their types; some have an effect with another option only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Le

from featx.config import Count, OneOrMore, OnlyWith, Positive, options
from featx.config.checks import in_words
from featx.errors import ConfigError


@options("fit")
class Options:
    method: OneOrMore[Literal["mean", "knn", "vote"]] = "mean"
    masks: str | None = None
    k: Annotated[Count | None, OnlyWith("method", "knn", "vote")] = None
    ignore: Annotated[int | None, OnlyWith("masks")] = 255
    rows: Literal["auto"] | Annotated[int, Ge(1), Le(9)] = "auto"
    sizes: list[Count] | None = None
    share: Annotated[Positive | None, "a share, or null"] = None


@pytest.mark.parametrize(
    "make",
    [
        lambda: Options(),
        lambda: Options(method="knn", k=3),
        lambda: Options(method=["mean", "vote"], k=3),
        lambda: Options(masks="folder", ignore=0),
        lambda: Options(ignore=255),
        lambda: Options(rows=9, sizes=[1, 2], share=1),
    ],
)
def test_options_that_have_an_effect(make: Callable[[], Options]) -> None:
    make()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"k": 3}, r"^fit\.k has an effect with fit\.method=knn or vote only\.$"),
        ({"method": ["mean"], "k": 3}, "knn or vote only"),
        ({"ignore": None}, r"^fit\.ignore has an effect with fit\.masks only\.$"),
        ({"masks": ""}, r"^fit\.masks is empty: give a value, or leave fit\.masks out\.$"),
        ({"method": "kn"}, r"^fit\.method=kn: expected some of mean, knn, vote\. Nearest: knn\.$"),
        ({"method": ["knn", "voto"]}, r"expected some of mean, knn, vote\. Nearest: vote\.$"),
        ({"method": ["knn", "knn"]}, "a value is repeated"),
        ({"method": []}, "is empty: expected"),
        ({"rows": 0}, r"^fit\.rows=0: expected auto, or a whole number from 1 to 9\.$"),
        ({"rows": True}, r"^fit\.rows=true: expected auto, or a whole number from 1 to 9\.$"),
        ({"sizes": [1, 0]}, "expected a list of whole numbers of at least 1, or null"),
        ({"sizes": "1"}, r"^fit\.sizes=1: expected a list"),
        ({"share": 0}, r"^fit\.share=0: expected a share, or null\.$"),
    ],
)
def test_wrong_values_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Options(**given)


def test_a_subclass_checks_the_options_of_its_base() -> None:
    @options("fit")
    class More(Options):
        depth: Count = 1

    assert More(depth=2).rows == "auto"
    for given in ({"depth": 0}, {"rows": 0}, {"k": 3}):
        with pytest.raises(ConfigError, match=rf"fit\.{next(iter(given))}"):
            More(**given)


def test_types_in_words() -> None:
    assert in_words(int | None) == "a whole number, or null"
    assert (
        in_words(str | list[str] | dict[str, Any])
        == "a text, or a list of texts, or a mapping, such as {depth: 20}"
    )
    assert in_words(Literal["a", "b", "c"]) == "a, b or c"
    assert in_words(Positive) == "a number above 0"
