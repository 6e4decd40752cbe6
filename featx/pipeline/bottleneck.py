"""Bottleneck of a run: the stage that the others waited for."""

from __future__ import annotations

from collections.abc import Mapping

from featx.base import WAITING_SHARE

SLOW_RATIO = 1.4
"""Seconds of the model for an image, over those of the trial, from which on a run says so."""

LONG_RUN_S = 5.0
"""Seconds from which on the first batches no longer dominate the seconds of the model."""


def bottleneck(
    seconds: Mapping[str, float],
    elapsed_s: float,
    decoders: int,
    device: str,
    precision: str,
    model_ratio: float = 1.0,
) -> str:
    """Describe the stage that the others waited for, its share of the time, and what would help."""
    wait_share = seconds["wait"] / elapsed_s
    if wait_share > WAITING_SHARE:
        stage = max(("read", "decode"), key=lambda stage: seconds[stage])
        busy = f"{seconds[stage] / elapsed_s:.1f} of {decoders} decoders busy, "
        busy += f"{wait_share:.0%} of the time "
        return {
            "read": f"reading images: {busy}waited for; a faster disk or network would help",
            "decode": f"decoding: {busy}waited for; more CPU cores would help",
        }[stage]
    known = ("model", "copy", "write", "statistics")
    stage = max((s for s in known if s in seconds), key=lambda stage: seconds[stage])
    model = "a GPU or an earlier layer" if device == "cpu" else "compile=true or an earlier layer"
    if precision == "fp32":
        model += ", or precision=auto,"
    text = {
        "model": f"the model: {{share:.0%}} of the time; {model} would help",
        "copy": "copying from the device: {share:.0%} of the time; a reduction moves less",
        "write": "writing: {share:.0%} of the time; a reduction leaves less to write",
        "statistics": "summing up: {share:.0%} of the time; a reduction or "
        "stats.covariance=diagonal leaves less to sum",
    }[stage]
    sentence = text.format(share=seconds[stage] / elapsed_s)
    if stage == "model" and model_ratio >= SLOW_RATIO and elapsed_s >= LONG_RUN_S:
        sentence += f"; an image took {model_ratio:.1f} times as long as in the trial before the "
        sentence += "run, as if other programs used the device"
    return sentence
