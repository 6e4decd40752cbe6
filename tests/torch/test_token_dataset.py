"""Single tokens of a store as batches: each once, the right values, mixed, and resumed exactly."""

from __future__ import annotations

import json
import math
import pickle
import re
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, run_python, slow_except
from made_store import MadeRun, as_bfloat16, make_run, pack_alone
from torch.utils.data import DataLoader, get_worker_info

import featx
from featx.base import sampled_positions
from featx.errors import StoreError
from featx.store import TokenReader
from featx.torch import TokenDataset, token_dataset
from featx.torch.keyed_delay import EpochOrder, EpochSizes
from featx.torch.token_pool import TokenPool
from featx.torch.token_selection import TokenBlocks, TokenSelection
from featx.types import TokenGeometry

pytest_plugins = ["written_store"]

pytestmark = pytest.mark.filterwarnings("ignore:a batch of")
"""Little memory mixes little, as the dataset says."""

PLACES = TokenGeometry(1, True, (4, 5), (40, 50))
MAP = TokenGeometry(0, False, (3, 4), (30, 40))
FAILED = (3, 77)
T, C = 21, 16


def token_run(codec: str = "none") -> MadeRun:
    shapes = {"first": (6, 3, 4), "last": (3, 4, 6), "tokens": (T, C)}
    run = make_run(100, 32, shapes, "float16", codec, FAILED)
    return replace(run, tokens={"tokens": PLACES, "first": MAP, "last": MAP})


@pytest.fixture(scope="module")
def run() -> MadeRun:
    return token_run()


def dataset(root: Path, layer: str = "tokens", **arguments: Any) -> TokenDataset:
    """All tokens in small batches, with less memory than the layer has bytes."""
    usual = {"tokens": "all", "batch_size": 64, "memory": 20_000, "block": 7, "drop_last": False}
    return TokenDataset(root, layer, **{**usual, **arguments})


def as_tokens(run: MadeRun, layer: str) -> np.ndarray:
    """Rows of a layer as (N, T, C)."""
    rows = run.expected(layer)
    if layer == "first":
        rows = rows.transpose(0, 2, 3, 1)
    return rows.reshape(len(rows), -1, C if layer == "tokens" else 6)


def identities(batches: Iterable[dict[str, torch.Tensor]]) -> list[tuple[int, int]]:
    """Row and position of every token."""
    return [
        pair
        for batch in batches
        for pair in zip(batch["row"].tolist(), batch["position"].tolist(), strict=True)
    ]


def assert_equal_batches(one: list[dict[str, torch.Tensor]], other: list[dict[str, Any]]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("layer", ["tokens", "first", "last"])
def test_take_gives_the_values_of_the_layer(root: Path, run: MadeRun, layer: str) -> None:
    expected = as_tokens(run, layer)
    rng = np.random.default_rng(0)
    rows = rng.choice(np.flatnonzero(run.status() == 0), 500)
    positions = rng.integers(0, expected.shape[1], 500)
    found = dataset(root, layer).take(rows, positions)
    assert found.dtype == torch.float16
    assert np.array_equal(found.numpy(), expected[rows, positions])


@pytest.mark.slow
@pytest.mark.parametrize("verify", [False, "chunks"])
def test_tokens_far_and_near_are_read_by_ranges(tmp_path: Path, verify: Any) -> None:
    """Longer than one range, with gaps within chunks and between them, packed and in parts."""
    large = make_run(96, 32, {"tokens": (64, 1024)}, "float16")
    expected = large.expected("tokens").reshape(-1, 1024)
    rng = np.random.default_rng(0)
    for packed in (False, True):
        root = large.write(tmp_path / f"{packed}", packed=packed)
        store = featx.open(root)
        for count in (3, 40, 6000, len(expected)):
            reader = TokenReader(store, "tokens", verify)
            for _ in range(2):  # chunks that are due, and chunks that are not
                tokens = np.sort(rng.choice(len(expected), count, replace=False))
                places = rng.permutation(count + 5)[:count]
                out = np.zeros((count + 5, 2048), np.uint8)
                reader.read_into(*np.divmod(tokens, 64), out, places)
                np.testing.assert_array_equal(out[places].view(np.float16), expected[tokens])


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_compressed_layers(tmp_path: Path, codec: str) -> None:
    run = token_run(codec)
    data = dataset(run.copied(tmp_path / "store", packed=True))
    expected = as_tokens(run, "tokens")
    assert np.array_equal(data.take([5, 1, 5], 20).numpy(), expected[[5, 1, 5], 20])
    batches = list(data)
    assert len(set(identities(batches))) == 98 * T
    for batch in batches:
        values = expected[batch["row"].numpy(), batch["position"].numpy()]
        assert np.array_equal(batch["features"].numpy(), values)


def test_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    run = as_bfloat16(make_run(9, 4, {"tokens": (5, 4)}))
    bits, root = run.features["tokens"], run.finish(tmp_path / "store")
    found = TokenDataset(root, "tokens", tokens="all").take([8, 0], [1, 4])
    assert found.dtype == torch.bfloat16
    assert np.array_equal(found.view(torch.int16).numpy().view(np.uint16), bits[[8, 0], [1, 4]])


@pytest.mark.parametrize("order", ["shuffled", "stored"])
@pytest.mark.parametrize("layer", ["tokens", "first"])
def test_every_token_of_an_ok_row_comes_once(
    root: Path, run: MadeRun, order: Any, layer: str
) -> None:
    expected = as_tokens(run, layer)
    data = dataset(root, layer, order=order)
    batches = list(data)
    found = identities(batches)
    per_row = expected.shape[1]
    wanted = [(row, at) for row in range(100) if row not in FAILED for at in range(per_row)]
    assert sorted(found) == wanted
    assert (found == wanted) == (order == "stored")
    for batch in batches:
        rows, positions = batch["row"].numpy(), batch["position"].numpy()
        assert np.array_equal(batch["features"].numpy(), expected[rows, positions])
        assert np.array_equal(batch["label"].numpy(), run.listing.labels[rows])


def test_a_batch_says_what_its_tokens_are(root: Path, run: MadeRun) -> None:
    data = dataset(root, order="stored")
    batch = next(iter(data))
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in batch.items()} == {
        "features": (torch.float16, (64, C)),
        "row": (torch.int64, (64,)),
        "position": (torch.int32, (64,)),
        "yx": (torch.int32, (64, 2)),
        "label": (torch.int64, (64,)),
    }
    assert batch["yx"][0].tolist() == [-1, -1]
    assert batch["yx"][7].tolist() == [1, 1]
    assert data.grid == (4, 5)
    assert data.keys[3] == run.listing.keys[3].decode()
    # Patch (1, 1) of 4 x 5 in 40 x 50 pixels.
    assert data.patch_box(0, 7) == (10.0, 10.0, 20.0, 20.0)
    with pytest.raises(ValueError, match="no known place"):
        data.patch_box(0, 0)
    with pytest.raises(IndexError):
        data.patch_box(100, 1)


@pytest.mark.parametrize(
    ("tokens", "positions"),
    [("patches", range(1, 21)), ("cls", [0]), ("all", range(21)), ([5, 2], [2, 5])],
)
def test_which_tokens(root: Path, tokens: Any, positions: Iterable[int]) -> None:
    found = {position for _, position in identities(dataset(root, tokens=tokens))}
    assert found == set(positions)


def test_some_rows_only(root: Path) -> None:
    data = dataset(root, rows=[4, 3, 90], tokens="patches")
    assert sorted(identities(data)) == [(row, at) for row in (4, 90) for at in range(1, 21)]


def test_a_sample_of_each_image_depends_on_its_key_and_the_seed(root: Path, run: MadeRun) -> None:
    sampled = sampled_positions(run.listing.keys.tolist(), 5, 20, 3)
    found = set(identities(dataset(root, tokens="patches", per_image=3, seed=5)))
    assert found == {
        (row, 1 + at) for row in range(100) if row not in FAILED for at in sampled[row].tolist()
    }
    assert set(identities(dataset(root, tokens="patches", per_image=2, seed=5))) < found


@pytest.mark.slow
def test_the_order_is_of_seed_and_epoch_and_not_of_threads(root: Path) -> None:
    first = list(dataset(root, threads=1))
    for threads in (4, 16):
        assert_equal_batches(first, list(dataset(root, threads=threads)))
    data = dataset(root)
    assert_equal_batches(first, list(data))
    second = identities(data)
    data.set_epoch(0)
    assert_equal_batches(first, list(data))
    orders = [identities(first), second, identities(dataset(root, seed=1))]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.slow
def test_parts_and_the_packed_file_give_the_same_batches(run: MadeRun, tmp_path: Path) -> None:
    roots = [run.copied(tmp_path / name, packed=name == "packed") for name in ("packed", "parts")]
    assert_equal_batches(*(list(dataset(root)) for root in roots))


@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_give_disjoint_tokens_and_equally_many_batches(root: Path, drop_last: bool) -> None:
    ranks = [
        dataset(root, rank=rank, world_size=4, drop_last=drop_last, batch_size=100)
        for rank in range(4)
    ]
    left_out = ranks[0].left_out
    assert {data.left_out for data in ranks} == {left_out}
    lengths = [len(data) for data in ranks]
    batches = [list(data) for data in ranks]
    assert [len(one) for one in batches] == lengths
    assert len(set(lengths)) == 1
    found = [pair for one in batches for pair in identities(one)]
    assert len(found) == len(set(found)) == 98 * T - left_out


@pytest.mark.parametrize("share", slow_except([0.0, 0.01, 0.37, 1.0], 0.0, 0.37))
def test_the_rest_of_an_epoch_after_a_break(root: Path, share: float) -> None:
    whole = list(dataset(root, batch_size=16))
    count = min(len(whole) - 1, math.ceil(share * len(whole)))
    broken = dataset(root, batch_size=16)
    batches = iter(broken)
    for _ in range(count):
        next(batches)
    state = json.loads(json.dumps(broken.state_dict()))
    batches.close()
    resumed = dataset(root, batch_size=16)
    resumed.load_state_dict(state)
    assert_equal_batches(list(resumed), whole[count:])
    # The epoch after it is that of an unbroken training.
    unbroken = dataset(root, batch_size=16)
    unbroken.set_epoch(1)
    assert_equal_batches(list(resumed), list(unbroken))


def test_an_abandoned_iterator_leaves_no_threads(root: Path) -> None:
    batches = iter(dataset(root, batch_size=16))
    next(batches)
    batches.close()
    assert not [one.name for one in threading.enumerate() if one.name.startswith("featx-tokens")]


IN_A_NEW_PROCESS = """
import json, sys
from featx.torch import TokenDataset, token_dataset
data = TokenDataset(sys.argv[1], "tokens", tokens="all", batch_size=64, memory=20_000, block=7,
                    drop_last=False)
data.load_state_dict(json.loads(sys.argv[2]))
print(json.dumps([[b["row"].tolist(), b["position"].tolist()] for b in data]))
"""


@pytest.mark.slow  # a process that imports torch
def test_the_rest_of_an_epoch_in_a_new_process(root: Path) -> None:
    data = dataset(root)
    batches = iter(data)
    for _ in range(20):
        next(batches)
    state = json.dumps(data.state_dict())
    done = run_python("-W", "ignore", "-c", IN_A_NEW_PROCESS, root, state)
    rest = [[batch["row"].tolist(), batch["position"].tolist()] for batch in batches]
    assert json.loads(done.stdout) == rest


def test_a_state_of_other_arguments_is_refused(root: Path) -> None:
    data = dataset(root)
    batches = iter(data)
    next(batches)
    state = data.state_dict()
    for arguments in ({"seed": 1}, {"world_size": 2}, {"block": 21}, {"tokens": "patches"}):
        with pytest.raises(ValueError, match=f"another order: .*{next(iter(arguments))[:5]}"):
            dataset(root, **arguments).load_state_dict(state)
    beginning = {**state, "batches": 0, "segment": 0, "offset": 0}
    dataset(root, world_size=2, rank=1, block=21).load_state_dict(beginning)


def test_a_data_loader(root: Path) -> None:
    expected = list(dataset(root))
    assert_equal_batches(list(DataLoader(dataset(root), batch_size=None)), expected)


@pytest.mark.slow  # starts processes
def test_several_workers_are_refused(root: Path) -> None:
    with pytest.raises(ValueError, match="takes 0 or 1"):
        list(DataLoader(dataset(root), batch_size=None, num_workers=2))


@pytest.mark.slow  # starts processes
def test_a_worker_process_takes_the_next_epoch_each_time(root: Path) -> None:
    data = dataset(root)
    loader = DataLoader(data, batch_size=None, num_workers=1)
    here = dataset(root)
    for _ in range(2):
        assert_equal_batches(list(loader), list(here))
    with pytest.raises(ValueError, match="only it knows the state"):
        data.state_dict()


def ask_for_state(_: int) -> None:
    """Ask as torchdata's StatefulDataLoader does before the first batch."""
    worker = get_worker_info()
    assert worker is not None
    assert worker.dataset.state_dict()["batches"] == 0


def test_a_new_worker_process_knows_where_it_starts(root: Path) -> None:
    loader = DataLoader(dataset(root), batch_size=None, num_workers=1, worker_init_fn=ask_for_state)
    here = dataset(root)
    for _ in range(2):
        assert_equal_batches(list(loader), list(here))


def test_a_worker_process_that_stays_starts_where_it_is_told(root: Path) -> None:
    here = dataset(root)
    batches = list(here)
    here.set_epoch(0)
    iterator = iter(here)
    for _ in range(5):
        next(iterator)
    state = here.state_dict()
    data = dataset(root)
    loader = DataLoader(data, batch_size=None, num_workers=1, persistent_workers=True)
    for _ in zip(range(3), loader, strict=False):
        pass
    data.set_epoch(0)
    assert_equal_batches(list(loader), batches)
    data.load_state_dict(state)
    assert data.state_dict() == state
    assert_equal_batches(list(loader), batches[5:])


def test_a_pickled_dataset_reads_the_same(root: Path) -> None:
    data = dataset(root)
    data.take([0], 0)
    assert_equal_batches(list(pickle.loads(pickle.dumps(data))), list(data))


@pytest.mark.parametrize("way", ["take", "epoch"])
def test_a_flipped_bit_is_an_error(tmp_path: Path, run: MadeRun, way: str) -> None:
    root = run.copied(tmp_path / "store", packed=True)
    path = root / "features.h5"
    pattern = run.features["tokens"][10, 5].tobytes()
    data = bytearray(path.read_bytes())
    data[data.index(pattern)] ^= 1
    path.write_bytes(data)
    tokens = dataset(root)
    with pytest.raises(StoreError, match=r"rows \d+ to \d+ differ from their checksum"):
        # Another token of the same chunk: the chunk as a whole is compared.
        _ = tokens.take([11], 0) if way == "take" else list(tokens)
    unchecked = dataset(root, verify=False)
    assert len(unchecked.take([11], 0)) == 1


def test_failed_rows_and_absent_positions_are_refused(root: Path) -> None:
    data = dataset(root)
    with pytest.raises(StoreError, match="row 3 is not ok"):
        data.take([4, 3], 0)
    for rows, positions in (([100], [0]), ([-1], [0]), ([0], [T])):
        with pytest.raises(IndexError, match="was asked for"):
            data.take(rows, positions)
    assert data.take([], []).shape == (0, C)


def test_masks_choose_rows_and_positions(root: Path) -> None:
    of_class, odd = np.arange(100) % 7 == 4, np.arange(T) % 2 == 1
    data = dataset(root, rows=of_class, tokens=odd, drop_last=False)
    rows, positions = np.flatnonzero(of_class), np.flatnonzero(odd)
    by_number = dataset(root, rows=rows, tokens=positions, drop_last=False)
    expected = {(row, position) for row in rows for position in positions}
    assert set(identities(data)) == set(identities(by_number)) == expected
    for row, position in (([True, False], [0, 0]), ([0.5], [0]), ([0], [1.0])):
        with pytest.raises(IndexError, match="expected integers"):
            data.take(row, position)  # type: ignore[arg-type]


def test_a_state_of_something_else_is_refused(root: Path) -> None:
    for state in ({"epoch": 1}, None):
        with pytest.raises(ValueError, match="not one that state_dict"):
            dataset(root).load_state_dict(state)  # type: ignore[arg-type]


def test_parts_that_are_packed_meanwhile(tmp_path: Path, run: MadeRun) -> None:
    root = run.copied(tmp_path / "store")
    data = dataset(root)
    expected = list(data)
    pack_alone(root)
    for path in (root / "parts").glob("*.h5"):
        path.unlink()
    data.set_epoch(0)
    # The files that this data set has open stay readable; its copy opens the packed one.
    assert_equal_batches(list(pickle.loads(pickle.dumps(data))), expected)


def test_a_row_that_failed_since_is_an_error_and_not_nan(tmp_path: Path, run: MadeRun) -> None:
    data = dataset(run.copied(tmp_path / "store"))
    failed = replace(run, failures=[*run.failures, replace(run.failures[0], row=40)])
    failed.copied(tmp_path / "new")
    (tmp_path / "new/parts/part-000001.h5").replace(tmp_path / "store/parts/part-000001.h5")
    with pytest.raises(StoreError, match="has changed since the store was opened"):
        list(data)


def test_parts_that_are_packed_before_jobs_read_them(tmp_path: Path, run: MadeRun) -> None:
    root = run.copied(tmp_path / "store")
    reader = TokenReader(featx.open(root), "tokens")
    out = np.zeros((45 * T, C * 2), np.uint8)
    rows, positions = np.divmod(np.arange(50 * T, 95 * T), T)
    places = np.random.default_rng(0).permutation(len(out))
    tasks = reader.read_tasks(rows, positions, out, places, 5_000)
    assert len(tasks) > 1
    pack_alone(root)
    for path in (root / "parts").glob("*.h5"):
        path.unlink()
    for task in tasks:
        task()
    expected = as_tokens(run, "tokens")[rows, positions]
    np.testing.assert_array_equal(out[places].view(np.float16), expected)


def test_arguments_that_do_not_fit(root: Path) -> None:
    for arguments, message in (
        ({"tokens": "registers"}, "this layer has none"),
        ({"tokens": "odd"}, "expected 'all'"),
        ({"tokens": [21]}, "tokens: expected numbers from 0 to 20, and got 21"),
        ({"tokens": [0.5]}, "tokens: expected a list of integers or a mask of 21"),
        ({"rows": [True, False]}, "rows: expected a list of integers or a mask of 100"),
        ({"rows": [1.5]}, "array of float64"),
        ({"rows": [-1]}, "got -1"),
        ({"seed": -1}, "seed=-1"),
        ({"per_image": 22}, "1 to 21"),
        ({"rows": [3]}, "none of the rows is ok"),
        ({"rank": 1}, "rank=1"),
        ({"world_size": 10**15}, "world_size=1000000000000000: expected at most 2058, the number"),
        ({"threads": 0}, "threads=0"),
        ({"batch_size": 1.5}, "batch_size=1.5: expected a whole number"),
        ({"order": "random"}, "'shuffled' or 'stored'"),
        ({"prefix": 2}, "form no square"),
    ):
        with pytest.raises(ValueError, match=message):
            dataset(root, **arguments)


def test_an_older_store_needs_the_number_of_prefix_tokens(tmp_path: Path) -> None:
    root = make_run(9, 4, {"tokens": (5, 2), "map": (2, 3, 3)}).copied(tmp_path / "store")
    with pytest.raises(ValueError, match="Give prefix="):
        TokenDataset(root, "tokens")
    data = TokenDataset(root, "tokens", prefix=1)
    assert data.grid == (2, 2)
    with pytest.raises(ValueError, match="36 tokens of a rank are fewer than a batch of 4096"):
        next(iter(data))
    few = TokenDataset(root, "tokens", prefix=1, batch_size=6)
    assert {position for _, position in identities(few)} == {1, 2, 3, 4}
    with pytest.raises(StoreError, match="a map whose channels are known"):
        TokenReader(featx.open(root), "map")


def test_little_memory_for_the_mixing_is_a_warning(tmp_path: Path) -> None:
    root = make_run(500, 256, {"tokens": (64, 64)}, "float16").finish(tmp_path / "store")
    with pytest.warns(UserWarning, match="More memory mixes better"):
        TokenDataset(root, "tokens", tokens="all", memory=200_000)


def mixed_run(folder: Path, num_rows: int, num_tokens: int) -> Path:
    """A store of tokens of one number."""
    return make_run(num_rows, 1024, {"tokens": (num_tokens, 1)}, "float16").finish(folder)


@pytest.mark.parametrize("held", [8, 200])
def test_a_pool_that_is_too_small_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    root = make_run(60, 16, {"tokens": (16, 8)}, "float16").finish(tmp_path / "store")

    def small_pool(reader: Any, selection: Any, order: Any, _: int, *rest: Any) -> TokenPool:
        return TokenPool(reader, selection, order, held, *rest)

    monkeypatch.setattr(token_dataset, "TokenPool", small_pool)  # chance needs it once in 10^15
    data = TokenDataset(root, "tokens", tokens="all", batch_size=64, memory=30_000)
    stored, seen = featx.open(root)["tokens"][:], set[tuple[int, int]]()
    for batch in data:
        rows, positions = batch["row"].numpy(), batch["position"].numpy()
        assert np.array_equal(batch["features"].numpy(), stored[rows, positions])
        seen.update(zip(rows.tolist(), positions.tolist(), strict=True))
    assert len(seen) == 60 * 16


def test_an_epoch_in_stored_order_mixes_no_more_images_than_it_has(tmp_path: Path) -> None:
    root = mixed_run(tmp_path / "store", 3, 4)
    data = TokenDataset(root, "tokens", tokens="all", order="stored", batch_size=256)
    assert data.mixing["effective_images"] == data.mixing["distinct_images_in_batch"] == 3


@pytest.mark.parametrize("block", [pytest.param(4, marks=pytest.mark.slow), 16, 64])
def test_the_mixing_that_is_promised_is_measured(tmp_path: Path, block: int) -> None:
    root = mixed_run(tmp_path / "store", 2000, 64)
    data = TokenDataset(root, "tokens", tokens="all", batch_size=256, memory=1_000_000, block=block)
    assert data.mixing["held_bytes"] < 0.5 * len(data) * 256 * 2
    pairs, same, distinct = 0, 0, []
    for batch in data:
        counts = np.unique(batch["row"].numpy(), return_counts=True)[1]
        same += int((counts * (counts - 1)).sum())
        pairs += 256 * 255
        distinct.append(len(counts))
    assert pairs / same == pytest.approx(data.mixing["effective_images"], rel=0.15)
    expected = data.mixing["distinct_images_in_batch"]
    ends = np.mean([*distinct[:5], *distinct[-5:]])
    assert np.mean(distinct) == pytest.approx(expected, rel=0.05)
    assert ends == pytest.approx(expected, rel=0.1), "no thin begin or end"


@pytest.mark.parametrize("wrong", [{"seed": None}, {"prefix": "1"}, {"per_image": 1.5}])
def test_other_numbers_are_whole_ones(root: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.*: expected a whole number of at"):
        TokenDataset(root, "tokens", tokens="all", batch_size=4, **wrong)


def test_an_epoch_is_a_whole_number(root: Path) -> None:
    for epoch in ("x", -1, 1.5):
        with pytest.raises(ValueError, match=f"epoch={epoch!r}: expected a whole number of at"):
            dataset(root).set_epoch(epoch)


def test_so_many_ranks_that_none_has_a_batch_are_refused_at_once(root: Path) -> None:
    many = dataset(root, per_image=1, world_size=98, drop_last=True)
    with pytest.raises(ValueError, match="drop_last leaves such a batch out"):
        next(iter(many))


@pytest.mark.slow  # 5 million tokens
def test_an_epoch_of_many_images_is_mixed_from_its_begin_to_its_end(tmp_path: Path) -> None:
    """As by default for 196 tokens of 1536 bytes: blocks of an image, 7 % of the tokens held.

    A store of that size has 30 GB, so an image has 49 tokens of 2 bytes here.
    """
    root = mixed_run(tmp_path / "store", 100_000, 49)
    data = TokenDataset(root, "tokens", tokens="all", memory=17_500_000, block=49)
    assert data.mixing["held_bytes"] / 2 < 0.07 * data.num_tokens
    distinct = np.array([len(np.unique(batch["row"].numpy())) for batch in data])
    one = len(distinct) // 100
    assert min(distinct.mean(), distinct[:one].mean(), distinct[-one:].mean()) >= 0.8 * 4096


@pytest.mark.parametrize("world_size", [1, 3])
def test_tokens_of_ranks_are_those_of_their_blocks(world_size: int) -> None:
    """Of more blocks than are counted at once."""
    selection = TokenSelection(np.arange(300_001), np.arange(5))
    blocks = TokenBlocks.of(selection, 1, 2)
    extent = EpochSizes(len(selection), 100_000, world_size, 64, False)
    sizes = []
    for rank in range(world_size):
        order = EpochOrder(blocks, extent, (0, 0), rank, True)
        numbers = range(order.num_segments)
        sizes.append(sum(len(order.segment(number)[0]) for number in numbers))
        assert sum(order.rank_tokens) == len(selection)
    assert order.rank_tokens == sizes


EPOCH_OF_A_STORE = """
import resource, sys
from featx.torch import TokenDataset, token_dataset

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before = peak_mib()
for _ in TokenDataset(sys.argv[1], "layer", tokens="all", memory=int(sys.argv[2]) << 20):
    pass
print(peak_mib() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("memory_mib", [64, 512])
def test_an_epoch_of_a_million_tokens_holds_what_it_may(tmp_path: Path, memory_mib: int) -> None:
    run = make_run(5076, 512, {"layer": (197, 768)}, "float16")
    root = run.finish(tmp_path / "store")
    done = run_python("-c", EPOCH_OF_A_STORE, root, memory_mib, path=[REPOSITORY])
    assert float(done.stdout) < 1.25 * memory_mib + 64


def test_the_examples_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "tokens.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    places = TokenGeometry(1, True, (14, 14), (224, 224))
    run = make_run(24, 8, {"blocks.11": (197, 8)}, "float16", failed=[1])
    replace(run, tokens={"blocks.11": places}).finish(tmp_path / "runs" / "photos", packed=True)
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    for example in examples:
        exec(example, found)
    assert re.search(r"epoch 1: loss \d+\.\d+ over 1 batches", capsys.readouterr().out)
    assert found["tokens"].shape == (3, 8)


@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_tokens_of_rows_that_are_not_there_yet_are_refused(tmp_path: Path, codec: str) -> None:
    run = make_run(12, 4, {"tokens": (3, 2)}, codec=codec)
    reader = TokenReader(featx.open(run.finish(tmp_path, at_most=2)), "tokens")
    rows, positions = np.array([7, 1]), np.array([2, 0])
    assert np.array_equal(reader.take(rows, positions), run.features["tokens"][rows, positions])
    with pytest.raises(StoreError, match=r"not in the store yet, such as 8\."):
        reader.take(rows + 1, positions)
