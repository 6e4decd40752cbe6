"""Contract of codecs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest

_CHUNK_ROWS = 16


class CodecContract:
    """Tests of the HDF5 filters of a codec; a subclass overrides the fixture `filters`."""

    @pytest.fixture
    def filters(self) -> Mapping[str, Any]:
        """Keyword arguments of h5py's `create_dataset`."""
        raise NotImplementedError("override the fixture `filters`: it returns a mapping")

    @pytest.mark.parametrize("content", ["random bits", "zeros", "NaN", "sparse"])
    @pytest.mark.parametrize("dtype", ["<f2", "<f4", "<u2"], ids=["float16", "float32", "bfloat16"])
    def test_every_bit_comes_back(
        self, filters: Mapping[str, Any], tmp_path: Path, dtype: str, content: str
    ) -> None:
        """Also NaNs with a payload, and a last chunk that is not full."""
        values = _values(content, (2 * _CHUNK_ROWS + 3, 7, 5), dtype)
        path = tmp_path / "values.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset(
                "x", data=values, chunks=(_CHUNK_ROWS, *values.shape[1:]), **filters
            )
        with h5py.File(path) as file:
            found = file["x"]
            assert found.dtype == values.dtype
            assert found[...].tobytes() == values.tobytes()
            assert found[-2:].tobytes() == values[-2:].tobytes()

    def test_chunks_are_written_one_after_the_other(
        self, filters: Mapping[str, Any], tmp_path: Path
    ) -> None:
        values = _values("random bits", (3 * _CHUNK_ROWS, 40), "<f4")
        path = tmp_path / "values.h5"
        for start in range(0, len(values), _CHUNK_ROWS):
            with h5py.File(path, "a") as file:
                made = file.require_dataset(
                    "x", values.shape, values.dtype, chunks=(_CHUNK_ROWS, 40), **filters
                )
                made[start : start + _CHUNK_ROWS] = values[start : start + _CHUNK_ROWS]
        with h5py.File(path) as file:
            assert file["x"][...].tobytes() == values.tobytes()

    def test_a_row_that_was_never_written_reads_as_the_fill_value(
        self, filters: Mapping[str, Any], tmp_path: Path
    ) -> None:
        """Rows of failed images are NaN."""
        path = tmp_path / "values.h5"
        with h5py.File(path, "w") as file:
            made = file.create_dataset(
                "x", (40, 3), "<f4", chunks=(_CHUNK_ROWS, 3), fillvalue=np.nan, **filters
            )
            made[:2] = 1
        with h5py.File(path) as file:
            assert np.isnan(file["x"][2:]).all()
            assert (file["x"][:2] == 1).all()


def _values(content: str, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
    """Array of some content; uint16 holds the bits of bfloat16."""
    rng = np.random.default_rng(7)
    kind = np.dtype(dtype)
    if content == "random bits":
        count = int(np.prod(shape))
        return np.frombuffer(rng.bytes(count * kind.itemsize), kind).reshape(shape)
    if content == "NaN":
        return np.full(shape, 0x7FC0 if kind.kind == "u" else np.nan, kind)
    if content == "sparse":
        return np.maximum(rng.normal(size=shape) * 100 - 70, 0).astype(kind)
    return np.zeros(shape, kind)
