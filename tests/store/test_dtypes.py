"""The number types: what HDF5 holds is what plain h5py reads, bit for bit."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from featx.errors import StoreError
from featx.store import dtypes, layout

EVERY_16_BITS = np.arange(1 << 16, dtype=np.uint16)


def write(path: Path, raw: np.ndarray, kind: h5py.h5t.TypeID) -> None:
    with h5py.File(path, "w", libver=layout.LIBVER) as file:
        made = h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple(raw.shape))
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, raw, mtype=kind)


def test_every_bfloat16_is_read_by_plain_h5py_as_the_float32_it_is(tmp_path: Path) -> None:
    write(tmp_path / "x.h5", EVERY_16_BITS, dtypes.hdf5_type("bfloat16"))
    with h5py.File(tmp_path / "x.h5") as file:
        read = file["x"][:]
    assert read.dtype == np.float32
    expected = (EVERY_16_BITS.astype(np.uint32) << 16).view(np.float32)
    assert np.isinf(expected).sum() == 2
    nan = np.isnan(expected)
    assert nan.sum() == 254
    assert np.array_equal(np.isnan(read), nan)
    # Bits, so that -0.0 is not 0.0 and a subnormal is not flushed.
    assert np.array_equal(read.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])
    assert np.array_equal(
        dtypes.from_raw(EVERY_16_BITS, "bfloat16").view(np.uint32), expected.view(np.uint32)
    )


def test_the_file_of_a_bfloat16_is_one_that_hdf5_1_10_reads(tmp_path: Path) -> None:
    write(tmp_path / "x.h5", EVERY_16_BITS, dtypes.hdf5_type("bfloat16"))
    superblock_version = (tmp_path / "x.h5").read_bytes()[8]
    assert superblock_version <= 3
    with h5py.File(tmp_path / "x.h5") as file:
        # 1.10 knows float types of any layout; it has no class for complex or tiny predefined ones.
        assert file["x"].id.get_type().get_class() == h5py.h5t.FLOAT
        assert file["x"].id.get_type().get_fields() == (15, 7, 8, 0, 7)
        assert file["x"].id.get_type().get_ebias() == 127


@pytest.mark.parametrize(
    "dtype", [">f2", ">f4", "<f8", "<i2", "<u2", "<i4", "S4", "<c8", "bool"], ids=str
)
def test_any_other_type_is_refused_by_name(tmp_path: Path, dtype: str) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = file.create_dataset("odd", data=np.zeros(3, dtype))
        with pytest.raises(StoreError, match=r"/odd holds .*expected one of float16"):
            dtypes.dtype_name(dataset)


def other_16_bits(fields: tuple[int, ...], bias: int, order: int) -> h5py.h5t.TypeID:
    kind = h5py.h5t.IEEE_F16LE.copy()
    kind.set_fields(*fields)
    kind.set_ebias(bias)
    kind.set_order(order)
    return kind


@pytest.mark.parametrize(
    ("fields", "bias", "order"),
    [
        ((15, 7, 8, 0, 7), 126, h5py.h5t.ORDER_LE),
        ((15, 7, 8, 0, 7), 127, h5py.h5t.ORDER_BE),
        ((15, 8, 7, 0, 8), 127, h5py.h5t.ORDER_LE),
    ],
    ids=["another bias", "big-endian", "another exponent"],
)
def test_a_type_that_h5py_shows_alike_is_refused(
    tmp_path: Path, fields: tuple[int, ...], bias: int, order: int
) -> None:
    write(tmp_path / "x.h5", EVERY_16_BITS, other_16_bits(fields, bias, order))
    with h5py.File(tmp_path / "x.h5") as file, pytest.raises(StoreError, match="expected one of"):
        dtypes.dtype_name(file["x"])
