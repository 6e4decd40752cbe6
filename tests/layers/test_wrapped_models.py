"""Hooks on models that are compiled, wrapped, checkpointed, or called through torch.func."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_engine import num_hooks
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint

import featx
from featx.errors import LayerError, ModelError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.head = nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.first(x)) + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x))


NAMES = ["first", "act", "add", "", "first:grad_output"]


def images() -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(1))


def by_hand(model: Net, x: torch.Tensor) -> dict[str, torch.Tensor]:
    first = F.linear(x, model.first.weight, model.first.bias)
    y = first.relu() + 1
    output = F.linear(y, model.head.weight, model.head.bias)
    (grad,) = torch.autograd.grad(output.square().sum(), first)
    return {"first": first, "act": first.relu(), "add": y, "": output, "first:grad_output": grad}


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    destroy_process_group()


def wrapped_by_compile(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def with_compiled_layer(model: Any) -> nn.Module:
    model.first = torch.compile(model.first, backend="eager")
    return model


def with_compiled_forward(model: Any) -> nn.Module:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def with_compiled_function(model: Any) -> nn.Module:
    forward = model.forward
    model.forward = torch.compile(lambda x: forward(x), backend="eager")
    return model


class Decorated(Net):
    forward = torch.compile(Net.forward, backend="eager")


def of_compiled_class(model: nn.Module) -> nn.Module:
    model.__class__ = Decorated
    return model


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def sharded_checkpoint(model: nn.Module) -> nn.Module:
    return sharded(checkpoint_wrapper(model))


WRAPPERS = [
    wrapped_by_compile,
    compiled_in_place,
    with_compiled_layer,
    with_compiled_forward,
    with_compiled_function,
    of_compiled_class,
    nn.DataParallel,
    nn.parallel.DistributedDataParallel,
    lambda model: nn.parallel.DistributedDataParallel(wrapped_by_compile(model)),
    sharded,
]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_wrapped_models_are_captured_and_edited_by_the_names_of_the_plain_model(
    wrap: Callable[[nn.Module], nn.Module], has_run: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    plain, x = Net(), images()
    model = wrap(copy.deepcopy(plain))
    if has_run:
        model(x).sum().backward()
    before, has_forward = num_hooks(model), "forward" in vars(model)
    with featx.capture(model, NAMES) as features:
        for number in range(2):
            model(x + number).square().sum().backward()
            for name, expected in by_hand(plain, x + number).items():
                torch.testing.assert_close(features[name], expected, msg=name)
    with torch.no_grad(), featx.edit(model, {"first": torch.zeros_like}):
        edited = model(x)
    torch.testing.assert_close(edited, plain.head(torch.ones(5, 4)))
    assert num_hooks(model) == before
    assert ("forward" in vars(model)) is has_forward
    torch.testing.assert_close(model(x), plain(x))


def test_compiled_code_runs_again_after_the_block() -> None:
    torch._dynamo.reset()
    runs = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append(1)
            return graph(*args)

        return run

    model, inside = torch.compile(Net(), backend=backend), Net()
    inside.compile(backend=backend)
    for each in (model, inside):
        each(images())
        num_before = len(runs)
        # Blocks of generators or threads end in any order.
        one, other = contextlib.ExitStack(), contextlib.ExitStack()
        one.enter_context(featx.capture(each, "first"))
        features = other.enter_context(featx.capture(each, "first"))
        each(images())
        one.close()
        each(images())
        assert features["first"].shape == (5, 4)
        assert len(runs) == num_before
        other.close()
        each(images())
        assert len(runs) > num_before


# torch 2.11 warns of what its own tracing does.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_calls_of_another_object_than_the_captured_one_are_explained() -> None:
    torch._dynamo.reset()
    model = Net()
    compiled = torch.compile(model, backend="eager")
    compiled(images())
    with featx.capture(model, "first") as features:
        compiled(images())
        with pytest.raises(LayerError, match=r"the result of torch\.compile"):
            features["first"]


def test_a_layer_that_is_not_called_is_not_blamed_on_an_import_of_dynamo() -> None:
    torch._dynamo.utils.counters.clear()
    model = Net()
    with featx.capture(model, "first") as features:
        copy.deepcopy(model)(images())
        with pytest.raises(LayerError, match=r"in the last forward pass\.$"):
            features["first"]


def test_an_edit_around_a_compiled_function_is_an_error() -> None:
    torch._dynamo.reset()
    model = Net()
    step = torch.compile(lambda x: model(x), backend="eager")
    step(images())
    with (
        pytest.raises(LayerError, match="instead of a compiled function"),
        featx.edit(model, {"first": torch.zeros_like}),
    ):
        step(images())


def test_a_watch_around_a_compiled_function_says_why_nothing_is_seen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch._dynamo.reset()
    model = Net()
    step = torch.compile(lambda x: model(x), backend="eager")
    step(images())
    with featx.watch(model) as log:
        step(images())
    assert not log.rows
    assert "instead of a compiled function" in capsys.readouterr().err
    assert num_hooks(model) == 0


@pytest.mark.usefixtures("process_group")
def test_gradients_of_sharded_parameters_are_refused() -> None:
    model = sharded(Net())
    before = num_hooks(model)
    with pytest.raises(ModelError, match="sharded"), featx.gradients.watch(model, clip_norm=1.0):
        pass
    assert num_hooks(model) == before


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = Net()
        self.list = nn.ModuleList([self.one])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.list[0](x)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", [wrapped_by_compile, checkpoint_wrapper, sharded_checkpoint, None])
def test_operations_of_wrapped_and_shared_modules(wrap: Callable[..., nn.Module] | None) -> None:
    model, x = Blocks(), images()
    expected = model.one.encode(x)
    if wrap is not None:
        model.one = model.list[0] = wrap(model.one)
    for name in ("one.add", "list.0.add"):
        with featx.capture(model, name) as features:
            model(x)
        assert torch.equal(features[name], expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers(reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.encode, x, use_reentrant=reentrant))

    model, x = Checkpointed(), images().requires_grad_()
    expected = by_hand(model, x)
    names = NAMES[:-1] if reentrant else NAMES
    with featx.capture(model, names) as features:
        model(x).square().sum().backward()
        for name in names:
            torch.testing.assert_close(features[name], expected[name], msg=name)
    if reentrant:
        with (
            pytest.raises(LayerError, match=r"checkpoint.*use_reentrant=False"),
            featx.capture(model, NAMES),
        ):
            model(x)
    assert num_hooks(model) == 0


def test_functional_call() -> None:
    model, other, x = Net(), Net(), images()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    with featx.capture(model, NAMES) as features:
        functional_call(model, dict(other.named_parameters()), x).square().sum().backward()
        for name, expected in by_hand(other, x).items():
            assert torch.equal(features[name], expected), name


def test_transforms_of_torch_func_are_refused_and_edited() -> None:
    model, x = Net(), images()
    with (
        pytest.raises(LayerError, match=r"first: .*torch\.func \(vmap"),
        featx.capture(model, "first"),
    ):
        vmap(model)(x)
    with featx.edit(model, {"first": torch.zeros_like}):
        assert torch.equal(vmap(model)(x), model(x))
    assert num_hooks(model) == 0


@pytest.mark.parametrize("capture", ["first:grad_output", "watch"])
def test_many_backward_passes_at_once_are_refused(capture: str) -> None:
    """Their gradients are tensors without values, which could not even be printed later."""
    model, x = Net(), images()
    block: Any = (
        featx.gradients.watch(model) if capture == "watch" else featx.capture(model, capture)
    )
    with block:
        output = model(x)[0]
        with pytest.raises(LayerError, match="is_grads_batched"):
            torch.autograd.grad(output, model.first.weight, torch.eye(2), is_grads_batched=True)
    assert num_hooks(model) == 0


def test_a_checkpoint_saved_inside_a_block_loads_without_it() -> None:
    model, x = Net(), images()
    with featx.capture(model, "first"), featx.edit(model, {"first": torch.zeros_like}):
        model(x)
        file, weights = io.BytesIO(), io.BytesIO()
        torch.save(model, file)
        torch.save(model.state_dict(), weights)
    file.seek(0), weights.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(x), model(x))
    assert torch.load(weights).keys() == model.state_dict().keys()
