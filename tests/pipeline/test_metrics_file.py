"""log.metrics: the file that node_exporter reads, during a run, after it, and after an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tiny_model import KEYS, write_images

from featx import jobs
from featx.base import RunProgress
from featx.config import LogConfig, from_composed, from_keywords, saved_yaml
from featx.errors import ConfigError, StoreMismatchError
from featx.pipeline.run_metrics import INTERVAL_S, MetricsFile


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def values(path: Path) -> dict[str, float]:
    """Values of a file in Prometheus' text format, by name; every line must belong to it."""
    found = {}
    kinds = {}
    for line in path.read_text().splitlines():
        if match := re.fullmatch(r"# HELP (featx_\w+) \S.*\.", line):
            continue
        if match := re.fullmatch(r"# TYPE (featx_\w+) (gauge|counter)", line):
            kinds[match[1]] = match[2]
            continue
        match = re.fullmatch(r'(featx_\w+)\{store="((?:[^"\\\n]|\\[\\"n])*)"\} (\S+)', line)
        assert match, line
        assert match[1] in kinds, "the type stands before the value"
        found[match[1].removeprefix("featx_")] = float(match[3])
    return found


def test_the_file_is_written_every_ten_seconds_and_at_the_end(tmp_path: Path) -> None:
    path, clock = tmp_path / "featx.prom", Clock()
    file = MetricsFile(path, "runs/a", clock)
    file.begin()
    assert values(path) == {"run_active": 1}
    file.update(RunProgress(total=100, done=10, failures=1, images_per_second=5.0, waiting_s=0.5))
    assert values(path) == {
        "images": 100,
        "images_done": 10,
        "images_failed": 1,
        "images_per_second": 5,
        "remaining_seconds": 18,
        "image_wait_seconds_total": 0.5,
        "run_active": 1,
    }
    file.update(RunProgress(100, 20, 1, 5.0, 0.5))
    assert values(path)["images_done"] == 10
    clock.now += INTERVAL_S
    file.update(RunProgress(100, 30, 1, 5.0, 0.5))
    assert values(path)["images_done"] == 30
    file.update(RunProgress(100, 100, 1, 5.0, 0.5))
    file.end(rows=100)
    assert values(path)["images_done"] == 100
    assert values(path)["run_active"] == 0
    assert values(path)["run_succeeded"] == 1
    assert sorted(tmp_path.iterdir()) == [path], "no temporary file is left for node_exporter"


def test_labels_are_escaped_and_unknown_times_are_nan(tmp_path: Path) -> None:
    path = tmp_path / "featx.prom"
    file = MetricsFile(path, 'a "b"\\c\nd')
    file.update(RunProgress(total=100, done=10, failures=0, images_per_second=0.0, waiting_s=0.0))
    assert '{store="a \\"b\\"\\\\c\\nd"}' in path.read_text()
    assert str(values(path)["remaining_seconds"]) == "nan"


def test_a_name_that_node_exporter_does_not_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has to end in \.prom"):
        LogConfig(metrics="metrics.txt")
    with pytest.raises(ConfigError, match="there is no folder"):
        MetricsFile(tmp_path / "none" / "featx.prom", "store")


def test_a_disk_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    file = MetricsFile(folder / "featx.prom", "store")
    folder.rmdir()
    folder.write_text("a file")
    file.begin()
    file.end(rows=None)


@pytest.mark.usefixtures("in_tmp_path")
def test_a_run_records_its_end_also_when_nothing_is_left_or_it_fails(tmp_path: Path) -> None:
    photos = write_images(tmp_path / "photos", 9)

    def run(**keys: Any) -> dict[str, float]:
        node = from_keywords({**KEYS, "data": photos, **keys})
        node["log"]["metrics"] = "featx.prom"
        config = from_composed(node)
        jobs.check(config)
        jobs.run(config, saved_yaml(node))
        return values(tmp_path / "featx.prom")

    first = run()
    assert (first["images"], first["images_done"], first["images_failed"]) == (9, 9, 0)
    assert (first["run_active"], first["run_succeeded"]) == (0, 1)
    again = run()
    assert (again["images"], again["images_done"], again["run_succeeded"]) == (9, 9, 1)
    with pytest.raises(StoreMismatchError):
        run(precision="bf16")
    failed = values(tmp_path / "featx.prom")
    assert (failed["run_active"], failed["run_succeeded"]) == (0, 0)
