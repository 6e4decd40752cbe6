"""Rows -> part -> packed file: what comes out is what was put in, at its own place."""

from __future__ import annotations

import io
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import run_python
from hypothesis import given, settings
from hypothesis import strategies as st
from made_store import MadeRun, make_run, temporary_files

from featx.store import FeatureStore, PartBuilder, layout
from featx.types import Failure, Status

CODECS = ["none", "gzip", "zstd"]


@st.composite
def runs(draw: st.DrawFn) -> MadeRun:
    num_rows = draw(st.integers(1, 20))
    shapes = draw(
        st.lists(
            st.sampled_from([(), (1,), (7,), (300,), (2, 3, 3), (1, 1, 1, 5)]),
            min_size=1,
            max_size=3,
        )
    )
    names = ["layer4", "blocks.1.mlp:input", "ünï"]
    run = make_run(
        num_rows=num_rows,
        part_rows=1 << draw(st.integers(0, 5)),
        shapes=dict(zip(names, shapes, strict=False)),
        dtype=draw(st.sampled_from(["float16", "float32"])),
        codec=draw(st.sampled_from(CODECS)),
        failed=draw(st.sets(st.integers(0, num_rows - 1))),
        seed=draw(st.integers(0, 1000)),
    )
    constant = draw(st.sampled_from([None, None, 0.0, 65504.0, 1e-7, -0.0]))
    if constant is None:
        return run
    rows = {name: np.full_like(values, constant) for name, values in run.features.items()}
    return replace(run, features=rows)


@given(runs(), st.data())
@settings(max_examples=6, deadline=None)
def test_what_is_read_is_what_was_put_in(run: MadeRun, data: st.DataObject) -> None:
    """Bit for bit, from the parts and from the packed file, in whatever order parts came."""
    assert_round_trip(run, data)


@pytest.mark.slow
@given(runs(), st.data())
@settings(max_examples=200, deadline=None)
def test_what_is_read_is_what_was_put_in_many_times(run: MadeRun, data: st.DataObject) -> None:
    assert_round_trip(run, data)


def assert_round_trip(run: MadeRun, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(run.grid))))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "store"
        assert_holds(FeatureStore(run.write(root, order)), run)
        assert_holds(FeatureStore(run.write(root, [], packed=True)), run)
        assert not (root / layout.PARTS).exists()
        assert temporary_files(root) == []


def assert_holds(store: FeatureStore, run: MadeRun) -> None:
    assert store.complete
    assert set(store.layers) == set(run.features)
    for name in run.features:
        expected = run.expected(name)
        array = store[name]
        assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
        assert array[:].tobytes() == expected.tobytes()
    assert store.status.tolist() == run.status().tolist()
    assert store.key_bytes.tolist() == run.listing.keys.tolist()
    assert store.labels.tolist() == run.listing.labels.tolist()
    assert store.classes == run.listing.classes
    found = [(f["row"], f["status"], f["error"], f["message"]) for f in store.failures]
    failures = sorted(run.failures, key=lambda failure: failure.row)
    assert found == [(f.row, f.status.label, f.error, f.message) for f in failures]


def build(run: MadeRun, builder: PartBuilder) -> h5py.File:
    data = builder.build(run.as_run(), run.listing, b"{}")
    return h5py.File(io.BytesIO(bytes(data)), "r")


def test_batches_in_any_order_make_the_same_part() -> None:
    run = make_run(num_rows=16, part_rows=8, failed=[9, 15])
    part = run.grid.part(1)
    whole = run.builder(part).build(run.as_run(), run.listing, b"{}")
    builder = PartBuilder(part, run.specs)
    for start in (12, 8, 14, 10):
        rows = {name: values[start : start + 2] for name, values in run.features.items()}
        failed = [f for f in run.failures if start <= f.row < start + 2]
        builder.add(start, rows, failed)
    assert bytes(builder.build(run.as_run(), run.listing, b"{}")) == bytes(whole)


def test_a_part_says_that_it_is_not_complete_and_where_it_belongs() -> None:
    run = make_run(num_rows=21, part_rows=8)
    with build(run, run.builder(run.grid.part(2))) as file:
        assert not file.attrs["complete"]
        assert (file.attrs["part"], file.attrs["start"]) == (2, 16)
        assert file["key"][:].tolist() == run.listing.keys[16:].tolist()
        assert file["label"][:].tolist() == run.listing.labels[16:].tolist()


def broken_batches() -> dict[str, tuple[int, dict[str, Any], list[Failure]]]:
    run = make_run(num_rows=24, part_rows=8)
    good = {name: values[:4] for name, values in run.features.items()}

    def failure(row: int, status: Status = Status.EMPTY) -> list[Failure]:
        return [Failure(row, b"k", status, "E", "m")]

    return {
        "before the part": (6, good, []),
        "beyond the part": (14, good, []),
        "one layer missing": (8, {"flat": good["flat"]}, []),
        "one layer too many": (8, {**good, "other": good["flat"]}, []),
        "one row for four": (8, {**good, "map": good["map"][:1]}, []),
        "rows of another shape": (8, {**good, "map": good["map"][:, :1]}, []),
        "rows of another type": (8, {**good, "flat": good["flat"].astype(np.float64)}, []),
        "failure of another batch": (8, good, failure(13)),
        "failure counted in the part": (8, good, failure(2)),
        "failure that is ok": (8, good, failure(9, Status.OK)),
        "failure that is absent": (8, good, failure(9, Status.ABSENT)),
    }


@pytest.mark.parametrize("case", broken_batches())
def test_a_batch_that_does_not_fit_is_refused(case: str) -> None:
    """numpy would broadcast, cast or wrap around without a word."""
    run = make_run(num_rows=24, part_rows=8)
    start, features, failures = broken_batches()[case]
    with pytest.raises(AssertionError):
        PartBuilder(run.grid.part(1), run.specs).add(start, features, failures)


OPTIMISED = """
assert False, "python -O leaves this out"
import numpy as np
from made_store import make_run
from featx.errors import InternalError, RunError
from featx.store import row_file as writer
from featx.store.row_file import PartBuilder

run = make_run(8, 8)
part, rows = run.grid.part(0), {name: values[:4] for name, values in run.features.items()}

def attempt(act):
    try:
        act()
    except (InternalError, RunError) as error:
        print(type(error).__name__, error)

builder = PartBuilder(part, run.specs)
builder.add(0, rows, [])
attempt(lambda: builder.add(3, rows, []))
attempt(lambda: builder.build(run.as_run(), run.listing, b"{}"))
whole = writer.write_classes

def lossy(file, classes):
    file["features/flat"][5, 2] = 1.0
    whole(file, classes)

writer.write_classes = lossy
attempt(lambda: run.builder(part).build(run.as_run(), run.listing, b"{}"))
"""


def test_promises_hold_under_python_without_asserts() -> None:
    done = run_python("-O", "-c", OPTIMISED, path=[Path(__file__).parents[1]])
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stdout + done.stderr
    assert lines[0] == "InternalError rows came twice"
    assert lines[1] == "InternalError a row of the part never arrived"
    assert "RunError parts/part-000000.h5 was not written: reading /features/flat back" in lines[2]


@pytest.mark.parametrize("codec", CODECS)
def test_chunks_are_whole_rows_of_the_intended_size(codec: str) -> None:
    run = make_run(num_rows=600, part_rows=512, shapes={"wide": (1024,)}, codec=codec)
    with build(run, run.builder(run.grid.part(0))) as file:
        dataset = file["features/wide"]
        budget = 1 << 20 if codec == "none" else 1 << 18
        assert dataset.chunks == (budget // 4096, 1024)
        assert np.isnan(dataset.fillvalue)
        assert (dataset.id.get_create_plist().get_nfilters() > 0) == (codec != "none")
