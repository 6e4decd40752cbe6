"""Contract of executors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import featx
from featx.testing.tiny_extraction import BROKEN, NUM_IMAGES, extract, write_images
from featx.types import Status


class ExecutorContract:
    """Tests of an executor, with a run of three parts; a subclass overrides `executor`."""

    @pytest.fixture(scope="class")
    @classmethod
    def executor(cls) -> Mapping[str, Any]:
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
