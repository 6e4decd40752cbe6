"""For all tests of the store: a failing disk is asked again without waiting."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featx.store.commit.RETRY_WAITS_S", ())
