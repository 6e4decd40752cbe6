"""Shell completion as docs/experiments.md installs it, in real shells."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_tmp_path")]

PAGE = (REPOSITORY / "docs" / "experiments.md").read_text(encoding="utf-8")
INSTALL = 'eval "$(featx --shell-completion install=bash)"'

IN_BASH = """
COMP_LINE="$1"; COMP_POINT=${#COMP_LINE}; COMP_WORDS=($COMP_LINE); COMP_CWORD=1; COMPREPLY=()
hydra_bash_completion
echo "${COMPREPLY[@]}"
"""
"""What bash does when one presses the tab key after the line $1."""

IN_ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "$1; echo READ''Y"
told=""
while zpty -r shell line; do told+=$line; [[ $told == *READY* ]] && break; done
zpty -w -n shell "$2"$'\t'
told=""
for i in {1..600}; do
    while zpty -rt shell line; do told+=$line; done
    [[ $told == *$3* ]] && break
    zpty -w -n shell ''
    sleep 0.1
done
print -r -- $told
zpty -d shell
"""
"""Types the line $2 and a tab into an interactive zsh after $1, and waits for $3."""


@pytest.fixture
def shell_environment(tmp_path: Path) -> dict[str, str]:
    """An environment with the command `featx` of this checkout."""
    command = tmp_path / "bin" / "featx"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nfrom featx.__main__ import main\nmain()\n")
    command.chmod(0o755)
    path = os.pathsep.join([str(command.parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY), "TERM": "dumb"}


def output(*arguments: str, environment: dict[str, str]) -> str:
    if shutil.which(arguments[0]) is None:
        pytest.skip(f"{arguments[0]} is not installed")
    done = subprocess.run(
        arguments, env=environment, capture_output=True, text=True, check=True, timeout=280
    )
    return done.stdout


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("featx job=dup", {"job=duplicates"}),
        ("featx batch_s", {"batch_size="}),
        ("featx experiment=", {"experiment=exact", "experiment=my_run"}),
    ],
)
def test_bash(line: str, expected: set[str], shell_environment: dict[str, str]) -> None:
    assert INSTALL in PAGE
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/my_run.yaml").write_text("seed: 1\n")
    script = f"{INSTALL}\n{IN_BASH}"
    found = output("bash", "-c", script, "bash", line, environment=shell_environment)
    assert expected <= set(found.split())
    assert all(word.startswith(line.removeprefix("featx ")) for word in found.split())


def test_zsh(shell_environment: dict[str, str]) -> None:
    loaded = re.search("`(autoload [^`]* && compinit && bashcompinit)`", PAGE)
    assert loaded is not None
    # -u does not ask about folders that others can write to.
    install = f"{loaded[1].replace('&& compinit', '&& compinit -u -D')}; {INSTALL}"
    found = output(
        "zsh", "-f", "-c", IN_ZSH, "zsh", install, "featx job=dup", "job=duplicates",
        environment=shell_environment,
    )  # fmt: skip
    assert "featx job=duplicates" in found
