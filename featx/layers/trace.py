"""What one recorded pass says of a model, call by call; and a tap, one tensor of a pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from featx.config import GRADIENTS, PRESETS

if TYPE_CHECKING:
    from featx.base.nested_tensors import Path


def element_name(path: Path) -> str:
    """('hidden', 0) -> '.hidden[0]'."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


@dataclass(frozen=True)
class CapturePoint:
    """One tensor of the forward pass.

    Attributes:
        name: of the dataset.
        module: dotted name; of an operation, the module whose forward calls it.
        capture: 'output' or 'input' of the module, or 'grad_output', 'grad_input': gradients there;
            'attention': the weights of an attention module; of job=attribute a description of the
            method.
        call: which call of the forward, from 1; None where there is one only.
        path: the way into a nested output, () for a tensor or the only tensor in it.
        operation: its whole name, '' where a module is meant.
        dtype: of the dataset, where the key `dtype` does not say.
    """

    name: str
    module: str
    capture: str = "output"
    call: int | None = None
    path: Path = ()
    operation: str = ""
    dtype: str | None = None

    @property
    def layer(self) -> str:
        """The dotted name of the module or the operation."""
        return self.operation or self.module

    @property
    def is_gradient(self) -> bool:
        """Whether it is taken in the backward pass."""
        return self.capture in GRADIENTS


@dataclass(frozen=True)
class Call:
    """One call of one module in the trace.

    Attributes:
        module: its dotted name.
        number: 1 for the first call of this module.
        type_name: the module's class.
        is_leaf: it has no sub-modules.
        is_linear: nn.Linear, or a 1 x 1 convolution.
        num_parameters: of the module and all below it.
        outputs, inputs: way into the value -> shape, batch included.
        mflops: millions of floating-point operations per image, two for a multiply-add.
        attention: the weights of an attention module that shows them, as in `outputs`.
    """

    module: str
    number: int
    type_name: str
    is_leaf: bool
    is_linear: bool
    num_parameters: int
    outputs: Mapping[Path, tuple[int, ...]]
    inputs: Mapping[Path, tuple[int, ...]]
    mflops: float = 0.0
    attention: Mapping[Path, tuple[int, ...]] = field(default_factory=dict)

    def tensors(self, capture: str) -> Mapping[Path, tuple[int, ...]]:
        """What a kind of capture finds there: way into the value -> shape."""
        if capture == "attention":
            return self.attention
        return self.outputs if capture in ("output", "grad_output") else self.inputs


@dataclass(frozen=True)
class Operation:
    """One operation that a module's forward calls by itself, in the trace.

    Attributes:
        name: as torch.fx names it, such as 'layer1.0.add_1'.
        module: dotted name of the module whose forward called it.
        function: in full, such as 'torch.nn.functional.relu'.
        outputs: way into the value -> shape, batch included.
        num_calls_before: calls of the trace that had ended before it; its place in their order.
        is_returned: its module returned this very result right behind it.
    """

    name: str
    module: str
    function: str
    outputs: Mapping[Path, tuple[int, ...]]
    num_calls_before: int
    is_returned: bool


@dataclass(frozen=True)
class Trace:
    """One forward pass: every module call, in the order in which the calls ended.

    Attributes:
        calls: the root module last.
        names: every name of every module, shared ones under each name, -> its first name.
        batch_size: of the pass.
        operations: in the order in which they ran.
        library_embedding: the tap that equals the embedding as the model's library defines it, and
            the reduction, 'none' or 'flatten', that makes a vector of it; None where the library
            defines none, or nobody asked.
        undecided: the last linear layer, where what the model returns depends on the image also in
            other ways than through its output; None where it does not, or nobody asked.
    """

    calls: Sequence[Call]
    names: Mapping[str, str]
    batch_size: int
    operations: Sequence[Operation] = ()
    library_embedding: tuple[CapturePoint, str] | None = None
    undecided: str | None = None
    by_module: dict[str, list[Call]] = field(init=False, default_factory=dict)
    by_operation: dict[str, Operation] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for call in self.calls:
            self.by_module.setdefault(call.module, []).append(call)
        for operation in self.operations:
            self.by_operation[operation.name] = operation

    def operations_up_to(self, taps: Sequence[CapturePoint]) -> list[str]:
        """The operations of all modules that have one tapped, up to the last that is tapped.

        A pass that does others would give the same names to other things.
        """
        wanted = {tap.operation for tap in taps if tap.operation}
        modules = {self.by_operation[name].module for name in wanted}
        names = [each.name for each in self.operations if each.module in modules]
        last = max((i for i, name in enumerate(names) if name in wanted), default=-1)
        return names[: last + 1]

    def call_name(self, call: Call) -> str:
        """What means a call in `layers`: the module's name, with its number where that is needed.

        A preset is meant by its name, also where the model has a module of that name.
        """
        numbered = len(self.by_module[call.module]) > 1 or call.module in PRESETS
        return f"{call.module}@{call.number}" if numbered else call.module

    def known_names(self) -> list[str]:
        """Whatever can stand in `layers`: modules, then operations."""
        return [*(name for name in self.names if name), *self.by_operation]
