"""Capture: forward hooks that take tensors out of a running module and leave it as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from featx.errors import LayerError, RunError
from featx.select import Call, Path, Tap, Trace, parse_tap, pick_path

Keep = Callable[[Tap, torch.Tensor], torch.Tensor]


class StopForward(BaseException):
    """Ends a forward pass after the last tap; no `except Exception` in a model swallows it."""


def elements(value: Any) -> dict[Path, torch.Tensor]:
    """Every tensor in a nested output, by its way in; () for a plain tensor."""
    if isinstance(value, torch.Tensor):
        return {(): value}
    if isinstance(value, Mapping):
        items: list[tuple[str | int, Any]] = [(str(k), v) for k, v in value.items()]
    elif isinstance(value, tuple | list):
        items = list(enumerate(value))
    else:
        return {}
    return {(step, *way): x for step, part in items for way, x in elements(part).items()}


def pick(value: Any, tap: Tap) -> torch.Tensor:
    """The tensor of a nested value that a tap means.

    Raises:
        LayerError: it is not there, or there are several to choose from.
    """
    if isinstance(value, torch.Tensor) and tap.path == ():
        return value
    found = elements(value)
    shapes = {path: tuple(x.shape) for path, x in found.items()}
    return found[pick_path(tap.name, shapes, tap.path)]


class TapHooks:
    """Forward hooks for some taps of one module; they go with the `with` block.

    Args:
        module: the model.
        taps: what to take.
        keep: what becomes of a tensor at once, while it is as the layer made it: (tap, tensor)
            -> tensor, such as a reduction and a cast.
        expected: names of the taps in the order in which they fire. With it, the pass is ended
            after the last one (where `stop` is set) and any other order is an error.
        stop: end the pass early by an exception; not under torch.compile, which drops what nobody
            reads by itself.

    Attributes:
        values: tap name -> what `keep` returned, of the last pass.
        fired: names in the order in which they fired in the last pass.
    """

    def __init__(
        self,
        module: nn.Module,
        taps: Sequence[Tap],
        keep: Keep = lambda tap, x: x,
        expected: Sequence[str] | None = None,
        stop: bool = False,
    ) -> None:
        self._module = module
        self._keep = keep
        self._expected = list(expected) if expected is not None else None
        self._stop = stop
        self._handles: list[Any] = []
        self.values: dict[str, torch.Tensor] = {}
        self.fired: list[str] = []
        self._calls: dict[tuple[int, str], int] = {}
        self._taps: dict[tuple[int, str], list[Tap]] = {}
        modules = dict(module.named_modules(remove_duplicate=False))
        for tap in taps:
            self._taps.setdefault((id(modules[tap.module]), tap.capture), []).append(tap)
        self._by_id = {id(m): m for m in modules.values()}

    def __enter__(self) -> TapHooks:
        for (identity, capture), taps in self._taps.items():
            target = self._by_id[identity]
            if capture == "input":
                hook: Any = self._input_hook((identity, capture), taps)
                handle = target.register_forward_pre_hook(hook, with_kwargs=True)
            else:
                hook = self._output_hook((identity, capture), taps)
                handle = target.register_forward_hook(hook)
            self._handles.append(handle)
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.reset()

    def reset(self) -> None:
        """Forget the last pass."""
        self.values = {}
        self.fired = []
        self._calls = {}

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """One pass; returns what the taps gave.

        Raises:
            RunError: a tap did not fire, or fired in another order than expected.
        """
        self.reset()
        with contextlib.suppress(StopForward):
            self._module(x)
        if self._expected is not None and self.fired != self._expected:
            missing = [name for name in self._expected if name not in self.fired]
            raise RunError(
                f"the forward pass differs from the probe's: {missing or self.fired} "
                f"{'did not fire' if missing else 'fired'}, expected {self._expected}. The model "
                "does different things for different batches; featx cannot vouch for its rows."
            )
        return self.values

    def _output_hook(self, key: tuple[int, str], taps: list[Tap]) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._take(key, taps, output)

        return hook

    def _input_hook(self, key: tuple[int, str], taps: list[Tap]) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._take(key, taps, [*args, *kwargs.values()])

        return hook

    def _take(self, key: tuple[int, str], taps: list[Tap], value: Any) -> None:
        number = self._calls.get(key, 0) + 1
        self._calls[key] = number
        for tap in taps:
            if tap.call is not None and tap.call != number:
                continue
            self.values[tap.name] = self._keep(tap, pick(value, tap))
            self.fired.append(tap.name)
        if self._stop and self._expected is not None and len(self.fired) >= len(self._expected):
            raise StopForward


def trace(module: nn.Module, x: torch.Tensor) -> Trace:
    """Run one whole forward pass and record every module call, with shapes and operations.

    Args:
        module: in eval mode.
        x: (B, 3, H, W) on the module's device.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    first_names = {id(m): name for name, m in module.named_modules()}
    every_name = {
        name: first_names[id(m)] for name, m in module.named_modules(remove_duplicate=False)
    }
    calls: list[Call] = []
    started: dict[str, list[float]] = {}
    counter = FlopCounterMode(display=False)
    handles = []

    def flops() -> float:
        return float(counter.get_total_flops())

    def before(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            started.setdefault(name, []).append(flops())

        return hook

    def after(name: str, target: nn.Module) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs = elements([*args, *kwargs.values()])
            calls.append(
                Call(
                    module=name,
                    number=1 + sum(call.module == name for call in calls),
                    type_name=type(target).__name__,
                    is_leaf=not any(True for _ in target.children()),
                    is_linear=_is_linear(target),
                    num_parameters=sum(p.numel() for p in target.parameters()),
                    outputs={path: tuple(t.shape) for path, t in elements(output).items()},
                    inputs={path: tuple(t.shape) for path, t in inputs.items()},
                    mflops=(flops() - started[name].pop()) / len(x) / 1e6,
                )
            )

        return hook

    try:
        for name, target in module.named_modules():
            handles.append(target.register_forward_pre_hook(before(name)))
            handles.append(target.register_forward_hook(after(name, target), with_kwargs=True))
        # Fused kernels hide their operations from the counter.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
            module(x)
    finally:
        for handle in handles:
            handle.remove()
    return Trace(calls, every_name, len(x))


def find_overwritten(module: nn.Module, taps: Sequence[Tap], x: torch.Tensor) -> frozenset[str]:
    """The taps whose storage is written again later in the pass, found by comparing values.

    `nn.ReLU(inplace=True)` after a layer, or `out += identity`, changes a tensor that a hook has
    already seen; only these need a copy.
    """
    copies: dict[str, torch.Tensor] = {}

    def keep(tap: Tap, tensor: torch.Tensor) -> torch.Tensor:
        copies[tap.name] = tensor.clone()
        return tensor

    with torch.no_grad(), TapHooks(module, taps, keep) as hooks:
        values = hooks.forward(x)
        return frozenset(
            name for name, value in values.items() if not _same_values(value, copies[name])
        )


def _same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every element, NaN to NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


@contextlib.contextmanager
def capture(model: nn.Module, layers: str | Sequence[str]) -> Iterator[Captured]:
    """Keep the outputs, or inputs, of named layers while the block runs.

        with featx.capture(model, ["layer4", "avgpool"]) as features:
            model(x)
            features["layer4"]          # (B, 2048, 7, 7), as the layer gave it

    Each forward pass replaces what the one before left. The tensors are copies, so that in-place
    operations later in the model cannot change them; they stay attached to the graph, on their
    device, in their dtype. The hooks go with the block, also after an exception.

    Args:
        model: any torch.nn.Module, in whatever mode it is.
        layers: a dotted name, or several; `relu@2` for the second call of a module that is called
            several times, `encoder[0]` or `block.hidden` for one element of a nested output,
            `layer4:input` for what goes into a layer.

    Raises:
        LayerError: there is no such module; on access, the layer was not called, or several times.
    """
    layers = [layers] if isinstance(layers, str) else layers
    names = {name: name for name, _ in model.named_modules(remove_duplicate=False)}
    taps = [parse_tap(layer, names) for layer in layers]
    captured = Captured(taps)
    hooks = TapHooks(model, taps, keep=captured.keep)

    def begin(module: nn.Module, args: Any) -> None:
        hooks.reset()
        captured.begin()

    with hooks:
        handle = model.register_forward_pre_hook(begin)
        try:
            yield captured
        finally:
            handle.remove()


class Captured(Mapping[str, torch.Tensor]):
    """The tensors of the last forward pass inside a `featx.capture` block, by layer name."""

    def __init__(self, taps: Sequence[Tap]) -> None:
        self._taps = {tap.name: tap for tap in taps}
        self._tensors: dict[str, list[torch.Tensor]] = {}

    def begin(self) -> None:
        self._tensors = {}

    def keep(self, tap: Tap, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        self._tensors.setdefault(tap.name, []).append(copy)
        return copy

    def __getitem__(self, layer: str) -> torch.Tensor:
        if layer not in self._taps:
            raise LayerError(f"{layer!r} is not captured; this block captures {list(self._taps)}.")
        found = self._tensors.get(layer, [])
        if len(found) == 1:
            return found[0]
        if not found:
            raise LayerError(f"the layer {layer!r} was not called in the last forward pass.")
        raise LayerError(
            f"the layer {layer!r} was called {len(found)} times in the last forward pass; capture "
            f"one of its calls: {', '.join(f'{layer}@{i + 1}' for i in range(len(found)))}."
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._taps)

    def __len__(self) -> int:
        return len(self._taps)


def _is_linear(module: nn.Module) -> bool:
    pointwise = isinstance(module, nn.Conv2d) and set(module.kernel_size) == {1}
    return isinstance(module, nn.Linear) or pointwise


@contextlib.contextmanager
def no_fast_path() -> Iterator[None]:
    """Switch nn.TransformerEncoderLayer's fused kernel off, which calls no sub-module."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
