"""Contract of data sources."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

from featx.types import (
    IMAGE_STATE,
    NO_STATE,
    ImageFault,
    Listing,
    Source,
    Stateful,
    Status,
    ViewSource,
)

_NO_FAILURE = (Status.OK, Status.NON_FINITE, Status.ABSENT)
"""Statuses that a source never gives: a row without failure, and results of the model."""


class SourceContract:
    """Tests of a `featx.types.Source`; a subclass overrides the fixture `source`."""

    @pytest.fixture
    def source(self) -> Source:
        """Data set with at least two rows."""
        raise NotImplementedError("override the fixture `source`: it returns the data set to test")

    def copy_for_worker(self, source: Source) -> Source:
        """Return the source as a worker process gets it.

        A source given as a Python object is pickled. A subclass for a source that is selected by
        options returns one that is opened by the same options instead.
        """
        copy: Source = pickle.loads(pickle.dumps(source))
        return copy

    def test_it_is_a_source(self, source: Source) -> None:
        assert isinstance(source, Source)

    def test_keys_are_unique_and_in_bytewise_order(self, source: Source) -> None:
        keys = source.listing().keys
        assert keys.ndim == 1
        assert keys.dtype.kind == "S"
        listed = keys.tolist()
        assert len(listed) >= 2
        assert b"" not in listed
        assert listed == sorted(set(listed))

    def test_labels_are_indices_into_the_classes(self, source: Source) -> None:
        listing = source.listing()
        assert listing.labels.shape == (len(listing),)
        assert listing.labels.dtype == np.int64
        assert listing.labels.min() >= -1
        assert listing.labels.max() < len(listing.classes)
        assert len(set(listing.classes)) == len(listing.classes)

    def test_columns_have_one_value_per_row(self, source: Source) -> None:
        listing = source.listing()
        names = [name.encode("utf-8", "surrogateescape") for name in listing.columns]
        assert names == sorted(names)
        for values in listing.columns.values():
            assert values.shape == (len(listing),)
            assert values.dtype.kind == "S" or values.dtype in (np.int64, np.float64, np.bool_)

    def test_content_tags_are_integers(self, source: Source) -> None:
        listing = source.listing()
        if listing.content_tags is not None:
            assert listing.content_tags.shape == (len(listing),)
            assert listing.content_tags.dtype == np.int64

    def test_a_second_listing_is_the_same(self, source: Source) -> None:
        first, second = source.listing(), source.listing()
        assert _as_plain(first) == _as_plain(second)

    def test_every_row_has_bytes_or_an_image_fault(self, source: Source) -> None:
        for key in source.listing().keys.tolist():
            data = _bytes_or_fault(source, key)
            assert isinstance(data, bytes | ImageFault)
            if isinstance(data, ImageFault):
                assert data.status not in _NO_FAILURE
                assert str(data)
            else:
                assert data

    def test_threads_read_what_one_thread_reads(self, source: Source) -> None:
        """The loader reads in several threads at the same time, in no fixed order."""
        keys = source.listing().keys.tolist()[:16]
        expected = [_comparable(_bytes_or_fault(source, key)) for key in keys]
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda key: _bytes_or_fault(source, key), keys[::-1] * 3))
        assert [_comparable(data) for data in found] == expected[::-1] * 3

    def test_a_copy_reads_without_listing(self, source: Source) -> None:
        """A worker gets the keys from the driver."""
        keys = source.listing().keys.tolist()
        copy = self.copy_for_worker(source)
        for key in keys[:4]:
            assert _comparable(_bytes_or_fault(copy, key)) == _comparable(
                _bytes_or_fault(source, key)
            )

    def test_states_stay_as_long_as_the_images_do(self, source: Source) -> None:
        if not isinstance(source, Stateful):
            pytest.skip("the source knows no states")
        keys = source.listing().keys
        states, again = source.states(keys), source.states(keys)
        if states is None:
            assert again is None
            return
        assert again is not None
        assert states.shape == (len(keys),)
        assert states.dtype == IMAGE_STATE
        assert states.tobytes() == again.tobytes()
        assert _states_of(source, keys[:1]) == states[:1].tobytes()

    def test_an_image_that_can_be_read_has_a_state(self, source: Source) -> None:
        if not isinstance(source, Stateful):
            pytest.skip("the source knows no states")
        keys = source.listing().keys
        states = source.states(keys)
        if states is None:
            return
        for key, state in zip(keys.tolist(), states, strict=True):
            if isinstance(_bytes_or_fault(source, key), bytes):
                assert state != NO_STATE

    def test_views_lie_in_their_image_and_share_its_bytes(self, source: Source) -> None:
        if not isinstance(source, ViewSource):
            pytest.skip("the rows of the source are whole images")
        bytes_of: dict[bytes, object] = {}
        for key in source.listing().keys.tolist():
            if (box := source.view(key).box) is not None:
                assert min(box.x, box.y) >= 0
                assert min(box.width, box.height) > 0
            data = _comparable(_bytes_or_fault(source, key))
            assert bytes_of.setdefault(source.image_key(key), data) == data


def _bytes_or_fault(source: Source, key: bytes) -> bytes | ImageFault:
    """Bytes of an image, or why it has none."""
    try:
        return source.read(key)
    except ImageFault as fault:
        return fault


def _comparable(data: bytes | ImageFault) -> bytes | tuple[Status, str]:
    """Bytes, or status and message of a fault; two exceptions are never equal themselves."""
    return (data.status, str(data)) if isinstance(data, ImageFault) else data


def _states_of(source: Stateful, keys: npt.NDArray[np.bytes_]) -> bytes:
    """States of some images as bytes, empty if they are unknown."""
    states = source.states(keys)
    return b"" if states is None else states.tobytes()


def _as_plain(listing: Listing) -> dict[str, object]:
    """Values of a listing in types that compare with ==."""
    return {
        "keys": listing.keys.tolist(),
        "labels": listing.labels.tolist(),
        "classes": tuple(listing.classes),
        "skipped": dict(listing.skipped),
        "warnings": listing.warnings,
        "content tags": None if listing.content_tags is None else listing.content_tags.tolist(),
        # As bytes: NaN, a missing number, differs from itself.
        "columns": {name: values.tobytes() for name, values in listing.columns.items()},
    }
