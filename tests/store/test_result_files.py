"""Files of results beside a store: each change of their content is damage that verify names."""

from __future__ import annotations

import hashlib
import json
import time
import tracemalloc
from pathlib import Path

import h5py
import pytest
from made_store import make_run

from featx.errors import StoreError
from featx.store import check_store, read_result, repair_files, result_json
from featx.store.result_files import read_failures


def made(tmp_path: Path) -> Path:
    """A packed store with a probe and its predictions."""
    root = make_run(9, 4, {"a": (3,)}).finish(tmp_path / "store")
    (root / "probe").mkdir()
    (root / "probe/predictions.csv").write_bytes(b"row,label\n1,61.9\n")
    sha256 = hashlib.sha256(b"row,label\n1,61.9\n").hexdigest()
    probe = {"accuracy": 0.619, "predictions": {"file": "probe/predictions.csv", "sha256": sha256}}
    (root / "probe.json").write_bytes(result_json(probe, indent=1))
    (root / "summary.json").write_bytes(result_json({"rows": 619, "runs": []}, indent=2))
    (root / "zeroshot.json").write_bytes(result_json({"accuracy": 0.619}, indent=1))
    assert check_store(root).complete
    return root


@pytest.mark.slow
def test_many_numbers_take_little_memory() -> None:
    """Lists of 10^7 numbers, such as confusion matrices of many layers, took 140 bytes each."""
    numbers = {"rows": [[7] * 1000] * 100}
    tracemalloc.start()
    data = result_json(numbers, indent=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert json.loads(data)["rows"] == numbers["rows"]
    assert peak < 50 * 100_000


def test_many_failures_are_read_chunk_by_chunk(tmp_path: Path) -> None:
    """Every second image of 40,000: one by one, this took 3 s."""
    run = make_run(40_000, 1 << 15, {"a": (1,)}, failed=range(1, 40_000, 2))
    root = run.write(tmp_path, packed=True)
    began = time.process_time()
    with h5py.File(root / "features.h5") as file:
        assert read_failures(file) == list(run.failures)
    assert time.process_time() - began < 1.5


@pytest.mark.parametrize(
    ("name", "flip"),
    [("probe.json", b"619"), ("summary.json", b'"sha256"'), ("zeroshot.json", b"{")],
)
def test_a_changed_file_is_named_and_set_aside(tmp_path: Path, name: str, flip: bytes) -> None:
    root = made(tmp_path)
    data = (root / name).read_bytes()
    changed = data.replace(flip, bytes([flip[0] ^ 1]) + flip[1:], 1)
    assert changed != data
    (root / name).write_bytes(changed)
    report = check_store(root)
    assert [damage.path.name for damage in report.damages] == [name]
    with pytest.raises(StoreError, match=name):
        read_result(root / name)
    assert repair_files(report) == []
    assert (root / f"{name}.damaged").read_bytes() == changed
    assert check_store(root).complete


def test_a_file_that_a_probe_names_is_compared(tmp_path: Path) -> None:
    root = made(tmp_path)
    (root / "probe/predictions.csv").write_bytes(b"row,label\n1,61.8\n")
    (damage,) = check_store(root).damages
    assert (damage.path.name, "predictions.csv differs" in damage.what) == ("probe.json", True)
    repair_files(check_store(root))
    assert check_store(root).complete


def test_a_file_without_a_checksum_is_read(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({"rows": 3}))
    assert read_result(path) == {"rows": 3}


def test_a_byte_of_a_name_that_is_not_utf_8_is_an_escape(tmp_path: Path) -> None:
    values = {"key": b"\xff \xe4.jpg".decode("utf-8", "surrogateescape"), "class": "ä"}
    path = tmp_path / "probe.json"
    path.write_bytes(result_json(values, indent=1))
    assert json.loads(path.read_text("utf-8")).items() >= values.items()
    assert read_result(path) == values
