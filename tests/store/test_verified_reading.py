"""A bit that flips in a store's file after it was written is never read as a value."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from made_store import MadeRun, as_bfloat16, make_run
from object_server import RequestLog, upload

import featx
from featx.errors import ConfigError, StoreError
from featx.store import FeatureStore
from featx.store.filter_pipeline import Pipeline

NUM_ROWS = 56
WAYS = [("none", True), ("none", False), ("gzip", False), ("zstd", True)]
"""Codec, and whether the store is packed."""


@pytest.fixture(params=[True, False], ids=["packed", "parts"])
def packed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def made(codec: str, dtype: str = "float16") -> MadeRun:
    """Chunks of 16 rows; parts of 32, so the flipped row is one of the second part."""
    width = (1 << 15) if codec == "none" else 1 << 13
    return make_run(NUM_ROWS, 32, {"flat": (width,)}, codec=codec, dtype=dtype).identified()


def flip_value(root: Path, row: int, name: str = "features/flat") -> None:
    """Give one stored number another value; the compressed chunk stays a sound stream."""
    path = root / "features.h5"
    if not path.exists():
        path, row = root / "parts" / f"part-{row // 32:06d}.h5", row % 32
    with h5py.File(path) as file:
        dataset = file[name]
        step, rest = dataset.chunks[0], (0,) * (dataset.ndim - 1)
        info = dataset.id.get_chunk_info_by_coord((row // step * step, *rest))
        pipeline = Pipeline.of(dataset)
        stored = bytearray(dataset.id.read_direct_chunk((row // step * step, *rest))[1])
        row_bytes = pipeline.chunk_bytes // step
    if pipeline.is_supported and pipeline.filters:
        data = pipeline.decode(bytes(stored)).copy()
        data[row % step * row_bytes] ^= 1
        with h5py.File(path, "r+") as file:
            file[name].id.write_direct_chunk((row // step * step, *rest), pipeline.encode(data))
        return
    at = row % step * row_bytes if pipeline.is_supported else len(stored) // 2
    with path.open("r+b") as raw:
        raw.seek(info.byte_offset + at)
        raw.write(bytes([stored[at] ^ 1]))


READS: list[Callable[[FeatureStore], Any]] = [
    lambda store: store["flat"][:],
    lambda store: np.asarray(store["flat"]),
    lambda store: store["flat"][30:50],
    lambda store: store["flat"][40:44],
    lambda store: store["flat"][np.arange(NUM_ROWS)[::-1]],
    lambda store: store["flat"][np.arange(NUM_ROWS) != 41],
    lambda store: store.xy("flat"),
]
SINGLE_ROWS: list[Callable[[FeatureStore], Any]] = [
    lambda store: store["flat"][33],
    lambda store: store["flat"][[33, 47]],
]
"""Reads that compare the chunks of compressed layers only."""


@pytest.mark.parametrize(("codec", "packed"), WAYS)
def test_a_flipped_value_is_refused_and_other_chunks_are_read(
    tmp_path: Path, codec: str, packed: bool
) -> None:
    run = made(codec)
    root = run.copied(tmp_path / "my store", packed=packed)
    flip_value(root, 40)
    for read in [*READS, *(SINGLE_ROWS if codec != "none" else ())]:
        with pytest.raises(StoreError) as error:
            read(featx.open(root))
        text = str(error.value)
        assert ("features.h5" if packed else "part-000001.h5") in text
        assert "/features/flat" in text
        assert "rows 32 to 47" in text, text
        assert f"job=verify 'store={root}' verify.repair=true" in text
    store = featx.open(root)
    for rows in (slice(0, 32), slice(48, NUM_ROWS)):
        np.testing.assert_array_equal(store["flat"][rows], run.features["flat"][rows])
    for _ in range(2):  # what was found once is found again
        with pytest.raises(StoreError):
            store["flat"][32:48]


def test_verify_says_what_is_compared_of_single_rows(tmp_path: Path, packed: bool) -> None:
    run = made("none")
    root = run.copied(tmp_path, packed=packed)
    flip_value(root, 40)
    expected = run.features["flat"]
    for verify in ("chunks", False):
        assert np.array_equal(featx.open(root, verify=verify)["flat"][33], expected[33])
    for index in (33, [33], [1, 33], [33, 1]):
        with pytest.raises(StoreError, match="rows 32 to 47"):
            featx.open(root, verify="rows")["flat"][index]
    read = featx.open(root, verify=False)["flat"][:]
    assert np.flatnonzero((read != expected).any(1)).tolist() == [40]


@pytest.mark.parametrize("verify", ["row", True, None, 0])
def test_another_verify_is_refused(tmp_path: Path, verify: Any) -> None:
    with pytest.raises(ConfigError, match="'chunks', 'rows' or False"):
        featx.open(tmp_path, verify=verify)


@pytest.mark.parametrize("name", ["key", "label", "status"])
def test_a_flipped_column_is_refused(tmp_path: Path, name: str) -> None:
    root = made("none").copied(tmp_path, packed=True)
    flip_value(root, 0, name)
    with pytest.raises(StoreError, match=f"features.h5: /{name} differs from its checksum"):
        _ = (lambda store: (store.keys, store.labels, store.status))(featx.open(root))
    store = featx.open(root, verify=False)
    assert len(store.keys) == len(store.labels) == len(store.status) == NUM_ROWS


@pytest.mark.parametrize("name", ["key", "label", "classes"])
def test_a_flipped_listing_of_an_unfinished_store_is_refused(tmp_path: Path, name: str) -> None:
    root = made("none").finish(tmp_path, at_most=1)
    with h5py.File(root / "samples.h5") as file:
        at = file[name].id.get_offset()
    data = bytearray((root / "samples.h5").read_bytes())
    data[at] ^= 1
    (root / "samples.h5").write_bytes(data)
    with pytest.raises(StoreError, match=rf"samples.h5: /{name} differs .*verify.repair=true"):
        _ = (lambda store: (store.classes, store.keys, store.labels))(featx.open(root))


def test_bfloat16_is_compared_too(tmp_path: Path, packed: bool) -> None:
    run = as_bfloat16(made("none", "float32"))
    root = run.copied(tmp_path, packed=packed)
    whole = (run.features["flat"].astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(featx.open(root)["flat"][:], whole)
    flip_value(root, 40)
    for index in (slice(None), np.arange(NUM_ROWS)[::-1]):
        with pytest.raises(StoreError, match="differ from their checksum"):
            featx.open(root)["flat"][index]


def test_what_verify_says_survives_a_pickle_and_a_refresh(tmp_path: Path) -> None:
    root = made("none").copied(tmp_path, packed=True)
    store = featx.open(root, verify="rows")
    flip_value(root, 40)
    for again in (pickle.loads(pickle.dumps(store)), store.refresh()):
        with pytest.raises(StoreError, match="rows 32 to 47"):
            again["flat"][33]


def test_torch_datasets_compare_what_they_read(tmp_path: Path) -> None:
    from torch.utils.data import DataLoader

    from featx.torch import BlockShuffleSampler, FeatureDataset

    root = made("none").copied(tmp_path, packed=True)
    flip_value(root, 40)
    dataset = FeatureDataset(root, "flat")
    with pytest.raises(StoreError, match="rows 32 to 47"):
        for _ in DataLoader(dataset, 8, sampler=BlockShuffleSampler(dataset)):
            pass
    with pytest.raises(StoreError, match="rows 32 to 47"):
        _ = FeatureDataset(root, "flat", verify="rows")[33]


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_objects_are_compared_without_more_requests(
    tmp_path: Path, codec: str, bucket: str, watch: RequestLog
) -> None:
    run = made(codec)
    root = run.copied(tmp_path / "s", packed=True)
    flip_value(root, 40)
    far = upload(root, f"s3://{bucket}/s")
    sizes = {}
    for verify in ("chunks", False):
        store = featx.open(far, verify=verify)
        _ = store["flat"][48]  # the file is open
        watch.clear()
        np.testing.assert_array_equal(store["flat"][0:32], run.features["flat"][0:32])
        sizes[verify] = len(watch.requests), watch.bytes_read
    assert sizes["chunks"] == sizes[False]
    store = featx.open(far)
    for index in (slice(30, 44), np.arange(32, 48)[::-1], slice(None)):
        with pytest.raises(StoreError, match="rows 32 to 47"):
            store["flat"][index]
    np.testing.assert_array_equal(store["flat"][10:30], run.features["flat"][10:30])


def test_a_damaged_copy_of_the_manifest_costs_no_row(tmp_path: Path) -> None:
    """Of the copy in features.h5 reading needs the number of runs only, which featx.json tells."""
    first = make_run(29, 8, failed=[2])
    root = first.copied(tmp_path / "store", packed=True)
    flat = FeatureStore(root)["flat"][:]
    with h5py.File(root / "features.h5", "r+") as file:
        copy = bytearray(bytes(file.attrs["manifest"]))
        copy[len(copy) // 2] ^= 4
        file.attrs["manifest"] = np.void(bytes(copy))
    for place in (root, root / "features.h5"):
        store = FeatureStore(place)
        assert store.complete
        assert np.array_equal(store["flat"][:], flat, equal_nan=True)


def test_damage_to_the_texts_names_the_repair(tmp_path: Path) -> None:
    root = make_run(29, 8).copied(tmp_path / "store", packed=True)
    path = root / "features.h5"
    data = bytearray(path.read_bytes())
    with h5py.File(path) as file:
        weights = str(file.attrs["weights"]).encode()
    data[data.index(weights)] ^= 4
    path.write_bytes(data)
    with pytest.raises(StoreError, match=rf"job=verify store={root} verify\.repair=true"):
        FeatureStore(root)
