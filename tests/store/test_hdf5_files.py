"""Small datasets and attributes are written by the low-level interface of h5py, as h5py does."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
import pytest

from featx.errors import StoreError
from featx.store import layout
from featx.store.hdf5_files import read_values, write_attributes, write_values

VALUES = {
    "checksums/a": np.arange(3, dtype=np.uint64),
    "checksums/lä.yer:x": np.array([b"text", b"t"]),
    "none": np.zeros(0, "S1"),
    "bits": np.arange(6, dtype=np.int64)[::2],
}

ATTRIBUTES = {
    "text": "wörds", "none": "", "complete": True, "start": 4, "p": 3.0, "size": [14, 14],
    "pair": (1, 2), "names": ["ä", "b"], "bytes": np.bytes_(b"\x00{}"), "sums": np.zeros((0, 3)),
    "turned": np.arange(6).reshape(2, 3).T,
}  # fmt: skip


def written(write: Callable[[h5py.File], None]) -> bytes:
    data = io.BytesIO()
    with h5py.File(data, "w", libver=layout.LIBVER) as file:
        file.create_group("checksums")
        write(file)
    return data.getvalue()


def test_the_bytes_are_those_that_h5py_writes() -> None:
    def by_h5py(file: h5py.File) -> None:
        for path, values in VALUES.items():
            file[path] = values
        file.attrs.update(ATTRIBUTES)
        file["bits"].attrs.update(ATTRIBUTES)

    def by_featx(file: h5py.File) -> None:
        for path, values in VALUES.items():
            write_values(file, path, values)
        write_attributes(file, ATTRIBUTES)
        write_attributes(file["bits"], ATTRIBUTES)

    data = written(by_featx)
    assert data == written(by_h5py)
    with h5py.File(io.BytesIO(data)) as file:
        for path, values in VALUES.items():
            assert file[path].dtype == values.dtype
            if len(values):
                assert np.array_equal(read_values(file, path), values)


@pytest.mark.parametrize("value", [np.uint64(3), h5py.Empty("f4")])
def test_a_dataset_without_rows_is_refused_as_damage(value: Any) -> None:
    """A file of a stranger may hold one where checksums are expected."""
    with h5py.File(io.BytesIO(), "w") as file:
        file["sums"] = value
        with pytest.raises(layout.UNREADABLE):
            len(read_values(file, "sums"))


def test_a_group_and_a_link_are_no_dataset() -> None:
    with h5py.File(io.BytesIO(), "w") as file:
        file.create_group("group")
        file["link"] = h5py.SoftLink("/group")
        for path, message in (("group", "it is no dataset"), ("link", "links to another object")):
            with pytest.raises(StoreError, match=message):
                read_values(file, path)
