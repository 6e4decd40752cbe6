"""How fast a run should be, by the trial passes before it, and why it was slower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LEAST_SHARE = 0.7
"""A run that reaches less of its trial's rate says so."""

_MIN_RUN_S = 5.0
_MIN_BATCHES = 3
"""Batches of each replica, and seconds, below which the rate of a run means too little: it waits
for its first images, warms up its threads, and in the end some replicas have nothing to do."""


@dataclass(frozen=True)
class Shortfall:
    """A run beside its trial.

    Attributes:
        share: of the trial's rate, which the run reached; None for a run that is too short.
        cause: a sentence on a run that reached less than `LEAST_SHARE`; None otherwise.
    """

    share: float | None
    cause: str | None


@dataclass(frozen=True)
class TrialSpeed:
    """What the trial took for an image; a busy second is one of one thread.

    Attributes:
        read_s: busy seconds of reading.
        decode_s: busy seconds of decoding.
        model_s: seconds of the model, with all threads of a CPU or with the whole device.
        threads: that read and decode.
        is_on_cpu: whether the model computes on the CPUs that decode.
    """

    read_s: float
    decode_s: float
    model_s: float
    threads: int
    is_on_cpu: bool

    @property
    def images_per_second(self) -> float:
        """What the stages promise together: the slowest one, where decoding takes CPU time."""
        loading_s = (self.read_s + self.decode_s) / self.threads
        computing_s = self.model_s + (self.decode_s / self.threads if self.is_on_cpu else 0.0)
        return 1 / max(loading_s, computing_s, 1e-9)

    def compare(
        self, seconds: Mapping[str, float], rows: int, took_s: float, batches: float
    ) -> Shortfall:
        """How a run compares with its trial.

        Args:
            seconds: stage -> busy seconds of the run; of the model, the mean of the replicas.
            rows: that it computed.
            took_s: from its first batch to its last commit.
            batches: that each replica computed.
        """
        if took_s < _MIN_RUN_S or batches < _MIN_BATCHES:
            return Shortfall(None, None)
        share = rows / took_s / self.images_per_second
        return Shortfall(share, self._cause(seconds, rows) if share < LEAST_SHARE else None)

    def _cause(self, seconds: Mapping[str, float], rows: int) -> str:
        """The stage that took the most beyond its trial, which had no copying and no writing."""
        each = {stage: busy / rows for stage, busy in seconds.items()}
        loading = max(
            ("read", self.read_s), ("decode", self.decode_s), key=lambda x: each[x[0]] - x[1]
        )
        beyond = {
            "model": each["model"] - self.model_s,
            loading[0]: each["wait"],
            "copy": each["copy"],
            "write": each["write"] - each["model"],  # the next part is computed meanwhile
            "statistics": each.get("statistics", 0.0),
        }
        stage = max(beyond, key=lambda name: beyond[name])
        if stage == "model":
            others = "the CPUs" if self.is_on_cpu else "the device"
            return (
                f"the model took {1e3 * each['model']:.3g} ms an image and {1e3 * self.model_s:.3g}"
                f" in its trial; do other programs use {others}?"
            )
        if stage in ("read", "decode"):
            name = {"read": "reading", "decode": "decoding"}[stage]
            return (
                f"the model waited {1e3 * each['wait']:.3g} ms an image for {name}, which took "
                f"{1e3 * each[stage]:.3g} ms of a thread and {1e3 * loading[1]:.3g} in its trial"
            )
        name = {"copy": "copying from the device", "write": "writing", "statistics": "summing up"}[
            stage
        ]
        return f"{name} took {1e3 * each[stage]:.3g} ms an image, and the trial has none of it"
