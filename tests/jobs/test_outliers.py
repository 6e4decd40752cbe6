"""job=outliers, and job=duplicates on standardised values, against scikit-learn."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import slow_except
from csv_rows import csv_rows
from made_store import make_labelled, make_run, pack_alone
from sklearn.metrics import pairwise_distances
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import StandardScaler
from tiny_model import extract as tiny_extract
from tiny_model import job_result, run_job, write_image, write_images

import featx
from featx.errors import StoreError
from featx.similarity import duplicate_groups, find_outliers
from featx.store import layout, open_files, result_json
from featx.store.layer_reader import LayerReader

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.fixture
def store() -> featx.FeatureStore:
    """Values with a large common part, as a real layer has; row 9 is odd, row 20 nearly row 5."""
    run = make_run(40, 8, failed=[3])
    flat = run.features["flat"].astype(np.float32) / 20 + np.arange(1, 6, dtype=np.float32)
    flat[9] = [3.0, 2.0, 1.0, 0.0, -1.0]
    flat[20] = flat[5] + 1e-4
    flat[3] = np.nan
    return featx.open(replace(run, features={**run.features, "flat": flat}).copied(Path("store")))


def ask(job: str, layers: str | None = "flat", **options: Any) -> Any:
    return job_result(job, store="store", layers=layers, device="cpu", **options)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("k", [1, 5, 1000])
def test_distances_are_those_of_scikit_learn(
    store: featx.FeatureStore, metric: str, k: int
) -> None:
    rows = np.flatnonzero(store.ok)
    x = StandardScaler().fit_transform(store["flat"][rows].astype(np.float64))
    found = find_outliers(store, "flat", k, metric, "cpu")
    assert found.rows.tolist() == rows.tolist()
    assert found.k == min(k, len(rows) - 1)

    def expected(x: np.ndarray) -> np.ndarray:
        search = NearestNeighbors(n_neighbors=min(k, len(x) - 1), metric=metric).fit(x)
        return search.kneighbors()[0].mean(1)

    np.testing.assert_allclose(found.distances, expected(x), atol=2e-6, rtol=1e-5)
    nearest = NearestNeighbors(n_neighbors=1, metric=metric).fit(x).kneighbors()[1][:, 0]
    assert found.nearest.tolist() == rows[nearest].tolist()
    labels = store.labels[rows]
    for label in range(len(store.classes)):
        np.testing.assert_allclose(
            found.class_distances[labels == label], expected(x[labels == label]),
            atol=2e-6, rtol=1e-5,
        )  # fmt: skip
    assert np.isnan(found.class_distances[labels < 0]).all()


def test_the_job_ranks_all_rows(
    store: featx.FeatureStore, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = ask("outliers", neighbors={"k": 5})
    assert summary["farthest"][0]["row"] == 9
    assert [len(summary[name]) for name in ("farthest", "farthest_in_class")] == [10, 10]
    lines = csv_rows("store/outliers/outliers.csv")
    assert [line["rank"] for line in lines] == [str(i) for i in range(1, 40)]
    distances = [float(line["distance"]) for line in lines]
    assert distances == sorted(distances, reverse=True)
    assert lines[0]["key"] == store.keys[9]
    unlabelled = [line for line in lines if not line["class"]]
    assert unlabelled
    assert {line["class_distance"] for line in unlabelled} == {""}
    run_job("outliers", store="store", layers="flat", device="cpu")
    assert "far from their class" in capsys.readouterr().out


def test_without_layers_it_is_the_layer_of_the_probe(store: featx.FeatureStore) -> None:
    Path("store", layout.PROBE).write_bytes(result_json({"layer": "map"}, 1))
    for job in ("outliers", "duplicates", "neighbors"):
        assert ask(job, layers=None)["layer"] == "map"
    Path("store").rename("whole")
    pack_alone(Path("whole"))
    assert job_result("outliers", store="whole/features.h5", device="cpu")["layer"] == "map"


def test_duplicates_of_standardised_values(store: featx.FeatureStore) -> None:
    """Cosines of plain values link every row here; standardised ones those of a copy only."""
    plain = duplicate_groups(store, "flat", device="cpu", standardise=False)
    assert max(map(len, plain)) > 30
    assert ask("duplicates", duplicates={"threshold": 0.999})["groups"] == 1
    assert [line["row"] for line in csv_rows("store/duplicates/duplicates.csv")] == ["5", "20"]
    rows = np.flatnonzero(store.ok)
    x = StandardScaler().fit_transform(store["flat"][rows].astype(np.float64))
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    pairs = np.argwhere(np.triu(unit @ unit.T, 1) >= 0.9)
    linked = {int(rows[i]) for pair in pairs for i in pair}
    groups = duplicate_groups(store, "flat", device="cpu")
    assert {row for group in groups for row in group.tolist()} == linked
    assert ask("duplicates")["groups"] == len(groups)
    found = ask("duplicates", neighbors={"standardise": False})
    assert (found["threshold"], found["groups"]) == (0.98, len(plain))


@pytest.fixture
def replaced_on_read(in_tmp_path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of many parts, of which some stay open, that is refreshed and packed when its first
    rows are read.
    """
    photos = write_images(Path("photos"), 24)
    tiny_extract(photos, reduce="avg", part_rows=4, pack=False)
    shutil.copytree("store", "new")
    write_image(photos / "cat" / "000.png", 99)
    tiny_extract(photos, reduce="avg", part_rows=4, refresh=True, out="new")
    monkeypatch.setattr(open_files, "_MAX_OPEN_FILES", 4)
    read = LayerReader.read

    def read_and_replace(self: LayerReader, *given: Any) -> Any:
        values = read(self, *given)
        if Path("store/parts").exists():
            Path("new/features.h5").rename("store/features.h5")
            shutil.rmtree("store/parts")
        return values

    monkeypatch.setattr(LayerReader, "read", read_and_replace)


@pytest.mark.usefixtures("replaced_on_read")
@pytest.mark.parametrize(
    "job", slow_except(["outliers", "duplicates", "mislabelled", "probe"], "outliers")
)
def test_results_are_not_said_to_be_of_rows_that_changed_during_the_job(job: str) -> None:
    """The parts that were closed are gone once their rows were computed again."""
    with contextlib.suppress(StoreError):  # if it reads rows again
        run_job(job, store="store", layers=["conv"], device="cpu")
    assert not Path("store/parts").exists()
    for path in Path("store").rglob(f"{job}.json"):
        assert json.loads(path.read_text())["rows_sha256"] != featx.open("store").rows_sha256


@pytest.mark.usefixtures("replaced_on_read")
def test_rows_of_two_states_are_not_neighbours() -> None:
    with pytest.raises(StoreError, match="has changed since it was opened"):
        run_job("neighbors", store="store", layers=["conv"], device="cpu")
    assert not list(Path("store").rglob("neighbors.npz"))


def with_keys(store_path: str, x: np.ndarray, keys: list[bytes], labels: np.ndarray) -> Any:
    run = make_labelled({"x": x}, labels, ["a", "b"])
    run = replace(run, listing=replace(run.listing, keys=np.array(keys)))
    return featx.open(run.copied(Path(store_path)))


@pytest.mark.parametrize("ends", [(b"", b"#0,0,5,5", b"#hflip"), (b"@00000.000", b"@00001.000")])
@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_rows_of_one_image_are_no_neighbours(
    metric: str, ends: tuple[bytes, ...], set_block_sizes: Callable[..., None]
) -> None:
    """Image 7 is like no other, although its views are alike; class b has one image only."""
    rng = np.random.default_rng(0)
    images = np.arange(20).repeat(len(ends))
    base = rng.normal(size=(20, 6)) + 2
    base[7] = -5 * base[7]
    x = (base[images] + 0.01 * rng.normal(size=(len(images), 6))).astype(np.float32)
    keys = [b"%02d.jpg%s" % (image, end) for image in range(20) for end in ends]
    labels = (images == 3).astype(np.int64)
    store = with_keys("views", x, keys, labels)
    scaled = StandardScaler().fit_transform(x.astype(np.float64))
    distances = pairwise_distances(scaled, metric=metric)
    distances[images[:, None] == images] = np.inf
    of_class = np.where(labels[:, None] == labels, distances, np.inf)
    num_others = len(x) - len(ends)
    for size, k in ((64 << 20, 4), (3000, 4), (64 << 20, 1000)):
        set_block_sizes(size)
        found = find_outliers(store, "x", k, metric, "cpu")
        assert found.k == min(k, num_others)
        expected = np.sort(distances, axis=1)[:, : min(k, num_others)].mean(1)
        np.testing.assert_allclose(found.distances, expected, atol=1e-5, rtol=1e-5)
        assert found.nearest.tolist() == distances.argmin(1).tolist()
        rest = np.sort(of_class[labels == 0], axis=1)[:, : min(k, num_others - len(ends))].mean(1)
        np.testing.assert_allclose(found.class_distances[labels == 0], rest, atol=1e-5, rtol=1e-5)
        assert np.isnan(found.class_distances[labels == 1]).all()
    summary = job_result("outliers", store="views", layers="x", device="cpu")
    assert summary["left_out"] == ("video" if b"@" in ends[0] else "image")
    assert {entry["key"].split(".")[0] for entry in summary["farthest"][: len(ends)]} == {"07"}


def test_frames_of_a_single_video_are_neighbours() -> None:
    x = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    keys = [b"a.mp4@%05d.000" % second for second in range(9)]
    store = with_keys("frames", x, keys, np.zeros(9, np.int64))
    found = find_outliers(store, "x", 2, "euclidean", "cpu")
    search = NearestNeighbors(n_neighbors=2).fit(StandardScaler().fit_transform(x))
    np.testing.assert_allclose(found.distances, search.kneighbors()[0].mean(1), rtol=1e-5)
    assert found.left_out is None
