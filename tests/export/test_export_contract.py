"""Every export format passes the contract."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reading_back import READERS

import featx
from featx.testing import ExportContract


class _Format(ExportContract):
    kind: str

    @pytest.fixture(scope="class")
    @classmethod
    def export_options(cls) -> Mapping[str, Any]:
        return {"format": cls.kind}

    def read_rows(self, folder: Path, layer: str) -> np.ndarray:
        return READERS[self.kind](folder).layers[layer]


class TestNpy(_Format):
    kind = "npy"


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


class TestProjector(_Format):
    kind = "projector"
    layers = ("head",)
    rtol = 1e-5
    is_opened_by_code = False

    @pytest.fixture(scope="class")
    @classmethod
    def export_options(cls) -> Mapping[str, Any]:
        return {"format": "projector", "ok_only": True}

    def exported_rows(self, store: featx.FeatureStore) -> np.ndarray:
        return np.flatnonzero(store.ok)
