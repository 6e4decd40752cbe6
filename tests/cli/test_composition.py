"""How often Hydra composes the config of a command, and who decides between a run and a sweep."""

from __future__ import annotations

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
