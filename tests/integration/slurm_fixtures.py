"""Fixtures of a Slurm cluster, for the test modules that name this plugin in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from slurm_cluster import SlurmCluster, running_cluster


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with running_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def cluster(
    shared_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlurmCluster]:
    """A cluster whose queue is empty; the environment leads to it."""
    shared_cluster.set_environment(monkeypatch)
    yield shared_cluster
    shared_cluster.clear()
