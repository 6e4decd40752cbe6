"""workers/: what each process that writes a store is doing, for job=status; nothing else reads it.

A process writes its file anew every BEAT_S, and deletes it when it ends by itself. One that was
killed leaves its file, whose time no longer moves on.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featx.errors import StoreLockedError
from featx.storage.local_folder import AtomicFolder
from featx.store import layout
from featx.types import Part

BEAT_S = 10.0
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""PROC_PID_INIT_INO of the kernel's proc_ns.h."""

SILENT_S = 45.0
"""A process that has not written its file for so long is told as silent. It leaves room for clocks
that differ by half a minute, and for file systems that show a change late."""


class Heartbeat:
    """The file of this process; a context manager that owns the thread that writes it.

    Args:
        disk: of the store.
        what: the process does, such as 'driver' or 'cuda:0'.
        driver: the `sign_name` of the process that it works for; None where it does for itself.
        outlives: it goes on when its driver dies, so nobody else may write before it ends.
    """

    def __init__(
        self, disk: AtomicFolder, what: str, driver: str | None = None, outlives: bool = False
    ) -> None:
        self._path = disk.root / layout.WORKERS / sign_name(os.getpid())
        self._disk = disk
        self._values: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "pids": pid_namespace(),
            "what": what,
            "driver": driver,
            "outlives": outlives,
            "since": time.time(),
            "part": None,
            "part_since": None,
            "parts": 0,
            "rows": 0,
            "last_commit": None,
        }
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="featx-heartbeat")

    def __enter__(self) -> Heartbeat:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._disk.forget(self._path)

    def begin(self, part: Part) -> None:
        """This part is being computed now."""
        rows = [part.start, part.stop]
        self._values |= {"part": part.index, "part_rows": rows, "part_since": time.time()}

    def committed(self, part: Part) -> None:
        """This part is durable."""
        self._values["parts"] += 1
        self._values["rows"] += len(part)
        self._values["last_commit"] = time.time()
        if self._values["part"] == part.index:
            self._values |= {"part": None, "part_since": None}

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._write()

    def _write(self) -> None:
        self._disk.write_best_effort(self._path, json.dumps({**self._values, "beat": time.time()}))


@dataclass(frozen=True)
class HeartbeatRecord:
    """What a process last wrote of itself.

    Attributes:
        path: of its file.
        values: as it wrote them.
        age_s: since it wrote them, by the file's time and this machine's clock.
        alive: it wrote lately and, where it runs on this machine, is still there.
    """

    path: Path
    values: dict[str, Any]
    age_s: float
    alive: bool

    @property
    def name(self) -> str:
        """What it is and where: 'worker on cuda:0 (pid 12 on node7)'."""
        return f"{self.values['what']} (pid {self.values['pid']} on {self.values['host']})"


def signs_of_life(root: Path) -> Sequence[HeartbeatRecord]:
    """Every process that wrote to a store of late, as far as its file is still there."""
    found = []
    for path in sorted((root / layout.WORKERS).glob("*.json")):
        with contextlib.suppress(OSError, ValueError):  # it ended just now
            values = {"pids": None, **json.loads(path.read_bytes())}
            age_s = time.time() - path.stat().st_mtime
            here = (values["host"], values["pids"]) == (socket.gethostname(), pid_namespace())
            alive = age_s < SILENT_S and not (here and _is_gone(values["pid"]))
            found.append(HeartbeatRecord(path, values, age_s, alive))
    return found


def clear_signs(disk: AtomicFolder, driver: str | None = None) -> None:
    """Delete the files of all processes before; only who holds the store may.

    Also of those that wrote a moment ago: drivers and their workers hold the lock while they live,
    on whatever machine, and whoever goes on without it was looked for by `refuse_other_writers`.
    Where there are no locks, those that are alive keep theirs, but for the workers of `driver`,
    which it has just ended.
    """
    for sign in signs_of_life(disk.root):
        ours = driver is not None and sign.values.get("driver") == driver
        if disk.has_locks or not sign.alive or ours:
            disk.forget(sign.path)


def refuse_other_writers(root: Path) -> list[HeartbeatRecord]:
    """Those who write to a store beside the one who holds it.

    Raises:
        StoreLockedError: workers are at it that need no driver; theirs may be gone.
    """
    alive = [sign for sign in signs_of_life(root) if sign.alive]
    for sign in alive:
        if sign.values.get("outlives"):
            raise StoreLockedError(
                f"{root} is being written by {sign.name}, which goes on without its driver; it "
                f"was heard of {max(0, sign.age_s):.0f} s ago. Wait until job=status shows "
                "nobody, cancel it, or choose another out=DIR."
            )
    return alive


def clear_sign(disk: AtomicFolder, name: str) -> None:
    """Delete the file of a process that has ended, by its `sign_name`."""
    disk.forget(disk.root / layout.WORKERS / name)


def sign_name(pid: int) -> str:
    """The file of a process of this machine or, inside a container, of this container."""
    space = pid_namespace()
    return f"{socket.gethostname()}-{pid}{f'-{space}' if space else ''}.json"


def pid_namespace() -> int | None:
    """Within which a number means a process: containers may share a host's name, not its pids.

    Returns:
        None in the first one of a machine, and where there are none.
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
        return False  # it is somebody else's
    return False
