"""profile=true: some batches of a run as torch.profiler sees them, a file for ui.perfetto.dev."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from featx.base.console import log_message
from featx.storage.local_folder import AtomicFolder
from featx.store import layout

TRACE = layout.TRACE
SKIPPED_BATCHES, RECORDED_BATCHES = 2, 8
"""The first batches fill the queues and warm up; a few after them show how it goes on."""

span = record_function
"""A named stretch of time in this thread; without a timeline it costs a microsecond."""


class Timeline:
    """Records a few batches of a run; a context manager around its loop.

    All threads are recorded: reading and decoding, the model, and the commit of a part.

    Args:
        disk: of the folder that gets TRACE.
        device: that computes.
    """

    def __init__(self, disk: AtomicFolder, device: torch.device) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # else it talks of GPUs that are not there
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
            # Public API has no word for it (torch 2.11 to 2.15), and one thread is not the run.
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
        """A batch is done."""
        self._num_batches += 1
        self._profile.step()

    def _write(self, profiled: Any) -> None:
        if self._num_batches <= SKIPPED_BATCHES:
            return
        with tempfile.TemporaryDirectory(prefix="featx-") as folder:
            path = Path(folder) / TRACE
            profiled.export_chrome_trace(str(path))
            self._disk.replace(self._disk.root / TRACE, path.read_bytes())
        log_message(f"profile: {self._disk.root / TRACE} opens in https://ui.perfetto.dev")
