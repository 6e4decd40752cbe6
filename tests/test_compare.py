"""scripts/compare: checkouts that do the same are the same, and a planted difference is found."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from types import ModuleType

import h5py
import numpy as np
import pytest
from conftest import REPOSITORY, run_python


@pytest.fixture
def differences(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts")
    return importlib.import_module("comparison.differences")


def write_folder(folder: Path) -> Path:
    """What commands leave: a store with a failed row, results, and messages."""
    (folder / "store").mkdir(parents=True)
    (folder / "messages").mkdir()
    with h5py.File(folder / "store" / "features.h5", "w") as file:
        features = np.arange(12, dtype=np.float16).reshape(4, 3)
        features[2] = np.nan
        file["features/conv"] = features
        file["features/conv"].attrs["reduce"] = "none"
        file["key"] = np.array([b"a", b"b", b"c", b"d"])
        file.attrs["versions"] = json.dumps({"featx": "0.1.0"})
    results = {"accuracy": 0.5, "layers": [{"name": "conv"}], "seconds": {"fit": 0.25}}
    (folder / "store" / "probe.json").write_text(json.dumps(results))
    (folder / "store" / "predictions.csv").write_text("key,true\na,cat\nb,dog\n")
    (folder / "messages" / "01.out").write_text("Done: 4 rows, 1 failed, 1.5 KiB, 8.1 images/s\n")
    (folder / "messages" / "01.code").write_text("0")
    return folder


def change_row(folder: Path) -> None:
    with h5py.File(folder / "store" / "features.h5", "a") as file:
        file["features/conv"][1, 2] = 5.5


def change_bits_of_nan(folder: Path) -> None:
    with h5py.File(folder / "store" / "features.h5", "a") as file:
        file["features/conv"][2] = np.array([0x7E01] * 3, np.uint16).view(np.float16)


def change_dtype(folder: Path) -> None:
    with h5py.File(folder / "store" / "features.h5", "a") as file:
        values = file["features/conv"][:].astype(np.float32)
        del file["features/conv"]
        file["features/conv"] = values
        file["features/conv"].attrs["reduce"] = "none"


def change_attribute(folder: Path) -> None:
    with h5py.File(folder / "store" / "features.h5", "a") as file:
        file["features/conv"].attrs["reduce"] = "avg"


def add_dataset(folder: Path) -> None:
    with h5py.File(folder / "store" / "features.h5", "a") as file:
        file["status"] = np.zeros(4, np.uint8)


def replace(name: str, before: str, after: str, folder: Path) -> None:
    path = folder / name
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))


PLANTED = {
    "row": (change_row, "store/features.h5:features/conv: 1 of 12 differ by up to 0.5"),
    "nan": (change_bits_of_nan, "store/features.h5:features/conv: NaN or zero has other bits"),
    "dtype": (change_dtype, "('float16', (4, 3)) -> ('float32', (4, 3))"),
    "attribute": (change_attribute, "store/features.h5:features/conv@reduce: 'none' -> 'avg'"),
    "dataset": (add_dataset, "store/features.h5:status: only B has it"),
    "file": (lambda folder: (folder / "store" / "probe.json").unlink(), "only A has it"),
    "result": (
        lambda folder: replace("store/probe.json", "0.5", "0.75", folder),
        "store/probe.json:.accuracy: 0.5 -> 0.75",
    ),
    "cell": (
        lambda folder: replace("store/predictions.csv", "b,dog", "b,cat", folder),
        "store/predictions.csv:column true: 1 of 3 differ, the first at (2,): 'dog' -> 'cat'",
    ),
    "message": (
        lambda folder: replace("messages/01.out", "1 failed", "2 failed", folder),
        "01.out",
    ),
    "exit code": (lambda folder: replace("messages/01.code", "0", "3", folder), "01.code"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_found(differences: ModuleType, tmp_path: Path, name: str) -> None:
    first, second = write_folder(tmp_path / "A"), tmp_path / "B"
    shutil.copytree(first, second)
    change, expected = PLANTED[name]
    change(second)
    lines = differences.compare_folders(first, second)
    assert len(lines) == 1
    assert expected in lines[0]
    assert differences.compare_folders(first, second, ["*"]) == []


def test_times_rates_and_versions_are_no_difference(
    differences: ModuleType, tmp_path: Path
) -> None:
    first, second = write_folder(tmp_path / "A"), write_folder(tmp_path / "B")
    with h5py.File(second / "store" / "features.h5", "a") as file:
        file.attrs["versions"] = json.dumps({"featx": "0.2.0"})
    replace("store/probe.json", "0.25", "1.75", second)
    replace("messages/01.out", "8.1 images/s", "11.25 images/s", second)
    assert differences.compare_folders(first, second) == []


FAKE = """import sys, h5py
with h5py.File("features.h5", "w") as file:
    file["features/conv"] = [1.0, 2.0]
print("Done:", len(sys.argv), "arguments")
sys.exit(0)
"""
"""A package featx whose command takes a tenth of a second."""


def fake_checkout(folder: Path, before: str = "", after: str = "") -> Path:
    (folder / "featx").mkdir(parents=True)
    (folder / "featx" / "__init__.py").write_text("")
    (folder / "featx" / "__main__.py").write_text(FAKE.replace(before, after))
    return folder


def compare(*arguments: object, code: int) -> str:
    """What the script prints."""
    return run_python(REPOSITORY / "scripts" / "compare", *arguments, code=code, timeout=500).stdout


@pytest.mark.slow
def test_equal_checkouts_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    first, second = fake_checkout(tmp_path / "a"), fake_checkout(tmp_path / "b")
    printed = compare(first, second, "--only", "source-folder*", "--jobs", 2, code=0)
    assert "2 same, 0 differs, 0 not run" in printed
    assert not list(tmp_path.glob("featx-compare-*"))


CHANGED = {
    "value": (
        ("2.0", "2.5"),
        ["features.h5:features/conv: 1 of 2 differ by up to 0.5, the first at (1,): 2.0 -> 2.5"],
    ),
    "message": (("Done:", "Did"), ["messages/01.out:: 'Done: 14 arguments' -> 'Did 14 arguments'"]),
    "exit code": (
        ("exit(0)", "exit(3)"),
        ["B: messages/01: exit code 3, expected 0", "messages/01.code:: '0' -> '3'"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGED)
def test_a_checkout_that_does_something_else_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    change, expected = CHANGED[name]
    first, second = fake_checkout(tmp_path / "a"), fake_checkout(tmp_path / "b", *change)
    only, file = ("--only", "source-folder"), tmp_path / "found.json"
    assert "0 same, 1 differs" in compare(first, second, *only, "--json", file, code=1)
    assert json.loads(file.read_text())[0]["differences"] == expected


@pytest.mark.slow
def test_a_command_that_fails_in_both_checkouts_is_not_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    broken = fake_checkout(tmp_path / "a", "exit(0)", "exit(1)")
    printed = compare(broken, broken, "--only", "source-folder", code=1)
    assert "A: messages/01: exit code 1, expected 0" in printed


@pytest.mark.slow
def test_another_featx_than_that_of_the_checkout_is_refused(tmp_path: Path) -> None:
    script, env = REPOSITORY / "scripts" / "compare", {"PYTHONPATH": str(REPOSITORY)}
    done = run_python(script, tmp_path, tmp_path, env=env, code=1)
    assert f"does not import {tmp_path}/featx" in done.stderr


@pytest.mark.slow
def test_a_checkout_is_the_same_as_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    printed = compare(REPOSITORY, REPOSITORY, "--only", "source-bands", "kill", code=0)
    assert "2 same, 0 differs, 0 not run" in printed
