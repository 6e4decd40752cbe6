"""job=models as one types it: what it prints, as text and as JSON."""

from __future__ import annotations

from typing import Any

import pytest
import timm
from tiny_model import job_result, run_job

from featx.base import WIDTH
from featx.errors import ConfigError
from featx.models import RECOMMENDED
from featx.models.transformers.families import FAMILIES


def result(**asked: Any) -> Any:
    """The result as JSON."""
    return job_result("models", models=asked)


def text(capsys: pytest.CaptureFixture[str], show: str | None = None, **asked: Any) -> str:
    """The result as text."""
    assert run_job("models", models=asked, show=show) == 0
    return capsys.readouterr().out


def test_without_a_query_it_recommends(capsys: pytest.CaptureFixture[str]) -> None:
    found = result()
    assert [entry["model"] for entry in found["recommended"]] == list(RECOMMENDED)
    assert {"packaged", "torchvision", "timm", "open_clip", "transformers"} <= set(
        found["libraries"]
    )
    assert found["libraries"]["timm"].startswith(f"{len(timm.list_models())} architectures, ")
    shown = text(capsys)
    assert "python -m featx job=models models.query=dino" in shown
    assert all(option in shown for option in RECOMMENDED)


def test_a_query_lists_matches_with_their_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(query="dinov2 small lvd142m")["models"]
    assert found[0] == {
        "model": "vit_small_patch14_dinov2.lvd142m",
        "library": "timm",
        "name": "vit_small_patch14_dinov2",
        "weights": "lvd142m",
        "width": 384,
        "input_size": [518, 518],
        "parameters": 22056192,
        "licence": "apache-2.0",
        "bytes_on_disk": None,
    }
    lines = text(capsys, query="dinov2 small lvd142m").splitlines()
    assert lines[0] == f"{len(found)} models match 'dinov2 small lvd142m'"
    (line,) = [line for line in lines if line.startswith("vit_small_patch14_dinov2.lvd142m ")]
    assert line.split() == [
        *("vit_small_patch14_dinov2.lvd142m", "timm", "384", "518", "22.1", "M", "no"),
        "apache-2.0",
    ]


def test_the_limit_is_said_and_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    count = len(result(query="vit")["models"])
    lines = text(capsys, query="vit").splitlines()
    assert count > 300
    assert lines[0] == f"{count} models match 'vit'; the first 20 of them, all with job.show=all"
    table = lines[2 : lines.index("", 2)]
    rows = [line for line in table if len(line.split()) > 3]  # long names take a second line
    assert len(rows) == 21, "a header and 20 models"
    assert text(capsys, "all", query="vit").startswith(f"{count} models match 'vit'\n")


def test_a_name_of_another_program_leads_to_the_right_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = result(query="facebook/dinov2-base")
    assert "model=transformers model.name=facebook/dinov2-base" in found["hint"]
    assert [e["model"] for e in found["models"]] == ["vit_base_patch14_dinov2.lvd142m"]
    shown = " ".join(text(capsys, query="facebook/dinov2-base").split())
    assert "model=transformers model.name=facebook/dinov2-base" in shown


def test_families_of_transformers_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    """Their models are in folders, so that there is no line for each of them."""
    assert result(query="siglip")["families"] == ["siglip", "siglip_vision_model"]
    shown = " ".join(text(capsys, query="siglip").split())
    assert "families siglip, siglip_vision_model: model=transformers model.name=FOLDER" in shown
    assert text(capsys, query="MLCD").startswith("No listed model matches 'MLCD'.\n\n")
    assert result(query="transformers")["families"] == sorted(FAMILIES)
    assert result(query="siglip 384")["families"] == []


def test_no_match_lists_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert result(query="resnettt50")["models"] == []
    assert text(capsys, query="resnettt50").startswith("No model matches 'resnettt50'. Nearest: ")
    assert "No model with weights on this machine matches" in text(capsys, "local", query="eva02_x")


@pytest.mark.parametrize("query", ["vit", "laion", "facebook/dinov2-base"])
def test_lines_fit_a_terminal(query: str, capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (text(capsys), text(capsys, "all", query=query)):
        assert max(map(len, shown.splitlines())) <= WIDTH


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"query": " "}, r"models\.query is empty"),
        ({"limit": 5}, r"models\.limit is gone: job\.show=all .* that models\.query finds"),
    ],
)
def test_bad_options_are_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_job("models", models=asked)
