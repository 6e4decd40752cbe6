"""Every reduction passes the contract, on maps and on tokens."""

from __future__ import annotations

import pytest

from featx.config import ReduceConfig, make_reduce
from featx.layers import Reduction, RowLayout, reduction
from featx.testing import ReductionContract

MAP, TOKENS = (6, 8, 8), (1 + 16, 6)
"""Rows of an input of 32 by 32 pixels: 6 channels, and a class token before 4 x 4 patches."""

CASES = {
    "none": (ReduceConfig("none"), MAP),
    "flatten": (ReduceConfig("flatten"), MAP),
    "avg of a map": (ReduceConfig("avg"), MAP),
    "avg of tokens": (ReduceConfig("avg"), TOKENS),
    "max of a map": (ReduceConfig("max"), MAP),
    "max of tokens": (ReduceConfig("max"), TOKENS),
    "gem of a map": (make_reduce("gem", p=3.0), MAP),
    "gem of tokens": (make_reduce("gem", p=3.0), TOKENS),
    "cls": (ReduceConfig("cls"), TOKENS),
    "patch_avg": (ReduceConfig("patch_avg"), TOKENS),
    "grid of a map": (make_reduce("grid", size=2), MAP),
    "align of a map": (make_reduce("align", rows=5, columns=5, pool=3), MAP),
    "align of tokens": (make_reduce("align", rows=5, columns=5), TOKENS),
    "sample of a map": (make_reduce("sample", k=5), MAP),
    "sample of tokens": (make_reduce("sample", k=5), TOKENS),
    "grid of tokens": (make_reduce("grid", size=2), TOKENS),
    "grid of rows and columns": (make_reduce("grid", rows=3, columns=5), MAP),
    "map of a map": (make_reduce("map"), MAP),
    "map of tokens": (make_reduce("map"), TOKENS),
}


@pytest.mark.parametrize("case", CASES)
class TestReductions(ReductionContract):
    @pytest.fixture
    def row_shape(self, case: str) -> tuple[int, ...]:
        return CASES[case][1]

    @pytest.fixture
    def reduction(self, case: str, row_shape: tuple[int, ...]) -> Reduction:
        return reduction(CASES[case][0], RowLayout("layer", row_shape, (32, 32), 1))
