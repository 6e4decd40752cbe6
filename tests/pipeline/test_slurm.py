"""executor=slurm: tasks that take parts from the folder; lost ones are submitted again."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distributed_jobs
import pytest
from conftest import with_path
from made_store import dataset_digests, make_run, temporary_files
from object_server import num_parts, place, rows_of, worker_pids
from stub_worker import stub_spec
from tiny_model import COMMAND, MODEL, run_job
from tiny_model import SIX_PARTS as KEYS
from tiny_model import extract_six_parts as extract
from waiting import eventually, wait_until

import featx as package
from featx.base import take_cpus
from featx.config import Config
from featx.errors import ConfigError, RunError, StoreLockedError
from featx.pipeline.executors import slurm, slurm_task, worker
from featx.pipeline.executors.job_folder import (
    SPEC,
    WorkerReport,
    dump_spec,
    read_spec,
    result_path,
)
from featx.storage import AtomicFolder, open_folder
from featx.store import Heartbeat, check_store, heartbeat_name, layout
from featx.types import Part

pytestmark = pytest.mark.usefixtures("in_tmp_path", "one_thread")

TESTS = Path(__file__).resolve().parent.parent
LOCAL = {"name": "slurm", "mode": "local", "cpus": 1}
SLURM = {"name": "slurm", "cpus": 1}


class MadeSlurm:
    """Slurm without processes: a task runs in this process when squeue is asked about it.

    Attributes:
        arrays: command of each submission.
        num_tasks: number of tasks that were submitted.
        lose: number of tasks that fail before they begin.
        refusals: what sbatch prints on stderr the next times, instead of taking tasks.
        canceled: ids given to scancel.
        left_s: seconds until the time limit of the first task, or None.
        specs: what the tasks that ran have read.
        reports: of the tasks that ran.
    """

    def __init__(self) -> None:
        self.arrays: list[dict[str, str]] = []
        self.num_tasks = self.lose = 0
        self.refusals: list[str] = []
        self.canceled: list[str] = []
        self.left_s: float | None = None
        self.specs: list[worker.WorkerSpec] = []
        self.reports: list[WorkerReport] = []
        self._states: dict[str, str] = {}
        self._tasks: dict[str, list[str]] = {}

    def run(self, command: Sequence[str]) -> tuple[int, str, str]:
        answer: tuple[int, str, str] = getattr(self, f"_{command[0]}")(command[1:])
        return answer

    def _sbatch(self, words: Sequence[str]) -> tuple[int, str, str]:
        if self.refusals:
            return 1, "", self.refusals.pop(0)
        pairs = [word.removeprefix("--").partition("=") for word in words]
        array = {name: value for name, _, value in pairs}
        self.arrays.append(array)
        last = int(array["array"].partition("-")[2])
        for index in range(last + 1):
            task = f"{len(self.arrays)}_{index}"
            numbers, _, command = array["wrap"].split("; ")
            number = numbers.removeprefix("set -- ").split(" ")[index]
            self._tasks[task] = shlex.split(command.replace("$1", number).partition(" >>")[0])
            self.num_tasks += 1
        return 0, f"{len(self.arrays)}\n", ""

    def _squeue(self, words: Sequence[str]) -> tuple[int, str, str]:
        for task in self._tasks.keys() - self._states.keys():
            if self.lose:
                self.lose -= 1
                self._states[task] = "NODE_FAIL"
                continue
            folder, number, device = self._tasks[task][-6:-3]
            self.specs.append(read_spec(Path(folder)))
            left_s = None if self.reports else self.left_s
            self.reports.append(worker.run_worker(self.specs[-1], int(number), device, left_s))
            self._states[task] = "COMPLETED"
        return 0, "".join(f"{task}|{state}|None\n" for task, state in self._states.items()), ""

    def _sinfo(self, words: Sequence[str]) -> tuple[int, str, str]:
        return 0, "", ""

    def _scancel(self, words: Sequence[str]) -> tuple[int, str, str]:
        self.canceled += words
        return 0, "", ""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, fast_clock: None) -> Iterator[MadeSlurm]:
    made = MadeSlurm()
    monkeypatch.setattr(slurm, "run_command", made.run)
    yield made
    take_cpus(None)


def test_tasks_request_what_the_options_say_and_give_the_same_datasets(
    photos: Path, cluster: MadeSlurm
) -> None:
    (photos / "cat" / "broken.png").write_bytes(b"no image")
    extract(photos, out="reference", max_failures=5)
    keys = {
        "name": "slurm", "workers": 3, "cpus": 1, "time_limit_min": 30, "folder": "jobs%A",
        "sbatch": {"gres": "gpu:1", "partition": "short", "mem": "3G", "nice": 0, "qos": None,
                   "exclusive": True, "hold": False},
    }  # fmt: skip
    store = extract(photos, executor=keys, max_failures=5)
    assert store.complete
    assert dataset_digests("store") == dataset_digests("reference")
    assert [failure["key"] for failure in store.failures] == ["cat/broken.png"]
    (asked,) = cluster.arrays
    # Slurm would replace %A by the number of a job, in the name of a folder too.
    assert asked["output"] == "/dev/null"
    assert asked["wrap"].startswith("set -- 0 1 2; shift $SLURM_ARRAY_TASK_ID; exec ")
    assert re.search(r" \$1 cpu 1800 \$\(date \+%s\) >>\S+/jobs%A/\w+/\$1.log 2>&1$", asked["wrap"])
    assert asked.keys() - {"wrap", "output"} == {
        "parsable", "requeue", "job-name", "array", "ntasks", "cpus-per-task", "time",
        "mem", "partition", "gres", "export", "nice", "exclusive",
    }  # fmt: skip
    given = [asked[name] for name in ("array", "cpus-per-task", "time", "mem", "partition", "gres")]
    assert given == ["0-2", "1", "30", "3G", "short", "gpu:1"]
    assert (asked["nice"], asked["exclusive"]) == ("0", ""), "--exclusive has no value"
    assert sorted(path.name for path in Path("store").iterdir() if path.is_dir()) == [".hydra"]
    assert extract(photos, executor=keys, max_failures=5).complete
    assert len(cluster.arrays) == 1, "a finished store was submitted again"


def test_statistics_are_left_alone_while_tasks_of_a_dead_driver_live(photos: Path) -> None:
    Path("store").mkdir()
    with (
        Heartbeat(AtomicFolder(Path("store")), "task 9 on cuda", outlives_driver=True),
        pytest.raises(StoreLockedError, match=r"written by task 9 on cuda \(pid \d+ on .*job=stat"),
    ):
        distributed_jobs.run("stats", photos)


@pytest.mark.slow
def test_lost_tasks_are_submitted_again(
    photos: Path, cluster: MadeSlurm, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.lose = 1
    assert extract(photos, executor={**SLURM, "workers": 1}).complete
    assert cluster.num_tasks == 2
    assert "was lost (NODE_FAIL) before it had a part; its work is submitted again" in (
        capfd.readouterr().err
    )
    summary = json.loads(Path("store/summary.json").read_text())
    assert set(summary["seconds"]) >= {"read", "model", "pack"}
    assert [stage for stage, value in summary["seconds"].items() if value is not None] == ["pack"]
    assert summary["bytes_read"] is None


def test_tasks_that_are_lost_again_and_again_end_the_run(photos: Path, cluster: MadeSlurm) -> None:
    cluster.lose = 99
    with pytest.raises(RunError, match=r"NODE_FAIL\) before it had a part, the 3rd task that did"):
        extract(photos, executor={**SLURM, "workers": 1})
    cluster.lose = 0
    assert extract(photos).complete


def test_a_task_that_ends_after_its_run_leaves_nothing(photos: Path, cluster: MadeSlurm) -> None:
    """Slurm has lost it, another one has taken its place, and it was alive."""
    assert extract(photos, executor=SLURM).complete
    worker.run_worker(cluster.specs[0], 0, "cpu")
    assert not Path("store/jobs").exists()


def test_the_environment_decides_nothing_that_would_lose_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With SBATCH_WAIT, sbatch does not return, and its tasks are those of nobody.

    SLURM_RESTART_COUNT is that of a driver that was requeued; Slurm sets none for new tasks.
    """
    for name in ("SQUEUE_PARTITION", "SCANCEL_INTERACTIVE", "SBATCH_WAIT", "SBATCH_SIGNAL"):
        monkeypatch.setenv(name, "T")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "T")
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    code, output, _ = slurm_task.run_command(["env"])
    assert code == 0
    assert [name for name in output.splitlines() if name.endswith("=T")] == []
    assert {f"HOME={os.environ['HOME']}", "SBATCH_PARTITION=gpu"} <= {*output.splitlines()}


def test_what_slurm_refuses_is_the_users_to_mend(photos: Path, cluster: MadeSlurm) -> None:
    cluster.refusals = ["sbatch: error: Batch job submission failed: Invalid qos specification"]
    with pytest.raises(
        ConfigError, match=r"Invalid qos.* sbatch --parsable .*--array=0-1 .*--cpus-per-task=1 "
    ):
        extract(photos, executor={**SLURM, "workers": 2})
    asked = {**SLURM, "workers": 2, "sbatch": {"qos": "high", "exclusive": True}}
    cluster.refusals = ["sbatch: unrecognized option '--qos=high' Try \"sbatch --help\" for more"]
    with pytest.raises(
        ConfigError,
        match=r"the tasks: sbatch: unrecognized option '--qos=high' Try .*They were submitted by "
        r"sbatch --qos=high --exclusive .*; executor\.workers, .* `sinfo`",
    ):
        extract(photos, executor=asked)
    cluster.refusals = ["sbatch: error: Unable to contact slurm controller (connect failure)"]
    with pytest.raises(RunError, match=r"not take the tasks: sbatch: error: Unable to contact"):
        extract(photos, executor={**SLURM, "workers": 2})


@pytest.mark.parametrize(
    ("sbatch", "message"),
    [
        ({"array": "0-3"}, r"sbatch\.array cannot be given: .* executor\.workers, executor\.cpus"),
        ({"cpus": 4}, r"sbatch\.cpus cannot be given"),  # sbatch takes it for cpus-per-task
        ({"no-requeue": True}, r"sbatch\.no-requeue cannot be given"),
        ({"clusters": "other"}, r"sbatch\.clusters cannot be given"),
        ({"": "a"}, r"sbatch\. cannot be given"),
        ({"gres": ["gpu:1"]}, "expected a mapping of options of sbatch, such as {partition: gpu"),
        ({"gres": {"gpu": 1}}, "expected a mapping of options of sbatch"),
    ],
)
def test_options_of_sbatch_that_cannot_be_given(sbatch: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        slurm.SlurmOptions(sbatch=sbatch)


def test_in_mid_run_a_controller_is_waited_for(
    photos: Path,
    cluster: MadeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    cluster.lose = 1
    queue = cluster._squeue

    def asked(words: Sequence[str]) -> Any:
        if cluster.lose:
            cluster.refusals = ["sbatch: error: Socket timed out on send/recv operation"]
        return queue(words)

    monkeypatch.setattr(cluster, "_squeue", asked)
    assert extract(photos, executor={**SLURM, "workers": 1}).complete
    output = capfd.readouterr().err
    assert "answer (sbatch: error: Socket timed out on send/recv operation); 1 task is" in output


@pytest.fixture
def interrupted_task(
    photos: Path,
    cluster: MadeSlurm,
    on_begin_part: list[Callable[[Part], None]],
) -> Callable[..., list[WorkerReport]]:
    """Runs whose first task is interrupted when its third part is begun; the reports of all."""

    def do(event: Callable[[], object], left_s: float | None = None) -> list[WorkerReport]:
        def beginning(part: Part) -> None:
            if part.index == 2 and not cluster.reports:
                event()

        on_begin_part.append(beginning)
        cluster.left_s = left_s
        assert extract(photos, executor={**SLURM, "workers": 1}).complete
        return cluster.reports

    return do


@pytest.mark.parametrize(
    "signum", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT]
)
def test_a_task_that_is_told_to_end_keeps_what_is_committed_and_another_does_the_rest(
    interrupted_task: Callable[..., list[WorkerReport]],
    signum: signal.Signals,
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(signum)
    first, second = interrupted_task(lambda: os.kill(os.getpid(), signum))
    assert first.ended_by == signum.name
    assert first.activity.startswith("ready after ")
    # The batch that is being computed is the last one, and what is whole is committed.
    assert first.num_parts in (2, 3)
    assert first.num_parts + second.num_parts == 6
    assert signal.getsignal(signum) == before
    output = capfd.readouterr().err
    assert f"job 1_0 was ended by {signum.name} (ready after " in output
    assert "its work is submitted again" in output


@pytest.mark.slow
def test_a_task_ends_by_its_own_clock_before_its_time_limit(
    interrupted_task: Callable[..., list[WorkerReport]],
) -> None:
    first, second = interrupted_task(lambda: threading.Event().wait(20), left_s=15.0)
    assert first.ended_by == worker.TIME_LIMIT
    assert first.num_parts + second.num_parts == 6


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The arguments of a command `scontrol`, a line for each call by the job 12."""
    folder, arguments = tmp_path / "bin", tmp_path / "scontrol.args"
    folder.mkdir()
    (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {arguments}\n')
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    return arguments


@dataclass(frozen=True)
class SlowOutput:
    """An output that takes long to say which parts are missing."""

    def uncommitted(self, parts: Sequence[Part]) -> list[Part]:
        threading.Event().wait(20)
        return list(parts)


def test_the_time_limit_of_a_task_begins_with_its_script(tmp_path: Path, scontrol: Path) -> None:
    """A sixth of it is left for the end; what Python took to start is gone."""
    task: Any = SlowOutput()
    spec = replace(stub_spec(tmp_path, [Part(0, 0, 4)], Config(), task), folder=tmp_path / "jobs")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / SPEC).write_bytes(dump_spec(spec))
    began = time.monotonic()
    slurm_task.main(str(tmp_path / "jobs"), "3", "cuda", "12", str(time.time() - 9.5))
    assert 0.3 < time.monotonic() - began < 2.4, "2 s before its limit, which is in 2.5 s"
    report = WorkerReport.read(result_path(spec, 3))
    assert report is not None
    assert report.ended_by == worker.TIME_LIMIT
    assert scontrol.read_text() == "requeue 12\n", "nobody else submits it again"


@pytest.mark.parametrize(("num_parts", "expected"), [(0, 3), (1, 9)])
def test_a_task_without_a_driver_is_queued_again_while_it_commits(
    tmp_path: Path,
    scontrol: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_parts: int,
    expected: int,
) -> None:
    spec = replace(stub_spec(tmp_path, [], Config(), SlowOutput()), folder=tmp_path)  # type: ignore[arg-type]
    (tmp_path / SPEC).write_bytes(dump_spec(spec))
    report = WorkerReport(num_parts=num_parts, ended_by=worker.TIME_LIMIT)
    monkeypatch.setattr(slurm_task, "run_worker", lambda *given: report)
    for count in range(9):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(count))
        slurm_task.main(str(tmp_path), "3", "cpu", "60", "0")
    assert scontrol.read_text() == "requeue 12\n" * expected


def test_whether_the_driver_lives_is_read_from_its_heartbeat(tmp_path: Path) -> None:
    spec: Any = SimpleNamespace(root=tmp_path, driver=heartbeat_name(os.getpid()))
    assert not slurm_task.is_driver_alive(spec)
    with Heartbeat(AtomicFolder(tmp_path), "driver"):
        assert slurm_task.is_driver_alive(spec)
    assert not slurm_task.is_driver_alive(spec)


@pytest.mark.parametrize("is_remote", [False, True])
def test_nobody_else_writes_while_tasks_of_a_dead_driver_live(bucket: str, is_remote: bool) -> None:
    run, root = make_run(), place(f"s3://{bucket}/run") if is_remote else Path("store").absolute()
    run.write(root, [0])
    message = r"written by task 9 on cuda \(pid \d+ on .*continues without its driver.*job=stat"
    with (
        Heartbeat(open_folder(root), "task 9 on cuda", outlives_driver=True),
        pytest.raises(StoreLockedError, match=message),
        run.session(root).hold(),
    ):
        pass
    run.write(root, [1])


@pytest.mark.slow
def test_tasks_commit_into_a_bucket(
    photos: Path, bucket: str, cluster: MadeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    (photos / "cat" / "broken.png").write_bytes(b"no image")
    near = extract(photos, out="reference", max_failures=5)
    out = f"s3://{bucket}/run"
    keys = {**SLURM, "workers": 2, "folder": "shared/jobs"}
    far = extract(photos, out=out, executor=keys, max_failures=5)
    assert rows_of(far) == rows_of(near)
    assert far.failures == near.failures
    assert check_store(place(out)).complete
    assert not list(Path("shared").rglob("*.json")), "what tasks reported is of no more use"
    assert extract(photos, out=out, executor=keys, max_failures=5).complete
    assert len(cluster.arrays) == 1, "a finished store was submitted again"


def test_the_folder_of_tasks_has_to_be_one(photos: Path, cluster: MadeSlurm) -> None:
    Path("file").touch()
    with pytest.raises(ConfigError, match=r"executor.folder=file/jobs: Not a directory.*all mach"):
        extract(photos, executor={**SLURM, "folder": "file/jobs"})
    assert extract(photos, executor={**SLURM, "folder": "jobs"}).complete
    assert list(Path("jobs").iterdir()) == []


def test_only_what_a_killed_driver_has_left_is_deleted_of_a_folder_jobs(photos: Path) -> None:
    left, mine = Path("store/jobs/0123abcd/claims"), Path("store/jobs/mine")
    for keys in ({}, {"layers": ["pool"]}, {"overwrite": True}):
        left.mkdir(parents=True)
        mine.mkdir()
        assert extract(photos, **keys).complete
        assert list(Path("store/jobs").iterdir()) == [mine]
        mine.rmdir()
    left.mkdir(parents=True)
    assert run_job("stats", **KEYS, data=str(photos)) == 0
    assert not Path("store/jobs").exists()


def test_without_slurm_that_is_said_before_the_run(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"not answer \(sinfo: No such file.*executor.mode=local"):
        extract(photos, executor="slurm")
    assert not Path("store").exists()


# With processes of this machine


def command(*more: str) -> list[str]:
    local = ("executor=slurm", "executor.mode=local", "executor.workers=2", "executor.cpus=1")
    data = ("data=folder", "data.root=photos", "+model.args.pause_s=0.5")
    return [sys.executable, "-m", "featx", *COMMAND, *data, *local, *more]


@pytest.mark.slow
@pytest.mark.parametrize("signum", [None, signal.SIGTERM, signal.SIGINT])
def test_preempted_or_stopped_the_datasets_are_the_same(
    photos: Path, signum: signal.Signals | None
) -> None:
    extract(photos, out="reference", model={**MODEL, "args": {"pause_s": 0.5}})
    environment = {**with_path(TESTS), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command(), env=environment) as process:
        wait_until(lambda: list(Path("store/parts").glob("part-*.h5")), process)
        if signum == signal.SIGTERM:  # as Slurm tells a task that it is preempted
            os.kill(wait_until(lambda: worker_pids("store", "task"), process)[0], signum)
        elif signum is not None:
            process.send_signal(signum)
        code = process.wait(300)
    if signum == signal.SIGINT:
        assert code == 130
        eventually(lambda: not worker_pids("store", "task"), 60)
        code = subprocess.run(command(), env=environment, timeout=300, check=False).returncode
    assert code == 0
    assert dataset_digests("store") == dataset_digests("reference")
    assert temporary_files(Path("store")) == []


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["task", "driver"])
def test_killed_in_a_bucket_nothing_is_lost(
    photos: Path, bucket: str, tmp_path: Path, victim: str
) -> None:
    near = extract(photos, out="reference", model={**MODEL, "args": {"pause_s": 0.5}})
    out = f"s3://{bucket}/run"
    cache = str(tmp_path / "cache")
    environment = {**with_path(TESTS), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": cache}
    more = ("executor.folder=jobs", f"out={out}")
    with subprocess.Popen(command(*more), env=environment) as process:
        wait_until(lambda: num_parts(out), process)
        task = wait_until(lambda: worker_pids(out, "task"), process)[0]
        os.kill(task if victim == "task" else process.pid, signal.SIGKILL)
        code = process.wait(300)
    assert code == (0 if victim == "task" else -signal.SIGKILL)
    deadline = time.monotonic() + 300
    while code:
        assert time.monotonic() < deadline
        again = subprocess.run(
            command(*more), env=environment, stderr=subprocess.PIPE, text=True, check=False
        )
        code = again.returncode
        if code:  # its tasks are at it still
            assert code == 2, again.stderr
            assert "continues without its driver" in again.stderr
            time.sleep(0.5)
    assert rows_of(package.open(out)) == rows_of(near)
    assert check_store(place(out)).complete
    assert not (place(out) / layout.DAMAGED).exists()
    assert not list((place(out) / layout.WORKERS).glob("*"))
    assert len(list(Path("jobs").iterdir())) == (victim == "driver"), "logs of the killed one stay"
