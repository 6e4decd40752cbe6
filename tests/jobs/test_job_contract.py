"""Every job passes the contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from featx.testing import JobContract

IMAGES = ("data=folder", "data.root=images", "max_failures=1")
STORE = ("store=store",)


class _Job(JobContract):
    arguments: ClassVar[tuple[str, ...]] = STORE

    @pytest.fixture
    def overrides(self) -> Sequence[str]:
        return self.arguments


class TestStatus(_Job):
    name = "status"


@pytest.mark.slow
class TestExtract(_Job):
    name = "extract"
    prints_json = False
    arguments = (*JobContract.model, *IMAGES, "part_rows=2", "layers=[head]", "out=new")


@pytest.mark.slow
class TestPlan(_Job):
    name = "plan"
    arguments = (*JobContract.model, *IMAGES, "part_rows=2", "layers=[head]", "out=new")


@pytest.mark.slow
class TestLayers(_Job):
    name = "layers"
    arguments = JobContract.model[:5]


@pytest.mark.slow
class TestStats(_Job):
    name = "stats"
    arguments = (*JobContract.model, *IMAGES, "layers=[head]", "out=statistics")


@pytest.mark.slow
class TestAttribute(_Job):
    name = "attribute"
    prints_json = False
    arguments = (
        *JobContract.model,
        *IMAGES,
        "part_rows=2",
        "out=maps",
        "attribute.method=[saliency]",
    )


@pytest.mark.slow
class TestVerify(_Job):
    name = "verify"


@pytest.mark.slow
class TestPack(_Job):
    name = "pack"
    prints_json = False


@pytest.mark.slow
class TestExport(_Job):
    name = "export"
    arguments = (*STORE, "export.format=npy")


@pytest.mark.slow
class TestCka(_Job):
    name = "cka"


@pytest.mark.slow
class TestDistance(_Job):
    name = "distance"
    arguments = (*STORE, "distance.other_store=store", "distance.subsets=2")


@pytest.mark.slow
class TestDuplicates(_Job):
    name = "duplicates"
    arguments = (*STORE, "layers=head")


@pytest.mark.slow
class TestOutliers(_Job):
    name = "outliers"
    arguments = (*STORE, "layers=head")


@pytest.mark.slow
class TestMislabelled(_Job):
    name = "mislabelled"
    arguments = (*STORE, "layers=head")


@pytest.mark.slow
class TestCompare(_Job):
    name = "compare"


@pytest.mark.slow
class TestNeighbors(_Job):
    name = "neighbors"
    arguments = (*STORE, "layers=head")
