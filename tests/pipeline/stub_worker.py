"""A worker without torch: it has the rows of a made-up run at hand, and fails when asked to."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from made_store import MadeRun

from featx.config import Config
from featx.pipeline.executors import WorkerSpec, worker
from featx.pipeline.executors.job_folder import WorkerReport
from featx.storage import AtomicFolder
from featx.store import commit_part, heartbeat_name, layout, part_names, read_manifest
from featx.types import Part


@dataclass(frozen=True)
class StubTask:
    """What a stub does.

    Attributes:
        run: the rows.
        root: folder of the store.
        events: a folder in which workers record what they do.
        faults: part (or "start") -> what happens there, and to how many workers.
        pause_s: that a part takes.
    """

    run: MadeRun
    root: Path
    events: Path
    faults: Mapping[object, tuple[str, int]] = field(default_factory=dict)
    pause_s: float = 0.0

    def uncommitted(self, parts: Sequence[Part]) -> list[Part]:
        there = part_names(self.root)
        return [part for part in parts if layout.part_name(part.index) not in there]

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


def stub_spec(root: Path, parts: Sequence[Part], config: Config, task: StubTask) -> WorkerSpec:
    """The worker spec of a driver in this process; a stub reads only some of it."""
    made: dict[str, Any] = {
        "config_yaml": "", "source": None, "content_tags": None, "engine_spec": None,
        "resume_state": None, "num_rows": 0, "fingerprint": {"device": "cpu"}, "cpus": 1,
    }  # fmt: skip
    driver = heartbeat_name(os.getpid())
    return WorkerSpec(root=root, driver=driver, config=config, output=task, parts=parts, **made)


def go_wrong(what: str) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        os.write(2, b"these are my last words\n")
        os._exit(5)
    if what == "sys.exit":
        sys.exit(0)
    if what == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        time.sleep(60)


@contextlib.contextmanager
def stub_context(spec: WorkerSpec, device: str) -> Iterator[str]:
    task: Any = spec.output
    task.note(f"pid-{os.getpid()}")
    go_wrong(task.fault_at("start"))
    os.write(1, f"hello from {device}\n".encode())
    yield device


class StubPartWorker:
    """As worker.PartWorker."""

    def __init__(
        self, context: str, spec: WorkerSpec, heartbeat: object, report: WorkerReport, path: Path
    ) -> None:
        self._spec, self._report, self._path = spec, report, path
        self.parts_in_progress: list[Part] = []
        path.write_text(report.to_json())

    def compute_parts(self, parts: Iterable[Part]) -> None:
        task: Any = self._spec.output
        for part in parts:
            self.parts_in_progress = [part]
            time.sleep(task.pause_s)
            go_wrong(task.fault_at(part.index))
            root = self._spec.root
            builder, manifest = task.run.builder(part), read_manifest(root)
            commit_part(AtomicFolder(root), builder, manifest, task.run.listing)
            task.note(f"part-{part.index}-by-{os.getpid()}")
            flat = self._report.underflow_rows.get("flat", 0)
            self._report.underflow_rows["flat"] = flat + 1
            self._path.write_text(self._report.to_json())
        self._report.seconds, self._report.peak_memory_mib = {"model": 1.0}, 20


def main() -> None:
    """As worker.main, with the stubs."""
    replaced: Any = worker
    replaced.worker_context, replaced.PartWorker = stub_context, StubPartWorker
    worker.main(*sys.argv[1:])
