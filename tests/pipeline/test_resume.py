"""Resuming a store: what was decided stays, what differs is refused, a kill costs little."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import slow_except
from interruptions import stopped_after
from made_store import dataset_digests, make_spec, temporary_files
from processes import ended, outcome, running
from tiny_engine import of_speed
from tiny_model import COMMAND, MODEL, run_job, write_image, write_images
from tiny_model import SIX_PARTS as KEYS
from tiny_model import extract_six_parts as extract
from waiting import wait_until
from zoo import TwoStageConvNet

import featx
from featx.config import from_composed, from_keywords
from featx.errors import ConfigError, ModelError, StoreMismatchError
from featx.pipeline import FeatureOutput
from featx.pipeline.stop_signals import GRACE_S, stop_signals
from featx.store.layout import PART_BYTES

AUTO = {"batch_size": "auto", "part_rows": "auto", "precision": "auto", "compile": "auto"}


pytestmark = pytest.mark.usefixtures("in_tmp_path")


# What was decided


@pytest.mark.slow
def test_every_choice_is_taken_from_the_store_on_another_day(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The machine is a thousand times slower now, and a new probe would like bf16 and compiling."""
    of_speed(monkeypatch, 3.0)
    whole = extract(photos, out="whole", **AUTO)
    extract(photos, pack=False, **AUTO)
    manifest = Path("store/featx.json").read_bytes()
    assert json.loads(manifest)["resolved"]["batch_size"] == 16
    assert json.loads(manifest)["part_rows"] == 16
    Path("store/parts/part-000001.h5").unlink()
    of_speed(monkeypatch, 3000.0, in_bf16=1.0, cpu_batch=2)
    capfd.readouterr()
    assert extract(photos, **AUTO).complete
    printed = capfd.readouterr().err
    assert "fp32 (as the store was started)" in printed
    assert "parts of 16 rows" in printed
    assert Path("store/featx.json").read_bytes() == manifest
    assert dataset_digests("store") == dataset_digests(whole.root)
    extract(photos, layers=["conv", "pool"], **AUTO)
    added = json.loads(Path("store/featx.json").read_bytes())["additions"][0]
    assert added["resolved"] == json.loads(manifest)["resolved"]


@pytest.mark.slow
def test_what_auto_chose_may_be_said_and_what_was_said_may_be_left_to_auto(
    photos: Path,
) -> None:
    extract(photos)
    assert extract(photos, **AUTO).complete
    extract(photos, out="other", **AUTO)
    resolved = json.loads(Path("other/featx.json").read_text())
    said = {key: resolved["resolved"][key] for key in ("batch_size", "precision", "compile")}
    assert extract(photos, out="other", **said, part_rows=resolved["part_rows"]).complete


# What is refused


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos/ and a finished store/, which nothing that is refused may change."""
    folder = tmp_path_factory.mktemp("finished")
    write_images(folder / "photos", 9)
    with contextlib.chdir(folder):
        extract("photos")
    return folder


class Other(TwoStageConvNet):
    """The same weights under another name."""


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": {**MODEL, "factory": "test_resume:Other"}}, "'custom/test_resume:Other'"),
    "weights": ({"seed": 1}, r"'random \(seed 1\)'"),
    "weights_sha256": ({"seed": 1}, "'[0-9a-f]{64}'"),
    "layer.conv": ({"reduce": "avg"}, "'avg'"),
    "dtype": ({"dtype": "float32"}, "'float32'"),
    "transform": ({"model": {**MODEL, "transform": {"resize": 33, "crop": 32}}}, "'resize 33"),
    "decode": ({"decode": "reference"}, "'reference'"),
    "data.exif": ({"data": {"exif": "ignore"}}, "'ignore'"),
    "data.background": ({"data": {"background": "black"}}, r"\[0, 0, 0\]"),
    "data.max_pixels": ({"data": {"max_pixels": 1000}}, "1000"),
    "precision": ({"precision": "bf16"}, "'bf16'"),
    "compile": ({"compile": True}, "True"),
    "batch_size": ({"batch_size": 2}, "2"),
    "part_rows": ({"part_rows": 8}, "8"),
    "codec": ({"codec": "gzip"}, "'gzip'"),
    "nonfinite": ({"nonfinite": "record"}, "'record'"),
    "version.torch": ({}, "'0.1'"),
    "version.pillow": ({}, "'0.1'"),
    "device": ({}, "'tpu'"),
    "channels_last": ({}, "'no'"),
}
"""Key of the fingerprint -> what changes it, and what the message says of `now`."""

UNREACHABLE = ("version.torch", "version.pillow", "device", "channels_last")
"""What no key of the command changes on one machine."""

LINES = {"layer.conv": "layer conv, reduce", "dtype": "layer conv, dtype"}
"""What belongs to a layer is compared layer by layer."""


def test_changes_of_what_changes_values_are_refused_by_name(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, each on a line of its own."""
    from featx.pipeline import run_context

    given: dict[str, Any] = {"data": {"name": "folder", "root": "photos"}, "model": {}}
    for keys, _ in CHANGES.values():
        groups = {name: {**given[name], **keys.get(name, {})} for name in ("data", "model")}
        given |= {**keys, **groups}
    given["model"] |= {"factory": CHANGES["model"][0]["model"]["factory"]}
    fingerprint = run_context.fingerprint
    others = {key: CHANGES[key][1].strip("'") for key in UNREACHABLE}
    monkeypatch.setattr(run_context, "fingerprint", lambda *a: {**fingerprint(*a), **others})
    # A compiler takes minutes.
    monkeypatch.setattr("torch.compile", lambda forward, **_: forward)
    monkeypatch.chdir(finished)
    before = files_of("store")
    with pytest.raises(StoreMismatchError) as refused:
        extract(**given)
    message = str(refused.value)
    assert refused.value.exit_code == 2
    for key, (_, now) in CHANGES.items():
        name = LINES.get(key, key)
        lines = [text for text in message.splitlines() if text.startswith(f"  {name}:")]
        assert len(lines) == 1, message
        assert "the store has" in lines[0]
        assert re.search(rf"now .*{now}", lines[0]), lines[0]
    assert "overwrite=true" in message
    assert "out=DIR" in message
    assert files_of("store") == before


def files_of(folder: str) -> dict[Path, bytes]:
    """What every file of a store holds; the lock is written to also when the store is refused."""
    files = [path for path in Path(folder).rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: path.read_bytes() for path in files}


def test_no_key_of_the_fingerprint_is_left_untried(finished: Path) -> None:
    """A key that joins the fingerprint has to join CHANGES; the rest is tried elsewhere."""
    fingerprint = json.loads((finished / "store" / "featx.json").read_text())["fingerprint"]
    elsewhere = {"layers", "listing", "jpeg", "fold_batchnorm", "model.init"}
    elsewhere |= {"model.modules_sha256"}
    elsewhere |= {"version.timm", "version.torchvision"}
    elsewhere |= {"version.simplejpeg", "version.pillow_heif"} & set(fingerprint)
    assert set(fingerprint) - set(CHANGES) == elsewhere


@pytest.mark.parametrize(
    "keys",
    [
        {"pack": False, "max_failures": 5, "device": "cpu", "seed": 0, "grow": True},
        {"data": {"root": "./photos/", "follow_links": True, "timeout_s": None}},
        {"data": {"root": "photos", "limit": 9}},
    ],
)
def test_a_resume_accepts_options_that_change_no_value(
    finished: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    monkeypatch.chdir(finished)
    before = Path("store/features.h5").read_bytes()
    keys = {"data": "photos", **keys}
    assert extract(**keys).complete
    assert Path("store/features.h5").read_bytes() == before


def test_an_unfinished_store_is_as_strict(photos: Path) -> None:
    extract(photos, pack=False)
    Path("store/parts/part-000000.h5").unlink()
    with pytest.raises(StoreMismatchError, match="part_rows: the store has 4, now 8"):
        extract(photos, part_rows=8)
    with pytest.raises(StoreMismatchError, match="nonfinite: the store has 'error', now 'record'"):
        extract(photos, nonfinite="record")
    assert len(list(Path("store/parts").iterdir())) == 5


class Scaled(TwoStageConvNet):
    """A module that another constant changes: neither a weight, nor in the printed module."""

    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


def scaled(scale: float) -> Scaled:
    """The module of one seed with a constant."""
    torch.manual_seed(0)
    net = Scaled()
    net.scale = scale
    return net


@pytest.mark.parametrize(
    ("state", "dtype"),
    slow_except(
        itertools.product(
            ["packed", "parts", "a part less", "another image", "changed"], ["float32", "float16"]
        ),
        *(("packed", "float16"), ("a part less", "float32"), ("changed", "float32")),
    ),
)
def test_a_module_that_computes_other_features_is_refused(
    photos: Path, state: str, dtype: str
) -> None:
    given: dict[str, Any] = {"dtype": dtype, "pack": state == "packed", "max_failures": 5}
    (photos / "cat" / "000.png").write_bytes(b"no image: the first row fails")

    def run(scale: float, **keys: Any) -> None:
        model = {"factory": scaled(scale), "transform": MODEL["transform"]}
        extract(photos, model=model, **{**given, **keys})

    run(1.0)
    if state == "a part less":
        Path("store/parts/part-000001.h5").unlink()
    elif state == "another image":
        write_image(photos / "cat" / "001.png", 99)
        given["grow"] = True
    elif state == "changed":
        write_image(photos / "cat" / "006.png", 99)
        given["refresh"] = True
    before = files_of("store")
    with pytest.raises(StoreMismatchError, match=r"another model .* for noise differs by 0\.0"):
        run(1.02)
    after = files_of("store")
    assert {path for path in after if after[path] != before.get(path)} <= {
        Path("store/.hydra/config.yaml")
    }
    run(1.0, pack=True)
    if state != "another image":  # a store that grew has the rows in another order
        run(1.0, pack=True, out="whole")
        assert dataset_digests("store") == dataset_digests("whole")


def test_every_use_of_a_store_asks_for_its_model(photos: Path) -> None:
    def model(scale: float) -> dict[str, Any]:
        return {"factory": scaled(scale), "transform": MODEL["transform"]}

    def take_statistics(scale: float) -> None:
        featx.stats(**{**KEYS, "model": model(scale), "data": photos, "out": "statistics"})

    extract(photos, model=model(1.0))
    take_statistics(1.0)
    assert run_job("probe", store="store", probe={"folds": 2}) == 0
    image = [photos / "cat" / "000.png"]
    uses: list[Callable[[float], object]] = [
        lambda scale: extract(photos, model=model(scale), layers=["pool"]),
        lambda scale: featx.embed(image, "store", model_factory=scaled(scale)),
        lambda scale: featx.predict("store", image, model_factory=scaled(scale)),
        take_statistics,
    ]
    for use in uses:
        with pytest.raises(StoreMismatchError, match="another model"):
            use(1.02)
        use(1.0)


def test_one_module_at_a_time_has_the_captures_of_a_store(photos: Path) -> None:
    module = scaled(1.0)
    model = {"factory": module, "transform": MODEL["transform"]}
    extract(photos, model=model)
    store = extract(photos, model=model, layers=["pool"])
    images = [photos / "cat" / "000.png"]
    with featx.embedder(store, model_factory=module) as embed:
        found = embed(images)
        for layer in ("conv", "pool"):
            np.testing.assert_allclose(found[layer][0], store[layer][0], rtol=1e-3)

    def shared() -> torch.nn.Module:
        return module

    shared.__name__ = type(module).__name__
    with featx.embedder(store, layers="pool", model_factory=shared) as embed:
        embed(images)
        with pytest.raises(ModelError, match="another run or embedder uses this module"):
            featx.embed(images, store, layers="pool", model_factory=module)
    found = featx.embed(images, store, model_factory=module)
    np.testing.assert_array_equal(found["pool"][0], store["pool"][0])
    assert not any(m._forward_hooks for m in module.modules())


class Sampled(TwoStageConvNet):
    """A module whose output, after the layers that are stored, is random."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.rand(len(x), 1)


def test_a_random_output_is_not_compared(photos: Path) -> None:
    torch.manual_seed(0)
    model = {"factory": Sampled(), "transform": MODEL["transform"]}
    extract(photos, model=model, pack=False)
    part = Path("store/parts/part-000000.h5")
    before = part.read_bytes()
    part.unlink()
    extract(photos, model=model, pack=False)
    assert part.read_bytes() == before


# What stops it


@pytest.mark.parametrize(
    "signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "index", [pytest.param(0, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow), 5]
)
def test_a_signal_ends_the_run_also_in_the_last_batch(
    photos: Path, signum: signal.Signals, index: int
) -> None:
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    with stopped_after(index + 1, signum) as interrupted:
        extract(photos)
    assert interrupted.value.signum == signum
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    after = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    assert after == handlers
    # The next part may have become whole while this one was committed.
    assert len(list(Path("store/parts").glob("part-*.h5"))) in (index + 1, index + 2)
    whole = extract(photos, out="whole")
    extract(photos)
    assert dataset_digests("store") == dataset_digests(whole.root)


def test_an_alarm_of_the_program_goes_off_in_a_run_and_after_it() -> None:
    """Such as a time limit of a test."""
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda signum, _: rung.append(signum))
    try:
        signal.setitimer(signal.ITIMER_REAL, 600)
        with stop_signals():
            signal.raise_signal(signal.SIGALRM)
        assert rung == [signal.SIGALRM]
        assert signal.setitimer(signal.ITIMER_REAL, 0)[0] > 0
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_second_signal_does_not_wait_for_the_batch(photos: Path) -> None:
    with stopped_after(2, signal.SIGINT, signal.SIGTERM) as interrupted:
        extract(photos)
    assert interrupted.value.signum == signal.SIGINT
    assert temporary_files(Path("store")) == []


@pytest.mark.slow
def test_other_arguments_of_a_factory_are_refused_but_those_without_effect(photos: Path) -> None:
    """The weights are the same: only the arguments say that half the rows would be of another."""
    with stopped_after(3, signal.SIGINT):
        extract(photos, model={**MODEL, "args": {"poison": 1e9}})
    for args in ({"poison": 1e8}, {}):
        with pytest.raises(StoreMismatchError, match=r"model\.args"):
            extract(photos, model={**MODEL, "args": args})
    store = extract(photos, model={**MODEL, "args": {"poison": 1e9, "pause_s": 0.01}})
    assert store.ok.all()


def command(
    data: Path, hang: Path | None = None, out: str = "store", pixels: int = 32
) -> list[str]:
    """The command whose batches take at least 0.15 s."""
    overrides = [
        re.sub(r"(resize|crop)=\d+", rf"\1={pixels}", text)
        for text in COMMAND
        if not text.startswith("out=")
    ]
    arguments = "{pause_s: 0.15" + (f", hang: {hang}" if hang else "") + "}"
    return [
        sys.executable, "-m", "featx", *overrides,
        f"out={out}", f"+model.args={arguments}", "data=folder", f"data.root={data}",
    ]  # fmt: skip


def num_parts(out: str = "store") -> int:
    return len(list(Path(out, "parts").glob("part-*.h5")))


def is_packing(out: str = "store") -> bool:
    """Whether a run writes the packed file of a store."""
    return bool(list(Path(out).glob(".tmp-features.h5*")))


def assert_resumes_to_the_same(data: Path, out: str = "store", pixels: int = 32) -> None:
    """What an uninterrupted run in this process makes, bit for bit."""
    model = {**MODEL, "transform": {"resize": pixels, "crop": pixels}}
    whole = extract(data, out="uninterrupted", overwrite=True, model=model)
    extract(data, out=out, model=model)
    packed = Path(out, "features.h5")
    assert dataset_digests(packed) == dataset_digests(whole.root)
    assert temporary_files(Path(out)) == []
    assert not Path(out, "parts").exists()
    assert not Path(out, "damaged.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_batch_that_takes_long_is_cut_short(
    photos: Path, tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    hang = tmp_path / "hang"
    with running(command(photos, hang)) as process:
        wait_until(lambda: num_parts() >= 2, process)
        hang.touch()
        time.sleep(0.5)
        kept = num_parts()
        process.send_signal(signum)
        found, printed, took = outcome(process)
    assert (found, "Traceback" in printed) == (code, False), printed
    assert "stopping; run the same command again" in printed
    assert GRACE_S - 1 < took < 10
    assert num_parts() == kept < 6
    assert_resumes_to_the_same(photos)


LARGE = 1280
"""Pixels with which the parts are too large to be packed in memory."""


@pytest.mark.slow
def test_stopped_while_it_packs(photos: Path) -> None:
    with running(command(photos, pixels=LARGE)) as process:
        wait_until(is_packing, process)
        process.send_signal(signal.SIGTERM)
        code, printed, took = outcome(process)
    assert code == 143, printed
    assert took < 10
    assert_resumes_to_the_same(photos, pixels=LARGE)


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a command, and wait for its worker, which dies and frees the lock a moment later."""
    workers = [
        int(pid)
        for task in Path(f"/proc/{process.pid}/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    process.kill()
    assert all(ended(worker) for worker in workers)


@pytest.mark.slow
def test_killed_after_a_part_and_again_while_it_packs(photos: Path) -> None:
    """The child that packs continues without a lock, while the next command is at work."""
    with running(command(photos, pixels=LARGE)) as process:
        wait_until(lambda: num_parts() >= 2, process)
        kill(process)
    half = featx.open("store")
    assert set(half.status.tolist()) == {0, 255}
    assert np.isfinite(half["conv"][half.ok]).all()
    with running(command(photos, pixels=LARGE)) as process:
        wait_until(is_packing, process)
        kill(process)
    assert_resumes_to_the_same(photos, pixels=LARGE)


def stop_and_go(data: Path, moments: list[float], signals: list[signal.Signals]) -> list[int]:
    """Start the command, stop it so many seconds later, and again; the codes it ended with."""
    codes = []
    for moment, signum in zip(moments, signals, strict=True):
        with running(command(data)) as process:
            deadline = time.monotonic() + moment
            while time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.01)
            process.send_signal(signum)
            code, printed, took = outcome(process)
        # Before the command has set its handlers, the signal ends Python as it ends any process.
        expected = {0, -signum, 128 + signum}
        assert code in expected, f"after {moment:.2f} s: {code}\n{printed}"
        assert took < 10
        codes.append(code)
    return codes


@pytest.mark.slow
def test_stopped_while_the_model_loads(photos: Path) -> None:
    stop_and_go(photos, [3.0], [signal.SIGTERM])
    assert_resumes_to_the_same(photos)


@pytest.mark.slow
@pytest.mark.parametrize(
    "signals", [[signal.SIGKILL], [signal.SIGINT, signal.SIGTERM]], ids=["kill", "stop"]
)
def test_stopped_at_random_moments_again_and_again(
    photos: Path, signals: list[signal.Signals]
) -> None:
    draw = random.Random(5)
    moments = [draw.uniform(0.3, 9.0) for _ in range(10)]
    stop_and_go(photos, moments, [draw.choice(signals) for _ in moments])
    assert_resumes_to_the_same(photos)


def test_the_command_and_python_begin_the_same_store() -> None:
    assert {part.split("=")[0].split(".")[0] for part in COMMAND} == set(KEYS)


LIMIT = {"name": "slurm", "time_limit_min": 1}


@pytest.mark.parametrize(
    ("work_s", "keys", "seconds"),
    [
        (30, {}, 2),
        (2560, {}, 10),
        (10**6, {}, 60),
        (10**6, {"executor": {"name": "slurm"}}, 60),
        (10**6, {"executor": {**LIMIT, "time_limit_min": 4}}, 30),
        (10**6, {"executor": LIMIT}, 7.5),
        (10**6, {"executor": {"name": "slurm", "mode": "local"}}, 60),
    ],
)
def test_a_part_is_a_few_seconds_of_work_and_a_minute_in_long_runs(
    work_s: float, keys: dict[str, Any], seconds: float
) -> None:
    """Several fit into the time limit of a task, and bytes are a limit beside the minute."""
    target = FeatureOutput(from_composed(from_keywords({**KEYS, **keys})))
    limits = target.part_limits(None, [make_spec("a", (1024,))], work_s)
    assert limits == (PART_BYTES / 4096, seconds)


def test_a_row_that_is_larger_than_a_chunk_can_be_is_refused() -> None:
    target = FeatureOutput(from_composed(from_keywords(KEYS)))
    values = (1 << 32) // 4 - 1
    target.part_limits(None, [make_spec("a", (values,))], 1.0)
    with pytest.raises(ConfigError, match=r"a row of a has the shape \[2, 536870912\] and takes 4"):
        target.part_limits(None, [make_spec("a", (2, (values + 1) // 2))], 1.0)
