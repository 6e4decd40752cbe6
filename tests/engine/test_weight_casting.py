"""Weights cast once: the values of autocast, no cast in a pass, and the module as it came."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import backbone_of, bound, noise
from tiny_model import MODEL, extract
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import ConvBatchNorm, with_statistics

from featx.engine import COMPUTE_DTYPES, Compute, Engine
from featx.engine.row_checks import row_cosines
from featx.engine.weight_casting import cast_weights, castable_weights
from featx.errors import ModelError
from featx.layers import no_fast_path
from featx.models import fold_pairs, state_sha256

BF16 = torch.bfloat16
ATTENTION = "patches.conv attention attention.out_proj"


class Patches(nn.Module):
    """An image as a sequence with positions, (B, 4, 16); the positions are added in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 4, stride=4)
        self.position = nn.Parameter(torch.randn(1, 4, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).flatten(2).transpose(1, 2) + self.position


class Encoder(nn.Module):
    """torchvision's order: attention by nn.MultiheadAttention, norms, and a layer scale."""

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__()
        self.patches, self.norm = Patches(), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=batch_first)
        self.mlp = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.full((16,), 0.1))
        self.batch_first = batch_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x)
        y = self.norm(x) if self.batch_first else self.norm(x).transpose(0, 1)
        y = self.attention(y, y, y, need_weights=False)[0]
        x = x + self.scale * (y if self.batch_first else y.transpose(0, 1))
        return x + self.mlp(self.norm(x))


class Tied(nn.Module):
    """One Parameter in two layers, and two Parameters of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = Patches()
        self.first, self.second, self.third = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.second.weight = self.first.weight
        self.third.weight = nn.Parameter(self.first.weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(self.patches(x))))


class Shared(nn.Module):
    """A weight of a product that is added as well, as some models tie their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.fc = Patches(), nn.Linear(16, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.patches(x) + self.fc.weight)


class ReadsDtype(nn.Module):
    """Asks a weight for its dtype, as some models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.conv = nn.Identity(), nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.seen(x.to(self.conv.weight.dtype)))


class ReadsNumbers(nn.Module):
    """Reads a weight where no operation shows it; numpy has no bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) * float(self.conv.weight.detach().numpy()[0, 0, 0, 0])


class Branches(nn.Module):
    """Bright images, which noise never is, are multiplied by the weight of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 4, 1), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return self.out(y + self.conv.weight.sum() if x.amax() > 50 else y)


def weight_norm() -> nn.Module:
    module = Encoder()
    module.mlp = nn.utils.parametrizations.weight_norm(module.mlp)
    return module


def hook_based() -> nn.Module:
    from torch.nn.utils import prune

    module = Tied()
    prune.random_unstructured(module.first, "weight", amount=0.5)
    module.third = nn.utils.spectral_norm(nn.Linear(16, 16))
    return module


def reference(module: nn.Module, layers: list[str], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What layers give under torch's own autocast, by hooks that copy at once."""
    values: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args, output: values.__setitem__(name, output.clone())

    handles = [module.get_submodule(n).register_forward_hook(keep(n)) for n in layers]
    with torch.no_grad(), no_fast_path, torch.autocast("cpu", BF16):
        module(x.clone())
    for handle in handles:
        handle.remove()
    return values


class Casts(TorchDispatchMode):
    """Counts casts of a module's parameters, of this thread."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._pointers = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_to_copy" in str(func) and args[0].untyped_storage().data_ptr() in self._pointers:
            self.count += 1
        return func(*args, **(kwargs or {}))


def num_casts(engine: Engine, module: nn.Module, x: torch.Tensor) -> int:
    with Casts(module) as casts:
        engine.run(x)
    return casts.count


def configured(engine: Engine, precision: str = "bf16", **choices: Any) -> Engine:
    engine.configure_compute(
        Compute(precision, False, **{"channels_last": False, "batch_size": 4, **choices})
    )
    return engine


@pytest.mark.parametrize(
    ("make", "layers", "cast", "left"),
    [
        (Encoder, ["patches", "norm@2", "mlp"], ATTENTION + " mlp", 0),
        (lambda: Encoder(batch_first=True), ["mlp"], ATTENTION + " mlp", 0),
        (Tied, ["first", "second", "third"], "patches.conv first third", 0),
        (Shared, ["patches", "fc"], "patches.conv", 1),
        (weight_norm, ["mlp"], ATTENTION + " mlp", 0),
        (hook_based, ["third"], "patches.conv third", 1),
    ],
    ids=["attention", "batch first", "tied", "shared", "weight_norm", "hook-based"],
)
def test_the_values_and_dtypes_of_autocast(
    make: Callable[[], nn.Module], layers: list[str], cast: str, left: int
) -> None:
    """Left are weights that something else reads in float32."""
    torch.manual_seed(0)
    module = make()
    with bound(backbone_of(module), *layers, dtype="float32") as engine:
        configured(engine)
        names = [name for name, p in module.named_parameters() if p.dtype == BF16]
        values = engine.run(noise())
        specs = {s.name: s for s in engine.specs(engine.chosen)}  # type: ignore[attr-defined]
        assert engine.weights.cast.doubt == ""
        assert num_casts(engine, module, noise()) == left
    assert {name.rpartition(".")[0] for name in names} == set(cast.split())
    assert not {p.dtype for p in module.parameters()} - {torch.float32}
    plain = [name.partition("@")[0] for name in layers]
    for name, expected in zip(layers, reference(module, plain, noise()).values(), strict=True):
        assert specs[name].compute_dtype == str(expected.dtype).removeprefix("torch.")
        assert torch.equal(values[name], expected.float()), name


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_folded_and_in_channels_last(precision: str, channels_last: bool) -> None:
    """The folded weights are those that are cast, in their memory format."""
    module = with_statistics(nn.Sequential(ConvBatchNorm(), nn.Conv2d(3, 8, 3)))
    x, dtype = noise(side=16), COMPUTE_DTYPES[precision]
    with torch.no_grad(), fold_pairs([(module[0].conv, module[0].bn)]):
        plain = {"0.relu": module[0], "1": module}
        with torch.autocast("cpu", dtype):
            expected = {name: part(x).float() for name, part in plain.items()}
    with bound(backbone_of(module, side=16), "0.relu", "1") as engine:
        configured(engine, precision, channels_last=channels_last, fold_batchnorm=True)
        read = module[0].conv.weight, module[0].conv.bias, module[1].weight
        assert {p.dtype for p in read} == {dtype}
        assert module[0].conv.weight.is_contiguous(
            memory_format=torch.channels_last if channels_last else torch.contiguous_format
        )
        for name, values in engine.run(x).items():
            torch.testing.assert_close(values, expected[name], rtol=2e-2, atol=2e-2)


def test_replicas_cast_nothing_and_give_the_same_bits() -> None:
    module = Encoder()
    backbone = backbone_of(module)
    backbone.reentrant = True
    batches = [noise(seed=i) for i in range(8)]
    with bound(backbone, "mlp") as engine:
        expected = [engine.run(x)["mlp"] for x in batches if configured(engine)]
        with engine.replicas(2) as replicas, ThreadPoolExecutor(2) as threads:

            def compute(i: int) -> tuple[int, torch.Tensor]:
                mine = replicas[i % 2]
                return num_casts(mine, module, batches[i]), mine.run(batches[i])["mlp"]

            even = threads.submit(lambda: [compute(i) for i in range(0, 8, 2)])
            odd = threads.submit(lambda: [compute(i) for i in range(1, 8, 2)])
            found = [pair for two in zip(even.result(), odd.result(), strict=True) for pair in two]
    assert [count for count, _ in found] == [0] * 8
    assert all(torch.equal(a, b) for (_, a), b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("module", "layers", "doubt"),
    [
        (ReadsDtype(), ["seen", "conv"], "seen changes: float32 becomes bfloat16"),
        (ReadsDtype(), ["conv"], ""),
        (nn.Sequential(ReadsNumbers(), nn.Identity()), ["0", "1"], "the model fails: "),
    ],
    ids=["a dtype shows", "it does not show", "an exception"],
)
def test_what_reads_a_weight_otherwise_keeps_autocasts_own_casts(
    module: nn.Module, layers: list[str], doubt: str
) -> None:
    with bound(backbone_of(module), *layers) as engine:
        configured(engine)
        values = engine.run(noise())
        assert engine.weights.cast.doubt.startswith(doubt)
        assert bool(doubt) == bool(engine.weights.cast.doubt)
        assert {p.dtype for p in module.parameters()} == {torch.float32 if doubt else BF16}
    for name, expected in reference(module, layers, noise()).items():
        assert torch.equal(values[name], expected.float())


def test_images_of_the_trial_show_what_noise_does_not() -> None:
    module = Branches()
    bright = 100 + noise(seed=7)
    for images, cast in ((None, True), (noise(0), True), (bright, False)):
        with bound(backbone_of(module), "out") as engine:
            engine.trial_images = images
            configured(engine)
            assert (module.conv.weight.dtype == BF16) == cast
            value = engine.run(bright)["out"]
    assert torch.equal(value, reference(module, ["out"], bright)["out"].float())


def test_what_cannot_be_replaced_is_left_alone() -> None:
    class Subclass(torch.Tensor):
        pass

    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1))
    with torch.inference_mode():
        module[0].weight = nn.Parameter(torch.randn(4, 3, 1, 1), requires_grad=False)
    module[1].weight = nn.Parameter(torch.randn(4, 4, 1, 1).as_subclass(Subclass))

    def forward() -> list[dict[str, torch.Tensor]]:
        with torch.no_grad(), torch.autocast("cpu", BF16):
            return [{"out": module(noise()).as_subclass(torch.Tensor)}]

    found = castable_weights(module, BF16, forward)
    assert set(found.names) == {"0.bias", "1.bias", "2.weight", "2.bias"}
    sparse = nn.Linear(3, 3)
    sparse.weight = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    found = castable_weights(sparse, BF16, lambda: [{"out": sparse.weight + sparse.weight}])
    assert found.names == ()


def test_the_block_gives_the_same_parameters_back() -> None:
    module = Tied()
    before, objects = state_sha256(module), {p: p.data_ptr() for p in module.parameters()}
    module.first.weight.grad = torch.ones(16, 16)
    names = [name for name, _ in module.named_parameters()]
    with contextlib.suppress(KeyError), cast_weights(module, names, BF16):
        assert {p.dtype for p in module.parameters()} == {BF16}
        assert set(module.parameters()) == set(objects)
        raise KeyError
    assert state_sha256(module) == before
    assert {p: p.data_ptr() for p in module.parameters()} == objects
    assert module.first.weight.grad.dtype == torch.float32


def test_a_failing_pass_leaves_the_module_as_it_came() -> None:
    module = Encoder()
    before = state_sha256(module)
    with contextlib.suppress(ModelError), bound(backbone_of(module), "mlp") as engine:
        assert state_sha256(module) == before
        configured(engine)
        assert state_sha256(module) != before
        engine.run(torch.zeros(2, 5, 8, 8))
        pytest.fail("five channels are no image")
    assert state_sha256(module) == before


def test_others_find_the_module_as_it_came() -> None:
    """Workers on its device, and the graph that TensorBoard traces."""
    module = Encoder()
    before = state_sha256(module)
    with bound(backbone_of(module), "mlp") as engine:
        fp32_bytes = configured(engine, "fp32").weights.num_bytes
        expected = configured(engine).run(noise())["mlp"]
        cast = sum(p.numel() for p in module.parameters() if p.dtype == BF16)
        assert engine.weights.num_bytes == fp32_bytes + 2 * cast
        with engine.off_device():
            assert state_sha256(module) == before
        assert torch.equal(engine.run(noise())["mlp"], expected)
        engine.without_hooks()
        assert state_sha256(module) == before


@pytest.mark.slow
def test_a_compiled_pass_reads_the_weights_that_were_cast() -> None:
    module = Encoder()
    with bound(backbone_of(module), "mlp") as engine:
        eager = configured(engine).run(noise())
        engine.configure_compute(Compute("bf16", True, False, 4))
        assert module.mlp.weight.dtype == BF16
        assert row_cosines(engine.run(noise()), eager) > 0.999
        assert torch.equal(configured(engine).run(noise())["mlp"], eager["mlp"])


def test_gradients_are_those_of_float32_weights() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Linear(8, 4))
    with bound(backbone_of(module), "1:grad_output", target="logsumexp") as engine:
        configured(engine)
        assert {p.dtype for p in module.parameters()} == {torch.float32}


def own() -> nn.Module:
    """A factory of a module that a test holds on to."""
    return OWN


OWN = nn.Sequential(nn.Conv2d(3, 8, 8, stride=8), nn.Flatten(), nn.Linear(128, 4))


@pytest.mark.slow
@pytest.mark.usefixtures("in_tmp_path")
def test_a_run_says_why_weights_are_cast_in_each_pass(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {**MODEL, "factory": "test_weight_casting:ReadsDtype", "weights": None}
    extract(photos, model=model, layers=["seen", "conv"], precision="bf16")
    output = capsys.readouterr().err
    line = next(line for line in output.splitlines() if line.startswith("weights "))
    assert "cast to bf16 in each pass; cast once, seen changes: float32 becomes" in line
    before = state_sha256(OWN)
    own_model = {**MODEL, "factory": "test_weight_casting:own", "weights": "default"}
    store = extract(photos, model=own_model, layers=["2"], precision="bf16", out="own")
    assert store["2"].attrs["compute_dtype"] == "bfloat16"
    assert "in each pass" not in capsys.readouterr().err
    assert state_sha256(OWN) == before


@pytest.mark.gpu
def test_replicas_on_a_gpu() -> None:
    from featx.engine.batch_parallelism import replicas_agree

    module = Encoder()
    backbone = backbone_of(module)
    backbone.reentrant = True
    with bound(backbone, "mlp", device=torch.device("cuda")) as engine:
        configured(engine)
        assert module.mlp.weight.dtype == BF16
        assert replicas_agree(engine, noise(), 2)
        assert num_casts(engine, module, noise()) == 0
