"""precision=auto, on engines that only say how long a pass takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_engine import Simulated
from tiny_engine import with_bf16

from featx.engine import Compute
from featx.engine.precision_choice import ROUNDS, ChosenPrecision, choose_precision

IMAGES = torch.zeros(16, 3, 2, 2, dtype=torch.uint8)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ChosenPrecision, Simulated]]:
    """A function that chooses the precision of a simulated engine."""

    def choose(
        timed_images: torch.Tensor = IMAGES,
        exact: Any = None,
        batch_size: int = 16,
        **of_engine: Any,
    ) -> tuple[ChosenPrecision, Simulated]:
        engine: Any = Simulated(**of_engine)
        monkeypatch.setattr("time.perf_counter", lambda: engine.now)
        with_bf16(monkeypatch)
        compute = Compute("fp32", False, False, batch_size)
        return choose_precision(engine, compute, IMAGES, timed_images, exact), engine

    return choose


def test_the_faster_one_is_taken_with_its_rows_and_seconds(chosen: Any) -> None:
    found, engine = chosen(seconds={"fp32": 0.1, "bf16": 0.04})
    assert found.precision == "bf16"
    assert found.reason == "bf16 2.50 times as fast, cosine 1.00000 on 16 images"
    assert found.measured.seconds_per_image == pytest.approx(0.04)
    assert found.measured.rows["layer"].shape == (16, 2)
    whole = [precision for precision, size in engine.batches if size == 16]
    assert whole == ["fp32", "fp32", "bf16", "bf16"]


def test_known_rows_save_a_pass(chosen: Any) -> None:
    exact = {"layer": torch.ones(16, 2)}
    _, engine = chosen(exact=exact, seconds={"fp32": 0.1, "bf16": 0.04})
    assert [batch for batch in engine.batches if batch[0] == "fp32"] == [("fp32", 16)]


@pytest.mark.parametrize("first", range(14))
@pytest.mark.parametrize("length", [1, 4])
def test_another_program_does_not_make_it_take_fp32(chosen: Any, first: int, length: int) -> None:
    """Whenever it starts; it slows some passes down to a fifth."""

    def slowdown(number: int) -> float:
        return 5.0 if first <= number < first + length else 1.0

    found, _ = chosen(seconds={"fp32": 0.1, "bf16": 0.04}, slowdown=slowdown)
    assert found.precision == "bf16"


@pytest.mark.parametrize("first", range(14))
def test_nor_bf16_where_that_gains_nothing(chosen: Any, first: int) -> None:
    """Slow passes in fp32 may make bf16 look faster, but not those of one moment."""
    found, _ = chosen(
        seconds={"fp32": 0.1, "bf16": 0.1},
        slowdown=lambda number: 5.0 if number == first else 1.0,
    )
    if first > 1:  # the passes in fp32, of which a long one is not repeated
        assert found.precision == "fp32"
        assert "and 1.1 is needed" in found.reason


@pytest.mark.parametrize(("slower", "glances"), [(5.0, ROUNDS), (9.0, 1)])
def test_a_far_slower_precision_is_refused_after_small_batches(
    chosen: Any, slower: float, glances: int
) -> None:
    found, engine = chosen(seconds={"fp32": 0.1, "bf16": 0.1 * slower})
    assert (found.precision, found.reason) == ("fp32", f"bf16 {slower} times slower")
    assert found.measured.seconds_per_image == pytest.approx(0.1)
    assert {size for precision, size in engine.batches if precision == "bf16"} == {2}
    assert engine.batches.count(("bf16", 2)) == 2 * glances


def test_costs_of_each_batch_do_not_refuse_a_precision(chosen: Any) -> None:
    """A batch of two then takes longer per image than the batch of 16, in both precisions."""
    found, _ = chosen(seconds={"fp32": 0.01, "bf16": 0.002}, per_batch_s=0.2)
    assert found.precision == "bf16"


def test_other_rows_are_refused_at_once(chosen: Any) -> None:
    found, engine = chosen(seconds={"fp32": 0.1, "bf16": 0.02}, value=-1.0)
    assert found.precision == "fp32"
    assert "cosine 0.00000 < 0.999" in found.reason
    assert found.measured.rows["layer"][0, 1] == 1.0
    assert engine.batches.count(("bf16", 16)) == 2, "not measured in turns"


def test_a_gpu_is_timed_at_the_batch_size_of_the_run(chosen: Any) -> None:
    batch = torch.zeros(256, 3, 2, 2, dtype=torch.uint8)
    found, engine = chosen(
        timed_images=batch,
        device="cuda",
        seconds={"fp32": 1e-3, "fp16": 4e-4, "bf16": 5e-4},
    )
    assert found.precision == "fp16"
    assert found.measured.rows["layer"].shape == (16, 2)
    sizes = [size for precision, size in engine.batches if precision == "fp16"]
    assert sizes == [16, 256, 256, 256]
    assert found.reason.startswith("fp16 2.50 times as fast")
    assert "bf16 2.00 times as fast" in found.reason


def test_no_pass_is_larger_than_a_batch_of_the_run(chosen: Any) -> None:
    """A program may take no more images, and a GPU may have no memory for them."""
    found, engine = chosen(
        timed_images=IMAGES[:3], batch_size=3, seconds={"fp32": 0.1, "bf16": 0.04}
    )
    assert found.precision == "bf16"
    assert found.measured.rows["layer"].shape == (16, 2)
    assert max(size for _, size in engine.batches) == 3
