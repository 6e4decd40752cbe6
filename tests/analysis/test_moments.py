"""Streaming moments: against whole matrices, exact under any split, and what is made of them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import math
import os
import textwrap
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from threading import Lock
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from conftest import run_python
from hypothesis import given, settings
from hypothesis import strategies as st
from made_store import make_header, make_spec

from featx.analysis.statistics import Moments, gaussian_distance, part_moments, stats_file
from featx.analysis.statistics.covariance import principal_components, whitening
from featx.analysis.statistics.moments import check_size
from featx.analysis.statistics.part_moments import PartMoments, StatsLayer
from featx.analysis.statistics.reader import open_stats
from featx.analysis.statistics.session import StatsSession
from featx.errors import (
    ConfigError,
    LayerError,
    NonFiniteError,
    ReduceError,
    RunError,
    StoreError,
    StoreMismatchError,
)
from featx.storage import AtomicFolder
from featx.store import layout
from featx.types import UNKNOWN_IMAGE, Failure, Part, Status


def made_rows(num_rows: int, dim: int, seed: int = 0) -> torch.Tensor:
    """(n, D) float64 with correlated columns of unlike scale and mean."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(num_rows, dim)) @ rng.normal(size=(dim, dim))
    return torch.from_numpy(mixed * np.logspace(-2, 2, dim) + rng.normal(size=dim) * 10)


def same_bits(a: Moments, b: Moments) -> bool:
    return (
        a.count == b.count
        and a.mean.numpy().tobytes() == b.mean.numpy().tobytes()
        and a.scatter.numpy().tobytes() == b.scatter.numpy().tobytes()
        and torch.equal(a.smallest, b.smallest)
        and torch.equal(a.largest, b.largest)
    )


def assert_close(found: torch.Tensor, expected: np.ndarray, relative: float = 1e-12) -> None:
    """Compared with the largest entry: an entry that cancels to zero has no relative error."""
    np.testing.assert_allclose(
        found.numpy(), expected, rtol=relative, atol=relative * np.abs(expected).max()
    )


# The numbers


@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_blocks_and_updates_and_merges_give_the_moments_of_all_rows(
    kind: str, set_block_sizes: Callable[..., None]
) -> None:
    rows = made_rows(300, 5)
    x = rows.numpy()
    set_block_sizes(8 * 5 * 16)
    updated = Moments.empty(5, kind)
    for batch in rows.split([1, 99, 0, 200]):
        updated = updated.merge(Moments.of(batch, kind))
    merged = Moments.of(rows[:120], kind).merge(Moments.of(rows[120:], kind))
    for moments in (Moments.of(rows, kind), updated, merged):
        assert moments.count == 300
        assert moments.smallest.tolist() == x.min(0).tolist()
        assert moments.largest.tolist() == x.max(0).tolist()
        assert_close(moments.mean, x.mean(0))
        assert_close(moments.variance(), x.var(0, ddof=1))
        if kind == "full":
            assert_close(moments.covariance(), np.cov(x, rowvar=False))
            assert_close(moments.covariance(0), np.cov(x, rowvar=False, ddof=0))
            assert torch.equal(moments.scatter, moments.scatter.T)
        else:
            with pytest.raises(ConfigError, match=r"stats\.covariance=full"):
                moments.covariance()


def exact(rows: torch.Tensor) -> tuple[list[Fraction], list[list[Fraction]]]:
    """Mean and scatter in rational numbers."""
    table = [[Fraction(value) for value in row] for row in rows.double().tolist()]
    mean = [sum(column, Fraction(0)) / len(table) for column in zip(*table, strict=True)]
    centred = [[v - m for v, m in zip(row, mean, strict=True)] for row in table]
    size = range(len(mean))
    return mean, [[sum((r[i] * r[j] for r in centred), Fraction(0)) for j in size] for i in size]


@pytest.mark.parametrize(
    ("center", "dtype"),
    [(0, torch.float64), (1e6, torch.float64), (-1e9, torch.float64), (1e4, torch.float32)],
)
def test_means_far_from_zero_cost_no_digits(center: float, dtype: torch.dtype) -> None:
    # The textbook formula, sum of squares less n mean^2, has no digit left here.
    rows = (made_rows(200, 3) + center).to(dtype)
    mean, scatter = exact(rows)
    expected = np.array([[float(value) for value in row] for row in scatter])
    streamed = Moments.empty(3)
    for batch in rows.split(13):
        streamed = streamed.merge(Moments.of(batch))
    assert_close(Moments.of(rows).mean, np.array([float(value) for value in mean]), 1e-15)
    assert_close(Moments.of(rows).scatter, expected, 1e-14)
    # The mean itself has an error of 1e-16 of its size, which is all that merging adds.
    spread = np.sqrt(np.diag(expected) / 200).min()
    assert_close(streamed.scatter, expected, 1e-14 + 1e-15 * abs(center) / spread)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_rows_are_summed_in_float64(dtype: torch.dtype) -> None:
    rows = (made_rows(3000, 4) * 3).to(dtype)
    x = rows.double().numpy()
    moments = Moments.of(rows)
    assert moments.mean.dtype == moments.scatter.dtype == torch.float64
    assert_close(moments.mean, x.mean(0))
    assert_close(moments.covariance(), np.cov(x, rowvar=False))


@pytest.mark.parametrize("value", [0.1, 1e6 + 1 / 3, -1e300])
def test_a_constant_feature_has_exactly_no_variance(value: float) -> None:
    rows = made_rows(1000, 3)
    rows[:, 1] = value
    streamed = Moments.empty(3)
    for batch in rows.split([17, 400, 583]):
        streamed = streamed.merge(Moments.of(batch))
    for moments in (Moments.of(rows), streamed):
        assert moments.mean[1].item() == value
        assert not moments.scatter[1].any()
        assert not moments.scatter[:, 1].any()


@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_no_rows_and_one_row(kind: str) -> None:
    none, one = Moments.of(torch.empty(0, 3), kind), Moments.of(torch.tensor([[1.0, 2, 3]]), kind)
    assert none.count == 0
    assert one.count == 1
    assert one.mean.tolist() == [1, 2, 3]
    assert not one.scatter.any()
    assert not none.second_moment.any()
    assert one.variance(ddof=0).tolist() == [0, 0, 0]
    with pytest.raises(ConfigError, match="more than 1 rows; there are 1"):
        one.variance()
    with pytest.raises(ConfigError, match="there are 0"):
        none.std(ddof=0)


@pytest.mark.parametrize("kind", ["full", "diagonal"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_refused_by_place(value: float, kind: str) -> None:
    rows = made_rows(20, 3).float()
    rows[13, 2] = value
    with pytest.raises(NonFiniteError, match=f"row 13: feature 2 is {value}"):
        Moments.of(rows, kind)


@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_squares_beyond_float64_are_refused(kind: str) -> None:
    with pytest.raises(NonFiniteError, match="beyond the range"):
        Moments.of(torch.tensor([[1e200], [-1e200]], dtype=torch.float64), kind)


def test_a_scatter_matrix_that_no_machine_holds_is_refused_with_advice() -> None:
    with pytest.raises(ConfigError, match=r"100352 features.*75\.0 GiB.*reduce=avg.*diagonal"):
        StatsLayer(make_spec("layer4", (2048, 7, 7)))
    assert StatsLayer(make_spec("layer4", (2048, 7, 7)), "diagonal").dim == 100352
    assert StatsLayer(make_spec("layer4", (49, 2048)), positions=49).dim == 2048
    with pytest.raises(ConfigError, match=r"stats\.covariance=diagonal"):
        Moments.empty(50_000)
    check_size(1 << 14, "full")
    with pytest.raises(ConfigError, match="expected one of"):
        check_size(3, "half")


def test_gradients_inference_mode_and_autocast_leave_no_trace() -> None:
    rows = made_rows(40, 3).float().requires_grad_()
    layer, part = StatsLayer(make_spec("a", (3,))), Part(0, 0, 40)
    plain = PartMoments(part, layer)
    plain.add(0, rows.detach())
    hooked = PartMoments(part, layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hooked.add(0, rows[:10])
        with torch.inference_mode():
            hooked.add(10, rows[10:20] * 1)
    with torch.inference_mode():
        hooked.add(20, rows[20:] * 1)
    found = hooked.finish()
    assert same_bits(found, plain.finish())
    assert not found.scatter.requires_grad
    found.scatter.mul_(2)  # no inference tensor


# The parts


def failure_of(row: int) -> Failure:
    return Failure(row, b"\xff%d.jpg" % row, Status.TRUNCATED, "OSError", f"n\u00ba {row}")


class Run:
    """A run over known rows: two layers, the second with three positions an image."""

    def __init__(
        self, num_rows: int, part_rows: int, failed: Sequence[int] = (), seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.header = make_header(seed=seed)
        self.grid = layout.Grid(num_rows, part_rows)
        self.failed = frozenset(failed)
        self.layers = (
            StatsLayer(make_spec("avgpool", (3,))),
            StatsLayer(make_spec("blocks.1:input", (3, 2)), "diagonal", positions=3),
        )
        self.rows = {
            layer.spec.name: torch.from_numpy(
                rng.normal(size=(num_rows, *layer.spec.shape)).astype(np.float32) + 50
            )
            for layer in self.layers
        }
        for rows in self.rows.values():
            rows[sorted(self.failed)] = math.nan

    def parts(self) -> list[Part]:
        return [self.grid.part(index) for index in range(len(self.grid))]

    def ok(self, name: str, part: Part | None = None) -> torch.Tensor:
        """(n, D) float64 rows that did not fail."""
        span = range(part.start, part.stop) if part else range(self.grid.num_rows)
        kept = [row for row in span if row not in self.failed]
        rows = self.rows[name][kept].double()
        return rows.reshape(-1, rows.shape[-1])

    def failures(self, part: Part) -> list[Failure]:
        rows = [row for row in self.failed if part.start <= row < part.stop]
        return [failure_of(row) for row in rows]

    def of(self, part: Part, sizes: Sequence[int]) -> dict[str, Moments]:
        """The moments of a part whose rows come in batches of these sizes, in turn."""
        found = {}
        for layer in self.layers:
            moments = PartMoments(part, layer)
            start, turn = part.start, itertools.cycle(sizes)
            while start < part.stop:
                stop = min(start + next(turn), part.stop)
                failed = [row for row in self.failed if start <= row < stop]
                batch = self.rows[layer.spec.name][start:stop].clone()
                moments.add(start, batch, failed)
                batch.fill_(math.nan)  # the next pass writes into the same memory
                start = stop
            found[layer.spec.name] = moments.finish()
        return found

    def session(self, disk: AtomicFolder) -> StatsSession:
        """Of a worker, which knows nothing about what is there."""
        return StatsSession(disk, self.header, self.grid, self.layers)

    def folder(self, root: Path, disk: AtomicFolder | None = None) -> StatsSession:
        parts = self.session(disk or AtomicFolder(root))
        parts.survey()
        return parts

    def publish(self, store: StatsSession, part: Part, sizes: Sequence[int] = (16,)) -> Any:
        checksums = np.full(len(part), UNKNOWN_IMAGE, np.uint64)
        return store.publish(part, self.failures(part), self.of(part, sizes), checksums)

    def commit(self, store: StatsSession, part: Part, sizes: Sequence[int] = (16,)) -> None:
        store.record_commit(part, self.publish(store, part, sizes))

    def whole(self, root: Path) -> Path:
        """All parts, in order; the path of the one file."""
        store = self.folder(root)
        for part in store.missing():
            self.commit(store, part)
        store.finish()
        return store.path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(("num_rows", "part_rows"), [(1, 1), (37, 4), (1100, 256)])
def test_the_one_file_equals_numpy_on_the_whole_matrix(
    tmp_path: Path, num_rows: int, part_rows: int
) -> None:
    run = Run(num_rows, part_rows, failed=range(2, num_rows, 7))
    path = run.whole(tmp_path)
    pooled, tokens = open_stats(path)["avgpool"], open_stats(path)["blocks.1:input"]
    x, y = run.ok("avgpool").numpy(), run.ok("blocks.1:input").numpy()
    assert pooled.count == len(x)
    assert tokens.count == len(y) == 3 * len(x)
    assert_close(pooled.mean, x.mean(0))
    assert_close(pooled.scatter, (x - x.mean(0)).T @ (x - x.mean(0)))
    assert_close(tokens.mean, y.mean(0))
    assert_close(tokens.scatter, ((y - y.mean(0)) ** 2).sum(0))
    assert tokens.smallest.tolist() == y.min(0).tolist()
    assert tokens.largest.tolist() == y.max(0).tolist()
    assert not (tmp_path / "stats-parts").exists()


def test_plain_h5py_reads_the_file(tmp_path: Path) -> None:
    run = Run(21, 8, failed=[3, 9])
    with h5py.File(run.whole(tmp_path)) as file:
        layer = file["layers/avgpool"]
        x = run.ok("avgpool").numpy()
        assert layer["count"][()] == 19
        np.testing.assert_allclose(layer["scatter"][:] / 18, np.cov(x, rowvar=False), rtol=1e-12)
        assert layer["mean"].dtype == layer["scatter"].dtype == "<f8"
        said = {key: layer.attrs[key] for key in ("layer", "capture", "reduce", "row", "kind")}
        assert said == {
            "layer": "avgpool",
            "capture": "output",
            "reduce": "gem",
            "row": "image",
            "kind": "full",
        }
        tokens = file["layers/blocks.1:input"]
        assert tokens["scatter"].shape == (2,)
        assert tokens.attrs["row"] == "position"
        assert tokens.attrs["rows_per_image"] == 3
        assert tokens.attrs["shape"].tolist() == [3, 2]
        root = dict(file.attrs)
    assert (root["featx_stats"], root["complete"]) == (2, True)
    assert (root["start"], root["stop"], root["num_failed"]) == (0, 21, 2)
    assert root["model"] == "toy"
    assert root["weights_sha256"] == run.header.weights_sha256
    assert "featx_format" not in root
    assert run.folder(tmp_path).failures == [failure_of(3), failure_of(9)]
    assert len(root["fingerprint"]) == 64


class KilledError(BaseException):
    """The process ends here."""


class MortalDisk(AtomicFolder):
    """Ends the process before or after its n-th change, as a kill would."""

    def __init__(self, root: Path, dies_at: int) -> None:
        super().__init__(root)
        self._left = dies_at

    def publish(self, path: Path, data: bytes | memoryview) -> bool:
        self._count()
        done = super().publish(path, data)
        self._count()
        return done

    def remove(self, path: Path) -> None:
        self._count()
        super().remove(path)

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise KilledError


sizes_of_batches = st.lists(st.integers(1, 40), min_size=1, max_size=4)


any_run = given(
    num_rows=st.integers(1, 40),
    log_part_rows=st.integers(1, 5),
    failed=st.sets(st.integers(0, 39)),
    sizes=sizes_of_batches,
    deaths=st.lists(st.integers(1, 40), max_size=3),
    random=st.randoms(use_true_random=False),
)


@pytest.mark.parametrize(
    "examples",
    [pytest.param(2, id="few"), pytest.param(100, id="many", marks=pytest.mark.slow)],
)
def test_any_batches_any_order_and_any_kill_give_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, examples: int
) -> None:
    @settings(max_examples=examples, deadline=None)
    @any_run
    def check(**drawn: Any) -> None:
        check_same_bytes(tmp_path_factory.mktemp("run"), **drawn)

    check()


@contextlib.contextmanager
def leaves_of(num_rows: int) -> Iterator[None]:
    """Let the tree of sums of a part begin with so few rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_moments, "LEAF_ROWS", num_rows)
        yield


def check_same_bytes(
    root: Path,
    num_rows: int,
    log_part_rows: int,
    failed: set[int],
    sizes: list[int],
    deaths: list[int],
    random: Any,
) -> None:
    run = Run(num_rows, 1 << log_part_rows, sorted(row for row in failed if row < num_rows))
    with leaves_of(4):
        expected = sha256(run.whole(root / "whole"))
        for dies_at in [*deaths, 0]:
            try:
                store = run.folder(root / "killed", MortalDisk(root / "killed", dies_at))
                missing = store.missing()
                random.shuffle(missing)
                for part in missing:
                    run.commit(store, part, sizes)
                assert [failure.row for failure in store.failures] == sorted(run.failed)
                store.finish()
            except KilledError:
                continue
    assert store.complete
    assert sha256(store.path) == expected
    assert set(os.listdir(root / "killed")) - {"stats-failures.csv"} == {"stats.h5"}


@pytest.mark.slow
def test_processes_that_publish_at_once_give_the_same_bytes(tmp_path: Path) -> None:
    """The driver records what it hears of; threads stand for the processes."""
    run = Run(310, 4, failed=[3, 77, 309])
    expected = sha256(run.whole(tmp_path / "whole"))
    store = run.folder(tmp_path / "shared")
    output = Lock()

    def work(number: int) -> None:
        worker = run.session(AtomicFolder(tmp_path / "shared"))
        for part in run.parts()[number::3]:
            failures = run.publish(worker, part, [4])
            with output:
                store.record_commit(part, failures)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))
    assert store.missing() == []
    assert [failure.row for failure in store.failures] == [3, 77, 309]
    assert len(list(store.folder.iterdir())) <= math.ceil(math.log2(78))
    store.finish()
    assert sha256(store.path) == expected
    assert sorted(os.listdir(tmp_path / "shared")) == [
        "stats-failures.csv",
        "stats.h5",
    ]


def test_a_part_that_is_published_again_or_late_changes_nothing(tmp_path: Path) -> None:
    run = Run(16, 4, failed=[5])
    expected = sha256(run.whole(tmp_path / "whole"))
    store, late = run.folder(tmp_path / "shared"), run.session(AtomicFolder(tmp_path / "shared"))
    parts = run.parts()
    run.publish(late, parts[1])
    again = late.publish(parts[1], [], whole_part(run), np.zeros(4, np.uint64))
    assert [failure.row for failure in again] == [5]
    for part in parts[:3]:
        run.commit(store, part)
    names = {path.name for path in store.folder.iterdir()}
    run.commit(late, parts[1])  # whose file is part of a larger one now
    assert {path.name for path in store.folder.iterdir()} > names
    store.record_commit(parts[1], [failure_of(6)])
    assert [failure.row for failure in store.failures] == [5]
    store.record_commit(parts[3], run.publish(late, parts[3]))
    store.finish()
    assert sha256(store.path) == expected


def test_failures_of_a_part_are_appended_to_their_list(tmp_path: Path) -> None:
    replaced = []

    class Disk(AtomicFolder):
        def replace(self, path: Path, data: bytes | memoryview, etag: str | None = None) -> None:
            replaced.append(path.name)
            super().replace(path, data, etag)

    run = Run(12, 2, failed=[2, 3, 5, 8])
    store = run.folder(tmp_path, Disk(tmp_path))
    store.write_failures()
    for part in reversed(store.missing()):
        run.commit(store, part)
    assert replaced == ["stats-failures.csv"]
    listed = (tmp_path / replaced[0]).read_text().splitlines()
    assert [line.split(",")[0] for line in listed] == ["row", "8", "5", "2", "3"]


def whole_part(run: Run) -> dict[str, Moments]:
    """The moments of the second part, none of whose images has failed."""
    return Run(16, 4).of(run.parts()[1], [4])


def test_what_others_published_is_found_with_its_failures(tmp_path: Path) -> None:
    """Also while files are merged that are still to be found."""
    run = Run(16, 4, failed=[5, 14])
    store, other = run.folder(tmp_path), run.session(AtomicFolder(tmp_path))
    parts = run.parts()
    assert list(store.committed_by_others(parts)) == []
    for part in (parts[0], parts[1], parts[3]):
        run.publish(other, part)
    found = {}
    for part, failures in store.committed_by_others(parts):
        store.record_commit(part, failures)
        found[part.index] = [failure.row for failure in failures]
    assert found == {0: [], 1: [5], 3: [14]}
    assert store.missing() == parts[2:3]


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(num_rows=st.integers(1, 100), failed=st.sets(st.integers(0, 99)))
def test_parts_of_any_length_give_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, num_rows: int, failed: set[int]
) -> None:
    found = set()
    failures = sorted(row for row in failed if row < num_rows)
    for part_rows in (8, 32, 512):
        root = tmp_path_factory.mktemp("run")
        with leaves_of(8):
            found.add(sha256(Run(num_rows, part_rows, failures).whole(root)))
    assert len(found) == 1


def test_leaves_of_few_rows_where_rows_are_large(set_block_sizes: Callable[..., None]) -> None:
    run = Run(50, 64, failed=[7])
    expected = run.of(run.parts()[0], [50])
    set_block_sizes(1)
    found = run.of(run.parts()[0], [50])
    for name, moments in found.items():
        assert moments.count == expected[name].count
        assert_close(moments.scatter, expected[name].scatter.numpy())


def test_a_row_that_is_not_finite_is_named_as_the_listing_counts_it() -> None:
    run = Run(40, 8, failed=[17, 18])
    tokens = run.rows["blocks.1:input"]
    tokens[21, 1, 0] = math.inf
    with pytest.raises(NonFiniteError, match="row 21: feature 0 is inf"):
        run.of(run.grid.part(2), [3])


def test_parts_are_not_merged_while_rows_are_missing(tmp_path: Path) -> None:
    run = Run(37, 4)
    store = run.folder(tmp_path)
    for part in run.parts():
        if part.index != 3:
            run.commit(store, part)
    with pytest.raises(StoreError, match="does not hold all 37 rows"):
        store.finish()
    assert not store.path.exists()


def spoil(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def place_of(path: Path, values: np.ndarray) -> int:
    return path.read_bytes().index(values.tobytes())


def test_a_damaged_part_is_refused_by_name_and_done_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(21, 8, failed=[9])
    expected = sha256(run.whole(tmp_path / "whole"))
    store = run.folder(tmp_path / "bad")
    for part in run.parts():
        run.commit(store, part)
    path = store.folder / "rows-0000000000-0000000016.h5"
    with h5py.File(path) as file:
        mean = file["layers/avgpool/mean"][:]
    spoil(path, place_of(path, mean) + 3)
    with pytest.raises(StoreError, match=r"rows-0000000000-0000000016\.h5 is damaged"):
        store.finish()
    assert not store.path.exists()
    with caplog.at_level(logging.WARNING):
        again = run.folder(tmp_path / "bad")
    assert path.name in caplog.text
    assert (tmp_path / "bad" / f"{path.name}.damaged").exists()
    assert again.missing() == run.parts()[:2]
    for part in run.parts():
        run.commit(again, part)
    again.finish()
    assert sha256(again.path) == expected


def test_a_damaged_result_is_refused_and_made_again(tmp_path: Path) -> None:
    run = Run(21, 8)
    path = run.whole(tmp_path)
    expected = sha256(path)
    spoil(path, place_of(path, open_stats(path)["avgpool"].scatter.numpy()) + 9)
    with pytest.raises(StoreError, match="damaged: it differs from its checksum"):
        open_stats(path)["avgpool"]
    store = run.folder(tmp_path)
    assert not store.complete
    assert store.missing() == run.parts()
    assert sha256(run.whole(tmp_path)) == expected


@pytest.mark.parametrize("text", [b"", b"no HDF5", b"\x89HDF\r\n\x1a\n"])
def test_what_is_no_hdf5_file_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "stats.h5"
    path.write_bytes(text)
    with pytest.raises(StoreError, match=r"stats\.h5 is damaged"):
        open_stats(path)["avgpool"]


def change(path: Path, act: Callable[[h5py.File], object]) -> Path:
    """Change a file, which looks like one that featx wrote."""
    with h5py.File(path, "r+") as file:
        act(file)
    data = path.read_bytes()
    path.write_bytes(stats_file.seal(zlib.crc32(data[512:])) + data[512:])
    return path


def replaced(file: h5py.File, name: str, value: Any) -> None:
    del file[name]
    file[name] = value


@pytest.mark.parametrize(
    "act",
    [
        lambda file: replaced(file, "layers/avgpool/mean", h5py.SoftLink("/layers/avgpool/count")),
        lambda file: replaced(file, "layers/avgpool/mean", h5py.ExternalLink("/etc/passwd", "/x")),
        lambda file: file.move("layers/avgpool/mean", "layers/avgpool/median"),
        lambda file: file.__delitem__("layers"),
        lambda file: file.attrs.__delitem__("featx_stats"),
        lambda file: file.attrs.__delitem__("settings"),
    ],
)
def test_a_file_that_was_meddled_with_is_refused(
    tmp_path: Path, act: Callable[[h5py.File], object]
) -> None:
    path = change(Run(21, 8).whole(tmp_path), act)
    with pytest.raises(StoreError, match=r"stats\.h5"):
        open_stats(path)["avgpool"]


def test_a_dataset_that_claims_terabytes_takes_no_memory(tmp_path: Path) -> None:
    def claim(file: h5py.File) -> None:
        del file["layers/avgpool/scatter"]
        file.create_dataset("layers/avgpool/scatter", (1 << 20, 1 << 20), "f8")

    path = change(Run(21, 8).whole(tmp_path), claim)
    with pytest.raises(StoreError, match="claims"):
        open_stats(path)["avgpool"]


def test_readers_are_told_what_is_wrong(tmp_path: Path) -> None:
    run = Run(21, 8)
    with pytest.raises(StoreError, match="there is no statistics file"):
        open_stats(tmp_path / "stats.h5")["avgpool"]
    path = run.whole(tmp_path)
    with pytest.raises(LayerError, match=r"avgpol.*it has avgpool.*Nearest: avgpool"):
        open_stats(path)["avgpol"]
    for version, advice in ((3, "Upgrade featx"), (1, "reads format 2. Run its command again")):
        change(path, lambda file, number=version: file.attrs.modify("featx_stats", number))
        for read in (open_stats, lambda path: run.folder(path.parent)):  # which sets none aside
            with pytest.raises(StoreError, match=f"statistics format {version}, .*{advice}"):
                read(path)
    store = run.folder(tmp_path / "part")
    run.commit(store, run.grid.part(0))
    with pytest.raises(StoreError, match="rows 0 to 8 of a run that is not complete"):
        open_stats(next(store.folder.iterdir()))["avgpool"]


def test_a_file_that_changed_is_opened_again(tmp_path: Path) -> None:
    path = Run(21, 8).whole(tmp_path)
    statistics = open_stats(tmp_path)
    assert list(statistics) == ["avgpool", "blocks.1:input"]
    assert "avgpool" in statistics
    path.unlink()
    for _ in range(2):
        with pytest.raises(StoreError, match="has changed since it was opened"):
            statistics["avgpool"]
        Run(21, 8, seed=1).whole(tmp_path)
    assert open_stats(path)["avgpool"].count == 21


@pytest.mark.parametrize("finished", [False, True])
def test_other_settings_are_refused_with_the_difference(tmp_path: Path, finished: bool) -> None:
    run = Run(21, 8)
    store = run.folder(tmp_path)
    for part in run.parts():
        run.commit(store, part)
    if finished:
        store.finish()
    before = {path: sha256(path) for path in tmp_path.rglob("*.h5")}
    run.header = make_header(seed=0, model="another")
    with pytest.raises(StoreMismatchError, match="model: 'toy', now 'another'"):
        run.folder(tmp_path)
    assert {path: sha256(path) for path in tmp_path.rglob("*.h5")} == before


def test_a_part_under_the_name_of_another_is_refused(tmp_path: Path) -> None:
    run = Run(24, 8)
    store = run.folder(tmp_path)
    run.commit(store, run.grid.part(0))
    path = next(store.folder.iterdir())
    path.rename(path.with_name("rows-0000000008-0000000016.h5"))
    again = run.folder(tmp_path)
    assert again.missing() == run.parts()


def test_a_foreign_file_is_reported(tmp_path: Path) -> None:
    run = Run(21, 8)
    (run.folder(tmp_path).folder / "rows-old.h5").write_bytes(b"")
    with pytest.raises(StoreError, match="move it away"):
        run.folder(tmp_path)


@pytest.mark.usefixtures("without_retry_waits")
def test_a_disk_that_fails_loses_nothing(tmp_path: Path) -> None:
    run = Run(21, 8)
    expected = sha256(run.whole(tmp_path / "whole"))
    store = run.folder(tmp_path / "full")
    for part in run.parts():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "full")))
            with pytest.raises(RunError, match="Free some space"):
                run.commit(store, part)
        assert part in store.missing()
        run.commit(store, part)
    store.finish()
    assert sha256(store.path) == expected


@pytest.mark.slow
def test_any_flipped_bit_is_an_error(tmp_path: Path) -> None:
    """In a process of its own, because HDF5 may hang or take the process down with it."""
    path = Run(21, 8, failed=[3]).whole(tmp_path)
    script = """
        import sys
        from pathlib import Path
        from featx.errors import StoreError, LayerError
        from featx.analysis.statistics.reader import open_stats
        path = Path(sys.argv[1])
        data = path.read_bytes()
        def read():
            moments, said = open_stats(path).layer("avgpool")
            return moments.count, moments.mean.tolist(), moments.scatter.tolist(), said
        good, refused = read(), 0
        offsets = range(0, len(data), 9)
        for offset in offsets:
            bad = bytearray(data)
            bad[offset] ^= 1 << offset % 8
            path.write_bytes(bad)
            try:
                assert read() == good, offset
            except (StoreError, LayerError):
                refused += 1
        print(len(offsets), refused)
    """
    done = run_python("-c", textwrap.dedent(script), path)
    flipped, refused = map(int, done.stdout.split())
    assert refused == flipped > 500


# What is made of them


def test_zca_is_the_inverse_root_of_the_covariance() -> None:
    rows = made_rows(400, 4)
    moments = Moments.of(rows)
    matrix = whitening(moments, zca=True, epsilon=0.5).components
    assert_close(matrix, matrix.T.numpy(), 1e-10)
    inverse = np.linalg.inv(moments.covariance().numpy() + 0.5 * np.eye(4))
    assert_close(matrix @ matrix, inverse, 1e-8)


def test_directions_without_variance_need_an_epsilon() -> None:
    rows = made_rows(10, 12)
    moments = Moments.of(rows)
    assert principal_components(moments, 9).components.shape == (9, 12)
    for call in (lambda: principal_components(moments, 10), lambda: whitening(moments)):
        with pytest.raises(ConfigError, match=r"vary in 9 directions only\. Give reduce\.k=9 or"):
            call()
    scaled = whitening(moments, epsilon=0.1)
    assert scaled.components.isfinite().all()
    assert scaled.explained_variance[9:].tolist() == [0, 0, 0]
    constant = Moments.of(torch.ones(10, 3))
    with pytest.raises(ConfigError, match=r"vary in 0 directions only\. Take the"):
        principal_components(constant, 1)


def test_impossible_requests_say_why() -> None:
    diagonal = Moments.of(made_rows(10, 3), kind="diagonal")
    with pytest.raises(ConfigError, match="the full scatter matrix is needed"):
        principal_components(diagonal, 2)
    with pytest.raises(ConfigError, match="the full scatter matrix is needed"):
        gaussian_distance(diagonal, diagonal)
    full = Moments.of(made_rows(10, 3))
    with pytest.raises(ConfigError, match="epsilon"):
        whitening(full, epsilon=-1)
    with pytest.raises(ConfigError, match="3 and 4 features"):
        gaussian_distance(full, Moments.of(made_rows(10, 4)))
    with pytest.raises(ConfigError, match="more than 1 rows"):
        gaussian_distance(full, Moments.of(made_rows(1, 3)))
    with pytest.raises(ReduceError, match="3 features does not fit"):
        principal_components(full, 2).apply(torch.ones(5, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_features_are_projected_in_float32_also_under_autocast(dtype: torch.dtype) -> None:
    rows = made_rows(200, 6).to(dtype)
    projection = principal_components(Moments.of(rows), 3)
    exactly = projection.apply(rows.double())
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        found = projection.apply(rows)
    assert found.dtype == torch.float32
    assert_close(found.double(), exactly.numpy(), 1e-6)
    weights = rows.clone().float().requires_grad_()
    projection.apply(weights).sum().backward()  # what inference mode left behind does not matter
    assert weights.grad is not None


def test_a_projection_about_a_large_mean_keeps_its_digits() -> None:
    rows = (made_rows(200, 4) / 100 + 1e6).float()
    projection = principal_components(Moments.of(rows), 2)
    expected = projection.apply(rows.double())
    # float32 holds the mean to 0.03 only; rounded so, every row would be off by that.
    assert_close(projection.apply(rows).double(), expected.numpy(), 1e-5)


def gaussian(mean: Sequence[float], covariance: np.ndarray, count: int = 1001) -> Moments:
    scatter = torch.from_numpy(np.asarray(covariance, dtype=np.float64)) * (count - 1)
    center = torch.tensor(mean, dtype=torch.float64)
    return Moments(count, center, scatter, center, center)


def test_frechet_distance_of_known_gaussians() -> None:
    # In one dimension: (m_a - m_b)^2 + (s_a - s_b)^2.
    one = gaussian_distance(gaussian([1], [[4]]), gaussian([4], [[25]]))
    assert one == pytest.approx(9 + 9, rel=1e-12)
    # Where the covariances commute, the sum of these over the common axes.
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    a, b = (turn @ np.diag(d) @ turn.T for d in ([1, 4, 9], [16, 4, 0]))
    found = gaussian_distance(gaussian([0, 0, 0], a), gaussian([1, 0, 2], b))
    assert found == pytest.approx(5 + 9 + 0 + 9, rel=1e-7)
    # Only the mean differs, and the covariance is not regular.
    flat = np.outer([1, 2, 3], [1, 2, 3])
    found = gaussian_distance(gaussian([0, 0, 0], flat), gaussian([0, 3, 4], flat))
    assert found == pytest.approx(25, rel=1e-7)


def test_frechet_distance_equals_the_root_of_the_product() -> None:
    from scipy.linalg import sqrtm

    x, y = made_rows(300, 10), made_rows(200, 10, seed=5)
    a, b = np.cov(x.numpy(), rowvar=False), np.cov(y.numpy(), rowvar=False)
    shift = x.numpy().mean(0) - y.numpy().mean(0)
    expected = shift @ shift + np.trace(a + b - 2 * sqrtm(a @ b).real)
    found = gaussian_distance(Moments.of(x), Moments.of(y))
    assert found == pytest.approx(expected, rel=1e-7)  # scipy's root has a condition of 1e10 here
    # The eigenvalues of the product in numbers of 60 digits, by mpmath.
    assert found == pytest.approx(21052.307060999880181, rel=1e-13)


@pytest.mark.slow
def test_frechet_distance_with_fewer_rows_than_features() -> None:
    """The rows span few directions: in coordinates of these the covariances are regular."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(200, 200)))[0][:, :30]
    x, y = rng.normal(size=(31, 30)) @ np.diag(np.linspace(1, 9, 30)), rng.normal(size=(31, 30))
    inside = gaussian_distance(Moments.of(torch.from_numpy(x)), Moments.of(torch.from_numpy(y)))
    outside = gaussian_distance(
        Moments.of(torch.from_numpy(x @ basis.T)), Moments.of(torch.from_numpy(y @ basis.T))
    )
    assert outside == pytest.approx(inside, rel=1e-10)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.tuples(st.integers(2, 40), st.integers(2, 40)),
    dim=st.integers(1, 12),
    seeds=st.tuples(st.integers(0, 99), st.integers(100, 199)),
)
def test_frechet_distance_is_symmetric_and_zero_for_equals(
    sizes: tuple[int, int], dim: int, seeds: tuple[int, int]
) -> None:
    a, b = (Moments.of(made_rows(n, dim, s)) for n, s in zip(sizes, seeds, strict=True))
    scale = float(a.variance().sum() + b.variance().sum())
    assert gaussian_distance(a, b) == pytest.approx(gaussian_distance(b, a), abs=1e-10 * scale)
    assert 0 <= gaussian_distance(a, a) <= 1e-10 * scale
    shifted = replace(a, mean=a.mean + 2)
    assert gaussian_distance(a, shifted) == pytest.approx(4 * dim, rel=1e-12, abs=1e-10 * scale)


@pytest.mark.gpu
def test_the_gpu_gives_the_same_moments_and_the_same_bits_again() -> None:
    run = Run(1000, 1024, failed=[5])
    part = run.parts()[0]
    here = run.of(part, [64])
    for name, rows in run.rows.items():
        run.rows[name] = rows.cuda()
    there, again = run.of(part, [64]), run.of(part, [7, 100])
    for name, moments in there.items():
        assert moments.mean.is_cuda
        assert torch.equal(moments.scatter, again[name].scatter)
        assert_close(moments.mean.cpu(), here[name].mean.numpy())
        assert_close(moments.scatter.cpu(), here[name].scatter.numpy())
    projection = principal_components(here["avgpool"], 2)
    found = projection.apply(run.rows["avgpool"])
    assert found.is_cuda
    expected = projection.apply(run.rows["avgpool"].cpu())
    torch.testing.assert_close(found.cpu(), expected, equal_nan=True)  # the failed row


def test_only_the_files_that_hold_a_row_are_discarded(tmp_path: Path) -> None:
    run = Run(14, 4)
    store = run.folder(tmp_path)
    checksums = np.arange(100, 114, dtype=np.uint64)
    for part in run.parts():
        sums = checksums[part.start : part.stop]
        store.record_commit(part, store.publish(part, [], run.of(part, [4]), sums))
    store = run.folder(tmp_path)
    assert store.checksums.tolist() == checksums.tolist()
    assert store.is_done.all()
    store.discard([9])
    assert store.missing() == run.parts()[2:3]
    for part in run.parts()[2:3]:
        sums = checksums[part.start : part.stop]
        store.record_commit(part, store.publish(part, [], run.of(part, [4]), sums))
    store.finish()
    whole = run.folder(tmp_path)
    assert whole.checksums.tolist() == checksums.tolist()
    whole.discard([9])
    assert whole.missing() == run.parts()
    assert not whole.path.exists()
