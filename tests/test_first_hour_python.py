"""What somebody types in a notebook: a module and a data set as they have them."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import slow_except
from PIL import Image
from tiny_model import KEYS, MODEL, write_images
from torch import nn
from zoo import TwoStageConvNet

import featx
from featx.errors import ConfigError, DataError, FeatxError, LayerError, StoreMismatchError
from featx.jobs.base import config_of_call

SMALL = {"transform": {"resize": 32, "crop": 32}}
RUN = {key: value for key, value in KEYS.items() if key not in ("model", "out")}


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "photos", 6)
    return tmp_path / "photos"


def keys_of(store: featx.FeatureStore) -> list[str]:
    return [str(key) for key in store.keys]


def make() -> nn.Module:
    torch.manual_seed(1)
    return TwoStageConvNet()


def extract(data: object, **keys: Any) -> featx.FeatureStore:
    return featx.extract(data, verbose=False, **{"model": MODEL, "out": "store", **RUN, **keys})


def test_a_module_is_a_model_and_is_left_as_it_was(photos: Path) -> None:
    net = make().train()
    for path in photos.rglob("*.png"):
        Image.open(path).resize((32, 32)).save(path)  # so that the transform changes no pixel
    store = extract("photos/", model={"factory": net, **SMALL})
    assert net.training
    images = [Image.open(photos / key) for key in keys_of(store)]
    with featx.capture(net.eval(), ["conv"]) as features, torch.no_grad():
        pixels = torch.stack(
            [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]
        )
        mean, std = (
            torch.tensor(x).view(3, 1, 1) for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        )
        net((pixels / 255 - mean) / std)
    np.testing.assert_allclose(store["conv"][:], features["conv"].numpy(), rtol=2e-3, atol=2e-3)
    assert store.complete


def test_weights_of_a_file_go_into_a_copy_of_a_module(photos: Path) -> None:
    net, trained = make(), TwoStageConvNet()
    before = {name: x.clone() for name, x in net.state_dict().items()}
    torch.save(trained.state_dict(), "best.pth")
    store = extract("photos/", model={"factory": net, "weights": "best.pth", **SMALL})
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())
    again = extract("photos/", model={"factory": trained, **SMALL}, out="again")
    np.testing.assert_array_equal(store["conv"][:], again["conv"][:])
    with pytest.raises(ConfigError, match=r"given module has weights of its own\. Leave"):
        extract("photos/", model={"factory": net, "weights": None, **SMALL}, out="random")


@pytest.mark.parametrize(
    "model", [make, TwoStageConvNet, lambda: make()], ids=["function", "class", "lambda"]
)
def test_what_builds_a_module_is_a_model(photos: Path, model: Any) -> None:
    store = extract("photos/", model=model, model_transform_resize=32, model_transform_crop=32)
    assert store["conv"].shape[0] == 6


@pytest.mark.parametrize("wrap", slow_except([nn.DataParallel, torch.compile], nn.DataParallel))
def test_layers_of_a_wrapped_module_have_the_names_of_the_plain_one(
    photos: Path, wrap: Any
) -> None:
    net, layers = make(), ["conv", "deep:input", "flatten"]
    plain = extract(photos, model={"factory": net, **SMALL}, layers=layers)
    wrapped = extract(photos, model={"factory": wrap(net), **SMALL}, layers=layers, out="wrapped")
    assert list(wrapped) == list(plain) == layers
    for layer in layers:
        np.testing.assert_array_equal(wrapped[layer][:], plain[layer][:])
    with pytest.raises(LayerError, match="there is no layer 'con'"):
        extract(photos, model={"factory": wrap(net), **SMALL}, layers=["con"], out="none")


@pytest.mark.slow
def test_the_same_module_again_resumes_and_another_is_refused(photos: Path) -> None:
    extract("photos/", model={"factory": make(), **SMALL})
    assert extract("photos/", model={"factory": make(), **SMALL}).complete
    torch.manual_seed(2)
    with pytest.raises(FeatxError, match="weights"):
        extract("photos/", model={"factory": TwoStageConvNet(), **SMALL})


def test_other_code_with_the_same_weights_is_refused(photos: Path) -> None:
    conv = nn.Conv2d(3, 4, 3)
    keys = {"model_transform_crop": 32, "out": "store"}
    featx.extract(photos, model=nn.Sequential(conv, nn.Flatten()), layers=["1"], **keys)
    with pytest.raises(StoreMismatchError, match=r"model\.modules_sha256: the store has"):
        featx.extract(
            photos, model=nn.Sequential(conv, nn.ReLU(), nn.Flatten()), layers=["1"], **keys
        )
    featx.extract(photos, model=nn.Sequential(conv, nn.Flatten()), layers=["1"], **keys)


def test_a_module_without_a_transform_says_what_it_assumes(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    featx.extract("photos/", model=make(), out="store", **{**RUN, "max_failures": 1.0})
    printed = capsys.readouterr().err
    assert "resize 256" in " ".join(printed.split())
    assert "model.transform" in printed


@pytest.mark.slow
def test_a_store_of_an_object_needs_it_again(photos: Path) -> None:
    extract("photos/", model={"factory": make(), **SMALL})
    image = photos / keys_of(featx.open("store"))[0]
    with pytest.raises(ConfigError, match=r"of a Python program\. Give that object, from"):
        featx.embed([image], "store")
    with pytest.raises(ConfigError, match="not with model_factory=make of a Python"):
        featx.embed([image], "store", model_factory=make)
    found = featx.embed([image], "store", model_factory=make())
    # The name of the object is that of its class, so a function needs the module it made.
    np.testing.assert_array_equal(found["conv"][0], featx.open("store")["conv"][0])


def test_other_objects_are_refused_by_name(photos: Path) -> None:
    with pytest.raises(ConfigError, match=r"model is a int; expected a name, a torch\.nn\.Module"):
        extract("photos/", model=3)
    with pytest.raises(ConfigError, match="worker processes"):
        extract("photos/", model=make(), executor={"workers": 2})


def test_data_comes_first_and_is_given_once(photos: Path) -> None:
    assert "data" in inspect.signature(featx.extract).parameters
    assert next(iter(inspect.signature(featx.extract).parameters)) == "data"
    with pytest.raises(ConfigError, match="data is given twice"):
        featx.extract("photos/", data="photos/")


def test_a_root_or_a_path_alone_is_a_folder(photos: Path) -> None:
    for data in ({"root": "photos/"}, {"source": "photos/"}, {"source": Path("photos")}):
        assert len(extract({**data, "limit": 2}).keys) == 2  # the later ones find the same store


@pytest.mark.parametrize(("model", "library"), [("timm", "timm"), ("hf", "transformers")])
def test_the_name_of_a_library_is_that_of_the_command(model: str, library: str) -> None:
    config, _ = config_of_call("plan", {"model": model, "model_name": "resnet18"})
    assert (config.model.library, config.model.name) == (library, "resnet18")


def test_the_name_of_a_source_is_that_of_the_command(photos: Path) -> None:
    with pytest.raises(ConfigError, match=r"data=folder needs data\.root=DIR"):
        extract("folder")
    Path("folder").mkdir()
    assert len(extract("folder", data_root="photos/", data_limit=2).keys) == 2
    with pytest.raises(DataError, match="no images below folder"):
        extract("folder")


@pytest.mark.slow
def test_an_option_of_a_group_is_a_keyword(photos: Path) -> None:
    assert len(extract("photos/", data_limit=2).keys) == 2
    arrays = [np.zeros((40, 40, 3), np.uint8)] * 3
    assert len(extract(arrays, out="arrays", **{"data.limit": 2}).keys) == 2


def test_a_mistyped_keyword_is_answered_with_one_that_python_takes(photos: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'data_limt'. Nearest: data_limit"):
        extract("photos/", data_limt=2)
    with pytest.raises(ConfigError, match=r"data_limit and data both give data.limit"):
        extract({"root": "photos/", "limit": 2}, data_limit=2)


@pytest.mark.parametrize(
    ("keys", "near"),
    [
        ({"data": {"path": "photos/"}}, r"data\.root\."),
        ({"data": {"folder": "photos/"}}, r"data\.root\."),
        ({"output_dir": "runs"}, r"out\."),
        ({"num_workers": 2}, r"data_workers, executor_workers\."),
        ({"pretrained": False}, r"model_weights\."),
        ({"gpu": 0}, r"device\."),
        ({"pooling": "avg"}, r"reduce\."),
    ],
)
def test_words_of_other_programs_name_an_option(photos: Path, keys: Any, near: str) -> None:
    with pytest.raises(ConfigError, match=f"Nearest: {near}"):
        featx.extract(model=MODEL, **keys)


def test_a_job_is_no_keyword(photos: Path) -> None:
    with pytest.raises(ConfigError, match=r"job is no keyword.* python -m featx job=probe\."):
        extract("photos", job="probe")


def test_a_store_is_given_once() -> None:
    with pytest.raises(ConfigError, match="store is given twice"):
        featx.export_store("store", store="store")


def test_a_mistyped_function_is_answered_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'extrct'\. Nearest: extract\."):
        _ = featx.extrct
    with pytest.raises(AttributeError, match=r"no attribute 'FeatureDatset'\. Nearest: Feat"):
        _ = featx.torch.FeatureDatset
    with pytest.raises(AttributeError, match=r"no attribute 'linear_ck'\. Nearest: linear_cka"):
        _ = featx.similarity.linear_ck
    with pytest.raises(AttributeError, match=r"For the job: python -m featx job=neighbors\."):
        _ = featx.neighbors
    with pytest.raises(
        AttributeError, match=r"Nearest: write_report\. For the job: .*job=report\."
    ):
        _ = featx.report
    with pytest.raises(AttributeError, match=r"'cka'\. Nearest: layer_similarity\."):
        _ = featx.similarity.cka


def test_ctrl_c_in_embed_shows_the_users_line_only(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = extract("photos/")
    monkeypatch.delenv("FEATX_DEBUG", raising=False)

    class Image:
        """An image during whose reading Ctrl-C arrives."""

        def __array__(self, *_: object) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        featx.embed([Image()], store, model_factory=MODEL["factory"])
    assert "".join(caught.value._render_traceback_()).count("File ") == 1


@pytest.mark.slow
def test_paths_are_the_keys_of_a_list_of_them(photos: Path) -> None:
    paths = sorted(photos.rglob("*.png"), reverse=True)
    store = extract(paths)
    assert keys_of(store) == sorted(map(str, paths))
    labelled = extract([(path, path.parent.name) for path in paths], out="labelled")
    assert [labelled.classes[label] for label in labelled.labels] == [
        Path(key).parent.name for key in keys_of(labelled)
    ]
    twice = extract([paths[0], paths[0]], out="twice")
    assert keys_of(twice) == ["000000", "000001"]


@pytest.mark.parametrize("package", ["pandas", "polars", "pyarrow"])
def test_a_frame_is_a_table_whose_columns_come_along_if_they_are_named(
    photos: Path, package: str
) -> None:
    frames = pytest.importorskip(package)
    make_frame = frames.table if package == "pyarrow" else frames.DataFrame
    paths = sorted((str(path) for path in photos.rglob("*.png")), reverse=True)[:3]
    columns = {"path": paths, "patient": ["c", None, "a"], "day": [3, 2, 1], "age": [1.5, None, 2]}
    frame = make_frame({**columns, "label": ["a", None, "b"]})
    store = extract(frame, data_columns=["patient", "day", "age"])
    assert keys_of(store) == paths[::-1]
    assert store.labels.tolist() == [1, -1, 0]
    assert store.columns == ("age", "day", "patient")
    assert store.column("day").tolist() == [1, 2, 3]
    assert store.column("patient").tolist() == ["a", "", "c"]
    np.testing.assert_array_equal(store.column("age"), [2, np.nan, 1.5])
    assert extract(frame, out="plain").columns == ()
    assert extract(frame["path"][1:], out="column").keys.tolist() == paths[:0:-1]
    with pytest.raises(DataError, match=r"data\.columns=dya: data has path.* Nearest: day"):
        extract(frame, data_columns=["dya"], out="other")
    with pytest.raises(DataError, match="names columns of a table, and data is a list"):
        extract(paths, data_columns=["day"], out="other")
    with pytest.raises(DataError, match="no column path or image; it has file"):
        extract(make_frame({"file": paths}))


@pytest.mark.slow
def test_an_embedder_loads_once(photos: Path) -> None:
    store = extract("photos/", model="efficientnet_lite0", layers=["embedding"])
    image = photos / keys_of(store)[0]
    once = featx.embed([image], store)
    with featx.embedder(store) as embed:
        first = embed([image])
        started_at = time.process_time()
        again = embed([image])
        assert time.process_time() - started_at < 1
        two = embed([image, photos / keys_of(store)[1]])
    for found in (first, again):
        np.testing.assert_allclose(found["embedding"], once["embedding"], rtol=1e-2, atol=1e-2)
    assert two["embedding"].shape == (2, 1280)
    np.testing.assert_array_equal(first["embedding"], again["embedding"])
