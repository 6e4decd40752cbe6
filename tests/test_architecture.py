"""docs/architecture.md names what is there, and the examples of docs/adding.md run as written."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import shutil
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import grimp
import h5py
import numpy as np
import pytest
from conftest import REPOSITORY, run_python

import featx
from featx.base import family, family_options

TEXT = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
ADDING = (REPOSITORY / "docs" / "adding.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^## An? ([^\n]+)\n(.*?)(?=^##|\Z)", ADDING, re.M | re.S))
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
    prose = re.sub(r"^```.*?^```", "", TEXT + ADDING, flags=re.M | re.S)
    mentioned = re.findall(r"`([\w/]+\.(?:py|yaml))(?::([\w.]+))?`", prose)
    assert len(mentioned) > 60, "the pattern finds them"
    for path, name in mentioned:
        whole = REPOSITORY / path if (REPOSITORY / path).exists() else REPOSITORY / "featx" / path
        assert whole.is_file(), f"{path} is not there any more"
        assert not name or name in names_in(whole), f"{path} has no {name} any more"


def test_every_package_has_its_line() -> None:
    packages = {path.parent.name for path in (REPOSITORY / "featx").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)` \|", TEXT, re.M)) >= packages


def test_a_package_stands_on_what_it_imports() -> None:
    """The imports that no others imply."""
    graph = grimp.build_graph("featx", cache_dir=None)
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| *([\w, ]*?) *\|$", TEXT, re.M))
    for package in rows:
        graph.squash_module(f"featx.{package}")
    imported = {
        package: {
            module.removeprefix("featx.")
            for module in graph.find_modules_directly_imported_by(f"featx.{package}")
        }
        & rows.keys() - {package}
        for package in rows
    }

    def below(package: str) -> set[str]:
        return imported[package].union(*map(below, imported[package]))

    for package, text in rows.items():
        implied = {low for high in imported[package] for low in below(high)}
        assert set(filter(None, text.split(", "))) == imported[package] - implied, package


def contract(packages: list[str]) -> Any:
    """The contract "Members of a family never import each other" of pyproject.toml."""
    spec = importlib.util.spec_from_file_location(
        "family_contract", REPOSITORY / "scripts" / "family_contract.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FamilyContract("members", {}, {"packages": packages})


def test_the_import_contract_has_every_family() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    (packages,) = [each["packages"] for each in contracts if each["type"] == "family"]
    homes = {"featx.jobs", *(family(option).package for option in family_options())}
    assert set(packages) == homes - {"featx.store.codecs", "featx.layers.reductions"}, (
        "one module each"
    )


def test_no_modules_import_each_other_even_for_types() -> None:
    graph = grimp.build_graph("featx", cache_dir=None)
    sorter = TopologicalSorter(
        {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    )
    sorter.prepare()  # raises CycleError, which names the modules


def test_an_import_between_members_breaks_the_contract() -> None:
    graph = grimp.build_graph("featx", exclude_type_checking_imports=True, cache_dir=None)
    checked = contract(["featx.sources"])
    assert checked.check(graph, verbose=False).kept
    graph.add_import(importer="featx.sources.hdf5", imported="featx.sources.pixel_encoding")
    assert checked.check(graph, verbose=False).kept
    graph.add_import(importer="featx.sources.pixel_encoding", imported="featx.sources.video")
    broken = checked.check(graph, verbose=False)
    assert not broken.kept
    chain = "featx.sources.hdf5 -> featx.sources.pixel_encoding -> featx.sources.video"
    assert chain in broken.metadata["imports"]
    with pytest.raises(ValueError, match="has 0 members"):
        contract(["featx.base"]).check(graph, verbose=False)


def make(section: str, copy: Path) -> list[str]:
    """Add the member of a section to a copy of the code; returns the commands that try it."""
    commands = []
    for kind, block in re.findall(r"^```(python|yaml|sh)\n(.*?)^```", section, re.M | re.S):
        if kind == "sh":
            commands += block.splitlines()
            continue
        head, body = block.split("\n", 1)
        path = head.removeprefix("# ")
        if path.endswith(", at the end"):
            path = path.removesuffix(", at the end")
            body = (copy / path).read_text(encoding="utf-8") + body
        else:
            assert not (copy / path).exists(), f"{path} is there already: choose another example"
        (copy / path).write_text(body, encoding="utf-8")
    assert commands, "a section says how it was tried"
    return commands


def test_one_of_each_kind_is_shown() -> None:
    others = {"source, model library or export format"}
    assert set(EXAMPLES) - others == {"reduction", "codec", "executor", "job"}


@pytest.mark.slow
def test_the_examples_of_plug_ins_are_members_with_two_more_lines(tmp_path: Path) -> None:
    copy = copy_of_the_code(tmp_path)
    section = EXAMPLES["source, model library or export format"]
    rows = re.findall(r"^\| (\w+) \| `([\w/]+)` \| `([^`]+)`, `([^`]+)` \|", section, re.M)
    assert len(rows) == 3
    for name, path, *lines in rows:
        example = REPOSITORY / "tests" / "example_plugin" / "featx_example" / f"{name}.py"
        text = example.read_text(encoding="utf-8")
        (copy / path / f"{name}.py").write_text("\n".join([text, *lines, ""]), encoding="utf-8")
    run_in(copy, "featx data=stripes model=patches 'layers=[0]' reduce=avg out=store", tmp_path)
    run_in(copy, "featx job=export store=store export.format=keys out=keys", tmp_path)
    store = featx.open(tmp_path / "store")
    assert len(store) == store.ok.sum() == 8
    assert (tmp_path / "keys" / "keys.txt").read_bytes().split() == [
        b"%04d" % width for width in range(1, 9)
    ]


def copy_of_the_code(folder: Path) -> Path:
    """Copy what a command needs, and return where it is."""
    copy = folder / "copy"
    for name in ("featx", "conf", "data"):
        shutil.copytree(REPOSITORY / name, copy / name)  # with what is compiled already
    return copy


def run_in(copy: Path, line: str, folder: Path) -> str:
    """Run `python -m LINE` with a copy of the code; returns stdout."""
    env = {"PYTHONPATH": str(copy), "HF_HUB_OFFLINE": "1"}
    return run_python("-m", *shlex.split(line), env=env, cwd=folder).stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reduction", "codec", "executor", "job"])
def test_an_example_runs_as_it_stands(kind: str, tmp_path: Path) -> None:
    copy = copy_of_the_code(tmp_path)
    commands = make(EXAMPLES[kind], copy)
    printed = [run_in(copy, line.removeprefix("python -m "), tmp_path) for line in commands]
    check_example(kind, tmp_path, printed[-1])


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
    if kind == "reduction":
        assert rows.shape[1:] == (512,)
        assert (rows[store.ok] >= 0).all()
    elif kind == "codec":
        with h5py.File(folder / "store" / "features.h5") as file:
            assert file[f"features/{name}"].compression_opts == 9
    elif kind == "executor":
        seconds = json.loads((folder / "store" / "summary.json").read_text())["seconds"]
        assert seconds["model"] > 0
        assert len(store) > 8, "several parts, so both processes had some"
    elif kind == "job":
        assert len(printed.splitlines()) == len(store.failures)
