"""What this process may use: CPUs by affinity, quota and its share of a run, and memory.

Freed memory is kept, in threads as well where nobody allocated in one before.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import run_python

from featx.base import (
    check_memory,
    cpu_quota,
    free_memory,
    machine,
    num_cpus,
    resident_memory,
    take_cpus,
)
from featx.errors import ConfigError


def made(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1 = "9:name=systemd:/\n4:memory:/docker/ab\n2:cpu,cpuacct:/docker/ab\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),
        # The limit of a group above holds as well.
        (
            {
                "proc/self/cgroup": "0::/slice/job/step\n",
                "sys/fs/cgroup/slice/job/step/cpu.max": "max 100000\n",
                "sys/fs/cgroup/slice/job/cpu.max": "350000 100000\n",
                "sys/fs/cgroup/slice/cpu.max": "800000 100000\n",
            },
            3.5,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_period_us": "50000\n",
            },
            3.0,
        ),
        # In a container the path is that of the host, and the group lies at the mount.
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense"}, None),
    ],
)
def test_the_quota_of_made_up_control_groups(
    tmp_path: Path, files: dict[str, str], expected: float | None
) -> None:
    assert cpu_quota(made(tmp_path, files)) == expected


@pytest.fixture
def _alone() -> Iterator[None]:
    yield
    take_cpus(None)


@pytest.mark.usefixtures("_alone")
def test_a_container_with_two_of_64_cores_uses_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    for quota, cpus in ((2.0, 2), (0.5, 1), (None, 64)):
        monkeypatch.setattr(machine, "cpu_quota", lambda quota=quota: quota)
        assert num_cpus() == cpus
    take_cpus(16)
    assert num_cpus() == 16
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3})
    assert num_cpus() == 1


@pytest.mark.slow
def test_a_command_with_a_quota_computes_with_so_many_threads(tmp_path: Path) -> None:
    code = """
import os, sys
os.sched_getaffinity = lambda pid: set(range(64))
from featx.base import machine
machine.cpu_quota = lambda: 1.0
from featx.__main__ import run_command
sys.argv = ["featx", "--version"]
run_command()
import torch
print(torch.get_num_threads())
"""
    assert run_python("-c", code).stdout.split()[-1] == "1"


MEMINFO = "MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:  1000 kB\n"
V2_LIMIT = {
    "proc/self/cgroup": "0::/job\n",
    "sys/fs/cgroup/job/memory.max": "500000\n",
    "sys/fs/cgroup/job/memory.current": "300000\n",
    "sys/fs/cgroup/job/memory.stat": "anon 200000\ninactive_file 50000\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/meminfo": MEMINFO}, 1024000),
        ({"proc/meminfo": MEMINFO, **V2_LIMIT}, 250000),
        (
            {"proc/meminfo": MEMINFO, **V2_LIMIT, "sys/fs/cgroup/job/memory.max": "max\n"},
            1024000,
        ),
        # Above memory.high processes are slowed down until they hardly run.
        ({"proc/meminfo": MEMINFO, **V2_LIMIT, "sys/fs/cgroup/job/memory.high": "max\n"}, 250000),
        (
            {"proc/meminfo": MEMINFO, **V2_LIMIT, "sys/fs/cgroup/job/memory.high": "400000\n"},
            150000,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                **V2_LIMIT,
                "sys/fs/cgroup/job/memory.max": "max\n",
                "sys/fs/cgroup/job/memory.high": "400000\n",
            },
            150000,
        ),
        # Files that were read twice are dropped as others are.
        (
            {
                "proc/meminfo": MEMINFO,
                **V2_LIMIT,
                "sys/fs/cgroup/job/memory.stat": "inactive_file 50000\nactive_file 60000\n",
            },
            310000,
        ),
        # The group took more than it may for a moment.
        ({"proc/meminfo": MEMINFO, **V2_LIMIT, "sys/fs/cgroup/job/memory.max": "9\n"}, 0),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "400000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "300000\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 4\ntotal_active_file 3\n",
            },
            100007,
        ),
    ],
)
def test_memory_that_made_up_control_groups_leave(
    tmp_path: Path, files: dict[str, str], expected: float | None
) -> None:
    assert free_memory(made(tmp_path, files)) == expected


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="as Linux tells it")
def test_memory_of_this_process() -> None:
    content = b"x" * (64 << 20)
    before = resident_memory()
    block = mmap.mmap(-1, len(content))  # not of memory that was freed and kept
    block.write(content)
    after = resident_memory()
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(len(block), rel=0.3)


def test_what_does_not_fit_into_memory_is_refused() -> None:
    check_memory(1 << 10, "The scores", "Give fewer.")
    message = r"^The scores take 1024.0 TiB or more, and .* of memory are free. Give fewer.$"
    with pytest.raises(ConfigError, match=message):
        check_memory(1 << 50, "The scores", "Give fewer.")


def test_memory_that_malloc_keeps_is_no_lack(set_free_memory: Callable[..., None]) -> None:
    """A second fit in one process uses the memory that the first one has freed."""
    set_free_memory(100.0, 2000.0)
    check_memory(1000, "The scores", "Give fewer.")


THREADS = """
import threading
from featx.base import is_kept_in_threads, keep_freed_memory, own_process

def other():
    thread = threading.Thread(target=lambda: [bytes(99) for _ in range(9)])
    thread.start()
    thread.join()

{steps}
print(is_kept_in_threads())
"""

glibc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is of Linux")


@glibc
@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        ("own_process(); keep_freed_memory()", "True"),
        ("own_process(); other(); keep_freed_memory()", "False"),
        ("keep_freed_memory()", "False"),
    ],
)
def test_threads_share_the_memory_of_the_first_one(steps: str, kept: str) -> None:
    done = run_python("-c", THREADS.format(steps=steps))
    assert (done.stdout.strip(), done.stderr) == (kept, "")


RESIDENT = """
import numpy as np
from featx.base import keep_freed_memory, kept_freed_memory, own_process

def mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

def use():
    # The last array lies behind those that are freed.
    arrays = [np.ones({size} << 20, np.uint8) for _ in range(10)]
    behind = np.ones({size} << 20, np.uint8)
    del arrays
    return mib() - before

before = mib()
{steps}
print(use())
"""


@pytest.mark.slow
@glibc
@pytest.mark.parametrize(
    ("steps", "is_kept"),
    [
        ("keep_freed_memory()", False),
        ("own_process(); keep_freed_memory()", True),
        ("kept_freed_memory.__enter__()", True),
        ("with kept_freed_memory: use()", False),
        ("own_process()\nwith kept_freed_memory: use()", True),
    ],
)
def test_a_process_of_a_user_returns_its_memory(steps: str, is_kept: bool) -> None:
    """Of blocks above 32 MiB, below which glibc itself may keep them after torch was used."""
    done = run_python("-c", RESIDENT.format(steps=steps, size=40))
    assert done.stderr == ""
    assert (int(done.stdout) > 200) == is_kept
