"""executor.workers with real workers and a tiny model: the same rows however many there are."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed_jobs
import h5py
import numpy as np
import pytest
from made_store import dataset_digests, temporary_files
from PIL import Image
from processes import ended, outcome, running
from tiny_model import COMMAND, MODEL, run_job
from tiny_model import SIX_PARTS as KEYS
from tiny_model import extract_six_parts as extract
from torch import nn
from waiting import wait_until

import featx
from featx.config import from_composed, from_keywords
from featx.errors import ConfigError, ModelError, RunError
from featx.pipeline.executors import job_folder, worker

pytestmark = pytest.mark.usefixtures("in_tmp_path", "one_thread")

TESTS = Path(__file__).resolve().parent.parent


# What the options take


TWO: dict[str, Any] = {"executor": {"workers": 2}}


def executor(name: str, **options: Any) -> dict[str, Any]:
    return {"executor": {"name": name, **options}}


def config(**keys: Any) -> Any:
    return from_composed(from_keywords(keys))


@pytest.mark.parametrize("value", [0, -1, "all", True, 2.5, [0, 1]])
def test_workers_are_a_number(value: object) -> None:
    with pytest.raises(ConfigError, match=r"executor\.workers=.*: expected a whole number"):
        config(executor={"workers": value})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({**TWO, "tensorboard": True}, "tensorboard sees the batches of one process"),
        ({**TWO, "profile": True}, "profile sees the batches of one process"),
        ({"executor": "lokal"}, "executor=lokal: expected one of local, ray, slurm"),
        (executor("slurm", address="auto"), "executor.address has an effect with executor=ray"),
        ({"executor": {"devices": [0, 1]}}, "devices is gone: executor.workers=2 takes the first"),
        (executor("slurm", cpus=0), "executor.cpus=0: expected a whole number of at least 1"),
        (executor("slurm", mode="cloud"), "executor.mode=cloud: expected one of slurm, local"),
        (executor("slurm", mode="local", time_limit_min=9), "limit_min=9 has no effect with .*l"),
        (executor("slurm", mode="local", sbatch={"gres": "gpu:1"}), "no effect with .*mode=local"),
        (
            executor("ray", sbatch={"a": 1}),
            "executor.sbatch has an effect with executor=slurm only",
        ),
        (executor("slurm", gres="gpu:1"), r"gres is gone: 'executor\.sbatch=\{gres: gpu:1\}'"),
        (executor("ray", gpus=-1.0), "executor.gpus=-1.0: expected a number above 0"),
    ],
)
def test_what_does_not_go_together_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**keys)


def test_missing_gpus_are_reported_before_a_store_is_made(photos: Path) -> None:
    with pytest.raises(ConfigError, match=r"cuda:7.*torch finds \d+ CUDA devices"):
        extract(photos, device="cuda:7", executor={"workers": 2})
    assert not Path("store").exists()


# The same rows


class OfADataset:
    """A data set that travels: three images of one colour."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return Image.new("RGB", (40, 40), (80 * index, 10, 10)), index


@pytest.mark.slow  # two processes that import torch; test_local.py has workers without it
def test_two_workers_give_what_one_process_gives(
    photos: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (photos / "cat" / "broken.png").write_bytes(b"no image")
    reference = extract(photos, out="reference", max_failures=5)
    shared = extract(photos, executor={"workers": 2}, max_failures=5)
    assert shared.complete
    assert dataset_digests("store") == dataset_digests(reference.root)
    assert [f["key"] for f in shared.failures] == ["cat/broken.png"]
    manifest = json.loads(Path("store/featx.json").read_text())
    assert manifest["resolved"]["threads"] == 1
    assert manifest["fingerprint"] == json.loads(Path("reference/featx.json").read_text())[
        "fingerprint"
    ]  # fmt: skip
    summary = json.loads(Path("store/summary.json").read_text())
    assert summary["seconds"]["decode"] > 0  # reading files this small takes less than half a ms
    assert summary["images_per_second"] > 0
    assert summary["failures"] == 1
    assert "device     2 x CPU" in capfd.readouterr().err
    assert extract(
        photos, executor={"workers": 2}, max_failures=5
    ).complete  # nothing is left to do


@pytest.mark.slow
@pytest.mark.parametrize("job", distributed_jobs.JOBS)
def test_other_jobs_give_what_one_process_gives(photos: Path, job: str) -> None:
    (photos / "cat" / "000.png").write_bytes(b"no image")
    distributed_jobs.run(job, photos, "reference", max_failures=5)
    for workers in (2, 4):
        keys: dict[str, Any] = {"executor": {"workers": workers}, "max_failures": 5}
        assert distributed_jobs.run(job, photos, **keys, overwrite=True) == 0
        assert distributed_jobs.made(job) == distributed_jobs.made(job, "reference")
        assert temporary_files(Path("store")) == []
        assert not Path("store/workers").exists()
    assert distributed_jobs.run(job, photos, **keys) == 0  # nothing is left to do


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_number_of_workers_gives_the_same_bits_of_a_real_model(workers: int) -> None:
    keys: dict[str, Any] = {
        "data": {"name": "sample"},
        "layers": ["blocks.2", "embedding"],
        "precision": "fp32",
        "compile": False,
        "batch_size": 4,
        "part_rows": 4,
    }
    reference = featx.extract(**keys, out="reference")
    featx.extract(**keys, out="store", executor={"workers": workers})
    assert dataset_digests("store") == dataset_digests(reference.root)


def open_file() -> dict[str, Any]:
    with h5py.File("images.h5", "w") as file:
        file["x"] = np.random.default_rng(0).integers(0, 256, (13, 40, 40, 3), dtype=np.uint8)
    return {"name": "hdf5", "root": "images.h5", "dataset": "/x"}


@pytest.mark.slow
@pytest.mark.parametrize("make", [OfADataset, open_file])
def test_objects_and_sources_with_open_files_go_to_workers(
    make: Callable[[], Any],
) -> None:
    """An object travels; a source with an open file is opened by each worker."""
    data = make()
    extract(data, out="reference")
    extract(data, executor={"workers": 2})
    assert dataset_digests("store") == dataset_digests("reference")


def test_an_object_that_cannot_travel_is_refused_by_name() -> None:
    class Local(OfADataset):
        pass

    with pytest.raises(ConfigError, match=r"cannot be sent to other processes.*Local"):
        extract(Local(), executor={"workers": 2})


# Threads


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")  # which gives the number of before back
def test_a_resume_keeps_the_number_of_threads(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import torch

    seen = []
    forward = nn.Conv2d.forward
    torch.set_num_threads(2)
    extract(photos, pack=False)
    assert json.loads(Path("store/featx.json").read_text())["resolved"]["threads"] == 2
    Path("store/parts/part-000001.h5").unlink()

    def noticed(self: Any, x: Any) -> Any:
        seen.append(torch.get_num_threads())
        return forward(self, x)

    monkeypatch.setattr(nn.Conv2d, "forward", noticed)
    torch.set_num_threads(1)
    assert extract(photos).complete
    assert seen[-1] == 2
    assert torch.get_num_threads() == 1, "the caller's number is given back"
    printed = " ".join(capfd.readouterr().err.split())
    assert "2 threads (as the store was started; 1 here would give" in printed


def test_what_would_compute_other_values_is_no_worker(photos: Path) -> None:
    """Another version of a library, on another machine."""
    from featx.analysis import FEATURES
    from featx.pipeline import FeatureOutput, build_run_context

    keys = from_keywords({"model": MODEL, "layers": ["conv"], "data": str(photos), "out": "store"})
    output = FeatureOutput(from_composed(keys))
    with (
        build_run_context(from_composed(keys), "", FEATURES, output) as context,
        output.open(context),
    ):
        spec = job_folder.worker_spec(context, output.write_session, output.for_workers(), "")
        fingerprint = {**spec.fingerprint, "version.torch": "0.1"}
        other = job_folder.replace(spec, fingerprint=fingerprint)
        with (
            pytest.raises(RunError, match=r"version.torch: the driver has '0.1', this '"),
            worker.worker_context(other, "cpu"),
        ):
            pass
        with worker.worker_context(spec, "cpu") as again:
            assert again.as_run().resolved == context.as_run().resolved


# What goes wrong


class Raising(nn.Module):
    """A bug that shows at a white image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 8, stride=8)

    def forward(self, x: Any) -> Any:
        if Path("bug").exists() and float(x.flatten(1).mean(1).max()) > 2.0:
            raise ValueError("a bug in the model")
        return self.conv(x)


ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def command_of(job: str) -> list[str]:
    """A job of two workers that takes its time."""
    given = [text for text in COMMAND if not text.startswith("layers=")]
    more = [*distributed_jobs.OVERRIDES[job], "executor.workers=2", "+model.args.pause_s=0.4"]
    data = ["data=folder", "data.root=photos"]
    return [sys.executable, "-m", "featx", *given, *data, *more]


# On a busy machine one worker may have done a part before the other had its first.
KILLED = (
    r"worker \d \(cpu\) was killed by SIGKILL "
    r"(in part \d+ \(rows|before it had a part|between two parts)"
)


def workers_here() -> tuple[list[int], list[int]]:
    """The worker processes of a run in this folder, and those that they have forked."""
    parent_of = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if (
                b"featx.pipeline.executors.worker" in words
                and (folder / "cwd").readlink() == Path.cwd()
            ):
                status = (folder / "stat").read_text().rpartition(") ")[2]
                parent_of[int(folder.name)] = int(status.split()[1])
    workers = [pid for pid, parent in parent_of.items() if parent not in parent_of]
    return workers, [pid for pid in parent_of if pid not in workers]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "end"),
    [
        *(("extract", end) for end in ("worker", "driver", "sigint", "sigterm")),
        *((job, end) for job in distributed_jobs.JOBS for end in ("worker", "driver")),
    ],
)
def test_killed_in_the_middle_the_result_is_the_same(photos: Path, job: str, end: str) -> None:
    distributed_jobs.run(job, photos, "reference", model={**MODEL, "args": {"pause_s": 0.4}})
    temporary = Path("temporary").absolute()
    temporary.mkdir()
    environment = {**ONE_THREAD, "TMPDIR": str(temporary)}
    with running(command_of(job), **environment) as process:
        wait_until(lambda: distributed_jobs.parts_done(job, Path("store")), process)
        workers, decoders = workers_here()
        assert len(workers) == 2
        assert decoders
        victim = workers[0] if end == "worker" else process.pid
        signals = {"sigint": signal.SIGINT, "sigterm": signal.SIGTERM}
        os.kill(victim, signals.get(end, signal.SIGKILL))
        _, output, took = outcome(process)
    codes = {"worker": 0, "driver": -9, "sigint": 130, "sigterm": 143}
    assert process.returncode == codes[end], output
    if end == "worker":
        assert re.search(KILLED, output)
    else:
        assert took < 10
        assert all(ended(pid) for pid in (*workers, *decoders)), "a process lives on"
        assert 1 <= distributed_jobs.parts_done(job, Path("store")) < 6
        with running(command_of(job), **environment) as again:
            assert outcome(again)[0] == 0
    assert list(temporary.glob("featx-*")) == []
    assert distributed_jobs.made(job) == distributed_jobs.made(job, "reference")
    assert temporary_files(Path("store")) == []


@pytest.mark.slow
@pytest.mark.parametrize("job", ["extract", "stats"])
def test_a_bug_in_the_model_names_worker_part_and_rows(photos: Path, job: str) -> None:
    model = {**MODEL, "factory": "test_devices_of_workers:Raising"}
    keys = {**KEYS, "model": model, "executor": {"workers": 2}}
    Image.new("RGB", (40, 40), (255, 255, 255)).save(
        photos / "cat" / "007.png"
    )  # row 2, of no trial
    Path("bug").touch()
    with pytest.raises(ModelError) as failed:
        run_job(job, **keys, data=photos)
    pattern = r"worker \d \(cpu\), part \d \(rows \d+ to \d+\): .*ValueError: a bug in the model"
    assert re.match(pattern, str(failed.value))
    Path("bug").unlink()
    assert run_job(job, **keys, data=photos) == 0
