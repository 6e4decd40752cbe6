"""A store as a torch Dataset: the right rows, in one process and in several."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from made_store import MadeRun, make_run
from torch.utils.data import DataLoader

from featx.torch import FeatureDataset


@pytest.fixture(scope="module")
def run() -> MadeRun:
    return make_run(num_rows=29, part_rows=8, failed=[0, 2, 17, 28])


@pytest.fixture(scope="module", params=["parts", "packed"])
def root(request: pytest.FixtureRequest, run: MadeRun, tmp_path_factory: pytest.TempPathFactory):
    return run.write(tmp_path_factory.mktemp("store"), packed=request.param == "packed")


def ok_rows(run: MadeRun) -> np.ndarray:
    return np.flatnonzero(run.status() == 0)


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


def test_a_batch_in_one_read_is_the_same_items(root: Path) -> None:
    dataset = FeatureDataset(root, "flat")
    chosen = [24, 0, 7, 7, 3]
    batch = dataset.__getitems__(chosen)
    assert len(batch) == 5
    for i, (feature, label) in zip(chosen, batch, strict=True):
        assert torch.equal(feature, dataset[i][0])
        assert label == dataset[i][1]


@pytest.mark.parametrize("index", [25, -26])
def test_an_index_out_of_range_is_an_index_error(root: Path, index: int) -> None:
    """Else iterating over the dataset would never end."""
    with pytest.raises(IndexError):
        FeatureDataset(root, "flat")[index]
    assert len(list(FeatureDataset(root, "flat"))) == 25


def test_float16_stays_float16(tmp_path: Path) -> None:
    run = make_run(num_rows=3, part_rows=2, dtype="float16")
    feature, _ = FeatureDataset(run.write(tmp_path), "flat")[2]
    assert feature.dtype == torch.float16
    assert np.array_equal(feature.numpy(), run.features["flat"][2])


def test_rows_that_came_later_do_not_shift_the_items(tmp_path: Path, run: MadeRun) -> None:
    """The dataset is what it was when it was made, also after the parts are gone."""
    dataset = FeatureDataset(run.write(tmp_path, [1, 3]), "flat")
    assert dataset.rows.tolist() == [*range(8, 16), *range(24, 28)]
    run.write(tmp_path, [0, 2], packed=True)
    for i, row in enumerate(dataset.rows):
        assert np.array_equal(dataset[i][0].numpy(), run.features["flat"][row])
        assert dataset[i][1] == run.listing.labels[row]


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_workers_give_the_right_rows(tmp_path: Path, run: MadeRun, method: str) -> None:
    dataset = FeatureDataset(run.write(tmp_path), "flat")
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
