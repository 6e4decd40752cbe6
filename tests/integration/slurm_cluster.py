"""A Slurm cluster of two nodes on this machine: munged, slurmctld and two slurmd, all of our own.

Everything listens on the loopback interface, and keeps its key, socket, state and logs in one
folder. Without accounting, what sacct would tell has to come from squeue. About ten seconds to
idle.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from drivers import free_ports
from waiting import eventually

NODES = ("n1", "n2")
SLURM = ("executor=slurm", "executor.cpus=1")
"""Options of the command for this cluster."""

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "sinfo")

_CONFIG = """\
ClusterName=featx
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
SlurmdTimeout=20
JobRequeue=1
{nodes}
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
PartitionName=brief Nodes=n1,n2 MaxTime=2 State=UP
PartitionName=urgent Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF State=UP
"""


@dataclass
class SlurmCluster:
    """A cluster that runs.

    Attributes:
        folder: of its files.
        environment: what leads Slurm's commands to it.
        processes: its daemons by name: munged, slurmctld, n1 and n2.
    """

    folder: Path
    environment: dict[str, str]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def set_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the environment of this process lead to it."""
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=True
        ).stdout

    def tasks(self, *states: str) -> list[str]:
        """The ids of tasks in the queue, of all states or some."""
        chosen = [f"--states={','.join(states)}"] if states else []
        return self.ask("squeue", "--noheader", "--array", "--format=%i", *chosen).split()

    def start(self, name: str) -> None:
        """Start a daemon."""
        command = {
            "munged": [
                "munged", "--force", "--foreground",
                *(f"--{what}-file={self.folder}/munge.{what}" for what in ("key", "pid", "seed")),
                f"--socket={self.folder}/munge.socket",
            ],
            "slurmctld": ["slurmctld", "-D"],
            **{node: ["slurmd", "-D", "-N", node] for node in NODES},
        }[name]  # fmt: skip
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, env={**os.environ, **self.environment}, stdout=log, stderr=log
            )

    def stop(self, name: str) -> None:
        """Stop a daemon that runs."""
        process = self.processes.pop(name)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def wait_until_idle(self, limit_s: float = 120) -> None:
        """Wait until both nodes are idle and the queue is empty."""
        deadline = time.monotonic() + limit_s
        found = ""
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.CalledProcessError):
                found = self.ask("sinfo", "--noheader", "--Node", "--format=%T", "-p", "main")
                if found.split() == ["idle"] * len(NODES) and not self.tasks():
                    return
            time.sleep(0.5)
        logs = "".join(f"\n{path.name}: {_tail(path)}" for path in self.folder.glob("*.log"))
        raise AssertionError(f"the nodes of Slurm are {found.split()}, not idle.{logs}")

    def clear(self) -> None:
        """Cancel what is left of a test."""
        for task in self.tasks():
            subprocess.run(
                ["scancel", task], env={**os.environ, **self.environment}, check=False, timeout=60
            )
        self.wait_until_idle()


Accounting = Callable[[Path], contextlib.AbstractContextManager[str]]
"""Starts a database in the folder of a cluster; gives the lines of slurm.conf that lead to it."""


@contextlib.contextmanager
def running_cluster(folder: Path, accounting: Accounting | None = None) -> Iterator[SlurmCluster]:
    """A cluster as long as the block runs. Skips where Slurm is not installed.

    Args:
        folder: of its files.
        accounting: its database, or None for a cluster without one.
    """
    if lacking := [name for name in COMMANDS if shutil.which(name) is None]:
        pytest.skip(
            f"{', '.join(lacking)}: not found; "
            "apt-get install --no-install-recommends slurm-wlm munge"
        )
    if os.geteuid() != 0:
        pytest.skip("slurmd and munged are started as root only")
    for name in ("state", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    folder.chmod(0o755)
    ports = free_ports(1 + len(NODES))
    host = socket.gethostname()
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 "
        "RealMemory=4000 State=UNKNOWN"
        for node, port in zip(NODES, ports[1:], strict=True)
    )
    config = folder / "slurm.conf"
    text = _CONFIG.format(host=host, controller_port=ports[0], folder=folder, nodes=nodes)
    config.write_text(text)
    cluster = SlurmCluster(folder, {"SLURM_CONF": str(config)})
    with contextlib.ExitStack() as stack:
        stack.callback(_end_steps, config)
        cluster.start("munged")
        stack.callback(cluster.stop, "munged")
        socket_file = folder / "munge.socket"
        eventually(socket_file.exists, 30, output=lambda: _tail(folder / "munged.log"))
        if accounting is not None:
            config.write_text(text + stack.enter_context(accounting(folder)))
            cluster.ask("sacctmgr", "--immediate", "add", "cluster", "featx")
        stack.callback(_stop, cluster)
        for name in ("slurmctld", *NODES):
            cluster.start(name)
        cluster.wait_until_idle()
        yield cluster


def _stop(cluster: SlurmCluster) -> None:
    """Cancel what is left and stop the controller and the nodes, before their database ends."""
    with contextlib.suppress(AssertionError, subprocess.SubprocessError):
        cluster.clear()  # a daemon that stops leaves the steps of its jobs behind
    for name in (*NODES, "slurmctld"):
        if name in cluster.processes:
            cluster.stop(name)


def processes_of_tasks(store: Path) -> list[int]:
    """The Python processes that Slurm started for the tasks of a run."""
    output = subprocess.run(
        ["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True
    )
    folder = str((store / "jobs").absolute())
    lines = [line for line in output.stdout.splitlines() if "executors.slurm_task" in line]
    return [int(line.split()[0]) for line in lines if folder in line]


def _end_steps(config: Path) -> None:
    """End the steps of jobs that outlived their cluster, by their process ids."""
    setting = b"SLURM_CONF=" + os.fsencode(config)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            name = (process / "comm").read_text().strip()
            settings = (process / "environ").read_bytes().split(b"\0")
            if name in ("slurmstepd", "srun") and setting in settings:
                os.kill(int(process.name), signal.SIGKILL)


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-5:])
