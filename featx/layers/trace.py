"""The record of one forward pass, call by call, and the capture point, one tensor of a pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from featx.config import GRADIENTS, PRESETS

if TYPE_CHECKING:
    from featx.base import ElementPath


def element_name(path: ElementPath) -> str:
    """Name of an element of a nested value: ('hidden', 0) -> '.hidden[0]'."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


@dataclass(frozen=True)
class CapturePoint:
    """One tensor of a forward pass.

    Attributes:
        name: name of the dataset.
        module: dotted name of the module; for an operation, of the module whose forward calls it.
        capture: kind of capture: 'output' or 'input' of the module, 'grad_output' or 'grad_input'
            for gradients there, 'attention' for the weights of an attention module; for
            job=attribute a description of the method.
        call: number of the call of the module, from 1; None if there is only one.
        path: path into a nested output, () for a tensor or the only tensor in it.
        operation: full name of the operation, '' for a module.
        dtype: dtype of the dataset if it differs from the option `dtype`, otherwise None.
    """

    name: str
    module: str
    capture: str = "output"
    call: int | None = None
    path: ElementPath = ()
    operation: str = ""
    dtype: str | None = None

    @property
    def layer(self) -> str:
        """Dotted name of the module or the operation."""
        return self.operation or self.module

    @property
    def is_gradient(self) -> bool:
        """Whether the tensor is a gradient, computed in the backward pass."""
        return self.capture in GRADIENTS


@dataclass(frozen=True)
class Call:
    """One call of one module in the trace.

    Attributes:
        module: dotted name of the module.
        number: number of the call among those of the module, from 1.
        type_name: class name of the module.
        is_leaf: whether the module has no sub-modules.
        is_linear: whether the module is nn.Linear or a 1 x 1 convolution.
        num_parameters: number of parameters of the module and its sub-modules.
        outputs: path into the output -> shape, including the batch dimension.
        inputs: path into the arguments -> shape, including the batch dimension.
        mflops: millions of floating-point operations per image, two per multiply-add.
        attention: shapes of the attention weights, if the module gives access to them.
        gives_map: whether the module is a convolution, batch normalisation or pooling of torch,
            whose output is (B, C, H, W).
    """

    module: str
    number: int
    type_name: str
    is_leaf: bool
    is_linear: bool
    num_parameters: int
    outputs: Mapping[ElementPath, tuple[int, ...]]
    inputs: Mapping[ElementPath, tuple[int, ...]]
    mflops: float = 0.0
    attention: Mapping[ElementPath, tuple[int, ...]] = field(default_factory=dict)
    gives_map: bool = False

    def tensors(self, capture: str) -> Mapping[ElementPath, tuple[int, ...]]:
        """Path -> shape of the tensors that a kind of capture finds in this call."""
        if capture == "attention":
            return self.attention
        return self.outputs if capture in ("output", "grad_output") else self.inputs


@dataclass(frozen=True)
class Operation:
    """One operation that the forward of a module calls itself.

    Attributes:
        name: name as in torch.fx, such as 'layer1.0.add_1'.
        module: dotted name of the module whose forward called it.
        function: full name of the function, such as 'torch.nn.functional.relu'.
        outputs: path into the result -> shape, including the batch dimension.
        num_calls_before: number of module calls that had ended before it, which gives its place
            among them.
        is_returned: whether the module returned this result immediately.
    """

    name: str
    module: str
    function: str
    outputs: Mapping[ElementPath, tuple[int, ...]]
    num_calls_before: int
    is_returned: bool


@dataclass(frozen=True)
class Trace:
    """One forward pass: every module call, in the order in which the calls ended.

    Attributes:
        calls: the calls; the root module is last.
        names: every dotted name of every module -> its first name; shared modules have several.
        batch_size: number of images in the pass.
        operations: the operations in the order in which they ran.
        library_embedding: the capture point that equals the embedding as defined by the model's
            library, and the reduction, 'none' or 'flatten', that makes it a vector; None if the
            library defines none or the embedding was not requested.
        library_stages: names of the tensors that equal the stages of the model's library, if these
            are not the outputs of modules that it names; None otherwise.
        undecided: name of the last linear layer, if the output of the model depends on the image in
            other ways than through this layer; otherwise, or if the embedding was not requested,
            None.
        by_module: name of a module -> its calls.
        by_operation: name of an operation -> the operation.
        map_shapes: shapes of rows that a convolution or the like returns, (C, H, W), but no linear
            layer or LayerNorm, (H, W, C).
        known_cubes: those of them with three equal sides that `cubes_of_maps` has found to be
            (C, H, W) wherever they occur; None if it has not been asked.
    """

    calls: Sequence[Call]
    names: Mapping[str, str]
    batch_size: int
    operations: Sequence[Operation] = ()
    library_embedding: tuple[CapturePoint, str] | None = None
    library_stages: Sequence[str] | None = None
    undecided: str | None = None
    known_cubes: frozenset[tuple[int, ...]] | None = None
    by_module: dict[str, list[Call]] = field(init=False, default_factory=dict)
    by_operation: dict[str, Operation] = field(init=False, default_factory=dict)
    map_shapes: set[tuple[int, ...]] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        turned: set[tuple[int, ...]] = set()  # (H, W, C)
        for call in self.calls:
            self.by_module.setdefault(call.module, []).append(call)
            shapes = {s[1:] for s in call.outputs.values() if s[:1] == (self.batch_size,)}
            if call.gives_map:
                self.map_shapes.update(shapes)
            elif call.type_name in ("Linear", "LayerNorm"):
                turned.update(shapes)
        self.map_shapes.difference_update(turned)
        for operation in self.operations:
            self.by_operation[operation.name] = operation

    def operations_up_to(self, points: Sequence[CapturePoint]) -> list[str]:
        """Operations of all modules with a captured operation, up to the last captured one.

        If a pass runs other operations, the same names mean other things.
        """
        wanted = {point.operation for point in points if point.operation}
        modules = {self.by_operation[name].module for name in wanted}
        names = [each.name for each in self.operations if each.module in modules]
        last = max((i for i, name in enumerate(names) if name in wanted), default=-1)
        return names[: last + 1]

    def call_name(self, call: Call) -> str:
        """The name of a call for the option `layers`: the module's name, with its number if needed.

        The number is also needed if the module is named like a preset.
        """
        numbered = len(self.by_module[call.module]) > 1 or call.module in PRESETS
        return f"{call.module}@{call.number}" if numbered else call.module

    def known_names(self) -> list[str]:
        """All names that the option `layers` accepts: modules, then operations."""
        return [*(name for name in self.names if name), *self.by_operation]
