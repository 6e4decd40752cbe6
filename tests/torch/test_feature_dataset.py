"""A store as a torch Dataset: the right rows, in one process and in several."""

from __future__ import annotations

import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_store import MadeRun, as_bfloat16, make_run
from torch.utils.data import DataLoader

from featx.errors import LayerError, StoreError
from featx.torch import FeatureDataset

pytest_plugins = ["written_store"]


@pytest.fixture(scope="module")
def run() -> MadeRun:
    return make_run(num_rows=29, part_rows=8, failed=[0, 2, 17, 28])


def ok_rows(run: MadeRun) -> np.ndarray:
    return np.flatnonzero(run.status() == 0)


def with_blocks(root: Path, layer: str, block_rows: int, num_blocks: int) -> FeatureDataset:
    dataset = FeatureDataset(root, layer)
    dataset.keep_blocks(block_rows, num_blocks)
    return dataset


def test_items_are_the_ok_rows_with_their_labels(root: Path, run: MadeRun) -> None:
    dataset = FeatureDataset(root, "map")
    assert len(dataset) == 25
    assert dataset.rows.tolist() == ok_rows(run).tolist()
    for i, row in enumerate(ok_rows(run)):
        feature, label = dataset[i]
        assert feature.dtype == torch.float32
        assert np.array_equal(feature.numpy(), run.features["map"][row])
        assert isinstance(label, int)
        assert label == run.listing.labels[row]


def test_rows_without_a_label_are_left_out_if_labelled_ones_are_asked_for(
    root: Path, run: MadeRun
) -> None:
    dataset = FeatureDataset(root, "flat", labelled=True)
    labelled = [row for row in ok_rows(run) if run.listing.labels[row] >= 0]
    assert dataset.rows.tolist() == labelled != ok_rows(run).tolist()
    assert [label for _, label in dataset] == run.listing.labels[labelled].tolist()
    assert np.array_equal(dataset[3][0].numpy(), run.features["flat"][labelled[3]])


@pytest.mark.parametrize("dtype", ["float32", np.float32, torch.int64])
def test_another_dtype_than_a_floating_one_of_torch_is_refused(root: Path, dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"^dtype=.*: expected a floating dtype, such as torch\."):
        FeatureDataset(root, "flat", dtype=dtype)


def test_a_batch_in_one_read_is_the_same_items(root: Path) -> None:
    dataset = FeatureDataset(root, "flat")
    chosen = [24, 0, 7, 7, -3]
    batch = dataset.__getitems__(chosen)
    assert len(batch) == 5
    for i, (feature, label) in zip(chosen, batch, strict=True):
        assert torch.equal(feature, dataset[i][0])
        assert label == dataset[i][1]
    assert dataset.__getitems__([]) == []


@pytest.mark.parametrize("index", [25, -26])
def test_an_index_out_of_range_is_an_index_error(root: Path, index: int) -> None:
    """Else iterating over the dataset would never end."""
    dataset = FeatureDataset(root, "flat")
    with pytest.raises(IndexError):
        dataset[index]
    with pytest.raises(IndexError):
        dataset.__getitems__([0, index])
    assert len(list(dataset)) == 25


@pytest.mark.parametrize("index", [3, -22, np.int32(3), np.uint8(3), torch.tensor(3)])
def test_any_whole_number_is_an_index(root: Path, run: MadeRun, index: object) -> None:
    dataset = FeatureDataset(root, "flat")
    expected = run.features["flat"][ok_rows(run)[3]]
    assert np.array_equal(dataset[index][0].numpy(), expected)  # type: ignore[index]
    (feature, _), *others = dataset.__getitems__([index, 0])  # type: ignore[list-item]
    assert np.array_equal(feature.numpy(), expected)
    assert len(others) == 1


@pytest.mark.parametrize("index", [1.0, 1.5, "1", None, slice(0, 2), [0, 1]])
def test_what_is_no_whole_number_is_refused_and_never_rounded(root: Path, index: object) -> None:
    dataset = FeatureDataset(root, "flat")
    with pytest.raises(TypeError, match=r"is a whole number, not .* torch\.utils\.data\.Subset"):
        dataset[index]  # type: ignore[index]
    with pytest.raises(TypeError):
        dataset.__getitems__([index])  # type: ignore[list-item]


@pytest.mark.parametrize("stored", ["float16", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, None])
def test_the_dtype_is_float32_or_what_is_asked_for(
    tmp_path: Path, stored: str, dtype: torch.dtype | None
) -> None:
    run = make_run(num_rows=3, part_rows=2, dtype=stored)
    root = run.write(tmp_path)
    asked = {} if dtype == torch.float32 else {"dtype": dtype}
    dataset = FeatureDataset(root, "flat", **asked)
    batch, labels = next(iter(DataLoader(dataset, batch_size=3)))
    assert dataset[2][0].dtype == batch.dtype == (dtype or getattr(torch, stored))
    assert np.array_equal(batch.numpy(), run.features["flat"])
    assert labels.dtype == torch.int64
    assert torch.nn.Linear(batch.shape[1], 2, dtype=batch.dtype)(batch).shape == (3, 2)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("keeps_blocks", [True, False])
def test_bfloat16_stays_bfloat16(tmp_path: Path, packed: bool, keeps_blocks: bool) -> None:
    run = as_bfloat16(make_run(num_rows=9, part_rows=4))
    root = run.write(tmp_path, packed=packed)
    dataset = FeatureDataset(root, "map", dtype=None)
    if keeps_blocks:
        dataset.keep_blocks(2, 9)
    batch, _ = next(iter(DataLoader(dataset, batch_size=9)))
    assert dataset[2][0].dtype == batch.dtype == torch.bfloat16
    assert np.array_equal(batch.view(torch.int16).numpy().view("<u2"), run.features["map"])
    assert dataset.store["map"].stored_dtype == "bfloat16"


def test_a_layer_of_one_number_a_row(tmp_path: Path) -> None:
    run = make_run(num_rows=5, part_rows=2, shapes={"score": ()}, failed=[1])
    root = run.write(tmp_path)
    for dataset in (FeatureDataset(root, "score"), with_blocks(root, "score", 2, 2)):
        batch, _ = next(iter(DataLoader(dataset, batch_size=8)))
        assert np.array_equal(batch.numpy(), run.features["score"][[0, 2, 3, 4]])
        assert dataset[0][0].shape == ()


def test_an_unknown_layer_is_told_when_the_dataset_is_made(root: Path) -> None:
    with pytest.raises(LayerError, match="flat"):
        FeatureDataset(root, "flta")


@pytest.mark.parametrize("failed", [[], [0, 1, 2]])
def test_a_store_without_an_ok_row_is_an_empty_dataset(tmp_path: Path, failed: list[int]) -> None:
    run = make_run(num_rows=3, part_rows=2, failed=failed)
    dataset = FeatureDataset(run.write(tmp_path, None if failed else []), "flat")
    assert len(dataset) == 0
    assert list(DataLoader(dataset, batch_size=2)) == []
    with pytest.raises(IndexError):
        dataset[0]


def test_rows_that_came_later_do_not_shift_the_items(tmp_path: Path, run: MadeRun) -> None:
    """The dataset is what it was when it was made, also after the parts are gone."""
    dataset = FeatureDataset(run.write(tmp_path, [1, 3]), "flat")
    assert dataset.rows.tolist() == [*range(8, 16), *range(24, 28)]
    run.write(tmp_path, [0, 2], packed=True)
    for i, row in enumerate(dataset.rows):
        assert np.array_equal(dataset[i][0].numpy(), run.features["flat"][row])
        assert dataset[i][1] == run.listing.labels[row]


def test_the_rows_cannot_be_changed_behind_the_items(root: Path) -> None:
    dataset = FeatureDataset(root, "flat")
    with pytest.raises(ValueError, match="read-only"):
        dataset.rows[0] = 5
    with pytest.raises(AttributeError):
        dataset.rows = np.arange(3)  # type: ignore[misc]


@pytest.mark.parametrize("blocks", [None, (4, 3)])
def test_a_part_that_went_is_an_error_and_not_nan(
    tmp_path: Path, run: MadeRun, blocks: tuple[int, int] | None
) -> None:
    """A worker that opens the files anew would find the rows absent, and give NaN a label."""
    dataset = FeatureDataset(run.copied(tmp_path), "flat")
    if blocks:
        dataset.keep_blocks(*blocks)
    elsewhere = pickle.loads(pickle.dumps(dataset))
    (tmp_path / "parts" / "part-000001.h5").unlink()
    with pytest.raises(StoreError, match=r"has lost rows since it was opened: .*part-000001"):
        elsewhere.__getitems__([0, 6, 7])  # rows 1, 8, 9
    assert np.array_equal(elsewhere[0][0].numpy(), run.features["flat"][1])


def test_another_run_in_the_stores_place_is_an_error(tmp_path: Path, run: MadeRun) -> None:
    """The parts went, and what lies there now has the same shape: its rows have other labels."""
    dataset = FeatureDataset(run.copied(tmp_path / "store"), "flat")
    elsewhere = pickle.loads(pickle.dumps(dataset))
    shutil.rmtree(tmp_path / "store")
    other = make_run(num_rows=29, part_rows=8, seed=1)
    other.write(tmp_path / "store", packed=True)
    with pytest.raises(StoreError):
        elsewhere[3]
    with pytest.raises(StoreError):
        elsewhere[3]


@pytest.mark.parametrize(("block_rows", "num_blocks"), [(1, 1), (2, 3), (4, 1), (8, 4), (64, 1)])
def test_blocks_change_no_item(root: Path, run: MadeRun, block_rows: int, num_blocks: int) -> None:
    """In any order, also one that asks for more blocks than are kept."""
    dataset = with_blocks(root, "map", block_rows, num_blocks)
    expected = run.features["map"][ok_rows(run)]
    rng = np.random.default_rng(0)
    for size in [1, 3, 25, 60, 2, 25]:
        chosen = rng.integers(-25, 25, size).tolist()
        found = torch.stack([feature for feature, _ in dataset.__getitems__(chosen)])
        assert np.array_equal(found.numpy(), expected[chosen])
    assert [label for _, label in dataset] == run.listing.labels[ok_rows(run)].tolist()


def test_what_is_done_to_an_item_stays_out_of_the_kept_blocks(root: Path) -> None:
    dataset = with_blocks(root, "flat", 8, 4)
    before = dataset[3][0].clone()
    dataset[3][0].zero_()
    dataset.__getitems__([3])[0][0].zero_()
    assert torch.equal(dataset[3][0], before)
    assert before.any()


def test_a_pickle_takes_no_rows_along(tmp_path: Path) -> None:
    """Spawned workers get the dataset through a pipe."""
    run = make_run(num_rows=64, part_rows=64, shapes={"flat": (4096,)})
    dataset = with_blocks(run.write(tmp_path), "flat", 8, 8)
    list(dataset)
    sent = pickle.dumps(dataset)
    assert len(sent) < 1 << 16 < 64 * dataset.row_bytes
    assert torch.equal(pickle.loads(sent)[63][0], dataset[63][0])


def test_threads_share_a_dataset_and_its_blocks(root: Path, run: MadeRun) -> None:
    dataset = with_blocks(root, "flat", 2, 2)  # blocks are dropped all the time
    expected = run.features["flat"][ok_rows(run)]

    def wrong_rows(seed: int) -> int:
        order = np.random.default_rng(seed).integers(0, 25, (60, 3))
        return sum(
            not np.array_equal(torch.stack([f for f, _ in dataset.__getitems__(batch)]), rows)
            for batch, rows in zip(order.tolist(), expected[order], strict=True)
        )

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(wrong_rows, range(4))) == [0, 0, 0, 0]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_workers_give_the_right_rows(tmp_path: Path, run: MadeRun, method: str) -> None:
    dataset = FeatureDataset(run.copied(tmp_path), "flat")
    first = dataset[0][0]  # the files are open before the workers are made
    loader = DataLoader(
        dataset,
        batch_size=4,
        num_workers=2,
        multiprocessing_context=method,
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
    )
    features, labels = [], []
    for batch, batch_labels in loader:
        features.append(batch)
        labels.append(batch_labels)
        assert torch.equal(dataset[0][0], first)
    rows = ok_rows(run)
    found = torch.cat(features).numpy()
    expected = run.features["flat"][rows]
    # Every row once, each with its own label.
    place = {row.tobytes(): i for i, row in enumerate(expected)}
    order = [place[row.tobytes()] for row in found]
    assert sorted(order) == list(range(25))
    assert order != sorted(order)
    assert torch.cat(labels).tolist() == run.listing.labels[rows][order].tolist()
