"""Rows read past HDF5: always those that h5py reads, or an error that names them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featx.errors import StoreError
from featx.store import chunk_cache, chunk_reader, dtypes, layout
from featx.store.chunk_reader import ChunkReader
from featx.store.codecs import filters
from featx.store.filter_pipeline import Pipeline

CODECS = ("none", "gzip", "zstd")


def make_file(
    path: Path,
    values: np.ndarray,
    chunk_rows: int,
    codec: str = "none",
    kind: str | None = None,
    interleaved: bool = False,
) -> Path:
    """A file with /x; interleaved: its chunks lie far apart, another dataset's between them."""
    options = {"maxshape": (4 * len(values), *values.shape[1:]), **filters(codec)}
    chunk = (chunk_rows, *values.shape[1:])
    with h5py.File(path, "w", libver=layout.LIBVER) as file:
        dtype = h5py.Datatype(dtypes.hdf5_type(kind)) if kind else values.dtype
        x = file.create_dataset("x", values.shape, dtype, chunks=chunk, **options)
        other = file.create_dataset("other", values.shape, values.dtype, chunks=chunk, **options)
        starts = list(range(0, len(values), chunk_rows))
        for start in starts[::-1] if interleaved else starts:
            x[start : start + chunk_rows] = values[start : start + chunk_rows]
            if interleaved:
                other[start : start + chunk_rows] = -values[start : start + chunk_rows]
                file.flush()
    return path


@contextmanager
def opened(path: Path) -> Iterator[ChunkReader]:
    with h5py.File(path, "r") as file:
        rows = ChunkReader(file["x"], path)
        yield rows
        rows.close()


def numbers(shape: tuple[int, ...], dtype: str = "<f2", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def read(rows: ChunkReader, asked: list[int] | np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Any rows by `read`, as a reader of several files does it: into scattered places."""
    asked = np.asarray(asked, np.int64)
    out = np.full((len(asked) + 2, *shape), -77, rows.dtype)
    order = np.argsort(asked, kind="stable")
    rows.read(asked[order], out, order + 1)
    assert (out[[0, -1]] == -77).all(), "a row went outside its place"
    return out[1:-1]


@pytest.fixture(params=["map", "file"])
def way(request: pytest.FixtureRequest) -> str:
    """Both ways of reading what is not compressed."""
    if request.param == "file":
        request.getfixturevalue("network_disk")
    return request.param


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (5,), (3, 2, 2)], ids=str)
def test_every_codec_type_and_shape_reads_the_rows_that_h5py_reads(
    tmp_path: Path, codec: str, kind: str, shape: tuple[int, ...]
) -> None:
    values = numbers((37, *shape), dtypes.memory_dtype(kind).str)
    values[3] = np.nan
    path = make_file(tmp_path / "x.h5", values, 8, codec, kind)
    with h5py.File(path) as file:
        expected = file["x"][:]
    asked = [36, 0, 5, 5, 8, 7, 3, 35, 31, 32, 5]
    assert np.isnan(expected[3]).all()
    with opened(path) as rows:
        assert np.isnan(rows.take(np.array([3]))).all()
        assert rows.read_method == ("map" if codec == "none" else "decode")
        for got, want in [
            (rows.take(np.array(asked)), expected[asked]),
            (read(rows, asked, shape), expected[asked]),
            (rows.take(np.arange(37)), expected),
            (rows.take(np.array([36])), expected[36:]),
            (rows.take(np.array([], np.int64)), expected[:0]),
        ]:
            assert got.dtype == want.dtype
            assert got.shape == want.shape
            # HDF5 makes a NaN of its own when it widens a bfloat16; other bits are the same.
            got, want = (np.where(np.isnan(x), np.float32(9), x) for x in (got, want))
            assert got.tobytes() == want.tobytes()
        out = np.empty((20, *shape), rows.dtype)
        rows.read(np.arange(9, 29), out, np.arange(20))
        assert out.tobytes() == expected[9:29].tobytes()


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_rows_of_any_layout_are_right(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 70), "num_rows")
    width = data.draw(st.sampled_from([1, 7, 2048, 9000]), "width")
    chunk_rows = data.draw(st.sampled_from([1, 2, 16, 64]).filter(lambda n: n <= 4 * num_rows))
    codec = data.draw(st.sampled_from(["none", "none", "zstd"]), "codec")
    values = np.arange(num_rows, dtype="<f4")[:, None] + np.zeros(width, "<f4")
    values[:, -1] = -values[:, 0]
    lists = st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=90)
    asked = np.array(data.draw(lists, "rows"), np.int64)
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"featx-chunks-{os.getpid()}.h5"
    try:
        make_file(path, values, chunk_rows, codec, interleaved=data.draw(st.booleans()))
        with opened(path) as rows:
            assert np.array_equal(rows.take(asked), values[asked])
            assert np.array_equal(read(rows, asked, (width,)), values[asked])
    finally:
        path.unlink()


def test_files_of_a_network_are_read_without_a_map(tmp_path: Path, way: str) -> None:
    values = numbers((300, 64))
    path = make_file(tmp_path / "x.h5", values, 16, interleaved=True)
    asked = np.random.default_rng(1).integers(0, 300, 200)
    with opened(path) as rows:
        assert rows.read_method == way
        assert np.array_equal(rows.take(asked), values[asked])
        assert np.array_equal(read(rows, asked, (64,)), values[asked])
        assert np.array_equal(rows.take(np.arange(300)), values)


def test_rows_and_places_out_of_range_are_errors_and_nothing_is_written(tmp_path: Path) -> None:
    path = make_file(tmp_path / "x.h5", numbers((20, 4)), 8)  # the last chunk has 4 rows of padding
    with opened(path) as rows:
        out = np.zeros((4, 4), "<f2")
        for asked, places in [
            ([-1], [0]),
            ([20], [0]),
            ([23], [0]),
            ([3, 20], [0, 1]),
            ([-1, 3], [0, 1]),
            ([5, 3], [0, 1]),
            ([5, 30, 6], [0, 1, 2]),
            ([3], [4]),
            ([3], [-1]),
            ([3, 5], [0, 4]),
            ([3, 4], [3, 4]),
            ([3, 5], [-1, 0]),
        ]:
            with pytest.raises(IndexError):
                rows.read(np.array(asked), out, np.array(places))
        for asked in ([-1, 3], [3, 20], [3, 23, 1]):
            with pytest.raises(IndexError, match="has 20 rows"):
                rows.take(np.array(asked))
        with pytest.raises(IndexError):
            rows.read(np.arange(18, 18 + len(out)), out, np.arange(len(out)))
        assert not out.any()


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_chunk_that_was_never_written_is_an_error_not_a_fill_value(
    tmp_path: Path, codec: str
) -> None:
    with h5py.File(tmp_path / "x.h5", "w", libver=layout.LIBVER) as file:
        x = file.create_dataset("x", (32, 4), "<f2", chunks=(8, 4), **filters(codec))
        x[:8] = 1
        x[24:] = 2
        file["padding"] = np.zeros(4096)
    with opened(tmp_path / "x.h5") as rows:
        with pytest.raises(StoreError, match=r"x\.h5: /x: .*row 8 was never written"):
            rows.take(np.array([0, 9]))
        with pytest.raises(StoreError, match="row 16 was never written"):
            rows.take_range(16, 2)
        assert (rows.take(np.array([0, 25, 7])) == np.array([[1], [2], [1]])).all()


def test_a_filter_mask_where_there_are_no_filters_is_an_error(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w", libver="earliest") as file:
        x = file.create_dataset("x", (16, 4), "<f2", chunks=(8, 4), maxshape=(None, 4))
        x.id.write_direct_chunk((0, 0), np.ones((8, 4), "<f2").tobytes(), 1)
        x[8:] = 2
    with opened(tmp_path / "x.h5") as rows:
        with pytest.raises(StoreError, match=r"row 0 .* has another size"):
            rows.take(np.array([3, 1]))
        assert (rows.take(np.array([9, 8])) == 2).all()


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_file_cut_off_after_it_was_opened_is_an_error(
    tmp_path: Path, codec: str, way: str
) -> None:
    values = numbers((400, 64))
    path = make_file(tmp_path / "x.h5", values, 16, codec)
    with opened(path) as rows:
        assert np.array_equal(rows.take(np.array([3, 1])), values[[3, 1]])
        os.truncate(path, path.stat().st_size - 10_000)
        for asked in ([3, 1], [399], list(range(400))):
            with pytest.raises(StoreError, match=r"had \d+ bytes when it was opened, now \d+"):
                rows.take(np.array(asked))


def test_a_file_replaced_under_its_name_is_never_mixed_up(tmp_path: Path, way: str) -> None:
    values = numbers((40, 8))
    path = make_file(tmp_path / "x.h5", values, 8)
    with h5py.File(path) as file:
        make_file(tmp_path / "new.h5", -values, 8)
        (tmp_path / "new.h5").replace(path)
        rows = ChunkReader(file["x"], path)
        assert np.array_equal(rows.take(np.array([9, 3])), values[[9, 3]])
        path.unlink()
        assert np.array_equal(rows.take(np.array([39, 0])), values[[39, 0]])
        rows.close()


def overwritten(path: Path, old: int, new: int) -> None:
    """Exchange one 8-byte number in a file for another one; it must occur exactly once."""
    data = path.read_bytes()
    assert data.count(old.to_bytes(8, "little")) == 1
    path.write_bytes(data.replace(old.to_bytes(8, "little"), new.to_bytes(8, "little")))


def chunk_addresses(path: Path) -> list[int]:
    with h5py.File(path) as file:
        count = file["x"].id.get_num_chunks()
        return [file["x"].id.get_chunk_info(i).byte_offset for i in range(count)]


def make_old_file(path: Path) -> np.ndarray:
    """A file whose chunk index (version 1 B-tree) has no checksum of its own."""
    values = np.arange(64, dtype="<f2")[:, None] + np.zeros(512, "<f2")
    with h5py.File(path, "w", libver="earliest") as file:
        file.create_dataset("x", data=values, chunks=(8, 512), maxshape=(None, 512))
    return values


def test_two_chunks_at_one_place_are_refused(tmp_path: Path) -> None:
    values = make_old_file(tmp_path / "x.h5")
    addresses = chunk_addresses(tmp_path / "x.h5")
    overwritten(tmp_path / "x.h5", addresses[2], addresses[5] + 2)
    with opened(tmp_path / "x.h5") as rows:
        for row in (16, 23, 40, 47):
            with pytest.raises(StoreError, match=r"row (16|40) .* overlaps another one"):
                rows.take(np.array([row]))
        assert np.array_equal(rows.take(np.array([0, 63])), values[[0, 63]])


@pytest.mark.parametrize("far", [1 << 20, 1 << 62, (1 << 63) + 5])
def test_a_chunk_beyond_the_file_is_refused(tmp_path: Path, far: int) -> None:
    values = make_old_file(tmp_path / "x.h5")
    overwritten(tmp_path / "x.h5", chunk_addresses(tmp_path / "x.h5")[2], far)
    with opened(tmp_path / "x.h5") as rows:
        with pytest.raises(StoreError, match=r"x\.h5: /x"):
            rows.take(np.array([17, 3]))
        if far < 1 << 63:
            assert np.array_equal(rows.take(np.array([3, 60])), values[[3, 60]])


def test_more_chunks_than_the_file_could_hold_are_refused_before_memory_is_taken(
    tmp_path: Path,
) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", (1 << 50, 4), "<f2", chunks=(1, 4), maxshape=(None, 4))
    with (
        h5py.File(tmp_path / "x.h5") as file,
        pytest.raises(StoreError, match="claims 1125899906842624 chunks"),
    ):
        ChunkReader(file["x"], tmp_path / "x.h5")


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_a_damaged_compressed_chunk_is_named_and_its_neighbours_are_read(
    tmp_path: Path, codec: str
) -> None:
    values = numbers((64, 128))
    path = make_file(tmp_path / "x.h5", values, 8, codec)
    at = chunk_addresses(path)[3]
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(40))
    with opened(path) as rows:
        with pytest.raises(
            StoreError, match=r"x\.h5: /x: rows 24 to 31 cannot be read \(.*" + codec
        ):
            rows.take(np.arange(64))
        assert np.array_equal(rows.take(np.array([23, 32, 2])), values[[23, 32, 2]])


def test_a_file_open_for_writing_or_not_on_disk_is_left_to_h5py(tmp_path: Path) -> None:
    values = numbers((20, 4))
    path = make_file(tmp_path / "x.h5", values, 8)
    with h5py.File(path, "r+") as file:
        file["x"][3] = 7  # HDF5 may still hold it
        rows = ChunkReader(file["x"], path)
        assert rows.read_method == "h5py"
        assert (rows.take(np.array([3, 3])) == 7).all()
        rows.close()
    with path.open("rb") as source, h5py.File(source, "r") as file:
        assert ChunkReader(file["x"], path).read_method == "h5py"


@pytest.mark.parametrize(
    ("chunk", "userblock"), [(None, 0), ((8, 2), 0), ((8, 6), 0), ((8, 4), 512)], ids=str
)
def test_chunks_that_are_not_whole_rows_and_a_user_block_are_left_to_h5py(
    tmp_path: Path, chunk: tuple[int, int] | None, userblock: int
) -> None:
    values = numbers((20, 4))
    with h5py.File(tmp_path / "x.h5", "w", userblock_size=userblock) as file:
        file.create_dataset("x", data=values, chunks=chunk, maxshape=(40, 8) if chunk else None)
    with opened(tmp_path / "x.h5") as rows:
        assert rows.read_method == "h5py"
        assert np.array_equal(rows.take(np.array([19, 2, 2, 3])), values[[19, 2, 2, 3]])


def test_a_closed_reader_says_so_and_leaves_nothing_open(tmp_path: Path) -> None:
    path = make_file(tmp_path / "x.h5", numbers((64, 256)), 8, "zstd")
    shutil.copy(make_file(tmp_path / "y.h5", numbers((64, 256)), 8), tmp_path / "z.h5")

    def used() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count(str(tmp_path))
        # Only files of this test: sockets that earlier tests left may close at any time.
        links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
        return sum(link.startswith(str(tmp_path)) for link in links), maps

    with opened(path) as rows:
        rows.take(np.arange(64))  # the decoding threads and libraries are there from now on
    before = used()
    for name in ("x.h5", "y.h5", "z.h5") * 5:
        with opened(tmp_path / name) as rows:
            rows.take(np.array([9, 3]))
        with pytest.raises(ValueError, match="closed"):
            rows.take(np.array([3, 9]))
        with pytest.raises(ValueError, match="closed"):
            rows.take(np.array([3]))
    assert used() == before


@pytest.mark.parametrize("codec", CODECS)
def test_many_threads_read_one_dataset_at_once(tmp_path: Path, codec: str) -> None:
    values = numbers((256, 64))
    path = make_file(tmp_path / "x.h5", values, 16, codec)
    with opened(path) as rows:

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            asked = rng.integers(0, 256, int(rng.integers(1, 80)))
            assert np.array_equal(rows.take(asked), values[asked])
            assert np.array_equal(read(rows, asked, (64,)), values[asked])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(120)))


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_closing_under_readers_gives_right_rows_or_an_error(tmp_path: Path, codec: str) -> None:
    values = numbers((256, 2048))
    path = make_file(tmp_path / "x.h5", values, 16, codec)
    make_file(tmp_path / "decoy.h5", -values, 16, codec)
    for _ in range(8):
        with h5py.File(path) as file:
            rows = ChunkReader(file["x"], path)
            wrong: list[str] = []
            reading = threading.Barrier(5)

            def work(
                rows: ChunkReader = rows,
                wrong: list[str] = wrong,
                reading: threading.Barrier = reading,
            ) -> None:
                asked = np.random.default_rng().integers(0, 256, 100)
                rows.take(asked[:2])
                reading.wait()
                try:
                    while True:
                        if not np.array_equal(rows.take(asked), values[asked]):
                            wrong.append("other rows")
                            return
                except ValueError as error:
                    if "closed" not in str(error):
                        wrong.append(str(error))

            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            reading.wait()
            rows.close()
            decoys = [(tmp_path / "decoy.h5").open("rb") for _ in range(20)]  # take its number
            for thread in threads:
                thread.join()
            for decoy in decoys:
                decoy.close()
            assert not wrong


def read_in_child(path: Path, answer: Any) -> None:
    with opened(path) as rows:
        answer.put(rows.take(np.arange(64)).tobytes())


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_decodes_with_threads_of_its_own(tmp_path: Path) -> None:
    values = numbers((64, 128))
    path = make_file(tmp_path / "x.h5", values, 4, "zstd")
    with opened(path) as rows:
        assert np.array_equal(rows.take(np.arange(64)), values)  # threads and cache are there
        context = multiprocessing.get_context("fork")
        answer = context.Queue()
        locked, forked = threading.Event(), threading.Event()

        def hold_lock(_: object) -> bool:
            locked.set()
            forked.wait(60)
            return False

        cache = chunk_cache.decode_pool().chunks
        holder = threading.Thread(target=cache.drop, args=(hold_lock,))
        holder.start()
        assert locked.wait(60)
        child = context.Process(target=read_in_child, args=(path, answer))
        child.start()  # without the thread that holds the lock
        forked.set()
        holder.join()
        assert answer.get(timeout=60) == values.tobytes()
        child.join(60)
        assert child.exitcode == 0


def test_the_cache_of_decoded_chunks_is_bounded_and_spares_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = numbers((64, 128))
    path = make_file(tmp_path / "x.h5", values, 8, "zstd")
    monkeypatch.setattr(chunk_cache, "CACHE_BYTES", 3 * 8 * 128 * 2)
    pool = chunk_cache.DecodePool()
    monkeypatch.setattr(chunk_reader, "decode_pool", lambda: pool)
    decoded: list[int] = []
    decode = Pipeline.decode
    monkeypatch.setattr(
        Pipeline, "decode", lambda self, *args: decoded.append(1) or decode(self, *args)
    )
    with opened(path) as rows:
        for row in (0, 1, 7, 9, 3):
            assert np.array_equal(rows.take(np.array([row])), values[[row]])
        assert decoded == [1, 1]
        rows.take(np.arange(64))
        del decoded[:]
        for row in range(0, 64, 8):
            rows.take(np.array([row]))
        assert len(decoded) >= 5, "more than three chunks were kept"


@pytest.mark.slow  # several pieces of 16 MiB
def test_bfloat16_in_pieces_is_the_same(tmp_path: Path) -> None:
    values = numbers((100, 1 << 18), "<f4")
    path = make_file(tmp_path / "x.h5", values, 8, "none", "bfloat16")
    with h5py.File(path) as file:
        expected = file["x"][:]
    assert not np.array_equal(expected, values)
    asked = np.random.default_rng(0).integers(0, 100, 60)
    with opened(path) as rows:
        assert rows.read_method == "map"
        assert np.array_equal(rows.take(asked), expected[asked])
        assert np.array_equal(rows.take(np.arange(100)), expected)
