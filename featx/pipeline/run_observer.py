"""What follows a run: its batches, its committed parts, and its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from featx.types import Batch, Failure, Part


class RunObserver:
    """Base of what follows a run; every method does nothing until a subclass overrides it.

    Batches and parts are told where the process of the command computes them, not where workers do.

    Attributes:
        wants_parts: whether the run waits for the commit of each part to tell of it.
    """

    wants_parts = False

    def batch_computed(
        self, batch: Batch, features: Mapping[str, npt.NDArray[Any]], failures: Sequence[Failure]
    ) -> None:
        """Follow a batch.

        Args:
            batch: n rows of the run.
            features: dataset name -> (n, ...) as stored.
            failures: the rows that failed.
        """

    def part_committed(self, part: Part, seconds: Mapping[str, float]) -> None:
        """Follow a part that was committed.

        Args:
            part: the rows since the last call.
            seconds: stage -> busy seconds of the run so far.
        """

    def run_finished(self) -> None:
        """Follow the end of a run whose store is complete; the model is still loaded."""
