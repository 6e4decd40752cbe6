"""job=zeroshot: a head of class names, against open_clip's own zero-shot classifier."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, make_image
from csv_rows import csv_rows
from made_store import make_run
from safetensors.torch import load_file, save_file
from tiny_model import job_result, run_job

import featx
from featx.base import shown_path
from featx.config import model_options
from featx.errors import (
    ConfigError,
    DataError,
    FeatxError,
    ModelError,
    StoreError,
    StoreMismatchError,
)
from featx.models import text_vectors

sys.path.append(str(REPOSITORY / "tests" / "models"))
from clip_zoo import SMALL, open_clip, plain_model, write_folder
from transformers_zoo import write_tokenizer

TEMPLATES = ("a photo of a {}.", "a bad photo of the {}.")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, a model, and the store of its embeddings."""
    root = tmp_path_factory.mktemp("zeroshot")
    for number in range(9):
        folder = root / "images" / ("cat", "dog", "tree_frog")[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        make_image(40 + number, 50, seed=number).save(folder / f"{number}.png")
    extract(root, write_folder(root / "vit", "vit"), "vit-store")
    return root


def extract(root: Path, folder: Path, out: str, reduce: Any = "none", **model: Any) -> None:
    run_job(
        "extract",
        model={"library": "open_clip", "name": str(folder), **model},
        layers=["embedding"],
        reduce=reduce,
        data=str(root / "images"),
        decode="reference",
        dtype="float32",
        precision="fp32",
        batch_size=4,
        out=str(root / out),
    )


def classifier(folder: Path, names: list[str], templates: Any = TEMPLATES) -> tuple[Any, Any]:
    """open_clip's own weights, (D, C), and the model."""
    model, _ = plain_model(folder)
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    with torch.no_grad():
        weights = open_clip.build_zero_shot_classifier(model, tokenizer, names, templates)
    return weights, model


def scores(weights: Any, model: Any, images: Any) -> np.ndarray[Any, Any]:
    """Probabilities as open_clip's documentation computes them."""
    with torch.no_grad():
        features = model.encode_image(images, normalize=True)
        logits = model.logit_scale.exp() * features @ weights
        if model.logit_bias is not None:
            logits = logits + model.logit_bias
        return logits.softmax(-1).numpy()


@pytest.mark.parametrize("kind", ["vit", pytest.param("timm", marks=pytest.mark.slow)])
def test_a_head_predicts_what_open_clip_predicts(
    kind: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind != "vit":
        extract(made, write_folder(made / kind, kind), f"{kind}-store")
    store = Path(shutil.copytree(made / f"{kind}-store", tmp_path / "store"))
    (tmp_path / "names.json").write_text(
        json.dumps({"dog": "puppy", "tree_frog": "frog on a tree", "cat": "cat"}), "utf-8-sig"
    )
    (tmp_path / "texts.txt").write_text("\n".join(TEMPLATES) + "\n\n", "utf-8-sig")
    asked = {
        "classes": str(tmp_path / "names.json"),
        "templates": str(tmp_path / "texts.txt"),
    }
    assert run_job("zeroshot", store=str(store), zeroshot=asked) == 0
    printed = capsys.readouterr().out
    head = store / "zeroshot" / "embedding.safetensors"
    assert "accuracy  " in printed
    assert "job=predict" in printed
    assert f"store={shown_path(head)}" in printed

    weights, model = classifier(made / kind, ["puppy", "frog on a tree", "cat"])
    _, transform = plain_model(made / kind)
    files = sorted((made / "images").rglob("*.png"))
    from PIL import Image

    x = torch.stack([transform(Image.open(file)) for file in files])
    expected = scores(weights, model, x)
    found = featx.predict(head, made / "images")
    assert found.classes == ("dog", "tree_frog", "cat")
    np.testing.assert_allclose(found.scores, expected, atol=1e-5)
    truth = [("dog", "tree_frog", "cat").index(file.parent.name) for file in files]
    accuracy = float((expected.argmax(1) == truth).mean())
    assert found.accuracy == pytest.approx(accuracy, abs=1e-6)
    result = json.loads((store / "zeroshot.json").read_text())
    assert (result["rows"], result["chance"]) == (9, pytest.approx(1 / 3, abs=1e-5))
    assert result["accuracy"] == pytest.approx(accuracy, abs=1e-6)

    run_job("predict", store=str(head), data=str(made / "images"), out=str(tmp_path / "new"))
    rows = csv_rows(tmp_path / "new" / "predictions.csv")
    assert [row["class"] for row in rows] == [found.classes[i] for i in expected.argmax(1)]
    with pytest.raises(StoreError, match=r"has no probe\.json.* For its zero-shot head give store"):
        run_job("predict", store=str(store), data=str(made / "images"))
    with pytest.raises(ConfigError, match=r"layers has no effect"):
        run_job("predict", store=str(head), data=str(made / "images"), layers="embedding")


def test_classes_are_those_of_the_store_or_of_a_file(made: Path, tmp_path: Path) -> None:
    store = str(shutil.copytree(made / "vit-store", tmp_path / "store"))
    run_job("zeroshot", store=store)
    head = tmp_path / "store" / "zeroshot" / "embedding.safetensors"
    weights, model = classifier(made / "vit", ["cat", "dog", "tree frog"], ["a photo of a {}."])
    found = load_file(head)
    scale = model.logit_scale.exp().detach()
    torch.testing.assert_close(found["weight"], (weights * scale).T)
    (tmp_path / "other.txt").write_text("car\nhouse\u2028boat\n")
    run_job("zeroshot", store=store, zeroshot={"classes": str(tmp_path / "other.txt")})
    result = json.loads((tmp_path / "store" / "zeroshot.json").read_text())
    assert (result["classes"], result["rows"]) == (["car", "house\u2028boat"], 0)
    assert result["accuracy"] is None
    assert np.isnan(featx.predict(head, made / "images").accuracy)
    run_job("zeroshot", store=store, zeroshot={"templates": "simple"})
    result = json.loads((tmp_path / "store" / "zeroshot.json").read_text())
    assert (result["templates"], result["num_templates"]) == ("simple", 7)


@pytest.mark.slow
def test_normalised_embeddings_give_the_same_head(made: Path, tmp_path: Path) -> None:
    extract(made, made / "vit", str(tmp_path / "unit"), normalize=True)
    store = Path(shutil.copytree(made / "vit-store", tmp_path / "plain"))
    found = []
    for place in (tmp_path / "unit", store):
        run_job("zeroshot", store=str(place))
        head = place / "zeroshot" / "embedding.safetensors"
        found.append(featx.predict(head, made / "images").scores)
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)


@pytest.mark.parametrize(
    ("text", "asked", "error", "message"),
    [
        ("cat\ncat\n", {"classes": "names.txt"}, DataError, r"each once.* 'cat' more than once"),
        ('{"cat": "crane", "dog": "Crane"}', {"classes": "names.json"}, DataError, r"'Crane' are"),
        ("", {"templates": "a \udce9{}"}, ConfigError, r"is not valid Unicode"),
        (
            '{"cat": "crane", "dog": "crane "}',
            {"classes": "names.json"},
            DataError,
            r"'crane' more than once",
        ),
        ('{"cat": "a", "cat": "b"}', {"classes": "names.json"}, DataError, r"'cat' more than once"),
        ('{"cat": "a", "dog": ""}', {"classes": "names.json"}, DataError, r"given \['a', ''\]"),
        ('["cat", "dog"]', {"classes": "names.json"}, DataError, r"expected an object of texts"),
        ("cat\n", {"classes": "names.txt"}, DataError, r"two or more names"),
        ("", {"classes": "missing.txt"}, DataError, r"zeroshot\.classes=missing\.txt cannot be"),
        ("a photo of a cat\n", {"templates": "names.txt"}, DataError, r"texts with one \{\}"),
        ("", {"templates": "names.txt"}, DataError, r"zeroshot\.templates=names\.txt is empty"),
        ("", {"templates": "missing.txt"}, DataError, r"file with one such text a line, or openai"),
        ("", {"templates": "{} and {}"}, DataError, r"texts with one \{\}"),
        ("", {"templates": "a " * 14 + "{}"}, ConfigError, r"a cat' has more than the 16 tokens"),
        ("", {"templates": " "}, ConfigError, r"zeroshot\.templates is empty"),
    ],
)
def test_files_of_names_and_texts_are_checked(
    text: str,
    asked: dict[str, str],
    error: type[FeatxError],
    message: str,
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("names.txt", "names.json"):
        Path(name).write_text(text)
    with pytest.raises(error, match=message):
        run_job("zeroshot", store=str(made / "vit-store"), zeroshot=asked)


def test_stores_without_a_text_tower_are_refused(photos: Path, tmp_path: Path) -> None:
    keys = {"data": str(photos), "precision": "fp32", "out": str(tmp_path / "timm")}
    model = {"library": "timm", "name": "test_resnet", "weights": None}
    run_job("extract", model=model, layers=["embedding"], **keys)
    with pytest.raises(ConfigError, match=r"text tower: model=open_clip.* model\.name=test_resnet"):
        run_job("zeroshot", store=keys["out"])
    with pytest.raises(ConfigError, match=r"a text tower: model=open_clip.* model\.name="):
        featx.similarity.search(keys["out"], "a frog")
    other = make_run(8).write(tmp_path / "other")
    with pytest.raises(StoreError, match=r"has no embedding, which texts are compared with"):
        run_job("zeroshot", store=str(other))


def test_projected_embeddings_are_refused(made: Path, tmp_path: Path) -> None:
    store = shutil.copytree(made / "vit-store", tmp_path / "store")
    run_job("stats", store=str(store))
    projection = {"name": "pca", "k": 2, "stats": str(store / "stats.h5")}
    extract(made, made / "vit", str(tmp_path / "projected"), reduce=projection)
    message = "stored with reduce=pca, and texts have no such numbers"
    with pytest.raises(StoreError, match=message):
        run_job("zeroshot", store=str(tmp_path / "projected"))
    with pytest.raises(StoreError, match=message):
        featx.similarity.search(tmp_path / "projected", "a frog")


@pytest.mark.slow
def test_other_weights_than_those_of_the_store_are_refused(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / "vit", tmp_path / "vit"))
    extract(made, folder, str(tmp_path / "store"))
    file = folder / "open_clip_model.safetensors"
    state = load_file(file)
    save_file({**state, "visual.proj": state["visual.proj"] + 1}, file)
    with pytest.raises(StoreMismatchError, match=r"the image tower of .* has the SHA-256"):
        run_job("zeroshot", store=str(tmp_path / "store"))


def test_another_config_than_that_of_the_store_is_refused(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = str(shutil.copytree(made / "vit-store", tmp_path / "store"))
    config = made / "vit" / "open_clip_config.json"
    text = config.read_text()
    values = json.loads(text)
    values["model_cfg"]["quick_gelu"] = not values["model_cfg"].get("quick_gelu", False)
    config.write_text(json.dumps(values))
    try:
        with pytest.raises(StoreMismatchError, match=r"the config of .* has the SHA-256"):
            run_job("zeroshot", store=store)
        monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
        with pytest.raises(StoreError, match="the disk is read-only"):  # before the model is built
            run_job("zeroshot", store=store)
    finally:
        config.write_text(text)


def test_a_tokenizer_with_code_is_refused(made: Path, tmp_path: Path) -> None:
    store = str(shutil.copytree(made / "vit-store", tmp_path / "store"))
    config = made / "vit" / "tokenizer_config.json"
    config.write_text(json.dumps({"auto_map": {"AutoTokenizer": ["own.Own", None]}}))
    try:
        with pytest.raises(ModelError, match=r"tokenizer_config\.json names Python code"):
            run_job("zeroshot", store=store)
    finally:
        config.unlink()


def test_rows_nearest_to_texts_are_those_of_open_clip(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = featx.open(made / "vit-store")
    texts = ["a lobster on a {plate}", "a tree frog"]
    model, _ = plain_model(made / "vit")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{made / 'vit'}")
    with torch.no_grad():
        encoded = model.encode_text(tokenizer(texts), normalize=True).numpy()
    images = store["embedding"][:]
    cosines = encoded @ (images / np.linalg.norm(images, axis=1, keepdims=True)).T
    order = np.argsort(-cosines, axis=1)[:, :4]
    rows, scores = featx.similarity.search(store, texts, k=4)
    assert rows.tolist() == order.tolist()
    np.testing.assert_allclose(scores, np.take_along_axis(cosines, order, 1), atol=1e-5)
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n\n", "utf-8-sig")
    for given in (texts, str(tmp_path / "texts.txt")):
        asked = {"text": given, "k": 4}
        found = job_result("neighbors", store=str(store.root), neighbors=asked)
        assert [each["text"] for each in found["texts"]] == texts
        assert [[one["row"] for one in each["nearest"]] for each in found["texts"]] == rows.tolist()
    assert run_job("neighbors", store=str(store.root), neighbors={"text": texts[0], "k": 1}) == 0
    assert texts[0] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("special", "options"),
    [
        ({"pad_token": "[EOS]"}, {}),
        ({"sep_token": "[EOS]"}, {"tokenizer_kwargs": {"strip_sep_token": True}}),
        ({"cls_token": "[BOS]"}, {"tokenizer_mode": "clips"}),
    ],
)
def test_texts_that_the_tokenizer_would_cut_off_are_refused(
    special: dict[str, str],
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of a cut text may be the same token as padding."""
    text = {**SMALL["vit"]["text_cfg"], "vocab_size": 50, "context_length": 8, **options}
    small = {**SMALL["vit"], "text_cfg": {**text, "hf_tokenizer_name": "words"}}
    monkeypatch.setitem(SMALL, "words", {**small, "custom_text": True})
    write_tokenizer(write_folder(tmp_path, "words"), **special)
    config = model_options(library="open_clip", name=str(tmp_path))
    read = 5 if options.get("tokenizer_mode") else 6
    found = text_vectors(config, ["cat " * read], torch.device("cpu"))
    assert found.vectors.shape == (1, 12)
    for count in (read + 1, read + 2, 30):
        with pytest.raises(ConfigError, match=r"has more than the 8 tokens that the model reads"):
            text_vectors(config, ["cat", "dog " * count], torch.device("cpu"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"neighbors": {"text": "a", "image": "b"}}, "what images show: give one"),
        ({"neighbors": {"text": "a", "recall": 0.9}}, "no effect with neighbors.text"),
        ({"neighbors": {"text": "a", "metric": "euclidean"}}, "metric=cosine only"),
        ({"neighbors": {"text": [" "]}}, "a text is empty"),
        ({"neighbors": {"text": "caf\udce9"}}, "is not valid Unicode"),
        ({"neighbors": {"text": "a " * 15}}, "has more than the 16 tokens"),
        ({"neighbors": {"text": "nowhere.txt"}}, "nowhere.txt cannot be read"),
        ({"neighbors": {"text": "a"}, "layers": ["logits"]}, "compared with layers=embedding"),
    ],
)
def test_texts_that_cannot_be_searched_for_are_refused(
    made: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(FeatxError, match=message):
        run_job("neighbors", store=str(made / "vit-store"), **options)
