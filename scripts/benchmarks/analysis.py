"""Analysis of features: linear probes, and nearest neighbours."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.commands import Add
from benchmarks.synthetic_stores import clustered_rows, make_store


def probe(arguments: argparse.Namespace) -> None:
    """Seconds of one fit of the same objective to the same tolerance, and what each predicts."""
    import torch
    from sklearn.linear_model import LogisticRegression

    from featx.analysis.probe.logistic_regression import TOLERANCE, fit_logistic

    x, y = read_positions(arguments) if arguments.store else make_problem(arguments)
    num_rows, num_classes = len(x) * 5 // 6, int(y.max()) + 1
    fitted, tested = slice(0, num_rows), slice(num_rows, len(x))
    mean, scale = x[fitted].mean(0), x[fitted].std(0)
    x -= mean
    x /= np.maximum(scale, 1e-6)

    def by_featx() -> np.ndarray:
        with torch.no_grad():
            rows = torch.from_numpy(x[fitted])
            labels = torch.from_numpy(y[fitted])
            fit = fit_logistic(rows, labels, num_classes, arguments.l2)
        print(f"  featx: {fit.iterations} iterations, gradient {fit.max_abs_gradient:.2g}")
        return (x[tested] @ fit.weight.numpy().T + fit.bias.numpy()).argmax(1)

    def by_sklearn() -> np.ndarray:
        strength = 1 / (arguments.l2 * num_rows)
        fit = LogisticRegression(C=strength, tol=TOLERANCE, max_iter=1000)
        fit.fit(x[fitted], y[fitted])
        print(f"  scikit-learn: {int(fit.n_iter_.max())} iterations")
        return fit.predict(x[tested])

    seconds: dict[str, list[float]] = {"featx": [], "scikit-learn": []}
    for _ in range(arguments.runs):
        for name, predict in (("featx", by_featx), ("scikit-learn", by_sklearn)):
            started_at = time.perf_counter()
            predicted = predict()
            seconds[name].append(time.perf_counter() - started_at)
            accuracy = float((predicted == y[tested]).mean())
            print(f"  {name}: {seconds[name][-1]:.1f} s, accuracy {accuracy:.4f}", flush=True)
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    print(
        f"{num_rows} x {x.shape[1]}, {num_classes} classes, l2 "
        f"{arguments.l2:g}: scikit-learn takes {statistics.median(ratios):.2f} times as long "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
    )


def make_problem(arguments: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Synthetic features and classes."""
    rng = np.random.default_rng(0)
    total = arguments.rows + arguments.rows // 5
    y = rng.integers(0, arguments.classes, total)
    centres = rng.normal(size=(arguments.classes, arguments.features)).astype(np.float32)
    x = rng.normal(size=(total, arguments.features)).astype(np.float32)
    if arguments.condition == 1:
        x *= np.geomspace(1, 0.05, arguments.features, dtype=np.float32)
        x += arguments.signal * centres[y]
    else:  # correlated, as features of networks are
        x += arguments.signal * centres[y]
        x *= np.geomspace(1, arguments.condition**-0.5, arguments.features, dtype=np.float32)
        x = x @ np.linalg.qr(rng.normal(size=(arguments.features,) * 2))[0].astype(np.float32)
    return x, y


def read_positions(arguments: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the maps or tokens of a store in a random order, with the classes of their rows.

    The values of all layers at a position are joined; `reduce=align` gives layers the same grid.
    """
    import featx
    from featx.torch import TokenDataset

    layers = featx.open(arguments.store).layers
    datasets = [
        TokenDataset(arguments.store, name, batch_size=1, drop_last=False) for name in layers
    ]
    total, num_rows = datasets[0].num_tokens, len(datasets[0].store)
    if any(each.num_tokens != total for each in datasets):
        raise SystemExit(f"the layers of {arguments.store} have different numbers of positions")
    count = min(total, arguments.rows * 6 // 5)
    chosen = np.random.default_rng(0).permutation(total)[:count]
    rows, positions = np.divmod(chosen, total // num_rows)
    x = np.concatenate([each.take(rows, positions).float().numpy() for each in datasets], axis=1)
    return x, datasets[0].store.labels[rows]


def nearest(arguments: argparse.Namespace) -> None:
    """The 10 nearest of some rows, exactly, by featx and by faiss; then of all, by an index."""
    import featx
    from featx.similarity import RowIndex

    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        root = Path(name, "store")
        make_store(root, arguments.rows, (arguments.features,), clustered_rows)
        store = featx.open(root)
        queries = np.random.default_rng(1).permutation(arguments.rows)[: arguments.queries]
        seconds = compare_exact_search(store, queries, arguments.runs)
        build_s, search_s = [], []
        index = measure(
            "building the index", build_s, lambda: RowIndex(store, "layer", arguments.recall)
        )
        measure("all rows by the index", search_s, index.nearest_rows)
        all_exact = statistics.median(seconds) * arguments.rows / len(queries)
        print(
            f"{index.recall:.2%} of the nearest rows by {index.num_probed_lists} of "
            f"{index.num_lists} lists, in {build_s[0] + search_s[0]:.0f} s of processor time; all "
            f"exactly, extrapolated from the rows above, {all_exact:.0f} s"
        )


def compare_exact_search(store: Any, queries: np.ndarray, runs: int) -> list[float]:
    """Exact search by featx and by faiss, in turn; seconds of processor time of featx's runs."""
    import faiss
    import torch

    from featx.analysis import LayerVectors
    from featx.analysis.similarity import nearest_among

    faiss.omp_set_num_threads(torch.get_num_threads())
    vectors = LayerVectors(store, "layer", torch.device("cpu"), unit=True)
    matrix = vectors.block(0, len(vectors)).numpy()
    flat = faiss.IndexFlatIP(matrix.shape[1])
    flat.add(matrix)
    exact = {
        "featx": lambda: nearest_among(vectors, queries, 10).scores,
        "faiss": lambda: flat.search(matrix[queries], 11)[0][:, 1:],
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in exact}
    for _ in range(runs):
        scores = {kind: measure(kind, seconds[kind], search) for kind, search in exact.items()}
        assert np.allclose(scores["featx"], scores["faiss"], atol=1e-5), "not the same rows"
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    print(
        f"{len(queries)} of {len(matrix)} rows of {matrix.shape[1]}, exactly: faiss takes "
        f"{statistics.median(ratios):.2f} times the processor time of featx "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
    )
    return seconds["featx"]


def measure(name: str, seconds: list[float], function: Callable[[], Any]) -> Any:
    """Call a function, print its times, and add its processor time to `seconds`."""
    wall, cpu = time.perf_counter(), time.process_time()
    value = function()
    seconds.append(time.process_time() - cpu)
    print(
        f"  {name}: {seconds[-1]:.1f} s of processor time, {time.perf_counter() - wall:.1f} s",
        flush=True,
    )
    return value


def add_commands(add: Add) -> None:
    """Register the commands of this module."""
    command = add("probe", probe)
    command.add_argument(
        "--rows", type=int, default=50_000, help="to fit on; a fifth more are tested"
    )
    command.add_argument("--features", type=int, default=2048)
    command.add_argument("--classes", type=int, default=10)
    command.add_argument(
        "--signal", type=float, default=0.05, help="spread of the classes' centres"
    )
    command.add_argument("--l2", type=float, default=1e-3)
    command.add_argument(
        "--store", help="store whose positions are the rows, instead of synthetic ones"
    )
    command.add_argument(
        "--condition", type=float, default=1, help="ratio of the features' largest and smallest "
        "variance after a rotation; 1 for features that are not correlated",
    )  # fmt: skip
    command.add_argument("--runs", type=int, default=1)
    command = add("nearest", nearest)
    command.add_argument("--rows", type=int, default=100_000)
    command.add_argument("--features", type=int, default=512)
    command.add_argument("--queries", type=int, default=4096, help="rows of the exact search")
    command.add_argument("--recall", type=float, default=0.99)
    command.add_argument("--runs", type=int, default=3)
    command.add_argument("--folder", help="where the store lies")
