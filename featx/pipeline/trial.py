"""Speed that trial images predict for a run, and the likely cause if the run is slower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LEAST_SHARE = 0.7
"""Share of the predicted speed below which a run reports a cause."""

_MIN_RUN_S = 5.0
_MIN_BATCHES = 3
"""Least seconds of a run, and batches per replica, for a comparison with the trial.

A shorter run mostly waits for its first images and warms up, and in the end replicas are idle.
"""


@dataclass(frozen=True)
class Shortfall:
    """Comparison of a run with its trial.

    Attributes:
        share: speed of the run divided by the predicted speed, or None for a short run.
        cause: sentence on the likely cause if the share is below LEAST_SHARE, otherwise None.
    """

    share: float | None
    cause: str | None


@dataclass(frozen=True)
class TrialSpeed:
    """Seconds per image, measured on trial images; a busy second is one second of one decoder.

    Attributes:
        read_s: busy seconds per image for reading.
        decode_s: busy seconds per image for decoding.
        model_s: seconds per image for the model, with all CPU threads or the whole device.
        decoders: number of decoders.
        is_on_cpu: whether the model runs on the CPUs that also decode.
    """

    read_s: float
    decode_s: float
    model_s: float
    decoders: int
    is_on_cpu: bool

    @property
    def images_per_second(self) -> float:
        """Predicted speed of the slowest stage; on a CPU, decoding competes with the model."""
        loading_s = (self.read_s + self.decode_s) / self.decoders
        computing_s = self.model_s + (self.decode_s / self.decoders if self.is_on_cpu else 0.0)
        return 1 / max(loading_s, computing_s, 1e-9)

    def compare(
        self, seconds: Mapping[str, float], num_rows: int, elapsed_s: float, num_batches: float
    ) -> Shortfall:
        """Compare a run with its trial.

        Args:
            seconds: stage -> busy seconds of the run; for the model the mean over the replicas.
            num_rows: number of rows that the run computed.
            elapsed_s: seconds from the first batch to the last commit.
            num_batches: number of batches that each replica computed.
        """
        if elapsed_s < _MIN_RUN_S or num_batches < _MIN_BATCHES:
            return Shortfall(None, None)
        share = num_rows / elapsed_s / self.images_per_second
        return Shortfall(share, self._cause(seconds, num_rows) if share < LEAST_SHARE else None)

    def _cause(self, seconds: Mapping[str, float], num_rows: int) -> str:
        """Sentence on the stage that exceeds its trial most; copies and writing have no trial."""
        image_s = {stage: busy / num_rows for stage, busy in seconds.items()}
        loading = max(
            ("read", self.read_s), ("decode", self.decode_s), key=lambda x: image_s[x[0]] - x[1]
        )
        beyond = {
            "model": image_s["model"] - self.model_s,
            loading[0]: image_s["wait"],
            "copy": image_s["copy"],
            "write": image_s["write"] - image_s["model"],  # commits overlap with forward passes
            "statistics": image_s.get("statistics", 0.0),
        }
        stage = max(beyond, key=lambda name: beyond[name])
        if stage == "model":
            others = "the CPUs" if self.is_on_cpu else "the device"
            return (
                f"the model took {1e3 * image_s['model']:.3g} ms an image and "
                f"{1e3 * self.model_s:.3g} in its trial; do other programs use {others}?"
            )
        if stage in ("read", "decode"):
            name = {"read": "reading", "decode": "decoding"}[stage]
            return (
                f"the model waited {1e3 * image_s['wait']:.3g} ms an image for {name}, which took "
                f"{1e3 * image_s[stage]:.3g} ms of a thread and {1e3 * loading[1]:.3g} in its trial"
            )
        name = {"copy": "copying from the device", "write": "writing", "statistics": "summing up"}[
            stage
        ]
        return f"{name} took {1e3 * image_s[stage]:.3g} ms an image, and the trial has none of it"
