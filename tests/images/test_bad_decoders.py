"""Whole runs over images that crash and hang their decoder: their rows fail, no other."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import broken_decoders
import numpy as np
import pytest
from broken_decoders import ABORT, CRASH, HANG, gif
from conftest import Completed, run_featx
from csv_rows import csv_rows
from PIL import Image
from tiny_model import COMMAND, extract, run_job

import featx

BAD = {
    "dog/005.gif": (CRASH, "crashes decoder", "SIGSEGV"),
    "dog/007.gif": (HANG, "timeout", "TimeoutError"),
    "cat/012.gif": (ABORT, "crashes decoder", "SIGABRT"),
    "dog/044.gif": (CRASH, "crashes decoder", "SIGSEGV"),
}


def write_gifs(root: Path, names: Iterable[str] = tuple(BAD)) -> None:
    for seed, name in enumerate(names):
        squares = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        image = Image.fromarray(squares.repeat(12, 0).repeat(12, 1))
        (root / name).write_bytes(gif(image, BAD[name][0]))


def run_command(folder: Path, *arguments: str) -> Completed:
    """The command with decoders that crash and hang; it ends without a traceback."""
    broken = broken_decoders.install(folder / "broken")
    done = run_featx(folder, *arguments, path=[broken, Path(__file__).parents[1]])
    assert "Traceback" not in done.stderr
    return done


def assert_only_the_bad_ones_failed(photos: Path, out: Path) -> None:
    """The others as in a run whose decoder does them no harm, where the bad ones are images."""
    store = featx.open(out)
    harmless = extract(photos, out=out.with_name("harmless"))
    keys = list(harmless.keys)
    good = [row for row, key in enumerate(keys) if key not in BAD]
    assert harmless.ok.all()
    assert np.array_equal(store["conv"][good], harmless["conv"][good])
    assert np.isnan(store["conv"][:][~store.ok]).all()
    assert np.flatnonzero(store.ok).tolist() == good
    failed = csv_rows(out / "failures.csv")
    rows = {row["key"]: (row["status"], row["error"]) for row in failed}
    assert rows == {name: kind[1:] for name, kind in BAD.items()}


@pytest.mark.slow
@pytest.mark.usefixtures("in_tmp_path")
def test_the_command_runs_on(photos: Path, tmp_path: Path) -> None:
    write_gifs(photos)
    done = run_command(
        tmp_path, *COMMAND, "data=folder", "data.root=photos", "data.timeout_s=1", "max_failures=9"
    )
    assert done.returncode == 0, done.stderr
    for said in (
        "2 crashes decoder, such as dog/005.gif",
        "1 crashes decoder, such as cat/012.gif",
        "1 timeout, such as dog/007.gif",
    ):
        assert f"\n  {said}: decoding" in done.stderr
    assert_only_the_bad_ones_failed(photos, tmp_path / "store")
    assert set(os.listdir("store")) >= {"features.h5", "failures.csv"}


@pytest.fixture
def probed(photos: Path) -> Path:
    """A store of sound images with a head; now two of them are dangerous, the first one too."""
    extract(photos)
    assert run_job("probe", out="store", device="cpu") == 0
    for name in ("cat/000.png", "cat/006.png"):
        (photos / name).unlink()
    write_gifs(photos, ("cat/012.gif", "dog/005.gif"))
    return photos


@pytest.mark.slow
@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.parametrize("job", ["layers", "plan", "predict"])
def test_jobs_that_write_to_no_store_run_on_as_well(
    probed: Path, tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    options = {
        "layers": COMMAND[:5],
        "plan": (*COMMAND[:-1], "out=planned"),
        "predict": (*COMMAND[:2], "store=store", "out=predicted", "max_failures=9"),
    }[job]
    done = run_command(tmp_path, f"job={job}", "data=folder", f"data.root={probed}", *options)
    assert done.returncode == 0, done.stderr
    if job == "predict":
        failed = csv_rows("predicted/predictions.csv", status="crashes decoder")
        assert [row["key"] for row in failed] == ["cat/012.gif", "dog/005.gif"]
        assert len(csv_rows("predicted/predictions.csv", status="ok")) == 19
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("in_tmp_path")
def test_verify_names_the_row_whose_image_crashes_its_decoder_now(
    photos: Path, tmp_path: Path
) -> None:
    write_gifs(photos, ("dog/005.gif",))
    extract(photos)  # whose decoder it does no harm
    done = run_command(
        tmp_path, "job=verify", "store=store", "verify.reextract_rows=50", *COMMAND[:2]
    )
    assert done.returncode == 2, done.stderr
    assert "1 different" in done.stdout
    assert "dog/005.gif" in done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("in_tmp_path")
def test_a_report_is_finished_without_the_thumbnails_that_crash_and_hang(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    write_gifs(photos)
    # Whose decoder they do no harm.
    extract({"name": "folder", "root": str(photos), "timeout_s": 2})
    files = sorted(os.listdir("store"))
    done = run_command(tmp_path, "job=report", "store=store", "report.tsne=false", "device=cpu")
    assert done.returncode == 0, done.stderr
    assert f"{len(BAD)} images cannot be decoded now, such as" in done.stderr
    assert f"; {len(BAD)} cannot be decoded now" in done.stdout
    text = Path("store/report.html").read_text("utf-8")
    data = json.loads(text.split('<script type="application/json" id="data">')[1].split("<")[0])
    bad = {data["keys"].index(name) for name in BAD}
    assert data["unread"] == {str(place): "cannot be decoded" for place in bad}
    without = {place for place, tile in enumerate(data["sprite"]["place"]) if tile < 0}
    assert without == bad
    assert sorted(os.listdir("store")) == sorted([*files, "report.html"])
    assert not list((tmp_path / "temporary").iterdir())
