"""Every export format passes the contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from format_readers import READERS

import featx
from featx.testing import ExportContract
from featx.testing.tiny_extraction import extract, write_images


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Sequence[featx.FeatureStore]:
    """Stores of the contract, made once for all formats."""
    folder = tmp_path_factory.mktemp("stores")
    images = write_images(folder / "images")
    few = {"name": "folder", "root": str(images), "limit": 3}
    return (
        extract(images, folder / "store", dtype="float32"),
        extract(images, folder / "other", data=few, dtype="float32"),
    )


def extract_tiles(images: Path, out: Path, corners: tuple[int, ...]) -> featx.FeatureStore:
    """Store of tiles of each image, one for each pair of corners."""
    names = sorted(path.relative_to(images) for path in images.rglob("*.png"))
    lines = [f"{name},{x},{y},24,24" for name in names for x in corners for y in corners]
    boxes = out.with_suffix(".csv")
    boxes.write_text("\n".join(["path,x,y,width,height", *lines]))
    data = {"name": "folder", "root": str(images), "boxes": str(boxes)}
    return extract(images, out, data=data, dtype="float32", max_failures=4, part_rows=8)


@pytest.fixture(scope="module")
def tile_stores(tmp_path_factory: pytest.TempPathFactory) -> Sequence[featx.FeatureStore]:
    """Four tiles of each image, of which the second row has the first keys; one tile of each."""
    folder = tmp_path_factory.mktemp("tiles")
    images = write_images(folder / "images")
    return (
        extract_tiles(images, folder / "store", (16, 4)),
        extract_tiles(images, folder / "other", (4,)),
    )


class _Format(ExportContract):
    kind: str

    @pytest.fixture(scope="class")
    @classmethod
    def store(cls, stores: Sequence[featx.FeatureStore]) -> featx.FeatureStore:
        return stores[0]

    @pytest.fixture(scope="class")
    @classmethod
    def other_store(cls, stores: Sequence[featx.FeatureStore]) -> featx.FeatureStore:
        return stores[1]

    @pytest.fixture(scope="class")
    @classmethod
    def export_options(cls) -> Mapping[str, Any]:
        return {"format": cls.kind}

    def read_rows(self, folder: Path, layer: str) -> np.ndarray:
        return READERS[self.kind](folder).layers[layer]


class TestNpy(_Format):
    kind = "npy"


class TestCsv(_Format):
    kind = "csv"


class TestParquet(_Format):
    kind = "parquet"


class TestSafetensors(_Format):
    kind = "safetensors"


class TestZarr(_Format):
    kind = "zarr"


class TestHuggingFace(_Format):
    kind = "huggingface"


# webdataset leaves the files open that it has read.
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
class TestWebDataset(_Format):
    kind = "webdataset"


class _Vectors(_Format):
    """Formats of other tools: one vector per row, and no place for failed rows."""

    layers = ("head",)

    def exported_rows(self, store: featx.FeatureStore) -> np.ndarray:
        return np.flatnonzero(store.ok)


class _UnitVectors(_Vectors):
    def exported_values(self, rows: np.ndarray) -> np.ndarray:
        unit = rows.astype(np.float64)
        return unit / np.sqrt((unit**2).sum(1, keepdims=True))


class TestClipRetrieval(_UnitVectors):
    kind = "clip_retrieval"
    rtol = 1e-3


class TestHloc(_UnitVectors):
    kind = "hloc"
    rtol = 1e-3


class TestFaiss(_UnitVectors):
    kind = "faiss"
    rtol = 1e-6


class TestFiftyOne(_Vectors):
    kind = "fiftyone"
    is_opened_by_code = False  # fiftyone starts servers; test_fiftyone.py has its importer


class TestTrident(_Vectors):
    kind = "trident"

    @pytest.fixture(scope="class")
    @classmethod
    def export_options(cls) -> Mapping[str, Any]:
        return {"format": "trident", "magnification": 40}

    @pytest.fixture(scope="class")
    @classmethod
    def store(cls, tile_stores: Sequence[featx.FeatureStore]) -> featx.FeatureStore:
        return tile_stores[0]

    @pytest.fixture(scope="class")
    @classmethod
    def other_store(cls, tile_stores: Sequence[featx.FeatureStore]) -> featx.FeatureStore:
        return tile_stores[1]

    def exported_rows(self, store: featx.FeatureStore) -> np.ndarray:
        """Slides by name, their tiles by y and then x."""
        rows = np.flatnonzero(store.ok)
        at = [key.rpartition("#") for key in store.keys[rows]]
        places = [(Path(image).stem, *map(int, box.split(",")[1::-1])) for image, _, box in at]
        return rows[sorted(range(len(rows)), key=lambda i: places[i])]


class TestClam(TestTrident):
    kind = "clam"

    @pytest.fixture(scope="class")
    @classmethod
    def export_options(cls) -> Mapping[str, Any]:
        return {"format": "clam"}

    def read_rows(self, folder: Path, layer: str) -> np.ndarray:
        tensors = [torch.load(path) for path in sorted((folder / "pt_files").glob("*.pt"))]
        return torch.cat(tensors).numpy()
