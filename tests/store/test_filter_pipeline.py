"""The filters without HDF5's lock: the same bytes as h5py's, and no crash on damaged ones."""

from __future__ import annotations

import itertools
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import run_python, slow_except
from hypothesis import given, settings
from hypothesis import strategies as st
from made_store import make_run

from featx.errors import MissingExtraError, StoreError
from featx.store import codecs, layout
from featx.store.codecs import filters
from featx.store.filter_pipeline import Pipeline
from featx.store.hdf5_files import chunks_with_verdict
from featx.testing import CodecContract

numbers = itertools.count()

CODECS = ("none", "gzip", "zstd")


def values_of(kind: str, shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "zeros":
        return np.zeros(shape, dtype)
    if kind == "nan":
        return np.full(shape, np.nan, dtype)
    if kind == "sparse":
        return np.maximum(rng.normal(size=shape) - 0.7, 0).astype(dtype)
    width = np.dtype(dtype).itemsize
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * width), dtype).reshape(shape)


def make_dataset(shape: tuple[int, ...], dtype: str, **options: Any) -> h5py.Dataset:
    file = h5py.File(
        f"x{next(numbers)}", "w", libver=layout.LIBVER, driver="core", backing_store=False
    )
    return file.create_dataset("x", shape=shape, chunks=shape, dtype=dtype, **options)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


shapes = st.one_of(
    st.tuples(st.integers(1, 300)),
    st.tuples(st.integers(1, 40), st.integers(1, 400)),
    st.tuples(st.integers(1, 9), st.integers(1, 50), st.integers(1, 8), st.integers(1, 8)),
)
kinds = st.sampled_from(["zeros", "nan", "sparse", "random"])
dtypes_ = st.sampled_from(["<f2", "<f4"])


@pytest.mark.parametrize("codec", CODECS)
@settings(deadline=None, max_examples=40)
@given(shape=shapes, kind=kinds, dtype=dtypes_, seed=st.integers(0, 9))
def test_h5py_reads_what_we_encode_and_we_decode_what_it_writes(
    codec: str, shape: tuple[int, ...], kind: str, dtype: str, seed: int
) -> None:
    values = values_of(kind, shape, dtype, seed)
    dataset = make_dataset(shape, dtype, **filters(codec))
    pipeline = Pipeline.of(dataset)
    assert pipeline.is_supported
    assert pipeline.chunk_bytes == values.nbytes
    corner = (0,) * len(shape)
    dataset.id.write_direct_chunk(corner, pipeline.encode(values))
    assert same_bits(dataset[...], values)

    theirs = make_dataset(shape, dtype, **filters(codec))
    theirs[...] = values
    theirs.file.flush()  # h5py cannot read a raw chunk that is still in HDF5's cache
    mask, stored = theirs.id.read_direct_chunk(corner)
    assert pipeline.decode(stored, mask).tobytes() == values.tobytes()


def test_a_mask_tells_which_filters_were_left_out(tmp_path: Path) -> None:
    dataset = make_dataset((8, 16), "<f2", **filters("gzip"))
    values = values_of("sparse", (8, 16), "<f2")
    pipeline = Pipeline.of(dataset)  # shuffle, then deflate
    shuffled = values.view(np.uint8).reshape(-1, 2).T.tobytes()
    cases = {0b11: values.tobytes(), 0b10: shuffled, 0b01: zlib.compress(values.tobytes())}
    for mask, stored in cases.items():
        assert pipeline.decode(stored, mask).tobytes() == values.tobytes(), mask
        with h5py.File(tmp_path / f"{mask}.h5", "w", libver=layout.LIBVER) as file:
            made = file.create_dataset("x", (8, 16), "<f2", chunks=(8, 16), **filters("gzip"))
            made.id.write_direct_chunk((0, 0), stored, mask)
        with h5py.File(tmp_path / f"{mask}.h5") as file:  # HDF5 2.0 forgets a mask until then
            assert same_bits(file["x"][...], values), mask


def test_a_mask_of_filters_that_are_not_there_is_refused() -> None:
    with pytest.raises(StoreError, match="0x4 names filters"):
        Pipeline.of(make_dataset((8, 16), "<f2", **filters("gzip"))).decode(b"", 0b100)
    with pytest.raises(StoreError, match="0x1 names filters"):
        Pipeline.of(make_dataset((8, 16), "<f2")).decode(bytes(256), 1)


@pytest.mark.parametrize(
    "options",
    [{"compression": "lzf"}, {"fletcher32": True}, {"scaleoffset": 2, "dtype": "<i2"}],
    ids=["lzf", "fletcher32", "scaleoffset"],
)
def test_filters_that_are_not_known_here_are_left_to_h5py(options: dict[str, Any]) -> None:
    options = {"dtype": "<f2", **options}
    assert not Pipeline.of(make_dataset((8, 16), **options)).is_supported


def test_a_compressor_before_another_filter_is_left_to_h5py() -> None:
    assert not Pipeline([(1, (4,)), (2, (2,))], 256).is_supported
    assert not Pipeline([(1, (4,)), (32015, (1,))], 256).is_supported
    assert Pipeline([(2, (2,)), (32015, (1,))], 256).is_supported


@pytest.mark.parametrize("codec", CODECS)
def test_a_chunk_that_is_too_long_too_short_or_empty_is_an_error(codec: str) -> None:
    dataset = make_dataset((8, 16), "<f2", **filters(codec))
    pipeline = Pipeline.of(dataset)
    for wrong in ((7, 16), (9, 16), (8, 1), (800, 1600)):
        other = Pipeline.of(make_dataset(wrong, "<f2", **filters(codec)))
        stored = other.encode(np.ones(wrong, np.float16))
        with pytest.raises(StoreError, match=r"bytes|chunk|damaged"):
            pipeline.decode(stored)
    good = pipeline.encode(values_of("random", (8, 16), "<f2"))
    for stored in (b"", good[:1], good[: len(good) // 2], good[:-1], good + b"\0"):
        if stored == good + b"\0" and codec == "zstd":
            continue  # its own test below
        with pytest.raises(StoreError):
            pipeline.decode(stored)


def test_a_zstd_frame_that_claims_terabytes_takes_no_memory() -> None:
    pipeline = Pipeline.of(make_dataset((8, 16), "<f2", **filters("zstd")))
    frame = struct.pack("<IBQ", 0xFD2FB528, 0b11100000, 1 << 42) + bytes(8)
    with pytest.raises(StoreError, match="zstd frame is damaged"):
        pipeline.decode(frame)


def test_zstd_data_behind_the_frame_is_an_error() -> None:
    pipeline = Pipeline.of(make_dataset((8, 16), "<f2", **filters("zstd")))
    good = pipeline.encode(np.ones((8, 16), np.float16))
    for more in (b"\0", good):
        with pytest.raises(StoreError, match="damaged"):
            pipeline.decode(good + more)


FUZZ = """
import io, itertools, sys
import h5py
import numpy as np
from featx.errors import StoreError
from featx.store.codecs import filters
from featx.store.filter_pipeline import Pipeline

rounds = int(sys.argv[1])
rng = np.random.default_rng(rounds)
refused = 0
shapes = ((16, 64), (4, 3, 7, 7), (64,), (129, 515))
for codec, shape in itertools.product(("gzip", "zstd"), shapes):
    for values in (np.zeros(shape), np.maximum(rng.normal(size=shape), 0)):
        file = h5py.File(io.BytesIO(), "w")
        dataset = file.create_dataset("x", data=values.astype("f2"), chunks=shape, **filters(codec))
        pipeline = Pipeline.of(dataset)
        stored = pipeline.encode(values.astype("f2"))
        for _ in range(rounds):
            damaged = bytearray(stored)
            for _ in range(rng.integers(1, 5)):
                near = (0, len(damaged))[rng.integers(2)] + rng.integers(-300, 300)
                where = near if 0 <= near < len(damaged) else rng.integers(len(damaged))
                damaged[where] = rng.integers(256)
            if rng.random() < 0.2:
                damaged = damaged[: rng.integers(len(damaged))]
            try:
                assert len(pipeline.decode(bytes(damaged))) == pipeline.chunk_bytes
            except StoreError:
                refused += 1
print(refused)
"""


@pytest.mark.parametrize("rounds", slow_except([100, 20_000], 100))
def test_damaged_chunks_give_an_error_or_a_whole_chunk_and_never_a_crash(rounds: int) -> None:
    assert int(run_python("-c", FUZZ, rounds, timeout=600).stdout) > 2 * rounds


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_many_threads_encode_and_decode_while_hdf5_runs(codec: str) -> None:
    shape = (16, 512)
    dataset = make_dataset(shape, "<f2", **filters(codec))
    pipeline = Pipeline.of(dataset)
    chunks = [values_of("sparse", shape, "<f2", seed) for seed in range(24)]
    expected = [pipeline.encode(chunk) for chunk in chunks]
    stop = threading.Event()

    def use_hdf5() -> None:
        while not stop.is_set():
            dataset[...] = chunks[0]
            assert same_bits(dataset[...], chunks[0])
            with pytest.raises(KeyError):  # HDF5's error stack is in use as well
                dataset.parent["nothing"]

    def work(i: int) -> None:
        assert pipeline.encode(chunks[i % 24]) == expected[i % 24]
        assert pipeline.decode(expected[i % 24]).tobytes() == chunks[i % 24].tobytes()
        damaged = bytearray(expected[i % 24])
        damaged[len(damaged) // 2 :] = bytes(len(damaged) - len(damaged) // 2)
        with pytest.raises(StoreError):
            pipeline.decode(bytes(damaged))

    with ThreadPoolExecutor(9) as pool:
        other = pool.submit(use_hdf5)
        try:
            list(pool.map(work, range(400)))
        finally:
            stop.set()
        other.result()


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_other_threads_run_while_a_chunk_is_encoded(codec: str) -> None:
    shape = (1024, 2048)
    pipeline = Pipeline.of(make_dataset(shape, "<f2", **filters(codec)))
    values = values_of("sparse", shape, "<f2")
    ticks = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    ticker = threading.Thread(target=tick)
    ticker.start()
    counts: list[int] = []
    # On a busy machine the other thread may wait for a CPU during one call, but not during all.
    while max(counts, default=0) < 3 and len(counts) < 20:
        started_at = time.perf_counter()
        pipeline.encode(values)
        ended = time.perf_counter()
        counts.append(sum(started_at < t < ended for t in ticks))
    done.set()
    ticker.join()
    # With the GIL held, the other thread would get no turn between begin and end.
    assert max(counts) >= 3, counts


@pytest.mark.parametrize("codec", codecs.CODECS.names())
class TestCodecs(CodecContract):
    @pytest.fixture
    def filters(self, codec: str) -> dict[str, Any]:
        return filters(codec)


VERIFY = """
import sys
from pathlib import Path
{before}
from featx.errors import FeatxError
from featx.store import check_store, repair_files
for root in map(Path, sys.argv[1:]):
    try:
        report = check_store(root)
        print([damage.what for damage in report.damages], repair_files(report))
    except FeatxError as error:
        print(type(error).__name__, error)
"""

WITHOUT_PLUGIN = "sys.modules['hdf5plugin'] = None  # as if it were not installed"


def verified(*roots: Path, before: str = "") -> str:
    """What a process prints that verifies and repairs stores, and has imported nothing else."""
    return run_python("-c", VERIFY.format(before=before), *roots).stdout.strip()


@pytest.mark.slow
def test_no_codec_is_damage_in_a_new_process(tmp_path: Path) -> None:
    roots = []
    for codec in codecs.CODECS.names():
        run = make_run(29, 8, codec=codec).identified()
        roots += [run.copied(tmp_path / codec), run.copied(tmp_path / f"packed {codec}", True)]
    assert verified(*roots).splitlines() == ["[] []"] * len(roots)


def test_a_package_that_is_not_installed_is_named(tmp_path: Path) -> None:
    root = make_run(29, 8, codec="zstd").identified().copied(tmp_path, packed=True)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    printed = verified(root, before=WITHOUT_PLUGIN)
    assert printed.startswith(
        "MissingExtraError the data are compressed with the HDF5 filter 32015"
    )
    assert "pip install hdf5plugin" in printed
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_a_filter_that_no_package_has_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((4,))
        properties.set_filter(32099, h5py.h5z.FLAG_OPTIONAL, (1,))
        space = h5py.h5s.create_simple((4,))
        dataset = h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, space, properties)
        dataset.write_direct_chunk((0,), bytes(16))
        file["checksums/x"] = np.zeros(1, np.uint32)
    with h5py.File(path) as file, pytest.raises(MissingExtraError, match="filter 32099, which nei"):
        next(chunks_with_verdict(file, "x"))
