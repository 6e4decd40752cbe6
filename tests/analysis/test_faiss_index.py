"""Nearest rows by an index of faiss against the exact ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_store import make_run

import featx
from featx.errors import ConfigError, LayerError, MissingExtraError
from featx.similarity import Neighbours, RowIndex, nearest_rows
from featx.store import FeatureStore

pytestmark = pytest.mark.usefixtures("in_tmp_path", "one_thread")


def clusters(num_rows: int, failed: tuple[int, ...] = (3, 40)) -> FeatureStore:
    """Rows around 40 centres, five numbers each."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(40, 5))
    flat = centres[rng.integers(0, 40, num_rows)] + 0.3 * rng.normal(size=(num_rows, 5))
    run = make_run(num_rows, 1024, {"flat": (5,)}, failed=failed)
    run = replace(run, features={"flat": flat.astype(np.float32)})
    return featx.open(run.copied(Path("store")))


def share_found(store: FeatureStore, found: Neighbours, k: int) -> float:
    exact = nearest_rows(store, "flat", k, found.metric, device="cpu")
    pairs = zip(found.neighbours, exact.neighbours, strict=True)
    return float(np.mean([len(np.intersect1d(mine, theirs)) / k for mine, theirs in pairs]))


class TestWithFaiss:
    @pytest.fixture
    def faiss_installed(self) -> None:
        pytest.importorskip("faiss", reason="no faiss: featx[faiss] has it")

    @pytest.mark.slow
    @pytest.mark.parametrize(("metric", "kept"), [("cosine", True), ("euclidean", False)])
    def test_the_recall_it_tells_is_that_of_all_rows(
        self, metric: str, kept: bool, set_block_sizes: Callable[..., None]
    ) -> None:
        if not kept:
            set_block_sizes(1 << 19, keep_bytes=3000 * 20)  # read block by block
        store = clusters(4000)
        made = RowIndex(store, "flat", 0.9, 5, metric, device="cpu")
        found = made.nearest_rows()
        assert np.array_equal(found.rows, np.flatnonzero(store.ok))
        assert found.metric == metric
        assert 1 <= made.num_probed_lists < made.num_lists
        share = share_found(store, found, 5)
        assert 0.88 < share < 1
        assert made.recall == pytest.approx(share, abs=0.02)
        assert made.num_measured_rows == 1000

    @pytest.mark.parametrize("metric", ["cosine", "euclidean"])
    def test_it_is_the_exact_search_where_all_lists_are_searched(self, metric: str) -> None:
        store = clusters(900)
        made = RowIndex(store, "flat", 0.5, 6, metric, device="cpu")
        made.num_probed_lists = made.num_lists
        found, output = made.nearest_rows(), nearest_rows(store, "flat", 6, metric, device="cpu")
        assert made.num_lists > 5
        assert np.array_equal(found.neighbours, output.neighbours)
        assert np.allclose(found.scores, output.scores, atol=1e-6)

    def test_a_row_is_not_its_own_neighbour_and_copies_are(self) -> None:
        run = make_run(300, 64, {"flat": (5,)})
        flat = run.features["flat"].copy()
        flat[[7, 90, 250]] = flat[20]
        store = featx.open(replace(run, features={"flat": flat}).write(Path("store")))
        found = RowIndex(store, "flat", 0.9, 3, device="cpu").nearest_rows()
        assert not (found.neighbours == found.rows[:, None]).any()
        assert found.neighbours[[7, 20, 90, 250]].tolist() == [
            [20, 90, 250], [7, 90, 250], [7, 20, 250], [7, 20, 90],
        ]  # fmt: skip

    def test_rows_whose_lists_are_too_small_are_searched_exactly(self) -> None:
        store = clusters(400)
        made = RowIndex(store, "flat", 0.5, 350, device="cpu")
        made.num_probed_lists = 1  # no list has 350 rows
        found = made.nearest_rows()
        exact = nearest_rows(store, "flat", 350, device="cpu")
        assert np.array_equal(found.neighbours, exact.neighbours)

    def test_the_seed_decides(self) -> None:
        store = clusters(4000)
        found = [
            RowIndex(store, "flat", 0.6, 5, seed=seed, device="cpu").nearest_rows().neighbours
            for seed in (0, 0, 1)
        ]
        assert np.array_equal(found[0], found[1])
        assert not np.array_equal(found[0], found[2])

    def test_few_rows(self) -> None:
        store = featx.open(make_run(4, 4, {"flat": (5,)}, failed=[2]).write(Path("store")))
        output: list[int] = []
        made = RowIndex(store, "flat", 0.99, 10, device="cpu")
        found = made.nearest_rows(output.append)
        assert (made.num_lists, made.num_probed_lists, made.recall) == (1, 1, 1.0)
        assert np.array_equal(
            found.neighbours, nearest_rows(store, "flat", device="cpu").neighbours
        )
        assert output == [3]

    def test_what_cannot_be_asked_is_refused(self) -> None:
        store = clusters(50)
        for recall in (0.0, 1.0, float("nan")):
            with pytest.raises(ConfigError, match="expected a share between 0 and 1"):
                RowIndex(store, "flat", recall, device="cpu")
        with pytest.raises(ConfigError, match="metric=dot"):
            RowIndex(store, "flat", 0.9, metric="dot", device="cpu")
        with pytest.raises(LayerError, match="no layer 'flt'"):
            RowIndex(store, "flt", 0.9, device="cpu")


def test_without_faiss_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = clusters(50)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingExtraError, match=r'pip install "featx\[faiss\]"') as missing:
        RowIndex(store, "flat", 0.9, device="cpu")
    assert missing.value.exit_code == 2
