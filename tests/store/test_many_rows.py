"""A store of a million rows, and one of ten thousand parts: no step looks at every row.

What was measured is printed: pytest -m slow -rP tests/store/test_many_rows.py
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import run_python
from made_store import MadeRun, make_header, make_run, make_spec

from featx.store import FeatureStore
from featx.store.part_files import part_path
from featx.types import Listing

ROWS = 1_000_000
RESUME_S = 2.0
"""From constructing a StoreSession to its first missing part: the promise, in the issue's words."""


def many_rows(num_rows: int, part_rows: int) -> MadeRun:
    """Rows of two numbers, the second one the row's own number."""
    keys = np.char.add(
        np.char.add(b"class-", np.char.zfill((np.arange(num_rows) // 1000).astype("S3"), 3)),
        np.char.add(b"/image-", np.char.zfill(np.arange(num_rows).astype("S8"), 8)),
    )
    listing = Listing(
        np.char.add(keys, b".jpg"),
        np.arange(num_rows) // 1000,
        tuple(f"class-{i:03d}" for i in range(-(-num_rows // 1000))),
    )
    values = np.stack([np.ones(num_rows), np.arange(num_rows)], 1).astype("float32")
    spec = make_spec("x", (2,))
    return MadeRun(listing, (spec,), make_header(), part_rows, "none", {"x": values})


def begin_and_find_missing(run: MadeRun, root: Path) -> tuple[float, list[int]]:
    """Seconds from a new StoreSession to the list of missing parts, and that list."""
    started_at = time.perf_counter()
    with run.session(root).hold() as session:
        missing = [part.index for part in session.missing()]
        return time.perf_counter() - started_at, missing


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_a_million_rows_resume_within_seconds(tmp_path: Path, packed: bool) -> None:
    run = many_rows(ROWS, 4096)
    run.write(tmp_path, None if packed else set(range(245)) - {100}, packed=packed)
    seconds, missing = begin_and_find_missing(run, tmp_path)
    assert missing == ([] if packed else [100])
    assert seconds < 2 * RESUME_S
    started_at = time.perf_counter()
    store = FeatureStore(tmp_path)
    opened = time.perf_counter() - started_at
    rows = np.random.default_rng(0).integers(0, 100 * 4096, (50, 256))
    started_at = time.perf_counter()
    for batch in rows:
        assert np.array_equal(store["x"][batch][:, 1], batch)
    batch_ms = (time.perf_counter() - started_at) / len(rows) * 1e3
    sys.stdout.write(
        f"resumed {seconds:.2f} s, opened {opened:.3f} s, a batch of 256 {batch_ms:.1f} ms\n"
    )
    assert opened < 1
    key = run.listing.keys[123_456].decode()
    assert store.row(key) == 123_456


@pytest.mark.slow
def test_ten_thousand_parts_stay_quick(tmp_path: Path) -> None:
    """In seconds of this process, by what plain h5py takes to open as many files: other processes
    on the machine slow down both."""
    run = many_rows(20_000, 2)
    session = run.session(tmp_path)
    with session.hold():
        manifest = session.manifest.to_json()
        for index in set(range(10_000)) - {5000}:
            part = run.grid.part(index)
            # Committing would sync 10,000 times; the files are the same.
            data = run.builder(part).build(run.as_run(), run.listing, manifest)
            part_path(session.root, index).write_bytes(data)
    started_at = time.process_time()
    _, missing = begin_and_find_missing(run, tmp_path)
    resume_s = time.process_time() - started_at
    assert missing == [5000]
    started_at = time.process_time()
    for path in (tmp_path / "parts").glob("part-*.h5"):
        with h5py.File(path, "r") as file:
            assert file.attrs["fingerprint"]
    plain_s = time.process_time() - started_at
    started_at = time.process_time()
    store = FeatureStore(tmp_path)
    open_s = time.process_time() - started_at
    rows = np.random.default_rng(0).integers(0, 9000, (5, 256))
    started_at = time.process_time()
    for batch in rows:
        assert np.array_equal(store["x"][batch][:, 1], batch)
    batch_s = (time.process_time() - started_at) / len(rows)
    sys.stdout.write(
        f"resumed {resume_s:.1f} ({plain_s:.1f}), opened {open_s:.3f}, "
        f"a batch {batch_s:.2f} CPU s\n"
    )
    assert resume_s < 5 * plain_s
    assert open_s < 0.2 * plain_s
    assert batch_s < 0.5 * plain_s


@pytest.mark.slow
def test_opening_takes_no_memory_for_rows_that_are_not_asked_for(tmp_path: Path) -> None:
    """Keys, labels and status wait until they are asked for."""
    run = many_rows(300_000, 1 << 16)
    run.write(tmp_path, packed=True)
    code = (
        "import resource, sys, featx, numpy as np\n"
        "small = featx.open(sys.argv[1])['flat'][:]\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "store = featx.open(sys.argv[2])\n"
        "store['x'][[0, 299_999, 5]]\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    small = make_run().write(tmp_path / "small", packed=True)
    # The keys alone are 8 MB, their strings 32 MB.
    assert int(run_python("-c", code, small, tmp_path).stdout) < 4096
