"""Programs of torch.export: the module that runs one, with the layers of the exported model.

`torch.export.load` may run code that a file contains, so a program is code of the user, who names
it in the command.
"""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map, tree_unflatten

from featx.base import quiet_logs
from featx.errors import ModelError, first_line

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_HOW_TO_EXPORT = (
    "batch = torch.export.Dim('batch'); torch.export.save(torch.export.export(model.eval(), "
    "(images,), dynamic_shapes=({0: batch},)), 'model.pt2')"
)
"""Code that makes a file which featx opens, with `images` (2, 3, H, W) float32."""

_MOST_CHECKED = 512
"""Largest batch for which conditions of the export are checked, unless it allows fewer images."""

_TRAINING = frozenset({"train", "training"})
"""Arguments of operators that are true in train mode."""


@dataclass(frozen=True)
class Program:
    """A program that computes something of images.

    Attributes:
        module: module that takes (n, 3, H, W) float32, for any n.
        batch_size: images of one call of the program; None if it takes any number.
        size: (height, width) in pixels that the program was exported for; None if it takes others.
        gives_vectors: whether its output is one tensor (n, D).
        sha256: SHA-256 of the file in hex digits.
        most_images: largest batch for which conditions of the export are checked.
        plain: the program as torch itself runs it, to compare `module` with.
    """

    module: nn.Module
    batch_size: int | None
    size: tuple[int, int] | None
    gives_vectors: bool
    sha256: str
    most_images: int
    plain: nn.Module


def open_program(path: Path) -> Program:
    """Open a file of torch.export.save, and refuse what takes no images or is in train mode."""
    path = path.expanduser()
    sha256 = _check_kind(path)
    with quiet_logs():  # what torch logs becomes an error message here
        try:
            program = torch.export.load(path)
        except Exception as error:  # of several kinds: the archive is right, its content is not
            raise ModelError(
                f"model.name={path} cannot be opened by torch {torch.__version__} "
                f"({type(error).__name__}: {first_line(error)}). It may be damaged, written by a "
                "newer torch, or use operators that this one does not have. Copy it again, or "
                "export the model again."
            ) from error
        _check_nodes(program, path)
        shape = _input_shape(program, path)
        batch_size = shape[0] if isinstance(shape[0], int) else None
        output = _output(program)
        module = _module(program, path, batch_size)
    height, width = shape[2:]
    is_fixed = isinstance(height, int) and isinstance(width, int)
    return Program(
        module=module,
        batch_size=batch_size,
        size=(int(height), int(width)) if is_fixed else None,
        gives_vectors=isinstance(output, torch.Tensor) and output.dim() == 2,
        sha256=sha256,
        most_images=_most_images(program, shape[0]),
        plain=module if isinstance(module, FixedBatch) else program.module(),
    )


def _check_kind(path: Path) -> str:
    """Return the SHA-256 of a file, and refuse one that torch.export.save has not written."""
    if not path.is_file():
        raise ModelError(
            f"model.name={path}: no such file (looked in {Path.cwd()}). Expected a file of "
            f"torch.export.save: {_HOW_TO_EXPORT}"
        )
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            damaged = archive.testzip()  # torch compares no checksums
    except zipfile.BadZipFile as error:
        raise ModelError(
            f"model.name={path} is no archive of torch.export.save ({error}): it is cut off, or an "
            f"ONNX model, weights or a pickle. Export the model: {_HOW_TO_EXPORT}"
        ) from error
    except OSError as error:
        raise ModelError(f"model.name={path} cannot be read: {error}.") from error
    inside = {name.rpartition("/")[2] for name in names}
    problem = ""
    if damaged is not None:
        problem = f"is damaged: {damaged} has another checksum. Copy it again."
    elif any("data/aotinductor/" in name for name in names):
        problem = (
            "was compiled by AOTInductor (torch._inductor.aoti_compile_and_package): it is machine "
            "code without layers, made for one kind of device. Give the file of torch.export.save "
            "that it was compiled from."
        )
    elif "serialized_exported_program.json" in inside:
        problem = (
            "was written by torch 2.7 or older. Load it with that version, export the model again "
            "with the torch of this environment, and give the new file."
        )
    elif "data.pkl" in inside:
        kind = "torch.jit.save (TorchScript)" if "constants.pkl" in inside else "torch.save"
        problem = (
            f"is a file of {kind}, not of torch.export.save. Weights go into model.weights=FILE "
            f"with the name of their architecture; a model is exported with: {_HOW_TO_EXPORT}"
        )
    elif "archive_format" not in inside:
        problem = f"is an archive, but not of torch.export.save. Export the model: {_HOW_TO_EXPORT}"
    if problem:
        raise ModelError(f"model.name={path} {problem}")
    return sha256


def check_forward(program: Program, size: tuple[int, int], name: str) -> None:
    """Check that a program takes images of (height, width), and that its module computes the same.

    `name` is its file, for messages.
    """
    _check_guards(program, size, name)
    images = torch.randn((2, 3, *size), generator=torch.Generator().manual_seed(0))
    before = {key: x.clone() for key, x in program.module.state_dict().items()}
    try:
        with torch.no_grad():
            expected, actual = program.plain(images), program.module(images)
    except ModelError:
        raise
    except Exception as error:  # a guard of the program, or an operator
        raise ModelError(
            f"{name} does not take two images of {size[0]} x {size[1]} pixels "
            f"({type(error).__name__}: {first_line(error)}). 'model.transform.crop=[HEIGHT,WIDTH]' "
            "gives another size, if it was exported for several."
        ) from error
    after = program.module.state_dict()
    if changed := [key for key, x in before.items() if not torch.equal(x, after[key])]:
        raise ModelError(
            f"{name} changes {', '.join(changed[:3])} in every forward pass, so a row would depend "
            "on the images before it. Export a model whose buffers are constant in eval mode."
        )
    pairs = zip(tree_leaves(expected), tree_leaves(actual), strict=True)
    if not all(torch.equal(one, other) for one, other in pairs if isinstance(one, torch.Tensor)):
        raise ModelError(
            f"{name}: the modules that torch.export.unflatten restores compute something else than "
            "the program. Load the model in code of your own: model=custom."
        )


def _module(program: ExportedProgram, path: Path, batch_size: int | None) -> nn.Module:
    """Return the module that runs a program.

    Modules of the exported model come back by torch.export.unflatten. With a fixed batch size they
    would give as many rows as the program was exported for, and are left out.
    """
    if batch_size is not None:
        return FixedBatch(program.module(), batch_size)
    try:
        return torch.export.unflatten(program)
    except Exception as error:  # torch raises many kinds
        reason = first_line(error)
        raise ModelError(
            f"model.name={path}: torch.export.unflatten cannot restore the modules of the model "
            f"({type(error).__name__}: {reason}). Load the model in code of your own: model=custom."
        ) from error


def _check_guards(program: Program, size: tuple[int, int], name: str) -> None:
    """Check that a program was exported for this size and for any number of images.

    torch compares sizes with the conditions of the export where it runs a program itself, and not
    in the modules that unflatten makes.
    """
    guards = dict(program.plain.named_children()).get("_guards_fn")
    if guards is None or program.batch_size is not None:
        return
    pixel = torch.zeros(())
    for count in range(1, program.most_images + 1):
        try:
            guards(pixel.expand(count, 3, *size))
        except AssertionError as error:
            images = "one image" if count == 1 else f"{count} images"
            raise ModelError(
                f"{name} does not take {images} of {size[0]} x {size[1]} pixels ({error}). "
                "'model.transform.crop=[HEIGHT,WIDTH]' gives another size, if it was exported for "
                f"several; any number of images: {_HOW_TO_EXPORT}"
            ) from error


def _most_images(program: ExportedProgram, batch: int | torch.SymInt) -> int:
    """Largest batch for which conditions of the export are checked."""
    found = None if isinstance(batch, int) else program.range_constraints.get(batch.node.expr)
    is_less = found is not None and bool(found.upper < _MOST_CHECKED)
    return int(found.upper) if found is not None and is_less else _MOST_CHECKED


class FixedBatch(nn.Module):
    """A program of a fixed batch size as a module for any number of images.

    Images are computed in groups of this size, the last one filled up with zeros. The modules of
    the program are not called as modules, because their tensors have rows of the filling.
    """

    def __init__(self, program: nn.Module, batch_size: int) -> None:
        super().__init__()
        for module in program.modules():
            module.training = False
        self.program = program
        self.output = nn.Identity()
        self._batch_size = batch_size

    def train(self, mode: bool = True) -> FixedBatch:
        """Set the mode of the module itself; that of a program is fixed, and torch raises."""
        self.training = self.output.training = mode
        return self

    def forward(self, images: torch.Tensor) -> object:
        """(n, 3, H, W) -> the outputs of the program, with n rows."""
        groups = [self._compute(group) for group in torch.split(images, self._batch_size)]
        return self.output(tree_map(lambda *parts: torch.cat(parts), *groups))

    def _compute(self, group: torch.Tensor) -> object:
        """Outputs of at most `batch_size` images."""
        missing = self._batch_size - len(group)
        filling = group.new_zeros(missing, *group.shape[1:])
        # forward and not a call: no hook of the program sees the rows of the filling.
        outputs = self.program.forward(torch.cat([group, filling]))

        def without_filling(output: object) -> torch.Tensor:
            if isinstance(output, torch.Tensor) and output.shape[:1] == (self._batch_size,):
                return output[: len(group)]
            what = tuple(output.shape) if isinstance(output, torch.Tensor) else repr(output)
            raise ModelError(
                f"the program was exported for {self._batch_size} images and also returns {what}, "
                "which has no row per image. Export the model with a free batch size: "
                f"{_HOW_TO_EXPORT}"
            )

        return tree_map(without_filling, outputs)


def _input_shape(program: ExportedProgram, path: Path) -> tuple[int | torch.SymInt, ...]:
    """Return the shape (B, 3, H, W) of the one input of a program."""
    names = program.graph_signature.user_inputs
    found = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    inputs = [found[name].meta.get("val") for name in names if name in found]
    _, by_keyword = tree_unflatten(names, cast(TreeSpec, program.call_spec.in_spec))
    is_positional = not by_keyword
    if len(inputs) == len(names) == 1 and is_positional and isinstance(inputs[0], torch.Tensor):
        image = inputs[0]
        fits = image.dim() == 4 and image.shape[1] == 3
        if fits and image.dtype == torch.float32:
            return tuple(image.shape)
    texts = []
    for name, value in zip(names, inputs, strict=False):
        text = repr(value)
        if isinstance(value, torch.Tensor):
            sizes = ", ".join(str(side) if isinstance(side, int) else "any" for side in value.shape)
            text = f"({sizes}) {str(value.dtype).removeprefix('torch.')}"
        texts.append(f"{name}{'' if is_positional else ' by keyword'}: {text}")
    raise ModelError(
        f"model.name={path} takes {'; '.join(texts) or 'no input'}. Expected one positional "
        f"argument, a batch of images (batch, 3, height, width) float32: {_HOW_TO_EXPORT}"
    )


def _output(program: ExportedProgram) -> object:
    """The fake tensor that a program returns; None if it returns several or another object."""
    (node,) = (node for node in program.graph.nodes if node.op == "output")
    spec = cast(TreeSpec, program.call_spec.out_spec)
    is_plain = spec.num_leaves == 1 and tree_unflatten(["output"], spec) == "output"
    values = list(node.args[0])  # constants, such as None, are no nodes
    return values[0].meta.get("val") if is_plain and isinstance(values[0], torch.fx.Node) else None


def _check_nodes(program: ExportedProgram, path: Path) -> None:
    """Refuse a program of train mode, of random numbers or of another device than the CPU.

    Nodes that assert dtype and device of the export are removed: they compute nothing, and a run
    may use another precision or device.
    """
    reasons, devices = [], {x.device.type for x in program.state_dict.values()}
    for module in program.graph_module.modules():
        nodes = list(module.graph.nodes) if isinstance(module, torch.fx.GraphModule) else []
        for node in nodes:
            if node.target is torch.ops.aten._assert_tensor_metadata.default:
                module.graph.erase_node(node)
                continue
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                devices.add(value.device.type)
            if node.op == "call_function" and (reason := _train_mode_problem(node)):
                operator = str(node.target).removeprefix("aten.").partition(".")[0]
                reasons.append(f"{operator} ({reason})")
    if others := devices - {"cpu"}:
        raise ModelError(
            f"model.name={path} was exported on {', '.join(others)}, and would run there only. "
            f"Export it on the CPU: model.cpu(), images.cpu(), then {_HOW_TO_EXPORT}; featx moves "
            "it to the device."
        )
    changed = program.graph_signature.buffers_to_mutate.values()
    reasons += [f"the buffer {name} (changed by every call)" for name in changed]
    if reasons:
        more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
        raise ModelError(
            f"model.name={path} was exported in train mode, or is random: "
            f"{', '.join(reasons[:3])}{more}. The mode is fixed in a program: call model.eval() "
            f"and export it again: {_HOW_TO_EXPORT}"
        )


def _train_mode_problem(node: torch.fx.Node) -> str | None:
    """Reason why a node is one of train mode; None if it is not."""
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload):
        return None
    arguments = dict(
        zip((each.name for each in operator._schema.arguments), node.args, strict=False)
    )
    arguments.update(node.kwargs)
    # BatchNorm without running statistics is the same in both modes: NFNets standardise weights by
    # it. If it takes the statistics of images, the engine refuses it, as for any model.
    is_same = "running_mean" in arguments and arguments["running_mean"] is None
    if any(arguments.get(name) is True for name in _TRAINING) and not is_same:
        return "train=True"
    is_random = torch.Tag.nondeterministic_seeded in operator.tags
    if not is_random or _TRAINING & arguments.keys() or arguments.get("dropout_p", 1.0) == 0.0:
        return None
    defaults = {each.name: each.default_value for each in operator._schema.arguments}
    is_off = defaults.get("dropout_p") == 0.0 and "dropout_p" not in arguments
    return None if is_off else "random"
