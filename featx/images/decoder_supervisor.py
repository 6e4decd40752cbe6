"""The supervisor of the decoders: starts, watches and replaces them, in a process of its own.

The process of the model forks the supervisor, and the supervisor forks the decoders. So a decoder
that replaces another one comes from a process with one thread, whatever threads and devices the
process of the model uses by then.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from featx.base import end_with_parent, return_freed_memory
from featx.images.decoder import Decoder, RowWorker
from featx.images.decoder_channels import ATOMIC_BYTES, NO_ROW, Cause, Channels, Death, Kind, send
from featx.images.decoder_warnings import redirect_warnings
from featx.storage import s3_outage

START_ALL, RESUME = b"a", b"r"
"""Orders to the supervisor: start all decoders, not only one; start decoders again after all ended.
"""

_CHECK_INTERVAL_S = 1.0
"""Largest number of seconds between two checks of the decoders."""

_PAUSE_S = 5.0
"""Seconds between two checks from which on this process must have been stopped itself."""


class Supervisor:
    """Keeps decoders running, in a process of its own.

    Decoding a row may take `limit_s` seconds; None is no limit. When the pipe of orders `control`
    is closed, all processes end.
    """

    def __init__(
        self,
        workers: Sequence[RowWorker],
        channels: Channels,
        limit_s: float | None,
        control: int,
    ) -> None:
        self._workers, self._channels, self._table = workers, channels, channels.table
        self._limit_s, self._control = limit_s, control
        # Not in shared memory: a decoder whose memory an image damages must not name the processes
        # that are killed. 0 is none, and would be the whole process group.
        self._pids = [0] * self._table.count
        self._target = 1
        self._is_paused = False
        self._checked_at = time.monotonic()
        self._were_stopped: set[int] = set()
        self._causes: dict[int, Cause] = {}

    def run(self) -> NoReturn:
        """Start, watch and replace decoders until the process of the model is gone."""
        parent = os.getppid()
        # Ctrl-C reaches the whole process group. The process of the model decides when these end.
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        # A collection would touch, and so copy, every page, and might free tensors of CUDA, which
        # this process must not use.
        gc.freeze()
        torch.set_num_threads(1)  # the threads of OpenMP did not survive the fork
        return_freed_memory()  # the process of the model would copy each such page that it reuses
        with contextlib.suppress(Exception):  # rows will tell
            self._workers[0].warm_up()
        gc.freeze()  # what that has made as well, for the decoders
        wake = self._wake_at_child_end()
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wake, select.POLLIN)
        limit_s = _CHECK_INTERVAL_S if self._limit_s is None else self._limit_s / 4
        while True:
            for index in range(0 if self._is_paused else self._target):
                if not self._pids[index]:
                    self._start_decoder(index)
            ready = dict(poll.poll(1000 * min(limit_s, _CHECK_INTERVAL_S)))
            if os.getppid() != parent or (self._control in ready and not self._obey()):
                self._end_decoders()
                os._exit(0)
            with contextlib.suppress(BlockingIOError):
                os.read(wake, ATOMIC_BYTES)
            self._end_late_decoders()
            self._report_deaths()

    def _wake_at_child_end(self) -> int:
        """The end of a pipe that becomes readable when a decoder ends."""
        woken, wake = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)
        return woken

    def _obey(self) -> bool:
        """Follow an order; return False if there will be no more."""
        order = os.read(self._control, 1)
        if order == START_ALL:
            self._target = self._table.count
        elif order == RESUME:
            self._is_paused = False
        return bool(order)

    def _start_decoder(self, index: int) -> None:
        self._table.rows[index] = NO_ROW
        supervisor = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            reason = str(error.strerror).encode()
            send(self._channels.results, Kind.NOT_STARTED, 0, NO_ROW, reason)
            self._end_decoders()
            os._exit(1)
        if pid == 0:
            code = 1
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                end_with_parent(supervisor)
                os.close(self._control)
                decoder = Decoder(index, self._workers, self._channels, redirect_warnings)
                s3_outage.wait_in_child(decoder.report_outage)
                decoder.serve()
                code = 0
            finally:
                # Nothing that was copied by the fork may be finalised here.
                os._exit(code)
        self._pids[index] = pid

    def _end_late_decoders(self) -> None:
        """Kill decoders that are over the time limit, and those that a signal has stopped."""
        since, now = self._table.since, time.monotonic()
        if now - self._checked_at > _PAUSE_S:
            # Ctrl-Z stops all processes of the command, and that time counts for no image.
            since[since > 0] = now
        self._checked_at = now
        if self._limit_s is not None:
            for index in np.flatnonzero((since > 0) & (now - since > self._limit_s)).tolist():
                self._kill(index, Cause.TOO_LATE)
        stopped = {index for index, pid in enumerate(self._pids) if pid and _is_stopped(pid)}
        # At Ctrl-Z all processes are stopped, and this one may continue before the others do.
        for index in stopped & self._were_stopped:
            self._kill(index, Cause.STOPPED)
        self._were_stopped = stopped

    def _kill(self, index: int, cause: Cause) -> None:
        """Kill a decoder, if it runs, and remember why."""
        if pid := self._pids[index]:
            self._causes.setdefault(index, cause)
            os.kill(pid, signal.SIGKILL)

    def _report_deaths(self) -> None:
        """Report decoders that have ended. After the end of one between two rows, end all."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            index = self._pids.index(pid)
            self._forget(index)
            row, group = int(self._table.rows[index]), int(self._table.groups[index])
            if row == NO_ROW and status == 0:
                continue  # it has loaded the last group that it should
            is_signalled = os.WIFSIGNALED(status)
            death = Death(
                row,
                os.WTERMSIG(status) if is_signalled else 0,
                0 if is_signalled else os.WEXITSTATUS(status),
                self._causes.pop(index, Cause.SIGNAL),
            )
            if row == NO_ROW:
                self._end_decoders()
                self._is_paused = True
            send(self._channels.results, Kind.DEATH, group, row, pickle.dumps(death))

    def _end_decoders(self) -> None:
        """Kill all decoders and wait for their end."""
        pids = list(filter(None, self._pids))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        for index in range(self._table.count):
            self._forget(index)
        self._causes.clear()

    def _forget(self, index: int) -> None:
        """Forget a decoder that has ended."""
        self._pids[index], self._table.since[index] = 0, 0


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return status.rpartition(b") ")[2].startswith(b"T")
