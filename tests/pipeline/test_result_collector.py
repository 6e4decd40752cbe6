"""Figures of a run that was spread: the speed counts what was computed while the clock ran."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from featx.config import Config
from featx.pipeline.executors import result_collector as module
from featx.pipeline.executors.job_folder import WorkerError, WorkerReport, WorkerStats
from featx.pipeline.executors.result_collector import ResultCollector

SPEC: Any = SimpleNamespace(fingerprint={"device": "cpu"}, config=Config(), cpus=2, num_workers=2)


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
        for _ in range(parts):
            found.add_rows(100, before)
    return found.outcome(SPEC).metrics.images_per_second


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
    found.add_rows(100, False)
    stats = WorkerStats({"read": 1.0, "model": 5.0}, 1000, 20)
    found.add_report(WorkerReport(underflow_rows={"flat": 2}, worker_stats=stats))
    outcome = found.outcome(SPEC)
    assert outcome.underflow_rows == {"flat": 2}
    figures = outcome.metrics
    assert (figures.bottleneck is not None) == is_complete
    output = figures.as_dict()
    expected = {"read": 1.0, "decode": 0.0, "wait": 0.0, "model": 5.0, "copy": 0.0, "write": 0.0}
    assert output["seconds"] == (expected if is_complete else dict.fromkeys(expected))
    assert output["bytes_read"] == (1000 if is_complete else None)


def test_a_report_is_the_same_after_its_way_through_a_file(tmp_path: Path) -> None:
    error = WorkerError("ValueError", "a bug", "Traceback", "part 3 (rows 12 to 15)")
    stats = WorkerStats({"model": 1.5}, 10, 20, {"truncated": 2})
    for report in (
        WorkerReport(),
        WorkerReport(3, {"flat": 1}, stats, "SIGTERM", "ready after 1 s", error),
    ):
        (tmp_path / "report.json").write_text(report.to_json())
        assert WorkerReport.read(tmp_path / "report.json") == report
    assert WorkerReport.read(tmp_path / "none.json") is None
