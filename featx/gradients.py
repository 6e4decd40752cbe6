"""Gradients in training: clipping by value or norm, and alarms that name the layer and the step."""

from __future__ import annotations

import contextlib
import math
import numbers
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import optimizer as optimizers

from featx.base import TensorHooks, check_is_module, refuse_transformed, table
from featx.errors import ConfigError, LayerError, ModelError, RunError, nearest
from featx.layers import Edge, OpenCall, every_call, is_recomputed

__all__ = ["Alarm", "GradientAlarm", "GradientLog", "Limits", "Step", "watch"]

_MEDIAN_STEPS = 10
"""Number of steps of an optimizer before `Limits.exploding_ratio` applies."""


@dataclass(frozen=True)
class Limits:
    """Limits for alarms. NaN and infinity always raise an alarm; None disables a limit."""

    exploding_norm: float | None = 1e6
    """Upper limit of the norm of all gradients of a step."""
    exploding_ratio: float | None = 100.0
    """Upper limit of it as a multiple of its median over the recorded steps, from step 11 on."""
    vanishing_ratio: float | None = 1e-8
    """Lower limit of the norm of a module's own parameters, as a share of the largest such norm."""
    vanishing_steps: int = 10
    """Number of consecutive steps below that limit that raise an alarm."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _check_limit(f"limits.{name}", value, 1 if name == "vanishing_ratio" else math.inf)


@dataclass(frozen=True)
class Alarm:
    """One alarm. `str(alarm)` is a sentence with all its details."""

    kind: str
    """'nan', 'inf', 'exploding' or 'vanishing'."""
    step: int
    """Number of the step, counted from 1 in the block."""
    layers: tuple[str, ...]
    """Modules where the gradient became alarming; '' is the model; () if it came from outside."""
    parameters: tuple[str, ...]
    """Parameters whose gradients are alarming, in the order of the model."""
    norm: float
    """Norm of the gradient that is alarming; for 'exploding', of all gradients."""
    reason: str
    """Sentence with the values, limits and modules."""

    def __str__(self) -> str:
        return f"{self.kind} gradient in step {self.step}: {self.reason}"


class GradientAlarm(RunError):  # noqa: N818, an alarm is what it is
    """A gradient vanishes, explodes, or is not finite; `alarm` is the Alarm. The optimizer's step
    was not executed."""

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
    """L2 norm of each parameter with a gradient; with `clip_value` the largest that arrived in a
    backward pass, before clamping."""
    layers: dict[str, float]
    """L2 norm of the gradient at the output of each module that one reached, over its calls and
    backward passes; '' is the model."""


@dataclass(eq=False, repr=False)
class GradientLog:
    """Record of the steps and alarms of a `watch` block."""

    _model: nn.Module
    _clip_value: float | None
    _clip_norm: float | None
    _limits: Limits
    _on_alarm: str | Callable[[Alarm], None]
    _scaler: torch.amp.GradScaler | None
    steps: deque[Step]
    """The last `keep_steps` steps, oldest first."""
    alarms: deque[Alarm]
    """The last `keep_steps` alarms, oldest first."""

    def __post_init__(self) -> None:
        self._types = {name: type(m).__name__ for name, m in self._model.named_modules()}
        self._hooks = TensorHooks()
        self._flow: list[tuple[Edge, torch.Tensor]] = []
        self._arrived: dict[str, torch.Tensor] = {}
        self._clamped: set[int] = set()
        self._totals: WeakKeyDictionary[Any, deque[float]] = WeakKeyDictionary()
        self._quiet_steps: dict[str, int] = {}
        self._num_steps, self._last_scale = 0, 0.0
        self._note_versions()

    def step(self) -> None:
        """Judge and clip the gradients so far, for loops without torch.optim; unscaled gradients,
        if the loop has a GradScaler. Raises a GradientAlarm with on_alarm='raise'."""
        self._finish(dict(self._model.named_parameters()), self)

    def table(self) -> str:
        """Norms of each module over the kept steps: `output`, the last at its output, with minimum,
        median and maximum, and `parameters`, the last of its own parameters."""
        rows = []
        by_module = [_of_modules(step) for step in self.steps]
        for name, kind in self._types.items():
            flow = [step.layers[name] for step in self.steps if name in step.layers]
            own = [norms[name] for norms in by_module if name in norms]
            ranges = [flow[-1], min(flow), statistics.median(flow), max(flow)] if flow else []
            cells = [f"{x:.3g}" for x in ranges] or ["-"] * 4
            if flow or own:
                last = f"{own[-1]:.3g}" if own else "-"
                rows.append([name or "(model)", kind, str(max(len(flow), len(own))), *cells, last])
        header = ("layer", "type", "steps", "output", "min", "median", "max", "parameters")
        return table(header, rows, left=2)

    __repr__ = table

    def _begin(self, call: OpenCall, inputs: list[object]) -> None:
        """Forget gradients that the loop has thrown away before a new pass of the model, or before
        a call of a layer outside of one, as in `model.loss(x)`."""
        if call.parent is not None or not torch.is_grad_enabled() or is_recomputed():
            return
        if not all(isinstance(p, nn.Parameter) for p in self._model.parameters()):
            return  # torch.func.functional_call with tensors of its own
        self._check_versions()
        scale = self._last_scale if call.name else self._scale()
        is_skipped, self._last_scale = scale < self._last_scale, scale
        if is_skipped or all(p.grad is None for p in self._model.parameters()):
            self._arrived.clear()
            self._flow.clear()

    def _record_gradient(self, edge: Edge, grad: torch.Tensor) -> None:
        self._flow.append((edge, _norm("a module's output", grad)))

    def _scale(self) -> float:
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def _clamp_arrivals(self, name: str, parameter: nn.Parameter, limit: float) -> None:
        """Register a hook that records the norm of a parameter's gradient and clamps it."""

        def clamp(grad: torch.Tensor) -> torch.Tensor:
            norm, earlier = _norm(name, grad), self._arrived.get(name)
            if earlier is not None and parameter.grad is not None:
                norm = torch.maximum(earlier, norm)
            self._arrived[name] = norm
            if self._scaler is None:
                return grad.clamp(-limit, limit)
            # A scaler must see infinities, so that it skips the step and lowers its scale.
            bound = limit * self._scaler.scale(torch.ones((), device=grad.device))
            return torch.where(grad.isinf(), grad, grad.clamp(-bound, bound))

        if is_lazy(parameter):
            return
        if parameter.requires_grad and id(parameter) not in self._clamped:
            self._clamped.add(id(parameter))
            self._hooks.add(parameter, clamp)

    def _note_versions(self, *_: object) -> None:
        # The first pass of a lazy module writes its parameters, and a model those of its frozen
        # momentum encoder.
        self._versions = {
            id(p): p._version
            for p in self._model.parameters()
            if p.requires_grad and not is_lazy(p)
        }

    def _check_versions(self) -> None:
        """Raise a RunError if parameters changed after a backward pass without a step."""
        before = self._versions
        self._note_versions()
        is_changed = any(before.get(key, now) != now for key, now in self._versions.items())
        if is_changed and (self._flow or self._arrived):
            raise RunError(
                "the parameters were changed after a backward pass, but no step of a torch.optim "
                "optimizer was seen, so nothing was judged or clipped by norm. Call log.step() "
                "before your own update."
            )

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Hook before each step of any torch.optim optimizer; it wraps the closure if any."""
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters = {n: p for n, p in self._model.named_parameters() if id(p) in updated}
        # Fused optimizers unscale the gradients and skip overflowed steps inside `step`.
        overflow = getattr(optimizer, "found_inf", None)
        if not parameters or (overflow is not None and overflow.any()):
            return None
        factor = float(getattr(optimizer, "grad_scale", None) or 1)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._finish(parameters, optimizer, factor)
            return None

        def watched_closure() -> object:
            loss = closure()
            with torch.no_grad():
                self._finish(parameters, optimizer, factor)
            return loss

        return args[:1], {**kwargs, "closure": watched_closure}

    def _finish(
        self, parameters: Mapping[str, nn.Parameter], owner: object, factor: float = 1.0
    ) -> None:
        """Record, judge and clip the gradients of one step, which still have a factor."""
        grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        step, flow = self._measure(grads, factor)
        self.steps.append(step)
        totals = self._totals.setdefault(owner, deque(maxlen=self.steps.maxlen))
        alarms = [*self._nonfinite_alarm(step, flow)] or [*self._explosion_alarm(step, totals)]
        if math.isfinite(step.norm):
            totals.append(step.norm)
            alarms += self._vanishing_alarm(step)
        self.alarms.extend(alarms)
        is_clipped = self._clip_value is not None or self._clip_norm is not None
        for alarm in alarms:
            if callable(self._on_alarm):
                self._on_alarm(alarm)
            elif self._on_alarm == "raise" and not (is_clipped and alarm.kind == "exploding"):
                raise GradientAlarm(alarm)
        if self._clip_value is not None:
            # Parameters that were added or unfrozen inside the block have no hook yet.
            for name in (name for name in grads if id(parameters[name]) not in self._clamped):
                nn.utils.clip_grad_value_(parameters[name], self._clip_value * factor)
                self._clamp_arrivals(name, parameters[name], self._clip_value)
        if self._clip_norm is not None and grads:
            total = nn.utils.get_total_norm(list(grads.values())) / factor
            clipped = [parameters[name] for name in grads]
            nn.utils.clip_grads_with_norm_(clipped, self._clip_norm, total)

    def _measure(
        self, grads: Mapping[str, torch.Tensor], factor: float
    ) -> tuple[Step, list[tuple[Edge, float]]]:
        """The norms of a step, copied to the CPU together, and those of the flow as it arrived."""
        scale, norms = self._scale(), []
        for name, grad in grads.items():
            arrived = self._arrived.pop(name, None)
            norms.append(_norm(name, grad) / factor if arrived is None else arrived / scale)
        norms += [norm / scale for _, norm in self._flow]
        values = torch.stack([x.to(norms[0].device) for x in norms]).tolist() if norms else []
        own = dict(zip(grads, values, strict=False))
        edges = [edge for edge, _ in self._flow]
        flow = list(zip(edges, values[len(own) :], strict=True))
        self._flow.clear()
        reached = _totals((call.name, x) for edge, x in flow for call in edge.producers)
        layers = {name: reached[name] for name in self._types if name in reached}
        self._num_steps += 1
        return Step(self._num_steps, _total(own.values()), own, layers), flow

    def _nonfinite_alarm(self, step: Step, flow: Sequence[tuple[Edge, float]]) -> list[Alarm]:
        """An alarm if a norm is NaN or infinite, with the modules where it arose.

        These read the first tensor whose gradient was not finite, or run around the module that
        made it, or own the parameter.
        """
        bad = {name: x for name, x in step.parameters.items() if not math.isfinite(x)}
        first = next(((edge, x) for edge, x in flow if not math.isfinite(x)), None)
        if first is not None:
            edge, norm = first
            reached = {call for each, _ in flow for call in each.producers}
            consumers = [call for call in edge.consumers if call in reached]
            outer = {parent for call in consumers for parent in call.enclosing}
            around = [parent for call in edge.producers[-1:] for parent in call.enclosing[:1]]
            calls = [call for call in consumers if call not in outer] or around
            layers = list(dict.fromkeys(call.name for call in calls))
        elif bad:
            norm = next(iter(bad.values()))
            layers = list(dict.fromkeys(name.rpartition(".")[0] for name in bad))
        else:
            return []
        where = " or ".join(
            f"{name or '(model)'} ({self._types.get(name, 'new')})" for name in layers
        )
        arose = f"arose in {where}" if layers else "came to the model's output: look at the loss"
        if first is None and not step.layers.keys() & set(layers):
            arose = "cannot be traced to one module, as no flow was seen there"
        names = ", ".join(list(bad)[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        reason = f"it {arose}; {names or 'no parameter'} got it."
        kind = "nan" if math.isnan(norm) else "inf"
        return [Alarm(kind, step.number, tuple(layers), tuple(bad), norm, reason)]

    def _explosion_alarm(self, step: Step, totals: Sequence[float]) -> list[Alarm]:
        norm, ratio = self._limits.exploding_norm, self._limits.exploding_ratio
        median = statistics.median(totals) if len(totals) >= _MEDIAN_STEPS else 0.0
        if norm is not None and step.norm > norm:
            limit = f"the limit {norm:.3g}"
        elif ratio is not None and 0 < median * ratio < step.norm:
            limit = f"{ratio:.3g} times the median {median:.3g}"
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
        """An alarm for modules whose norms have been below the limit for long enough."""
        modules, limits = _of_modules(step), self._limits
        top = max(modules, key=modules.__getitem__, default="")
        if limits.vanishing_ratio is None or not modules.get(top):
            return []
        for name, norm in modules.items():
            is_quiet = norm < limits.vanishing_ratio * modules[top]
            self._quiet_steps[name] = self._quiet_steps.get(name, 0) + 1 if is_quiet else 0
        quiet = [n for n in modules if self._quiet_steps[n] == limits.vanishing_steps]
        if not quiet:
            return []
        norm = modules[quiet[0]]
        reason = (
            f"for {limits.vanishing_steps} steps, {', '.join(n or '(model)' for n in quiet)} got "
            f"less than {limits.vanishing_ratio:.3g} of the largest norm (now {norm:.3g}, and "
            f"{modules[top]:.3g} in {top or '(model)'})."
        )
        parameters = tuple(n for n in step.parameters if n.rpartition(".")[0] in quiet)
        return [Alarm("vanishing", step.number, tuple(quiet), parameters, norm, reason)]


@contextlib.contextmanager
def watch(
    model: nn.Module,
    *,
    clip_value: float | None = None,
    clip_norm: float | None = None,
    limits: Limits | None = None,
    on_alarm: str | Callable[[Alarm], None] = "raise",
    layers: str | Sequence[str] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    keep_steps: int = 100,
) -> Iterator[GradientLog]:
    """Watch the gradients of a training loop inside the block, and optionally clip them.

    A step is one step of a torch.optim optimizer on parameters of this model. Without such an
    optimizer, call `log.step()` before your own update. Gradients that no step has used when the
    block ends without an exception form a last step. Blocks may be nested.

    Args:
        model: any module; all hooks are removed at the end.
        clip_value: limit of each element of the gradient that arrives at a parameter in a backward
            pass, as by torch.nn.utils.clip_grad_value_.
        clip_norm: limit of the L2 norm of the gradients of a step, as by
            torch.nn.utils.clip_grad_norm_ before it.
        limits: limits for alarms; None for the defaults of `Limits`.
        on_alarm: 'raise' raises a GradientAlarm before the optimizer changes a parameter; 'record'
            only adds to `log.alarms`; a function is called with each alarm. If gradients are
            clipped, an explosion is recorded and not raised.
        layers: dotted name of a module, or several, whose flow is watched in addition to the
            model's own; None for all. An empty list is fastest, but a NaN is then not traced to its
            module.
        scaler: GradScaler of the loop, required if it has one: limits and clipping apply to the
            unscaled gradients, and a step that the scaler skips is not an alarm.
        keep_steps: number of steps and alarms that are kept, and of steps that form the median.

    Raises:
        ConfigError: an argument is out of its range, or a gradient is sparse.
        LayerError: `layers` contains a name that is not a module.
        ModelError: the model is no module or TorchScript, or its parameters are sharded.
        GradientAlarm: with on_alarm='raise'.
        RunError: the parameters changed without a step.
    """
    check_is_module(model)
    _check_limit("clip_value", clip_value)
    _check_limit("clip_norm", clip_norm)
    if not callable(on_alarm) and on_alarm not in ("raise", "record"):
        raise ConfigError(f"on_alarm={on_alarm!r}: expected 'raise', 'record' or a function.")
    if not isinstance(keep_steps, numbers.Integral) or keep_steps < _MEDIAN_STEPS:
        raise ConfigError(
            f"keep_steps={keep_steps!r}: expected a whole number of {_MEDIAN_STEPS} or more."
        )
    if not isinstance(limits, Limits | None):
        raise ConfigError(f"limits={limits!r}: expected featx.gradients.Limits(...), or None.")
    _refuse_sharded(model)
    steps, alarms = deque[Step](maxlen=keep_steps), deque[Alarm](maxlen=keep_steps)
    limits = limits or Limits()
    log = GradientLog(model, clip_value, clip_norm, limits, on_alarm, scaler, steps, alarms)
    layers = [layers] if isinstance(layers, str) else layers
    for name in layers or ():
        if name not in log._types:
            raise LayerError(f"no module {name!r} to watch.{nearest(name, log._types)}")
    names = None if layers is None else {"", *layers}
    with contextlib.ExitStack() as stack:
        stack.callback(log._hooks.remove)
        stack.enter_context(
            every_call(model, log._begin, lambda *_: None, log._record_gradient, names)
        )
        if clip_value is not None:
            for name, parameter in model.named_parameters():
                log._clamp_arrivals(name, parameter, clip_value)
        before, after = log._before_optimizer, log._note_versions
        stack.callback(optimizers.register_optimizer_step_pre_hook(before).remove)
        stack.callback(optimizers.register_optimizer_step_post_hook(after).remove)
        yield log
        # The gradients of a GradScaler are still scaled here; unscaling them is the loop's task.
        if scaler is None and (log._flow or log._arrived):
            log._check_versions()
            log.step()


def _refuse_sharded(model: nn.Module) -> None:
    """Raise ModelError if a process has only a part of each parameter (FSDP, DTensor)."""
    is_sharded = any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules())
    if is_sharded or any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise ModelError(
            "the parameters of the model are sharded (FSDP or DTensor), and a process has the "
            "gradients of its part only; featx.gradients needs whole ones. Use "
            "DistributedDataParallel, or torch.nn.utils.clip_grad_norm_ without featx."
        )


def _norm(name: str, x: torch.Tensor) -> torch.Tensor:
    """L2 norm, in float64 where there is one: squares of 1e-25 underflow in float32."""
    refuse_transformed(f"the gradient of {name}", x)
    if x.is_nested:
        x = torch.cat([part.flatten() for part in x.unbind()])
    if x.layout != torch.strided:
        raise ConfigError(
            f"the gradient of {name} is sparse, which featx.gradients does not measure; build the "
            "layer with sparse=False."
        )
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    norm: torch.Tensor = torch.linalg.vector_norm(
        x.detach(), dtype=torch.promote_types(x.dtype, wide)
    )
    return norm


def _total(norms: Iterable[float]) -> float:
    """Norm of the whole from the norms of its parts; NaN if one of them is NaN."""
    norms = list(norms)
    return math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)


def _totals(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    norms: dict[str, list[float]] = {}
    for name, norm in parts:
        norms.setdefault(name, []).append(norm)
    return {name: _total(each) for name, each in norms.items()}


def _of_modules(step: Step) -> dict[str, float]:
    """Norm of the own parameters of each module."""
    return _totals((name.rpartition(".")[0], norm) for name, norm in step.parameters.items())


def _check_limit(name: str, value: float | None, below: float = math.inf) -> None:
    if value is not None and not (isinstance(value, numbers.Real) and 0 < value < below):
        what = "finite number" if below == math.inf else f"number below {below}"
        raise ConfigError(f"{name}={value!r}: expected a {what} above 0, or None.")
