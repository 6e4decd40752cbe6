"""What the Resolver measures, on engines that only say how long a pass takes."""

from __future__ import annotations

import re
import types
from typing import Any

import pytest
import torch

from featx.config import from_keywords, from_omegaconf
from featx.engine import AutoSettings, Compute, Engine, Formats, TimedRows
from featx.errors import ConfigError, RunError

CLOCK = "featx.engine.engine.time.perf_counter"


class Timed:
    """An engine of a device whose first pass is slow, as one that loads kernels; then 1 ms."""

    time_passes = Engine.time_passes

    def __init__(self, device: str, first_s: float) -> None:
        self.device = types.SimpleNamespace(type=device)
        self.compute = Compute("fp32", False, False, 4)
        self.passes = 0
        self.now = 0.0
        self._first_s = first_s

    def run(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        self.passes += 1
        self.now += self._first_s if self.passes == 1 else 0.001
        return {}


@pytest.mark.parametrize(
    ("device", "first_s", "passes", "seconds"),
    [("cpu", 2.0, 1, 0.5), ("cpu", 0.1, 2, 0.00025), ("cuda", 2.0, 2, 0.00025)],
)
def test_a_slow_pass_is_repeated_where_it_may_have_been_a_warm_up(
    monkeypatch: pytest.MonkeyPatch, device: str, first_s: float, passes: int, seconds: float
) -> None:
    engine: Any = Timed(device, first_s)
    monkeypatch.setattr(CLOCK, lambda: engine.now)
    config = from_omegaconf(from_keywords({"out": "store"}))
    settings = AutoSettings(config, engine, torch.zeros(4, 3, 2, 2, dtype=torch.uint8), 100, None)
    settings._time()
    assert engine.passes == passes
    assert settings.seconds_per_image == pytest.approx(seconds)


@pytest.mark.parametrize(("device", "batch_size", "images"), [("cpu", 64, 16), ("cuda", 64, 64)])
def test_a_gpu_is_timed_at_the_batch_size_of_the_run(
    device: str, batch_size: int, images: int
) -> None:
    engine: Any = Timed(device, 0.1)
    engine.compute = Compute("fp16", False, False, batch_size)
    sizes: list[int] = []
    engine.run = lambda batch: sizes.append(len(batch)) or {"layer": torch.zeros(len(batch), 1)}
    config = from_omegaconf(from_keywords({"out": "store"}))
    settings = AutoSettings(config, engine, torch.zeros(16, 3, 2, 2, dtype=torch.uint8), 100, None)
    settings._time()
    assert set(sizes) == {images}
    assert (settings.trial_rows is None) == (images != 16), "rows of the trial images only"


@pytest.mark.parametrize(
    ("device", "images_per_second", "timed"),
    [("cuda", 2900, 256), ("cuda", 200, 48), ("cuda", 10, 16), ("cpu", 200, 16)],
)
def test_a_gpu_is_timed_on_so_many_images_that_launches_do_not_count(
    monkeypatch: pytest.MonkeyPatch, device: str, images_per_second: float, timed: int
) -> None:
    engine: Any = Timed(device, 0.1)
    engine.uses_fp32_only = False
    engine.configure_compute = lambda compute: None
    monkeypatch.setattr("featx.engine.auto_settings.time.perf_counter", lambda: engine.now)

    def run(images: torch.Tensor) -> dict[str, torch.Tensor]:
        engine.now += len(images) / images_per_second
        return {}

    engine.run = run
    config = from_omegaconf(from_keywords({"out": "store"}))
    settings = AutoSettings(config, engine, torch.zeros(16, 3, 2, 2, dtype=torch.uint8), 999, None)
    assert len(settings._timed_images(Compute("fp32", False, False, 256))) == timed


class Compiled:
    """An engine whose passes take a second an image, and another time when it is compiled."""

    def __init__(self, compiled_s: float, value: float) -> None:
        self.device = types.SimpleNamespace(type="cpu")
        self.compute = Compute("fp32", False, False, 4)
        self._compiled_s = compiled_s
        self._value = value

    def configure_compute(self, compute: Compute) -> None:
        self.compute = compute

    def run(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        second = self._value if self.compute.compile else 1.0
        return {"layer": torch.tensor([[1.0, second]] * len(images))}

    def time_passes(self, images: torch.Tensor, **_: object) -> TimedRows:
        return TimedRows(self.run(images), self._compiled_s if self.compute.compile else 1.0)


def compiled(compiled_s: float, value: float = 1.0, **keys: Any) -> tuple[AutoSettings, Compiled]:
    """What comes of compiling an engine."""
    engine: Any = Compiled(compiled_s, value)
    config = from_omegaconf(from_keywords({"out": "store", **keys}))
    settings = AutoSettings(config, engine, torch.zeros(4, 3, 2, 2, dtype=torch.uint8), 100, None)
    settings._time()
    settings._compile(engine.compute)
    return settings, engine


@pytest.mark.parametrize(
    ("compiled_s", "keys", "kept", "said"),
    [
        (0.5, {}, True, None),
        (0.95, {}, False, "false (1.05 times as fast is too little)"),
        (0.95, {"compile": True}, True, None),
    ],
)
def test_compile_auto_has_to_pay(
    compiled_s: float, keys: dict[str, Any], kept: bool, said: str | None
) -> None:
    value = 1.0001
    settings, engine = compiled(compiled_s, value, **keys)
    assert engine.compute.compile is kept
    assert settings.choices.get("compile") == said
    assert settings.seconds_per_image == (compiled_s if kept else 1.0)
    assert settings.trial_rows is not None
    assert settings.trial_rows["layer"][0, 1] == (value if kept else 1.0), "the rows of the run"


def test_other_values_are_not_kept_however_fast() -> None:
    settings, engine = compiled(0.1, value=-1.0)
    assert not engine.compute.compile
    assert settings.choices["compile"].startswith("false (cosine to eager is")
    with pytest.raises(RunError, match="compile=true failed"):
        compiled(0.1, value=-1.0, compile=True)


class Large:
    """An engine of which a pass takes 1 MB for each image."""

    backbone = types.SimpleNamespace(preprocess=types.SimpleNamespace(crop=(100, 100)))

    def __init__(self, device: str) -> None:
        self.device = types.SimpleNamespace(type=device)

    def bytes_per_image(self, precision: str) -> int:
        return 1_000_000


@pytest.mark.parametrize(
    ("device", "size", "refused"),
    [("cpu", 10**6, True), ("cpu", 80, False), ("cuda", 10**6, True), ("cuda", 800, False)],
)
def test_a_batch_without_room_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch, device: str, size: int, refused: bool
) -> None:
    monkeypatch.setattr("featx.engine.auto_settings.free_memory", lambda: 1e8)
    config = from_omegaconf(from_keywords({"out": "store", "batch_size": size}))
    engine: Any = Large(device)
    settings = AutoSettings(config, engine, torch.zeros(0, 3, 100, 100), 100, None)
    if not refused:
        settings._check_memory(size)
        return
    with pytest.raises(
        ConfigError, match=r"batch_size=1000000 needs at least .* are free. batch"
    ) as raised:
        settings.resolve()
    fits = int(re.findall(r"batch_size=(\d+) fits", str(raised.value))[0])
    settings._check_memory(fits)


@pytest.mark.parametrize(
    ("device", "rows", "size"),
    [("cpu", 5, 8), ("cpu", 255, 16), ("cpu", 256, 32), ("cuda", 255, 256), ("cuda", 10**6, 256)],
)
def test_a_small_run_on_a_cpu_has_small_batches(device: str, rows: int, size: int) -> None:
    """Else one thread computes the last batch and the others look on."""
    config = from_omegaconf(from_keywords({"out": "store"}))
    engine: Any = Timed(device, 0.1)
    settings = AutoSettings(config, engine, torch.zeros(4, 3, 2, 2, dtype=torch.uint8), rows, None)
    assert settings._batch_size() == size


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("option", [True, False])
def test_batchnorm_is_folded_where_that_is_faster(device: str, option: bool) -> None:
    """cuDNN takes longer for a bias than for the BatchNorm that it replaces."""
    asked: list[bool] = []
    engine: Any = Timed(device, 0.1)
    engine.num_folded, engine.follows_data = 7, False

    def formats(images: torch.Tensor, fold_batchnorm: bool) -> Formats:
        asked.append(fold_batchnorm)
        return Formats(True, fold_batchnorm)

    engine.formats = formats
    config = from_omegaconf(from_keywords({"out": "store", "fold_batchnorm": option}))
    settings = AutoSettings(config, engine, torch.zeros(4, 3, 2, 2, dtype=torch.uint8), 9, None)
    is_folded = option and device == "cpu"
    assert settings._formats() == (True, is_folded)
    assert asked == [is_folded]
    assert ("slower on CUDA" in settings.choices.get("fold_batchnorm", "")) == (
        option and device == "cuda"
    )
