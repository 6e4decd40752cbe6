"""featx.similarity against direct computation with numpy, scipy and scikit-learn."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal, localcontext
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import scipy.spatial.distance
import scipy.stats
import torch
from made_store import MadeRun, make_run, ok_vectors
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import StandardScaler

import featx
from featx.analysis import LayerRows, LayerVectors
from featx.analysis.similarity import (
    cosines_to_first,
)
from featx.errors import ConfigError, LayerError, StoreError
from featx.similarity import (
    data_set_distance,
    duplicate_groups,
    find_outliers,
    layer_similarity,
    linear_cka,
    nearest_rows,
    nearest_to,
    procrustes_distance,
    rsa,
    svcca,
)

pytestmark = pytest.mark.usefixtures("in_tmp_path")

FAILED = (3, 10, 20, 41)


@pytest.fixture(params=["in pieces", "whole"])
def blocks(request: pytest.FixtureRequest, set_block_sizes: Callable[..., None]) -> None:
    """A few rows at a time and read again for every block, or all in memory."""
    if request.param == "in pieces":
        set_block_sizes(150, keep_bytes=0)


def write(run: MadeRun, root: str = "store", packed: bool = True) -> featx.FeatureStore:
    return featx.open(run.copied(Path(root), packed=packed))


def with_features(run: MadeRun, **features: np.ndarray) -> MadeRun:
    made = {name: values.astype(run.features[name].dtype) for name, values in features.items()}
    return replace(run, features={**run.features, **made})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_results_do_not_depend_on_the_default_type_of_torch(dtype: torch.dtype) -> None:
    store = write(make_run(60, 16, failed=FAILED))

    def results() -> list[np.ndarray]:
        nearest = nearest_rows(store, "map", k=6, standardise=True, device="cpu")
        outliers = find_outliers(store, "map", device="cpu")
        layers = layer_similarity(store, device="cpu").measures
        scores = [np.asarray(layers[name]) for name in sorted(layers)]
        return [nearest.neighbours, nearest.scores, outliers.distances, *scores]

    expected = results()
    torch.set_default_dtype(dtype)
    try:
        found = results()
    finally:
        torch.set_default_dtype(torch.float32)
    for mine, other in zip(found, expected, strict=True):
        assert np.array_equal(mine, other)


def test_functions_of_matrices_give_the_scores_of_layers() -> None:
    store = write(make_run(60, 16))
    x, y = store["map"][:], store["flat"][:]
    measures = layer_similarity(store, device="cpu").measures
    for name, score in (
        ("cka", linear_cka(x, y)),
        ("cka_debiased", linear_cka(x, y, debiased=True)),
        ("rsa", rsa(x, y)),
    ):
        assert score == pytest.approx(measures[name][0, 1], abs=1e-13)


def test_autocast_is_refused_or_without_effect() -> None:
    store = write(make_run(60, 16))
    x, y = store["map"][:], store["flat"][:]
    expected = linear_cka(x, y), rsa(x, y)
    tensors = torch.from_numpy(x).requires_grad_(), torch.from_numpy(y)
    assert (linear_cka(*tensors), rsa(*tensors)) == expected
    rounded = tensors[0].bfloat16()
    assert linear_cka(rounded, y) == linear_cka(rounded.detach().float().numpy(), y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (linear_cka(x, y), rsa(x, y)) == expected
        for function in (nearest_rows, find_outliers, duplicate_groups):
            with pytest.raises(ConfigError, match=r"autocast\('cpu'\) is enabled here"):
                function(store, "map", device="cpu")
        with torch.autocast("cpu", enabled=False):
            assert len(find_outliers(store, "map", device="cpu").distances) == 60


@pytest.mark.usefixtures("blocks")
class TestNeighbours:
    @pytest.mark.parametrize(
        ("metric", "layer", "dtype"),
        [("cosine", "map", "float32"), ("euclidean", "flat", "float16")],
    )
    def test_they_are_those_of_scikit_learn(self, metric: str, layer: str, dtype: str) -> None:
        store = write(make_run(60, 16, dtype=dtype, failed=FAILED), packed=dtype == "float16")
        found = nearest_rows(store, layer, k=6, metric=metric, device="cpu", standardise=False)
        X = ok_vectors(store, layer)
        ok = np.flatnonzero(store.ok)
        search = NearestNeighbors(metric=metric, algorithm="brute").fit(X.astype(np.float64))
        distances, places = search.kneighbors(n_neighbors=6)
        assert np.array_equal(found.rows, ok)
        assert np.array_equal(found.neighbours, ok[places])
        expected = 1 - distances if metric == "cosine" else distances
        assert np.allclose(found.scores, expected, atol=1e-6)

    def test_of_one_image_they_are_its_row_of_all(self) -> None:
        store = write(make_run(40, 16, failed=FAILED[:2]))
        every = nearest_rows(store, "flat", k=4, device="cpu")
        for place in (0, 5, 37):
            row = every.rows[place]
            found = nearest_rows(store, "flat", k=4, key=str(store.keys[row]), device="cpu")
            assert found.rows.tolist() == [row]
            assert np.array_equal(found.neighbours[0], every.neighbours[place])

    def test_a_row_is_not_its_own_neighbour_but_its_copy_is(self) -> None:
        run = make_run(30, 8)
        flat = run.features["flat"].copy()
        flat[17] = flat[4]
        flat[25] = 2 * flat[4]
        store = write(with_features(run, flat=flat))
        cosine = nearest_rows(store, "flat", k=2, device="cpu", standardise=False)
        assert cosine.neighbours[[4, 17, 25]].tolist() == [[17, 25], [4, 25], [4, 17]]
        assert cosine.scores[4].tolist() == pytest.approx([1, 1])
        assert not (cosine.neighbours == cosine.rows[:, None]).any()
        euclidean = nearest_rows(store, "flat", k=1, metric="euclidean", device="cpu")
        assert euclidean.neighbours[[4, 17], 0].tolist() == [17, 4]
        assert euclidean.scores[[4, 17], 0].tolist() == [0, 0]

    @pytest.mark.parametrize("metric", ["cosine", "euclidean"])
    def test_neighbours_behind_a_large_offset(self, metric: str) -> None:
        """The offset makes all cosines 1 - 1e-11; what the rows differ by is exact in float32."""
        rng = np.random.default_rng(0)
        run = make_run(48, 16)
        name = next(n for n, v in run.features.items() if v.dtype == np.float32)
        shape = run.features[name].shape
        x = 1e6 + 16 * rng.integers(-500, 500, shape)  # no distances are equal
        store = write(with_features(run, **{name: x}))
        found = nearest_rows(store, name, k=3, metric=metric, standardise=False)
        flat = x.reshape(len(x), -1)
        exact = scipy.spatial.distance.cdist(flat, flat, metric)
        np.fill_diagonal(exact, np.inf)
        assert found.neighbours.tolist() == np.argsort(exact, axis=1)[:, :3].tolist()

    @pytest.mark.parametrize("scale", [1e-30, 1e30])
    def test_squares_need_not_fit_into_float32(self, scale: float) -> None:
        run = make_run(40, 16)
        store = write(with_features(run, flat=scale * run.features["flat"].astype(np.float64)))
        found = nearest_rows(store, "flat", 6, "euclidean", device="cpu", standardise=False)
        x = ok_vectors(store, "flat").astype(np.float64)
        distances, places = NearestNeighbors(algorithm="brute").fit(x).kneighbors(n_neighbors=6)
        assert np.array_equal(found.neighbours, places)
        assert np.allclose(found.scores, distances, rtol=1e-5, atol=0)

    def test_a_value_that_is_not_finite_is_named(self) -> None:
        run = make_run(40, 16)
        flat = run.features["flat"].copy()
        row = int(np.flatnonzero(np.isfinite(flat).all(1))[9])
        flat[row, 1] = np.inf
        store = write(with_features(run, flat=flat))
        with pytest.raises(StoreError, match=f"row {row} .* of flat is marked ok"):
            nearest_rows(store, "flat", device="cpu")

    def test_neighbours_are_much_nearer_than_other_rows_are_far(self) -> None:
        """One row is a million times as long, and two clouds are far from each other."""
        flat = make_run(40, 16).features["flat"].copy()
        flat[20:] += 2000
        flat[5] *= 1e6
        store = write(with_features(make_run(40, 16), flat=flat))
        found = nearest_rows(store, "flat", 39, "euclidean", device="cpu", standardise=False)
        search = NearestNeighbors(algorithm="brute").fit(flat.astype(np.float64))
        distances, places = search.kneighbors(n_neighbors=39)
        assert np.array_equal(found.neighbours[:, :9], places[:, :9])
        assert np.allclose(found.scores, distances, rtol=1e-3, atol=0)
        nearest = nearest_rows(store, "flat", 3, "euclidean", device="cpu", standardise=False)
        assert np.array_equal(nearest.neighbours, places[:, :3])

    @pytest.mark.parametrize("metric", ["cosine", "euclidean"])
    def test_standardised_values_behind_an_offset(self, metric: str) -> None:
        """One value differs by the last bits of float32, another is the same in all rows."""
        run = make_run(40, 16)
        flat = run.features["flat"].copy()
        flat[:, 0] = np.float32(1e4) + np.spacing(np.float32(1e4)) * (np.arange(40) % 3)
        flat[:, 1] = 0.1
        store = write(with_features(run, flat=flat))
        found = nearest_rows(store, "flat", 39, metric, device="cpu")
        x = StandardScaler().fit_transform(flat.astype(np.float64))
        search = NearestNeighbors(metric=metric, algorithm="brute").fit(x)
        distances, _ = search.kneighbors(n_neighbors=39)
        expected = 1 - distances if metric == "cosine" else distances
        assert np.allclose(found.scores, expected, atol=1e-5)

    def test_large_numbers_and_zeros_have_cosines(self) -> None:
        run = make_run(6, 8)
        flat = run.features["flat"].copy()
        flat[0] = 0
        flat[1:] *= 1e30
        store = write(with_features(run, flat=flat))
        found = nearest_rows(store, "flat", k=5, device="cpu", standardise=False)
        assert np.isfinite(found.scores).all()
        assert found.scores[0].tolist() == [0] * 5

    def test_no_more_neighbours_than_rows(self) -> None:
        store = write(make_run(4, 4, failed=[2]))
        found = nearest_rows(store, "flat", k=10, device="cpu")
        assert found.neighbours.shape == (3, 2)
        assert 2 not in found.neighbours


def test_what_cannot_be_asked_is_refused() -> None:
    store = write(make_run(9, 4, failed=[3]))
    failed = str(store.keys[3])
    with pytest.raises(ConfigError, match="recorded as missing"):
        nearest_rows(store, "flat", key=failed, device="cpu")
    with pytest.raises(ConfigError, match=r"no row 'cat/0001\.jpg'.*Nearest"):
        nearest_rows(store, "flat", key="cat/0001.jpg", device="cpu")
    with pytest.raises(ConfigError, match="metric=dot"):
        nearest_rows(store, "flat", metric="dot", device="cpu")
    with pytest.raises(LayerError, match="no layer 'flt'"):
        nearest_rows(store, "flt", device="cpu")
    with pytest.raises(ConfigError, match="threshold=0: expected a number above 0"):
        duplicate_groups(store, "flat", 0, "cpu")
    for k in (0, -1, 2.5):
        for search in (
            nearest_rows,
            find_outliers,
            lambda *a, k: nearest_to(*a, np.ones((1, 5)), k),
        ):
            with pytest.raises(ConfigError, match=rf"k={k}: expected a whole number of at least 1"):
                search(store, "flat", k=k)
    assert nearest_to(store, "flat", np.ones((0, 5)), 3, device="cpu")[0].shape == (0, 3)
    with pytest.raises(ConfigError, match=r"subset_rows=0: expected a whole number"):
        data_set_distance(store, store, "flat", subset_rows=0)
    alone = write(make_run(2, 4, failed=[0]), "alone")
    with pytest.raises(ConfigError, match="one ok row only"):
        nearest_rows(alone, "flat", device="cpu")
    lost = make_run(9, 4)
    lost.features["flat"][5] = np.nan
    with pytest.raises(StoreError, match="lost row 5 of flat"):
        nearest_rows(write(lost, "lost"), "flat", device="cpu")


@pytest.mark.usefixtures("blocks")
class TestDuplicates:
    @pytest.mark.parametrize("threshold", [0.5, 0.9])
    def test_groups_are_the_connected_components(self, threshold: float) -> None:
        run = make_run(80, 16, {"flat": (3,)}, failed=FAILED)
        store = write(run)
        X = ok_vectors(store, "flat")
        cosines = 1 - scipy.spatial.distance.cdist(X, X, "cosine")
        linked = scipy.sparse.csr_matrix(cosines >= threshold)
        count, label = scipy.sparse.csgraph.connected_components(linked)
        ok = np.flatnonzero(store.ok)
        expected = [ok[label == i].tolist() for i in range(count)]
        expected = sorted(group for group in expected if len(group) > 1)
        found = duplicate_groups(store, "flat", threshold, "cpu", standardise=False)
        assert [group.tolist() for group in found] == expected
        assert 0 < len(expected) < 80

    def test_chains_become_one_group_whatever_their_order(self) -> None:
        angles = np.random.default_rng(1).permutation(60) * 0.05
        flat = np.stack([np.cos(angles), np.sin(angles)], 1)
        run = make_run(60, 16, {"flat": (2,)})
        store = write(with_features(run, flat=flat))
        reach = float(np.cos(0.0501))
        found = duplicate_groups(store, "flat", reach, "cpu", standardise=False)
        assert [len(group) for group in found] == [60]
        beyond = float(np.cos(0.0499))
        assert duplicate_groups(store, "flat", beyond, "cpu", standardise=False) == []

    def test_equal_rows_reach_a_threshold_of_one(self) -> None:
        run = make_run(40, 16)
        flat = run.features["flat"].copy()
        flat[[5, 11, 30]] = flat[2]
        flat[39] = 3 * flat[8]
        flat[[0, 1]] = 0  # no direction, so no cosine
        store = write(with_features(run, flat=flat))
        found = duplicate_groups(store, "flat", 1, "cpu", standardise=False)
        assert [group.tolist() for group in found] == [[2, 5, 11, 30], [8, 39]]
        rows = LayerRows(store, "flat", np.flatnonzero(store.ok))
        vectors = LayerVectors([rows], torch.device("cpu"), unit=True)
        assert cosines_to_first(vectors, found[0]).tolist() == pytest.approx([1] * 4)

    @pytest.mark.slow
    def test_copies_of_a_wide_map_are_found(self) -> None:
        """Sums of float32 err by more than 1e-6 there: copies were 0.99998 alike."""
        run = make_run(6, 8, {"flat": (802_816,)})
        draw = np.random.default_rng(3)
        flat = np.maximum(draw.standard_normal((6, 802_816)) + draw.random(802_816), 0)
        flat[5] = flat[1]
        flat[4] = 2 * flat[0]
        flat[3] = flat[2] + 0.005 * draw.standard_normal(802_816)
        store = write(with_features(run, flat=flat))
        found = duplicate_groups(store, "flat", 1, "cpu", standardise=False)
        assert [group.tolist() for group in found] == [[0, 4], [1, 5]]
        rows = LayerRows(store, "flat", np.flatnonzero(store.ok))
        vectors = LayerVectors([rows], torch.device("cpu"), unit=True)
        assert cosines_to_first(vectors, found[1]).tolist() == [1, 1]
        near = cosines_to_first(vectors, np.array([2, 3]))[1]
        a, b = store["flat"][2].astype(np.float64), store["flat"][3].astype(np.float64)
        exact = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        assert 0.9999 < near < 0.99999
        assert near == pytest.approx(exact, abs=1e-7)
        # As near to the threshold as float32 could not say, on both sides of it.
        for threshold, count in ((exact + 5e-7, 3), (exact + 2e-6, 2)):
            groups = duplicate_groups(store, "flat", threshold, "cpu", standardise=False)
            assert len(groups) == count


def direct_cka(x: np.ndarray, y: np.ndarray) -> float:
    """Kornblith's own form, in the space of features."""
    x, y = x - x.mean(0), y - y.mean(0)
    cross = np.linalg.norm(x.T @ y) ** 2
    return float(cross / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y)))


def direct_debiased_cka(x: np.ndarray, y: np.ndarray) -> float:
    """The unbiased HSIC of Song et al. (2012), term by term."""

    def hsic(k: np.ndarray, m: np.ndarray) -> float:
        n = len(k)
        k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
        ones = np.ones(n)
        first = np.trace(k @ m)
        second = (ones @ k @ ones) * (ones @ m @ ones) / ((n - 1) * (n - 2))
        third = 2 / (n - 2) * (ones @ k @ m @ ones)
        return float((first + second - third) / (n * (n - 3)))

    k, m = x @ x.T, y @ y.T
    return hsic(k, m) / np.sqrt(hsic(k, k) * hsic(m, m))


def direct_rsa(x: np.ndarray, y: np.ndarray, distance: str = "correlation") -> float:
    distances = [scipy.spatial.distance.pdist(z, distance) for z in (x, y)]
    return float(scipy.stats.spearmanr(*distances).statistic)


def exact_rsa(x: np.ndarray, y: np.ndarray) -> float:
    """With cosines of 50 digits."""

    def distances(z: np.ndarray) -> list[Decimal]:
        with localcontext(prec=50):
            rows = [[Decimal(float(value)) for value in row] for row in z]
            lengths = [sum(value * value for value in row).sqrt() for row in rows]
            return [
                1
                - sum(a * b for a, b in zip(rows[i], rows[j], strict=True))
                / (lengths[i] * lengths[j])
                for i in range(len(rows))
                for j in range(i + 1, len(rows))
            ]

    ranks = [
        scipy.stats.rankdata([each / max(d) for each in d]) for d in (distances(x), distances(y))
    ]
    return float(np.corrcoef(np.array(ranks, float))[0, 1])


class TestLayerSimilarity:
    @pytest.fixture
    def matrices(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(3)
        x = 1 + rng.normal(size=(40, 7))
        return x, np.tanh(x @ rng.normal(size=(7, 90))) + 0.3 * rng.normal(size=(40, 90))

    def test_functions_are_the_formulas(self, matrices: tuple[np.ndarray, np.ndarray]) -> None:
        x, y = matrices
        assert linear_cka(x, y) == pytest.approx(direct_cka(x, y), abs=1e-5)
        assert linear_cka(x, y, debiased=True) == pytest.approx(direct_debiased_cka(x, y), abs=1e-5)
        assert rsa(x, y, "cosine") == pytest.approx(direct_rsa(x, y, "cosine"), abs=1e-5)
        assert rsa(x, y) == pytest.approx(direct_rsa(x, y), abs=1e-5)
        assert abs(rsa(x, y) - rsa(x, y, "cosine")) > 0.01
        failed = x.copy()
        failed[3] = np.nan
        for measure in (linear_cka, rsa, svcca, procrustes_distance):
            with pytest.raises(ConfigError, match=r"1 of \d+ rows of the second matrix"):
                measure(x, failed)
        with pytest.raises(ConfigError, match="expected one of correlation, cosine"):
            rsa(x, y, "euclidean")
        assert 0.05 < direct_debiased_cka(x, y) < direct_cka(x, y) < 0.95

    def test_they_do_not_see_rotation_or_size(
        self, matrices: tuple[np.ndarray, np.ndarray]
    ) -> None:
        x, y = matrices
        turned = 3 * x @ np.linalg.qr(np.random.default_rng(0).normal(size=(7, 7)))[0]
        for measure in (linear_cka, lambda a, b: rsa(a, b, "cosine")):
            assert measure(x, turned) == pytest.approx(1, abs=1e-5)
            assert measure(turned, y) == pytest.approx(measure(x, y), abs=1e-5)
        assert linear_cka(x + 5, y) == pytest.approx(linear_cka(x, y), abs=1e-5)

    @pytest.mark.parametrize("offset", [1e3, 1e6, 1e9])
    def test_an_offset_takes_no_digits(
        self, matrices: tuple[np.ndarray, np.ndarray], offset: float
    ) -> None:
        # Steps of 2^-20: with each offset they are exact in float64.
        x, y = (np.round(z * 2**20) / 2**20 for z in matrices)
        away = x + offset
        assert linear_cka(away, y) == pytest.approx(direct_cka(x, y), abs=1e-5)
        debiased = linear_cka(away, y, debiased=True)
        assert debiased == pytest.approx(direct_debiased_cka(x, y), abs=1e-5)
        if offset < 1e9:  # where cosines are equal but for 1e-18, no float64 tells them apart
            assert rsa(away, y, "cosine") == pytest.approx(exact_rsa(away, y), abs=1e-4)
        assert rsa(away, y) == pytest.approx(direct_rsa(x, y), abs=1e-4)

    @pytest.mark.usefixtures("blocks")
    def test_an_offset_in_a_store(self) -> None:
        rng = np.random.default_rng(0)
        a = rng.integers(-100, 100, size=(30, 6)).astype(np.float32)
        run = with_features(make_run(30, 16, {"a": (6,), "away": (6,)}), a=a, away=a + 1_000_000)
        measures = ["cka", "cka_debiased", "rsa_cosine"]
        found = layer_similarity(write(run), device="cpu", measures=measures).measures
        assert found["cka"][0, 1] == pytest.approx(1, abs=1e-5)
        assert found["cka_debiased"][0, 1] == pytest.approx(1, abs=1e-5)
        assert found["rsa_cosine"][0, 1] == pytest.approx(exact_rsa(a, a + 1e6), abs=1e-4)

    def test_rows_in_one_direction_have_no_rsa(self) -> None:
        sizes = np.random.default_rng(0).uniform(1, 9, size=(20, 1))
        y = np.random.default_rng(1).normal(size=(20, 5))
        for offset in (0, 7):
            assert np.isnan(
                rsa(sizes * np.array([1.0, 2, 3]) + offset * np.array([1, 2, 3]), y, "cosine")
            )
            assert np.isnan(rsa(sizes * np.array([1.0, 2, 3]) + offset * np.array([1, 2, 3]), y))
        assert np.isnan(rsa(sizes, y)), "a single value has no correlation"

    @pytest.mark.parametrize(
        ("distance", "values"), [("cosine", (0, 0)), ("correlation", (0.3, 5))]
    )
    def test_rows_without_a_direction_have_a_distance_of_1_to_all(
        self, distance: str, values: tuple[float, float]
    ) -> None:
        """Zeros have no cosine, and equal values no correlation."""
        x = np.random.default_rng(0).normal(size=(12, 4))
        x[3], x[7] = values
        y = np.random.default_rng(1).normal(size=(12, 5))
        ours = np.nan_to_num(scipy.spatial.distance.pdist(x, distance), nan=1)
        theirs = scipy.spatial.distance.pdist(y, distance)
        expected = scipy.stats.spearmanr(ours, theirs).statistic
        assert rsa(x, y, distance) == pytest.approx(expected, abs=1e-5)

    def test_only_the_debiased_form_tells_noise_from_noise(self) -> None:
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(2, 50, 2000))
        assert linear_cka(x, y) > 0.9
        assert abs(linear_cka(x, y, debiased=True)) < 0.1

    @pytest.mark.usefixtures("blocks")
    def test_layers_of_a_store(self) -> None:
        shapes = {"a": (5,), "b": (3, 2, 2), "c": (40,)}
        store = write(make_run(50, 16, shapes, failed=FAILED))
        found = layer_similarity(store, device="cpu")
        assert found.layers == found.others == ("a", "b", "c")
        assert (found.num_rows, found.num_common) == (46, 46)
        X = {name: ok_vectors(store, name).astype(np.float64) for name in store.layers}
        for name, direct in (
            ("cka", direct_cka),
            ("cka_debiased", direct_debiased_cka),
            ("rsa", direct_rsa),
        ):
            expected = [[direct(X[a], X[b]) for b in X] for a in X]
            assert np.allclose(found.measures[name], expected, atol=1e-5), name

    def test_two_stores_are_matched_by_key(self) -> None:
        left = make_run(50, 16, {"a": (5,)}, failed=FAILED)
        rng = np.random.default_rng(9)
        some = np.sort(rng.permutation(50)[:30])
        listing = replace(
            left.listing, keys=left.listing.keys[some], labels=left.listing.labels[some]
        )
        features = left.features["a"][some]
        # The same vectors, turned, of other images in part and under longer keys.
        turned = features @ np.linalg.qr(rng.normal(size=(5, 5)))[0]
        keys = np.concatenate([listing.keys, [b"zebra/a-longer-name.jpg"]])
        run = make_run(31, 8, {"z": (5,)}, failed=[1])
        right = replace(
            run,
            listing=replace(listing, keys=keys, labels=np.append(listing.labels, -1)),
            features={"z": np.concatenate([turned, np.ones((1, 5))]).astype(np.float32)},
        )
        measures = ["cka", "cka_debiased", "rsa_cosine"]
        found = layer_similarity(
            write(left), write(right, "other"), device="cpu", measures=measures
        )
        both = [row for i, row in enumerate(some.tolist()) if row not in FAILED and i != 1]
        assert found.num_common == found.num_rows == len(both)
        assert (found.layers, found.others) == (("a",), ("z",))
        for measure in found.measures.values():
            assert measure.shape == (1, 1)
            assert measure[0, 0] == pytest.approx(1, abs=1e-4)

    def test_a_store_that_grew_is_matched_row_by_row(self) -> None:
        """Its first and last rows are in place, and the rows between in another order."""
        left = make_run(9, 8, {"a": (5,)})
        order = np.array([0, 2, 4, 6, 1, 3, 5, 7, 8])
        listing = left.listing
        grown = replace(listing, keys=listing.keys[order], labels=listing.labels[order])
        right = replace(left, listing=grown, features={"a": left.features["a"][order]})
        found = layer_similarity(
            write(left), write(right, "other"), device="cpu", measures=["cka", "svcca"]
        )
        assert found.measures["cka"][0, 0] == pytest.approx(1)
        assert found.measures["svcca"][0, 0] == pytest.approx(1)

    def test_a_sample_is_seeded(self) -> None:
        store = write(make_run(60, 16, {"a": (5,), "b": (6,)}))
        found = [
            layer_similarity(store, num_rows=20, seed=seed, device="cpu").measures["cka"][0, 1]
            for seed in (0, 0, 1)
        ]
        assert found[0] == found[1] != found[2]
        rows = np.sort(np.random.default_rng(1).permutation(60)[:20])
        assert found[2] == pytest.approx(direct_cka(store["a"][rows], store["b"][rows]), abs=1e-4)

    def test_a_layer_that_is_the_same_for_all_is_like_none(self) -> None:
        run = make_run(30, 16, {"a": (5,), "b": (6,)})
        store = write(with_features(run, b=np.full((30, 6), 0.1)))
        found = layer_similarity(store, device="cpu").measures
        for name in found:
            assert np.isnan(found[name][0, 1]), name
            assert np.isnan(found[name][1, 1]), name
            assert found[name][0, 0] == pytest.approx(1, abs=1e-5)

    def test_matrices_that_do_not_fit_into_memory_are_refused(
        self, set_free_memory: Callable[..., None]
    ) -> None:
        store = write(make_run(30, 16, {"a": (5,), "b": (6,)}))
        needed = 2 * 4 * (30 * 30 + 30 * 29 // 2)
        for free in (needed, needed - 1):
            set_free_memory(free)
            # What needs no such matrix needs no such memory.
            layer_similarity(store, num_rows=30, measures=["svcca"], device="cpu")
            if free == needed:
                layer_similarity(store, num_rows=30, measures=["cka", "rsa"], device="cpu")
                continue
            with pytest.raises(ConfigError, match=r"cka and rsa of 30 rows of 2 layers take 10\.4"):
                layer_similarity(store, num_rows=30, measures=["cka", "rsa"], device="cpu")

    def test_scores_of_many_images_have_six_digits(self) -> None:
        store = write(make_run(1500, 2048, {"a": (5,), "b": (6,)}))
        found = layer_similarity(store, num_rows=1500, device="cpu").measures
        for name in found:
            assert np.allclose(np.diag(found[name]), 1, rtol=0, atol=1e-6), name

    def test_what_cannot_be_compared_is_refused(self) -> None:
        store = write(make_run(10, 4, {"a": (5,)}))
        with pytest.raises(ConfigError, match="one layer to compare"):
            layer_similarity(store, device="cpu")
        few = write(make_run(5, 4, {"a": (5,)}, failed=[0, 1]), "few")
        with pytest.raises(ConfigError, match="3 images are ok in both"):
            layer_similarity(store, few, device="cpu")
        with pytest.raises(ConfigError, match=r"rows=-1: expected a whole number of at least 4"):
            layer_similarity(store, store, num_rows=-1)
        with pytest.raises(ConfigError, match=r"measures is empty"):
            layer_similarity(store, store, measures=())
        found = layer_similarity(store, store, measures=iter(["cka"]))  # type: ignore[arg-type]
        assert found.measures["cka"] == pytest.approx(1)

    @pytest.mark.parametrize(
        ("x", "message"),
        [
            (np.ones((9, 2)), "have 40 and 9 rows; expected the same images"),
            (np.ones((40, 2)) * 1j, r"second matrix has the shape \(40, 2\) and the type complex"),
            (np.ones((40, 0)), r"the shape \(40, 0\)"),
            ([["a"]] * 40, "the type <U1"),
        ],
    )
    def test_what_is_no_matrix_is_refused(
        self, matrices: tuple[np.ndarray, np.ndarray], x: object, message: str
    ) -> None:
        for measure in (linear_cka, rsa, svcca, procrustes_distance):
            with pytest.raises(ConfigError, match=message):
                measure(matrices[0], x)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="3 rows; expected at least 4"):
                measure(matrices[0][:3], matrices[1][:3])

    def test_lists_and_tensors_are_matrices(self, matrices: tuple[np.ndarray, np.ndarray]) -> None:
        x, y = matrices
        for measure in (linear_cka, rsa, svcca, procrustes_distance):
            expected = measure(x[::-1], y)
            assert measure(x[::-1].tolist(), torch.from_numpy(y)) == expected


def test_the_snippet_of_the_page_runs() -> None:
    page = Path(__file__).parents[2] / "docs" / "similarity.md"
    (snippet,) = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    write(make_run(30, 8, {"avgpool": (5,), "layer4": (3, 2, 2)}, failed=[3]), "runs/photos")
    output: list[tuple[float, ...]] = []
    found: dict[str, object] = {"print": lambda *values: output.append(values)}
    exec(snippet, found)
    measures = found["scores"].measures  # type: ignore[attr-defined]
    assert output[0] == pytest.approx([measures[name][0, 1] for name in measures], abs=1e-5)
