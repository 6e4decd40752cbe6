"""retry_failed: images that failed are tried again; their rows are filled, no other row changes."""

from __future__ import annotations

import csv
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interruptions import died_at_disk_change, same_values, stopped_after
from tiny_model import SIX_PARTS as KEYS
from tiny_model import extract_six_parts as extract
from tiny_model import run_job

import featx
from featx.errors import ConfigError, StoreError, TooManyFailuresError
from featx.types import Status

pytestmark = pytest.mark.usefixtures("in_tmp_path")

LENIENT = {"max_failures": 30, "layers": ["conv", "deep"]}


def spoil(photos: Path, rows: Sequence[int]) -> dict[str, bytes]:
    """Cut some images short; returns what they were."""
    names = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))
    sound = {names[row]: (photos / names[row]).read_bytes() for row in rows}
    for name, data in sound.items():
        (photos / name).write_bytes(data[: len(data) // 2])
    return sound


def mend(photos: Path, sound: dict[str, bytes]) -> None:
    for name, data in sound.items():
        (photos / name).write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pack", "dtype", "codec"),
    [(True, "float16", "none"), (True, "bfloat16", "zstd"), (False, "bfloat16", "none")],
)
def test_retried_rows_give_the_store_of_a_run_without_failures(
    photos: Path, pack: bool, dtype: str, codec: str
) -> None:
    keys = {**LENIENT, "pack": pack, "dtype": dtype, "codec": codec}
    whole = extract(photos, out="whole", **keys)
    sound = spoil(photos, [0, 5, 6, 20])
    before = extract(photos, **keys)
    assert len(before.failures) == 4
    mend(photos, sound)
    after = extract(photos, retry_failed=True, **keys)
    assert after.ok.all()
    assert after.complete
    assert not after.failures
    assert same_values(after, whole)
    assert Path("store/features.h5").exists() == pack
    assert run_job("verify", store="store") == 0
    with Path("store/failures.csv").open(newline="") as file:
        assert len(list(csv.reader(file))) == 1


@pytest.mark.slow
def test_what_still_fails_stays_on_record(
    photos: Path, capfd: pytest.CaptureFixture[str], computed: list[Any]
) -> None:
    sound = spoil(photos, [1, 2, 9])
    before = extract(photos, **LENIENT)
    mend(photos, dict(list(sound.items())[:1]))
    capfd.readouterr()
    computed.clear()
    after = extract(photos, retry_failed=True, **LENIENT)
    printed = capfd.readouterr()
    assert "1 of 3 failed images can be read now" in printed.err
    assert "1 row computed again" in printed.out
    assert [f["row"] for f in after.failures] == [2, 9]
    assert np.flatnonzero(~after.ok).tolist() == [2, 9]
    assert [start for _, start in computed] == [0]  # one batch of six
    good = np.array([row for row in range(21) if row not in (1, 2, 9)])
    assert after["conv"][good].tobytes() == before["conv"][good].tobytes()
    assert np.isnan(after["conv"][[2, 9]]).all()
    assert json.loads(Path("store/summary.json").read_text())["failures"] == 2


@pytest.mark.parametrize(
    ("pack", "found", "status"),
    [
        (True, b"no image", Status.UNSUPPORTED),
        pytest.param(False, b"", Status.EMPTY, marks=pytest.mark.slow),
    ],
)
def test_a_retry_writes_what_it_found(
    photos: Path, pack: bool, found: bytes, status: Status, computed: list[Any]
) -> None:
    """A file that still fails, but for another reason than before; then for the same again."""
    (name,) = spoil(photos, [4])
    keys = {**LENIENT, "pack": pack}
    before = extract(photos, **keys)
    assert before.status[4] == Status.TRUNCATED
    (photos / name).write_bytes(found)
    after = extract(photos, retry_failed=True, **keys)
    assert after.status[4] == status
    (failure,) = after.failures
    assert failure["message"] != before.failures[0]["message"]
    assert after["conv"][before.ok].tobytes() == before["conv"][before.ok].tobytes()
    assert failure["message"] in Path("store/failures.csv").read_text()
    assert run_job("verify", store="store") == 0
    rows = [*Path("store").glob("features.h5"), *Path("store").glob("parts/*.h5")]
    before_retry = [path.read_bytes() for path in rows]
    computed.clear()
    extract(photos, retry_failed=True, **keys)
    assert not computed
    assert [path.read_bytes() for path in rows] == before_retry


@pytest.mark.slow
def test_failed_rows_of_an_unfinished_store_are_retried_and_it_resumes(photos: Path) -> None:
    whole = extract(photos, out="whole", **LENIENT)
    sound = spoil(photos, [1])
    with stopped_after(1):
        extract(photos, **LENIENT)
    mend(photos, sound)
    assert same_values(extract(photos, retry_failed=True, **LENIENT), whole)


@pytest.mark.slow
@pytest.mark.parametrize("dies_at", range(1, 14))
def test_a_retry_cut_off_anywhere_loses_no_row(photos: Path, dies_at: int) -> None:
    """Every change of the disk in turn is the last one of a process."""
    whole = extract(photos, out="whole", **LENIENT)
    sound = spoil(photos, [2, 7])
    before = extract(photos, **LENIENT)
    mend(photos, sound)
    with died_at_disk_change(dies_at):
        extract(photos, retry_failed=True, **LENIENT)
    half = featx.open("store")
    assert half.complete
    assert half.ok.sum() >= 19
    kept = np.flatnonzero(half.ok & before.ok)
    assert len(kept) == 19
    assert half["deep"][kept].tobytes() == whole["deep"][kept].tobytes()
    assert same_values(extract(photos, retry_failed=True, **LENIENT), whole)


def test_a_damaged_store_is_not_taken_apart(photos: Path) -> None:
    sound = spoil(photos, [2])
    extract(photos, **LENIENT)
    mend(photos, sound)
    packed = Path("store/features.h5")
    values = featx.open("store")["conv"][10].tobytes()
    data = bytearray(packed.read_bytes())
    data[data.index(values) + 3] ^= 4
    packed.write_bytes(data)
    with pytest.raises(StoreError, match=r"differs from its checksum.*verify\.repair=true"):
        extract(photos, retry_failed=True, **LENIENT)
    assert packed.read_bytes() == bytes(data)


@pytest.mark.slow
def test_layers_of_another_run_keep_their_failure_until_they_are_retried(photos: Path) -> None:
    whole = extract(photos, out="whole", **LENIENT)
    sound = spoil(photos, [2])
    extract(photos, **{**LENIENT, "layers": ["conv"]})
    extract(photos, **LENIENT)
    mend(photos, sound)
    half = extract(photos, retry_failed=True, **{**LENIENT, "layers": ["conv"]})
    assert half.status[2] == Status.TRUNCATED
    assert half["conv"][2].tobytes() == whole["conv"][2].tobytes()
    assert np.isnan(half["deep"][2]).all()
    with pytest.raises(ConfigError, match=r"one run: 'layers=\[conv\]', 'layers=\[deep\]'"):
        extract(photos, retry_failed=True, **LENIENT)
    after = extract(photos, retry_failed=True, **{**LENIENT, "layers": ["deep"]})
    assert same_values(after, whole)


@pytest.mark.slow
def test_layers_that_were_computed_together_are_retried_together(photos: Path) -> None:
    sound = spoil(photos, [2])
    extract(photos, **LENIENT)
    mend(photos, sound)
    with pytest.raises(ConfigError, match=r"one run: 'layers=\[conv,deep\]'"):
        extract(photos, retry_failed=True, **{**LENIENT, "layers": ["deep"]})
    assert featx.open("store").status[2] == Status.TRUNCATED


@pytest.mark.slow
def test_too_many_failures_stop_a_long_run_early_and_resumably(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = extract(photos, out="whole", **LENIENT)
    sound = spoil(photos, [0, 1, 2])
    strict = {**LENIENT, "max_failures": 2}
    perf_counter = time.perf_counter
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: 1e6 * perf_counter())  # the run takes hours
        with pytest.raises(TooManyFailuresError, match=r"3 of the first \d+ images fai") as stopped:
            extract(photos, **strict)
    assert stopped.value.exit_code == 1
    half = featx.open("store")
    assert 4 <= half.num_rows_present < 21
    assert [f["row"] for f in half.failures] == [0, 1, 2]
    assert Path("store/failures.csv").read_text().count("truncated,") == 3
    mend(photos, sound)
    assert same_values(extract(photos, retry_failed=True, **strict), whole)


@pytest.mark.slow
def test_a_run_that_is_nearly_done_goes_to_its_end(photos: Path) -> None:
    spoil(photos, [0, 1, 2])
    store = extract(photos, **{**LENIENT, "max_failures": 2})
    assert store.complete
    shutil.rmtree("store")
    assert run_job("extract", **{**KEYS, "data": str(photos), "max_failures": 2}) == 3
