"""Mutants of every format: no crash, no hang, no wrong shape, no neighbour changed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import fuzzing
import numpy as np
import pytest
import torch
from conftest import run_python
from test_loader import PREPROCESS, SIDE

from featx.images import DecodeSettings, ImagePolicy, Loader
from featx.types import ImageFault, Listing, Part, Status


@pytest.mark.parametrize(
    ("count", "seed"),
    [(60, 0), *(pytest.param(2500, seed, marks=pytest.mark.slow) for seed in range(1, 5))],
)
def test_mutants_neither_crash_nor_hang_nor_fill_the_memory(
    tmp_path: Path, count: int, seed: int
) -> None:
    last = tmp_path / "last"
    done = run_python(fuzzing.__file__, count, seed, last, code=None, timeout=120 + count / 5)
    kept = f"the mutant is in {last}"
    assert done.returncode == 0, f"exit code {done.returncode}; {kept}\n{done.stderr[-4000:]}"
    found = json.loads(done.stdout)
    assert sum(found["statuses"].values()) >= 0.9 * count
    assert {"ok", "truncated", "unsupported", "decode error"} <= set(found["statuses"])
    assert found["slowest_s"] < fuzzing.MAX_S, kept
    assert found["grown_mib"] < fuzzing.MAX_BYTES >> 20, kept


@pytest.mark.filterwarnings("ignore:TIFF of 3 pages")
def test_the_corpus_is_sound_and_its_mutants_are_the_same_each_time() -> None:
    for name, data in fuzzing.corpus().items():
        assert fuzzing.check(data, fuzzing.POLICY, None) == Status.OK, name
    made = [fuzzing.mutant("png", number) for number in range(20)]
    assert made == [fuzzing.mutant("png", number) for number in range(20)]
    assert len(set(made)) > 15


class Mixed:
    """Good images with mutants between them; without them there are good ones in their places."""

    def __init__(self, count: int, seed: int, mutants: bool) -> None:
        names = sorted(fuzzing.corpus())
        good = [fuzzing.corpus()[name] for name in names]
        self.images = [good[row % len(good)] for row in range(count)]
        self.is_mutant = np.random.default_rng(seed).random(count) < 0.5
        for row in np.flatnonzero(self.is_mutant) if mutants else ():
            self.images[row] = fuzzing.mutant(names[row % len(names)], int(row) + 1000 * seed)

    def listing(self) -> Listing:
        keys = np.array([b"%06d" % row for row in range(len(self.images))], dtype=np.bytes_)
        return Listing(keys, np.full(len(keys), -1, dtype=np.int64))

    def read(self, key: bytes) -> bytes:
        return self.images[int(key)]


def load(source: Mixed, reference: bool) -> tuple[torch.Tensor, dict[int, Status]]:
    """(N, 3, H, W) and the faults of the rows, after checks of every batch."""
    policy = ImagePolicy("apply", (255, 255, 255), 10**7)
    count = len(source.images)
    decoding = DecodeSettings(PREPROCESS, policy, reference)
    with Loader(source, source.listing(), decoding) as loader:
        batches = [batch for _, batch in loader.batches([Part(0, 0, count)], 16)]
    for batch in batches:
        assert batch.images.shape == (16, 3, SIDE, SIDE)
    faults = {failure.row: failure.status for batch in batches for failure in batch.failures}
    return torch.cat([batch.images[: batch.count] for batch in batches]), faults


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, on odd metadata
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("count", [80, pytest.param(4000, marks=pytest.mark.slow)])
def test_no_mutant_changes_its_neighbours(count: int, reference: bool) -> None:
    clean, no_faults = load(Mixed(count, 3, mutants=False), reference)
    assert no_faults == {}
    source = Mixed(count, 3, mutants=True)
    mixed, faults = load(source, reference)
    good = np.flatnonzero(~source.is_mutant)
    assert torch.equal(mixed[good], clean[good])
    assert set(faults) <= set(np.flatnonzero(source.is_mutant).tolist())
    assert len(faults) > 0.2 * count
    assert not mixed[sorted(faults)].any()
    assert len(Counter(faults.values())) >= 3


def test_a_fault_in_a_batch_is_that_of_the_image_by_itself() -> None:
    source = Mixed(60, 5, mutants=True)
    policy = ImagePolicy("apply", (255, 255, 255), 10**7)
    _, faults = load(source, reference=True)
    for row, data in enumerate(source.images):
        found = fuzzing.outcome(data, policy, None)
        if isinstance(found, ImageFault):
            assert faults.get(row) == found.status
        else:
            assert faults.get(row) in (None, Status.TOO_LARGE)  # too long after resizing
