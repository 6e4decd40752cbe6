"""scripts/gpu_acceptance as a dry run on the CPU: every step runs and leaves its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, run_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def accept(tmp_path: Path, command: str, *options: str) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, lines of gpu.jsonl without the first, and what a dry run prints."""
    pytest.importorskip("sklearn", reason="the photographs come with scikit-learn")
    done = run_python(
        REPOSITORY / "scripts" / "gpu_acceptance",
        *(command, tmp_path / "out", "--dry-run", *options),
        path=[REPOSITORY],
        env={"FEATX_ACCEPTANCE_WORK": str(tmp_path / "work")},
        code=None,
        timeout=900,
    )
    text = (tmp_path / "out" / "gpu.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines[0]["step"] == "machine"
    assert lines[0]["figures"]["torch"]
    return done.returncode, lines[1:], done.stdout


@pytest.mark.parametrize("command", ["correctness", "model", "end-to-end"])
def test_every_step_runs(tmp_path: Path, command: str) -> None:
    code, lines, printed = accept(tmp_path, command, "--minutes", "14")
    assert {line["step"]: (line["state"], line.get("error")) for line in lines} == {
        line["step"]: ("done", None) for line in lines
    }
    assert code == 0
    assert len(lines) >= 3
    for line in lines:
        assert f"{line['step']}: done in" in printed
        assert line["figures"]["rows"]
        assert not line["figures"].get("wrong")
    assert not list((tmp_path / "out").glob("*.json")), "only gpu.jsonl and logs are left"


def test_a_step_that_fails_or_has_no_time_leaves_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "odd").write_text("no folder")
    code, lines, printed = accept(tmp_path, "correctness", "--only", "odd-files", "low-memory")
    assert code == 1
    assert [line["state"] for line in lines] == ["failed", "done"]
    assert "odd-files: failed" in printed
    code, lines, printed = accept(tmp_path / "second", "model", "--minutes", "0.1")
    assert code == 1
    assert {line["state"] for line in lines} == {"not run"}
    assert "no time was left" in printed
