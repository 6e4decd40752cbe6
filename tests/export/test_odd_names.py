"""Control characters, other bytes and formulas in names: what CSV files and pages make of them."""

from __future__ import annotations

import csv
import os
import re
import shutil
from pathlib import Path

import pytest
from tiny_model import TRUSTED, extract, run_job, write_image

import featx
from featx.base import csv_cell

pytestmark = pytest.mark.usefixtures("in_tmp_path")

CLASSES = (b"=1+1", b"\x1b[31mred", b"-x", b"caf\xe9")
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@pytest.fixture
def store() -> featx.FeatureStore:
    for number in range(48):
        folder = Path("photos", os.fsdecode(CLASSES[number % 4]))
        folder.mkdir(parents=True, exist_ok=True)
        write_image(folder / os.fsdecode(b"@%d\xff\n\x9b.png" % number), number % 4)
    (folder / "=broken\x07.png").write_bytes(b"none")
    return extract("photos", max_failures=1)


def texts(ending: str) -> dict[str, str]:
    files = {str(path): path for path in sorted(Path().rglob(f"*{ending}"))}
    return {name: path.read_bytes().decode("utf-8") for name, path in files.items()}


def cells(text: str) -> list[str]:
    return [cell for line in csv.reader(text.splitlines(keepends=True)) for cell in line]


def is_number(cell: str) -> bool:
    return re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", cell) is not None


@pytest.mark.slow
def test_no_file_has_controls_or_formulas(store: featx.FeatureStore) -> None:
    run_job("neighbors", store="store")
    run_job("duplicates", store="store")
    run_job("probe", store="store", device="cpu", probe={"shots": [2]})
    run_job("report", store="store", device="cpu", report={"tsne": False})
    run_job("predict", store="store", data="photos", out="new", max_failures=1, model=TRUSTED)
    found = texts(".csv")
    names = {"failures", "neighbors", "duplicates", "few_shot", "predictions"}
    assert {Path(name).stem for name in found} == names
    for name, text in found.items():
        assert not CONTROLS.search(text.replace("\r\n", "")), name
        formulas = [cell for cell in cells(text) if cell[:1] in tuple("=+-@")]
        assert all(map(is_number, formulas)), (name, formulas)
        assert "\\x1b[31mred/@" in text or name == "store/failures.csv", name
    pages = {**texts(".html"), "notebook": store._repr_html_() + store.show(4)._repr_html_()}
    assert len(pages) == 3
    for name, text in pages.items():
        assert not CONTROLS.search(text), name
    assert "\\x1b[31mred" in pages["store/report.html"]


@pytest.mark.slow
def test_what_is_read_again_finds_its_rows(
    store: featx.FeatureStore, capsys: pytest.CaptureFixture[str]
) -> None:
    split = {"split": "split.csv"}
    run_job("probe", store="store", device="cpu")
    shutil.copy("store/probe/predictions.csv", "split.csv")
    first = Path("store/probe/predictions.csv").read_bytes()
    capsys.readouterr()
    run_job("probe", store="store", device="cpu", probe=split)
    assert "not in the store" not in capsys.readouterr().out
    assert Path("store/probe/predictions.csv").read_bytes() == first
    # A file of a user has the names themselves.
    roles = {line["key"]: line["split"] for line in csv.DictReader(first.decode().splitlines())}
    keys = store.keys[store.ok].tolist()
    lines = [f'"{key}",{roles[csv_cell(key)]}\n' for key in keys]
    text = "key,split\n" + "".join(lines)
    Path("split.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
    run_job("probe", store="store", device="cpu", probe=split)
    assert Path("store/probe/predictions.csv").read_bytes() == first
    shutil.copytree("store", "other")
    run_job("probe", store="[store,other]", device="cpu", probe=split)
    run_job("report", store="store", device="cpu", report={"tsne": False})
