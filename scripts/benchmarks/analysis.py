"""Analysis of features: linear probes, and nearest neighbours."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.rounds import Add, compare, timed
from benchmarks.synthetic_stores import clustered_rows, make_store


def probe(arguments: argparse.Namespace) -> None:
    """Fits of the same objective to the same tolerance in an hour, and what each predicts."""
    import torch
    from sklearn.linear_model import LogisticRegression

    from featx.analysis.probe.logistic_regression import TOLERANCE, fit_logistic

    x, y = make_problem(arguments)
    num_rows, num_classes = arguments.rows, arguments.classes
    fitted, tested = slice(0, num_rows), slice(num_rows, len(x))
    mean, scale = x[fitted].mean(0), x[fitted].std(0)
    x -= mean
    x /= np.maximum(scale, 1e-6)

    def report(name: str, iterations: int, predicted: np.ndarray) -> int:
        accuracy = float((predicted == y[tested]).mean())
        print(f"  {name}: {iterations} iterations, accuracy {accuracy:.4f}", flush=True)
        return 3600

    def by_sklearn() -> int:
        strength = 1 / (arguments.l2 * num_rows)
        fit = LogisticRegression(C=strength, tol=TOLERANCE, max_iter=1000)
        fit.fit(x[fitted], y[fitted])
        return report("scikit-learn", int(fit.n_iter_.max()), fit.predict(x[tested]))

    def by_featx() -> int:
        with torch.no_grad():
            rows, labels = torch.from_numpy(x[fitted]), torch.from_numpy(y[fitted])
            fit = fit_logistic(rows, labels, num_classes, arguments.l2)
        logits = x[tested] @ fit.weight.numpy().T + fit.bias.numpy()
        return report("featx", fit.iterations, logits.argmax(1))

    title = f"{num_rows} x {x.shape[1]}, {num_classes} classes, l2 {arguments.l2:g}"
    cases = {"scikit-learn": timed(by_sklearn), "featx": timed(by_featx)}
    compare(title, cases, arguments.runs, "fits an hour")


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


def nearest(arguments: argparse.Namespace) -> None:
    """The 10 nearest of some rows, exactly, by faiss and by featx; then of all, by an index."""
    import faiss
    import torch

    import featx
    from featx.analysis import LayerVectors
    from featx.analysis.similarity import nearest_among
    from featx.similarity import RowIndex

    faiss.omp_set_num_threads(torch.get_num_threads())
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        root = Path(name, "store")
        make_store(root, arguments.rows, (arguments.features,), clustered_rows)
        store = featx.open(root)
        queries = np.random.default_rng(1).permutation(arguments.rows)[: arguments.queries]
        vectors = LayerVectors(store, "layer", torch.device("cpu"), unit=True)
        matrix = vectors.block(0, len(vectors)).numpy()
        flat = faiss.IndexFlatIP(matrix.shape[1])
        flat.add(matrix)

        def by_faiss() -> np.ndarray:
            return flat.search(matrix[queries], 11)[0][:, 1:]

        def by_featx() -> np.ndarray:
            return nearest_among(vectors, queries, 10).scores

        assert np.allclose(by_faiss(), by_featx(), atol=1e-5), "not the same rows"
        cases = {
            "faiss": timed(lambda: len(by_faiss()), time.process_time),
            "featx": timed(lambda: len(by_featx()), time.process_time),
        }
        title = f"{len(queries)} of {len(matrix)} rows of {matrix.shape[1]}, exactly"
        compare(title, cases, arguments.runs, "rows per second of processor time")
        started_at = time.process_time()
        index = RowIndex(store, "layer", arguments.recall)
        index.nearest_rows()
        print(
            f"{index.recall:.2%} of the nearest rows by {index.num_probed_lists} of "
            f"{index.num_lists} lists, built and searched for all rows in "
            f"{time.process_time() - started_at:.1f} s of processor time"
        )


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
