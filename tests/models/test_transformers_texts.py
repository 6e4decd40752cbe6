"""Search by texts with folders of transformers, against its own text and image features."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_image
from tiny_model import job_result, run_job
from transformers_zoo import quiet, tf, write_folder, write_tokenizer

import featx
from featx.errors import (
    ConfigError,
    FeatxError,
    MissingExtraError,
    ModelError,
    StoreMismatchError,
    WeightsError,
)

TEXTS = ["a cat on the roof", "frog", "the dog on a tree"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, and for each model its folder and the store of its embedding."""
    root = tmp_path_factory.mktemp("texts")
    (root / "images").mkdir()
    for number in range(8):
        make_image(40 + number, 50, seed=number).save(root / "images" / f"{number}.png")
    for model_type in ("clip", "siglip"):
        write_tokenizer(write_folder(root / model_type, model_type))
        extract(root, root / model_type, root / f"{model_type}-store")
    return root


def extract(root: Path, folder: Path, out: Path, **options: Any) -> None:
    options = {"model": {"library": "transformers", "name": str(folder)}, **options}
    run_job("extract", data=str(root / "images"), layers=["embedding"], dtype="float32",
            precision="fp32", batch_size=4, decode="reference", out=str(out),
            **options)  # fmt: skip


def library_features(folder: Path, images: Path) -> tuple[Any, Any]:
    """Return text and image features, of length 1, as the documentation of transformers has it."""
    from PIL import Image

    with quiet():
        model = tf.AutoModel.from_pretrained(folder).eval()
        tokenizer = tf.AutoTokenizer.from_pretrained(folder)
        processor = tf.AutoImageProcessor.from_pretrained(folder, backend="pil")
    pixels = processor([Image.open(file) for file in sorted(images.iterdir())], return_tensors="pt")
    full = model.config.text_config.max_position_embeddings
    tokens = tokenizer(TEXTS, padding="max_length", max_length=full, return_tensors="pt")
    with torch.no_grad():
        texts = model.get_text_features(**tokens).pooler_output
        vectors = model.get_image_features(**pixels).pooler_output
    return (each / each.norm(dim=1, keepdim=True) for each in (texts, vectors))


@pytest.mark.parametrize("model_type", ["clip", "siglip"])
def test_rows_nearest_to_texts_are_those_of_transformers(model_type: str, root: Path) -> None:
    texts, images = library_features(root / model_type, root / "images")
    cosines = (texts @ images.T).numpy()
    order = np.argsort(-cosines, axis=1)[:, :5]
    store = featx.open(root / f"{model_type}-store")
    rows, scores = featx.similarity.search(store, TEXTS, k=5)
    np.testing.assert_allclose(scores, np.take_along_axis(cosines, order, 1), atol=2e-5)
    assert rows.tolist() == order.tolist()
    asked = {"text": TEXTS, "k": 5}
    found = job_result("neighbors", store=str(store.root), neighbors=asked)["texts"]
    assert [[one["row"] for one in each["nearest"]] for each in found] == order.tolist()


def test_padding_does_not_change_texts_of_clip(root: Path) -> None:
    texts, _ = library_features(root / "clip", root / "images")
    with quiet():
        model = tf.AutoModel.from_pretrained(root / "clip").eval()
        tokenizer = tf.AutoTokenizer.from_pretrained(root / "clip")
    with torch.no_grad():
        short = model.get_text_features(**tokenizer(TEXTS, padding=True, return_tensors="pt"))
    expected = short.pooler_output / short.pooler_output.norm(dim=1, keepdim=True)
    torch.testing.assert_close(texts, expected)


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def with_code(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": {"A": ["own.Own"]}}))


def without_padding(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pad_token": None}))


def with_sentencepiece(folder: Path) -> None:
    without_tokenizer(folder)
    (folder / "spiece.model").write_bytes(b"")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "SiglipTokenizer"}')


def with_more_words(folder: Path) -> None:
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    values["model"]["vocab"]["frog"] = 60
    file.write_text(json.dumps(values))


def with_other_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    name = next(name for name in state if "vision_model" in name)
    state[name] = state[name] + 1
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def with_another_activation(folder: Path) -> None:
    file = folder / "config.json"
    values = json.loads(file.read_text())
    values["vision_config"]["hidden_act"] = "relu"
    file.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("change", "text", "error", "message"),
    [
        (without_tokenizer, "a cat", WeightsError, r"the tokenizer of .* cannot be loaded"),
        (without_padding, "a cat", WeightsError, r"cannot be loaded: it has no pad_token"),
        pytest.param(
            *(with_sentencepiece, "a cat", MissingExtraError, r"pip install sentencepiece"),
            marks=pytest.mark.skipif(find_spec("sentencepiece") is not None, reason="it is there"),
        ),
        (with_code, "a cat", ModelError, r"tokenizer_config\.json names Python code"),
        (with_more_words, "frog", WeightsError, r"the model, which has 50 tokens: it .* 60"),
        (with_other_weights, "a cat", StoreMismatchError, r"the image tower of .* has the SHA-256"),
        (with_another_activation, "a cat", StoreMismatchError, r"the config of .* has the SHA-256"),
        (None, "a cat " * 9, ConfigError, r"has 20 tokens, and the model reads 8: shorten it"),
        (None, " ", ConfigError, r"a text is empty"),
        (None, "caf\udce9", ConfigError, r"'caf.udce9' is not valid Unicode"),
    ],
)
def test_texts_that_cannot_be_encoded_are_refused(
    change: Any, text: str, error: type[FeatxError], message: str, root: Path
) -> None:
    backup = Path(shutil.copytree(root / "clip", root / "backup"))
    try:
        if change is not None:
            change(root / "clip")
        with pytest.raises(error, match=message):
            featx.similarity.search(root / "clip-store", text)
    finally:
        shutil.rmtree(root / "clip")
        backup.rename(root / "clip")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"weights": None}, r"texts need a model with trained weights"),
        ({"name": "vit"}, r"has the model_type vit, expected clip or siglip"),
    ],
)
def test_models_without_a_text_tower_are_refused(
    model: dict[str, Any], message: str, root: Path, tmp_path: Path
) -> None:
    folder = root / "clip"
    if "name" in model:
        folder = write_folder(tmp_path / model.pop("name"), "vit")
    options = {"library": "transformers", "name": str(folder), **model}
    extract(root, folder, tmp_path / "store", model=options)
    with pytest.raises(ConfigError, match=message):
        featx.similarity.search(tmp_path / "store", "a cat")
