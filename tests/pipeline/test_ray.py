"""executor=ray: actors that do parts, replaced when they die; Ray is real or made."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from made_store import dataset_digests, temporary_files
from object_server import num_parts, place, rows_of, worker_pids
from processes import ended, running
from tiny_model import COMMAND, MODEL
from tiny_model import extract_six_parts as extract
from waiting import wait_until

import featx as package
from featx.base import take_cpus
from featx.errors import ConfigError, MissingExtraError, RunError, StoreMismatchError
from featx.pipeline.executors import ray as ray_executor
from featx.storage.s3_folder import S3Folder
from featx.store import check_store, clear_heartbeats, layout, read_heartbeats
from featx.store.heartbeat import pid_namespace
from featx.types import Part

pytestmark = pytest.mark.usefixtures("in_tmp_path", "one_thread")

TESTS = Path(__file__).resolve().parent.parent


class RayError(Exception):
    """Ray's: the actor or its node is gone."""


class RayTaskError(RayError):
    """Ray's: the actor raised `cause`."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"ray::Actor.compute()\n{cause}")
        self.cause = cause


class MadeRay:
    """Ray without processes: a call is done when its result is asked for, one at each look.

    Attributes:
        actors: numbers of those that were started.
        die_at: part -> how many actors die at it.
        start_s: how long it takes to start an actor.
        before_run: called in an actor that has been started.
        is_connected: whether the caller has connected.
    """

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self) -> None:
        self.actors: list[int] = []
        self.killed: list[Any] = []
        self.asked: dict[str, Any] = {}
        self.die_at: dict[int, int] = {}
        self.start_s = 0.0
        self.before_run: Callable[[], None] = lambda: None
        self.is_connected = True

    def is_initialized(self) -> bool:
        return self.is_connected

    def nodes(self) -> list[dict[str, Any]]:
        """Room for three actors of one CPU."""
        sizes = {"CPU": 2.0}, {"CPU": 1.0}, {"memory": 1e9}
        lost = {"NodeID": "lost", "Alive": False, "Resources": {"CPU": 64.0}}
        return [*({"Alive": True, "Resources": size} for size in sizes), lost]

    def remote(self, **asked: Any) -> Any:
        self.asked = asked

        def started() -> Any:
            time.sleep(self.start_s)
            real = ray_executor.Actor()
            return SimpleNamespace(run=SimpleNamespace(remote=lambda *given: Call(real.run, given)))

        return lambda kind: SimpleNamespace(remote=started)

    def wait(self, calls: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], Any]:
        return calls[:1], calls[1:]

    def get(self, call: Call) -> Any:
        self.actors.append(call.arguments[1])
        try:
            self.before_run()
            return call.function(*pickle.loads(pickle.dumps(call.arguments)))
        except DeathError:
            raise RayError(
                "The actor died unexpectedly before finishing this task.\nmore"
            ) from None
        except Exception as error:  # noqa: BLE001 - as Ray does
            raise RayTaskError(error) from None

    def kill(self, handle: Any) -> None:
        self.killed.append(handle)


class DeathError(BaseException):
    """An actor dies: no code of featx handles it."""


class Call:
    """A reference to what is not computed yet."""

    def __init__(self, function: Any, arguments: Any) -> None:
        self.function, self.arguments = function, arguments


@pytest.fixture
def ray(
    monkeypatch: pytest.MonkeyPatch,
    fast_clock: None,
    on_begin_part: list[Callable[[Part], None]],
) -> Iterator[MadeRay]:
    made = MadeRay()
    monkeypatch.setitem(sys.modules, "ray", made)

    def die(part: Part) -> None:
        if made.die_at.get(part.index, 0):
            made.die_at[part.index] -= 1
            raise DeathError

    on_begin_part.append(die)
    yield made
    take_cpus(None)


def test_actors_give_the_same_datasets_and_load_the_backbone_once(
    photos: Path, ray: MadeRay
) -> None:
    (photos / "cat" / "broken.png").write_bytes(b"no image")
    extract(photos, out="reference", max_failures=5)
    store = extract(photos, executor="ray", max_failures=5)
    assert store.complete
    assert dataset_digests("store") == dataset_digests("reference")
    assert [failure["key"] for failure in store.failures] == ["cat/broken.png"]
    assert ray.actors[0] == 0
    assert ray.asked == {"num_cpus": 1, "num_gpus": 0.0}


def test_actors_for_which_no_machine_is_large_enough_are_reported(
    photos: Path, ray: MadeRay, capfd: pytest.CaptureFixture[str]
) -> None:
    assert extract(photos, executor={"name": "ray", "cpus": 3}).complete
    assert set(ray.actors) == {0}
    output = " ".join(capfd.readouterr().err.split())
    assert "no machine of the Ray cluster has the 3 CPUs and 0 GPUs of an actor (exec" in output
    assert "Actors wait until one joins the cluster" in output


@pytest.mark.slow
def test_the_part_of_an_actor_that_dies_is_done_by_another(
    photos: Path, ray: MadeRay, capfd: pytest.CaptureFixture[str]
) -> None:
    ray.die_at = {3: 2}
    assert extract(photos, executor={"name": "ray", "workers": 2}).complete
    assert len(set(ray.actors)) == 4
    output = capfd.readouterr().err
    assert (
        "actor 0 died (The actor died unexpectedly before finishing this task.) in part" in output
    )


def test_actors_that_cannot_begin_end_the_run_with_the_reason(photos: Path, ray: MadeRay) -> None:
    """As on a node without featx."""

    def fail() -> None:
        raise ModuleNotFoundError("No module named 'featx'")

    ray.before_run = fail
    with pytest.raises(RunError, match=r"No module named 'featx'\W+ before it had a part, the 3rd"):
        extract(photos, executor={"name": "ray", "workers": 1})


@pytest.mark.slow
def test_the_loss_of_the_head_ends_the_run_which_resumes_later(
    photos: Path, ray: MadeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract(photos, out="reference")
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
    context = SimpleNamespace(gcs_address=address)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context, raising=False)
    ray.start_s = ray_executor.HEAD_LOST_S
    with pytest.raises(RunError, match=r"the head of the Ray cluster at .* start the cluster"):
        extract(photos, executor="ray")
    context.gcs_address = ""
    assert extract(photos, executor="ray").complete
    assert dataset_digests("store") == dataset_digests("reference")


@pytest.mark.usefixtures("ray")
def test_an_exception_in_an_actor_names_its_part(
    photos: Path, on_batch: list[Callable[[Any], None]]
) -> None:
    def fail(batch: Any) -> None:
        if batch.start >= 8:
            raise ValueError("a bug in the model")

    on_batch.append(fail)
    with pytest.raises(RunError) as failed:
        extract(photos, executor={"name": "ray", "workers": 1})
    assert "actor 0, part 2 (rows 8 to 11): ValueError: a bug in the model" in str(failed.value)


def test_an_actor_refuses_a_data_set_that_has_changed_since_it_was_listed(
    photos: Path, ray: MadeRay
) -> None:
    """It opens the table by itself, as that cannot be pickled."""
    lines = [f"{path},{path.parent.name}\n" for path in sorted(photos.rglob("*.png"))]
    Path("t.csv").write_text("".join(["path,label\n", *lines]))

    def change() -> None:
        Path("t.csv").write_text("".join(["path,label\n", *lines]).replace(",cat", ",dog", 1))

    ray.before_run = change
    with pytest.raises(StoreMismatchError, match=r"actor 0.*other labels: .* was cat and is dog"):
        extract("t.csv", executor={"name": "ray", "workers": 1})


def test_an_actor_refuses_other_images_under_the_same_keys_and_labels(
    photos: Path, ray: MadeRay
) -> None:
    def write(value: int) -> None:
        with h5py.File("new.h5", "w") as file:
            file["images"] = np.full((8, 32, 32, 3), value, np.uint8)
        Path("new.h5").replace("images.h5")  # readers of the old file keep it

    write(1)
    data = {"name": "hdf5", "root": "images.h5", "dataset": "/images"}
    assert extract(data, executor={"name": "ray", "workers": 1}, out="unchanged").complete
    ray.before_run = lambda: write(2)
    with pytest.raises(RunError, match=r"actor 0.*images of images.h5 have changed since the run"):
        extract(data, executor={"name": "ray", "workers": 1})


def test_without_ray_the_extra_is_named_and_nothing_is_started(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r'pip install "featx\[ray\]"') as missing:
        extract(photos, executor="ray")
    assert missing.value.exit_code == 2
    assert not Path("store").exists()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_cluster_that_does_not_answer_is_reported_before_the_run(
    photos: Path, ray: MadeRay, address: str
) -> None:
    ray.is_connected = False
    output = rf"executor.address={address}: no Ray cluster answers there, or .* \(.*refused"
    with pytest.raises(ConfigError, match=output):
        extract(photos, executor={"name": "ray", "address": address})
    assert not Path("store").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": "auto"}, r"executor.address=auto has no effect: .* connected to a Ray"),
        ({"gpus": 0.5}, "executor.gpus=0.5 has no effect with device=cpu"),
    ],
)
@pytest.mark.usefixtures("ray")
def test_options_without_effect_are_refused(
    photos: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        extract(photos, device="cpu", executor={"name": "ray", **options})
    assert not Path("store").exists()


@pytest.mark.slow
def test_actors_commit_into_a_bucket(
    photos: Path, bucket: str, ray: MadeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    (photos / "cat" / "broken.png").write_bytes(b"no image")
    near = extract(photos, out="reference", max_failures=5)
    ray.die_at = {1: 1}
    out = f"s3://{bucket}/run"
    far = extract(photos, out=out, executor="ray", max_failures=5)
    assert rows_of(far) == rows_of(near)
    assert far.failures == near.failures
    assert len(set(ray.actors)) == 4
    assert check_store(place(out)).complete
    assert not Path("store").exists()


def test_the_heartbeats_of_its_own_actors_are_removed_and_no_others(bucket: str) -> None:
    disk = S3Folder(place(f"s3://{bucket}/run"))
    for pid, driver in ((os.getppid(), "mine"), (1, "theirs")):
        values = {"host": socket.gethostname(), "pid": pid, "pids": pid_namespace()}
        path = disk.root / layout.WORKERS / f"{pid}.json"
        disk.write_best_effort(path, json.dumps({**values, "what": "actor", "driver": driver}))
    clear_heartbeats(disk, "mine")
    assert [record.values["driver"] for record in read_heartbeats(disk.root)] == ["theirs"]


# With Ray's own processes


def command(*more: str) -> list[str]:
    data = ("data=folder", "data.root=photos", "executor=ray")
    return [sys.executable, "-m", "featx", *COMMAND, *data, *more]


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}

# Where the machine is slow an actor may not have had a part yet.
DIED = r"actor \d+ died \(.*\) (in part \d+ \(rows|before it had|between two)"


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["actor", "driver"])
def test_killed_in_the_middle_the_datasets_are_the_same(photos: Path, victim: str) -> None:
    pytest.importorskip("ray")
    pause = {**MODEL, "args": {"pause_s": 0.7}}
    extract(photos, out="reference", model=pause)
    slow = command("executor.workers=2", "+model.args.pause_s=0.7")
    with running(slow, **ENVIRONMENT) as process:
        wait_until(lambda: list(Path("store/parts").glob("part-*.h5")), process)
        actors = worker_pids("store", "actor")
        os.kill(actors[0] if victim == "actor" else process.pid, signal.SIGKILL)
        _, output = process.communicate(timeout=300)
    if victim == "actor":
        assert process.returncode == 0, output
        assert re.search(DIED, output), output
    else:
        assert all(ended(pid, 60) for pid in actors), "an actor lives on"
        with running(slow, **ENVIRONMENT) as again:
            _, output = again.communicate(timeout=500)
        assert again.returncode == 0, output
    assert dataset_digests("store") == dataset_digests("reference")
    assert temporary_files(Path("store")) == []
    assert not Path("store/workers").exists(), "job=status would tell of actors that are gone"


@pytest.mark.slow
def test_in_a_bucket_kills_cost_nothing_and_two_drivers_are_safe(
    photos: Path, bucket: str, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    near = extract(photos, out="reference", model={**MODEL, "args": {"pause_s": 2.0}})
    out = f"s3://{bucket}/run"
    slow = command("executor.workers=2", "+model.args.pause_s=2.0", f"out={out}")
    environment = {**ENVIRONMENT, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with running(slow, **environment) as process:
        wait_until(lambda: num_parts(out), process)
    assert 0 < num_parts(out) < 6
    with running(slow, **environment) as first, running(slow, **environment) as second:
        victim = wait_until(lambda: worker_pids(out, "actor"), first)[0]
        os.kill(victim, signal.SIGKILL)
        output = [driver.communicate(timeout=500)[1] for driver in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), output
    assert rows_of(package.open(out)) == rows_of(near)
    assert check_store(place(out)).complete
    assert not (place(out) / layout.DAMAGED).exists()
    assert not list((place(out) / layout.WORKERS).glob("*"))


@pytest.mark.slow
def test_a_node_that_is_lost_costs_the_part_of_its_actor_only(photos: Path) -> None:
    """Two machines of one CPU each, as raylets of their own; the driver's has none."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    extract(photos, out="reference")
    cluster = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        there = (f"executor.address={cluster.address}", "+model.args.pause_s=2.0")
        with running(command(*there), **ENVIRONMENT) as process:
            wait_until(
                lambda: len(worker_pids("store", "actor")) > 1 and num_parts("store"), process
            )
            cluster.remove_node(nodes[0], allow_graceful=False)
            _, output = process.communicate(timeout=400)
    finally:
        cluster.shutdown()
    assert process.returncode == 0, output
    # An actor that Ray started on the node while it was lost dies before it has a part.
    deaths = re.findall(DIED, output)
    assert deaths, output
    assert sum(text.startswith("in part") for text in deaths) <= 1, output
    assert dataset_digests("store") == dataset_digests("reference")
    assert temporary_files(Path("store")) == []
    assert not Path("store/workers").exists()
