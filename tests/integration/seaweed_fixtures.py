"""Fixture of a bucket on SeaweedFS, for the test modules that name this plugin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from seaweed import SeaweedServer, bucket_on_seaweed


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SeaweedServer]:
    """A server with s3://bucket; the environment leads to it."""
    with bucket_on_seaweed(tmp_path / "seaweed", monkeypatch) as running:
        yield running
