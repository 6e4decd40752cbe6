"""Files around the code: the container, the workflow, the citation."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY, run_python

from featx import __version__


def test_the_container_copies_what_there_is_and_installs_known_extras() -> None:
    dockerfile = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
    copied = [line.split()[1:-1] for line in dockerfile.splitlines() if line.startswith("COPY ")]
    assert len(copied) >= 4
    for path in (path for paths in copied for path in paths):
        assert (REPOSITORY / path).exists(), path
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    extras = re.search(r"^ARG EXTRAS=(\S+)$", dockerfile, re.MULTILINE)
    assert extras is not None
    assert set(extras[1].split(",")) <= set(project["project"]["optional-dependencies"])
    ignored = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").split()
    assert not set(ignored) & {path for paths in copied for path in paths}


def test_the_workflow_calls_the_checks_that_developers_call() -> None:
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    assert ".ci/run" in steps
    assert any("python -m build" in step for step in steps)
    assert any("mkdocs build --strict" in step for step in steps)
    assert workflow["permissions"] == {"contents": "read"}


def test_issue_templates_ask_for_the_output_of_doctor() -> None:
    folder = REPOSITORY / ".github" / "ISSUE_TEMPLATE"
    templates = {
        path.stem: yaml.safe_load(path.read_text("utf-8")) for path in folder.glob("*.yml")
    }
    ids = [field["id"] for field in templates["bug_report"]["body"]]
    assert ids == ["command", "happened", "doctor", "store"]
    assert templates["feature_request"]["body"]


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == __version__
    assert citation["license"] == "Apache-2.0"
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(citation)


@pytest.mark.slow
def test_a_wheel_runs_alone(tmp_path: Path) -> None:
    """The main job, the probe and the report outside the repository, by the files of a wheel."""
    pip = ["-m", "pip", "--quiet", "--disable-pip-version-check"]
    run_python(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, REPOSITORY)
    [wheel] = tmp_path.glob("featx-*.whl")
    assert wheel.name.startswith(f"featx-{__version__}-")
    run_python(*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel)
    folder = tmp_path / "empty"
    folder.mkdir()

    def python(*arguments: str) -> str:
        return run_python(*arguments, env={"PYTHONPATH": str(tmp_path / "site")}, cwd=folder).stdout

    assert str(tmp_path / "site") in python("-c", "import featx; print(featx.__file__)")
    python("-m", "featx", "job=plan", "data=sample", "model=resnet18", "model.weights=null")
    python("-m", "featx", "data.sample=48", "layers=embedding", "precision=fp32", "compile=false")
    store = "store=runs/textiles/efficientnet_lite0"
    python("-m", "featx", "job=probe", store)
    python("-m", "featx", "job=report", store)
    made = {path.name for path in (folder / store.removeprefix("store=")).iterdir()}
    assert {"features.h5", "probe.json", "report.html"} <= made
