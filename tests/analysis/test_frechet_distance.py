"""featx.frechet_distance: from files, of the one layer, and of what can be compared only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_stats_run import matrix, take
from tiny_model import extract

import featx
from featx.errors import ConfigError, LayerError, StoreError, StoreMismatchError

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.mark.slow
def test_it_is_the_distance_of_the_extracted_matrices(photos: Path) -> None:
    few = {"name": "folder", "root": str(photos), "limit": 9}
    x = matrix(extract(photos, dtype="float32", layers=["pool"], pack=False), "pool")
    a = take(photos, out="all", layers=["pool"])
    take(few, out="few", layers=["pool"])
    found = featx.frechet_distance(a, "few")
    one, other = np.cov(x, rowvar=False), np.cov(x[:9], rowvar=False)
    # The eigenvalues of a product of covariances are real and not negative.
    root_trace = np.sqrt(np.linalg.eigvals(one @ other).real.clip(0)).sum()
    shift = np.square(x.mean(0) - x[:9].mean(0)).sum()
    expected = shift + np.trace(one) + np.trace(other) - 2 * root_trace
    assert found == pytest.approx(expected, rel=1e-6)
    assert featx.frechet_distance(Path("few/stats.h5"), "all", "pool") == pytest.approx(found)
    assert featx.frechet_distance("all", a) == pytest.approx(0, abs=1e-10)


@pytest.mark.slow
def test_what_cannot_be_compared(photos: Path) -> None:
    take(photos, out="two", layers=["pool", "conv"], reduce="flatten")
    take(photos, out="deep", layers=["deep"])
    take(photos, out="pool", layers=["pool"], reduce="avg")
    take(photos, out="diagonal", layers=["pool"], reduce="avg", stats={"covariance": "diagonal"})
    with pytest.raises(ConfigError, match=r"name the layer: .* in common: pool, conv"):
        featx.frechet_distance("two", "two")
    with pytest.raises(ConfigError, match="in common: none"):
        featx.frechet_distance("two", "deep")
    with pytest.raises(LayerError, match="no statistics of 'pool'"):
        featx.frechet_distance("two", "deep", "pool")
    with pytest.raises(StoreMismatchError, match="reduce: 'flatten' and 'avg'"):
        featx.frechet_distance("two", "pool")
    with pytest.raises(ConfigError, match="hold its diagonal"):
        featx.frechet_distance("pool", "diagonal")
    with pytest.raises(StoreError, match="no statistics file nowhere"):
        featx.frechet_distance("pool", "nowhere")
