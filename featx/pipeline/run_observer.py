"""Observer of a run: notified of batches, committed parts and the end of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from featx.types import Batch, Failure, Part


class RunObserver:
    """Base class of observers; every method does nothing until a subclass overrides it.

    Batches and parts are reported only if the process of the command computes them, not for
    workers.

    Attributes:
        wants_parts: whether the run waits for the commit of each part in order to report it.
    """

    wants_parts = False

    def batch_computed(
        self, batch: Batch, features: Mapping[str, npt.NDArray[Any]], failures: Sequence[Failure]
    ) -> None:
        """Called after each batch.

        Args:
            batch: n rows of the run, followed by padding.
            features: dataset name -> (n, ...) array in the store's dtype.
            failures: failed rows of the batch.
        """

    def part_committed(self, part: Part, seconds: Mapping[str, float]) -> None:
        """Called after each committed part.

        Args:
            part: part that was committed.
            seconds: stage -> busy seconds of the run so far.
        """

    def run_finished(self) -> None:
        """Called when the run has ended without an error, while the model is still loaded."""
