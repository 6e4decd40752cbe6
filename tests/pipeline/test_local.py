"""Workers that share the parts of a run: whatever becomes of them, the rows are the same."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_store import MadeRun, dataset_digests, make_run, temporary_files
from processes import ended, running
from stub_worker import StubTask, stub_spec

from featx.config import Config
from featx.errors import RunError
from featx.pipeline import Interrupted, RunOutcome
from featx.pipeline.executors.process_pool import ProcessPool, temporary_worker_folder
from featx.store.pack import pack

HERE = Path(__file__).resolve().parent


def stub_command(folder: Path, number: int, device: str) -> list[str]:
    code = f"import sys; sys.path[:0] = {[str(HERE), str(HERE.parent)]}; import stub_worker as stub"
    return [sys.executable, "-c", f"{code}; stub.main()", str(folder), str(number), device]


@pytest.fixture
def run() -> MadeRun:
    """Ten parts of 4 rows, the last one short; failures in two of them."""
    return make_run(num_rows=38, part_rows=4, failed=[2, 17])


@pytest.fixture
def work(run: MadeRun, tmp_path: Path) -> Callable[..., RunOutcome]:
    """Do what a store lacks with so many workers."""
    events = tmp_path / "events"
    events.mkdir(exist_ok=True)

    def do(workers: int = 2, config: Config | None = None, **given: Any) -> RunOutcome:
        root = tmp_path / "store"
        with run.session(root).hold() as session:
            task = StubTask(run, root, events, **given)
            spec = stub_spec(root, session.missing(), config or Config(), task)
            folder = root / "jobs"
            pool = ProcessPool(spec, session, folder, ["cpu"] * workers, command=stub_command)
            outcome = pool.run()
            assert session.is_complete
            assert not folder.exists()
            pack(root)
            session.finish_packing()
        return outcome

    return do


def events_of(tmp_path: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in (tmp_path / "events").glob(pattern))


@pytest.fixture(autouse=True)
def _nobody_left(tmp_path: Path) -> Iterator[None]:
    """After every test, no worker lives on, and nothing half written lies in the store."""
    yield
    assert all(ended(int(name.removeprefix("pid-"))) for name in events_of(tmp_path, "pid-*"))
    if (tmp_path / "store").exists():
        assert temporary_files(tmp_path / "store") == []


def is_whole(run: MadeRun, tmp_path: Path) -> bool:
    run.write(tmp_path / "reference", packed=True)
    digests = [dataset_digests(tmp_path / name / "features.h5") for name in ("reference", "store")]
    return digests[0] == digests[1]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_gives_the_same_datasets(
    work: Callable[..., RunOutcome], run: MadeRun, tmp_path: Path, workers: int,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    outcome = work(workers, pause_s=0.05)
    assert is_whole(run, tmp_path)
    assert len({name.split("-by-")[1].split("-")[0] for name in events_of(tmp_path, "part-*")}) == (
        workers
    )
    assert len(events_of(tmp_path, "part-*")) == 10, "a part was done twice"
    assert (outcome.underflow_rows, outcome.peak_memory_mib) == ({"flat": 10}, 20)
    assert outcome.metrics.seconds["model"] == workers
    printed = capfd.readouterr()
    assert "worker 0 (cpu): hello from cpu" in printed.err.splitlines()
    assert printed.out == ""


def test_a_log_that_cannot_be_written_is_an_error_with_advice(run: MadeRun, tmp_path: Path) -> None:
    def command_beside_a_folder(folder: Path, number: int, device: str) -> list[str]:
        (folder / f"{number}.log").mkdir()
        return stub_command(folder, number, device)

    root = tmp_path / "store"
    with run.session(root).hold() as session:
        spec = stub_spec(root, session.missing(), Config(), StubTask(run, root, tmp_path))
        pool = ProcessPool(spec, session, root / "jobs", ["cpu"], command=command_beside_a_folder)
        with pytest.raises(RunError, match=r"0\.log failed: Is a directory\..*Move away"):
            pool.run()


def test_a_worker_that_is_killed_costs_its_part_only(
    work: Callable[..., RunOutcome],
    run: MadeRun,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    work(2, faults={3: ("kill", 1)}, pause_s=0.02)
    assert is_whole(run, tmp_path)
    assert "was killed by SIGKILL in part" in (output := capfd.readouterr().err)
    assert "part 3 (rows 12 to 15)" in output
    assert "another one takes its place" in output
    assert len(events_of(tmp_path, "part-*")) == 10, "a part was done twice"


def test_a_part_that_takes_its_workers_with_it_ends_the_run_and_is_named(
    work: Callable[..., RunOutcome], run: MadeRun, tmp_path: Path
) -> None:
    """Also where the worker held other parts: from the first death on it is computed alone."""
    with pytest.raises(RunError) as ended_run:
        work(2, faults={3: ("kill", 9)})
    message = str(ended_run.value)
    assert "(cpu) was killed by SIGKILL in part 3 (rows 12 to 15), the 3rd worker" in message
    assert ended_run.value.exit_code == 1
    assert len(events_of(tmp_path, "fault-3-*")) == 3
    work(2)
    assert is_whole(run, tmp_path)


def test_code_of_a_model_that_ends_its_worker_is_named(work: Callable[..., RunOutcome]) -> None:
    expected = (
        r"part 3 \(rows 12 to 15\): line \d+ of .*stub_worker\.py ends .* with sys\.exit\(0\)"
    )
    with pytest.raises(RunError, match=expected):
        work(2, faults={3: ("sys.exit", 1)})


@pytest.mark.slow
def test_workers_that_never_come_up_end_the_run_with_their_last_words(
    work: Callable[..., RunOutcome], tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=r"before it had a part(.|\n)*these are my last words"):
        work(1, faults={"start": ("exit", 9)})
    assert len(events_of(tmp_path, "fault-start-*")) == 3


@pytest.mark.slow
def test_a_worker_that_is_interrupted_while_it_imports_prints_no_traceback(
    run: MadeRun, tmp_path: Path
) -> None:
    def interrupted(folder: Path, number: int, device: str) -> list[str]:
        code = (
            "import os, runpy, signal; os.kill(os.getpid(), signal.SIGINT); "
            "runpy.run_module('featx.pipeline.executors.worker', run_name='__main__')"
        )
        return [sys.executable, "-c", code, str(folder), str(number), device]

    root = tmp_path / "store"
    with run.session(root).hold() as session:
        task = StubTask(run, root, tmp_path)
        spec = stub_spec(root, session.missing(), Config(), task)
        pool = ProcessPool(spec, session, root / "jobs", ["cpu"], command=interrupted)
        with pytest.raises(RunError, match="was killed by SIGINT before it had a part") as error:
            pool.run()
    assert "output" not in str(error.value)


def test_a_worker_that_does_not_listen_is_ended_after_the_grace(
    work: Callable[..., RunOutcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("featx.pipeline.stop_signals.GRACE_S", 1.0)
    monkeypatch.setattr("featx.pipeline.executors.worker_pool.GRACE_S", 1.0)
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    started_at = time.monotonic()
    with pytest.raises(Interrupted):
        work(2, faults={0: ("hang", 1)}, pause_s=0.4)
    assert time.monotonic() - started_at < 8


def test_folders_of_killed_drivers_are_deleted_and_those_of_living_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
        import time
        from featx.pipeline.executors.process_pool import temporary_worker_folder
        with temporary_worker_folder() as folder:
            (folder / "3ff35702").mkdir()
            (folder / "3ff35702/worker-spec.pkl").write_bytes(b"x")
            print(folder, flush=True)
            time.sleep(600)
        """
    drivers = [[sys.executable, "-c", textwrap.dedent(code)] for _ in range(2)]
    with contextlib.ExitStack() as stack:
        killed, living = (
            stack.enter_context(running(driver, TMPDIR=str(tmp_path))) for driver in drivers
        )
        folders = [Path(str(each.stdout.readline()).strip()) for each in (killed, living)]
        killed.kill()
        killed.wait()
        foreign = tmp_path / "featx-workers-mine"
        foreign.mkdir()
        assert sorted(tmp_path.iterdir()) == sorted([*folders, foreign])
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with temporary_worker_folder() as folder:
            assert sorted(tmp_path.iterdir()) == sorted([folders[1], foreign, folder])
        assert sorted(tmp_path.iterdir()) == sorted([folders[1], foreign])
        living.kill()
        living.wait()
    with temporary_worker_folder():
        assert not folders[1].exists()
