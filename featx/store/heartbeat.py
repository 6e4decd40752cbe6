"""Heartbeats in workers/: what each process that writes a store is doing.

A process rewrites its file every BEAT_S seconds and deletes it when it ends. A killed process
leaves its file, whose modification time no longer changes. job=status shows the files; a run reads
them to detect writers that hold no lock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from featx.base import command_text
from featx.errors import StoreLockedError
from featx.storage import AtomicFolder, paths_in
from featx.store import layout
from featx.types import Json, Part

logger = logging.getLogger(__name__)

BEAT_S = 10.0
"""Seconds between two writes of the file."""

DRIVER = "driver"
"""Role of a process that computes nothing itself."""

_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the first pid namespace, PROC_PID_INIT_INO in the kernel's proc_ns.h."""

SILENT_S = 45.0
"""Seconds without a write after which a process counts as silent.

They allow for clocks that differ by half a minute, and file systems that show changes late.
"""


@dataclass(frozen=True)
class QueueState:
    """Tasks of a run that are in the same state in the queue of a scheduler.

    State and reason to wait are named as the scheduler does; tasks that do not wait have no reason.
    """

    tasks: int
    state: str
    reason: str = ""


class Heartbeat:
    """Heartbeat file of this process; a context manager with a thread that writes the file.

    Args:
        role: role of the process, such as 'driver' or 'worker on cuda:0'.
        driver: `heartbeat_name` of the driver of this worker, or None for a process without driver.
        outlives_driver: whether the process continues when its driver dies, so that no other run
            may write before it ends.
    """

    def __init__(
        self,
        disk: AtomicFolder,
        role: str,
        driver: str | None = None,
        outlives_driver: bool = False,
    ) -> None:
        self._path = disk.root / layout.WORKERS / heartbeat_name(os.getpid())
        self._disk = disk
        self._values: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "pids": pid_namespace(),
            "what": role,
            "driver": driver,
            "outlives": outlives_driver,
            "since": time.time(),
            "part": None,
            "part_since": None,
            "parts": 0,
            "rows": 0,
            "last_commit": None,
            "failures": None,
            "queue": [],
        }
        self._is_ended = False
        self._due = threading.Event()  # set to end the pause before the next write
        self._thread = threading.Thread(target=self._beat, daemon=True, name="featx-heartbeat")

    def __enter__(self) -> Heartbeat:
        self._thread.start()  # first, as it may fail: without it the file would stay
        self.write()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_ended = True
        self._due.set()
        self._thread.join()
        self._disk.remove_best_effort(self._path)

    def begin(self, part: Part) -> None:
        """Record that this part is being computed."""
        rows = [part.start, part.stop]
        self._values |= {"part": part.index, "part_rows": rows, "part_since": time.time()}

    def record_commit(self, part: Part) -> None:
        """Record that this part is committed."""
        self._values["parts"] += 1
        self._values["rows"] += len(part)
        self._values["last_commit"] = time.time()
        if self._values["part"] == part.index:
            self._values |= {"part": None, "part_since": None}

    def set_failures(self, count: int) -> None:
        """Record the number of failed rows of the store, as counted by this process."""
        self._values["failures"] = count

    def set_queue(self, queue: Sequence[QueueState]) -> None:
        """Record the states of the tasks that this driver has submitted to a scheduler.

        If they have changed, they are written soon, so that job=status does not show old ones.
        """
        before, self._values["queue"] = self._values["queue"], [asdict(state) for state in queue]
        if self._values["queue"] != before:
            self._due.set()

    def _beat(self) -> None:
        """Write the file every BEAT_S seconds, or when a write is due, in a thread."""
        while True:
            self._due.wait(BEAT_S)
            self._due.clear()
            if self._is_ended:
                return
            self.write()

    def write(self) -> None:
        """Write the file now; errors are ignored, so a full disk does not end the run."""
        # This thread copies the values while others change them. Copying a dict is one operation
        # under the GIL, so at worst the file mixes the values of two moments.
        self._disk.write_best_effort(self._path, json.dumps({**self._values, "beat": time.time()}))


@dataclass(frozen=True)
class HeartbeatRecord:
    """Content of a heartbeat file.

    Attributes:
        age_s: seconds since the last write, by the time of the file and the clock of this machine.
        is_alive: whether the process wrote recently and, on this machine, still exists.
    """

    path: Path
    values: Json
    age_s: float
    is_alive: bool

    @property
    def name(self) -> str:
        """Role and location of the process: 'worker on cuda:0 (pid 12 on node7)'."""
        return f"{self.values['what']} (pid {self.values['pid']} on {self.values['host']})"

    @property
    def queue(self) -> list[QueueState]:
        """States of the tasks that the process has submitted, as of its last write."""
        return [QueueState(**state) for state in self.values.get("queue") or ()]


_UNKNOWN = dict.fromkeys(
    ("pids", "part", "part_rows", "part_since", "parts", "last_commit", "beat")
)
"""Values that a heartbeat file may lack: a process at no part writes no `part_rows`, and a bit of
the file of a killed process may flip in a name."""


def read_heartbeats(root: Path) -> Sequence[HeartbeatRecord]:
    """Read the heartbeats of all processes whose files exist."""
    heartbeats = []
    for path in paths_in(root / layout.WORKERS, "*.json"):
        # The process may just have deleted its file; other files of the folder are not ours.
        with contextlib.suppress(OSError, ValueError, TypeError):
            values = {**_UNKNOWN, **json.loads(path.read_bytes())}
            if not {"host", "pid", "what"} <= values.keys():
                continue
            if None in (values["part_rows"], values["part_since"], values["beat"]):
                values |= {"part": None, "part_since": None}
            if None in (values["last_commit"], values["beat"]):
                values["parts"] = 0
            age_s = time.time() - path.stat().st_mtime
            is_local = (values["host"], values["pids"]) == (socket.gethostname(), pid_namespace())
            is_alive = age_s < SILENT_S and not (is_local and _is_gone(values["pid"]))
            heartbeats.append(HeartbeatRecord(path, values, age_s, is_alive))
    return heartbeats


def report_lost_work(root: Path) -> None:
    """Log what processes that were killed had not committed, from the files that they left."""
    for record in read_heartbeats(root):
        values = record.values
        if record.is_alive or values["what"] == DRIVER:
            continue
        if values.get("part") is None:
            logger.warning("%s was killed; rows that it had not committed are lost.", record.name)
            continue
        start, stop = values["part_rows"]
        logger.warning(
            "%s was killed while it computed part %d: up to %d rows, %.0f s of work, are computed "
            "again.",
            record.name,
            values["part"],
            stop - start,
            max(0.0, values["beat"] - values["part_since"]),
        )


def clear_heartbeats(disk: AtomicFolder, driver: str | None = None) -> None:
    """Delete the heartbeat files of other processes; only the holder of the store may do this.

    Recent files are deleted, too: drivers and their workers hold the lock while they live, on any
    machine, and `refuse_other_writers` has looked for others. Without locks, files of living
    processes are kept, except those of the workers of `driver`, which has just ended them.
    """
    for record in read_heartbeats(disk.root):
        is_own_worker = driver is not None and record.values.get("driver") == driver
        if disk.has_locks or not record.is_alive or is_own_worker:
            disk.remove_best_effort(record.path)


def refuse_other_writers(root: Path) -> list[HeartbeatRecord]:
    """Heartbeats of other living processes that write to a store, besides its holder.

    Raises StoreLockedError if a worker is alive that continues without its driver.
    """
    alive = [record for record in read_heartbeats(root) if record.is_alive]
    for record in alive:
        if record.values.get("outlives"):
            status = command_text("job=status", f"store={root}")
            raise StoreLockedError(
                f"{root} is being written by {record.name}, which continues without its driver; "
                f"its last heartbeat is {max(0, record.age_s):.0f} s old. Wait until `{status}` "
                "shows no process, cancel it, or choose another out=DIR."
            )
    return alive


def heartbeat_name(pid: int) -> str:
    """Name of the heartbeat file of a process on this machine, or in this container."""
    space = pid_namespace()
    return f"{socket.gethostname()}-{pid}{f'-{space}' if space else ''}.json"


def pid_namespace() -> int | None:
    """Inode of the namespace in which a pid is unique; containers may share a host name.

    None for the first one of a machine, and without namespaces.
    """
    try:
        space = int(os.readlink("/proc/self/ns/pid").strip("pid:[]"))  # noqa: PTH115 - no path
    except (OSError, ValueError):
        return None
    return None if space == _FIRST_PID_NAMESPACE else space


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # it exists and belongs to another user
    return False
