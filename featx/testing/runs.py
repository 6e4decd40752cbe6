"""Contracts of executors and of jobs, which are tried by runs of `tiny_extraction`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import featx
from featx.testing.tiny_extraction import BROKEN, MODEL_ARGUMENTS, NUM_IMAGES, extract, write_images
from featx.types import Status


class ExecutorContract:
    """Tests of an executor, with a run of three parts; a subclass overrides `executor`."""

    @pytest.fixture(scope="class")
    @classmethod
    def executor(cls) -> Mapping[str, object]:
        """Option group `executor`, such as {'name': 'local', 'workers': 2}."""
        raise NotImplementedError("override the fixture `executor`: it returns its options")

    @pytest.fixture(scope="class")
    @classmethod
    def images(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Folder of images, one of which is broken."""
        return write_images(tmp_path_factory.mktemp("images"))

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, images: Path, tmp_path_factory: pytest.TempPathFactory) -> featx.FeatureStore:
        """Store that one process has written."""
        return extract(images, tmp_path_factory.mktemp("expected") / "store")

    @pytest.fixture(scope="class")
    @classmethod
    def store(
        cls, executor: Mapping[str, Any], images: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> featx.FeatureStore:
        """Store that the executor has written; parts 1 and 2 were computed in a second run."""
        out = tmp_path_factory.mktemp("computed") / "store"
        first = {"name": "folder", "root": str(images), "limit": 2}
        extract(images, out, executor=dict(executor), data=first)
        return extract(images, out, executor=dict(executor), grow=True)

    def test_the_rows_are_those_of_one_process(
        self, store: featx.FeatureStore, expected: featx.FeatureStore
    ) -> None:
        """Bit for bit, whoever computed them."""
        assert store.complete
        assert store.layers == expected.layers
        assert store.keys.tolist() == expected.keys.tolist()
        assert store.labels.tolist() == expected.labels.tolist()
        for layer in expected.layers:
            assert store[layer][:].tobytes() == expected[layer][:].tobytes()

    def test_failures_are_recorded_once(
        self, store: featx.FeatureStore, expected: featx.FeatureStore
    ) -> None:
        assert store.status.tolist() == expected.status.tolist()
        assert store.failures == expected.failures
        assert (store.status != Status.OK).sum() == 1
        assert store.keys[store.status != Status.OK].tolist() == [BROKEN]

    def test_nothing_is_left_behind(self, store: featx.FeatureStore) -> None:
        """Neither temporary files nor heartbeats of workers."""
        assert len(store) == NUM_IMAGES
        assert not list(Path(store.root).rglob("*.tmp*"))
        assert not list(Path(store.root).glob("workers/*"))


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
