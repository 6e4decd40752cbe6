"""The trace of some batches of a run, for profile=true."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featx.base import is_own_process, log_message
from featx.store import layout

if TYPE_CHECKING:
    import torch

    from featx.storage import AtomicFolder

SKIPPED_BATCHES, RECORDED_BATCHES = 2, 8
"""Number of batches of profile=true that only warm up and fill the queues, and of recorded ones."""


class Timeline:
    """Records a few batches of a run, for profile=true; a context manager around the loop.

    All threads are recorded: the model, and the commit of a part. Images are read and decoded by
    other processes, for which the loop waits in the span "wait for images". The folder receives the
    trace file, `layout.TRACE`.
    """

    def __init__(self, disk: AtomicFolder, device: torch.device) -> None:
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity, profile, schedule

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
            acc_events=True,  # torch 2.11 warns without
            # The public API has no such option (torch 2.11 to 2.15); by default only the thread
            # that starts the profiler is recorded.
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
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
        try:
            with tempfile.TemporaryDirectory(prefix="featx-", ignore_cleanup_errors=True) as folder:
                path = Path(folder) / layout.TRACE
                profiled.export_chrome_trace(str(path))
                trace = path.read_bytes()
        except OSError as error:
            log_message(
                f"profile=true: no trace was written: {error} (TMPDIR names another folder). The "
                "run continues.",
                level="warning",
            )
            return
        self._disk.replace(self._disk.root / layout.TRACE, trace)
        log_message(f"profile: {self._disk.root / layout.TRACE} opens in https://ui.perfetto.dev")
