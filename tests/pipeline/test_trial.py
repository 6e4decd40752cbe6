"""A run compared with its trial: the predicted speed, and the stage that prevented it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_model import extract

from featx.pipeline import slowdown_facts
from featx.pipeline.run_context import num_trial_images
from featx.pipeline.trial import LEAST_SHARE, Shortfall, TrialSpeed

pytestmark = pytest.mark.usefixtures("packing_in_process")

IDLE = {"read": 0.0, "decode": 0.0, "wait": 0.0, "model": 0.0, "copy": 0.0, "write": 0.0}
TRIAL = TrialSpeed(read_s=0.001, decode_s=0.004, model_s=0.1, decoders=2, is_on_cpu=True)


@pytest.mark.parametrize(
    ("num_rows", "num_compared", "count"),
    [(1, 8, 8), (20, 8, 8), (20, 12, 12), (48, 8, 12), (64, 8, 16), (10**6, 8, 16), (20, 16, 16)],
)
def test_a_short_run_measures_on_fewer_images(num_rows: int, num_compared: int, count: int) -> None:
    assert num_trial_images(num_rows, num_compared) == count


@pytest.mark.parametrize(
    ("trial", "promised"),
    [
        (TRIAL, 1 / 0.102),  # two threads decode, and the model waits for their cores
        (TrialSpeed(0.001, 0.004, 0.1, 2, False), 10),
        (TrialSpeed(0.001, 0.019, 0.001, 2, False), 100),
        (TrialSpeed(0.5, 0.0, 0.01, 10, True), 20),  # a slow source, ten reads at a time
    ],
)
def test_what_the_slowest_stage_promises(trial: TrialSpeed, promised: float) -> None:
    assert trial.images_per_second == pytest.approx(promised)


@pytest.mark.parametrize(
    ("busy", "on_cpu", "cause"),
    [
        (
            {"model": 31.0, "read": 0.1, "decode": 0.4},
            True,
            "the model took 310 ms an image and 100 in its trial; do other programs use the CPUs?",
        ),
        ({"model": 31.0}, False, "the model took 310 ms an image and 100 in its trial; do other "),
        (
            {"model": 10.0, "wait": 21.0, "decode": 50.0, "read": 0.1},
            True,
            "the model waited 210 ms an image for decoding, which took 500 ms of a thread and 4 in",
        ),
        (
            {"model": 10.0, "wait": 21.0, "decode": 0.5, "read": 50.0},
            True,
            "the model waited 210 ms an image for reading, which took 500 ms of a thread and 1 in",
        ),
        ({"model": 10.0, "copy": 20.0}, False, "copying from the device took 200 ms an image, "),
        ({"model": 10.0, "write": 30.0}, True, "writing took 300 ms an image, and the trial has"),
        # Parts are committed while the next ones are computed.
        ({"model": 28.0, "write": 25.0}, True, "the model took 280 ms"),
        ({"model": 10.0, "statistics": 20.0}, True, "summing up took 200 ms an image"),
    ],
)
def test_the_stage_that_took_longer_than_in_the_trial(
    busy: dict[str, float], on_cpu: bool, cause: str
) -> None:
    trial = TrialSpeed(TRIAL.read_s, TRIAL.decode_s, TRIAL.model_s, TRIAL.decoders, on_cpu)
    found = trial.compare(IDLE | busy, num_rows=100, elapsed_s=31.0, num_batches=3)
    assert found.share == pytest.approx(100 / 31 / trial.images_per_second)
    assert found.cause is not None
    assert found.cause.startswith(cause)


@pytest.mark.parametrize(
    ("elapsed_s", "batches", "expected"),
    [(4.9, 9, Shortfall(None, None)), (60.0, 2.5, Shortfall(None, None))],
)
def test_a_short_run_is_not_compared(elapsed_s: float, batches: float, expected: Shortfall) -> None:
    assert TRIAL.compare(IDLE, 10, elapsed_s, batches) == expected


def test_a_run_that_keeps_its_promise_has_no_cause() -> None:
    found = TRIAL.compare(IDLE | {"model": 12.0}, 100, 12.0, 10)
    assert found.share is not None
    assert found.share > LEAST_SHARE
    assert found.cause is None


def test_the_lines_of_the_end_table() -> None:
    figures = {"trial_images_per_second": 8.4, "share_of_trial": 0.321, "below_trial": "why"}
    assert slowdown_facts(figures) == [
        (
            "slow",
            "0.32 of the 8.4 images/s that reading, decoding and model promised in the trial: why",
        )
    ]
    assert slowdown_facts(figures | {"share_of_trial": None, "below_trial": None}) == []


@pytest.mark.usefixtures("in_tmp_path")
def test_a_run_says_what_its_trial_promised(
    photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    extract(photos)
    summary = json.loads(Path("store/summary.json").read_text())
    assert summary["trial_images_per_second"] > 0
    assert summary["share_of_trial"] is None  # far too short
    assert "promised" not in capsys.readouterr().out
    extract(photos)  # nothing is left to do
    assert json.loads(Path("store/summary.json").read_text())["trial_images_per_second"] is None
    assert "promised" not in capsys.readouterr().out

    monkeypatch.setattr("featx.pipeline.trial._MIN_RUN_S", 0.0)
    monkeypatch.setattr("featx.pipeline.trial._MIN_BATCHES", 0)
    monkeypatch.setattr(TrialSpeed, "images_per_second", 1e9)
    extract(photos, out="slow")
    summary = json.loads(Path("slow/summary.json").read_text())
    assert summary["share_of_trial"] < LEAST_SHARE
    printed = " ".join(capsys.readouterr().out.split())
    assert f"promised in the trial: {summary['below_trial']}" in printed
