"""The attentive probe against plain PyTorch and scikit-learn, and its heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from probe_problem import write_store
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import nn

from featx.analysis.probe.heads import Head, fit_scaler, head_bytes, read_head, scores_of
from featx.analysis.probe.labelled_rows import labelled_rows
from featx.analysis.probe.layer_rows import Problem, Tokens, layer_tokens
from featx.analysis.probe.minibatch_regression import fit_attentive
from featx.config import ProbeConfig
from featx.errors import StoreError
from featx.store import FeatureStore

pytestmark = pytest.mark.usefixtures("one_thread", "in_tmp_path")

OPTIONS = ProbeConfig(method="attentive", epochs=40, learning_rate=1e-2)


def marked(num_rows: int = 240, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (n, 9, 6) of noise; one at a random place is marked and tells the class."""
    rng = np.random.default_rng(seed)
    y, x = np.arange(num_rows) % 2, rng.normal(size=(num_rows, 9, 6))
    rows, place = np.arange(num_rows), rng.integers(0, 9, num_rows)
    x[rows, place, 5] += 6
    x[rows, place, 0] += np.where(y == 1, 2.5, -2.5)
    return (x * [1, 2, 3, 1, 5, 1] + 7).astype(np.float32), y


def tokens_of(x: np.ndarray, y: np.ndarray, memory_bytes: float = 1e9, **options: Any) -> Tokens:
    root = Path(f"store{len(list(Path().iterdir()))}")
    store = FeatureStore(write_store(root, y, tokens=x, **options))
    return layer_tokens([labelled_rows(store)], "tokens", torch.device("cpu"), memory_bytes)


def trained(
    tokens: Tokens,
    y: np.ndarray,
    *strengths: float,
    places: int = 180,
    options: ProbeConfig = OPTIONS,
) -> tuple[list[Head], int]:
    problem = Problem(tokens.features, y, int(y.max()) + 1, options, 3, tokens)
    chosen = np.arange(places)
    with torch.no_grad():
        return fit_attentive(problem, chosen, fit_scaler(tokens, chosen), strengths)


def test_the_training_is_that_of_plain_pytorch() -> None:
    """One query over standardised tokens as keys and values, the same batches and schedule."""
    x, y = marked()
    tokens = tokens_of(x, y)
    (head,), num_steps = trained(tokens, y, 1e-2)
    mean, std = x[:180].reshape(-1, 6).mean(0), x[:180].reshape(-1, 6).std(0)
    z = torch.from_numpy((x - mean) / std)
    weight, bias, query = (nn.Parameter(torch.zeros(shape)) for shape in ((2, 6), (2,), (1, 6)))
    optimizer = torch.optim.Adam([weight, bias, query], 1e-2)
    generator = torch.Generator().manual_seed(3)
    steps = 40 * 3  # batches of at most 64 rows
    assert num_steps == steps

    def logits(rows: torch.Tensor) -> torch.Tensor:
        each = query.expand(len(rows), 1, 6)
        pooled = nn.functional.scaled_dot_product_attention(each, rows, rows)[:, 0]
        return nn.functional.linear(pooled, weight, bias)

    for step in range(steps):
        if step % 3 == 0:
            batches = torch.randperm(180, generator=generator).split(64)
        rows = batches[step % 3]
        loss = nn.functional.cross_entropy(logits(z[rows]), torch.from_numpy(y)[rows])
        loss = loss + 1e-2 / 2 * (weight.square().sum() + query.square().sum())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([weight, bias, query], 1.0)
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 + np.cos(np.pi * step / steps)) / 2
        optimizer.step()
    expected = logits(z[180:]).softmax(1).detach().numpy()
    scores = scores_of(head, tokens.features, np.arange(180, 240))
    assert scores == pytest.approx(expected, abs=5e-3)
    mean_token = StandardScaler().fit_transform(x.mean(1))
    linear = LogisticRegression().fit(mean_token[:180], y[:180])
    right = (scores.argmax(1) == y[180:]).mean()
    assert right > linear.score(mean_token[180:], y[180:]) + 0.05


def test_equal_tokens_make_it_the_logistic_regression_of_scikit_learn() -> None:
    rng = np.random.default_rng(1)
    y = np.arange(200) % 3
    rows = (rng.normal(size=(200, 5)) + rng.normal(size=(3, 5))[y]).astype(np.float32)
    x = np.repeat(rows[:, None], 4, axis=1)
    tokens = tokens_of(x, y)
    options = replace(OPTIONS, epochs=60, learning_rate=0.1)
    (head,), _ = trained(tokens, y, 0.05, options=options)
    z = StandardScaler().fit(rows[:180]).transform(rows)
    expected = LogisticRegression(C=1 / (0.05 * 180), tol=1e-8).fit(z[:180], y[:180])
    scores = scores_of(head, tokens.features, np.arange(180, 200))
    assert scores == pytest.approx(expected.predict_proba(z[180:]), abs=0.01)
    attention = head.attention
    assert attention is not None
    assert attention.query.abs().max() < 1e-3


def test_many_penalties_are_each_by_themselves_and_a_seed_decides_all() -> None:
    x, y = marked(60)
    tokens = tokens_of(x, y)
    together = trained(tokens, y, 1.0, 1e-3, places=40)[0]
    for head, l2 in zip(together, (1.0, 1e-3), strict=True):
        (alone,) = trained(tokens, y, l2, places=40)[0]
        assert torch.allclose(head.weight, alone.weight, atol=1e-4)
    again = trained(tokens, y, 1.0, 1e-3, places=40)[0]
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(together, again, strict=True))


def test_maps_and_tokens_of_the_same_values_give_the_same_scores() -> None:
    """(C, H, W), (H, W, C) and (T, D), in memory; (T, D) also streamed from the store."""
    x, y = marked(80)
    images = x.reshape(80, 3, 3, 6)
    kinds = {"tokens": x, "last": images, "first": np.moveaxis(images, 3, 1)}
    scores = {}
    for kind, values in kinds.items():
        tokens = tokens_of(np.ascontiguousarray(values), y)
        assert (tokens.layout.count, tokens.layout.width) == (9, 6)
        head = trained(tokens, y, 1e-2, places=60)[0][0]
        scores[kind] = scores_of(head, tokens.features, np.arange(60, 80))
    for kind in ("last", "first"):
        assert scores[kind] == pytest.approx(scores["tokens"], abs=1e-5)
    streamed = tokens_of(x, y, memory_bytes=0)
    assert streamed.features.whole is None
    head = trained(streamed, y, 1e-2, places=60)[0][0]
    found = scores_of(head, streamed.features, np.arange(60, 80))
    assert found == pytest.approx(scores["tokens"], abs=0.05)  # another order of the rows


def test_a_head_file_has_the_attention(tmp_path: Path) -> None:
    x, y = marked(40)
    tokens = tokens_of(x, y)
    (head,) = trained(tokens, y, 1e-2, places=30)[0]
    path = tmp_path / "head.safetensors"
    path.write_bytes(head_bytes(head, {"classes": ["a", "b"]}))
    again, about = read_head(path, torch.device("cpu"))
    assert about["featx_head"] == 2  # a reader of version 1 would leave the query out
    places = np.arange(30, 40)
    assert (
        scores_of(again, tokens.features, places) == scores_of(head, tokens.features, places)
    ).all()
    assert head.attention is not None
    wider = replace(head.attention, layout=replace(head.attention.layout, width=9))
    path.write_bytes(head_bytes(replace(head, attention=wider), {"classes": ["a", "b"]}))
    with pytest.raises(StoreError, match="do not fit its tokens"):
        read_head(path, torch.device("cpu"))


def test_no_flipped_bit_of_a_head_file_is_read(tmp_path: Path) -> None:
    x, y = marked(40)
    (head,) = trained(tokens_of(x, y), y, 1e-2, places=30)[0]
    path = tmp_path / "head.safetensors"
    data = head_bytes(head, {"classes": ["a", "b"]})
    path.write_bytes(data)
    read_head(path, torch.device("cpu"))
    for place in range(0, len(data), 5):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(StoreError):
            read_head(path, torch.device("cpu"))
