"""The listing of a store: kept, compared, found again, and joined to a data set that has grown."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import h5py
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from made_store import listing_file, make_grown, make_listing, make_run

from featx.errors import StoreError, StoreMismatchError
from featx.store import layout, listing_identity, merge_listing, read_listing
from featx.store.listing import (
    compare_listing,
    is_ascending,
    read_listing_file,
)
from featx.types import Listing

HERE = Path("store")

NAMES = st.binary(min_size=1, max_size=6).filter(lambda key: b"\0" not in key)
CLASSES = ["ant", "bee", "cät", "dög", "emu"]


def listing_of(labels: dict[bytes, str | None], keys: list[bytes], classes: list[str]) -> Listing:
    numbers = [classes.index(name) if (name := labels[key]) is not None else -1 for key in keys]
    return Listing(np.array(keys, dtype="S"), np.array(numbers, np.int64), tuple(classes))


@st.composite
def grown_data_sets(draw: st.DrawFn) -> tuple[Listing, Listing, dict[bytes, str | None]]:
    """A store's listing in any order, and a data set that has its rows and others."""
    labels = draw(
        st.dictionaries(NAMES, st.sampled_from([None, *CLASSES]), min_size=1, max_size=20)
    )
    every = sorted(labels)
    stored = draw(st.permutations(every))[: draw(st.integers(1, len(every)))]
    known = draw(st.permutations(sorted({labels[key] for key in stored} - {None})))  # type: ignore[type-var]
    present = sorted({name for name in labels.values() if name is not None})
    empty = draw(st.sets(st.sampled_from(CLASSES)))
    found = sorted({*present, *empty})
    return (
        listing_of(labels, list(stored), list(known)),  # type: ignore[arg-type]
        listing_of(labels, every, found),
        labels,
    )


@settings(max_examples=50, deadline=None)
@given(grown_data_sets())
def test_known_rows_keep_their_places_and_every_row_its_label(
    case: tuple[Listing, Listing, dict[bytes, str | None]],
) -> None:
    stored, found, labels = case
    joined = merge_listing(HERE, stored, found)
    count = len(stored)
    assert joined.keys[:count].tolist() == stored.keys.tolist()
    assert joined.labels[:count].tolist() == stored.labels.tolist()
    assert joined.classes[: len(stored.classes)] == stored.classes
    assert set(joined.classes) == {*stored.classes, *found.classes}
    assert sorted(joined.keys.tolist()) == found.keys.tolist()
    new = joined.keys[count:].tolist()
    assert new == sorted(new)
    for key, label in zip(joined.keys.tolist(), joined.labels.tolist(), strict=True):
        assert (joined.classes[label] if label >= 0 else None) == labels[key]
    again = merge_listing(HERE, joined, found)
    assert listing_identity(again) == listing_identity(joined)


@settings(max_examples=50, deadline=None)
@given(grown_data_sets(), st.data())
def test_rows_that_are_gone_or_have_another_label_are_refused(
    case: tuple[Listing, Listing, dict[bytes, str | None]], data: st.DataObject
) -> None:
    stored, found, _ = case
    row = data.draw(st.integers(0, len(stored) - 1))
    at = found.keys.tolist().index(stored.keys[row])
    labels = found.labels.copy()
    labels[at] = -1 if labels[at] >= 0 else 0
    if found.classes:
        with pytest.raises(StoreMismatchError, match="has other labels"):
            merge_listing(HERE, stored, replace(found, labels=labels))
    if len(found) > 1:
        fewer = Listing(np.delete(found.keys, at), np.delete(found.labels, at), found.classes)
        with pytest.raises(StoreMismatchError, match="1 row whose image is no longer"):
            merge_listing(HERE, stored, fewer)


def test_the_digest_sees_every_key_label_class_and_their_order() -> None:
    listing = make_listing(9)
    others = [
        replace(listing, keys=listing.keys[::-1].copy()),
        replace(listing, labels=listing.labels[::-1].copy()),
        replace(listing, classes=listing.classes[::-1]),
        replace(listing, classes=(*listing.classes, "more")),
        replace(listing, keys=listing.keys.astype("S13")),
        listing.head(8),
    ]
    assert len({listing_identity(one) for one in [listing, *others]}) == 1 + len(others)
    assert listing_identity(replace(listing, labels=listing.labels.astype(">i8"))) == (
        listing_identity(listing)
    )
    assert listing_identity(listing).startswith("9 rows, sha256 ")


def test_keys_ascend_also_where_pieces_meet() -> None:
    keys = np.array([b"%06d" % number for number in range(1 << 19)])
    assert is_ascending(keys)
    assert is_ascending(keys[:1])
    assert is_ascending(keys[:0])
    for row in (1, len(keys) - 1, *(1 << k for k in range(1, 19))):
        before = keys[row - 1 : row + 1].copy()
        for wrong in (before[::-1], before[0]):
            keys[row - 1 : row + 1] = wrong
            assert not is_ascending(keys)
        keys[row - 1 : row + 1] = before


def test_what_is_written_is_read_with_unusual_bytes(tmp_path: Path) -> None:
    keys = np.array([b"a\xff.jpg", "ü.jpg".encode(), b"z z\n.jpg"])
    listing = Listing(keys, np.array([0, -1, 1]), ("dög", os.fsdecode(b"\xfe")))
    (tmp_path / "samples.h5").write_bytes(listing_file(listing))
    for found in (read_listing(tmp_path, 3), read_listing_file(tmp_path / "samples.h5", 3)):
        assert found is not None
        assert listing_identity(found) == listing_identity(listing)


class TestCompare:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        (tmp_path / "samples.h5").write_bytes(listing_file(make_listing(9)))
        return tmp_path / "samples.h5"

    def test_a_checksum_of_other_values(self, path: Path) -> None:
        with h5py.File(path, "r+") as file:
            file["checksums/label"][0] ^= 1
        problem = "its dataset /label differs from its checksum"
        assert compare_listing(path, make_listing(9)) == (9, problem)

    def test_columns_of_two_lengths(self, path: Path) -> None:
        with h5py.File(path, "r+") as file:
            del file["label"]
            file["label"] = np.zeros(8, np.int64)
        assert compare_listing(path, make_listing(9)) == (9, "it has 9 keys and 8 labels")

    def test_a_column_that_is_shorter_or_longer(self, path: Path) -> None:
        listing = replace(make_listing(9), columns={"age": np.arange(9)})
        for length in (8, 10):
            path.write_bytes(listing_file(listing))
            with h5py.File(path, "r+") as file:
                del file["columns/age"]
                file["columns/age"] = np.arange(length)
                file["checksums/columns/age"][0] = layout.checksum(np.arange(length))
            problem = "its dataset /columns/age is not that of this store"
            assert compare_listing(path, listing) == (9, problem)

    def test_what_cannot_be_read_now_is_an_error(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def failing(path: Path) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr("featx.store.listing.open_metadata", failing)
        with pytest.raises(StoreError, match="When it can be read"):
            compare_listing(path, make_listing(9))


class TestFoundAgain:
    """samples.h5 is lost or wrong; the listing is in the files with the rows as well."""

    @pytest.mark.parametrize(
        ("how", "packed"), [("gone", True), ("gone", False), ("empty", False), ("flipped", True)]
    )
    def test_from_the_files_with_rows(self, tmp_path: Path, how: str, packed: bool) -> None:
        run = make_run(29, 8).identified()
        grown = make_grown(run, 11, part_rows=4)
        run.finish(tmp_path)
        grown.finish(tmp_path, grow=True, packed=packed)
        path = tmp_path / "samples.h5"
        if how == "gone":
            path.unlink()
        elif how == "empty":
            path.write_bytes(b"")
        else:
            with h5py.File(path, "r+") as file:
                file["label"][30] = 1
        identity = listing_identity(grown.listing)
        found = read_listing(tmp_path, 40, identity)
        assert found is not None
        assert listing_identity(found) == identity

    def test_not_where_a_part_is_missing(self, tmp_path: Path) -> None:
        make_run(29, 8).write(tmp_path, [0, 1, 3])
        (tmp_path / "samples.h5").unlink()
        assert read_listing(tmp_path, 29) is None
        assert read_listing(tmp_path, 17) is None
        found = read_listing(tmp_path, 12)
        assert found is not None
        assert listing_identity(found) == listing_identity(make_listing(29).head(12))

    def test_a_longer_listing_gives_its_beginning(self, tmp_path: Path) -> None:
        listing = make_listing(9)
        (tmp_path / "samples.h5").write_bytes(listing_file(listing))
        found = read_listing(tmp_path, 4)
        assert found is not None
        assert found.keys.tolist() == listing.keys[:4].tolist()
        assert read_listing(tmp_path, 10) is None

    def test_swapped_types_are_no_listing(self, tmp_path: Path) -> None:
        listing = make_listing(9)
        (tmp_path / "samples.h5").write_bytes(listing_file(listing))
        with h5py.File(tmp_path / "samples.h5", "r+") as file:
            del file["label"]
            file["label"] = listing.labels.astype(">i8")
        assert read_listing_file(tmp_path / "samples.h5", 9) is None
