"""Worker process of executor=local.

The driver starts it as `python -m featx.pipeline.executors.local_worker DESCRIPTOR PARENT`.
The worker receives its worker spec over a socket, asks for parts while it has room for more, and
reports each committed part. It ends at once when its driver does.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from featx.base import end_with_parent, keep_freed_memory, own_process

if TYPE_CHECKING:
    from featx.pipeline.executors.worker_stats import PartResult
    from featx.types import Part

STOP = "stop"
"""Message of the driver, in place of a part, that ends the run early."""


class DriverConnection:
    """Connection of a worker to its driver: sends messages and receives parts.

    Attributes:
        stopping: set when the driver has asked the worker to stop.
        held: index -> part, for parts that were received and not yet reported as committed.
    """

    def __init__(self, connection: Connection) -> None:
        self.stopping = threading.Event()
        self.held: dict[int, Part] = {}
        self._connection = connection
        # The main thread asks for parts while the thread that commits reports them; a message must
        # not be interleaved with another.
        self._sending = threading.Lock()
        self._received: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True, name="featx-driver").start()

    def send(self, kind: str, *values: Any) -> None:
        """Send a message; any thread may call this.

        The bytes are in the socket when this returns, so they arrive even if this process dies
        next.
        """
        with self._sending:
            self._connection.send((kind, *values))

    def request_part(self, wait: bool) -> Part | None:
        """Request the next part and receive it.

        Args:
            wait: whether the driver may delay its answer until a part is available.

        Returns:
            the part, or None if there is none now or, with `wait`, none any more.
        """
        if self.stopping.is_set():
            return None
        self.send("request", wait)
        part = self._received.get()
        if part is not None:
            self.held[part.index] = part
        return part

    def parts(self, first: Part) -> Iterator[Part]:
        """Yield the given part, and then further parts as long as the driver has some at once."""
        yield first
        while (part := self.request_part(wait=False)) is not None:
            yield part

    def report(self, result: PartResult) -> None:
        """Report a committed part."""
        self.send("committed", result)
        self.held.pop(result.part.index)

    def _listen(self) -> None:
        """Receive parts and STOP in a thread of its own; end the process if the driver is gone."""
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                os._exit(1)  # without a driver the part that is being computed is not needed
            if message == STOP:
                self.stopping.set()
                message = None  # wakes a thread that waits for a part
            self._received.put(message)


def main(descriptor: int, parent: int) -> int:
    """Compute parts until there are no more.

    Args:
        descriptor: file descriptor of the socket to the driver.
        parent: process id of the driver.

    Returns:
        exit code of the process.
    """
    own_process()
    os.set_inheritable(descriptor, False)
    end_with_parent(parent)
    socket = Connection(descriptor)
    sys.path[:] = socket.recv()
    spec, device = socket.recv()
    if device == "cpu":
        keep_freed_memory()  # before any thread allocates
    driver = DriverConnection(socket)
    # Imported after sys.path is set, so that all of featx comes from the driver's folders.
    from featx.pipeline.executors.part_worker import PartWorker, rows_text
    from featx.pipeline.executors.worker_spec import worker_context
    from featx.pipeline.executors.worker_stats import WorkerStats
    from featx.pipeline.stop_signals import Interrupted
    from featx.storage import open_folder
    from featx.store import Heartbeat

    worker_stats, worker = WorkerStats(), None
    try:
        heartbeat = Heartbeat(open_folder(spec.root), f"worker on {device}", spec.driver)
        with heartbeat, worker_context(spec, device) as context:
            worker = PartWorker(context, spec, driver.report, heartbeat, driver.stopping)
            driver.send("ready")
            while (first := driver.request_part(wait=True)) is not None:
                worker_stats.add(worker.compute_parts(driver.parts(first)))
    except Interrupted as interrupted:
        if not driver.stopping.is_set():
            return 128 + interrupted.signum  # a signal to this process alone
    except Exception as error:  # noqa: BLE001 - a worker's boundary: the driver raises it
        part = None if worker is None else worker.part
        parts = list(driver.held.values()) if part is None else [part]
        trace = traceback.format_exc()
        driver.send("failed", type(error).__name__, str(error), trace, rows_text(parts))
        return 1
    driver.send("finished", worker_stats)
    return 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the driver died during a message to it
        sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
