"""Options that have an effect with another option only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from featx.config.checks import check_effects, only_with
from featx.errors import ConfigError


@dataclass
class Options:
    method: Any = "mean"
    masks: str | None = None
    k: int | None = field(default=None, metadata=only_with("method", "knn", "vote"))
    ignore: int | None = field(default=255, metadata=only_with("masks"))


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(method="knn", k=3),
        Options(method=["mean", "vote"], k=3),
        Options(masks="folder", ignore=0),
        Options(ignore=255),
    ],
)
def test_options_that_have_an_effect(options: Options) -> None:
    check_effects("fit", options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(k=3), r"^fit\.k has an effect with fit\.method=knn or vote only\.$"),
        (Options(method=["mean"], k=3), "knn or vote only"),
        (Options(ignore=None), r"^fit\.ignore has an effect with fit\.masks only\.$"),
        (Options(masks="", ignore=0), "masks only"),
    ],
)
def test_options_without_effect_are_refused(options: Options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_effects("fit", options)
