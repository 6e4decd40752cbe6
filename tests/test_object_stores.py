"""The command with stores in an object store, on a real S3 server: as a user runs it."""

from __future__ import annotations

import contextlib
import json
import os
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
from conftest import Completed, with_path
from made_store import make_run
from object_server import RequestLog, S3Requests, num_parts, place, rows_of, upload, worker_pids
from tiny_model import COMMAND, TRUSTED, run_job, write_image, write_images
from tiny_model import SIX_PARTS as KEYS
from tiny_model import extract_six_parts as extract
from waiting import wait_until

import featx as package
from featx import jobs
from featx.config import from_composed, from_keywords
from featx.errors import ConfigError, RunError
from featx.storage import s3_client
from featx.store import DamageRecord, check_store, layout
from featx.torch import FeatureDataset, TokenDataset
from featx.types import Listing

pytestmark = pytest.mark.usefixtures("in_tmp_path", "without_retry_waits", "cache_folder")

Command = Callable[..., Completed]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images")


@pytest.fixture
def out(bucket: str) -> str:
    return f"s3://{bucket}/runs/tiny"


def start(out: str, images: Path, *more: str, **options: Any) -> subprocess.Popen[bytes]:
    """The command, with a model that takes its time."""
    return subprocess.Popen(
        [
            sys.executable, "-m", "featx", *COMMAND, f"out={out}", "data=folder",
            f"data.root={images}", "+model.args.pause_s=0.3", *more,
        ],
        env=with_path(Path(__file__).parent),
        stdout=subprocess.DEVNULL,
        **options,
    )  # fmt: skip


def test_a_part_that_is_too_large_for_an_object_is_refused_before_it_is_computed(
    images: Path, out: str, watch: RequestLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_client, "MAX_PUT_BYTES", 10)
    with pytest.raises(ConfigError, match=r"at most 10 B in one request\. Give a smaller part"):
        extract(str(images), out=out)
    assert not any(name == "put_object" for name, _ in watch.requests)


@pytest.mark.slow
def test_the_rows_are_those_of_a_run_to_the_disk(
    tmp_path: Path, out: str, watch: RequestLog, capfd: pytest.CaptureFixture[str]
) -> None:
    images = write_images(tmp_path / "images", 9)
    (images / "cat" / "006.png").write_bytes(b"")
    near = extract(str(images), max_failures=5)
    far = extract(str(images), max_failures=5, out=out)
    assert rows_of(far) == rows_of(near)
    assert far.complete
    assert far.failures == near.failures
    shown = "".join(capfd.readouterr())
    assert "the parts are kept" in shown
    assert f'featx.open("{out}").xy(' in shown
    # Again: there is nothing to do, and nothing is written over a part.
    watch.clear()
    extract(str(images), max_failures=5, out=out)
    assert not any(
        name == "put_object" and "/parts/" in values["Key"] for name, values in watch.requests
    )
    # Images that can be read now, and layers that are added.
    write_image(images / "cat" / "006.png", 77)
    mended = extract(str(images), out=out, retry_failed=True)
    assert mended.ok.all()
    more = extract(str(images), layers=["conv", "pool"], out=out)
    assert more.layers == ("conv", "pool")
    whole = extract(str(images), layers=["conv", "pool"], overwrite=True)
    assert rows_of(more) == rows_of(whole)
    assert check_store(place(out)).complete
    assert run_job("verify", store=out, verify={"reextract_rows": 4}) == 0
    assert {"images", "store"} <= set(os.listdir()) <= {"cache", "images", "store"}


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["null", "2"])
def test_kills_at_any_moment_and_two_drivers_at_once(images: Path, out: str, workers: str) -> None:
    near = extract(str(images), model={**KEYS["model"], "args": {"pause_s": 0.0}})
    more = (f"executor.workers={workers}",)
    for parts in (0, 1, 3):
        running = start(out, images, *more, start_new_session=True)
        while running.poll() is None and num_parts(out) <= parts:
            time.sleep(0.05)
        time.sleep(0.1 * parts)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    assert num_parts(out) > 3
    drivers = [start(out, images, *more) for _ in range(2)]
    assert [driver.wait(240) for driver in drivers] == [0, 0]
    report = check_store(place(out))
    assert report.complete, report
    far = package.open(out)
    assert far["conv"][:].tobytes() == near["conv"][:].tobytes()
    assert not (place(out) / layout.DAMAGED).exists()
    assert not list((place(out) / layout.WORKERS).glob("*"))
    assert json.loads((place(out) / layout.SUMMARY).read_bytes())["failures"] == 0


class ChangingImages:
    """Images in memory; the function of a key in `meanwhile` is called once, when it is read."""

    def __init__(self, images: Path) -> None:
        self.images = {path.name.encode(): path.read_bytes() for path in images.rglob("*.png")}
        self.meanwhile: dict[bytes, Callable[[], object]] = {}

    def listing(self) -> Listing:
        keys = np.array(sorted(self.images))
        return Listing(keys, np.full(len(keys), -1))

    def read(self, key: bytes) -> bytes:
        data = self.images[key]
        self.meanwhile.pop(key, bool)()
        return data


@pytest.mark.slow
def test_a_driver_does_not_undo_a_row_that_another_has_refreshed(
    tmp_path: Path, out: str, s3_requests: S3Requests
) -> None:
    """The image changes once more, and another driver refreshes its row, while one computes it."""
    source = ChangingImages(write_images(tmp_path / "images", 9))
    others = [(tmp_path / f"{seed}.png", seed) for seed in (77, 78)]
    for path, seed in others:
        write_image(path, seed)
    first, second = (path.read_bytes() for path, _ in others)
    extract(source, out=out)
    request, key = s3_requests.answer, sorted(source.images)[5]

    def refresh_second() -> None:
        source.images[key] = second
        extract(source, out=out, refresh=True)

    def arm(operation: str, **parameters: Any) -> dict[str, Any]:
        if operation == "head_object" and "/parts/" in parameters["Key"]:
            s3_requests.answer, source.meanwhile[key] = request, refresh_second
        return request(operation, **parameters)

    source.images[key] = first
    s3_requests.answer = arm
    with pytest.raises(RunError, match=r"part-000001\.h5 was changed by another process"):
        extract(source, out=out, refresh=True)
    far = extract(source, out=out)
    assert rows_of(far) == rows_of(extract(source, out="near"))


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced(images: Path, out: str) -> None:
    near = extract(str(images))
    running = start(out, images, "executor.workers=2", stderr=subprocess.PIPE)
    victim = wait_until(lambda: num_parts(out) and worker_pids(out, "worker"), running)[0]
    os.kill(victim, signal.SIGKILL)
    _, said = running.communicate(timeout=240)
    assert running.returncode == 0, said
    assert b"was killed by SIGKILL" in said
    assert rows_of(package.open(out)) == rows_of(near)
    assert check_store(place(out)).complete
    assert not list((place(out) / layout.WORKERS).glob("*"))


@pytest.mark.slow
def test_jobs_that_read_a_store(
    images: Path, out: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    extract(str(images), out=out)
    capfd.readouterr()
    assert run_job("status", store=out, json=True) == 0
    assert json.loads(capfd.readouterr().out)["parts_done"] == 6
    probe = {"test_share": 0.3}
    assert run_job("probe", store=out, probe=probe, json=True) == 0
    result = json.loads(capfd.readouterr().out)
    kept = json.loads((place(out) / layout.PROBE).read_bytes())
    assert kept["accuracy"] == result["accuracy"]
    assert kept["store"] == out
    assert kept["head"]["file"] == "probe/conv.safetensors"
    sure = {"model": TRUSTED, "data": str(images), "out": "predicted"}
    assert run_job("predict", store=out, **sure) == 0
    assert Path("predicted/predictions.csv").read_text().count("\n") == 22
    first = str(images / package.open(out).key_of(0))
    for head in (out, package.open(out), f"{out}/probe/conv.safetensors"):
        assert package.predict(head, [first], model_factory=TRUSTED["factory"])[0].status == "ok"
    capfd.readouterr()
    assert run_job("plan", data=str(images), out=out, model=KEYS["model"]) == 0
    assert "in an object store" in capfd.readouterr().out
    assert run_job("export", store=out, out="exported", export={"format": "npy"}) == 0
    assert np.load("exported/features/conv.npy").tobytes() == package.open(out)["conv"][:].tobytes()
    dataset = FeatureDataset(out, "conv", dtype=None)
    assert dataset[3][0].numpy().tobytes() == package.open(out)["conv"][3].tobytes()
    for job in ("export", "neighbors", "duplicates", "cka", "report"):
        with pytest.raises(ConfigError, match=r"lies in an object store: say where with out=DIR"):
            run_job(job, store=out)
    with pytest.raises(ConfigError, match="packing needs a disk: it deletes the parts"):
        run_job("pack", store=out)


@pytest.mark.parametrize("workers", [None, 2])
@pytest.mark.slow
def test_heat_maps_and_their_sheets(images: Path, out: str, workers: int | None) -> None:
    (images / "cat" / "000.png").write_bytes(b"no image")
    keys = {**KEYS, "layers": "deep", "data": str(images), "max_failures": 5}
    keys["executor"] = {"workers": workers}
    method = {
        "method": ["gradcam", "saliency"],
        "feature_map_layer": "conv",
        "per_class": 1,
    }
    assert run_job("attribute", **keys, attribute=method) == 0
    assert run_job("attribute", **{**keys, "out": out}, attribute=method) == 0
    far = package.open(out)
    assert far.complete
    assert rows_of(far) == rows_of(package.open("store"))
    assert far.failures == package.open("store").failures
    near = {path.name: path.read_bytes() for path in Path("store/sheets").iterdir()}
    assert {path.name: path.read_bytes() for path in (place(out) / "sheets").glob("*")} == near
    assert near


@pytest.mark.slow
def test_nothing_of_the_credentials_is_kept_or_said(images: Path, out: str) -> None:
    running = start(out, images, stderr=subprocess.PIPE)
    _, said = running.communicate(timeout=240)
    assert running.returncode == 0, said
    kept = b"".join(path.read_bytes() for path, _ in place(out).objects())
    endpoint = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://").encode()
    for secret in (b"id-of-a-tester", b"secret-of-a-tester", endpoint):
        assert secret not in kept
        assert secret not in said


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"pack": True}, r"pack=true needs a store on a disk.*: it deletes the parts"),
        ({"profile": True}, r"profile=true needs a store on a disk.*: its files grow"),
        ({"tensorboard": True}, "tensorboard needs a store on a disk"),
        ({"executor": "slurm"}, r"executor=slurm: out=s3://bucket/run .* executor.folder=DIR"),
        (
            {"executor": {"name": "slurm", "folder": "s3://bucket/jobs"}},
            "executor.folder=s3://bucket/jobs: the tasks share a folder on a disk",
        ),
        ({"out": "gs://bucket/run"}, "expected a path on a disk, or s3://bucket/run"),
        ({"out": "s3://bucket"}, "expected s3://bucket/folder"),
        ({"out": "s3://me:word@bucket/run"}, r"s3://\.\.\.: expected"),
    ],
)
def test_what_needs_a_disk_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        jobs.check(from_composed(from_keywords({"out": "s3://bucket/run", **given})))


@pytest.mark.slow
def test_rows_are_added_on_a_disk_only(images: Path, out: str) -> None:
    extract(str(images), out=out)
    write_image(images / "cat" / "001.png", 99)
    with pytest.raises(ConfigError, match="grow=true needs a store on a disk"):
        extract(str(images), out=out, grow=True)


def test_jobs_that_write_elsewhere_refuse_a_bucket() -> None:
    node = from_keywords({"out": "s3://bucket/run"})
    node["job"]["name"] = "stats"
    with pytest.raises(ConfigError, match=r"job=stats writes to a disk only, because .*no locks"):
        jobs.check(from_composed(node))


def test_without_the_extra_the_command_names_it(
    featx: Command, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "without" / "botocore").mkdir(parents=True)
    (tmp_path / "without" / "botocore" / "__init__.py").write_text("raise ImportError('none')\n")
    monkeypatch.setenv("PYTHONPATH", with_path(tmp_path / "without")["PYTHONPATH"])
    done = featx("data=folder", f"data.root={images}", "out=s3://bucket/run")
    assert done.returncode == 2
    assert 'pip install "featx[remote]"' in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.slow
def test_damage_is_repaired_there(images: Path, bucket: str, packed: bool) -> None:
    near = extract(str(images), pack=packed)
    path = Path("store/features.h5" if packed else "store/parts/part-000002.h5")
    data = bytearray(path.read_bytes())
    data[data.index(near["conv"][9].tobytes())] ^= 1
    root = upload(Path("store"), f"s3://{bucket}/run")
    s3_client.write(bucket, f"run/{path.relative_to('store')}", bytes(data))
    assert run_job("verify", store=str(root)) == 2
    assert run_job("verify", store=str(root), verify={"repair": True}) == 0
    assert rows_of(package.open(root)) == rows_of(near)
    assert not DamageRecord.read(root).is_due


@pytest.mark.slow
def test_a_store_that_was_copied_there_is_the_same(images: Path, bucket: str) -> None:
    near = extract(str(images))
    upload(Path("store"), f"s3://{bucket}/copied")
    far = extract(str(images), out=f"s3://{bucket}/copied")
    assert rows_of(far) == rows_of(near)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_tokens_are_those_of_the_store_on_the_disk(
    tmp_path: Path, bucket: str, packed: bool
) -> None:
    root = make_run(96, 32, {"tokens": (21, 6)}, "float16").write(tmp_path / "made", packed=packed)
    upload(root, f"s3://{bucket}/tokens")
    near, far = (
        TokenDataset(path, "tokens", tokens="all", batch_size=64, memory=40_000, block=7)
        for path in (root, f"s3://{bucket}/tokens")
    )
    for one, other in zip(near, far, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    rows, positions = np.divmod(np.random.default_rng(0).permutation(96 * 21), 21)
    assert torch.equal(near.take(rows, positions), far.take(rows, positions))
