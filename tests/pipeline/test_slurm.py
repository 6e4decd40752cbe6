"""executor=slurm: tasks over neighbouring parts; lost ones are submitted again."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distributed_jobs
import pytest
from conftest import with_path
from made_store import dataset_digests, make_run, temporary_files
from object_server import num_parts, place, rows_of
from tiny_model import COMMAND, MODEL, extract

import featx as package
from featx.base import take_cpus
from featx.config import from_keywords, from_omegaconf
from featx.errors import ConfigError, MissingExtraError, RunError, StoreLockedError
from featx.pipeline.executors import slurm, slurm_array, slurm_task
from featx.pipeline.executors.worker_spec import PickledWorkerSpec
from featx.pipeline.executors.worker_stats import WorkerStats
from featx.pipeline.feature_sink import StorePartTask
from featx.storage import AtomicFolder
from featx.storage.s3_folder import S3Folder
from featx.store import Heartbeat, check_store, heartbeat_name, layout, read_heartbeats
from featx.types import Part

pytestmark = pytest.mark.usefixtures("in_tmp_path", "one_thread", "packing_in_process")

TESTS = Path(__file__).resolve().parent.parent
LOCAL = {"name": "slurm", "mode": "local", "cpus": 1}


def digests(root: str | Path) -> dict[str, str]:
    return dataset_digests(Path(root) / "features.h5")


class FailedJobError(RuntimeError):
    """submitit's, by its name: the task raised."""


class Job:
    """A task that is done, or lost, when it is looked at."""

    def __init__(self, number: int, task: bytes, lost: bool) -> None:
        self.job_id = f"7_{number}"
        self.canceled = False
        self._task, self._lost = task, lost
        self._result: Any = None

    def done(self) -> bool:
        if self._result is None and not self._lost:
            try:
                self._result = pickle.loads(self._task)()
            except RunError as error:
                self._result = FailedJobError(f"Traceback ...\nfeatx.errors.RunError: {error}\n")
        return True

    def result(self) -> Any:
        if self._lost:
            raise RuntimeError("Job 7 has not produced any output (state: NODE_FAIL)")
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def cancel(self, check: bool) -> None:
        self.canceled = True


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """submitit without processes: `tasks` notes what was submitted, `lose` the next so many.

    `refusals` are what sbatch prints on stderr the next times, instead of taking a task.
    """
    made = SimpleNamespace(tasks=[], asked={}, lose=0, refusals=[])

    class Executor:
        folder = "jobs"

        def update_parameters(self, **asked: Any) -> None:
            made.asked |= asked

        @contextlib.contextmanager
        def batch(self) -> Iterator[None]:
            yield

        def submit(self, task: Any) -> Job:
            if made.refusals:
                raise FailedJobError(made.refusals.pop(0))
            lost = len(made.tasks) < made.lose
            made.tasks.append(task)
            return Job(len(made.tasks), pickle.dumps(task), lost)

    utils = SimpleNamespace(FailedJobError=FailedJobError)
    module = SimpleNamespace(
        AutoExecutor=lambda folder, cluster, **more: Executor(),
        core=SimpleNamespace(utils=utils),
        helpers=SimpleNamespace(DelayedSubmission=lambda task: task),
    )
    monkeypatch.setattr(slurm_array, "submitit_module", lambda: module)
    monkeypatch.setattr(slurm, "submitit_module", lambda: module)
    monkeypatch.setattr(slurm_task, "submitit_module", lambda: module)
    monkeypatch.setattr(slurm_array, "POLL_S", 0.01)
    yield made
    take_cpus(None)


def test_tasks_get_neighbouring_parts_and_give_the_same_datasets(
    photos: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str | None] = []
    (photos / "cat" / "broken.png").write_bytes(b"no image")
    extract(photos, out="reference", max_failures=5)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/srun")
    monkeypatch.setattr(slurm, "check_partition", checked.append)
    monkeypatch.setattr(slurm_array, "SlurmQueue", lambda report: None)  # its jobs know themselves
    keys = {
        "name": "slurm", "workers": 3, "cpus": 1, "gres": "gpu:1", "partition": "short",
        "memory_gib": 3.0, "time_limit_min": 30,
    }  # fmt: skip
    store = extract(photos, executor=keys, max_failures=5)
    assert store.complete
    assert digests("store") == digests("reference")
    assert [failure["key"] for failure in store.failures] == ["cat/broken.png"]
    assert [[part.index for part in task._parts] for task in cluster.tasks] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    assert cluster.asked == {
        "timeout_min": 30, "cpus_per_task": 1, "name": "featx", "slurm_signal_delay_s": 90,
        "mem_gb": 3.0, "slurm_partition": "short", "slurm_gres": "gpu:1",
        "slurm_additional_parameters": {"requeue": True},
    }  # fmt: skip
    assert set(checked) == {"short"}
    assert sorted(path.name for path in Path("store").iterdir() if path.is_dir()) == [".hydra"]
    assert extract(photos, executor=keys, max_failures=5).complete
    assert len(cluster.tasks) == 3, "a finished store was submitted again"


@pytest.mark.parametrize("job", distributed_jobs.JOBS)
@pytest.mark.slow
def test_other_jobs_give_the_same_as_one_process(photos: Path, cluster: Any, job: str) -> None:
    (photos / "cat" / "000.png").write_bytes(b"no image")
    distributed_jobs.run(job, photos, "reference", max_failures=5)
    cluster.lose = 1
    keys = {"executor": {**LOCAL, "workers": 2}, "max_failures": 5}
    assert distributed_jobs.run(job, photos, **keys) == 0
    assert len(cluster.tasks) == 4
    assert distributed_jobs.made(job) == distributed_jobs.made(job, "reference")
    assert distributed_jobs.run(job, photos, **keys) == 0
    assert len(cluster.tasks) == 4, "what was whole was submitted again"


def test_statistics_are_left_alone_while_tasks_of_a_dead_driver_live(photos: Path) -> None:
    Path("store").mkdir()
    with (
        Heartbeat(AtomicFolder(Path("store")), "task 9 on cuda", outlives_driver=True),
        pytest.raises(StoreLockedError, match=r"written by task 9 on cuda \(pid \d+ on .*job=stat"),
    ):
        distributed_jobs.run("stats", photos)
    distributed_jobs.run("stats", photos)


def test_the_parts_of_lost_tasks_are_submitted_again(
    photos: Path, cluster: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.lose = 2
    assert extract(photos, executor={**LOCAL, "workers": 2}).complete
    assert [len(task._parts) for task in cluster.tasks] == [3, 3, 1, 2, 1, 2]
    assert "was lost (Job 7 has not produced any output" in capfd.readouterr().err


def test_tasks_that_are_lost_again_and_again_end_the_run(photos: Path, cluster: Any) -> None:
    cluster.lose = 99
    with pytest.raises(
        RunError, match=r"NODE_FAIL.*2 tasks before it .*started with part 0 \(rows 0 to 3\)"
    ):
        extract(photos, executor={**LOCAL, "workers": 1})
    cluster.lose = 0
    assert extract(photos).complete


def test_an_exception_in_a_task_ends_the_run_and_is_reported(
    photos: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = slurm_task.PartWorker.take

    def raising(self: Any, part: Part, batch: Any, computed: Any) -> Any:
        if part.index == 4:
            self.part = part
            raise ValueError("a bug in the model")
        return take(self, part, batch, computed)

    monkeypatch.setattr(slurm_task.PartWorker, "take", raising)
    with pytest.raises(RunError) as failed:
        extract(photos, executor={**LOCAL, "workers": 2})
    assert str(failed.value).startswith("job 7_2: task ")
    assert "on cpu, part 4 (rows 16 to 19): ValueError: a bug in the model" in str(failed.value)
    monkeypatch.setattr(slurm_task.PartWorker, "take", take)
    assert extract(photos, executor={**LOCAL, "workers": 2}).complete


def test_a_task_that_is_queued_again_does_what_is_missing() -> None:
    part_task = StorePartTask("float16", {}, frozenset(), b"")
    spec: Any = SimpleNamespace(root=Path.cwd(), part_task=part_task)
    task = slurm_task.Task(PickledWorkerSpec(spec), "cpu", [Part(0, 0, 4)])
    Path("parts").mkdir()
    Path("parts/part-000000.h5").touch()
    assert pickle.loads(pickle.dumps(task))() == slurm_task.TaskResult([], WorkerStats())


def test_what_slurm_refuses_is_the_users_to_mend(photos: Path, cluster: Any) -> None:
    cluster.refusals = ["sbatch: error: Batch job submission failed: Invalid qos specification"]
    with pytest.raises(ConfigError, match=r"take the tasks: Batch job.* Invalid qos"):
        extract(photos, executor={**LOCAL, "workers": 2})
    cluster.refusals = ["sbatch: error: Unable to contact slurm controller (connect failure)"]
    with pytest.raises(RunError, match=r"controller of Slurm does not answer \(Unable to contact"):
        extract(photos, executor={**LOCAL, "workers": 2})


def test_in_mid_run_a_controller_is_waited_for(
    photos: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slurm_array, "SUBMIT_AGAIN_S", 0.05)
    cluster.lose = 1
    submit = slurm_array.JobArray._submit

    def refused(self: Any, is_first: bool = False) -> None:
        if not is_first and not cluster.refusals and len(cluster.tasks) == 2:
            cluster.refusals = ["sbatch: error: Socket timed out on send/recv operation"]
            cluster.tasks.append(None)
        submit(self, is_first)

    monkeypatch.setattr(slurm_array.JobArray, "_submit", refused)
    assert extract(photos, executor={**LOCAL, "workers": 2}).complete
    output = capfd.readouterr().err
    assert "does not answer (Socket timed out on send/recv operation); 3 parts are" in output


@pytest.fixture
def running_task(
    photos: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., slurm_task.TaskResult]:
    """A task of all parts, run in this process; `event` happens when its third part is begun."""

    def run(event: Callable[[], None], limit_s: float | None = None) -> slurm_task.TaskResult:
        cluster.lose = 99
        with pytest.raises(RunError, match="NODE_FAIL"):
            extract(photos, executor={**LOCAL, "workers": 1})
        task = pickle.loads(pickle.dumps(cluster.tasks[0]))
        task._limit_s = limit_s
        take = slurm_task.PartWorker.take

        def taking(self: Any, part: Part, batch: Any, computed: Any) -> Any:
            if part.index == 2:
                event()
            return take(self, part, batch, computed)

        monkeypatch.setattr(slurm_task.PartWorker, "take", taking)
        result: slurm_task.TaskResult = task()
        return result

    return run


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR2])
def test_a_task_that_is_told_to_end_returns_what_is_committed(
    running_task: Callable[..., slurm_task.TaskResult],
    monkeypatch: pytest.MonkeyPatch,
    signum: signal.Signals,
) -> None:
    monkeypatch.setattr(slurm_task, "is_driver_alive", lambda spec: True)
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR2)]
    result = running_task(lambda: os.kill(os.getpid(), signum))
    assert result.ended_by == signum.name
    assert result.activity.startswith("ready after ")
    # The batch that is being computed is the last one, and what is whole is committed.
    assert [each.part.index for each in result.results] in ([0, 1], [0, 1, 2])
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR2)] == before


@pytest.mark.slow
def test_a_task_ends_by_its_own_clock_before_its_time_limit(
    running_task: Callable[..., slurm_task.TaskResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_task, "is_driver_alive", lambda spec: True)
    monkeypatch.setattr(slurm_task, "seconds_left", lambda limit_s: limit_s)
    result = running_task(lambda: time.sleep(4), limit_s=3.0)
    assert result.ended_by == slurm_task.TIME_LIMIT
    assert len(result.results) < 6


def test_without_a_driver_an_announcement_is_left_to_submitit(
    running_task: Callable[..., slurm_task.TaskResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_task, "is_driver_alive", lambda spec: False)
    output: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda signum, frame: output.append(signum))
    try:
        result = running_task(lambda: os.kill(os.getpid(), signal.SIGUSR2))
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert output == [signal.SIGUSR2]
    assert result.ended_by is None
    assert len(result.results) == 6


def test_what_is_left_by_a_task_that_was_told_to_end_is_submitted_again(
    photos: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    call = slurm_task.Task.__call__

    def stopped(self: Any) -> slurm_task.TaskResult:
        self._parts, output = self._parts[:1], len(self._parts) > 1
        result = call(self)
        by = slurm_task.TIME_LIMIT if output else None
        return slurm_task.TaskResult(result.results, result.worker_stats, by, "ready after 1 s")

    monkeypatch.setattr(slurm_task.Task, "__call__", stopped)
    assert extract(photos, executor={**LOCAL, "workers": 1}).complete
    assert [len(task._parts) for task in cluster.tasks] == [6, 5, 4, 3, 2, 1]
    output = capfd.readouterr().err
    assert "job 7_1 reached its time limit (ready after 1 s); its 5 missing parts are" in output
    assert "its missing part is submitted again" in output
    summary = json.loads(Path("store/summary.json").read_text())
    assert set(summary["seconds"]) >= {"read", "model", "pack"}
    assert [stage for stage, value in summary["seconds"].items() if value is not None] == ["pack"]
    assert summary["bytes_read"] is None


def test_whether_the_driver_lives_is_read_from_its_heartbeat(tmp_path: Path) -> None:
    spec: Any = SimpleNamespace(root=tmp_path, driver=heartbeat_name(os.getpid()))
    assert not slurm_task.is_driver_alive(spec)
    with Heartbeat(AtomicFolder(tmp_path), "driver"):
        assert slurm_task.is_driver_alive(spec)
    assert not slurm_task.is_driver_alive(spec)


def test_a_task_that_never_commits_is_not_queued_again_for_ever(cluster: Any) -> None:
    part_task = StorePartTask("float16", {}, frozenset(), b"")
    spec: Any = SimpleNamespace(root=Path.cwd(), part_task=part_task)
    task = slurm_task.Task(PickledWorkerSpec(spec), "cpu", [Part(0, 0, 4)])
    assert task.checkpoint() is task
    assert pickle.loads(pickle.dumps(task)).checkpoint() is not None
    task.checkpoint()
    with pytest.raises(RunError, match=r"3 times before it could commit a part of part 0"):
        task.checkpoint()


def test_neighbours_stay_together_whatever_the_numbers() -> None:
    parts = [Part(index, index, index + 1) for index in range(10)]
    for count in (1, 3, 10, 99):
        chunks = list(slurm_array._chunks(parts, count))
        assert [part for chunk in chunks for part in chunk] == parts
        assert len(chunks) == min(count, 10)
        assert max(map(len, chunks)) - min(map(len, chunks)) <= 1


def test_nobody_else_writes_while_tasks_of_a_dead_driver_live(tmp_path: Path) -> None:
    run = make_run()
    run.write(tmp_path / "store", [0])
    with (
        Heartbeat(AtomicFolder(tmp_path / "store"), "task 9 on cuda", outlives_driver=True),
        pytest.raises(StoreLockedError, match=r"written by task 9 on cuda \(pid \d+ on .*job=stat"),
        run.session(tmp_path / "store").hold(),
    ):
        pass
    run.write(tmp_path / "store", [1])


@pytest.mark.slow
def test_tasks_commit_into_a_bucket(
    photos: Path, bucket: str, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    (photos / "cat" / "broken.png").write_bytes(b"no image")
    near = extract(photos, out="reference", max_failures=5)
    cluster.lose = 1
    out = f"s3://{bucket}/run"
    keys = {**LOCAL, "workers": 2, "folder": "shared/jobs"}
    far = extract(photos, out=out, executor=keys, max_failures=5)
    assert rows_of(far) == rows_of(near)
    assert far.failures == near.failures
    assert check_store(place(out)).complete
    assert len(cluster.tasks) == 4
    assert list(Path("shared/jobs").iterdir()) == [], "what tasks were output is of no more use"
    assert extract(photos, out=out, executor=keys, max_failures=5).complete
    assert len(cluster.tasks) == 4, "a finished store was submitted again"


def test_in_a_bucket_nobody_else_writes_while_tasks_of_a_dead_driver_live(bucket: str) -> None:
    run, root = make_run(), place(f"s3://{bucket}/run")
    run.write(root, [0])
    with (
        Heartbeat(S3Folder(root), "task 9 on cuda", outlives_driver=True),
        pytest.raises(StoreLockedError, match=r"by task 9 on cuda .*continues without its driver"),
        run.session(root).hold(),
    ):
        pass
    run.write(root, [1])


def test_the_folder_of_tasks_has_to_be_one(photos: Path, cluster: Any) -> None:
    Path("file").touch()
    with pytest.raises(ConfigError, match=r"executor.folder=file/jobs: Not a directory.*all mach"):
        extract(photos, executor={**LOCAL, "folder": "file/jobs"})
    assert extract(photos, executor={**LOCAL, "folder": "jobs"}).complete
    assert list(Path("jobs").iterdir()) == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"name": "slurm", "devices": [0, 1]},
            r"executor.devices has an effect with executor=local only \(now executor=slurm\)",
        ),
        ({"name": "slurm", "cpus": 0}, r"executor.cpus=0: expected a whole number of at least 1"),
        ({"name": "slurm", "mode": "cloud"}, "executor.mode=cloud: expected one of slurm, local"),
    ],
)
def test_wrong_keys_are_reported(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_omegaconf(from_keywords({"executor": keys}))


def test_without_submitit_the_extra_is_named(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(MissingExtraError, match=r'pip install "featx\[slurm\]"') as missing:
        extract(photos, executor=LOCAL)
    assert missing.value.exit_code == 2
    assert not Path("store").exists()


def test_without_slurm_that_is_said_before_the_run(
    photos: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match=r"srun is not found.*executor.mode=local"):
        extract(photos, executor="slurm")
    assert not Path("store").exists()


# With submitit's own processes


def command(*more: str) -> list[str]:
    local = ("executor=slurm", "executor.mode=local", "executor.workers=2", "executor.cpus=1")
    data = ("data=folder", "data.root=photos", "+model.args.pause_s=0.5")
    return [sys.executable, "-m", "featx", *COMMAND, *data, *local, *more]


def wait_for(found: Callable[[], Any], process: subprocess.Popen[bytes]) -> Any:
    deadline = time.monotonic() + 200
    while not (value := found()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def tasks_alive() -> list[int]:
    found = []
    for path in Path("store/workers").glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            values = json.loads(path.read_text())
            found += [values["pid"]] if values["outlives"] else []
    return found


@pytest.mark.slow
@pytest.mark.parametrize("signum", [None, signal.SIGUSR2, signal.SIGINT])
def test_preempted_or_stopped_the_datasets_are_the_same(
    photos: Path, signum: signal.Signals | None
) -> None:
    extract(photos, out="reference", model={**MODEL, "args": {"pause_s": 0.5}})
    environment = {**with_path(TESTS), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command(), env=environment)
    wait_for(lambda: list(Path("store/parts").glob("part-*.h5")), process)
    if signum == signal.SIGUSR2:  # as Slurm tells a task that it is preempted
        victim = wait_for(tasks_alive, process)[0]
        os.kill(victim, signum)
    elif signum is not None:
        process.send_signal(signum)
    code = process.wait(300)
    if signum == signal.SIGINT:
        assert code == 130
        deadline = time.monotonic() + 60
        while tasks_alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        code = subprocess.run(command(), env=environment, timeout=300, check=False).returncode
    assert code == 0
    assert digests("store") == digests("reference")
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

    def tasks() -> list[int]:
        return [s.values["pid"] for s in read_heartbeats(place(out)) if s.values.get("outlives")]

    with subprocess.Popen(command(*more), env=environment) as process:
        wait_for(lambda: num_parts(out), process)
        os.kill(wait_for(tasks, process)[0] if victim == "task" else process.pid, signal.SIGKILL)
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
    assert not list((place(out) / layout.QUARANTINE).glob("*"))
    assert not list((place(out) / layout.WORKERS).glob("*"))
    assert len(list(Path("jobs").iterdir())) == (victim == "driver"), "logs of the killed one stay"
