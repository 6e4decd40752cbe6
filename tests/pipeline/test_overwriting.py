"""overwrite=true deletes what is finished, and resumes what it has begun itself."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from interruptions import on_commit
from made_store import dataset_digests
from processes import outcome, running
from tiny_model import COMMAND, MODEL, SIX_PARTS, write_image
from tiny_model import extract_six_parts as extract
from waiting import wait_until

import featx
from featx.errors import StoreLockedError
from featx.pipeline import Interrupted
from featx.types import Part

pytestmark = pytest.mark.usefixtures("in_tmp_path")

MARK = Path("store/.overwriting")


@contextlib.contextmanager
def stopped_at_commit(count: int) -> Iterator[None]:
    """The block is a run whose commit of the last of so many parts ends as a signal ends it."""
    done: list[Part] = []

    def interrupt(part: Part) -> None:
        done.append(part)
        if len(done) == count:
            raise Interrupted(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        on_commit(patch, interrupt)
        with pytest.raises(Interrupted):
            yield


def part_times() -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in Path("store/parts").glob("part-*.h5")}


@pytest.mark.slow
def test_the_same_command_resumes_its_overwriting(photos: Path, computed: list[Any]) -> None:
    whole = dataset_digests(extract(photos, out="whole").root)
    extract(photos, dtype="float32")
    with stopped_at_commit(2):
        extract(photos, overwrite=True)
    assert MARK.exists()
    assert len(part_times()) == 2
    del computed[:]
    extract(photos, overwrite=True, max_failures=3, pack=False)
    assert sorted(start for _, start in computed) == [8, 12, 16, 20]
    assert not MARK.exists()
    assert not part_times() or len(part_times()) == 6
    extract(photos)
    assert dataset_digests("store") == whole


def test_a_finished_store_is_overwritten(photos: Path, computed: list[Any]) -> None:
    extract(photos, overwrite=True)
    del computed[:]
    extract(photos, overwrite=True)
    assert len(computed) == 6
    assert not MARK.exists()


@pytest.mark.slow
def test_the_parts_of_another_command_are_deleted(photos: Path, computed: list[Any]) -> None:
    with stopped_at_commit(2):  # without overwrite=true
        extract(photos)
    del computed[:]
    extract(photos, overwrite=True)
    assert len(computed) == 6
    with stopped_at_commit(2):
        extract(photos, overwrite=True)
    del computed[:]
    store = extract(photos, overwrite=True, layers=["deep"])
    assert list(store) == ["deep"]
    assert len(computed) == 6


@pytest.mark.slow
def test_a_store_that_does_not_fit_any_more_is_overwritten(
    photos: Path, computed: list[Any]
) -> None:
    with stopped_at_commit(2):
        extract(photos, overwrite=True)
    write_image(photos / "cat" / "new.png", 99)
    del computed[:]
    assert len(extract(photos, overwrite=True)) == 22
    assert len(computed) == 6


@pytest.mark.slow
def test_the_store_of_a_model_whose_file_was_edited_is_overwritten(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, computed: list[Any]
) -> None:
    """The weights are the same; only the file says that rows would be of another model."""
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "edited_model.py"
    module.write_text("from zoo import TwoStageConvNet\n")
    model = {**MODEL, "factory": "edited_model:TwoStageConvNet"}
    with stopped_at_commit(2):
        extract(photos, model=model, overwrite=True)
    module.write_text("from zoo import TwoStageConvNet  # edited\n")
    del computed[:]
    extract(photos, model=model, overwrite=True)
    assert len(computed) == 6


@pytest.mark.slow
def test_the_store_of_a_data_set_from_python_is_overwritten(computed: list[Any]) -> None:
    """The config does not say which object it was."""
    import numpy as np

    images = [(np.full((40, 40, 3), 10 * i, np.uint8), 0) for i in range(21)]
    with stopped_at_commit(2):
        extract(images, overwrite=True)
    del computed[:]
    extract(images[::-1], overwrite=True)
    assert len(computed) == 6


def test_a_store_that_another_process_writes_is_left_alone(photos: Path) -> None:
    with stopped_at_commit(2):
        extract(photos, overwrite=True)
    before = part_times()
    from featx.storage import exclusive_lock

    with exclusive_lock(Path("store/.lock")), pytest.raises(StoreLockedError):
        extract(photos, overwrite=True)
    assert part_times() == before


@pytest.mark.slow
def test_statistics_are_resumed_as_well(photos: Path) -> None:
    keys = {**SIX_PARTS, "data": str(photos), "overwrite": True}
    featx.stats(**keys)
    with stopped_at_commit(2):
        featx.stats(**keys)
    assert Path("store/.stats-overwriting").exists()
    featx.stats(**keys)
    assert not Path("store/.stats-overwriting").exists()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_the_command_resumes_after_any_end(photos: Path, signum: signal.Signals) -> None:
    command = [
        sys.executable, "-m", "featx", *COMMAND, "data=folder", f"data.root={photos}",
        "overwrite=true", "model.args={pause_s: 0.3}",
    ]  # fmt: skip
    extract(photos, dtype="float32")
    with running(command) as process:
        wait_until(lambda: MARK.exists() and len(part_times()) >= 2, process)
        process.send_signal(signum)
        outcome(process)
    before = part_times()
    assert len(before) >= 2
    with running(command) as process:
        code, err, _ = outcome(process)
    assert code == 0, err
    assert "started by this command with overwrite=true" in err
    assert f"{4 * len(before)} of 21 rows are there already" in err
    assert not MARK.exists()
    whole = extract(photos, out="whole")
    assert dataset_digests("store") == dataset_digests(whole.root)
