"""job=probe with probe.method=attentive, and prediction with its head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_store import make_labelled
from probe_job import predictions, probe
from probe_problem import write_store
from safetensors.numpy import load_file
from scipy.special import softmax
from tiny_model import MODEL, extract, write_images

import featx
from featx.errors import ConfigError

pytestmark = pytest.mark.usefixtures("in_tmp_path", "one_thread")


def marked(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of noise, of which a marked one tells the class."""
    rng = np.random.default_rng(0)
    y, x = np.arange(num_rows) % 3, rng.normal(size=(num_rows, 8, 6)).astype(np.float32)
    rows, place = np.arange(num_rows), rng.integers(0, 8, num_rows)
    x[rows, place, 5] += 6
    x[rows, place, :3] += 3 * np.eye(3)[y]
    return x, y


@pytest.mark.slow
def test_it_finds_the_token_that_tells_the_class_and_heads_are_of_the_first_method() -> None:
    x, y = marked(150)
    write_store(Path("store"), y, failed=[4], tokens=x)
    found = probe(method=["attentive", "ridge"], l2=0.01, epochs=100)
    both = found["layers"]["tokens"]
    assert both["attentive"]["accuracy"] > 0.9 > 0.8 > both["ridge"]["accuracy"]
    assert both["attentive"]["tokens"] == 8
    assert found["head"]["method"] == "attentive"
    rows = predictions(method="attentive")
    scores = np.array([[float(row[f"score:c{i}"]) for i in range(3)] for row in rows])
    assert scores.sum(1) == pytest.approx(np.ones(30))
    right = [f"c{i}" for i in scores.argmax(1)] == np.array([row["true"] for row in rows])
    assert right.mean() == both["attentive"]["accuracy"]


def test_a_head_names_the_method_that_made_it() -> None:
    x, y = marked(60)
    write_store(Path("store"), y, tokens=x)
    assert probe(method=["ridge", "linear"])["head"]["method"] == "ridge"
    assert probe(method=["knn", "linear", "ridge"])["head"]["method"] == "linear"


def test_vectors_are_refused_with_the_layers_that_have_tokens() -> None:
    x, y = marked(30)
    write_store(Path("store"), y, tokens=x, vector=x[:, 0], single=x[:, :1])
    with pytest.raises(ConfigError, match=r"single, vector have one vector.*=\[tokens\]"):
        probe(method="attentive")
    write_store(Path("other"), y, vector=x[:, 0])
    with pytest.raises(ConfigError, match="Extract a layer with reduce=none"):
        probe(store="other", method="attentive")


def test_heat_maps_are_no_tokens() -> None:
    x, y = marked(30)
    run = make_labelled({"saliency": x}, y, ["c0", "c1", "c2"])
    specs = (replace(run.specs[0], capture="attribution (target predicted)"),)
    replace(run, specs=specs).write(Path("store"), packed=True)
    with pytest.raises(ConfigError, match="saliency has one vector or heat map a row"):
        probe(method="attentive")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"folds": 2}, {"memory_gib": 0}])
def test_its_head_predicts_images_as_the_store(options: dict[str, Any]) -> None:
    photos = write_images(Path("photos"), 24)
    extract(photos, layers={"conv": "none"})
    shape = featx.open("store")["conv"].shape[1:]
    assert len(shape) == 3
    found = probe(method="attentive", l2=0.1, epochs=30, **options)
    assert found["layers"]["conv"]["reduction"]["shape"] == list(shape)
    factory = MODEL["factory"]
    head = Path("store") / found["head"]["file"]
    predicted = featx.predict(head, photos, device="cpu", model_factory=factory)
    made = by_numpy(head, featx.open("store")["conv"][:])  # with k-fold a head of all rows
    for row, scores in zip(predicted, predicted.scores, strict=True):
        place = featx.open("store").keys.tolist().index(row.key)
        assert scores == pytest.approx(made[place], abs=1e-3)
    if "folds" in options:
        return
    tested = {row["key"]: row for row in predictions(split="test")}
    assert tested
    for row, scores in zip(predicted, predicted.scores, strict=True):
        if row.key in tested:
            expected = [float(tested[row.key][f"score:{name}"]) for name in predicted.classes]
            assert scores == pytest.approx(expected, abs=1e-3)


def by_numpy(head: Path, maps: np.ndarray) -> np.ndarray:
    """Probabilities of maps (n, C, H, W), as docs/probe.md describes the head."""
    tensors = load_file(head)
    x = maps.astype(np.float64).reshape(*maps.shape[:2], -1).transpose(0, 2, 1)
    z = (x - tensors["mean"]) / tensors["scale"]
    a = softmax(z @ tensors["query"] / np.sqrt(z.shape[2]), axis=1)
    pooled = (a[:, :, None] * z).sum(1)
    return np.asarray(softmax(pooled @ tensors["weight"].T + tensors["bias"], axis=1))


def test_few_shots_and_the_same_result_again() -> None:
    x, y = marked(60)
    write_store(Path("store"), y, tokens=x)
    first = probe(method="attentive", l2=0.01, shots=[2], epochs=10)
    assert first["few_shot"]["2"]["rows"] == [6] * 5
    head = Path("store/probe/tokens.safetensors").read_bytes()
    again = probe(method="attentive", l2=0.01, shots=[2], epochs=10)
    assert Path("store/probe/tokens.safetensors").read_bytes() == head
    assert again["log_loss"] == first["log_loss"]
