"""profile=true: trace of some batches of a run by torch.profiler, for https://ui.perfetto.dev."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from featx.base import is_own_process, log_message
from featx.storage import AtomicFolder
from featx.store import layout

SKIPPED_BATCHES, RECORDED_BATCHES = 2, 8
"""Number of batches that only warm up and fill the queues, and of recorded batches after them."""

span = record_function
"""Context manager that names a stretch of time in this thread; about 1 µs without a profiler."""


class Timeline:
    """Records a few batches of a run; a context manager around the loop.

    All threads are recorded: the model, and the commit of a part. Images are read and decoded by
    other processes, for which the loop waits in the span "wait for images". The folder receives the
    trace file, `layout.TRACE`.
    """

    def __init__(self, disk: AtomicFolder, device: torch.device) -> None:
        if is_own_process():
            os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # silences warnings about missing GPUs
        self._disk = disk
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._stack = contextlib.ExitStack()
        self._num_batches = 0
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=SKIPPED_BATCHES, active=RECORDED_BATCHES, repeat=1),
            on_trace_ready=self._write,
            # The public API has no such option (torch 2.11 to 2.15); by default only the thread
            # that starts the profiler is recorded.
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )

    def __enter__(self) -> Timeline:
        self._stack.enter_context(self._profile)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        if self._num_batches <= SKIPPED_BATCHES:
            log_message(
                f"profile=true: no trace was written, for the run had fewer than "
                f"{SKIPPED_BATCHES + 1} batches."
            )

    def step(self) -> None:
        self._num_batches += 1
        self._profile.step()

    def _write(self, profiled: Any) -> None:
        """Write the trace file; called by the profiler after the recorded batches."""
        if self._num_batches <= SKIPPED_BATCHES:
            return
        # torch writes to a local path only; the trace may belong into a bucket, and appears there
        # whole.
        with tempfile.TemporaryDirectory(prefix="featx-") as folder:
            path = Path(folder) / layout.TRACE
            profiled.export_chrome_trace(str(path))
            self._disk.replace(self._disk.root / layout.TRACE, path.read_bytes())
        log_message(f"profile: {self._disk.root / layout.TRACE} opens in https://ui.perfetto.dev")
