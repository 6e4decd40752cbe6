"""profile=true: a trace of all threads that Perfetto and Chrome can open."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_model import KEYS, extract, run_job

from featx.errors import ConfigError

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def spans(path: Path) -> dict[str, list[dict[str, Any]]]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    found: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("ph") == "X":
            found.setdefault(event["name"], []).append(event)
    return found


@pytest.mark.slow
def test_the_stages_of_a_run_in_their_threads(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = extract(photos, profile=True, batch_size=1, part_rows=4)
    found = spans(Path("store/trace.json.gz"))
    assert len(found["batch"]) == 8
    assert {"wait for images", "commit a part", "aten::conv2d"} <= set(found)
    threads = {name: {event["tid"] for event in found[name]} for name in ("batch", "commit a part")}
    assert len(threads["batch"]) == 1
    assert not threads["batch"] & threads["commit a part"]
    assert "trace.json.gz opens in https://ui.perfetto.dev" in capsys.readouterr().err
    plain = extract(photos, out="plain", batch_size=1, part_rows=4)
    assert (store["conv"][:] == plain["conv"][:]).all()
    assert not Path("plain/trace.json.gz").exists()


def test_a_run_that_is_too_short_says_so(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extract(photos, profile=True, batch_size=16, part_rows=16)
    assert "no trace was written" in capsys.readouterr().err
    assert not Path("store/trace.json.gz").exists()


def test_statistics_too(photos: Path) -> None:
    assert run_job("stats", **{**KEYS, "data": str(photos), "profile": True}) == 0
    assert spans(Path("store/trace.json.gz"))["batch"]


def test_it_belongs_to_jobs_that_run() -> None:
    with pytest.raises(ConfigError, match="profile has an effect with job=attribute, job=extract"):
        run_job("layers", profile=True)
