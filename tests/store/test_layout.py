"""The format's arithmetic: parts, chunks, checksums, attributes."""

from __future__ import annotations

import io
import json

import h5py
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from made_store import make_run

from featx.base import differences, digest
from featx.store import layout
from featx.types import Status


@given(st.integers(1, 5000), st.integers(0, 12))
def test_parts_tile_the_listing_without_gap_or_overlap(num_rows: int, power: int) -> None:
    grid = layout.Grid(num_rows, 1 << power)
    parts = [grid.part(i) for i in range(len(grid))]
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(num_rows))
    assert all(len(part) == grid.part_rows for part in parts[:-1])
    assert 0 < len(parts[-1]) <= grid.slots <= grid.part_rows


@given(
    st.integers(1, 1 << 20),
    st.integers(0, 15),
    st.integers(1, 1 << 25),
    st.booleans(),
)
def test_a_chunk_never_straddles_two_parts(
    num_rows: int, power: int, row_bytes: int, compressed: bool
) -> None:
    grid = layout.Grid(num_rows, 1 << power)
    for rows in (grid.chunk_rows(row_bytes, compressed), grid.column_chunk_rows):
        assert rows >= 1
        assert grid.part_rows % rows == 0
        assert rows <= grid.slots
    budget = layout.CHUNK_BYTES_COMPRESSED if compressed else layout.CHUNK_BYTES
    rows = grid.chunk_rows(row_bytes, compressed)
    assert rows == 1 or rows * row_bytes <= budget


@pytest.mark.parametrize("size", [0, 1, 131072])
def test_the_checksum_of_many_bytes_is_as_documented(size: int) -> None:
    data = np.random.default_rng(5).integers(0, 256, size, dtype=np.uint8)
    expected = xxhash.xxh3_64_intdigest(data.tobytes())
    assert layout.checksum(data) == layout.checksum(data[:9], data[9:].tobytes()) == expected


def test_status_names_name_every_number_of_the_contract() -> None:
    run = make_run(num_rows=4, part_rows=4)
    data = run.builder(run.grid.part(0)).build(run.as_run(), run.listing, b"{}")
    with h5py.File(io.BytesIO(bytes(data)), "r") as file:
        recorded = json.loads(file[layout.STATUS].attrs["names"])
    names = {int(number): name for number, name in recorded.items()}
    assert names == {
        0: "ok",
        1: "missing",
        2: "empty",
        3: "unsupported",
        4: "decode error",
        5: "truncated",
        6: "too large",
        7: "transform error",
        8: "non finite",
        9: "timeout",
        10: "crashes decoder",
        11: "damaged and image gone",
        12: "image damaged",
        255: "absent",
    }
    assert set(names) == {int(status) for status in Status}


look_alikes = [None, True, 1, 1.0, 0, False, "1", [1], [1.0], [], "", "not there"]
fingerprints = st.dictionaries(st.sampled_from("abc"), st.sampled_from(look_alikes))


@given(fingerprints, fingerprints)
def test_fingerprints_differ_exactly_where_their_digests_do(before: dict, now: dict) -> None:
    """Else a resume could be let in and then throw away every part as another run's."""
    assert bool(differences(before, now)) == (digest(before) != digest(now))


@given(fingerprints)
def test_a_fingerprint_read_back_from_json_is_the_same(values: dict) -> None:
    values["shape"] = (3, 4)
    again = json.loads(json.dumps(values))
    assert digest(again) == digest(values)
    assert differences(again, values) == []


def test_a_key_that_is_new_is_a_difference_even_if_it_is_null() -> None:
    assert differences({}, {"a": None}) == [("a", "not there", None)]
    assert differences({"a": 1}, {}) == [("a", 1, "not there")]
    assert differences({"b": 1, "a": 1}, {"b": 2, "a": 1}) == [("b", 1, 2)]
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
