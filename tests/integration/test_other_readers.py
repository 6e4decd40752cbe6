"""Stores read by other programs: the table of docs/reading.md says what they do."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import REPOSITORY

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]


def test_the_table_says_what_other_programs_read() -> None:
    command = [sys.executable, str(REPOSITORY / "scripts" / "readers_table"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    checked = int(done.stdout.rsplit("programs were checked", 1)[0].split()[-1])
    if not checked:
        pytest.skip("no program that the table names is installed; scripts/readers_table says how")
    assert done.returncode == 0, done.stderr
