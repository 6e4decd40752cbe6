"""The store of the run that a test module makes, for the modules that name this plugin."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import slow_except
from made_store import MadeRun


@pytest.fixture(scope="module", params=slow_except(["parts", "packed"], "packed"))
def root(
    request: pytest.FixtureRequest, run: MadeRun, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Folder of the module's fixture `run`, as parts and as one file."""
    return run.write(tmp_path_factory.mktemp("store"), packed=request.param == "packed")
