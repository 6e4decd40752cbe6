"""reduce=pca and reduce=whiten: against numpy and scikit-learn, and by whose statistics."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from made_store import make_header, make_spec
from sklearn.decomposition import PCA
from test_stats_run import files, matrix, take
from tiny_model import MODEL, extract, job_result, run_job

import featx
from featx.analysis.statistics import Moments
from featx.analysis.statistics.part_moments import StatsLayer
from featx.analysis.statistics.stats_file import Contents, file_bytes
from featx.config import make_reduce
from featx.errors import (
    ConfigError,
    FeatxError,
    LayerError,
    ReduceError,
    StoreError,
    StoreMismatchError,
)
from featx.layers import ProjectedReduce, Projection, RowLayout

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def stored(data: object, **keys: Any) -> featx.FeatureStore:
    """A store kept in parts: the rows are the same, and packing takes longer than all the rest."""
    return extract(data, **{"dtype": "float32", "pack": False, **keys})


# The numbers


def test_pca_is_that_of_the_extracted_matrix(photos: Path) -> None:
    x = matrix(stored(photos, out="plain"), "conv")
    take(photos, out="stats")
    store = stored(photos, reduce={"name": "pca", "stats": "stats", "k": 5})
    y = store["conv"][:]
    assert y.shape == (21, 5)
    expected = PCA(5, svd_solver="full").fit(x)
    largest = expected.components_[range(5), np.abs(expected.components_).argmax(1)]
    # One float32 product of 128 terms: 1e-5 of the largest value.
    scale = np.abs(y).max()
    np.testing.assert_allclose(y, expected.transform(x) * np.sign(largest), atol=1e-5 * scale)
    np.testing.assert_allclose(y.var(0, ddof=1), expected.explained_variance_, rtol=1e-4)


@pytest.mark.slow
def test_an_operation_that_no_module_owns_is_projected(photos: Path) -> None:
    taken = take(photos, out="stats", layers=["flatten"])
    assert list(taken) == ["flatten"]
    x = matrix(stored(photos, out="plain", layers=["flatten"]), "flatten")
    y = stored(photos, layers=["flatten"], reduce={"name": "pca", "stats": "stats", "k": 2})
    expected = PCA(2, svd_solver="full").fit(x).transform(x)
    np.testing.assert_allclose(np.abs(y["flatten"][:]), np.abs(expected), atol=1e-5)


@pytest.mark.slow
def test_each_position_is_projected_and_the_map_keeps_its_layout(photos: Path) -> None:
    plain = stored(photos, out="plain")
    x = matrix(plain, "conv", by_position=True)
    take(photos, out="stats", stats={"observation": "position"})
    y = stored(photos, reduce={"name": "pca", "stats": "stats", "k": 3})["conv"][:]
    assert y.shape == (21, 3, 4, 4)
    expected = PCA(3, svd_solver="full").fit(x)
    signs = np.sign(expected.components_[range(3), np.abs(expected.components_).argmax(1)])
    rows = np.moveaxis(plain["conv"][:], 1, -1).reshape(-1, 8)
    z = (expected.transform(rows) * signs).reshape(21, 4, 4, 3)
    np.testing.assert_allclose(y, np.moveaxis(z, -1, 1), atol=1e-5 * np.abs(z).max())


@pytest.mark.parametrize("zca", [False, True])
@pytest.mark.slow
def test_whitened_features_have_the_identity_as_covariance(photos: Path, zca: bool) -> None:
    take(photos, out="stats", layers={"conv": "avg", "pool": "none"})
    whiten = {"name": "whiten", "stats": "stats/stats.h5", "zca": zca}
    store = stored(photos, layers=["conv", "pool"], reduce=whiten)
    for layer, dim in (("conv", 8), ("pool", 6)):
        y = store[layer][:].astype(np.float64)
        assert y.shape == (21, dim)
        np.testing.assert_allclose(np.cov(y, rowvar=False), np.eye(dim), atol=1e-3)
        np.testing.assert_allclose(y.mean(0), 0, atol=1e-4)


@pytest.mark.slow
def test_the_statistics_of_whitened_features_are_white(photos: Path) -> None:
    take(photos, out="stats", layers=["pool"])
    whiten = {"name": "whiten", "stats": "stats", "epsilon": 0.0}
    again = take(photos, out="white", layers=["pool"], reduce=whiten)
    covariance = again["pool"].covariance()
    torch.testing.assert_close(covariance, torch.eye(6).double(), rtol=0, atol=1e-4)
    with pytest.raises(ReduceError, match="cannot be projected again"):
        stored(photos, layers=["pool"], reduce={"name": "pca", "stats": "white", "k": 2})


def test_epsilon_shrinks_what_varies_little(photos: Path) -> None:
    statistics = take(photos, out="stats", layers=["pool"])
    variances = np.linalg.eigvalsh(statistics["pool"].covariance().numpy())[::-1]
    epsilon = float(variances[2])
    store = stored(
        photos,
        layers=["pool"],
        reduce={"name": "whiten", "stats": "stats", "k": 4, "epsilon": epsilon},
    )
    found = store["pool"][:].astype(np.float64).var(0, ddof=1)
    np.testing.assert_allclose(found, variances[:4] / (variances[:4] + epsilon), rtol=1e-4)


@pytest.mark.slow
def test_the_reduction_of_the_statistics_comes_first_and_each_layer_has_its_own(
    photos: Path,
) -> None:
    layers = {"conv": {"name": "gem", "p": 2.0}, "deep": "avg"}
    plain = stored(photos, out="plain", layers=layers)
    take(photos, out="stats", layers=layers)
    store = stored(
        photos,
        layers={
            "conv": {"name": "pca", "stats": "stats", "k": 2},
            "deep": {"name": "whiten", "stats": "stats", "k": 3},
            "pool": "flatten",
        },
    )
    assert [store[name].shape[1:] for name in store] == [(2,), (3,), (6,)]
    x = matrix(plain, "conv")
    expected = PCA(2, svd_solver="full").fit(x).transform(x)
    np.testing.assert_allclose(np.abs(store["conv"][:]), np.abs(expected), atol=1e-5)
    np.testing.assert_allclose(np.cov(store["deep"][:].T), np.eye(3), atol=1e-3)
    with h5py.File("store/parts/part-000000.h5") as file:
        said = dict(file["features/conv"].attrs)
        assert (said["reduce"], said["reduce_first"]) == ("pca", "gem p=2")
        assert (said["reduce_k"], said["reduce_rows"]) == (2, "image")
        assert said["reduce_stats_sha256"] == featx.open_stats("stats")["conv"].sha256
        said = dict(file["features/deep"].attrs)
        assert (said["reduce_zca"], said["reduce_epsilon"]) == (False, 0.0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.slow
def test_projected_values_are_cast_last(photos: Path, dtype: str) -> None:
    take(photos, out="stats")
    reduce = {"name": "whiten", "stats": "stats", "k": 4}
    exact = stored(photos, out="exact", reduce=reduce)["conv"][:]
    found = stored(photos, reduce=reduce, dtype=dtype)["conv"][:]
    expected = torch.from_numpy(exact).to(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(found.astype(np.float32), expected)


@pytest.mark.parametrize(
    ("shape", "first", "axis"), [((4, 4, 7), "none", 3), ((50, 7), "none", 2), ((7,), "none", 1)]
)
def test_maps_with_channels_behind_tokens_and_vectors_by_position(
    shape: tuple[int, ...], first: str, axis: int
) -> None:
    matrix = torch.randn(3, 7, dtype=torch.float64)
    projection = Projection(torch.ones(7).double(), matrix, torch.ones(3).double())
    reduce = ProjectedReduce("pca", {}, make_reduce(first), shape, True, projection)
    x = torch.randn(2, *shape)
    y = reduce.bind(RowLayout("layer", shape, (32, 32), 1))(x)
    assert y.shape == (2, *shape[: axis - 1], 3)
    torch.testing.assert_close(y, ((x - 1) @ matrix.T.float()), rtol=1e-5, atol=1e-5)
    with pytest.raises(ReduceError, match=r"statistics are of rows of shape .*layer gives \(9,\)"):
        reduce.bind(RowLayout("layer", (9,), (32, 32), 1))


# By whose statistics


@pytest.mark.slow
def test_the_numbers_are_the_identity_and_not_the_path(photos: Path) -> None:
    take(photos, out="stats")
    reduce = {"name": "pca", "stats": "stats", "k": 4}
    stored(photos, reduce=reduce)
    Path("store/parts/part-000002.h5").unlink()
    shutil.copytree("stats", "elsewhere")
    assert stored(photos, reduce={**reduce, "stats": "elsewhere/stats.h5"}).complete
    take({"name": "folder", "root": str(photos), "limit": 9}, out="stats", overwrite=True)
    Path("store/parts/part-000002.h5").unlink()
    before = {path: path.read_bytes() for path in files("store")}
    with pytest.raises(StoreMismatchError, match=r"layer conv, reduce_args, stats_sha256:") as e:
        stored(photos, reduce=reduce)
    assert e.value.exit_code == 2
    for other in ({"k": 3}, {"name": "whiten"}):
        with pytest.raises(StoreMismatchError, match="layer conv"):
            stored(photos, reduce={**reduce, "stats": "elsewhere", **other})
    assert {path: path.read_bytes() for path in files("store")} == before


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"stats": "nowhere"}, StoreError, "no statistics file nowhere"),
        ({"layers": ["pool"]}, LayerError, "no statistics of 'pool'; it has conv, deep"),
        ({"layers": ["conv:input"]}, LayerError, "no statistics of 'conv:input'"),
        ({"seed": 1}, StoreMismatchError, "weights_sha256: the statistics have"),
        (
            {"model": {**MODEL, "transform": {"resize": 33, "crop": 32}}},
            StoreMismatchError,
            "transform: the statistics have 'resize 32",
        ),
        ({"k": 21}, ReduceError, "k is 21, but the 21 rows of 128 features vary in 20"),
        ({"k": 129}, ReduceError, "k is 129; expected 1 to 128"),
        ({"name": "whiten", "epsilon": 0.1}, ReduceError, "which others there are is arbitrary"),
        ({"layers": ["deep"]}, ReduceError, "keeps|only its diagonal was kept"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    finished: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any],
    error: type[FeatxError], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(finished)
    reduce = {"name": "pca", "stats": "stats", "k": 4}
    reduce |= {key: keys[key] for key in ("name", "stats", "k", "epsilon") if key in keys}
    if reduce["name"] == "whiten":
        del reduce["k"]
    if keys.get("layers") == ["deep"]:
        reduce["stats"] = "diagonal"
    others = {key: keys[key] for key in ("layers", "seed", "model") if key in keys}
    with pytest.raises(error, match=message) as refused:
        stored("photos", reduce=reduce, **others)
    assert refused.value.exit_code == 2
    assert not Path("store").exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos/, stats/ and diagonal/."""
    from contextlib import chdir

    from tiny_model import write_images

    folder = tmp_path_factory.mktemp("finished")
    write_images(folder / "photos")
    with chdir(folder):
        take("photos", out="stats", layers=["conv", "deep"])
        take("photos", out="diagonal", layers=["deep"], stats={"covariance": "diagonal"})
    return folder


def test_a_layer_of_the_same_name_that_is_another_tensor(finished: Path) -> None:
    """A file made by hand: what featx makes is named for what it holds."""
    for change, message in ({"layer": "deep"}, "layer"), ({"capture": "input"}, "capture"):
        spec = make_spec("conv", (8,))
        spec = type(spec)(**{**spec.__dict__, **change})
        rows = Moments.of(torch.randn(9, 8))
        path = Path("made.h5")
        path.write_bytes(file_of(spec, rows))
        with pytest.raises(StoreMismatchError, match=f"  {message}: the statistics have"):
            stored(str(finished / "photos"), reduce={"name": "pca", "stats": str(path), "k": 2})


def file_of(spec: Any, moments: Moments) -> memoryview:
    header = make_header()
    root = {
        "featx_stats": 2, "complete": True, "start": 0, "stop": moments.count, "num_failed": 0,
        "fingerprint": "", "settings": json.dumps(dict(header.fingerprint)),
        "weights_sha256": header.weights_sha256, "transform": header.transform,
    }  # fmt: skip
    checksums = np.ones(moments.count, np.uint64)
    contents = Contents({spec.name: moments}, [], checksums)
    return file_bytes(root, {spec.name: StatsLayer(spec)}, contents)


@pytest.mark.slow
def test_gradients_of_another_target_are_other_values(photos: Path) -> None:
    gradients = {"layers": ["conv"], "capture": "grad_output", "reduce": "avg"}
    take(photos, out="stats", target="predicted", **gradients)
    pca = {"name": "pca", "stats": "stats", "k": 1}
    assert stored(photos, target="predicted", **{**gradients, "reduce": pca}).complete
    with pytest.raises(StoreMismatchError, match="target: the statistics have 'predicted', now 0"):
        stored(photos, out="other", target=0, **{**gradients, "reduce": pca})


def test_damaged_and_unfinished_statistics_are_refused(finished: Path) -> None:
    data = bytearray((finished / "stats" / "stats.h5").read_bytes())
    data[len(data) // 2] ^= 1
    Path("stats.h5").write_bytes(data)
    with pytest.raises(StoreError, match="differs from its checksum"):
        stored(str(finished / "photos"), reduce={"name": "pca", "stats": "stats.h5", "k": 2})


@pytest.mark.parametrize(
    ("reduce", "message"),
    [
        ({"name": "pca"}, "reduce=pca needs reduce.stats=FILE"),
        ({"name": "whiten"}, "reduce=whiten needs reduce.stats=FILE"),
        ({"name": "avg", "stats": "x"}, "reduce.stats has an effect with reduce=pca or reduce=w"),
        ({"name": "pca", "stats": "x", "epsilon": 0.1}, "an effect with reduce=whiten only"),
        ({"name": "pca", "stats": "x", "zca": True}, "an effect with reduce=whiten only"),
        (
            {"name": "pca", "stats": "x", "k": 0},
            "reduce.k=0: expected a whole number",
        ),
        ({"name": "whiten", "stats": "x", "epsilon": -0.1}, "expected a number of at least 0"),
    ],
)
def test_keys_of_a_projection_are_checked(reduce: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        extract("photos", reduce=reduce)


# Extracted again


def sample(**keys: Any) -> Any:
    options = {"out": "store", "verify": {"reextract_rows": 21}, **keys}
    return job_result("verify", **options)["reextracted"]


@pytest.mark.parametrize("mapping", [False, True])
@pytest.mark.slow
def test_rows_are_extracted_again_also_when_the_statistics_moved(
    photos: Path, mapping: bool
) -> None:
    take(photos, out="stats", layers=["conv", "deep"])
    whiten = {"name": "whiten", "stats": "stats", "k": 4, "epsilon": 0.01}
    keys: dict[str, Any] = {"layers": ["conv"], "reduce": whiten}
    if mapping:
        keys = {"layers": {"conv": whiten, "deep": {"name": "pca", "stats": "stats", "k": 3}}}
    stored(photos, **keys)
    untouched = {"rows": 21, "identical": 21, "close": 0, "different": []}
    assert sample() == untouched
    Path("stats").rename("elsewhere")
    with pytest.raises(StoreError, match=r"sha256 .*no statistics file stats.*Put that file back"):
        sample()
    moved = {"name": "whiten", "stats": "elsewhere"}
    assert sample(reduce=moved) == untouched
    take({"name": "folder", "root": str(photos), "limit": 9}, out="fewer", layers=["conv", "deep"])
    with pytest.raises(StoreError, match="fewer has other numbers"):
        sample(reduce={**moved, "stats": "fewer"})


@pytest.mark.slow
def test_repair_needs_the_statistics(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    take(photos, out="stats")
    stored(photos, reduce={"name": "pca", "stats": "stats", "k": 4})
    part = Path("store/parts/part-000001.h5")
    whole = part.read_bytes()
    part.write_bytes(whole[:400])  # its rows are gone, not only what tells where they stand
    Path("stats").rename("elsewhere")
    repair: dict[str, Any] = {"store": "store", "data": str(photos), "verify": {"repair": True}}
    with pytest.raises(StoreError, match="no statistics file stats"):
        run_job("verify", **repair)
    assert part.read_bytes() == whole[:400]  # decided before anything moves
    assert run_job("verify", **repair, reduce={"name": "pca", "stats": "elsewhere"}) == 0
    capsys.readouterr()
    with h5py.File(part) as file:
        assert file["features/conv"].shape == (8, 4)
