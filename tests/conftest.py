"""Shared fixtures: images, tiny models, and the command as a user runs it."""

from __future__ import annotations

import functools
import gc
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from object_server import bucket, s3_requests, s3_server, watch  # noqa: F401 - fixtures
from PIL import Image

from featx.base import console

REPOSITORY = Path(__file__).resolve().parent.parent

# Both workers and hundreds of child processes would compile the same modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Two processes of tests with two threads each would spin for each other's CPU.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Other load on the machine must not fail a test that checks values.
hypothesis.settings.register_profile(
    "values", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("values")

Completed = subprocess.CompletedProcess[str]
Stored = Callable[..., Path]

SHARED_DATA = REPOSITORY.parent / "shared" / "data"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import and collect without garbage collection, which later skips the 800,000 objects made.

    Yields:
        to the collection, whose result is returned.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def with_path(*folders: Path) -> dict[str, str]:
    """This process's environment, with folders in front of the others that Python looks into."""
    places = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


def slow_except(values: Iterable[Any], *kept: object) -> list[Any]:
    """Parameters of a test, all of them slow but those to keep in the default suite.

    A tuple holds one value for each of several names.
    """
    marks = pytest.mark.slow
    return [
        value
        if value in kept
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)
        for value in values
    ]


def make_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth RGB image with structure at several scales, another one for each seed."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    waves = [
        np.sin(2 * np.pi * (rng.uniform(1, 6) * x + rng.uniform(1, 6) * y) + rng.uniform(0, 6))
        for _ in range(3)
    ]
    pixels = 127 + 90 * np.stack(waves, axis=-1) + rng.normal(0, 8, (height, width, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8), "RGB")


@pytest.fixture
def restored_console() -> Iterator[None]:
    """What a test changes in the log, such as by log.json=true, ends with it."""
    handlers = list(logging.getLogger().handlers)
    before = [handler.formatter for handler in handlers]
    state = dict(vars(console))
    yield
    vars(console).update(state)
    logging.captureWarnings(False)
    for handler, formatter in zip(handlers, before, strict=True):
        handler.setFormatter(formatter)


@pytest.fixture(scope="session")
def photo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """21 JPEGs in two class folders and one without a class; sizes differ."""
    root = tmp_path_factory.mktemp("photos")
    for i in range(21):
        folder = root / ("cat", "dog")[i % 2] if i else root
        folder.mkdir(exist_ok=True)
        path = folder / f"{i:03d}.jpg"
        make_image(240 + 10 * i, 300 - 5 * i, seed=i).save(path, quality=92)
        os.utime(path, (1e9, 1e9))  # images of this moment are compared by their bytes
    return root


@pytest.fixture
def shared_data() -> Path:
    """../shared/data, which a fresh clone does not have."""
    if not SHARED_DATA.is_dir():
        pytest.skip("../shared/data is not here")
    return SHARED_DATA


def run_python(
    *arguments: object,
    path: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
    code: int | None = 0,
    timeout: float = 600,
    **options: Any,
) -> Completed:
    """Run Python, which looks into `path` first; its exit code has to be `code`, unless None."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**with_path(*path), **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **options,
    )
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done


def run_featx(folder: Path, *arguments: str, path: Sequence[Path] = ()) -> Completed:
    """Run `python -m featx ...` in a folder, as a user does; Python looks into `path` first."""
    return run_python(
        *("-m", "featx", *arguments), path=path, env={"HF_HUB_OFFLINE": "1"}, code=None,
        timeout=300, cwd=folder,
    )  # fmt: skip


@pytest.fixture
def featx(tmp_path: Path) -> Callable[..., Completed]:
    """`python -m featx ...` in an empty folder, as a user runs it."""
    return functools.partial(run_featx, tmp_path)


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of featx's cache, of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "featx"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """The images of the tiny model, in two class folders."""
    from tiny_model import write_images

    return write_images(tmp_path / "photos")


@pytest.fixture(scope="session")
def extracted_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the images of the tiny model, their store in six parts, and as one file."""
    from tiny_model import extract_six_parts, write_images

    from featx.store import pack_store

    folder = tmp_path_factory.mktemp("extracted")
    write_images(folder / "photos")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        extract_six_parts("photos", out="parts", pack=False)
    pack_store(Path(shutil.copytree(folder / "parts", folder / "packed")))
    return folder


@pytest.fixture
def stored(extracted_once: Path, in_tmp_path: None) -> Stored:
    """Copies images to `photos` and their store to `store`; returns the folder of the images."""

    def copy(pack: bool = True) -> Path:
        shutil.copytree(extracted_once / ("packed" if pack else "parts"), "store")
        return Path(shutil.copytree(extracted_once / "photos", "photos"))

    return copy


@dataclass
class Batches:
    """The batches that a run computes.

    Attributes:
        computed: (layers, first row) of each.
        before: functions that are called with each batch before it is computed.
    """

    computed: list[tuple[frozenset[str], int]] = field(default_factory=list)
    before: list[Callable[[Any], None]] = field(default_factory=list)


@pytest.fixture
def _batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    from featx.pipeline import feature_output, row_updates

    batches = Batches()
    compute = feature_output.compute_rows

    def noted(context: Any, engine: Any, batch: Any) -> Any:
        for function in batches.before:
            function(batch)
        rows = compute(context, engine, batch)
        batches.computed.append((frozenset(rows.features), batch.start))
        return rows

    for module in (feature_output, row_updates):
        monkeypatch.setattr(module, "compute_rows", noted)
    return batches


@pytest.fixture
def computed(_batches: Batches) -> list[tuple[frozenset[str], int]]:
    """(layers, first row) of every batch that a run computes."""
    return _batches.computed


@pytest.fixture
def on_batch(_batches: Batches) -> list[Callable[[Any], None]]:
    """Functions that a run calls with each batch before it is computed."""
    return _batches.before


@pytest.fixture
def on_begin_part(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[Any], None]]:
    """Functions that workers in this process call with each part that they begin."""
    from featx.pipeline.executors.worker import PartWorker

    functions: list[Callable[[Any], None]] = []
    begin_part = PartWorker.begin_part

    def noted(self: PartWorker, part: Any) -> Any:
        for function in functions:
            function(part)
        return begin_part(self, part)

    monkeypatch.setattr(PartWorker, "begin_part", noted)
    return functions


@pytest.fixture
def fast_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread, in which a driver waits for its workers, sleeps in no time."""
    skipped_s = 0.0
    monotonic, sleep = time.monotonic, time.sleep

    def skip(seconds: float) -> None:
        nonlocal skipped_s
        if threading.current_thread() is threading.main_thread():
            skipped_s += seconds
            seconds = min(seconds, 0.001)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", skip)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + skipped_s)


@pytest.fixture
def set_retries(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how often a write that fails is retried; nothing waits before it is tried again."""

    def set_retries(count: int) -> None:
        monkeypatch.setattr("featx.storage.durability.RETRY_WAITS_S", (0.0,) * count)
        monkeypatch.setattr("featx.storage.s3_client.FIRST_PAUSE_S", 0.0)
        monkeypatch.setattr("featx.storage.s3_outage.MAX_OUTAGE_S", 0.0)

    return set_retries


@pytest.fixture
def without_retry_waits(set_retries: Callable[[int], None]) -> None:
    """A write to a disk or server that the test lets fail is not retried, and fails at once."""
    set_retries(0)


_opened: list[Callable[[str], None]] = []


@functools.cache
def _watch_opened_files() -> None:
    """Python cannot remove an audit hook, so there is one for all tests of this process."""

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if not _opened or event not in ("open", "os.listdir", "os.scandir"):
            return
        if isinstance(arguments[0], str | bytes | os.PathLike):  # and no descriptor
            for function in tuple(_opened):
                function(os.fsdecode(arguments[0]))

    sys.addaudithook(audit)


@pytest.fixture
def on_open() -> Iterator[list[Callable[[str], None]]]:
    """Functions that are called with the path of each file or folder before Python opens it."""
    _watch_opened_files()
    yield _opened
    _opened.clear()


@pytest.fixture
def network_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """All disks count as those of other machines, whose files are not mapped into memory."""
    monkeypatch.setattr("featx.storage.local_file.is_local", lambda device: False)


@pytest.fixture
def quick_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that write a store say every 20 ms what they do."""
    monkeypatch.setattr("featx.store.heartbeat.BEAT_S", 0.02)


@pytest.fixture
def set_free_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the bytes of memory that are free, at one look after the other; the last one stays."""

    def set_free(*num_bytes: float | None) -> None:
        looks = list(num_bytes)
        # base.machine last: a module that is imported after it would keep the replacement.
        for module in ("engine.auto_settings", "engine.batch_parallelism", "base.machine"):
            monkeypatch.setattr(
                f"featx.{module}.free_memory", lambda: looks.pop(0) if len(looks) > 1 else looks[0]
            )

    return set_free


@pytest.fixture
def set_free_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the bytes that are free on every disk."""

    def set_free(num_bytes: int) -> None:
        usage = shutil.disk_usage("/")._replace(free=num_bytes)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    return set_free


@pytest.fixture
def set_chunk_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the size of the chunks of stores that are written, compressed or not."""

    def set_bytes(num_bytes: int) -> None:
        for name in ("CHUNK_BYTES", "CHUNK_BYTES_COMPRESSED"):
            monkeypatch.setattr(f"featx.store.layout.{name}", num_bytes)

    return set_bytes


@pytest.fixture
def set_block_sizes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the bytes that are read or computed at a time, and those of a layer that is kept."""

    def set_sizes(block_bytes: int, keep_bytes: int = 2 << 30) -> None:
        monkeypatch.setattr("featx.base.block_sizes.BLOCK_BYTES", block_bytes)
        monkeypatch.setattr("featx.base.block_sizes.KEEP_BYTES", keep_bytes)

    return set_sizes


@pytest.fixture
def small_blocks(set_block_sizes: Callable[..., None]) -> None:
    """An export reads three rows or so at a time, so that each format writes several blocks."""
    set_block_sizes(400)


DECODE_IN_THREADS = {
    *("analysis", "export", "jobs", "layers", "models", "torch"),
    *("test_conformance", "test_finished_run", "test_overwriting", "test_slurm"),
    *("test_object_stores", "test_python_interface", "test_security"),
    *("test_first_hour_answers", "test_first_hour_python", "test_first_hour_tables"),
}
"""Packages and modules whose tests decode in threads, as macOS does: two forks of a process of 1 GB
are half of a tiny run. Those of images, sources, executors, interruptions and of whole commands
decode in processes, and so do all slow tests."""


@pytest.fixture(autouse=True)
def _decoders(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    is_slow = request.node.get_closest_marker("slow") is not None
    if not is_slow and DECODE_IN_THREADS & {request.path.parent.name, request.path.stem}:
        monkeypatch.setattr("featx.images.decoder_pool.CAN_FORK", False)


@pytest.fixture(autouse=True)
def _settings_as_they_were() -> Iterator[None]:
    """A test that leaves an engine open names itself, and not the next one on this worker."""
    yield
    if "torch" in sys.modules:
        import torch

        assert torch.backends.mha.get_fastpath_enabled(), "an engine was left open"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For matrices so small that two threads wait for each other on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
