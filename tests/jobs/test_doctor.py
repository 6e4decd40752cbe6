"""job=doctor: every line is there, and what is missing or broken comes with advice."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

import pytest
from tiny_model import job_result, run_job

from featx.base import num_cpus

LINES = (
    *("featx", "python", "torch", "device", "threads", "memory", "disk", "decoders", "store"),
    *("weights", "extras"),
)


def doctor(device: str = "cpu") -> Any:
    """The result as JSON."""
    return job_result("doctor", device=device)


def test_every_line_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = doctor()
    assert tuple(found) == LINES
    assert all(finding["found"] for finding in found.values())
    assert found["device"]["found"].startswith("cpu: ")
    assert found["threads"] == {
        "name": "threads",
        "found": found["threads"]["found"],
        "advice": "",
    }
    assert found["threads"]["found"].startswith(f"{num_cpus()} of ")
    assert "GiB" in found["disk"]["found"]


def test_what_is_missing_or_broken_comes_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def without(package: str) -> str:
        if package in ("ray",):
            raise importlib.metadata.PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(importlib.metadata, "version", without)
    monkeypatch.setitem(sys.modules, "timm", None)  # its import fails
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    found = doctor()
    installed, missing = found["extras"]["found"].split("; not installed: ")
    assert {"ray"} <= set(missing.split(", "))
    assert "ray" not in installed
    assert found["torch"]["found"].startswith("ModuleNotFoundError")
    assert found["torch"]["advice"]
    assert "unset it" in found["threads"]["advice"]
    assert doctor("cuda:99")["device"]["advice"].startswith("device=cuda:99: torch finds")


def test_people_get_lines_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_job("doctor") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line[:1].isalpha()][: len(LINES)] == list(LINES)
    assert lines[-1] == "Nothing is missing." or lines[-1].endswith(" to look at")
