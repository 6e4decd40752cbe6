"""CPUs that this process may use: affinity, quotas of control groups, its share of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from featx import machine
from featx.machine import cpu_quota, num_cpus, take_cpus


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
    machine._taken = None


@pytest.mark.usefixtures("_alone")
def test_a_container_with_two_of_64_cores_uses_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(machine, "cpu_quota", lambda: 2.0)
    assert num_cpus() == 2
    monkeypatch.setattr(machine, "cpu_quota", lambda: 0.5)
    assert num_cpus() == 1
    monkeypatch.setattr(machine, "cpu_quota", lambda: None)
    assert num_cpus() == 64
    take_cpus(16)
    assert num_cpus() == 16
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3})
    assert num_cpus() == 1
