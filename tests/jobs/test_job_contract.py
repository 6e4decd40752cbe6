"""Every job passes the contract."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from conftest import slow_except

from featx.testing import JobContract

IMAGES = ("data=folder", "data.root=images", "max_failures=1")
MODEL = (*JobContract.model, *IMAGES)
RUN = (*MODEL, "part_rows=2", "layers=[head]")
STORE = ("store=store",)
LAYER = (*STORE, "layers=head")

ARGUMENTS = {
    "attribute": (*MODEL, "part_rows=2", "out=maps", "attribute.method=[saliency]"),
    "cka": STORE,
    "compare": STORE,
    "distance": ("store=[store,store]",),
    "duplicates": LAYER,
    "export": (*STORE, "export.format=npy"),
    "extract": (*RUN, "out=new"),
    "layers": JobContract.model[:5],
    "mislabelled": LAYER,
    "neighbors": LAYER,
    "outliers": LAYER,
    "pack": STORE,
    "plan": (*RUN, "out=planned"),
    "stats": (*MODEL, "layers=[head]", "out=statistics"),
    "status": STORE,
    "verify": STORE,
}
WITHOUT_JSON = ("attribute", "extract", "pack")


@pytest.mark.parametrize("job", slow_except(ARGUMENTS, "status"))
class TestJobs(JobContract):
    @pytest.fixture
    def overrides(self, job: str) -> Sequence[str]:
        self.name = job
        self.prints_json = job not in WITHOUT_JSON
        return ARGUMENTS[job]
