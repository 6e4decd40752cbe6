"""How often Hydra composes the config of a command, and who decides between a run and a sweep."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from featx.cli import read_command_line


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["model=resnet18", "-m"], False),
        (["hydra.mode=MULTIRUN"], True),
        (["+hydra.job.name=a"], True),
        (["experiment=exact"], True),
        (["--config-dir", "."], True),
        (["--config-name", "mine"], True),
        (["-cn", "mine"], True),
    ],
)
def test_who_may_set_the_mode(line: list[str], expected: bool) -> None:
    assert read_command_line(line).may_set_mode is expected


COUNTING = """
import json, sys
from hydra._internal.hydra import Hydra
from featx.__main__ import run_command

modes = []
compose = Hydra.compose_config

def counted(self, *args, **kwargs):
    config = compose(self, *args, **kwargs)
    modes.append(str(config.hydra.mode))
    return config

Hydra.compose_config, read_mode = counted, Hydra.get_mode
code = run_command()
assert Hydra.get_mode is read_mode
print(json.dumps([code, modes]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "modes"),
    [
        (["job=status", "store=nope"], ["RunMode.RUN"]),
        (["-m", "job=status", "store=nope,neither"], ["RunMode.MULTIRUN"]),
        pytest.param(
            ["job=status", "store=nope", "hydra.mode=MULTIRUN"],
            ["RunMode.MULTIRUN"] * 2,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--config-dir", ".", "job=status", "store=nope"],
            ["None", "RunMode.RUN"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_config_is_composed_once_if_nothing_sets_the_mode(
    tmp_path: Path, line: list[str], modes: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNTING, *line],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    code, found = json.loads(done.stdout.splitlines()[-1])
    assert code == 2, "there is no store"
    # A sweep composes the config of each of its runs as well.
    assert found[: len(modes)] == modes
    assert len(found) == len(modes) or "RunMode.MULTIRUN" in modes
