"""A torture folder: every bad image is named with its reason, the others are untouched."""

from __future__ import annotations

import contextlib
import csv
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import broken_decoders
import numpy as np
import pytest
import torch
import torture
from broken_decoders import ABORT, CRASH, HANG, gif
from conftest import with_path
from interruptions import Dies, die_at_disk_change
from PIL import Image
from tiny_model import COMMAND, run_job, write_image, write_images
from tiny_model import extract_six_parts as extract
from zoo import TwoStageConvNet

import featx
from featx.errors import FeatxError
from featx.types import Status, image_checksum

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


def plain_rows(path: Path) -> dict[str, np.ndarray]:
    """The features of an image by Pillow and PyTorch alone."""
    torch.manual_seed(0)
    net = TwoStageConvNet().eval()
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB").resize((32, 32), Image.Resampling.BILINEAR))
    x = torch.from_numpy(pixels.astype(np.float32) / 255).permute(2, 0, 1)[None]
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    with torch.no_grad():
        conv = net.conv((x - mean.view(3, 1, 1)) / std.view(3, 1, 1))
        return {"conv": conv[0].numpy(), "deep": net.deep(conv)[0].numpy()}


class StoreLife:
    """Images that change, and a store of them that is written, killed, damaged and mended."""

    UNREADABLE = (FeatxError, OSError, KeyError, RuntimeError, ValueError)  # also of HDF5

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.rng, self.num_written = kind, random.Random(seed), 100 * seed
        self.photos = write_images(Path("photos"), 9)
        self.deleted: dict[Path, bytes] = {}
        self.known: dict[tuple[str, int], dict[str, np.ndarray]] = {}
        self.num_rows_read = 0
        self.list_images()

    def list_images(self) -> None:
        """Remember the features of all images as they are; write the table of their paths."""
        paths = sorted(self.photos.rglob("*.png"))
        for path in paths:
            key = str(path.relative_to(self.photos))
            self.known.setdefault((key, image_checksum(path.read_bytes())), plain_rows(path))
        lines = ["path", *sorted({key for key, _ in self.known})]
        Path("photos/table.csv").write_text("\n".join(lines) + "\n")

    def run(self, **keys: Any) -> None:
        root = {"folder": "photos", "table": "photos/table.csv"}[self.kind]
        data = {"name": self.kind, "root": root, **keys.pop("data", {})}
        extract(data, **{"max_failures": 30, **keys})

    def run_and_die(self) -> None:
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Dies):
            die_at_disk_change(patch, self.rng.randint(1, 14))
            self.run(**self.rng.choice([{}, {"grow": True}, {"refresh": True}, {"pack": False}]))

    def write(self, path: Path) -> None:
        self.num_written += 1
        write_image(path, self.num_written)
        self.list_images()

    def delete_image(self) -> None:
        path = self.rng.choice(sorted(self.photos.rglob("*.png")))
        self.deleted[path] = path.read_bytes()
        path.unlink()

    def put_images_back(self) -> None:
        for path, data in self.deleted.items():
            path.write_bytes(data)
        self.deleted.clear()
        self.list_images()

    def damage(self) -> None:
        for path in self.rng.sample(files := sorted(Path("store").rglob("*.h5")), len(files) and 1):
            data = bytearray(path.read_bytes())
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            path.write_bytes(data)

    def check(self) -> None:
        """Every row that can be read is that of bytes that its image has or had, or has failed."""
        try:
            store = featx.open("store")  # if there is one
            keys, sums, status = store.keys.tolist(), store.image_checksums, store.status
        except self.UNREADABLE:
            return
        for name in store:
            for row, key in enumerate(keys):
                try:
                    values = np.asarray(store[name][row], np.float32)
                except self.UNREADABLE:
                    continue
                # A row that has failed in one run only has no checksum of one image.
                expected = [
                    rows[name]
                    for (known_key, checksum), rows in self.known.items()
                    if known_key == key and (status[row] != 0 or checksum == sums[row])
                ]
                is_right = any(np.abs(values - each).max() < 0.03 for each in expected)
                assert is_right or (np.isnan(values).all() and status[row] != 0), (name, key)
                self.num_rows_read += is_right

    def act(self) -> None:
        """Do one thing; it may be refused, with a reason."""
        rng, images = self.rng, sorted(self.photos.rglob("*.png"))
        often = [
            self.run,
            self.run_and_die,
            lambda: self.run(grow=True),
            lambda: self.run(refresh=True, retry_failed=True),
            lambda: run_job("verify", store="store", verify={"repair": True}),
        ]
        once = [
            lambda: self.run(data={"limit": rng.randint(1, 9)}),
            lambda: self.write(self.photos / f"cat/{rng.randrange(100):03d}-new.png"),
            lambda: self.write(rng.choice(images)),
            lambda: run_job("pack", out="store"),
            lambda: self.run(layers=rng.choice([["deep"], ["conv", "deep"]])),
            *(self.delete_image, self.put_images_back, self.damage),
        ]
        with contextlib.suppress(FeatxError):
            rng.choice([*often, *often, *once])()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "table"])
@pytest.mark.parametrize("seed", range(4))
def test_a_random_life_of_a_store(kind: str, seed: int) -> None:
    life = StoreLife(kind, seed)
    life.run()
    for _ in range(20):
        life.act()
        life.check()
    assert life.num_rows_read > 50
