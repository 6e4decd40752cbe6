"""docs/architecture.md: what it names is there, and its examples run as they stand."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import h5py
import numpy as np
import pytest

import featx
from featx.base.families import family

REPOSITORY = Path(__file__).resolve().parent.parent
TEXT = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^### An? ([^\n]+)\n(.*?)(?=^##|\Z)", TEXT, re.M | re.S))
"""Kind -> the section that adds one of it."""


def names_in(path: Path) -> set[str]:
    """Functions, classes, methods and constants of a module: 'decode', 'Engine.run'."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (one for one in node.body if isinstance(one, ast.FunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def test_every_module_and_name_it_mentions_is_there() -> None:
    """`store/pack.py` is a file of featx, `store/pack.py:pack` has this name."""
    prose = re.sub(r"^```.*?^```", "", TEXT, flags=re.M | re.S)
    mentioned = re.findall(r"`([\w/]+\.(?:py|yaml))(?::([\w.]+))?`", prose)
    assert len(mentioned) > 60, "the pattern finds them"
    for path, name in mentioned:
        whole = REPOSITORY / path if (REPOSITORY / path).exists() else REPOSITORY / "featx" / path
        assert whole.is_file(), f"{path} is not there any more"
        assert not name or name in names_in(whole), f"{path} has no {name} any more"


def test_every_package_has_its_line() -> None:
    packages = {path.parent.name for path in (REPOSITORY / "featx").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)` \|", TEXT, re.M)) >= packages


def test_the_import_contract_lists_every_member() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    independent = [c["modules"] for c in contracts if c["type"] == "independence"]
    for option, package in (
        ("data", "featx.sources"),
        ("executor", "featx.pipeline.executors"),
        ("export.format", "featx.export"),
        ("model.library", "featx.models.libraries"),
    ):
        expected = {f"{package}.{member.name}" for member in family(option)}
        assert expected in [set(modules) for modules in independent]


def added_to(table: str, entry: str, source: str) -> str:
    """The source with one more entry at the front of a tuple, a list or a dictionary."""
    pattern = rf"(^{re.escape(table)}\b[^=\n]*= [(\[{{])"
    changed, count = re.subn(pattern, lambda found: f"{found[1]}\n    {entry}", source, flags=re.M)
    assert count == 1, f"{table} is not a tuple, list or dictionary of the module"
    return changed


def at_the_top_of(function: str, lines: str, source: str) -> str:
    """The source with more lines behind the docstring of a function."""
    node = next(
        node for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    )  # fmt: skip
    end = node.body[0].end_lineno
    old = source.split("\n")
    return "\n".join([*old[:end], *lines.rstrip().split("\n"), *old[end:]])


def make(section: str, copy: Path) -> list[str]:
    """Add the member of a section to a copy of the code; returns the commands that try it."""
    commands = []
    for kind, block in re.findall(r"^```(python|yaml|sh)\n(.*?)^```", section, re.M | re.S):
        if kind == "sh":
            commands += block.splitlines()
            continue
        head, body = block.split("\n", 1)
        path, _, function = head.removeprefix("# ").partition(", at the top of ")
        if path.endswith(", at the end"):
            path = path.removesuffix(", at the end")
            body = (copy / path).read_text(encoding="utf-8") + body
        elif function:
            body = at_the_top_of(function, body, (copy / path).read_text(encoding="utf-8"))
        else:
            assert not (copy / path).exists(), f"{path} is there already: choose another example"
        (copy / path).write_text(body, encoding="utf-8")
    rows = re.findall(r"^\| `(\w+/[\w./]+)` \| `(\w+)` \| `(.+)` \|$", section, re.M)
    for path, table, entry in rows:
        source = (copy / path).read_text(encoding="utf-8")
        (copy / path).write_text(added_to(table, entry, source), encoding="utf-8")
    assert commands, "a section says how it was tried"
    return commands


def test_one_of_each_kind_is_shown() -> None:
    assert set(EXAMPLES) == {
        "source", "model library", "reduction", "codec", "executor", "export format", "job"
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXAMPLES)
def test_an_example_runs_as_it_stands(kind: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for folder in ("featx", "conf", "data"):
        shutil.copytree(
            REPOSITORY / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    commands = make(EXAMPLES[kind], copy)
    pixels = np.random.default_rng(0).integers(0, 256, (5, 40, 50, 3), np.uint8)
    np.save(tmp_path / "images.npy", pixels)
    printed = ""
    for line in commands:
        done = subprocess.run(
            [sys.executable, *shlex.split(line)[1:]],
            cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(copy), "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        printed = done.stdout
    check_example(kind, tmp_path, printed)


def check_example(kind: str, folder: Path, printed: str) -> None:
    """The store holds what the example says.

    Args:
        printed: the last command's stdout.
    """
    store = featx.open(folder / "store")
    assert store.complete
    name = next(iter(store.layers))
    rows = store[name][:]
    assert np.isfinite(rows[store.ok]).all()
    if kind == "source":
        assert len(store) == store.ok.sum() == 5
    elif kind == "model library":
        assert rows.shape[1:] == (256,)
    elif kind == "reduction":
        assert rows.shape[1:] == (512,)
        assert (rows[store.ok] >= 0).all()
    elif kind == "codec":
        with h5py.File(folder / "store" / "features.h5") as file:
            assert file[f"features/{name}"].compression_opts == 9
    elif kind == "executor":
        seconds = json.loads((folder / "store" / "summary.json").read_text())["seconds"]
        assert seconds["model"] > 0
        assert len(store) > 8, "several parts, so both processes had some"
    elif kind == "export format":
        path = folder / "store" / "export-csv" / "features" / f"{name}.csv"
        found = np.loadtxt(path, delimiter=",", ndmin=2)
        np.testing.assert_array_equal(found.astype(rows.dtype), rows.reshape(len(rows), -1))
    elif kind == "job":
        assert len(printed.splitlines()) == len(store.failures)
