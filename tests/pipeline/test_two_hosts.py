"""Two hosts that share a folder: namespaces of this machine with names, networks, and processes of
their own. What they do not show is a network file system: their locks are one kernel's."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import with_path
from made_store import dataset_digests, temporary_files
from tiny_model import COMMAND, write_images
from tiny_model import extract_six_parts as extract
from waiting import eventually

TESTS = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**with_path(TESTS), "OMP_NUM_THREADS": "1"}
RUN = [*COMMAND, "data=folder", "data.root=photos", "executor.workers=2", "+model.args.pause_s=0.4"]


def on_host(name: str, *command: str) -> list[str]:
    """A command in namespaces of its own, none of whose processes outlives it."""
    inside = 'hostname "$0" && exec "$@"'
    apart = ["--uts", "--net", "--pid", "--mount-proc", "--fork", "--kill-child"]
    return ["unshare", *apart, "sh", "-c", inside, name, *command]


def _namespaces_work() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(on_host("a", "true"), capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _namespaces_work(), reason="needs root and unshare of util-linux"),
    pytest.mark.usefixtures("in_tmp_path", "one_thread"),
]


@contextmanager
def running_on(name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """featx on a host; killed at the end of the block."""
    command = on_host(name, sys.executable, "-m", "featx", *arguments)
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def done_on(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = on_host(name, sys.executable, "-m", "featx", *arguments)
    return subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False
    )


def status_on(name: str) -> dict[str, Any]:
    done = done_on(name, "job=status", "store=store", "job.json=true")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def driver_of(process: subprocess.Popen[str]) -> int:
    """The process that holds the store: the child of the supervisor, which unshare started."""
    pid = process.pid
    for _ in range(2):
        pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    return pid


def parts() -> list[Path]:
    return list(Path("store/parts").glob("part-*.h5"))


def hosts_of(found: dict[str, Any]) -> set[str]:
    return {record["host"] for record in found["workers"] if record["alive"]}


def test_a_second_host_is_refused_sees_the_truth_and_resumes_when_the_first_is_lost(
    photos: Path,
) -> None:
    write_images(photos, 240)
    extract(photos, out="reference")
    with running_on("node-a", *RUN, "+model.args.pause_s=1.5") as first:  # 45 s for its workers
        eventually(lambda: len(parts()) >= 1, 200, first, first.stderr.read)
        os.kill(driver_of(first), signal.SIGSTOP)  # so that it is not done before all was looked at
        refused = done_on("node-b", *RUN)
        assert refused.returncode == 2
        assert "on node-a since" in refused.stderr
        before = len(parts())
        found = status_on("node-b")
        assert before <= found["parts_done"] < found["parts"] == 60
        assert hosts_of(found) == {"node-a"}
        alive = [record["what"] for record in found["workers"] if record["alive"]]
        assert {"worker 0 on cpu", "worker 1 on cpu"} <= {*alive}
        first.kill()
    there = len(parts())
    assert before <= there < 60
    for path in Path("store/workers").glob("*.json"):
        os.utime(path, (time.time() - 60, time.time() - 60))
    found = status_on("node-b")
    assert hosts_of(found) == set()
    assert found["parts_done"] == there
    assert any("no process writes the store" in text for text in found["stuck"])
    assert sum("on node-a): last heartbeat 6" in text for text in found["stuck"]) == 3
    for path in Path("store/workers").glob("*.json"):
        os.utime(path)  # as if node-b were quicker than that
    resumed = done_on("node-b", *RUN)
    assert resumed.returncode == 0, resumed.stderr
    assert f"{4 * there} of 240 rows are there already" in resumed.stderr
    assert not Path("store/workers").exists(), "node-a's processes are listed for ever"
    assert dataset_digests("store") == dataset_digests("reference")
    assert temporary_files(Path("store")) == []


TASK = """
import sys
from pathlib import Path
from featx.storage.local_folder import AtomicFolder
from featx.store.heartbeat import Heartbeat
with Heartbeat(AtomicFolder(Path("store")), "task 9 on cuda", outlives_driver=True):
    sys.stdin.read()
"""


@pytest.mark.parametrize("name", ["node-b", "node-a"])
def test_a_task_of_another_host_or_container_keeps_drivers_away(photos: Path, name: str) -> None:
    """The lock is free; also where both have one name, as containers of one machine may."""
    Path("store").mkdir()
    others = 'for i in $(seq 300); do /bin/true; done; "$0" -c "$1"; true'  # a pid of node-a alone
    command = on_host("node-a", "sh", "-c", others, sys.executable, TASK)
    with subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.PIPE, text=True) as task:
        eventually(lambda: list(Path("store/workers").glob("*.json")), 200, task)
        refused = done_on(name, *RUN)
        assert refused.returncode == 2, refused.stderr
        assert re.search(r"written by task 9 on cuda \(pid 3\d\d on node-a\)", refused.stderr)
        task.communicate("")
    assert done_on(name, *RUN).returncode == 0
