"""A torture folder: every bad image is named with its reason, the others are untouched."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import broken_decoders
import numpy as np
import pytest
import torture
from broken_decoders import ABORT, CRASH, HANG, gif
from conftest import with_path
from tiny_model import COMMAND, extract

import featx
from featx.types import Status

pytestmark = pytest.mark.usefixtures("in_tmp_path")

KINDS = len(torture.BAD)


def assert_only_these_failed(expected: dict[str, Status], out: str, twin: str) -> None:
    """Every row as in the twin's store, but those that are expected to fail, and why."""
    store, sound = featx.open(out), featx.open(twin)
    assert sound.ok.all()
    assert np.array_equal(store.keys, sound.keys)
    good = np.array([key not in expected for key in store.keys])
    for name in store:
        assert store[name][good].tobytes() == sound[name][good].tobytes(), name
        assert np.isnan(np.asarray(store[name][~good], np.float32)).all(), name
    statuses = dict(zip(store.keys[~good].tolist(), store.status[~good].tolist(), strict=True))
    assert statuses == expected
    assert (store.status[good] == 0).all()
    with Path(out, "failures.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["key"]: row["status"] for row in rows} == {
        key: status.label for key, status in expected.items()
    }
    assert all(row["message"] and row["error"] for row in rows)


@pytest.mark.slow
def test_a_small_torture_folder(tmp_path: Path) -> None:
    expected = torture.make(tmp_path, 60, KINDS)
    assert len(expected) == KINDS + 1
    keys = {"max_failures": 40, "layers": ["conv", "pool"], "batch_size": 8, "part_rows": 16}
    extract("torture", **keys)
    extract("twin", out="twin_store", **keys)
    assert_only_these_failed(expected, "store", "twin_store")


@pytest.mark.slow
def test_a_torture_folder_with_decoders_that_crash_and_hang(tmp_path: Path) -> None:
    """2000 sound images and 400 bad ones, by the command."""
    image = torture.make_image(0)
    extra = {
        "cat/00100.gif": (Status.CRASHES_DECODER, gif(image, CRASH)),
        "cat/00900.gif": (Status.TIMEOUT, gif(image, HANG)),
        "dog/01501.gif": (Status.CRASHES_DECODER, gif(image, ABORT)),
        "dog/02301.gif": (Status.TIMEOUT, gif(image, HANG)),
    }
    expected = torture.make(tmp_path, 2000, 395, extra)
    assert len(expected) == 400
    environment = with_path(broken_decoders.install(tmp_path / "broken"), Path(__file__).parent)
    for folder, out in (("torture", "store"), ("twin", "twin_store")):
        overrides = [
            text for text in COMMAND if not text.startswith(("out=", "part_rows", "batch"))
        ]
        command = [sys.executable, "-m", "featx", *overrides, "data=folder", f"data.root={folder}"]
        done = subprocess.run(
            [*command, f"out={out}", "max_failures=500", "data.timeout_s=3", "batch_size=16",
             "part_rows=64"],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert_only_these_failed(expected, "store", "twin_store")
