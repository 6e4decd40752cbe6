"""Batches computed at once: in order, with the values that they have one after the other."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_python
from made_store import dataset_digests
from tiny_engine import CPU, FP32, backbone_of, bound, noise
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import ClampedNet, ResidualConvNet

from featx.base import num_cpus
from featx.config import ReduceConfig, model_options
from featx.engine import BatchParallelism, Compute, Engine
from featx.errors import RunError
from featx.layers import select
from featx.models import build_backbone
from featx.pipeline import Passes
from featx.types import Batch, Part

PART = Part(0, 0, 100)


def batches(count: int) -> Iterator[tuple[Part, Batch]]:
    for start in range(count):
        yield PART, Batch(torch.zeros(1), start, 1, [])


def parallel(names: str, compute: Callable[[Any, Batch], Any]) -> Passes:
    """Parallel passes of replicas with these names and one thread each."""
    engines = [
        types.SimpleNamespace(name=name, own_stream=contextlib.nullcontext) for name in names
    ]
    engine = types.SimpleNamespace(replicas=lambda count: contextlib.nullcontext(engines))
    choice = BatchParallelism(1, len(engines), True, {})
    context: Any = types.SimpleNamespace(engine=engine, parallelism=choice)
    return Passes(context, compute)


def taken(several: Passes, count: int) -> list[Any]:
    with several:
        return [computed() for _, _, computed in several.each(batches(count))]


def test_batches_are_taken_in_their_order_whichever_is_done_first() -> None:
    def compute(engine: Any, batch: Batch) -> int:
        time.sleep(0.03 if batch.start % 2 == 0 else 0)
        return batch.start

    assert taken(parallel("abc", compute), 10) == list(range(10))


def test_each_engine_has_one_batch_at_a_time() -> None:
    at_work: list[str] = []
    met = threading.Barrier(2, timeout=10)

    def compute(engine: Any, batch: Batch) -> str:
        assert engine.name not in at_work
        at_work.append(engine.name)
        met.wait()  # both are at work
        at_work.remove(engine.name)
        return str(engine.name)

    assert set(taken(parallel("ab", compute), 8)) == {"a", "b"}


def test_an_error_is_raised_when_its_batch_is_taken_and_not_before() -> None:
    def compute(engine: Any, batch: Batch) -> int:
        if batch.start == 2:
            raise RuntimeError("the third")
        return batch.start

    with parallel("abc", compute) as several:
        each = several.each(batches(6))
        assert [computed() for _, _, computed in itertools.islice(each, 2)] == [0, 1]
        _, batch, computed = next(each)
        assert batch.start == 2
        with pytest.raises(RuntimeError, match="the third"):
            computed()


def test_no_more_passes_start_than_there_is_room_for() -> None:
    started: list[int] = []

    def noted() -> Iterator[tuple[Part, Batch]]:
        for part, batch in batches(9):
            started.append(batch.start)
            yield part, batch

    with parallel("ab", lambda engine, batch: batch.start) as several:
        for _, batch, _ in several.each(noted()):
            assert len(started) <= batch.start + 3


def test_idle_engines_are_counted() -> None:
    go = threading.Event()
    with parallel("ab", lambda engine, batch: go.wait(10)) as several:
        assert several.idle_share() == 1
        each = several.each(batches(3))
        _, _, computed = next(each)
        assert several.idle_share() == 0
        go.set()
        computed()
        for _, _, computed in each:
            computed()
        assert several.idle_share() == 1


def test_a_batch_has_the_threads_that_were_asked_for() -> None:
    before = torch.get_num_threads()
    several = parallel("ab", lambda engine, batch: torch.get_num_threads())
    try:
        assert taken(several, 2) == [1, 1]
    finally:
        torch.set_num_threads(before)


def passes(ahead: bool, compute: Callable[[Any, Batch], Any]) -> Passes:
    """Those of a run with one engine."""
    engine = types.SimpleNamespace(device="cuda:1", own_stream=contextlib.nullcontext)
    context: Any = types.SimpleNamespace(
        engine=engine, parallelism=BatchParallelism(None, 1, ahead, {})
    )
    return Passes(context, compute)


@pytest.mark.parametrize("ahead", [True, False])
def test_the_next_batch_may_be_on_its_way_while_one_is_taken(ahead: bool) -> None:
    started = threading.Semaphore(0)

    def compute(engine: Any, batch: Batch) -> tuple[int, int]:
        started.release()
        return batch.start, threading.get_ident()

    with passes(ahead, compute) as several:
        each = several.each(batches(3))
        first = next(each)[2]()
        if ahead:
            assert all(started.acquire(timeout=10) for _ in range(2))  # the second as well
        found = [first, *(computed() for *_, computed in each)]
    assert [start for start, _ in found] == [0, 1, 2]
    assert {thread == threading.get_ident() for _, thread in found} == {not ahead}


@pytest.mark.parametrize("ahead", [True, False])
def test_memory_that_is_gone_in_the_middle_of_a_run_is_said(ahead: bool) -> None:
    def compute(engine: Any, batch: Batch) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with passes(ahead, compute) as several:
        _, _, computed = next(several.each(batches(1)))
        with pytest.raises(RunError, match=r"out of memory on cuda:1 in the middle .* new out"):
            computed()


@pytest.mark.slow
def test_a_compiled_pass_is_not_compiled_again_in_another_thread() -> None:
    with bound(backbone_of(ResidualConvNet()), "fc") as engine:
        engine.run(noise())  # as a run does, which times the eager model first
        engine.configure_compute(Compute("fp32", True, False, 4))
        expected = digests_of(engine, noise())
        with torch.compiler.set_stance("fail_on_recompile"), ThreadPoolExecutor(1) as thread:
            assert thread.submit(digests_of, engine, noise()).result() == expected


# Replicas of an engine


Digests = dict[str, str]


def digests_of(engine: Engine, x: torch.Tensor) -> Digests:
    """name -> sha256 of what an engine makes of a batch; all leaves of a model are gigabytes."""
    return {
        name: hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
        for name, value in engine.run(x).items()
    }


def run_in_parallel(engine: Engine, inputs: list[torch.Tensor], count: int = 3) -> list[Digests]:
    """What replicas make of some batches, three at once all the time."""
    with engine.replicas(count) as replicas, ThreadPoolExecutor(count) as threads:
        free = list(replicas)

        def compute(x: torch.Tensor) -> Digests:
            replica = free.pop()
            found = digests_of(replica, x)
            free.append(replica)
            return found

        return list(threads.map(compute, inputs))


@pytest.mark.parametrize(
    ("module", "layers"),
    [
        (ResidualConvNet, ["conv1", "bn", "relu@2", "pool", "fc"]),
        (ResidualConvNet, ["relu@1"]),  # the pass is ended early, by the replica's own hooks alone
        (ClampedNet, ["layer"]),  # copied where it is written to, which each replica finds out
    ],
)
def test_replicas_compute_what_the_engine_computes(
    module: Callable[[], torch.nn.Module], layers: list[str]
) -> None:
    backbone = backbone_of(module())
    backbone.reentrant = True
    inputs = [9 * noise(seed=seed) for seed in range(40)]
    with bound(backbone, *layers) as engine:
        expected = [digests_of(engine, x) for x in inputs]
        assert engine.can_be_replicated
        assert run_in_parallel(engine, inputs) == expected
        # Afterwards it is as before, and no hook is left of the replicas.
        assert [digests_of(engine, x) for x in inputs[:2]] == expected[:2]
        assert sum(len(m._forward_hooks) for m in backbone.module.modules()) == len(
            {name.partition("@")[0] for name in layers}
        )


def test_replicas_cast_no_weights() -> None:
    """Autocast keeps one cache for all threads: on CUDA another stream may still write to it.

    So passes leave no weight for it to cast, also while another replica is held inside its own.
    """
    inside, leave = threading.Event(), threading.Event()
    backbone = backbone_of(ResidualConvNet())
    backbone.reentrant = True
    casts: list[list[torch.dtype]] = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            if func is torch.ops.aten._to_copy.default:
                casts[-1].append(kwargs["dtype"])
            return func(*args, **(kwargs or {}))

    def counted(engine: Engine) -> int:
        casts.append([])
        with Casts():
            engine.run(noise())
        return casts[-1].count(torch.bfloat16)

    def hold(module: Any, args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert leave.wait(10)

    with bound(backbone, "fc") as engine:
        engine.configure_compute(Compute("bf16", False, False, 4))
        handle = backbone.module.fc.register_forward_pre_hook(hold)
        with engine.replicas(2) as replicas, ThreadPoolExecutor(1) as other:
            alone = counted(replicas[0])
            waiting = other.submit(replicas[1].run, noise())
            assert inside.wait(10)
            try:
                assert counted(replicas[0]) == alone == 1  # the images alone
            finally:
                leave.set()
            waiting.result()
        handle.remove()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_thread_may_go_from_one_replica_to_another(order: tuple[int, int]) -> None:
    """The hooks of the first see nothing of the second's pass, and do not end it."""
    backbone = backbone_of(ResidualConvNet())
    backbone.reentrant = True
    with bound(backbone, "conv1") as engine:
        expected = digests_of(engine, noise())
        with engine.replicas(2) as replicas:
            assert [digests_of(replicas[i], noise()) for i in order] == [expected] * 2
            assert digests_of(engine, noise()) == expected


def test_what_replicas_are_not_for() -> None:
    backbone = backbone_of(ResidualConvNet())
    with bound(backbone, "fc") as engine:
        assert not engine.can_be_replicated  # a user's own module may keep things
    backbone.reentrant = True
    with bound(backbone, "fc") as engine:
        assert engine.can_be_replicated
        engine.compute = Compute("fp32", True, False, 4)
        assert not engine.can_be_replicated
    for layer in ("fc:grad_output", "add"):
        with bound(backbone, layer) as engine:
            assert not engine.can_be_replicated


SMALL = ["torchvision/resnet18", "timm/vit_tiny_patch16_224", "timm/mobilenetv3_small_050"]
FAMILIES = [
    *(f"torchvision/{name}" for name in (
        "alexnet", "convnext_tiny", "densenet121", "efficientnet_v2_s", "googlenet", "inception_v3",
        "maxvit_t", "mnasnet0_5", "regnet_y_400mf", "shufflenet_v2_x0_5", "squeezenet1_0",
        "swin_v2_t", "vgg11_bn", "vit_b_32",
    )),
    *(f"timm/{name}" for name in (
        "beit_base_patch16_224", "cait_xxs24_224", "coat_tiny", "coatnet_nano_rw_224",
        "convmixer_768_32", "crossvit_tiny_240", "davit_tiny", "deit_tiny_patch16_224",
        "edgenext_xx_small", "efficientformer_l1", "efficientformerv2_s0", "efficientvit_b0",
        "efficientvit_m0", "eva02_tiny_patch14_224", "fastvit_t8", "focalnet_tiny_srf",
        "gcvit_xxtiny", "ghostnet_050", "hrnet_w18_small", "levit_128s", "maxvit_tiny_rw_224",
        "mixer_s32_224", "mobileone_s0", "mobilevit_xxs", "mvitv2_tiny", "nest_tiny",
        "nf_resnet26", "pit_ti_224", "poolformer_s12", "pvt_v2_b0", "repvit_m0_9", "rexnet_100",
"swin_tiny_patch4_window7_224", "tiny_vit_5m_224", "twins_pcpvt_small",
        "vit_medium_patch16_rope_reg1_gap_256", "volo_d1_224", "xcit_nano_12_p16_224",
    )),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SMALL, *FAMILIES])
def test_models_of_the_libraries_may_be_passed_at_once(name: str) -> None:
    """Bit for bit, for all leaves and layers: a pass keeps nothing that another one would see."""
    library, _, model = name.partition("/")
    backbone = build_backbone(model_options(name=model, library=library, weights=None), 0)
    assert backbone.reentrant
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Engine(backbone, CPU, "float32") as engine:
            found = select(
                [("leaves", ReduceConfig("none"))], engine.trace(), backbone.classifier,
                backbone.stages,
            )  # fmt: skip
            engine.attach_captures(found.chosen)
            engine.configure_compute(FP32)
            side = backbone.preprocess.crop[0]
            inputs = [noise(2, side, seed) for seed in range(6)]
            expected = [digests_of(engine, x) for x in inputs]
            assert engine.can_be_replicated
            assert run_in_parallel(engine, inputs) == expected
    finally:
        torch.set_num_threads(before)


# The command


def printed(photos: Path, *keys: str, cpus: int = 2) -> str:
    """What the command says that extracts with so many CPUs."""
    made = [
        "model=resnet18", "model.weights=null", "batch_size=4", "data=folder", "precision=fp32",
        "compile=false", "part_rows=8", "layers=[conv1,layer2,avgpool]", f"data.root={photos}",
        *keys,
    ]  # fmt: skip
    done = run_python("-m", "featx", *made, env={"OMP_NUM_THREADS": str(cpus)})
    return done.stdout + done.stderr


STATS = ("job=stats", "layers=[avgpool]")


@pytest.mark.slow
@pytest.mark.skipif(num_cpus() < 2, reason="one CPU computes one batch")
@pytest.mark.parametrize(
    ("keys", "others", "said", "file"),
    [
        ((), (), "2 parallel batches with 1 thread each", "features.h5"),
        ((), ("executor.workers=2",), "CPU, 1 thread, batches of 4, not compiled\n", "features.h5"),
        (STATS, (), "2 parallel batches with 1 thread each", "stats.h5"),
    ],
)
def test_values_are_the_same_with_parallel_batches(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    keys: tuple[str, ...], others: tuple[str, ...], said: str, file: str,
) -> None:  # fmt: skip
    """Of one thread, of two in parallel, and of two workers with one thread each."""
    monkeypatch.chdir(tmp_path)
    alone = printed(photos, "out=one", *keys, cpus=1)
    assert "CPU, 1 thread, batches of 4, not compiled\n" in alone
    assert said in printed(photos, "out=other", *keys, *others)
    digests = [dataset_digests(Path(out, file)) for out in ("one", "other")]
    assert digests[0] == digests[1]
    if file == "features.h5":
        one, other = (json.loads(Path(out, "featx.json").read_bytes()) for out in ("one", "other"))
        assert one["resolved"] == other["resolved"]
        assert one["resolved"]["threads"] == 1
