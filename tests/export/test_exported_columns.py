"""The columns that a table brought (data.columns), in every format of job=export."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run_python, slow_except
from format_readers import READERS
from probe_problem import write_store
from test_formats import export
from tiny_model import extract, write_image

import featx
from featx.errors import ConfigError, StoreMismatchError

pytest.importorskip("pyarrow", reason="the extra table is not installed")

pytestmark = [
    pytest.mark.usefixtures("small_blocks"),
    pytest.mark.usefixtures("in_tmp_path"),
    # webdataset leaves the files of its readers to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

NAN = math.nan
COLUMNS: dict[str, list[Any]] = {
    "age": [40, 41, 42, 43, 44, 45, 46],
    "patient": ["p0", "", "änne ", "p3", "p4", "p5", "a longer name"],
    "score": [0.5, NAN, 2.5, math.inf, -1.0, NAN, 3.0],
    "smokes": [True, False, True, True, False, False, True],
    "status": [10, 11, 12, 13, 14, 15, 16],
}
BROKEN = 3

TITLES = {
    "npy": "status",
    "parquet": "column.status",
    "safetensors": "column.status",
    "zarr": "status",
    "huggingface": "column.status",
    "webdataset": "status",
}
"""Format with columns -> what it calls the column `status`; tables have one of that name."""


def make_store(columns: dict[str, list[Any]] = COLUMNS) -> featx.FeatureStore:
    import pyarrow as pa
    from pyarrow import parquet

    for i in range(7):
        write_image(Path(f"{i}.png"), i)
    Path(f"{BROKEN}.png").write_bytes(b"no image")
    rows = pa.table({"path": [f"{i}.png" for i in range(7)], **columns})
    parquet.write_table(rows, "t.parquet")
    data = {"name": "table", "root": "t.parquet", "columns": list(columns)}
    return extract(data, layers=["pool"], reduce="flatten", max_failures=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("columns")
    with contextlib.chdir(folder):
        make_store()
    return folder


@pytest.fixture
def store(made: Path, tmp_path: Path) -> featx.FeatureStore:
    """The store with COLUMNS, in the current folder with its images."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return featx.open(tmp_path / "store")


def expected(kind: str, rows: list[int]) -> dict[str, list[Any]]:
    """What the export's library gives of the columns; how a missing number is written differs."""
    chosen = {name: [values[row] for row in rows] for name, values in COLUMNS.items()}
    if kind == "webdataset":
        chosen["score"] = [None if math.isnan(v) else v for v in chosen["score"]]
    return {TITLES[kind] if name == "status" else name: v for name, v in chosen.items()}


@pytest.mark.parametrize("kind", sorted(TITLES))
@pytest.mark.parametrize("ok_only", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_columns_stay_with_their_rows(
    kind: str, ok_only: bool, store: featx.FeatureStore, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = {"shard_gib": 300 / 2**30} if kind in ("safetensors", "webdataset") else {}
    export(kind, export={"ok_only": ok_only, **shards})
    rows = [row for row in range(7) if row != BROKEN or not ok_only]
    found = READERS[kind](Path("out"))
    assert found.rows == rows
    wanted = expected(kind, rows)
    assert sorted(found.columns) == sorted(wanted)
    for name, values in wanted.items():
        np.testing.assert_equal(found.columns[name], values)
        assert [type(v) for v in found.columns[name]] == [type(v) for v in values], name
    assert sorted(found.layers) == ["pool"]
    if not ok_only:
        assert np.isnan(found.layers["pool"][BROKEN]).all()
    assert np.array_equal(found.layers["pool"], store["pool"][rows], equal_nan=True)
    if shards:
        assert len(found.files) > 1
    assert "columns age, patient, score, smokes, status" in " ".join(
        capsys.readouterr().out.split()
    )


def test_an_export_says_their_types_and_those_of_npy_are_mapped(store: featx.FeatureStore) -> None:
    out = export("npy")
    about = json.loads((out / "_export.json").read_text())["about"]
    assert about["columns"] == {
        "age": "int64", "patient": "text", "score": "float64", "smokes": "bool", "status": "int64"
    }  # fmt: skip

    names = np.load(out / "columns" / "patient.npy", mmap_mode="r")
    assert isinstance(names, np.memmap)
    assert names.dtype == "S13"
    assert names[2].decode() == "änne "


def test_tensors_of_columns_begin_at_multiples_of_their_numbers(store: featx.FeatureStore) -> None:
    file = next(export("safetensors").glob("*.safetensors"))
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + size])
    for name, entry in entries.items():
        if name != "__metadata__":
            width = {"F": 8 if "64" in entry["dtype"] else 4, "I": 8}.get(entry["dtype"][0], 1)
            assert (8 + size + entry["data_offsets"][0]) % width == 0, name


@pytest.mark.slow
def test_json_of_webdataset_is_json_for_everybody() -> None:
    make_store({name: values for name, values in COLUMNS.items() if name != "score"} | {
        "score": [0.5, NAN, 1, 2, 3, 4, 5]
    })  # fmt: skip
    with tarfile.open(next(export("webdataset").glob("*.tar"))) as tar:
        file = tar.extractfile("000000001.json")
        assert file is not None
        text = file.read().decode()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    about = json.loads(text, parse_constant=refuse)
    assert about["columns"] == {
        "age": 41, "patient": "", "score": None, "smokes": False, "status": 11
    }  # fmt: skip


@pytest.mark.slow
def test_a_store_without_columns_has_none_of_it() -> None:
    make_store({})
    for kind in ("npy", "webdataset", "zarr", "safetensors"):
        out = export(kind, overwrite=True)
        assert READERS[kind](out).columns == {}
        assert not (out / "columns").exists()
        assert "columns" not in json.loads((out / "_export.json").read_text())["about"]


@pytest.mark.parametrize(
    "kind", slow_except(["clip_retrieval", "csv", "parquet", "safetensors"], "csv", "safetensors")
)
def test_columns_with_names_of_the_listing_replace_none_of_it(kind: str) -> None:
    names = (
        *("__metadata__", "class", "column.key", "image_path", "key", "label", "pool"),
        *("row", "status"),
    )
    store = make_store({name: [1, 2, 3, 4, 5, 6, 7] for name in names})
    found = READERS[kind](export(kind))
    assert found.keys == store.keys[found.rows].tolist()
    assert {name.rpartition(".")[2] for name in found.columns} == {*names} - {"column.key"}
    assert len(found.columns) == len(names)
    assert {*map(tuple, found.columns.values())} == {tuple(row + 1 for row in found.rows)}


@pytest.mark.parametrize("name", ["zarr.json", "a\\b"])
def test_a_name_that_zarr_has_no_place_for(name: str) -> None:
    make_store({name: [1, 2, 3, 4, 5, 6, 7]})
    with pytest.raises(ConfigError, match=r"zarr\.json.*Choose another export\.format"):
        export("zarr")
    assert not Path("out").exists()


def test_the_lines_that_csv_prints_keep_texts_and_digits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sums = [i / 10 + 0.2 for i in range(7)]
    texts = ["007", "NA", "null", "1e3", "True", "nan", "x"]
    make_store({"label": texts, "sum": sums, "text": texts})
    capsys.readouterr()
    export("csv")
    found: dict[str, Any] = {}
    exec(capsys.readouterr().out.partition("\n\n")[2], found)
    rows = found["rows"]
    assert rows["text"].tolist() == texts
    assert rows["sum"].tolist() == pytest.approx(sums, rel=1e-15)  # pandas 3.0 rounds the last bit


def test_an_export_of_other_columns_is_refused(store: featx.FeatureStore) -> None:
    """Written before the columns were, or of another store with the same rows."""
    export("zarr")
    record = Path("out/_export.json")
    found = json.loads(record.read_text())
    del found["fingerprint"]["sha256 of columns"]
    record.write_text(json.dumps(found))
    with pytest.raises(StoreMismatchError, match="sha256 of columns"):
        export("zarr")
    export("zarr", overwrite=True)
    assert READERS["zarr"](Path("out")).columns["age"] == COLUMNS["age"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
@pytest.mark.parametrize("form", slow_except(["npy", "csv"], "npy"))
def test_texts_are_exported_in_blocks(form: str) -> None:
    """All texts as numpy's take four times their bytes, twice: of all rows, and of those chosen."""
    # The peak of this process, without that of the one that started it, as getrusage counts.
    run = (
        "import sys, featx\n"
        "featx.export_store('store', export={'format': sys.argv[1]}, out='out')\n"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
    )
    peaks = {}
    for num_rows in (100, 20_000):
        folder, y = Path(str(num_rows)), np.arange(num_rows) % 2
        texts = np.full(num_rows, b"x" * 2000)
        write_store(folder / "store", y, {"caption": texts}, x=np.ones((num_rows, 1), np.float32))
        peaks[num_rows] = int(run_python("-c", run, form, cwd=folder).stdout.splitlines()[-1])
    assert peaks[20_000] - peaks[100] < 6 * (texts.nbytes >> 10), peaks
