"""Figures of a run that was spread: the speed counts what was computed while the clock ran."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from featx.config import Config
from featx.pipeline.executors import worker_stats as module
from featx.pipeline.executors.worker_stats import PartResult, ResultCollector, WorkerStats
from featx.types import Part

SPEC: Any = SimpleNamespace(fingerprint={"device": "cpu"}, config=Config(), cpus=2)


def gathered(
    monkeypatch: pytest.MonkeyPatch, ready: float | None, looks: list[tuple[float, int, bool]]
) -> float | None:
    """Images per second of parts of 100 rows.

    Args:
        ready: when the first worker was; None where nobody says.
        looks: (when, parts that were found, whether they were there before the clock).
    """
    now = [10.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    found = ResultCollector(1000, created_at=10.0)
    if ready is not None:
        now[0] = ready
        found.start()
    for when, parts, before in looks:
        now[0] = when
        for index in range(parts):
            found.add(PartResult(Part(index, 0, 100), [], {}, 0.0, 0.0), before)
    return found.outcome(2, SPEC).metrics.images_per_second


@pytest.mark.parametrize(
    ("ready", "looks", "expected"),
    [
        (20.0, [(25.0, 1, False), (30.0, 1, False)], 20.0),
        # As with Slurm, where the driver sees parts and not their workers.
        (None, [(30.0, 2, True), (40.0, 1, False), (50.0, 1, False)], 10.0),
        (None, [(30.0, 4, True)], 20.0),  # since they were asked for: less than the speed
        (None, [], None),
    ],
)
def test_rows_count_that_were_computed_while_the_clock_ran(
    monkeypatch: pytest.MonkeyPatch,
    ready: float | None,
    looks: list[tuple[float, int, bool]],
    expected: float | None,
) -> None:
    assert gathered(monkeypatch, ready, looks) == expected


@pytest.mark.parametrize("is_complete", [True, False])
def test_what_limits_a_run_is_told_only_where_all_workers_told_their_seconds(
    monkeypatch: pytest.MonkeyPatch, is_complete: bool
) -> None:
    now = [10.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    found = ResultCollector(100, created_at=10.0, is_complete=is_complete)
    found.start()
    now[0] = 20.0
    found.add(PartResult(Part(0, 0, 100), [], {}, 0.0, 0.0))
    found.worker_stats.add(WorkerStats({"read": 1.0, "model": 5.0}, 1000, 20))
    figures = found.outcome(1, SPEC).metrics
    assert (figures.bottleneck is not None) == is_complete
    output = figures.as_dict()
    expected = {"read": 1.0, "decode": 0.0, "wait": 0.0, "model": 5.0, "copy": 0.0, "write": 0.0}
    assert output["seconds"] == (expected if is_complete else dict.fromkeys(expected))
    assert output["bytes_read"] == (1000 if is_complete else None)
