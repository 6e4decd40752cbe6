"""Rows of a batch, those of them that failed, how many a run accepts, and how they are reported."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from featx.base import log_message, name_text
from featx.config import Config
from featx.errors import EXIT_TOO_MANY_FAILURES, NonFiniteError, TooManyFailuresError, counted
from featx.pipeline.run_context import RunContext
from featx.types import Batch, Failure, ImageFault, Status

if TYPE_CHECKING:
    from featx.engine import Engine

EARLY_STOP_S = 60.0
"""Least seconds of remaining work for which too many failures end a run early."""

_GROUPS_SHOWN = 10
"""Number of different messages of failed images that are printed."""


@dataclass(frozen=True)
class Rows:
    """Features of the n rows of a batch.

    Attributes:
        features: dataset name -> (n, ...) array in the store's dtype (bfloat16 as uint16 bits), or
            float32 tensor on the device for statistics.
        underflow_rows: layer -> number of underflow rows: their largest magnitude is below 6.1e-5,
            the smallest normal float16.
        checksums: (n,) checksums of the encoded images, or None if the batch has none.
        damaged: rows whose images are damaged and were accepted.
    """

    features: Mapping[str, Any]
    failures: list[Failure]
    underflow_rows: Counter[str] = field(default_factory=Counter)
    checksums: npt.NDArray[np.uint64] | None = None
    damaged: Collection[int] = ()


def compute_rows(context: RunContext, engine: Engine, batch: Batch) -> Rows:
    """Compute the features of one batch, without padding; find non-finite and underflow rows.

    Raises NonFiniteError if a feature is NaN or infinite, and nonfinite=error.
    """
    from featx.engine import stored_bits

    windows = context.windows
    labels, keys = context.labels_and_keys(batch)
    if windows is None:
        rows = engine.rows(batch.images, labels, keys=keys)
    elif batch.failures:
        rows = windows.failed_rows()
    else:
        try:  # with windows, a batch is one image
            rows = windows.rows(engine, batch.images[0], keys)
        except ImageFault as fault:
            failure = Failure(batch.start, keys[0], fault.status, fault.error, str(fault))
            batch = replace(batch, failures=[failure])
            rows = windows.failed_rows()
    failures = failures_of(context, engine, batch, rows.finite)
    failed = {failure.row for failure in failures}
    ok = [i for i in range(batch.count) if batch.start + i not in failed]
    underflow_rows = Counter({name: int(small[ok].sum()) for name, small in rows.underflow.items()})
    features = {name: stored_bits(value[: batch.count]) for name, value in rows.features.items()}
    return Rows(features, failures, underflow_rows, batch.checksums, batch.damaged)


def failures_of(
    context: RunContext,
    engine: Engine,
    batch: Batch,
    finite: Mapping[str, npt.NDArray[np.bool_]],
) -> list[Failure]:
    """Collect the failed rows of a batch: unreadable images and non-finite features.

    `finite` tells for each dataset, (B,), whether a row has neither NaN nor infinity. Raises
    NonFiniteError if one has, and nonfinite=error.
    """
    failures = list(batch.failures)
    failed = {failure.row for failure in failures}
    for name, is_finite in finite.items():
        for i in np.flatnonzero(~is_finite[: batch.count]).tolist():
            row = batch.start + i
            if row in failed:
                continue
            failed.add(row)
            failures.append(_non_finite(context, engine, batch, row, name))
    return failures


def _non_finite(context: RunContext, engine: Engine, batch: Batch, row: int, layer: str) -> Failure:
    """Failure of a row with a NaN, infinite or too large feature."""
    key, number = bytes(context.listing.keys[row]), row - batch.start
    labels, keys = context.labels_and_keys(batch)
    if context.windows is None:
        reason = engine.explain(batch.images, labels, number, layer, keys)
    else:
        reason = context.windows.explain(engine, batch.images[number], layer, keys)
    if context.config.nonfinite == "error":
        remedies = ["mark such rows and continue: nonfinite=record"]
        if engine.compute.precision != "fp32":
            remedies.insert(0, "compute more exactly: precision=fp32")
        if context.specs[0].dtype != "float32":
            remedies.insert(0, "store larger values: dtype=float32")
        raise NonFiniteError(
            f"layer {layer}, row {row} ({name_text(key)}): {reason}. Nothing committed is lost. "
            f"To {'; to '.join(remedies)}. That needs overwrite=true or a new out."
        )
    return Failure(row, key, Status.NON_FINITE, "NonFiniteError", f"layer {layer}: {reason}")


def refuse_failures(
    allowed: int, num_failed: int, num_done: int, num_rows: int, remaining_s: float
) -> None:
    """Raise TooManyFailuresError if more images failed than allowed and much work is left."""
    if num_failed > allowed and remaining_s >= EARLY_STOP_S:
        raise TooManyFailuresError(
            f"{num_failed} of the first {counted(num_done, 'image')} failed, more than the "
            f"{allowed} that max_failures allows of {num_rows} in all, and about "
            f"{remaining_s / 60:.0f} minutes of work are left. What is done is kept; failures.csv "
            "names the images. To resume, run the same command with a larger max_failures."
        )


def failures_text(failures: Sequence[Failure]) -> str:
    """Number of failed images by status and message, most frequent first, with one example each.

    Messages that differ in numbers only are equal.
    """
    groups: dict[tuple[Status, str], list[Failure]] = {}
    for failure in failures:
        message = re.sub(r"\d+", "0", failure.message)
        groups.setdefault((failure.status, message), []).append(failure)
    ordered = sorted(groups.values(), key=len, reverse=True)
    lines = [f"{counted(len(failures), 'image')} failed:"]
    for group in ordered[:_GROUPS_SHOWN]:
        example, count = group[0], len(group)
        lines.append(
            f"  {count} {example.status.label}, such as {name_text(example.key)}: {example.message}"
        )
    others = Counter(failure.status for group in ordered[_GROUPS_SHOWN:] for failure in group)
    lines += [
        f"  {count} {status.label} for other reasons" for status, count in others.most_common()
    ]
    return "\n".join(lines) + "\n"


def exit_code(config: Config, num_rows: int, num_failed: int, what_became: str) -> int:
    """Exit code of a run: 0, or EXIT_TOO_MANY_FAILURES with a message on stderr.

    The latter stands for more failures than max_failures allows, and for runs without any good row.
    `what_became` is a sentence on the failed rows, which ends the message.
    """
    allowed = config.allowed_failures(num_rows)
    if num_failed <= allowed and num_failed < num_rows:
        return 0
    limit = f"more than max_failures={config.max_failures} ({counted(allowed, 'image')})"
    if num_failed == num_rows:
        limit = "all of them"
    log_message(f"{num_failed} of {counted(num_rows, 'image')} failed, {limit}. {what_became}")
    return EXIT_TOO_MANY_FAILURES
