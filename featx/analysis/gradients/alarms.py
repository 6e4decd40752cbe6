"""Alarms for NaN, infinite, exploding and vanishing gradients, from the norms of one step."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from featx.analysis.gradients.gradient_hooks import GradientHooks
from featx.analysis.gradients.norms import norms_by_module
from featx.errors import ConfigError, RunError

MEDIAN_STEPS = 10
"""Number of steps of an optimizer before `exploding_ratio` applies."""


@dataclass(frozen=True)
class Limits:
    """Limits for alarms. NaN and infinity always raise an alarm; None disables a limit.

    Raises:
        ConfigError: a limit is out of its range.
    """

    exploding_norm: float | None = 1e6
    """Upper limit of the norm of all gradients of a step."""
    exploding_ratio: float | None = 100.0
    """Upper limit of the same norm as a multiple of its median over the recorded steps. Applies
    from the 11th step on."""
    vanishing_ratio: float | None = 1e-8
    """Lower limit of the norm of a module's own parameters, relative to the largest such norm in
    the step."""
    vanishing_steps: int = 10
    """Number of consecutive steps below that limit that raise an alarm."""

    def __post_init__(self) -> None:
        for name in ("exploding_norm", "exploding_ratio", "vanishing_ratio"):
            check_positive(f"limits.{name}", getattr(self, name))
        if self.vanishing_ratio is not None and self.vanishing_ratio >= 1:
            raise ConfigError(
                f"limits.vanishing_ratio={self.vanishing_ratio}: expected a share below 1."
            )
        if self.vanishing_steps < 1:
            raise ConfigError(f"limits.vanishing_steps={self.vanishing_steps}: expected 1 or more.")


@dataclass(frozen=True)
class Alarm:
    """One alarm. `str(alarm)` is a sentence with all its details."""

    kind: str
    """'nan', 'inf', 'exploding' or 'vanishing'."""
    step: int
    """Number of the step, counted from 1 in the block."""
    layers: tuple[str, ...]
    """Modules where the gradient became alarming, usually one; '' is the watched model itself.
    Empty if it arose outside the model."""
    parameters: tuple[str, ...]
    """Parameters whose gradients are alarming, in the order of the model."""
    norm: float
    """Norm of the first of `parameters`; for 'exploding', norm of all gradients."""
    reason: str
    """Sentence with the values, limits and modules."""

    def __str__(self) -> str:
        return f"{self.kind} gradient in step {self.step}: {self.reason}"


class GradientAlarm(RunError):  # noqa: N818, an alarm is what it is
    """A gradient vanishes, explodes, or is NaN or infinite; the optimizer's step was not executed.

    Attributes:
        alarm: the alarm.
    """

    def __init__(self, alarm: Alarm) -> None:
        super().__init__(alarm)
        self.alarm = alarm


@dataclass(frozen=True)
class Step:
    """Gradient norms of an optimizer step, before clipping and without a GradScaler's factor."""

    number: int
    """Number of the step, counted from 1 in the block."""
    norm: float
    """L2 norm over all of `parameters`."""
    parameters: dict[str, float]
    """L2 norm of each parameter that has a gradient. With `clip_value`, the largest norm that
    arrived in a backward pass of the step, before clamping."""
    layers: dict[str, float]
    """L2 norm of the gradient at the output of each module, over its calls and backward passes.
    Only modules that a gradient reached; '' is the model."""


class AlarmDetector:
    """Detector of alarms in a sequence of steps.

    Args:
        limits: limits for alarms.
        types: module name -> class name, for messages.
        keep_steps: number of steps whose norms form the median.
    """

    def __init__(self, limits: Limits, types: Mapping[str, str], keep_steps: int) -> None:
        self._limits = limits
        self._types = types
        self._keep_steps = keep_steps
        self._totals: WeakKeyDictionary[Any, deque[float]] = WeakKeyDictionary()
        self._quiet_steps: dict[str, int] = {}

    def alarms(self, step: Step, hooks: GradientHooks, owner: object) -> list[Alarm]:
        """Return the alarms of a step, the worst first.

        Args:
            step: norms of the step.
            hooks: hooks whose norms are on the CPU, to find the module where a NaN
                arose.
            owner: the optimizer; each has its own median.
        """
        alarms = self._nonfinite_alarm(step, hooks) or self._explosion_alarm(step, owner)
        if math.isfinite(step.norm):
            self._totals.setdefault(owner, deque(maxlen=self._keep_steps)).append(step.norm)
            alarms += self._vanishing_alarm(step)
        return alarms

    def _nonfinite_alarm(self, step: Step, hooks: GradientHooks) -> list[Alarm]:
        """Return an alarm if a norm is NaN or infinite."""
        bad = {n: x for n, x in step.parameters.items() if not math.isfinite(x)}
        passed = [x for x in step.layers.values() if not math.isfinite(x)]
        if not bad and not passed:
            return []
        layers, where = self._origin(step, bad, hooks)
        # The value at the origin comes first, because an infinity becomes NaN in later layers.
        parameter_norms = [x for n, x in bad.items() if n.rpartition(".")[0] in layers]
        norm = [*hooks.nonfinite_input_norms(layers), *parameter_norms, *bad.values(), *passed][0]
        kind = "nan" if math.isnan(norm) else "inf"
        names = ", ".join(list(bad)[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        reason = f"it {where}; {names or 'no parameter'} got it."
        return [Alarm(kind, step.number, layers, tuple(bad), norm, reason)]

    def _origin(
        self, step: Step, bad: Mapping[str, float], hooks: GradientHooks
    ) -> tuple[tuple[str, ...], str]:
        """Return the modules where a non-finite gradient arose, and the text of a message."""
        modules = tuple(dict.fromkeys(name.rpartition(".")[0] for name in bad))
        origins = hooks.origins(modules)
        if origins:
            names = " or ".join(f"{n or '(model)'} ({self._types[n]})" for n in origins)
            return tuple(origins), f"arose in {names}, whose output got a finite gradient"
        if not math.isfinite(step.layers.get("", 0.0)):
            return (), "was there when it reached the model's output: look at the loss"
        return modules, "cannot be traced to one module, as no flow was seen there"

    def _explosion_alarm(self, step: Step, owner: object) -> list[Alarm]:
        """Return an alarm if the norm of all gradients exceeds a limit."""
        limits = self._limits
        totals = self._totals.get(owner, ())
        median = statistics.median(totals) if len(totals) >= MEDIAN_STEPS else 0.0
        if limits.exploding_norm is not None and step.norm > limits.exploding_norm:
            limit = f"the limit {limits.exploding_norm:.3g}"
        elif limits.exploding_ratio is not None and 0 < median * limits.exploding_ratio < step.norm:
            limit = f"{limits.exploding_ratio:.3g} times the median {median:.3g}"
        else:
            return []
        largest = max(step.parameters, key=step.parameters.__getitem__)
        reason = (
            f"the norm {step.norm:.3g} of all gradients is over {limit}; the largest is {largest} "
            f"with {step.parameters[largest]:.3g}."
        )
        module = largest.rpartition(".")[0]
        return [Alarm("exploding", step.number, (module,), (largest,), step.norm, reason)]

    def _vanishing_alarm(self, step: Step) -> list[Alarm]:
        """Return an alarm for modules whose norms have been below the limit for long enough."""
        modules = norms_by_module(step.parameters)
        largest = max(modules.values(), default=0.0)
        if self._limits.vanishing_ratio is None or largest == 0:
            return []
        vanished = []
        for name, norm in modules.items():
            is_quiet = norm < self._limits.vanishing_ratio * largest
            self._quiet_steps[name] = self._quiet_steps.get(name, 0) + 1 if is_quiet else 0
            if self._quiet_steps[name] == self._limits.vanishing_steps:
                vanished.append(name)
        if not vanished:
            return []
        parameters = tuple(n for n in step.parameters if n.rpartition(".")[0] in vanished)
        top, norm = max(modules, key=modules.__getitem__), modules[vanished[0]]
        reason = (
            f"for {self._limits.vanishing_steps} steps, "
            f"{', '.join(name or '(model)' for name in vanished)} got less than "
            f"{self._limits.vanishing_ratio:.3g} of the largest norm (now {norm:.3g}, and "
            f"{largest:.3g} in {top or '(model)'})."
        )
        return [Alarm("vanishing", step.number, tuple(vanished), parameters, norm, reason)]


def check_positive(name: str, value: float | None) -> None:
    """Check an argument that is a limit: None or a finite number above 0.

    Args:
        name: name of the argument, for the error message.
        value: its value.

    Raises:
        ConfigError: it is something else.
    """
    if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
        raise ConfigError(f"{name}={value!r}: expected a finite number above 0, or None.")
