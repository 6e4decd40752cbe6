"""A Ray cluster of a head and two nodes on this machine, by `ray start`, as on several machines.

It has a network namespace of its own with the loopback interface only: `ray start` listens on every
interface. Processes join the namespace by `RayCluster.within`. The head has no CPU for actors, each
node has one. About 20 seconds until it is ready.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from waiting import eventually

_PORT = 6400
_COMMAND = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block")
_OPTIONS = (
    "--disable-usage-stats",
    "--object-store-memory=80000000",
    "--include-log-monitor=false",
)


@dataclass
class RayCluster:
    """A cluster that runs.

    Attributes:
        folder: of its files; sockets of Ray need a short path.
        within: what starts a command in its network.
        environment: what leads `executor.address=auto` to it.
    """

    folder: Path
    within: tuple[str, ...]
    environment: dict[str, str]
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start_head(self) -> None:
        """Start the head; returns when it answers."""
        ports = (f"--port={_PORT}", "--ray-client-server-port=6401", "--include-dashboard=false")
        self._start("head", "--head", "--num-cpus=0", f"--temp-dir={self.folder}/ray", *ports)

    def start_node(self, name: str) -> None:
        """Start a node of one CPU; returns when the head knows it."""
        self._start(name, f"--address=127.0.0.1:{_PORT}", "--num-cpus=1")

    def kill(self, name: str) -> None:
        """Kill the head or a node, with all its processes and actors, as a power failure does."""
        process = self._processes.pop(name)
        for pid in (*_descendants(process.pid), process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def wait(self) -> None:
        """Wait until the head and all nodes have ended."""
        for process in self._processes.values():
            process.wait(30)

    def _start(self, name: str, *options: str) -> None:
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            self._processes[name] = process = subprocess.Popen(
                [*self.within, *_COMMAND, *_OPTIONS, *options],
                env={**os.environ, **self.environment}, cwd=self.folder, stdout=output,
                stderr=output, stdin=subprocess.DEVNULL,
            )  # fmt: skip

        def printed() -> str:
            return log.read_text(errors="replace")

        eventually(lambda: "Ray runtime started" in printed(), 120, process, printed)


@contextlib.contextmanager
def running_ray() -> Iterator[RayCluster]:
    """A cluster as long as the block runs. Skips where Ray or a namespace cannot be had."""
    pytest.importorskip("ray", reason="ray is not installed")
    if lacking := [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(lacking)}: not found")
    folder = Path(tempfile.mkdtemp(prefix="featx-ray-"))
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], stderr=subprocess.DEVNULL)
    try:
        namespace = _namespace(holder)
        within = ("nsenter", f"--net={namespace}")
        subprocess.run([*within, "ip", "link", "set", "lo", "up"], check=True)
        environment = {
            "RAY_ADDRESS": f"127.0.0.1:{_PORT}",
            "RAY_TMPDIR": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "OMP_NUM_THREADS": "1",
            # Ray starts actors with niceness 15: beside other work they hardly begin.
            "RAY_worker_niceness": "0",
        }
        cluster = RayCluster(folder, within, environment)
        try:
            cluster.start_head()
            for name in ("n1", "n2"):  # one after the other, as they look for free ports
                cluster.start_node(name)
            yield cluster
        finally:
            _end_all(namespace)
            cluster.wait()
    finally:
        holder.kill()
        holder.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _namespace(holder: subprocess.Popen[bytes]) -> Path:
    """The network namespace of a process, once it has left that of this process."""
    found, ours = Path(f"/proc/{holder.pid}/ns/net"), Path("/proc/self/ns/net").stat().st_ino
    deadline = time.monotonic() + 10
    while holder.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if found.stat().st_ino != ours:
                return found
        time.sleep(0.05)
    pytest.skip("network namespaces are started as root only")


def _end_all(namespace: Path) -> None:
    """Kill every process of the namespace; only those of the cluster and its drivers are in it."""
    inode = namespace.stat().st_ino
    assert inode != Path("/proc/self/ns/net").stat().st_ino
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "ns/net").stat().st_ino == inode:
                os.kill(int(process.name), signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """Children of a process, their children, and so on."""
    parents: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            parents.setdefault(int(parent), []).append(int(process.name))
    found, left = [], [pid]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found
