"""Every executor passes the contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from featx.testing import ExecutorContract


class TestInProcess(ExecutorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def executor(cls) -> Mapping[str, Any]:
        return {"name": "local", "workers": None}


@pytest.mark.slow
class TestLocal(ExecutorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def executor(cls) -> Mapping[str, Any]:
        return {"name": "local", "workers": 2}
