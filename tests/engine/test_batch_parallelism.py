"""How many batches are computed in parallel."""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from made_store import dataset_digests
from tiny_engine import FP32, backbone_of, bound, noise
from zoo import ResidualConvNet

import featx
from featx.config import model_options
from featx.engine import BatchParallelism, Compute, batch_parallelism
from featx.engine.batch_parallelism import (
    decide,
    replicas_agree,
    room_for_batches,
    trial_threads,
)
from featx.models import build_backbone

GIB = float(1 << 30)


@pytest.mark.parametrize(
    ("free", "each", "batches"),
    [(None, 1, 4), (100 * GIB, GIB, 32), (5 * GIB, GIB, 3), (0.5 * GIB, GIB, 1), (GIB, -5, 32)],
)
def test_half_of_what_is_free_is_left(
    set_free_memory: Callable[..., None], free: float | None, each: float, batches: int
) -> None:
    set_free_memory(free)
    assert room_for_batches(int(GIB), int(GIB + each), 32) == batches
    assert room_for_batches(int(GIB), int(GIB + each), 1) == 1


@pytest.fixture
def set_kept(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Sets whether threads keep the memory that they have freed."""
    place = "featx.engine.batch_parallelism.is_kept_in_threads"
    return lambda kept: monkeypatch.setattr(place, lambda: kept)


@pytest.mark.parametrize(
    ("cpus", "can_be_replicated", "kept", "threads", "replicas"),
    [
        (1, True, True, 1, 1),
        (2, True, True, 1, 2),
        (6, True, True, 2, 3),
        (16, True, True, 4, 4),
        (8, False, True, 8, 1),  # a user's own model
        (8, True, False, 8, 1),  # in a notebook
    ],
)
def test_threads_of_a_batch_and_batches_at_once(
    set_kept: Callable[[bool], None], cpus: int, can_be_replicated: bool, kept: bool,
    threads: int, replicas: int,
) -> None:  # fmt: skip
    set_kept(kept)
    engine = types.SimpleNamespace(can_be_replicated=can_be_replicated)
    found = decide(engine, cpus, None, None, make_batch)
    parallel = f", and {replicas} parallel batches" if replicas > 1 else ""
    assert found == BatchParallelism(
        threads, replicas, replicas > 1, {"threads": f"{threads}{parallel}"}
    )


@pytest.mark.parametrize(
    ("cpus", "stored", "replicas", "here"),
    [(8, 8, 1, 2), (8, 2, 4, None), (8, 1, 4, 2), (2, 4, 1, 1)],
)
def test_a_store_keeps_its_threads(
    set_kept: Callable[[bool], None], cpus: int, stored: int, replicas: int, here: int | None
) -> None:
    set_kept(True)
    engine = types.SimpleNamespace(can_be_replicated=True)
    resume_state: Any = types.SimpleNamespace(resolved={"threads": stored}, what="the store was")
    found = decide(engine, cpus, resume_state, None, make_batch)
    assert (found.threads, found.replicas) == (stored, replicas)
    assert (f"; {here} here would give" in found.choices["threads"]) == (here is not None)


@pytest.mark.parametrize(
    ("cpus", "resolved", "threads"),
    [
        (None, {"compile": True, "threads": 2}, None),  # a GPU computes
        (8, None, 8),
        (8, {"compile": False, "threads": 2}, 8),
        (8, {"compile": True, "threads": 2}, 2),  # the code is made for so many
        (8, {"compile": True}, 8),  # of before threads were kept
    ],
)
def test_a_store_is_compiled_for_its_own_threads(
    cpus: int | None, resolved: dict[str, Any] | None, threads: int | None
) -> None:
    resume_state: Any = None if resolved is None else types.SimpleNamespace(resolved=resolved)
    assert trial_threads(cpus, resume_state) == threads


# On CUDA

CUDA = torch.device("cuda", 0)


class Kept(torch.nn.Module):
    """Keeps its map from one call to the next: two passes at once see each other's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.last = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.conv(x)
        time.sleep(0.05)
        return self.last(self.kept)


@pytest.mark.parametrize(
    ("module", "layer", "same"), [(ResidualConvNet, "fc", True), (Kept, "last", False)]
)
def test_replicas_are_tried_in_parallel(module: Any, layer: str, same: bool) -> None:
    backbone = backbone_of(module())
    backbone.reentrant = True
    with bound(backbone, layer) as engine:
        assert replicas_agree(engine, noise(), 2) == same


def test_a_value_that_is_none_is_the_same_as_itself() -> None:
    backbone = backbone_of(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten()))
    backbone.reentrant = True
    with bound(backbone, "1") as engine:
        assert replicas_agree(engine, torch.full((2, 3, 8, 8), torch.nan), 2)


NO_ROOM = "1 (there is not enough memory for parallel batches)"
OTHER_BITS = "1 (parallel batches give other last bits here)"


def make_batch(size: int) -> torch.Tensor:
    return noise(size)


class Cuda:
    """A device that says what a test wants, and an engine on it.

    A batch takes 1 GiB there, beside 3 GiB of weights; 2 GiB are kept by torch, and free.
    """

    device = CUDA
    compute = FP32

    def __init__(self, patch: pytest.MonkeyPatch, free: float) -> None:
        self.backbone = types.SimpleNamespace(reentrant=True)
        self.can_be_replicated = True
        self.same: bool | Exception = True
        self.emptied = 0
        for name, value in {
            "memory_allocated": 3 * GIB,
            "max_memory_allocated": 4 * GIB,
            "memory_reserved": 5 * GIB,
            "reset_peak_memory_stats": None,
            "mem_get_info": (free - 2 * GIB, 9 * GIB),
        }.items():
            patch.setattr(torch.cuda, name, lambda device, value=value: value)
        patch.setattr(torch.cuda, "empty_cache", self._empty)

    def run(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": torch.zeros(64), "b": torch.zeros(64)}  # 512 bytes, of which there are four

    def _empty(self) -> None:
        self.emptied += 1

    @contextlib.contextmanager
    def replicas(self, count: int) -> Iterator[list[Replica]]:
        yield [Replica(self)] * count


class Replica:
    """A replica of `Cuda`, whose values are the same, others or an error."""

    def __init__(self, engine: Cuda) -> None:
        self._engine = engine

    def own_stream(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def run(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        if isinstance(self._engine.same, Exception):
            raise self._engine.same
        values = self._engine.run(batch)
        return values if self._engine.same else {name: 1 - x for name, x in values.items()}


@pytest.mark.parametrize(
    ("free", "host", "expected"),
    [
        (4 * GIB, None, (2, True, "2, a batch in each")),
        (4 * GIB, 4096.0, (2, True, "2, a batch in each")),
        (3.9 * GIB, None, (1, False, NO_ROOM)),
        (4 * GIB, 4095.0, (1, False, NO_ROOM)),
    ],
)
def test_two_batches_where_there_is_memory_for_them(
    monkeypatch: pytest.MonkeyPatch, set_free_memory: Callable[..., None], free: float,
    host: float | None, expected: tuple[int, bool, str],
) -> None:  # fmt: skip
    set_free_memory(host)
    found = decide(Cuda(monkeypatch, free), None, None, None, make_batch)
    assert found == BatchParallelism(None, *expected[:2], {"streams": expected[2]})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"backbone": types.SimpleNamespace(reentrant=False)}, (1, False, "1")),
        ({"can_be_replicated": False}, (1, True, "1")),  # compiled, or gradients are taken
        ({"same": False}, (1, True, OTHER_BITS)),
        ({"same": torch.OutOfMemoryError("full")}, (1, False, NO_ROOM.replace("does", "did"))),
    ],
)
def test_two_batches_where_they_do_not_change_each_other(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], expected: tuple[int, bool, str]
) -> None:
    engine = Cuda(monkeypatch, 9 * GIB)
    vars(engine).update(change)
    assert decide(engine, None, None, None, make_batch) == BatchParallelism(
        None, *expected[:2], {"streams": expected[2]}
    )
    assert engine.emptied == ("same" in change)


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_other_devices_have_no_streams(device: str) -> None:
    engine: Any = types.SimpleNamespace(device=torch.device(device))
    assert decide(engine, None, None, None, make_batch) == BatchParallelism(None, 1, False, {})


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("model", ["resnet50", "vit_b_16"])
def test_replicas_on_cuda_give_the_bits_of_one(model: str, precision: str) -> None:
    backbone = build_backbone(model_options(name=model, weights=None), 0)
    layer = "avgpool" if model == "resnet50" else "encoder"
    with bound(backbone, layer, device=CUDA) as engine:
        engine.configure_compute(Compute(precision, False, False, 64))
        x = torch.randint(256, (64, 3, 224, 224), dtype=torch.uint8)
        assert (
            decide(engine, None, None, None, lambda size: x[:size]).replicas
            == batch_parallelism.CUDA_STREAMS
        )
        assert all(replicas_agree(engine, x, 2) for _ in range(10))
        with engine.replicas(2) as replicas:
            found = set()
            for replica in replicas:
                with replica.own_stream():
                    found.add(torch.cuda.current_stream(CUDA).cuda_stream)
            assert len(found) == 2
            assert torch.cuda.default_stream(CUDA).cuda_stream not in found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_layers_that_are_changed_in_place_are_right_in_both_streams(dtype: str) -> None:
    """Their rows keep the dtype of the layer, so that no cast makes a copy of them."""
    backbone = build_backbone(model_options(name="resnet50", weights=None), 0)
    layers = ("layer1.0.bn1", "layer2.0.bn3", "layer4.2.bn3")
    x = torch.randint(256, (64, 3, 224, 224), dtype=torch.uint8)
    expected = {}
    with bound(backbone, *layers, device=CUDA, dtype=dtype) as engine:
        precision = "fp32" if dtype == "float32" else "fp16"
        engine.configure_compute(Compute(precision, False, False, 64))
        assert all(replicas_agree(engine, x, 2) for _ in range(10))
        rows = engine.run(x)
        engine.without_hooks()
        with engine.module_and_input(x) as (module, images):
            for name in layers:
                module.get_submodule(name).register_forward_hook(
                    lambda _, args, output, name=name: expected.update({name: output.clone()})
                )
            module(images)
    for name in layers:
        assert torch.equal(rows[name], expected[name].to(rows[name].dtype).cpu()), name


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_on_cuda_gives_the_same_bits_in_one_stream_and_in_two(
    photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Rows, and sums that are made on the device of values that come from both streams."""
    keys = {"model": {"name": "resnet18", "weights": None}, "data": photo_folder, "seed": 3}
    keys |= {"layers": ["layer2"], "reduce": "avg", "batch_size": 2, "part_rows": 8}
    keys |= {"device": "cuda", "precision": precision}
    rows, sums = [], []
    for count, streams in ((1, "1 stream"), (2, "2 streams")):
        monkeypatch.setattr(batch_parallelism, "CUDA_STREAMS", count)
        capfd.readouterr()
        rows.append(featx.extract(**keys, out=tmp_path / f"rows{count}")["layer2"][:].tobytes())
        assert f"{streams}, batches of 2" in capfd.readouterr().err
        featx.stats(**keys, out=tmp_path / f"sums{count}")
        assert f"{streams}, batches of 2" in capfd.readouterr().err
        sums.append(dataset_digests(tmp_path / f"sums{count}" / "stats.h5"))
    assert rows[0] == rows[1]
    assert sums[0] == sums[1]
