"""Texts and stores that were made by a CLIP model: zero-shot heads, and search by texts."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featx.analysis.probe.heads import Head, Scaler, extraction_entries, head_bytes
from featx.analysis.similarity import nearest_to
from featx.analysis.value_settings import run_of_layer
from featx.base import choose_device
from featx.config import Config, from_saved
from featx.errors import ConfigError, DataError, StoreError, StoreMismatchError, counted
from featx.layers import REDUCTIONS
from featx.models import TEMPLATE_SETS, TextClassifier, TextVectors, text_classifier, text_vectors
from featx.storage import open_folder
from featx.store import FeatureStore, Run, layout, open_if_path, result_json

FORMAT = 1
"""Version of the format of zeroshot.json."""

EMBEDDING = "embedding"
"""The dataset that a text classifier reads."""

_BLOCK_ROWS = 4096

_ROUNDING = 2e-6
"""Largest difference from 1 of the cosine of two vectors of one text."""


def run_zeroshot(config: Config, store: FeatureStore) -> dict[str, Any]:
    """Make the head of the class names, apply it to the rows of the store, and write both. Return
    zeroshot.json. Raises FeatxError if the store is not one of a CLIP model, or the names do not
    fit.
    """
    started_at = time.perf_counter()
    run = _run_of(store)
    classes, prompts = class_names(config.zeroshot.classes, store)
    templates = read_templates(config.zeroshot.templates)
    model = from_saved(run.header.config).model
    folder = store.folder
    disk = open_folder(folder)
    disk.make_folder(folder)  # first, so that an unusable path fails early
    classifier = text_classifier(model, prompts, templates, choose_device(config.device))
    _check_model(store, run, model.name, classifier)
    _check_differences(prompts, classifier.weight)
    width = classifier.weight.shape[1]
    head = Head(  # it divides embeddings by their length
        Scaler(torch.zeros(width), torch.ones(width)),
        classifier.weight,
        classifier.bias,
        probabilities=True,
        normalises=True,
    )
    result = {
        "featx_zeroshot": FORMAT,
        "store": str(store.root),
        "layer": EMBEDDING,
        "model": str(store.attrs["model"]),
        "weights": str(store.attrs["weights"]),
        "classes": classes,
        "names": prompts,
        "templates": templates if isinstance(templates, str) else list(templates),
        "num_templates": classifier.templates,
        **_accuracy(store, head, classes),
    }
    path = folder / layout.ZEROSHOT_HEADS / f"{EMBEDDING}.safetensors"
    disk.make_folder(path.parent)
    disk.replace_unlocked(path, head_bytes(head, _about(store, run, result)))
    result |= {"head": str(path), "seconds": round(time.perf_counter() - started_at, 3)}
    disk.replace_unlocked(folder / layout.ZEROSHOT, result_json(result, indent=1))
    return result


def _check_differences(names: Sequence[str], weight: torch.Tensor) -> None:
    """Raise DataError if the model cannot tell two names apart, such as `Crane` from `crane`."""
    unit = torch.nn.functional.normalize(weight)
    for start in range(0, len(unit), _BLOCK_ROWS):
        cosines = unit[start : start + _BLOCK_ROWS] @ unit.T
        equal = (cosines > 1 - _ROUNDING).triu(start + 1).nonzero()
        if len(equal):
            first, second = (names[i] for i in (equal[0] + torch.tensor([start, 0])).tolist())
            raise DataError(
                f"zeroshot: {first!r} and {second!r} are the same text for the model, so that the "
                "second would never be predicted. Give other words in zeroshot.classes."
            )


def search(
    store: FeatureStore | str | os.PathLike[str],
    text: str | Sequence[str],
    k: int = 10,
    device: str = "auto",
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Find the images whose embeddings are nearest to texts, by the text tower of their model.

    Args:
        store: store with the layer `embedding` of a model of open_clip, or of a CLIP or SigLIP of
            transformers.
        text: a text, or q texts.
        k: number of images, limited to the number of rows.

    Returns:
        (q, k) int64 rows of the store and (q, k) float32 cosines, the nearest first.

    Raises:
        StoreError: the store has no such layer, or does not say how it was made.
        ConfigError: the model has no text tower, or a text is empty.
        StoreMismatchError: the weights are others than those of the store.
    """
    texts = list(text) if isinstance(text, Iterable) and not isinstance(text, str) else [text]
    if not all(isinstance(each, str) for each in texts):
        raise ConfigError(f"text={text!r}: expected a text, or a list of texts.")
    if not texts or not all(each.strip() for each in texts):
        raise ConfigError("a text is empty: give what the images show.")
    opened = open_if_path(store)
    run = _run_of(opened)
    model = from_saved(run.header.config).model
    found = text_vectors(model, texts, choose_device(device))
    _check_model(opened, run, model.name, found)
    return nearest_to(
        opened,
        EMBEDDING,
        found.vectors,
        k,
        device=device,
        standardise=False,
        projection=found.projection,
    )


def read_texts(option: str, given: str | Sequence[str]) -> list[str]:
    """Return the texts of an option, or of the file NAME.txt that it names. Raises DataError if the
    file cannot be read, or has no text.
    """
    if not isinstance(given, str):
        return list(given)
    if not given.endswith(".txt"):
        return [given]
    texts = _lines_of(option, given)
    if not texts:
        raise DataError(f"{option}={given} has no text; expected one a line.")
    return texts


def _lines_of(option: str, path: str, expected: str = "") -> list[str]:
    """Read the lines of a file that are not empty."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{option}={path} cannot be read: {error}.{expected}") from error
    return [line.strip() for line in lines if line.strip()]


def _check_model(
    store: FeatureStore, run: Run, name: str, found: TextClassifier | TextVectors
) -> None:
    """Check that the image tower of a model is the one that a store was made with."""
    for part, now, then in (
        ("image tower", found.weights_sha256, str(store.attrs["weights_sha256"])),
        # An activation or a class token is not seen in the weights.
        ("config", found.config_sha256, run.model_settings.get("model.config_sha256")),
    ):
        if now != then:
            raise StoreMismatchError(
                f"the {part} of {name} has the SHA-256 {now}, and the store was made with {then}. "
                "Extract it again, or give back the model of then."
            )


def _run_of(store: FeatureStore) -> Run:
    """Return the run that made the embedding of a store."""
    if EMBEDDING not in store.layers:
        raise StoreError(
            f"{store.root} has no embedding, which texts are compared with; it has "
            f"{', '.join(store.layers)}. Extract it with layers=embedding and a model that reads "
            "texts, such as model=open_clip."
        )
    run = run_of_layer(store, EMBEDDING)
    if run is None:
        raise StoreError(
            f"{store.root} has no featx.json of its own, which says with which model it was made. "
            "Give the folder that job=extract made."
        )
    reduce = next(spec.reduce for spec in run.layers if spec.name == EMBEDDING)
    if REDUCTIONS.get(reduce).needs_statistics:
        raise StoreError(
            f"{store.root}: its embedding is stored with reduce={reduce}, and texts have no such "
            "numbers. Extract it with reduce=none."
        )
    return run


def class_names(file: str | None, store: FeatureStore) -> tuple[list[str], list[str]]:
    """Return the classes of a head, and their names in the texts."""
    store_classes = [str(name) for name in store.classes]
    if file is None:
        origin, classes = f"the classes of {store.root}", store_classes
        if len(classes) < 2:
            raise ConfigError(
                f"{store.root} has {counted(len(classes), 'class', 'classes')}; give the names in "
                "zeroshot.classes=FILE, one a line."
            )
        names = [name.replace("_", " ") for name in classes]
    else:
        origin, path = f"zeroshot.classes={file}", Path(file).expanduser()
        try:
            text = path.read_text(encoding="utf-8-sig")
            if path.suffix == ".json":
                pairs = json.loads(text, object_pairs_hook=list)
                if not isinstance(pairs, list) or not all(
                    isinstance(pair, tuple) and isinstance(pair[1], str) for pair in pairs
                ):
                    raise ValueError("expected an object of texts")
                classes, names = [name for name, _ in pairs], [words for _, words in pairs]
                if unknown := sorted({*classes} - {*store_classes}):
                    raise ValueError(f"the store has no class {', '.join(unknown[:3])}")
            else:
                classes = names = [line.strip() for line in text.split("\n") if line.strip()]
        except (OSError, ValueError) as error:
            raise DataError(f"{origin} cannot be read: {error}.") from error
    for each in (classes, [name.strip() for name in names]):
        # Of two classes with the same words, the second would never be predicted.
        wrong = [name for name, count in Counter(each).items() if count > 1 or not name]
        if wrong or len(each) < 2:
            given = f"{wrong[0]!r} more than once" if wrong and wrong[0] else f"{each}"[:80]
            raise DataError(
                f"{origin}: expected two or more names, each once and none empty; given {given}."
            )
    return classes, names


def read_templates(option: str) -> list[str] | str:
    """Return templates: those of a file or of one text, or the name of a list of open_clip."""
    if option in TEMPLATE_SETS:
        return option
    templates = [option]
    if "{" not in option:
        expected = (
            " Expected a text with {} for the name, a file with one such text a line, or "
            f"{' or '.join(TEMPLATE_SETS)}."
        )
        templates = _lines_of("zeroshot.templates", option, expected)
    wrong = [text for text in templates if text.count("{}") != 1 or "{" in text.replace("{}", "")]
    if wrong or not templates:
        raise DataError(
            f"zeroshot.templates={option}: expected texts with one {{}} in place of the name, such "
            f"as 'a photo of a {{}}.'; given {wrong[0]!r}."
            if wrong
            else f"zeroshot.templates={option} is empty."
        )
    return templates


def _accuracy(store: FeatureStore, head: Head, classes: Sequence[str]) -> dict[str, object]:
    """Return the accuracy over the rows of a store whose class the head has."""
    place = {name: i for i, name in enumerate(classes)}
    index_of_label = np.array([place.get(str(name), -1) for name in store.classes], np.int64)
    labels = np.asarray(store.labels)
    rows = np.flatnonzero(store.ok & (labels >= 0))
    expected = index_of_label[labels[rows]] if len(index_of_label) else np.full(len(rows), -1)
    rows, expected = rows[expected >= 0], expected[expected >= 0]
    if not len(rows):
        return {"rows": 0, "accuracy": None, "chance": None, "per_class": {}}
    predicted = np.empty(len(rows), np.int64)
    for start in range(0, len(rows), _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS]
        x = torch.from_numpy(np.asarray(store[EMBEDDING][block], np.float32))
        predicted[start : start + len(block)] = head.scores(x).argmax(1).numpy()
    right = predicted == expected
    return {
        "rows": len(rows),
        "accuracy": round(float(right.mean()), 6),
        "chance": round(float(np.bincount(expected).max() / len(rows)), 6),
        "per_class": {
            name: round(float(right[expected == i].mean()), 6)
            for i, name in enumerate(classes)
            if (expected == i).any()
        },
    }


def _about(store: FeatureStore, run: Run, result: dict[str, object]) -> dict[str, Any]:
    """Return the description that the file of the head contains."""
    return {
        "dataset": EMBEDDING,
        "method": "zeroshot",
        "accuracy": result["accuracy"],
        "reduction": {"axes": []},
        "classes": result["classes"],
        "names": result["names"],
        "templates": result["templates"],
        **{name: result[name] for name in ("store", "model", "weights")},
        **{name: str(store.attrs[name]) for name in ("fingerprint", "weights_sha256", "transform")},
        **extraction_entries(run, EMBEDDING),
    }
