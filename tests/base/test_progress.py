"""What the command says of a run, for people and as JSON."""

from __future__ import annotations

import errno
import io
import itertools
import json
import logging
import math
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable

import pytest
from conftest import run_python

from featx.base import (
    Progress,
    announce,
    announcements,
    console,
    log_as_json,
    log_message,
    progress,
)
from featx.pipeline.run_metrics import bottleneck

IDLE = {"read": 0.5, "decode": 1.0, "wait": 0.2, "model": 1.0, "copy": 0.1, "write": 0.1}


@pytest.mark.parametrize(
    ("busy", "computed", "expected"),
    [
        (
            {"model": 8.5},
            ("cpu", "fp32"),
            "the model: 85% of the time; a GPU or an earlier layer, or precision=auto, would help",
        ),
        (
            {"model": 8.5},
            ("cpu", "auto"),
            "the model: 85% of the time; a GPU or an earlier layer would help",
        ),
        (
            {"model": 8.5},
            ("cuda", "fp32"),
            "the model: 85% of the time; compile=true or an earlier layer, or precision=auto, ",
        ),
        ({"model": 8.5}, ("cuda", "fp16"), "the model: 85% of the time; compile=true or an"),
        (
            {"wait": 6.0, "decode": 19.0},
            ("cpu", "fp32"),
            "decoding: 1.9 of 2 decoders busy, 60% of the time",
        ),
        (
            {"wait": 6.0, "read": 19.0},
            ("cuda", "fp16"),
            "reading images: 1.9 of 2 decoders busy",
        ),
        ({"copy": 5.0}, ("cuda", "fp16"), "copying from the device: 50% of the time"),
        ({"write": 4.0}, ("cpu", "fp32"), "writing: 40% of the time"),
        ({"statistics": 7.0}, ("cpu", "fp32"), "summing up: 70% of the time"),
    ],
)
def test_the_stage_that_the_others_wait_for(
    busy: dict[str, float], computed: tuple[str, str], expected: str
) -> None:
    assert bottleneck({**IDLE, **busy}, 10.0, 2, *computed).startswith(expected)


@pytest.mark.parametrize(("ratio", "elapsed_s"), [(1.2, 10.0), (2.0, 1.0), (2.04, 10.0)])
def test_a_model_that_is_slower_than_in_its_trial_is_reported(
    ratio: float, elapsed_s: float
) -> None:
    busy = {**IDLE, "model": 0.9 * elapsed_s}
    sentence = bottleneck(busy, elapsed_s, 2, "cpu", "auto", ratio)
    assert ("took 2.0 times as long as in the trial" in sentence) == (ratio == 2.04)


@pytest.fixture
def as_json(restored_console: None) -> None:
    """stderr gets JSON objects, as with log.json=true."""
    log_as_json()


@pytest.mark.usefixtures("as_json")
def test_with_log_json_every_line_is_an_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0.0, 2 * progress.PLAIN_INTERVAL_S)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    announce([("data", "photos: 4 images"), ("layers", "a\nb"), ("device", "cpu")])
    log_message("")
    log_message("two\nlines")
    log_message("the devices differ", level="warning")
    log_message("no such model", "error")
    with Progress(10, 2) as bar:
        bar.step(4, 1, 0.0)
        bar.log("worker 0 (cpu): hello")
    output = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["level"] for line in output] == [
        "info",
        "info",
        "warning",
        "error",
        "info",
        "info",
    ]
    assert output[0]["event"] == "begin"
    assert (output[0]["layers"], output[0]["device"]) == ("a\nb", "cpu")
    assert [line.get("message") for line in output[1:4]] == [
        "two\nlines", "the devices differ", "no such model",
    ]  # fmt: skip
    assert (output[4]["event"], output[4]["done"], output[4]["total"]) == ("progress", 6, 10)
    assert output[4]["failures"] == 1
    assert all(line["time"].endswith("Z") for line in output)


class ClosedTerminal(io.StringIO):
    """What stderr is when its terminal is gone, or the disk of its file is full."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.usefixtures("restored_console")
@pytest.mark.parametrize("is_json", [False, True])
def test_a_log_that_cannot_be_written_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, is_json: bool
) -> None:
    if is_json:
        log_as_json()
    monkeypatch.setattr(progress, "PLAIN_INTERVAL_S", -1.0)
    monkeypatch.setattr(sys, "stderr", ClosedTerminal())
    announce([("data", "photos: 4 images")])
    log_message("a message")
    with Progress(10, 2) as bar:
        bar.step(4, 1, 0.0)
        bar.log("worker 0 (cpu) was killed by SIGKILL")
        assert bar.now().done == 6


@pytest.mark.usefixtures("as_json")
def test_records_of_loggers_are_objects_too() -> None:
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    try:
        log_as_json()
        record = logging.LogRecord("x", logging.WARNING, "", 0, "part %d is bad", (3,), None)
        assert json.loads(handler.format(record))["message"] == "part 3 is bad"
    finally:
        logging.getLogger().removeHandler(handler)


def test_the_commands_errors_are_objects_with_log_json(
    featx: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = featx("log.json=true", "model=resnet5O")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["level"] == "error"
    assert "unknown model 'resnet5O'" in json.loads(line)["message"]


def test_images_from_before_the_clock_was_started_do_not_count_for_the_speed() -> None:
    found: list[progress.RunProgress] = []
    with progress.progress_listener(found.append), Progress(100, 10) as shown:
        shown.begin()
        shown.step(20, 1, 0.0, is_earlier=True)
        assert (found[-1].done, found[-1].failures, found[-1].images_per_second) == (30, 1, 0)
        assert math.isnan(found[-1].seconds_left)
        shown.step(5, 0, 0.0)
        now = found[-1]
    assert now.done == 35
    assert now.images_per_second > 0
    assert now.seconds_left == pytest.approx(65 / now.images_per_second)


def test_a_notebook_without_settings_says_how_images_become_pixels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = types.SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: kernel))
    with announcements(False):
        announce([("data", "photos: 4 images"), ("transform", "resize 256: assumed")])
    assert capsys.readouterr().out == "transform  resize 256: assumed\n"
    announce([("data", "photos"), ("layers", "a\nb")])
    assert capsys.readouterr() == ("data    photos\nlayers  a\n        b\n\n", "")


class Minimal:
    """What stands for a stream in some programs."""

    def write(self, text: str) -> None:
        pass

    def flush(self) -> None:
        pass


CLOSED = io.StringIO()
CLOSED.close()


@pytest.mark.parametrize("stream", [None, Minimal(), CLOSED], ids=["none", "minimal", "closed"])
def test_a_program_may_have_any_standard_streams(
    monkeypatch: pytest.MonkeyPatch, stream: object
) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    log_message("a message")
    console.log_step("a step")
    console.print_result("a result")
    with Progress(2, 0) as bar:
        bar.step(2, 0, 0.0)
        bar.log("a line")


def test_a_bar_leaves_nothing_in_the_process() -> None:
    """tqdm's own has a thread that never ends, and fixes the start method of processes."""
    script = (
        "import multiprocessing, threading\n"
        "from featx.base import CountProgress, Progress\n"
        "for bar in (Progress(2, 0), CountProgress('rows')):\n"
        "    bar.__enter__().__exit__()\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "multiprocessing.set_start_method('spawn')\n"
    )
    run_python("-c", script)
