"""A worker without torch: it has the rows of a made-up run at hand, and fails when asked to."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from featx.config import Config
from featx.pipeline.executors.local_worker import DriverConnection


@dataclass(frozen=True)
class StubSpec:
    """What the driver sends.

    Attributes:
        root: of the store; run: its rows.
        events: a folder in which workers record what they do.
        faults: part (or "start") -> what happens there, and to how many workers.
        pause_s: that a part takes.
    """

    run: object
    root: Path
    events: Path
    faults: Mapping[object, tuple[str, int]] = field(default_factory=dict)
    pause_s: float = 0.0
    config: Config = field(default_factory=Config)

    def note(self, name: str) -> bool:
        """Leave a file; False where it is there already."""
        try:
            (self.events / name).open("x").close()
        except FileExistsError:
            return False
        return True

    def fault_at(self, place: object) -> str:
        """What is to go wrong now, '' for nothing."""
        what, times = self.faults.get(place, ("", 0))
        return what if any(self.note(f"fault-{place}-{n}") for n in range(times)) else ""


def go_wrong(what: str, root: Path) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        os.write(2, b"these are my last words\n")
        sys.exit(5)
    if what == "raise":
        raise ValueError("a bug in the model")
    if what == "disk":
        from featx.errors import StoreMismatchError

        raise StoreMismatchError("another store")
    if what == "hang":
        time.sleep(60)


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    sys.path[:] = connection.recv()
    from stub_worker import StubSpec as Known  # the same class under its own name

    spec, device = connection.recv()
    assert isinstance(spec, Known)
    driver = DriverConnection(connection)
    spec.note(f"pid-{os.getpid()}")
    from featx.pipeline.executors.part_worker import rows_text
    from featx.pipeline.executors.worker_stats import PartResult, WorkerStats
    from featx.storage import AtomicFolder
    from featx.store import publish_part, read_manifest

    run = spec.run
    manifest = read_manifest(spec.root)
    at = []
    try:
        go_wrong(spec.fault_at("start"), spec.root)
        driver.send("ready")
        os.write(1, f"hello from {device}\n".encode())
        while (first := driver.request_part(wait=True)) is not None:
            for part in driver.parts(first):
                at = [part]
                if driver.stopping.is_set():
                    break
                time.sleep(spec.pause_s)
                go_wrong(spec.fault_at(part.index), spec.root)
                failures = publish_part(
                    AtomicFolder(spec.root), run.builder(part), manifest, run.listing
                )
                spec.note(f"part-{part.index}-by-{os.getpid()}-of-{len(driver.held)}")
                driver.report(PartResult(part, failures, {"flat": 1}, 0.1, 0.0))
    except Exception as error:  # noqa: BLE001 - as a worker does
        driver.send("failed", type(error).__name__, str(error), "its traceback", rows_text(at))
        sys.exit(1)
    driver.send("finished", WorkerStats({"model": 1.0}, 10, 20))


if __name__ == "__main__":
    main()
