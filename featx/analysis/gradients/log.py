"""Context manager `watch`, which hooks a training loop, and the log of its gradients."""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from featx.analysis.gradients.alarms import (
    MEDIAN_STEPS,
    Alarm,
    AlarmDetector,
    GradientAlarm,
    Limits,
    Step,
    check_positive,
)
from featx.analysis.gradients.gradient_hooks import GradientHooks
from featx.analysis.gradients.norms import copy_to_cpu, norm_of_norms, norms_by_module, norms_of
from featx.base import refuse_scripted, table
from featx.errors import ConfigError, LayerError, RunError, nearest


@contextlib.contextmanager
def watch(
    model: nn.Module,
    *,
    clip_value: float | None = None,
    clip_norm: float | None = None,
    limits: Limits | None = None,
    on_alarm: str | Callable[[Alarm], None] = "raise",
    layers: Sequence[str] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    keep_steps: int = 100,
) -> Iterator[GradientLog]:
    """Watch the gradients of a training loop inside the block, and optionally clip them.

    A step is one step of a torch.optim optimizer on parameters of this model. Without such an
    optimizer, call `log.step()` before your own update. Gradients that no step has used when the
    block ends without an exception form a last step. Blocks may be nested.

    Args:
        model: any module; all hooks are removed at the end.
        clip_value: limit for each element of the gradient that arrives at a parameter in a backward
            pass; elements are clamped to [-clip_value, clip_value] as by
            torch.nn.utils.clip_grad_value_.
        clip_norm: limit of the L2 norm of the gradients of a step, to which they are scaled down
            before the step by the functions of torch.nn.utils.
        limits: limits for alarms; None for the defaults of `Limits`.
        on_alarm: 'raise' raises a GradientAlarm before the optimizer changes a parameter; 'record'
            only adds to `log.alarms`; a function is called with each alarm. If gradients are
            clipped, an explosion is recorded and not raised.
        layers: dotted names of the modules whose flow is watched in addition to the model's own;
            None for all. An empty list is fastest, but a NaN is then not traced to its module.
        scaler: GradScaler of the loop, required if it has one: limits and clipping apply to the
            unscaled gradients, and a step that the scaler skips is not an alarm.
        keep_steps: number of steps and alarms that are kept, and of steps that form the median.

    Raises:
        ConfigError: an argument is out of its range; the loop scales its loss and `scaler` is
            missing; or a gradient is sparse.
        LayerError: `layers` contains a name that is not a module.
        ModelError: the model is TorchScript.
        GradientAlarm: with on_alarm='raise'.
        RunError: the parameters changed without a step.
    """
    check_positive("clip_value", clip_value)
    check_positive("clip_norm", clip_norm)
    if not callable(on_alarm) and on_alarm not in ("raise", "record"):
        raise ConfigError(f"on_alarm={on_alarm!r}: expected 'raise', 'record' or a function.")
    if keep_steps < MEDIAN_STEPS:
        raise ConfigError(f"keep_steps={keep_steps}: expected {MEDIAN_STEPS} or more.")
    refuse_scripted(model.named_modules())
    names = {name: type(module).__name__ for name, module in model.named_modules()}
    detector = AlarmDetector(limits or Limits(), names, keep_steps)
    log = GradientLog(model, clip_value, clip_norm, detector, on_alarm, scaler, keep_steps)
    try:
        log._attach(layers)
        yield log
        log._last_step()
    finally:
        log._detach()


class GradientLog:
    """Record of the steps and alarms of a `watch` block.

    Attributes:
        steps: the last `keep_steps` steps, oldest first.
        alarms: the last `keep_steps` alarms, oldest first.
    """

    def __init__(
        self,
        model: nn.Module,
        clip_value: float | None,
        clip_norm: float | None,
        detector: AlarmDetector,
        on_alarm: str | Callable[[Alarm], None],
        scaler: torch.amp.GradScaler | None,
        keep_steps: int,
    ) -> None:
        self.steps: deque[Step] = deque(maxlen=keep_steps)
        self.alarms: deque[Alarm] = deque(maxlen=keep_steps)
        self._model = model
        self._clip_value = clip_value
        self._clip_norm = clip_norm
        self._detector = detector
        self._on_alarm = on_alarm
        self._scaler = scaler
        self._last_scale = 0.0
        self._num_steps = 0
        self._types = {name: type(module).__name__ for name, module in model.named_modules()}
        self._hooks = GradientHooks(self._norm_of_arrival, self._begin_forward)
        self._handles: list[Any] = []
        self._clamped: set[int] = set()
        self._versions: list[int] = []
        self._arrived: dict[str, list[torch.Tensor]] = {}
        self._seen_gradients = False

    def step(self) -> None:
        """Judge and clip the gradients so far; for loops that update parameters without
        torch.optim.

        If the loop has a GradScaler, gradients must be unscaled before.

        Raises:
            GradientAlarm: with on_alarm='raise'.
        """
        self._finish(dict(self._model.named_parameters()), self, 1.0)

    def table(self) -> str:
        """Format the gradient norms of each module over the kept steps, in the order of the model.

        Column `output` is the last norm of the gradient at the module's output; min, median and max
        are over the kept steps. Column `parameters` is the last norm of the module's own
        parameters.
        """
        header = ("layer", "type", "steps", "output", "min", "median", "max", "parameters")
        rows = []
        for name, kind in self._types.items():
            flow = [step.layers[name] for step in self.steps if name in step.layers]
            norms = [norms_by_module(step.parameters).get(name) for step in self.steps]
            parameter_norms = [norm for norm in norms if norm is not None]
            cells = ["-"] * 4
            if flow:
                ranges = (flow[-1], min(flow), statistics.median(flow), max(flow))
                cells = [f"{x:.3g}" for x in ranges]
            last = f"{parameter_norms[-1]:.3g}" if parameter_norms else "-"
            if flow or parameter_norms:
                steps = str(max(len(flow), len(parameter_norms)))
                rows.append([name or "(model)", kind, steps, *cells, last])
        return table(header, rows, left=2)

    def _attach(self, layers: Sequence[str] | None) -> None:
        """Register all hooks.

        Raises:
            LayerError: `layers` contains a name that is not a module.
        """
        modules = dict(self._model.named_modules())
        for name in layers or ():
            if name not in modules:
                raise LayerError(f"no module {name!r} to watch.{nearest(name, modules)}")
        if layers is not None:
            modules = {name: modules[name] for name in ("", *layers)}
        self._hooks.attach(modules)
        if self._clip_value is not None:
            for name, parameter in self._model.named_parameters():
                if parameter.requires_grad:
                    self._clamp_arrivals(name, parameter, self._clip_value)
        self._handles.append(register_optimizer_step_pre_hook(self._before_optimizer))
        self._handles.append(register_optimizer_step_post_hook(self._after_optimizer))
        self._note_versions()

    def _detach(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks.detach()
        self._arrived.clear()

    def _last_step(self) -> None:
        """Judge the remaining gradients at the end of the block, unless there is a GradScaler.

        A GradScaler's gradients are still scaled here, and unscaling them is the loop's own task.
        """
        if self._seen_gradients and self._scaler is None:
            self._check_versions()
            self.step()

    # ------------------------------------------------------- while gradients arrive

    def _loss_scale(self, device: torch.device) -> torch.Tensor | None:
        """Return the GradScaler's factor on gradients in a backward pass as a tensor, or None."""
        if self._scaler is None:
            return None
        return self._scaler.scale(torch.ones((), device=device))

    def _norm_of_arrival(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the norm of a gradient that arrives, without the scaler's factor."""
        self._seen_gradients = True
        scale = self._loss_scale(grad.device)
        norm = norms_of([grad])[0]
        return norm if scale is None else norm / scale

    def _clamp_arrivals(self, name: str, parameter: nn.Parameter, limit: float) -> None:
        """Register a hook that records the norm of a parameter's gradient and clamps it."""

        def clamp(grad: torch.Tensor) -> torch.Tensor:
            """Record the norm of a gradient and clamp the gradient."""
            _refuse_sparse(name, grad)
            if parameter.grad is None:
                self._arrived[name] = []
            self._arrived.setdefault(name, []).append(self._norm_of_arrival(grad))
            scale = self._loss_scale(grad.device)
            if scale is None:
                return grad.clamp(-limit, limit)
            bound = limit * scale
            # The scaler must see infinities, so that it skips the step and lowers its scale.
            return torch.where(grad.isinf(), grad, grad.clamp(-bound, bound))

        self._clamped.add(id(parameter))
        self._handles.append(parameter.register_hook(clamp))  # type: ignore[no-untyped-call]

    def _begin_forward(self) -> None:
        """Check before a forward pass whether gradients were dropped, or used without a step.

        Raises:
            RunError: the parameters changed without a step.
        """
        scale = self._scaler.get_scale() if self._scaler is not None else 1.0
        skipped, self._last_scale = scale < self._last_scale, scale
        if not self._seen_gradients:
            self._note_versions()
            return
        self._check_versions()
        if skipped or all(p.grad is None for p in self._model.parameters()):
            self._forget()

    def _forget(self) -> None:
        """Discard all gradients that arrived since the last step."""
        self._arrived.clear()
        self._hooks.forget()
        self._seen_gradients = False

    def _note_versions(self) -> None:
        """Record autograd's version counters of the parameters."""
        self._versions = [p._version for p in self._model.parameters()]

    def _check_versions(self) -> None:
        """Check by autograd's version counters that no parameter changed since the last step.

        Raises:
            RunError: a parameter changed without a step.
        """
        if self._versions != [p._version for p in self._model.parameters()]:
            raise RunError(
                "the parameters were changed after a backward pass, but no step of a torch.optim "
                "optimizer was seen, so nothing was judged or clipped by norm. Call log.step() "
                "before your own update."
            )

    # ------------------------------------------------------------------------- a step

    def _before_optimizer(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Hook before every step of every torch.optim optimizer.

        Returns:
            changed arguments of `optimizer.step` if it has a closure, else None.
        """
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters = {n: p for n, p in self._model.named_parameters() if id(p) in updated}
        if not parameters:
            return None
        if self._scaler is None:
            _refuse_hidden_scaler()

        def finish() -> None:
            """Judge the step, unless the optimizer itself will skip it."""
            # Fused optimizers unscale the gradients and skip overflowed steps inside `step`.
            found_inf = getattr(optimizer, "found_inf", None)
            if found_inf is not None and bool(found_inf.any()):
                self._forget()
                return
            held = getattr(optimizer, "grad_scale", None)
            self._finish(parameters, optimizer, 1.0 if held is None else float(held))

        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            finish()
            return None

        def watched_closure() -> Any:
            """The gradients come inside the optimizer's step, perhaps several times."""
            loss = closure()
            with torch.no_grad():
                finish()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched_closure}
        return (args[0], watched_closure, *args[2:]), kwargs

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Hook after every step of every torch.optim optimizer."""
        self._note_versions()

    def _finish(self, parameters: Mapping[str, nn.Parameter], owner: object, factor: float) -> None:
        """Record, judge and clip the gradients of one step.

        Args:
            parameters: name -> parameter that is about to be updated.
            owner: the optimizer, or this log.
            factor: factor of the GradScaler that the gradients still have.

        Raises:
            GradientAlarm: with on_alarm='raise'.
        """
        grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        for name, grad in grads.items():
            _refuse_sparse(name, grad)
        self._num_steps += 1
        step = self._measure(grads, factor)
        alarms = self._detector.alarms(step, self._hooks, owner)
        self.steps.append(step)
        self.alarms.extend(alarms)
        self._hooks.forget()
        self._seen_gradients = False
        for alarm in alarms:
            self._tell(alarm)
        updated = {name: parameters[name] for name in grads}
        if self._clip_value is not None:
            self._clamp_late(updated, self._clip_value, factor)
        if self._clip_norm is not None and updated:
            total = nn.utils.get_total_norm(list(grads.values())) / factor
            nn.utils.clip_grads_with_norm_(updated.values(), self._clip_norm, total)

    def _tell(self, alarm: Alarm) -> None:
        """Raise an alarm or pass it to the user's function."""
        clipped = self._clip_value is not None or self._clip_norm is not None
        if callable(self._on_alarm):
            self._on_alarm(alarm)
        elif self._on_alarm == "raise" and not (clipped and alarm.kind == "exploding"):
            raise GradientAlarm(alarm)

    def _measure(self, grads: Mapping[str, torch.Tensor], factor: float) -> Step:
        """Compute the norms of a step, and of the flow, with one copy from each device."""
        arrived = {name: self._arrived.pop(name, []) for name in grads}
        unclamped = [name for name in grads if not arrived[name]]
        present = norms_of([grads[name] for name in unclamped])
        edges = self._hooks.edges()
        groups = [arrived[name] for name in grads if arrived[name]]
        groups += [[norm] for norm in present] + [edge.norms for edge in edges]
        values = iter(copy_to_cpu([norm for group in groups for norm in group]))
        copied = iter([[next(values) for _ in group] for group in groups])

        norms = {name: _largest(next(copied)) for name in grads if arrived[name]}
        norms |= {name: next(copied)[0] / factor for name in unclamped}
        for edge in edges:
            came = next(copied)
            edge.norm = norm_of_norms(came) if came else None
        parameters = {name: norms[name] for name in grads}
        flow = self._hooks.layer_norms()
        layers = {name: flow[name] for name in self._types if name in flow}
        return Step(self._num_steps, norm_of_norms(norms.values()), parameters, layers)

    def _clamp_late(
        self, parameters: Mapping[str, nn.Parameter], limit: float, factor: float
    ) -> None:
        """Clamp parameters that were added or unfrozen inside the block, which have no hook yet."""
        late = {name: p for name, p in parameters.items() if id(p) not in self._clamped}
        if late:
            nn.utils.clip_grad_value_(late.values(), limit * factor)
        for name, parameter in late.items():
            if parameter.requires_grad:
                self._clamp_arrivals(name, parameter, limit)


def _largest(norms: Sequence[float]) -> float:
    """Return the largest norm, or NaN if one of them is NaN."""
    return math.nan if any(map(math.isnan, norms)) else max(norms)


def _refuse_sparse(name: str, grad: torch.Tensor) -> None:
    """Raise ConfigError for a gradient that is not strided."""
    if grad.layout != torch.strided:
        raise ConfigError(
            f"the gradient of {name} is sparse, which featx.gradients does not measure; build the "
            "layer with sparse=False."
        )


def _refuse_hidden_scaler() -> None:
    """Raise ConfigError if a GradScaler that was not passed to `watch` is among the callers.

    A GradScaler leaves no other trace on a gradient than its factor, so its frame is searched on
    the stack.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if "grad_scaler" not in frame.f_code.co_filename:
            continue
        scaler = frame.f_locals.get("self")
        if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
            raise ConfigError(
                "this loop scales its loss: give watch(..., scaler=scaler) the GradScaler, or "
                "gradients are clipped and judged with its factor on them."
            )
