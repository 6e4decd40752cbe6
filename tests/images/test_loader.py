"""The loader: every row in its own place, every failure recorded, memory and processes bounded."""

from __future__ import annotations

import errno
import io
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_image, run_python
from encoded_images import encode
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from featx.errors import RunError
from featx.images import (
    PREFETCH_BATCHES,
    DecodeSettings,
    ImagePolicy,
    Loader,
    Preprocess,
    decode_pillow,
    image_reading,
)
from featx.sources import FolderSource
from featx.types import Batch, Failure, ImageFault, Listing, Part, Status

pytestmark = pytest.mark.usefixtures("without_read_waits")

POLICY = ImagePolicy("apply", (255, 255, 255), 10**7)
SIDE = 16


def to_tensor(image: Image.Image) -> torch.Tensor:
    """A reference transform: resize without care for the proportions, values in [0, 1]."""
    resized = np.array(image.resize((SIDE, SIDE)), dtype=np.float32)
    return torch.from_numpy(resized).permute(2, 0, 1) / 255


PREPROCESS = Preprocess(to_tensor, (SIDE, SIDE), SIDE, "bilinear", (0, 0, 0), (1, 1, 1))


def encoded(seed: int) -> bytes:
    return encode(make_image(40 + seed % 7, 30 + seed % 5, seed=seed), "PNG")


GOOD = [encoded(seed) for seed in range(23)]
BAD = {
    "empty": (b"", Status.UNSUPPORTED),
    "text": (b"no image", Status.UNSUPPORTED),
    "truncated": (GOOD[0][:600], Status.TRUNCATED),
    "corrupt": (GOOD[0][:300] + b"\0\0\0\0" + GOOD[0][304:], Status.DECODE_ERROR),
}


class MemorySource:
    """Images held in a list; keys are their numbers. Says which were read, and when."""

    def __init__(self, images: list[bytes]) -> None:
        self.images = images
        self.read_keys: list[bytes] = []

    def listing(self) -> Listing:
        keys = np.array([b"%06d" % i for i in range(len(self.images))], dtype=np.bytes_)
        return Listing(keys, np.full(len(keys), -1, dtype=np.int64))

    def read(self, key: bytes) -> bytes:
        self.read_keys.append(key)
        return self.images[int(key)]


def make_loader(
    source: MemorySource | FolderSource,
    reference: bool = False,
    preprocess: Preprocess = PREPROCESS,
    policy: ImagePolicy = POLICY,
) -> Loader:
    decoding = DecodeSettings(preprocess, policy, reference or not preprocess.has_fast_path)
    return Loader(source, source.listing(), decoding)


def parts_of(num_rows: int, part_rows: int) -> list[Part]:
    starts = range(0, num_rows, part_rows)
    return [Part(k, i, min(i + part_rows, num_rows)) for k, i in enumerate(starts)]


def load_all(
    source: MemorySource | FolderSource,
    parts: Iterable[Part],
    batch_size: int = 4,
    **options: object,
) -> list[tuple[Part, Batch]]:
    with make_loader(source, **options) as loader:
        return list(loader.batches(parts, batch_size))


def rows_of(batches: Iterable[tuple[Part, Batch]]) -> dict[int, torch.Tensor]:
    return {batch.start + i: batch.images[i] for _, batch in batches for i in range(batch.count)}


def expected_row(data: bytes, reference: bool = False) -> torch.Tensor:
    """What a row is, without the loader."""
    image = decode_pillow(data, POLICY, None if reference else SIDE)
    return to_tensor(image) if reference else PREPROCESS.crop_uint8(np.array(image))


@pytest.fixture
def without_read_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries come at once."""
    monkeypatch.setattr(image_reading, "RETRY_WAITS_S", (0, 0, 0))


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    """After every test of this file, whatever it raised; those of earlier tests are theirs."""
    before = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - before
    assert [thread.name for thread in left if thread.name.startswith("featx")] == []


def our_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("featx-loader")]


# Order, batches, parts


@pytest.mark.parametrize("reference", [False, True])
def test_every_row_is_its_own_image(reference: bool) -> None:
    rows = rows_of(load_all(MemorySource(GOOD), parts_of(23, 8), reference=reference))
    assert sorted(rows) == list(range(23))
    for row, x in rows.items():
        assert torch.equal(x, expected_row(GOOD[row], reference))
        assert x.dtype == (torch.float32 if reference else torch.uint8)


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(0, 23), st.integers(0, 23)), max_size=4),
)
def test_any_parts_and_batch_sizes(batch_size: int, spans: list[tuple[int, int]]) -> None:
    parts = [Part(k, *sorted(span)) for k, span in enumerate(spans)]
    batches = load_all(MemorySource(GOOD), parts, batch_size=batch_size)
    found = [(part.index, batch.start + i) for part, batch in batches for i in range(batch.count)]
    assert found == [(part.index, row) for part in parts for row in range(part.start, part.stop)]
    for part, batch in batches:
        assert part.start <= batch.start < batch.start + batch.count <= part.stop
        assert len(batch.images) == batch_size
        assert not batch.images[batch.count :].any()
        for i in range(batch.count):
            assert torch.equal(batch.images[i], expected_row(GOOD[batch.start + i]))


def test_batches_given_out_are_never_written_again() -> None:
    """A consumer may keep a batch while later ones are loaded."""
    with make_loader(MemorySource(GOOD)) as loader:
        kept = [(batch, batch.images.clone()) for _, batch in loader.batches(parts_of(23, 8), 4)]
    assert all(torch.equal(batch.images, copy) for batch, copy in kept)
    assert len({batch.images.data_ptr() for batch, _ in kept}) == len(kept)


# Failures of images


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_image_is_zero_reported_and_alone(kind: str, reference: bool) -> None:
    data, status = BAD[kind]
    images = [data if i in (0, 5, 22) else good for i, good in enumerate(GOOD)]
    batches = load_all(MemorySource(images), parts_of(23, 8), reference=reference)
    for row, x in rows_of(batches).items():
        if row in (0, 5, 22):
            assert not x.any()
        else:
            assert torch.equal(x, expected_row(GOOD[row], reference))
    failures = [failure for _, batch in batches for failure in batch.failures]
    assert [(f.row, f.key, f.status) for f in failures] == [
        (row, b"%06d" % row, status) for row in (0, 5, 22)
    ]
    for _, batch in batches:
        assert all(batch.start <= f.row < batch.start + batch.count for f in batch.failures)
    assert all(f.message and f.error for f in failures)


def test_every_kind_of_fault_a_folder_can_have(tmp_path: Path) -> None:
    for name, data in {
        "a.png": GOOD[1],
        "b-empty.png": b"",
        "c-text.jpg": b"text",
        "d-cut.png": GOOD[1][:500],
        "e-gone.png": GOOD[1],
        "f-large.png": b"P6 9999 9999 255\n",
        "g.png": GOOD[2],
    }.items():
        (tmp_path / name).write_bytes(data)
    source = FolderSource(tmp_path)
    with make_loader(source) as loader:
        (tmp_path / "e-gone.png").unlink()
        batches = list(loader.batches([Part(0, 0, 7)], 4))
    assert {f.key: f.status for _, batch in batches for f in batch.failures} == {
        b"b-empty.png": Status.EMPTY,
        b"c-text.jpg": Status.UNSUPPORTED,
        b"d-cut.png": Status.TRUNCATED,
        b"e-gone.png": Status.MISSING,
        b"f-large.png": Status.TOO_LARGE,
    }
    rows = rows_of(batches)
    assert torch.equal(rows[0], expected_row(GOOD[1]))
    assert torch.equal(rows[6], expected_row(GOOD[2]))


def test_an_error_in_the_transform_is_recorded() -> None:
    def transform(image: Image.Image) -> torch.Tensor:
        if image.size == Image.open(io.BytesIO(GOOD[3])).size:
            raise ZeroDivisionError("no such image, please")
        return to_tensor(image)

    preprocess = Preprocess(transform, (SIDE, SIDE), None, "other", (0, 0, 0), (1, 1, 1))
    [(_, batch)] = load_all(
        MemorySource(GOOD[:6]), [Part(0, 0, 6)], batch_size=6, preprocess=preprocess
    )
    [failure] = batch.failures
    assert (failure.row, failure.status) == (3, Status.TRANSFORM_ERROR)
    assert (failure.error, failure.message) == ("ZeroDivisionError", "no such image, please")
    assert not batch.images[3].any()
    assert torch.equal(batch.images[4], expected_row(GOOD[4], reference=True))


@pytest.mark.parametrize("shape", [(1, SIDE, SIDE), (3, 1, 1), (SIDE,), (3, SIDE, SIDE + 1)])
def test_a_transform_of_another_shape_is_recorded_not_stretched(shape: tuple[int, ...]) -> None:
    """Copying one channel into three places would go through without a word."""
    preprocess = Preprocess(
        lambda image: torch.ones(shape), (SIDE, SIDE), None, "other", (0, 0, 0), (1, 1, 1)
    )
    [(_, batch)] = load_all(MemorySource(GOOD[:2]), [Part(0, 0, 2)], preprocess=preprocess)
    assert [f.status for f in batch.failures] == [Status.TRANSFORM_ERROR] * 2
    assert f"expected (3, {SIDE}, {SIDE})" in batch.failures[0].message
    assert not batch.images.any()


def test_an_image_that_resizing_makes_too_large_is_recorded() -> None:
    """One pixel by 3000: within the limit as it is, 48 times over it when 16 pixels wide."""
    policy = ImagePolicy("apply", (0, 0, 0), 16_000)
    source = MemorySource([encode(Image.new("RGB", (1, 3000), "red"), "PNG"), GOOD[0]])
    [(_, batch)] = load_all(source, [Part(0, 0, 2)], policy=policy)
    assert [(f.row, f.status) for f in batch.failures] == [(0, Status.TOO_LARGE)]
    assert torch.equal(batch.images[1], expected_row(GOOD[0]))


def test_a_transform_without_a_fast_path_takes_the_reference() -> None:
    preprocess = Preprocess(to_tensor, (SIDE, SIDE), SIDE, "nearest", (0, 0, 0), (1, 1, 1))
    rows = rows_of(load_all(MemorySource(GOOD), [Part(0, 0, 4)], preprocess=preprocess))
    assert all(torch.equal(rows[i], expected_row(GOOD[i], reference=True)) for i in range(4))


# Failures of the environment


class FailingSource(MemorySource):
    """Raises for one key, a number of times."""

    def __init__(self, images: list[bytes], key: bytes, error: BaseException, times: int) -> None:
        super().__init__(images)
        self.key, self.error, self.times = key, error, times

    def read(self, key: bytes) -> bytes:
        data = super().read(key)
        if key == self.key and self.times > 0:
            self.times -= 1
            raise self.error
        return data


IO_ERROR = OSError(errno.EIO, "Input/output error")


def test_a_disk_that_recovers_costs_no_row() -> None:
    source = FailingSource(GOOD, b"000005", IO_ERROR, times=3)
    batches = load_all(source, parts_of(23, 8))
    assert all(torch.equal(x, expected_row(GOOD[i])) for i, x in rows_of(batches).items())
    assert all(batch.failures == [] for _, batch in batches)
    assert source.read_keys.count(b"000005") == 4


def test_a_disk_that_keeps_failing_stops_the_run_and_is_no_row() -> None:
    source = FailingSource(GOOD, b"000009", IO_ERROR, times=10**6)
    with make_loader(source) as loader:
        batches = loader.batches(parts_of(23, 8), 4)
        assert [next(batches)[1].start, next(batches)[1].start] == [0, 4]
        with pytest.raises(RunError, match=r"reading 000009 failed: Input/output error, 4 times"):
            next(batches)
        assert list(batches) == []
    assert source.read_keys.count(b"000009") == 4


def test_a_folder_that_vanishes_stops_the_run(tmp_path: Path) -> None:
    root = tmp_path / "images"
    root.mkdir()
    for i in range(6):
        (root / f"{i}.png").write_bytes(GOOD[i])
    with make_loader(FolderSource(root)) as loader:
        root.rename(tmp_path / "away")
        with pytest.raises(RunError, match=r"reading 0\.png failed: No such file"):
            list(loader.batches([Part(0, 0, 6)], 2))


def test_out_of_memory_stops_the_run_and_is_no_row() -> None:
    for error in (
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ):

        def transform(image: Image.Image, error: Exception = error) -> torch.Tensor:
            raise error

        preprocess = Preprocess(transform, (SIDE, SIDE), None, "other", (0, 0, 0), (1, 1, 1))
        source = MemorySource(GOOD[:2])
        # Two threads decode the two images, and either may be the first that fails.
        with pytest.raises(RunError, match=r"out of memory at 00000[01]\."):
            load_all(source, [Part(0, 0, 2)], preprocess=preprocess, reference=True)


def test_a_bug_in_a_source_is_not_taken_for_a_bad_image() -> None:
    source = FailingSource(GOOD, b"000005", KeyError("a bug"), times=10**6)
    with pytest.raises(KeyError, match="a bug"):
        load_all(source, parts_of(23, 8))


def test_a_fault_is_not_retried() -> None:
    fault = ImageFault(Status.MISSING, "no such file")
    source = FailingSource(GOOD, b"000005", fault, times=10**6)
    batches = load_all(source, parts_of(23, 8))
    assert [f.row for _, batch in batches for f in batch.failures] == [5]
    assert source.read_keys.count(b"000005") == 1


# Bounds


def test_reading_ahead_is_bounded() -> None:
    source = MemorySource(GOOD[:1] * 200)
    most = 0
    with make_loader(source) as loader:
        for number, _ in enumerate(loader.batches([Part(0, 0, 200)], 4)):
            time.sleep(0.002)
            most = max(most, len(source.read_keys) - 4 * (number + 1))
    assert 0 < most <= 4 * PREFETCH_BATCHES
    assert len(source.read_keys) == 200


def test_a_consumer_that_asks_for_nothing_starts_nothing() -> None:
    source = MemorySource(GOOD)
    with make_loader(source) as loader:
        loader.batches([Part(0, 0, 23)], 4)
        time.sleep(0.02)
    assert source.read_keys == []


# Threads and processes


COUNT_THREADS = """
import os, sys, threading, torch
from pathlib import Path
from featx.images import DecodeSettings, ImagePolicy, Loader, Preprocess
from featx.sources import FolderSource
from featx.types import Part

torch.set_num_threads(8)
def others():
    return len(os.listdir("/proc/self/task")) - threading.active_count()
preprocess = Preprocess(None, (224, 224), 256, "bilinear", (0, 0, 0), (1, 1, 1))
settings = DecodeSettings(preprocess, ImagePolicy("apply", (255, 255, 255), 10**7))
source = FolderSource(Path(sys.argv[1]))
with Loader(source, source.listing(), settings) as loader:
    before = others()
    for _, batch in loader.batches([Part(0, 0, 8)], 4):
        assert batch.images.numpy().any() and not batch.failures
        print(others() - before)
"""
"""Prints for each batch how many threads exist that Python has not started."""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads by /proc")
@pytest.mark.slow
def test_loading_starts_no_threads_of_openmp(tmp_path: Path) -> None:
    """Otherwise there are as many as CPUs for each thread that calls torch."""
    for seed in range(8):
        make_image(300, 400, seed=seed).save(tmp_path / f"{seed}.jpg")
    numbers = run_python("-c", COUNT_THREADS, tmp_path).stdout.split()
    assert numbers
    assert all(int(number) <= 0 for number in numbers)


def test_threads_are_gone_after_an_exception_of_the_consumer() -> None:
    source = MemorySource([GOOD[0]] * 4000)

    def consume() -> None:
        with make_loader(source) as loader:
            for _ in loader.batches([Part(0, 0, 4000)], 4):
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    assert our_threads() == []
    assert len(source.read_keys) <= 4 * (PREFETCH_BATCHES + 1)


def test_leaving_early_drops_what_was_not_started() -> None:
    """Ending a run must not wait for a queue of slow reads."""

    class Slow(MemorySource):
        def read(self, key: bytes) -> bytes:
            time.sleep(0.05)
            return super().read(key)

    source = Slow([GOOD[0]] * 400)
    with make_loader(source) as loader:
        next(loader.batches([Part(0, 0, 1), Part(1, 1, 400)], 100))
        started_at = time.perf_counter()
    assert time.perf_counter() - started_at < 2
    assert len(source.read_keys) < 100


def test_two_loaders_at_once_do_not_mix() -> None:
    other = list(reversed(GOOD))
    with make_loader(MemorySource(GOOD)) as one, make_loader(MemorySource(other)) as two:
        parts = [Part(0, 0, 23)]
        for (_, a), (_, b) in zip(one.batches(parts, 4), two.batches(parts, 4), strict=True):
            for i in range(a.count):
                assert torch.equal(a.images[i], expected_row(GOOD[a.start + i]))
                assert torch.equal(b.images[i], expected_row(other[b.start + i]))


# The rest


def test_load_leaves_failed_images_out_and_keeps_the_order() -> None:
    images = [b"bad" if i in (2, 4) else good for i, good in enumerate(GOOD[:6])]
    with make_loader(MemorySource(images)) as loader:
        x = loader.load([5, 4, 0, 2, 1])
        assert loader.load([2, 4]).shape == (0, 3, SIDE, SIDE)
        assert loader.load([]).shape == (0, 3, SIDE, SIDE)
    assert x.shape == (3, 3, SIDE, SIDE)
    assert all(torch.equal(x[i], expected_row(GOOD[row])) for i, row in enumerate((5, 0, 1)))


def test_images_come_one_by_one_with_a_gap_where_one_fails() -> None:
    source = MemorySource([*GOOD[:9], BAD["text"][0]])
    rows = [5, 9, 4, 0, 5, 9, 8]
    with make_loader(source) as loader:
        results = list(loader.results(rows))
    assert [each.row for each in results if isinstance(each, Failure)] == [9, 9]
    for row, image in zip(rows, results, strict=True):
        if row != 9:
            assert torch.equal(image, expected_row(GOOD[row]))
    source = MemorySource(GOOD[:1] * 400)
    with make_loader(source) as loader:
        assert torch.equal(next(loader.results(range(400))), expected_row(GOOD[0]))
    assert len(source.read_keys) < 200


def test_times_add_up() -> None:
    class Slow(MemorySource):
        def read(self, key: bytes) -> bytes:
            time.sleep(0.01)
            return super().read(key)

    with make_loader(Slow(GOOD)) as loader:
        list(loader.batches([Part(0, 0, 23)], 4))
        times = loader.times
    assert times.num_bytes == sum(map(len, GOOD))
    assert times.read_s >= 0.23
    assert times.decode_s > 0
