"""Capture: forward hooks that take tensors out of a running module and leave it as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from featx.errors import LayerError, RunError
from featx.select import Path, Tap, parse_tap, pick_path

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
            reads by itself, and not where gradients are taken, which come after the pass.
        score: what the module returns -> the numbers (B,) whose gradients are taken; needed by
            `forward` where a tap is a gradient.

    Attributes:
        values: tap name -> what `keep` returned, of the last pass.
        fired: names in the order in which they fired in the last pass.
        numbers: (B,) what `score` gave in the last pass.
    """

    def __init__(
        self,
        module: nn.Module,
        taps: Sequence[Tap],
        keep: Keep = lambda tap, x: x,
        expected: Sequence[str] | None = None,
        stop: bool = False,
        score: Callable[[Any], torch.Tensor] | None = None,
    ) -> None:
        self._module = module
        self._score = score
        self._keep = keep
        self._expected = list(expected) if expected is not None else None
        self._stop = stop
        self._handles: list[Any] = []
        self.values: dict[str, torch.Tensor] = {}
        self.fired: list[str] = []
        self.numbers: torch.Tensor | None = None
        self._calls: dict[tuple[int, str], int] = {}
        self._taps: dict[tuple[int, str], list[Tap]] = {}
        modules = dict(module.named_modules(remove_duplicate=False))
        for tap in taps:
            self._taps.setdefault((id(modules[tap.module]), tap.capture), []).append(tap)
        self._by_id = {id(m): m for m in modules.values()}

    def __enter__(self) -> TapHooks:
        for (identity, capture), taps in self._taps.items():
            target = self._by_id[identity]
            key = identity, capture
            if capture == "input":
                hook: Any = self._input_hook(key, taps)
                handle = target.register_forward_pre_hook(hook, with_kwargs=True)
            elif capture == "grad_input":
                hook = self._grad_input_hook(key, taps)
                handle = target.register_forward_pre_hook(hook, with_kwargs=True)
            elif capture == "grad_output":
                hook = self._grad_output_hook(key, taps)
                handle = target.register_forward_hook(hook)
            else:
                hook = self._output_hook(key, taps)
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
        if self._score is None:
            with contextlib.suppress(StopForward):
                self._module(x)
        else:
            self._backward(x)
        if self._expected is not None and self.fired != self._expected:
            missing = [name for name in self._expected if name not in self.fired]
            raise RunError(
                f"the forward pass differs from the probe's: {missing or self.fired} "
                f"{'did not fire' if missing else 'fired'}, expected {self._expected}. The model "
                "does different things for different batches; featx cannot vouch for its rows."
            )
        return self.values

    def _backward(self, x: torch.Tensor) -> None:
        """A pass with gradients: of the sum of all images' numbers, so of each image's own."""
        assert self._score is not None
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            # A copy: a model may write to its input, which a leaf does not allow.
            numbers = self._score(self._module(leaf.clone()))
            total = numbers.sum()
        self.numbers = numbers.detach()
        torch.autograd.grad(total, leaf, allow_unused=True)

    def _output_hook(self, key: tuple[int, str], taps: list[Tap]) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._take(key, taps, output)

        return hook

    def _input_hook(self, key: tuple[int, str], taps: list[Tap]) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._take(key, taps, [*args, *kwargs.values()])

        return hook

    def _grad_output_hook(self, key: tuple[int, str], taps: list[Tap]) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for tap in self._meant(key, taps):
                self._await_gradient(tap, pick(output, tap))

        return hook

    def _grad_input_hook(self, key: tuple[int, str], taps: list[Tap]) -> Any:
        """The layer gets a copy of its input, for other layers that read it have other gradients.

        A view would do, but its hook is lost where the layer writes to it.
        """

        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            given = [*args, *kwargs.values()]
            for tap in self._meant(key, taps):
                shapes = {path: tuple(x.shape) for path, x in elements(given).items()}
                path = pick_path(tap.name, shapes, tap.path)
                own = elements(given)[path].clone()
                self._await_gradient(tap, own)
                given = with_element(given, path, own)
            return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))

        return hook

    def _await_gradient(self, tap: Tap, tensor: torch.Tensor) -> None:
        if not tensor.requires_grad:
            raise LayerError(
                f"{tap.name}: no gradient passes there. It is under torch.no_grad(), or depends "
                "neither on an input nor on a parameter that requires gradients."
            )

        def arrived(gradient: torch.Tensor) -> None:
            self.values[tap.name] = self._keep(tap, gradient)
            self.fired.append(tap.name)

        tensor.register_hook(arrived)  # type: ignore[no-untyped-call]

    def _meant(self, key: tuple[int, str], taps: list[Tap]) -> list[Tap]:
        """Count a call of a module, and tell which taps mean this one."""
        number = self._calls.get(key, 0) + 1
        self._calls[key] = number
        return [tap for tap in taps if tap.call is None or tap.call == number]

    def _take(self, key: tuple[int, str], taps: list[Tap], value: Any) -> None:
        for tap in self._meant(key, taps):
            self.values[tap.name] = self._keep(tap, pick(value, tap))
            self.fired.append(tap.name)
        if self._stop and self._expected is not None and len(self.fired) >= len(self._expected):
            raise StopForward


def with_element(value: Any, path: Path, new: torch.Tensor) -> Any:
    """A nested value with one tensor replaced; the containers on the way are copied."""
    if not path:
        return new
    step, *rest = path
    if isinstance(value, Mapping):
        key = next(key for key in value if str(key) == str(step))
        kind: Any = type(value)
        return kind({**value, key: with_element(value[key], tuple(rest), new)})
    items = list(value)
    items[int(step)] = with_element(items[int(step)], tuple(rest), new)
    named = hasattr(value, "_fields")  # a named tuple takes its items one by one
    return type(value)(*items) if named else type(value)(items)


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
    """Keep the outputs, inputs or gradients of named layers while the block runs.

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
            `layer4:input` for what goes into a layer; `layer4:grad_output`, `layer4:grad_input` for
            the gradients there, which are filled in by your `loss.backward()`.

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
