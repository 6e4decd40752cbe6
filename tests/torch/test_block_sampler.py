"""BlockShuffleSampler: every row once, random and repeatable, few blocks at a time."""

from __future__ import annotations

import re
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_store import MadeRun, make_run
from torch.utils.data import BatchSampler, DataLoader, Subset, random_split

import featx
from featx.store import LayerArray
from featx.torch import BlockShuffleSampler, FeatureDataset

pytest_plugins = ["written_store"]

READING_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reading.md"
FAILED = [0, 5, 6, 7, 40, 63, 99]


@pytest.fixture(scope="module")
def run() -> MadeRun:
    """100 rows in parts of 16; rows of a block of 8 that all failed are not among them."""
    return make_run(num_rows=100, part_rows=16, shapes={"flat": (3,)}, failed=FAILED)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of the layers of stores so far."""
    indices: list[Any] = []
    plain = LayerArray.__getitem__
    monkeypatch.setattr(
        LayerArray, "__getitem__", lambda array, index: indices.append(index) or plain(array, index)
    )
    return indices


def one_epoch(loader: DataLoader, run: MadeRun) -> list[int]:
    """The rows in the order they came; each must carry its own label."""
    place = {row.tobytes(): i for i, row in enumerate(run.features["flat"])}
    rows = []
    for features, labels in loader:
        found = [place[row.tobytes()] for row in features.numpy()]
        assert labels.tolist() == run.listing.labels[found].tolist()
        rows += found
    return rows


@given(
    length=st.integers(0, 200),
    block_rows=st.integers(1, 300),
    window=st.integers(1, 40),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 100),
)
@settings(max_examples=150, deadline=None)
def test_every_item_comes_once(
    length: int, block_rows: int, window: int, seed: int, epoch: int
) -> None:
    sampler = BlockShuffleSampler(range(length), block_rows, window, seed)
    sampler.set_epoch(epoch)
    order = list(sampler)
    assert sorted(order) == list(range(length))
    assert len(sampler) == length
    assert all(type(i) is int for i in order)


def test_the_order_follows_from_seed_and_epoch() -> None:
    orders = {}
    for seed in (0, 1):
        for epoch in (0, 1, 2):
            sampler = BlockShuffleSampler(range(500), block_rows=8, window=4, seed=seed)
            sampler.set_epoch(epoch)
            orders[seed, epoch] = list(sampler)
            again = BlockShuffleSampler(range(500), block_rows=8, window=4, seed=seed)
            again.set_epoch(epoch)
            assert list(again) == orders[seed, epoch]
    assert len({tuple(order) for order in orders.values()}) == 6


def test_each_pass_is_the_next_epoch_without_a_call() -> None:
    """Forgetting set_epoch must not show the same order for ever."""
    sampler = BlockShuffleSampler(range(100), block_rows=8, window=4)
    iter(sampler)  # never started: does not count
    passes = [list(sampler) for _ in range(3)]
    assert passes[0] != passes[1] != passes[2]
    for epoch, order in enumerate(passes):
        sampler.set_epoch(epoch)
        assert list(sampler) == order


@pytest.mark.parametrize(("batch_size", "window"), [(8, 2), (16, 4), (5, 7), (250, 64)])
def test_a_batch_touches_few_blocks(batch_size: int, window: int) -> None:
    """Those of one window; of two where it crosses from one to the next."""
    sampler = BlockShuffleSampler(range(8 * 101 + 3), block_rows=8, window=window)
    touched = [
        len({i // 8 for i in batch}) for batch in BatchSampler(sampler, batch_size, drop_last=False)
    ]
    assert max(touched) <= 2 * window
    assert np.mean(touched) <= 1.5 * window


def test_a_block_is_never_visited_again_once_its_window_is_over() -> None:
    sampler = BlockShuffleSampler(range(1000), block_rows=10, window=5)
    seen_at: dict[int, list[int]] = {}
    for at, item in enumerate(sampler):
        seen_at.setdefault(item // 10, []).append(at)
    spans = sorted((places[0] // 50, places[-1] // 50) for places in seen_at.values())
    assert spans == [(number, number) for number in range(20) for _ in range(5)]


def test_windows_are_of_equal_size_so_that_the_last_one_is_mixed_too() -> None:
    """65 blocks by 64 would leave one block alone at the end: 32 neighbours in a row."""
    order = list(BlockShuffleSampler(range(65 * 32), block_rows=32, window=64))
    assert len({item // 32 for item in order[-32:]}) >= 12


def test_a_window_larger_than_the_store_is_a_full_shuffle() -> None:
    order = np.array([list(BlockShuffleSampler(range(60), 10, 64, seed)) for seed in range(400)])
    # Each item at each place about equally often: mean place 29.5, its standard error 0.87.
    assert np.abs(order.argsort(axis=1).mean(axis=0) - 29.5).max() < 4.5
    neighbours = np.abs(np.diff(order, axis=1)) == 1
    assert neighbours.mean() < 0.05  # 2 / 60 by chance


def test_an_item_is_equally_often_in_each_half_of_the_epoch() -> None:
    early = Counter[int]()
    for seed in range(300):
        early.update(list(BlockShuffleSampler(range(64), 4, 4, seed))[:32])
    assert all(100 < early[item] < 200 for item in range(64))  # 150, standard deviation 8.7


@pytest.mark.parametrize(
    ("row_shape", "block_rows", "window"),
    [
        ((2048,), 64, 256),
        ((1280,), 64, 409),
        ((2048, 7, 7), 1, 334),
        ((1 << 20,), 1, 32),
        ((), 1 << 17, 256),
    ],
)
def test_blocks_are_about_256_kib_and_windows_64_mib(
    row_shape: tuple[int, ...], block_rows: int, window: int, tmp_path: Path
) -> None:
    run = make_run(num_rows=2, part_rows=2, shapes={"x": row_shape}, dtype="float16")
    sampler = BlockShuffleSampler(FeatureDataset(run.write(tmp_path), "x"))
    assert (sampler.block_rows, sampler.window) == (block_rows, window)


def test_sizes_are_asked_for_where_no_row_tells_them() -> None:
    with pytest.raises(ValueError, match=r"give block_rows and window.*range"):
        BlockShuffleSampler(range(10))


@pytest.mark.parametrize("num_rows", [0, 1, 2])
def test_the_smallest_stores(tmp_path: Path, num_rows: int) -> None:
    run = make_run(num_rows=num_rows or 1, part_rows=2, failed=[] if num_rows else [0])
    dataset = FeatureDataset(run.write(tmp_path), "flat")
    loader = DataLoader(dataset, batch_size=4, sampler=BlockShuffleSampler(dataset))
    assert sorted(one_epoch(loader, run)) == list(range(num_rows))
    assert len(loader) == min(num_rows, 1)


@pytest.mark.parametrize("method", [None, "fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_epochs_of_a_loader(root: Path, run: MadeRun, method: str | None) -> None:
    """The same orders with workers as without, also where the parent has read and keeps blocks."""
    dataset = FeatureDataset(root, "flat")
    sampler = BlockShuffleSampler(dataset, block_rows=8, window=3, seed=7)
    before = dataset[50][0]
    loader = DataLoader(
        dataset,
        batch_size=10,
        sampler=sampler,
        num_workers=2 if method else 0,
        multiprocessing_context=method,
        persistent_workers=method is not None,
    )
    plain = BlockShuffleSampler(dataset, block_rows=8, window=3, seed=7)
    ok = sorted(set(range(100)) - set(FAILED))
    epochs = [one_epoch(loader, run) for _ in range(2)]
    for rows in epochs:
        assert sorted(rows) == ok
        assert rows == dataset.rows[list(plain)].tolist()
        assert torch.equal(dataset[50][0], before)
    assert epochs[0] != epochs[1]


def test_an_incomplete_store_gives_what_is_there(tmp_path: Path, run: MadeRun) -> None:
    dataset = FeatureDataset(run.write(tmp_path, [1, 4]), "flat")
    loader = DataLoader(dataset, batch_size=7, sampler=BlockShuffleSampler(dataset, 32, 2))
    assert sorted(one_epoch(loader, run)) == sorted({*range(16, 32), *range(64, 80)} - {*FAILED})


def test_a_block_is_read_once_an_epoch(root: Path, run: MadeRun, reads: list[Any]) -> None:
    """What the order is for; failed rows do not shift the blocks, and Subset is seen through."""
    dataset = FeatureDataset(root, "flat")
    train, test = random_split(dataset, [70, 23], generator=torch.Generator().manual_seed(0))
    for items in (dataset, train, Subset(train, range(10, 50))):
        sampler = BlockShuffleSampler(items, block_rows=8, window=4)
        assert len(sampler) == len(items)
        loader = DataLoader(items, batch_size=10, sampler=sampler)
        reads.clear()
        rows = one_epoch(loader, run)
        assert sorted(Counter(rows).values()) == [1] * len(items)
        assert all(isinstance(index, slice) for index in reads)
        starts = [index.start for index in reads]
        assert sorted(starts) == sorted({row // 8 * 8 for row in rows})
    assert set(rows) <= {int(dataset.rows[i]) for i in train.indices}
    assert not set(rows) & {int(dataset.rows[i]) for i in test.indices}


def test_another_order_is_not_paid_with_a_block_a_row(
    root: Path, run: MadeRun, reads: list[Any]
) -> None:
    dataset = FeatureDataset(root, "flat")
    BlockShuffleSampler(dataset, block_rows=4, window=2)
    loader = DataLoader(dataset, batch_size=31, shuffle=True)
    assert len(set(one_epoch(loader, run))) == 93
    assert len(reads) == 3


def test_an_epoch_holds_one_window_in_memory(tmp_path: Path) -> None:
    run = make_run(num_rows=2048, part_rows=2048, shapes={"flat": (1024,)})  # 8 MiB
    dataset = FeatureDataset(run.write(tmp_path), "flat")
    dataset[0]
    sampler = BlockShuffleSampler(dataset, block_rows=64, window=4)  # 1 MiB
    tracemalloc.start()
    try:
        for indices in BatchSampler(sampler, 16, drop_last=False):
            dataset.__getitems__(indices)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 1 << 20 < peak < 2 << 20


def test_rows_of_a_block_each_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows as large as a block are read once an epoch anyway."""
    monkeypatch.setattr(FeatureDataset, "keep_blocks", lambda *_: pytest.fail("they are kept"))
    run = make_run(num_rows=6, part_rows=2, shapes={"flat": (1 << 18,)})
    dataset = FeatureDataset(run.write(tmp_path), "flat")
    assert sorted(one_epoch(DataLoader(dataset, sampler=BlockShuffleSampler(dataset)), run)) == [
        *range(6)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("block_rows", "window"), [(64, 256), (256, 1024)])
def test_the_reading_page_tells_how_well_it_mixes(block_rows: int, window: int) -> None:
    sampler = BlockShuffleSampler(range(1000 * 1281), block_rows, window)
    batches = np.array([*sampler][: 5000 * 256]).reshape(5000, 256)
    classes = np.mean([len(np.unique(batch // 1281)) for batch in batches])
    output = re.search(
        rf"^\| {block_rows} x {window}\b[^|]*\| (\d+) \|", READING_PAGE.read_text(), re.M
    )
    assert output is not None
    assert classes == pytest.approx(int(output[1]), rel=0.03)


def test_every_block_of_the_reading_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other, as a reader would type them, on a small store of that name."""
    pytest.importorskip("sklearn")
    shapes = {"avgpool": (8,), "layer4": (4, 3, 3)}
    run = make_run(num_rows=90, part_rows=32, shapes=shapes, dtype="float16", failed=[4, 70])
    run.write(tmp_path / "runs" / "photos", packed=True)
    monkeypatch.chdir(tmp_path)
    text = READING_PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 5
    names: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"reading.md, block {number}", "exec"), names)
    store = names["store"]
    assert isinstance(store, featx.FeatureStore)
    assert np.array_equal(store["avgpool"][:], run.expected("avgpool"), equal_nan=True)
    assert "0." in capsys.readouterr().out  # the score


def test_arguments_that_are_no_numbers(root: Path) -> None:
    sampler = BlockShuffleSampler(FeatureDataset(root, "flat"))
    with pytest.raises(ValueError, match="epoch='x': expected a whole number of at least 0"):
        sampler.set_epoch("x")  # type: ignore[arg-type]
    wrong = (("block_rows", 0, 1), ("window", 0, 1), ("window", 1.5, 1), ("seed", -1, 0))
    for name, value, least in wrong:
        with pytest.raises(ValueError, match=f"{name}={value}: expected .* of at least {least}"):
            BlockShuffleSampler(FeatureDataset(root, "flat"), **{name: value})
