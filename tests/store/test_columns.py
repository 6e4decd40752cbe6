"""Columns that a data set brings: in every file of a store, checked, and never changed."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from made_store import MadeRun, dataset_digests, edited, make_added, make_grown, make_run

from featx.errors import StoreError, StoreMismatchError
from featx.store import (
    FeatureStore,
    check_store,
    listing_identity,
    merge_listing,
    read_listing,
    repair_files,
)
from featx.store.pack import pack
from featx.types import Listing

COLUMNS = ("age", "good", "patient", "slide")


def with_columns(listing: Listing) -> Listing:
    """Values that follow from the key, so that a row at another place is found."""
    numbers = [sum(key) for key in listing.keys.tolist()]
    columns = {
        "age": np.array([n / 7 if n % 5 else np.nan for n in numbers]),
        "good": np.array([n % 2 == 0 for n in numbers]),
        "patient": np.array([f"pä {n}".encode() if n % 3 else b"" for n in numbers]),
        "slide": np.array(numbers, np.int64) * 10**15,
    }
    return replace(listing, columns=columns)


def made(num_rows: int = 29, failed: tuple[int, ...] = (2, 17)) -> MadeRun:
    run = make_run(num_rows, 8, failed=failed)
    return replace(run, listing=with_columns(run.listing)).identified()


def grown_from(run: MadeRun, new_rows: int) -> MadeRun:
    bare = replace(run, listing=replace(run.listing, columns={}))
    grown = make_grown(bare, new_rows)
    return replace(grown, listing=with_columns(grown.listing)).identified()


def check_columns(root: Path, listing: Listing) -> None:
    store = FeatureStore(root)
    assert store.columns == COLUMNS
    expected = listing.columns
    np.testing.assert_array_equal(store.column("age"), expected["age"])
    assert store.column("good").tolist() == expected["good"].tolist()
    assert store.column("good").dtype == np.bool_
    assert store.column("slide").tolist() == expected["slide"].tolist()
    texts = [text.decode() for text in expected["patient"].tolist()]
    assert store.column("patient").tolist() == texts


def test_every_file_carries_them_and_plain_h5py_reads_them(tmp_path: Path) -> None:
    run = made()
    run.copied(tmp_path)
    check_columns(tmp_path, run.listing)
    with h5py.File(tmp_path / "parts/part-000001.h5") as part:
        assert part["columns/slide"][:].tolist() == run.listing.columns["slide"][8:16].tolist()
        assert part["checksums/columns/slide"].shape == (1,)
    pack(tmp_path)
    check_columns(tmp_path, run.listing)
    check_columns(tmp_path / "features.h5", run.listing)
    with h5py.File(tmp_path / "features.h5") as file:
        assert list(file["columns"]) == list(COLUMNS)
        assert file["columns/patient"][:].tolist() == run.listing.columns["patient"].tolist()
        assert file["columns/good"].dtype == np.bool_
    with pytest.raises(StoreError, match=r"no column 'patent'; it has age, .*Nearest: patient"):
        FeatureStore(tmp_path).column("patent")


def test_a_table_for_pandas_has_all_of_them_whatever_their_names(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    run = make_run(3)
    names = ("column.key", "key", "status")
    columns = {name: np.arange(3) + 10 * i for i, name in enumerate(names)}
    replace(run, listing=replace(run.listing, columns=columns)).write(tmp_path)
    table = FeatureStore(tmp_path).to_pandas()
    assert table["key"].tolist() == FeatureStore(tmp_path).keys.tolist()
    for title, values in zip(table.columns[4:], columns.values(), strict=True):
        assert table[title].tolist() == values.tolist()


def test_a_store_without_them_says_nothing_of_them(tmp_path: Path) -> None:
    make_run(9, 8).identified().copied(tmp_path, packed=True)
    with h5py.File(tmp_path / "features.h5") as file:
        assert "columns" not in file
        assert "columns" not in file["checksums"]
    assert FeatureStore(tmp_path).columns == ()


@pytest.mark.parametrize("packed", [True, False])
def test_verify_finds_a_value_that_changed(tmp_path: Path, packed: bool) -> None:
    run = made()
    run.copied(tmp_path, packed=packed)
    assert check_store(tmp_path).complete
    path = tmp_path / ("features.h5" if packed else "parts/part-000000.h5")
    with edited(path) as file:
        file["columns/slide"][3] += 1
    found = {damage.what for damage in check_store(tmp_path).damages}
    assert found == {
        "/columns/slide differs from its checksum at row 0",
        "/columns/slide is not that of the listing",
    }
    with edited(path) as file:
        del file["columns"]
    found = {damage.what for damage in check_store(tmp_path).damages}
    assert found == {"/columns are not those of the listing"}


def test_packing_refuses_a_part_with_other_values(tmp_path: Path) -> None:
    run = made()
    run.copied(tmp_path)
    other = replace(run, listing=replace(run.listing, columns={**run.listing.columns}))
    other.listing.columns["good"][9] ^= True  # type: ignore[index]
    part = run.grid.part(1)
    data = other.builder(part).build(run.as_run(), other.listing, b"{}")
    (tmp_path / "parts/part-000001.h5").write_bytes(data)
    with pytest.raises(StoreError, match=r"part-000001\.h5: /columns/good is not that of samples"):
        pack(tmp_path)


@pytest.mark.parametrize("lost", ["samples.h5", "features.h5", "part"])
def test_they_are_put_back_from_another_file(tmp_path: Path, lost: str) -> None:
    run = made()
    run.copied(tmp_path, packed=lost == "features.h5")
    whole = dataset_digests(tmp_path / "samples.h5")
    path = tmp_path / ("parts/part-000002.h5" if lost == "part" else lost)
    if lost == "samples.h5":
        with edited(path) as file:
            file["columns/age"][4] = -1
    else:
        with edited(path) as file:
            file["columns/patient"][1] = b"nobody"
    report = check_store(tmp_path)
    assert not report.complete
    repair_files(report)
    run.finish(tmp_path, packed=True)
    assert check_store(tmp_path).complete
    check_columns(tmp_path, run.listing)
    assert dataset_digests(tmp_path / "samples.h5") == whole


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_layers_and_rows_that_are_added(tmp_path: Path, packed: bool) -> None:
    run = made()
    run.copied(tmp_path, packed=packed)
    grown = grown_from(run, 11)
    grown.finish(tmp_path, grow=True)
    added = make_added(grown, {"deep": (7,)})
    added.finish(tmp_path)
    assert check_store(tmp_path).complete
    pack(tmp_path)
    assert check_store(tmp_path).complete
    check_columns(tmp_path, grown.listing)
    identity = listing_identity(grown.listing)
    for name in ("samples.h5", "features.h5"):
        found = read_listing(tmp_path, 40, identity)
        assert found is not None
        assert listing_identity(found) == identity
        (tmp_path / name).unlink()


def test_the_identity_of_the_rows_holds_names_types_and_values() -> None:
    listing = made(9, ()).listing
    digests = {listing_identity(listing), listing_identity(replace(listing, columns={}))}
    for name, values in listing.columns.items():
        others = {other: v for other, v in listing.columns.items() if other != name}
        digests.add(listing_identity(replace(listing, columns={**others, f"{name}2": values})))
        changed = values.copy()
        changed[[0, 1]] = changed[[1, 0]] if changed[0] != changed[1] else ~changed[:2]
        digests.add(listing_identity(replace(listing, columns={**listing.columns, name: changed})))
    assert len(digests) == 2 + 2 * len(COLUMNS)


def test_other_columns_or_values_are_refused_by_name() -> None:
    stored = made(9, ()).listing
    assert merge_listing(Path("s"), stored, stored) is stored
    for columns, message in (
        ({}, r"it has age \(numbers\), .*now gives none"),
        ({**stored.columns, "slide": stored.columns["age"]}, r"slide \(whole numbers\); the data"),
        ({**stored.columns, "x": stored.columns["age"]}, r"now gives .*x \(numbers\)"),
    ):
        with pytest.raises(StoreMismatchError, match=message):
            merge_listing(Path("s"), stored, replace(stored, columns=columns))
    for name, value, message in (
        ("patient", b"nobody", r"column patient: cat/0004\.jpg had 'pä 922' and has 'nobody' now"),
        ("age", 5.0, r"column age: cat/0004\.jpg had .* and has 5\.0 now"),
        ("slide", 5, r"column slide: cat/0004\.jpg had 922000000000000000 and has 5 now"),
    ):
        changed = stored.columns[name].copy()
        changed[2] = value
        with pytest.raises(StoreMismatchError, match=message):
            merge_listing(
                Path("s"), stored, replace(stored, columns={**stored.columns, name: changed})
            )


def test_columns_that_lead_to_another_file_are_refused(tmp_path: Path) -> None:
    run = made()
    run.copied(tmp_path, packed=True)
    with edited(tmp_path / "features.h5") as file:
        del file["columns/age"]
        file["columns/age"] = h5py.ExternalLink("/etc/other.h5", "/age")
    store = FeatureStore(tmp_path / "features.h5")
    with pytest.raises(StoreError, match="columns/age links to another object"):
        store.column("age")
    assert not check_store(tmp_path).complete


def test_texts_of_many_rows_take_no_second_copy(tmp_path: Path) -> None:
    """As of 10^8 rows, whose lists of Python objects took 12 GB besides the array."""
    count = 200_000
    made = make_run(count, 1 << 16, {"x": (1,)})
    slides = np.array([f"slide-{i % 90}" for i in range(count - 1)] + ["fölie-1"])
    listing = replace(made.listing, columns={"slide": np.char.encode(slides, "utf-8")})
    store = FeatureStore(replace(made, listing=listing).write(tmp_path))
    for read, expected in (
        (lambda: store.column("slide"), slides),
        (lambda: store.keys, np.char.decode(store.key_bytes, "utf-8")),
    ):
        tracemalloc.start()
        found = read()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
        assert peak < 2 * found.nbytes
