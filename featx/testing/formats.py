"""Contracts of codecs and of export formats."""

from __future__ import annotations

import hashlib
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest

import featx
from featx.errors import StoreMismatchError
from featx.export import run_export
from featx.jobs import config_of_call
from featx.testing.tiny_extraction import extract, write_images
from featx.types import Array

_CHUNK_ROWS = 16


class CodecContract:
    """Tests of the HDF5 filters of a codec; a subclass overrides the fixture `filters`."""

    @pytest.fixture
    def filters(self) -> Mapping[str, object]:
        """Keyword arguments of h5py's `create_dataset`."""
        raise NotImplementedError("override the fixture `filters`: it returns a mapping")

    @pytest.mark.parametrize("content", ["random bits", "zeros", "NaN", "sparse"])
    @pytest.mark.parametrize("dtype", ["<f2", "<f4", "<u2"], ids=["float16", "float32", "bfloat16"])
    def test_every_bit_comes_back(
        self, filters: Mapping[str, object], tmp_path: Path, dtype: str, content: str
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
        self, filters: Mapping[str, object], tmp_path: Path
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
        self, filters: Mapping[str, object], tmp_path: Path
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


class ExportContract:
    """Tests of an export format; a subclass overrides `export_options` and `read_rows`.

    Attributes:
        layers: layers of the store to export: 'stem' has rows of (8, 4, 4), 'head' of (4,).
        rtol: relative error of the values, for formats that write decimal text.
        has_fixed_bytes: whether the same store gives the same bytes; not so for formats whose
            library invents names or times.
        is_opened_by_code: whether `opening` returns Python code, and not a sentence for people who
            open the export with another program.
    """

    layers: tuple[str, ...] = ("stem", "head")
    rtol = 0.0
    has_fixed_bytes = True
    is_opened_by_code = True

    @pytest.fixture(scope="class")
    @classmethod
    def export_options(cls) -> Mapping[str, Any]:
        """Option group `export`, such as {'format': 'npy'}."""
        raise NotImplementedError("override the fixture `export_options`: it returns the options")

    def exported_rows(self, store: featx.FeatureStore) -> npt.NDArray[np.int64]:
        """Return the rows of the store that the format holds; all, also those that failed."""
        return np.arange(len(store))

    def exported_values(self, rows: Array) -> Array:
        """Return (n, ...) rows of the store as the format holds them; unchanged by default."""
        return rows

    def read_rows(self, folder: Path, layer: str) -> Array:
        """Return (n, ...) values of a layer in an export, read with the format's own library."""
        raise NotImplementedError("override the method `read_rows`: it returns an array")

    @pytest.fixture(scope="class")
    @classmethod
    def store(cls, tmp_path_factory: pytest.TempPathFactory) -> featx.FeatureStore:
        """Store of six rows in float32, one of which failed."""
        folder = tmp_path_factory.mktemp("store")
        return extract(write_images(folder / "images"), folder / "store", dtype="float32")

    @pytest.fixture(scope="class")
    @classmethod
    def other_store(cls, tmp_path_factory: pytest.TempPathFactory) -> featx.FeatureStore:
        """Store of the first three of these rows."""
        folder = tmp_path_factory.mktemp("other")
        images = write_images(folder / "images")
        data = {"name": "folder", "root": str(images), "limit": 3}
        return extract(images, folder / "store", data=data, dtype="float32")

    @pytest.fixture(scope="class")
    @classmethod
    def exported(
        cls,
        store: featx.FeatureStore,
        export_options: Mapping[str, Any],
        tmp_path_factory: pytest.TempPathFactory,
    ) -> Path:
        """Folder of a complete export."""
        return cls._export(store, export_options, tmp_path_factory.mktemp("exported") / "out")

    def test_every_row_comes_back_in_order(self, store: featx.FeatureStore, exported: Path) -> None:
        """A failed row is NaN and moves no other row."""
        for layer in self.layers:
            found = self.read_rows(exported, layer)
            expected = self.exported_values(store[layer][:][self.exported_rows(store)])
            np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=self.rtol)

    def test_the_same_store_gives_the_same_files(
        self,
        store: featx.FeatureStore,
        export_options: Mapping[str, object],
        exported: Path,
        tmp_path: Path,
    ) -> None:
        again = self._export(store, export_options, tmp_path / "out")
        if self.has_fixed_bytes:
            assert _digests(again) == _digests(exported)
        for layer in self.layers:
            found = self.read_rows(again, layer)
            np.testing.assert_array_equal(found, self.read_rows(exported, layer))

    def test_a_lost_file_is_written_again(
        self,
        store: featx.FeatureStore,
        export_options: Mapping[str, Any],
        exported: Path,
        tmp_path: Path,
    ) -> None:
        """As after a run that was killed; files that are complete are left as they are."""
        out = self._export(store, export_options, tmp_path / "out")
        before = _digests(out)
        lost = max(before)
        (out / lost).unlink()
        after = _digests(self._export(store, export_options, out))
        if self.has_fixed_bytes:
            assert after == before
        for layer in self.layers:
            expected = self.exported_values(store[layer][:][self.exported_rows(store)])
            found = self.read_rows(out, layer)
            np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=self.rtol)

    def test_another_store_is_refused(
        self,
        store: featx.FeatureStore,
        other_store: featx.FeatureStore,
        export_options: Mapping[str, object],
        tmp_path: Path,
    ) -> None:
        out = self._export(store, export_options, tmp_path / "out")
        before = _digests(out)
        with pytest.raises(StoreMismatchError, match="an export of something else"):
            self._export(other_store, export_options, out)
        assert _digests(out) == before

    def test_its_lines_of_code_open_the_export(
        self,
        store: featx.FeatureStore,
        export_options: Mapping[str, Any],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """From any folder, and whatever the name of the export."""
        out = tmp_path / 'a "quoted" folder'
        lines = self._summary(store, export_options, out)["opening"]
        assert lines
        if not self.is_opened_by_code:
            return
        script = tmp_path / "elsewhere" / "opening.py"
        script.parent.mkdir()
        script.write_text(lines, encoding="utf-8")
        monkeypatch.chdir(script.parent)
        assert runpy.run_path(str(script))

    @classmethod
    def _export(
        cls, store: featx.FeatureStore, export_options: Mapping[str, Any], out: Path
    ) -> Path:
        """Run job=export and return its folder."""
        return Path(cls._summary(store, export_options, out)["folder"])

    @classmethod
    def _summary(
        cls, store: featx.FeatureStore, export_options: Mapping[str, object], out: Path
    ) -> dict[str, Any]:
        """Run job=export and return its result."""
        keywords = {
            "store": str(store.root),
            "layers": list(cls.layers),
            "export": dict(export_options),
            "out": str(out),
        }
        config, _ = config_of_call("export", keywords)
        return run_export(config)


def _values(content: str, shape: tuple[int, ...], dtype: str) -> Array:
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


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of an export by its path, without the record of the export."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(("_export", "."))
    }
