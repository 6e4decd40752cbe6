"""Options that are `auto`, as they are measured on simulated engines."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_engine import Simulated

from featx.config import from_composed, from_keywords
from featx.engine import AutoSettings
from featx.errors import ConfigError, RunError


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that resolves the options of a run on a simulated engine."""

    def resolve(
        engine: Any, num_images: int = 4, num_rows: int = 100, **keys: Any
    ) -> tuple[AutoSettings, Any]:
        monkeypatch.setattr("time.perf_counter", lambda: engine.now)
        given = {"precision": "fp32", "compile": False, "out": "store", **keys}
        config = from_composed(from_keywords(given))
        images = torch.zeros(num_images, 3, 2, 2, dtype=torch.uint8)
        settings = AutoSettings(config, engine, images, num_rows, None)
        settings.resolve()
        return settings, engine

    return resolve


@pytest.mark.parametrize(("first_s", "passes", "seconds"), [(2.0, 1, 0.5), (0.1, 2, 0.00025)])
def test_a_slow_pass_on_a_cpu_is_not_repeated(
    resolved: Any, first_s: float, passes: int, seconds: float
) -> None:
    """The first pass of four images may be slow, as one that loads kernels; then it takes 1 ms."""
    engine = Simulated({"fp32": 0.00025}, lambda number: 1.0 if number else first_s / 0.001)
    settings, _ = resolved(engine, batch_size=4)
    assert len(engine.batches) == passes
    assert settings.seconds_per_image == pytest.approx(seconds)


@pytest.mark.parametrize(("device", "size"), [("cpu", 16), ("cuda", 64)])
def test_a_gpu_is_timed_at_the_batch_size_of_the_run(resolved: Any, device: str, size: int) -> None:
    settings, engine = resolved(Simulated({"fp32": 0.1}, device=device), 16, batch_size=64)
    assert {batch for _, batch in engine.batches} == {size}
    assert (settings.trial_rows is None) == (size != 16), "rows of the trial images only"


@pytest.mark.parametrize(("images_per_second", "timed"), [(2900, 256), (200, 48), (10, 16)])
def test_a_gpu_is_timed_on_so_many_images_that_launches_do_not_count(
    resolved: Any, images_per_second: float, timed: int
) -> None:
    seconds = dict.fromkeys(("fp32", "fp16", "bf16"), 1 / images_per_second)
    _, engine = resolved(Simulated(seconds, device="cuda"), 16, 999, precision="auto")
    assert {size for precision, size in engine.batches if precision == "fp16"} == {16, timed}


@pytest.mark.parametrize(
    ("compiled_s", "option", "kept", "said"),
    [
        (0.5, "auto", True, "true (about 1000 s of work)"),
        (0.95, "auto", False, "false (1.05 times as fast is too little)"),
        (0.95, True, True, None),
    ],
)
def test_compile_auto_has_to_pay(
    resolved: Any, compiled_s: float, option: Any, kept: bool, said: str | None
) -> None:
    engine = Simulated({"fp32": 1.0, "compiled": compiled_s}, value=1.0001)
    settings, _ = resolved(engine, num_rows=1000, batch_size=4, compile=option)
    assert engine.compute.compile is kept
    assert settings.choices.get("compile") == said
    assert settings.seconds_per_image == pytest.approx(compiled_s if kept else 1.0)
    second = settings.trial_rows["layer"][0, 1]
    assert second == pytest.approx(1.0001 if kept else 1.0), "the rows of the run"


def test_other_values_are_not_kept_however_fast(resolved: Any) -> None:
    def engine() -> Simulated:
        return Simulated({"fp32": 1.0, "compiled": 0.1}, value=-1.0)

    settings, found = resolved(engine(), num_rows=1000, compile="auto")
    assert not found.compute.compile
    assert settings.choices["compile"].startswith("false (cosine to eager is")
    with pytest.raises(RunError, match="compile=true failed"):
        resolved(engine(), compile=True)


@pytest.mark.parametrize(("device", "image_bytes"), [("cpu", 10**6), ("cuda", 0)])
def test_a_batch_without_room_is_refused_before_it_is_made(
    resolved: Any, set_free_memory: Callable[..., None], device: str, image_bytes: int
) -> None:
    set_free_memory(1e7)
    engine = Simulated({"fp32": 1e-6}, device=device, image_bytes=image_bytes)
    with pytest.raises(ConfigError, match=r"batch_size=1000000 needs at least") as raised:
        resolved(engine, batch_size=10**6)
    assert not engine.batches
    fits = int(re.findall(r"batch_size=(\d+) fits", str(raised.value))[0])
    resolved(engine, batch_size=fits)
    assert engine.compute.batch_size == fits


@pytest.mark.parametrize(
    ("device", "rows", "size"),
    [("cpu", 5, 8), ("cpu", 255, 16), ("cpu", 256, 32), ("cuda", 255, 256), ("cuda", 10**6, 256)],
)
def test_a_small_run_on_a_cpu_has_small_batches(
    resolved: Any, device: str, rows: int, size: int
) -> None:
    """Else one thread computes the last batch and the others look on."""
    _, engine = resolved(Simulated({"fp32": 1e-3}, device=device), num_rows=rows)
    assert engine.compute.batch_size == size


@pytest.mark.parametrize(
    ("device", "option", "folds"),
    [("cpu", True, True), ("cpu", False, False), ("cuda", True, False), ("cuda", False, False)],
)
def test_batchnorm_is_folded_where_that_is_faster(
    resolved: Any, device: str, option: bool, folds: bool
) -> None:
    """cuDNN takes longer for a bias than for the BatchNorm that it replaces."""
    settings, engine = resolved(Simulated({"fp32": 1e-3}, device=device), fold_batchnorm=option)
    assert engine.asked_to_fold is engine.compute.fold_batchnorm is folds
    said = settings.choices.get("fold_batchnorm", "")
    assert ("slower on CUDA" in said) == (option and device == "cuda")


def test_a_part_holds_a_batch_and_some_seconds_of_work(resolved: Any) -> None:
    """10 ms an image: in 5.5 s 550 images, of which a part takes a power of two."""
    settings, _ = resolved(Simulated({"fp32": 0.01}), batch_size=4)
    assert settings.part_rows(most_rows=10**6, seconds=5.5) == 512
    assert settings.part_rows(most_rows=100, seconds=5.5) == 64
    assert settings.part_rows(most_rows=10**6, seconds=0) == 4
    assert settings.choices["part_rows"] == "4"
    settings, _ = resolved(Simulated({"fp32": 0.01}), part_rows=32)
    assert settings.part_rows(most_rows=10**6, seconds=1) == 32
