"""Contract of jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from featx.testing.tiny_extraction import MODEL_ARGUMENTS, extract, write_images


class JobContract:
    """Tests of a job, run as a command; a subclass overrides `overrides`.

    Attributes:
        name: value of the option `job`.
        exit_code: exit code of the run.
        prints_json: whether the job reads `job.json`.
        model: arguments that select the model of the features in `store`.
    """

    name: str
    exit_code = 0
    prints_json = True
    model = MODEL_ARGUMENTS

    @pytest.fixture
    def overrides(self, folder: Path) -> Sequence[str]:
        """Arguments of the command in addition to job=NAME."""
        raise NotImplementedError("override the fixture `overrides`: it returns the arguments")

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Folder in which the command runs: six images in `images`, their features in `store`."""
        folder = tmp_path_factory.mktemp("job")
        extract(write_images(folder / "images"), folder / "store")
        return folder

    def test_it_runs_and_prints_its_result(self, folder: Path, overrides: Sequence[str]) -> None:
        """With job.json=true, stdout is one JSON document; messages are on stderr."""
        as_json = ["job.json=true"] if self.prints_json else []
        done = self._run(folder, *overrides, *as_json)
        assert done.returncode == self.exit_code, done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout
        if self.prints_json:
            json.loads(done.stdout)

    def test_an_unknown_option_ends_with_code_2_and_one_message(
        self, folder: Path, overrides: Sequence[str]
    ) -> None:
        done = self._run(folder, *overrides, "nosuchoption=1")
        assert done.returncode == 2
        assert "nosuchoption" in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""

    def _run(self, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
        """Run the command in a folder."""
        return subprocess.run(
            [sys.executable, "-m", "featx", f"job={self.name}", *overrides],
            cwd=folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
