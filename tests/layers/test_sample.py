"""reduce=sample: tokens of a store are those of the unreduced layer at their positions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featx
from featx.base import sampled_positions
from featx.config import make_reduce
from featx.errors import ConfigError, ReduceError, StoreError, StoreMismatchError
from featx.layers import RowLayout, TokenSample, reduction
from featx.testing.tiny_extraction import extract, options, write_images

SAMPLE = {"name": "sample", "k": 5, "seed": 3}


def bound(shape: tuple[int, ...], prefix: int = 1, **options: Any) -> TokenSample:
    found = reduction(make_reduce("sample", **options), RowLayout("layer", shape, (32, 32), prefix))
    assert isinstance(found, TokenSample)
    return found


class TestFunction:
    KEYS = (b"a.jpg", b"\xff.jpg", b"c/d.jpg")

    def test_patches_are_gathered_without_class_and_register_tokens(self) -> None:
        x = torch.randn(3, 18, 5)
        found = bound((18, 5), prefix=2, k=3, seed=4)(x, self.KEYS)
        at = sampled_positions(self.KEYS, 4, 16, 3) + 2
        assert np.array_equal(found.numpy(), np.take_along_axis(x.numpy(), at[:, :, None], 1))

    def test_all_tokens_may_be_chosen(self) -> None:
        x = torch.randn(3, 17, 5)
        assert torch.equal(bound((17, 5), k=17, candidates="all")(x, self.KEYS), x)
        assert torch.equal(bound((17, 5), k=16)(x, self.KEYS), x[:, 1:])

    @pytest.mark.parametrize("channels_last", [False, True])
    def test_positions_of_a_map_are_in_row_major_order(self, channels_last: bool) -> None:
        x = torch.randn(3, 6, 4, 4)
        given = x.movedim(1, -1) if channels_last else x
        found = bound(tuple(given.shape[1:]), k=5)(given, self.KEYS)
        tokens = x.reshape(3, 6, 16).transpose(1, 2).numpy()
        at = sampled_positions(self.KEYS, 0, 16, 5)
        assert np.array_equal(found.numpy(), np.take_along_axis(tokens, at[:, :, None], 1))

    def test_what_does_not_fit_is_refused(self) -> None:
        with pytest.raises(ReduceError, match=r"reduce\.k=17 is more than its 16 tokens"):
            bound((17, 5), k=17)
        with pytest.raises(
            ReduceError, match=r"not 1 prefix tokens and a grid.*reduce\.candidates=all"
        ):
            bound((16, 5), k=3)
        with pytest.raises(ReduceError, match=r"shape \(5,\)"):
            bound((5,), k=3)
        with pytest.raises(ConfigError, match=r"reduce\.k=0"):
            make_reduce("sample", k=0)
        with pytest.raises(ConfigError, match=r"reduce\.candidates=patch: .*patches"):
            make_reduce("sample", candidates="patch")


def store_of(out: str, **options: Any) -> featx.FeatureStore:
    """The maps (8, 4, 4) of the layer `stem` of six images, one of which fails."""
    images = Path("images")
    if not images.exists():
        write_images(images)
    keys = {"layers": ["stem"], "dtype": "float32", **options}
    return extract(images, Path(out), **keys)


@pytest.fixture(scope="class")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Stores `whole` and `sampled` in the current folder."""
    with contextlib.chdir(tmp_path_factory.mktemp("stores")):
        store_of("whole")
        store_of("sampled", reduce=SAMPLE)
        yield


class TestStores:
    @pytest.mark.usefixtures("stores")
    def test_rows_are_tokens_of_the_unreduced_layer(self) -> None:
        whole, found = featx.open("whole"), featx.open("sampled")
        positions = found["stem"].positions()
        assert positions.shape == (6, 5)
        tokens = whole["stem"][:].reshape(6, 8, 16).transpose(0, 2, 1)
        expected = np.take_along_axis(tokens, positions[:, :, None], 1)
        assert np.array_equal(found["stem"][:], expected, equal_nan=True)
        assert np.array_equal(positions[2:4], found["stem"].positions(slice(2, 4)))
        with pytest.raises(StoreError, match=r"only tokens of reduce=sample"):
            whole["stem"].positions()

    @pytest.mark.usefixtures("stores")
    def test_another_sample_is_another_store(self) -> None:
        other = {**SAMPLE, "k": 4, "seed": 4, "candidates": "all"}
        with pytest.raises(StoreMismatchError) as error:
            store_of("sampled", reduce=other)
        for name in ("k", "seed", "candidates"):
            assert f"layer stem, reduce_args, {name}:" in str(error.value)
        assert str(error.value).count("the store has") == 4  # and the shape

    @pytest.mark.usefixtures("stores")
    def test_new_images_have_no_key_to_choose_by(self) -> None:
        with pytest.raises(StoreError, match="A new image has no key"):
            featx.embed([b""], "sampled")

    @pytest.mark.usefixtures("stores")
    def test_exports_hold_the_positions(self) -> None:
        import pyarrow.parquet as pq

        found = featx.open("sampled")["stem"].positions()
        for kind in ("npy", "parquet"):
            featx.export_store(store="sampled", export={"format": kind}, out=kind)
        assert np.array_equal(np.load("npy/positions/stem.npy"), found)
        column = pq.read_table("parquet/data")["stem.positions"].to_pylist()
        assert column == found.tolist()

    @pytest.mark.usefixtures("stores")
    def test_statistics_are_those_of_the_sampled_tokens(self) -> None:
        rows = featx.open("sampled")["stem"][:]
        asked = options(Path("images"), Path("stats"), layers=["stem"], reduce=SAMPLE)
        given = {name: value for name, value in asked.items() if name not in ("pack", "dtype")}
        found = featx.stats(**given, stats={"observation": "position"})
        ok = ~np.isnan(rows).any((1, 2))
        mean = rows[ok].reshape(-1, 8).astype(np.float64).mean(0)
        np.testing.assert_allclose(found["stem"].mean, mean, rtol=1e-4, atol=1e-6)
        with pytest.raises(ReduceError, match="tokens that reduce=sample chose"):
            store_of("pca", reduce={"name": "pca", "k": 2, "stats": "stats"})

    @pytest.mark.slow
    @pytest.mark.usefixtures("in_tmp_path")
    def test_batches_resumes_and_packing_change_nothing(self) -> None:
        expected = store_of("one", reduce=SAMPLE, batch_size=1, pack=True)
        again = store_of("many", reduce=SAMPLE, batch_size=4, part_rows=4)
        assert np.array_equal(again["stem"].positions(), expected["stem"].positions())
        np.testing.assert_allclose(again["stem"][:], expected["stem"][:], rtol=1e-5, atol=1e-6)
        before = again["stem"][:]
        next(Path("many/parts").glob("part-*0.h5")).unlink()
        Path("many/summary.json").unlink()
        resumed = store_of("many", reduce=SAMPLE, batch_size=4, part_rows=4)
        assert np.array_equal(resumed["stem"][:], before, equal_nan=True)

    @pytest.mark.usefixtures("in_tmp_path")
    def test_sampled_tokens_are_no_grid(self) -> None:
        from featx.torch import TokenDataset

        store_of("store", reduce={**SAMPLE, "k": 4})
        for arguments in ({}, {"tokens": "cls"}, {"tokens": "all", "prefix": 0}):
            with pytest.raises(ValueError, match="no grid: give tokens='all'"):
                TokenDataset("store", "stem", **arguments)
        assert TokenDataset("store", "stem", tokens="all").grid is None

    @pytest.mark.slow
    @pytest.mark.usefixtures("stores")
    def test_two_workers_give_the_same_bits(self) -> None:
        executor = {"name": "local", "workers": 2}
        found = store_of("two", reduce=SAMPLE, executor=executor)
        expected = featx.open("sampled")["stem"][:]
        assert np.array_equal(found["stem"][:], expected, equal_nan=True)
