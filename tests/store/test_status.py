"""job=status: what the files of a store say of a run, without a lock and without a change."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from made_store import MadeRun, make_run
from tiny_model import run_job

from featx.errors import StoreError
from featx.jobs.status import statuses
from featx.storage import AtomicFolder
from featx.store import Heartbeat, QueueState, clear_heartbeats, read_heartbeats, store_status
from featx.store.heartbeat import pid_namespace
from featx.types import Part


@pytest.fixture
def run() -> MadeRun:
    """Five parts of 8 rows, the last one short; two rows fail."""
    return make_run(num_rows=37, part_rows=8, failed=[2, 17])


def committed_at(root: Path, ages_s: dict[int, float]) -> None:
    """Parts were committed so many seconds ago."""
    for index, age_s in ages_s.items():
        then = time.time() - age_s
        os.utime(root / "parts" / f"part-{index:06d}.h5", (then, then))


def heartbeat_file(
    root: Path, host: str = "elsewhere", pid: int = 1, age_s: float = 0, **more: Any
) -> Path:
    """The file of a process, as it was last written so many seconds ago."""
    folder = root / "workers"
    folder.mkdir(exist_ok=True)
    path = folder / f"{host}-{pid}.json"
    now = time.time()
    values = {"host": host, "pid": pid, "what": "worker on cuda:0", "part": None, "parts": 0}
    values |= dict.fromkeys(("part_rows", "part_since", "last_commit"))
    values |= {"beat": now - age_s, **more}
    path.write_text(json.dumps(values))
    os.utime(path, (now - age_s, now - age_s))
    return path


def test_rows_parts_speed_and_time_left(run: MadeRun, tmp_path: Path) -> None:
    run.write(tmp_path, [0, 1, 3])
    committed_at(tmp_path, {0: 30, 1: 20, 3: 10})
    heartbeat_file(tmp_path)
    status = store_status(tmp_path)
    assert (status.rows, status.rows_done) == (37, 24)
    assert (status.parts, status.parts_done, status.complete) == (5, 3, False)
    assert status.failures == 1
    assert status.rows_per_second == pytest.approx(16 / 20, rel=0.01)
    assert status.seconds_left == pytest.approx(13 / 0.8, rel=0.01)
    assert status.last_commit_age_s == pytest.approx(10, abs=1)
    assert status.stuck == []


def test_the_speed_is_that_of_the_last_minutes(run: MadeRun, tmp_path: Path) -> None:
    run.write(tmp_path, [0, 1, 2])
    committed_at(tmp_path, {0: 90000, 1: 110, 2: 100})
    assert store_status(tmp_path).rows_per_second == pytest.approx(0.8, rel=0.01)


def test_nobody_at_work_leaves_no_time_and_says_so(run: MadeRun, tmp_path: Path) -> None:
    run.write(tmp_path, [0, 1])
    committed_at(tmp_path, {0: 30, 1: 20})
    status = store_status(tmp_path)
    assert status.seconds_left is None
    assert "3 parts are missing and no process writes the store" in status.stuck[0]


def test_a_packed_store_is_complete(run: MadeRun, tmp_path: Path) -> None:
    run.write(tmp_path, packed=True)
    status = store_status(tmp_path)
    assert (status.complete, status.packed, status.stuck) == (True, True, [])


def test_recent_writers_are_alive_and_others_reported(run: MadeRun, tmp_path: Path) -> None:
    run.write(tmp_path, [0])
    heartbeat_file(tmp_path, pid=1, age_s=5)
    heartbeat_file(tmp_path, pid=2, age_s=100)
    heartbeat_file(tmp_path, pid=3, age_s=-20)  # the clock of its file server is ahead
    status = store_status(tmp_path)
    assert [worker.is_alive for worker in status.workers] == [True, False, True]
    assert len(status.stuck) == 1
    assert "pid 2 on elsewhere): last heartbeat 100 s ago" in status.stuck[0]


def test_on_this_machine_a_process_that_is_gone_is_told_at_once(
    run: MadeRun, tmp_path: Path
) -> None:
    run.write(tmp_path, [0])
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    host, here = socket.gethostname(), pid_namespace()
    heartbeat_file(tmp_path, host, process.pid, pids=here)
    heartbeat_file(tmp_path, host, os.getpid(), pids=here)
    alive = {worker.values["pid"]: worker.is_alive for worker in store_status(tmp_path).workers}
    assert alive == {process.pid: False, os.getpid(): True}
    # In a container that has this host's name, the number means another process.
    heartbeat_file(tmp_path, host, process.pid, pids=7)
    alive = {worker.values["pid"]: worker.is_alive for worker in store_status(tmp_path).workers}
    assert alive[process.pid]


def test_a_part_that_takes_far_longer_than_others_is_stuck(run: MadeRun, tmp_path: Path) -> None:
    run.write(tmp_path, [0, 1])
    committed_at(tmp_path, {0: 700, 1: 690})
    at = {"part": 2, "part_rows": [16, 24]}
    heartbeat_file(tmp_path, pid=1, part_since=time.time() - 600, **at)
    heartbeat_file(tmp_path, pid=2, part_since=time.time() - 60, **at)
    (line,) = store_status(tmp_path).stuck
    assert "pid 1 on elsewhere) has been at part 2 (rows 16 to 23) for 600 s" in line
    assert "a part takes about 20 s" in line


def test_a_worker_whose_clock_is_wrong_is_not_stuck(run: MadeRun, tmp_path: Path) -> None:
    run.write(tmp_path, [0, 1])
    committed_at(tmp_path, {0: 40, 1: 20})
    for pid, off_by_s in enumerate((-3600, 3600), 1):
        clock = {"part_since": time.time() + off_by_s - 5, "beat": time.time() + off_by_s}
        heartbeat_file(tmp_path, pid=pid, part=2, part_rows=[16, 24], **clock)
    assert store_status(tmp_path).stuck == []
    stuck = {"part_since": time.time() + 3000, "beat": time.time() + 3600}
    heartbeat_file(tmp_path, pid=3, part=3, part_rows=[24, 32], **stuck)
    (line,) = store_status(tmp_path).stuck
    assert "pid 3 on elsewhere) has been at part 3 (rows 24 to 31) for 600 s" in line


def test_failures_that_only_the_driver_knows_are_counted(run: MadeRun, tmp_path: Path) -> None:
    run.write(tmp_path, [0])
    there = store_status(tmp_path).failures
    heartbeat_file(tmp_path, pid=1)
    assert store_status(tmp_path).failures == there
    heartbeat_file(tmp_path, pid=2, what="driver", failures=there + 3)
    assert store_status(tmp_path).failures == there + 3


def test_a_heartbeat_tells_what_is_done_and_leaves_nothing_behind(
    tmp_path: Path, quick_heartbeats: None
) -> None:
    with Heartbeat(AtomicFolder(tmp_path), "cpu") as beat:
        beat.begin(Part(3, 24, 32))
        beat.record_commit(Part(2, 16, 24))
        deadline = time.monotonic() + 10
        while not (records := read_heartbeats(tmp_path)) or records[0].values["part"] != 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (found,) = records
        assert found.is_alive
        assert found.values["part_rows"] == [24, 32]
        assert (found.values["parts"], found.values["rows"]) == (1, 8)
        beat.record_commit(Part(3, 24, 32))
        assert found.values["last_commit"] == pytest.approx(time.time(), abs=5)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_costs_the_heartbeat_only(tmp_path: Path) -> None:
    (tmp_path / "workers").touch()  # a file where the folder should be
    with Heartbeat(AtomicFolder(tmp_path), "cpu") as beat:
        beat.begin(Part(0, 0, 8))
    assert read_heartbeats(tmp_path) == []


@pytest.mark.parametrize("content", ["{", "3", '{"host": "here"}'])
def test_other_files_of_such_a_folder_are_no_heartbeats(tmp_path: Path, content: str) -> None:
    (tmp_path / "workers").mkdir()
    path = tmp_path / "workers" / "settings.json"
    path.write_text(content)
    assert read_heartbeats(tmp_path) == []
    clear_heartbeats(AtomicFolder(tmp_path))
    assert path.read_text() == content


def test_a_flipped_bit_in_the_heartbeat_of_a_killed_process_stops_nothing(
    run: MadeRun, tmp_path: Path
) -> None:
    run.write(tmp_path, [0])
    at = {"part": 2, "part_rows": [16, 24], "part_since": 1.0}
    path = heartbeat_file(tmp_path, age_s=100, **at)
    path.write_text(path.read_text().replace("part_rows", "part_rovs"))
    os.utime(path, (1, 1))
    assert [each.values["part"] for each in store_status(tmp_path).workers] == [None]
    with run.session(tmp_path).hold():
        assert not path.exists()


def test_who_holds_the_store_clears_away_those_before(run: MadeRun, tmp_path: Path) -> None:
    """Whoever wrote a moment ago, on whatever machine, had the lock and has it no more."""
    run.write(tmp_path, [0])
    before = [heartbeat_file(tmp_path, pid=1, age_s=100), heartbeat_file(tmp_path, pid=2)]
    with run.session(tmp_path).hold():
        assert not any(path.exists() for path in before)


@pytest.mark.parametrize("held", [False, True])
def test_the_job_prints_text_or_json_and_takes_no_lock(
    run: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], held: bool
) -> None:
    run.write(tmp_path, [0, 1])
    committed_at(tmp_path, {0: 30, 1: 20})

    def both() -> None:
        assert run_job("status", store=str(tmp_path)) == 0
        assert run_job("status", store=str(tmp_path), json=True) == 0

    if held:
        with run.session(tmp_path).hold():
            heartbeat_file(tmp_path, parts=2, last_commit=time.time() - 20)
            both()
    else:
        heartbeat_file(tmp_path, parts=2, last_commit=time.time() - 20)
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        both()
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    text, _, rest = capsys.readouterr().out.partition("{")
    assert re.search(r"rows +16 of 37, 43.2%", text)
    assert re.search(r"worker on cuda:0  pid 1 on elsewhere  alive, 2 parts, the last 2\d s", text)
    values = json.loads("{" + rest)
    assert values["parts_done"] == 2
    assert values["workers"][0]["alive"] is True


def test_no_store_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no store"):
        run_job("status", store=str(tmp_path))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "featx.json").touch()
    with pytest.raises(StoreError, match=r"Nearest: photos\. .* takes the store's folder"):
        run_job("status", store=str(tmp_path / "fotos"))


def test_the_queue_of_a_scheduler_is_shown_with_its_reasons(
    run: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write(tmp_path, [0])
    (tmp_path / "workers").mkdir(exist_ok=True)
    states = [QueueState(2, "PENDING", "Resources"), QueueState(3, "RUNNING")]
    with Heartbeat(AtomicFolder(tmp_path), "driver") as heartbeat:
        heartbeat.set_queue(states)
        heartbeat.write()
        assert store_status(tmp_path).workers[0].queue == states
        assert run_job("status", store=str(tmp_path)) == 0
        assert "queue      2 PENDING (Resources), 3 RUNNING\n" in capsys.readouterr().out
        assert run_job("status", store=str(tmp_path), json=True) == 0
        (worker,) = json.loads(capsys.readouterr().out)["workers"]
        assert worker["queue"][0] == {"tasks": 2, "state": "PENDING", "reason": "Resources"}
    heartbeat_file(tmp_path, what="driver", age_s=600, queue=[{"tasks": 1, "state": "RUNNING"}])
    assert run_job("status", store=str(tmp_path)) == 0
    assert "queue      1 RUNNING, 10 min ago\n" in capsys.readouterr().out


def test_the_status_is_watched_until_the_run_has_ended(run: MadeRun, tmp_path: Path) -> None:
    run.write(tmp_path, [0, 1])
    path = heartbeat_file(tmp_path)
    steps = [lambda: run.write(tmp_path), lambda: run.write(tmp_path), path.unlink]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        steps[len(slept) - 1]()
        if len(slept) < 3:
            heartbeat_file(tmp_path)  # the driver still packs

    found = list(statuses(tmp_path, sleep))
    assert [status.rows_done for status in found] == [16, 37, 37, 37]
    assert slept == [5.0] * 3


def test_a_resume_says_what_a_killed_process_had_not_committed(
    run: MadeRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run.write(tmp_path, [0, 1])
    now = time.time() - 100
    at = {"part": 2, "part_rows": [16, 24], "part_since": now - 14, "beat": now}
    heartbeat_file(tmp_path, pid=7, age_s=100, **at)
    heartbeat_file(tmp_path, pid=8, age_s=100)
    heartbeat_file(
        tmp_path, pid=9, age_s=100, what="driver", queue=[vars(QueueState(1, "RUNNING"))]
    )
    with run.session(tmp_path).hold():
        pass
    assert [record.getMessage() for record in caplog.records] == [
        "worker on cuda:0 (pid 7 on elsewhere) was killed while it computed part 2: up to 8 rows, "
        "14 s of work, are computed again.",
        "worker on cuda:0 (pid 8 on elsewhere) was killed; rows that it had not committed are "
        "lost.",
    ]
    caplog.clear()
    with run.session(tmp_path).hold():
        pass
    assert not caplog.records


@pytest.mark.parametrize("folder", ["parts", "workers"])
def test_a_folder_that_vanishes_meanwhile_is_empty(
    run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """Those of parts and heartbeats do when a run packs its store and ends."""
    root = run.copied(tmp_path / "store")
    heartbeat_file(root)

    def after_the_end(list_folder: Any) -> Any:
        def listed(path: Any = ".") -> Any:
            if Path(path) == root / folder:
                Path(path).rename(tmp_path / "gone")
            return list_folder(path)

        return listed

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, after_the_end(getattr(os, name)))
    store_status(root)
    assert (tmp_path / "gone").exists()
