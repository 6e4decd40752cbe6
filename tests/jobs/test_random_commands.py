"""Commands at random on one store, while its images change: each row is of the image it names."""

from __future__ import annotations

import contextlib
import io
import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from interruptions import Dies, die_at_disk_change, signal_after_commits
from PIL import Image
from pyarrow import parquet
from tiny_model import extract_six_parts as extract
from tiny_model import run_job

import featx
from featx.errors import FeatxError
from featx.pipeline import Interrupted
from featx.types import UNKNOWN_IMAGE

pytestmark = [pytest.mark.usefixtures("in_tmp_path"), pytest.mark.slow]

LAYERS = ["conv", "pool"]
MANIFEST = Path("store/featx.json")


def encoded_images(count: int) -> list[bytes]:
    """Images of strong colours, and some that cannot be decoded."""
    squares = np.random.default_rng(0).integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)
    files = [io.BytesIO() for _ in squares]
    for each, file in zip(squares, files, strict=True):
        Image.fromarray(each.repeat(12, 0).repeat(12, 1)).save(file, "PNG")
    images = [file.getvalue() for file in files]
    return [*images, images[0][:60], b"no image"]


def pack_images(kind: str) -> object:
    """Return the images of the folder `photos` as a data set of some kind, with equal keys."""
    root = Path("photos")
    images = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.png")}
    if kind == "table":
        cells = [{"bytes": image, "path": key} for key, image in images.items()]
        parquet.write_table(pa.table({"image": cells}), "images.parquet", row_group_size=5)
        return {"name": "table", "root": "images.parquet"}
    if kind == "webdataset":
        with tarfile.open("images.tar", "w") as tar:
            for key in images:
                tar.add(root / key, key)
        return {"name": "webdataset", "root": "images.tar"}
    return str(root)


class RandomCommands:
    """Images that change, their store, and the features of each image that they may be."""

    def __init__(self, seed: int, kind: str) -> None:
        self.random = random.Random(seed)
        self.kind = kind
        self.images = encoded_images(12)
        Path("all").mkdir()
        for number, image in enumerate(self.images):
            Path(f"all/{number:02d}.png").write_bytes(image)
        reference = extract("all", layers=LAYERS, out="reference", max_failures=1.0)
        rows = {name: reference[name][:] for name in LAYERS}
        self.rows = {
            xxhash.xxh3_64_intdigest(image): {name: rows[name][i] for name in LAYERS}
            for i, image in enumerate(self.images)
        }
        self.is_damaged = False
        for _ in range(6):
            self.change()

    def change(self) -> None:
        """Write an image under a new or an old name, or delete one."""
        path = Path(f"photos/{self.random.choice('ab')}/{self.random.randrange(12)}.png")
        if path.exists() and self.random.random() < 0.2:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.random.choice(self.images))

    def command(self) -> None:
        """Extract with options at random; some commands are cut off. A refusal changes nothing."""
        chance, choice = self.random.random, self.random.choice
        keys: dict[str, Any] = {"layers": choice([["conv"], ["conv"], ["pool"], LAYERS])}
        keys |= {"grow": chance() < 0.7, "retry_failed": chance() < 0.3}
        keys |= {"refresh": choice([False, True, "auto"])}
        before = MANIFEST.read_bytes() if MANIFEST.exists() else None
        with pytest.MonkeyPatch.context() as patch:
            if (cut := chance()) < 0.15:
                signal_after_commits(patch, self.random.randint(1, 3))
            elif cut < 0.3:
                die_at_disk_change(patch, self.random.randint(1, 12))
            try:
                data = pack_images(self.kind)
                extract(data, max_failures=1.0, pack=choice([True, False]), **keys)
            except (Interrupted, Dies):
                return
            except FeatxError:
                if before is not None and not self.is_damaged:
                    assert MANIFEST.read_bytes() == before
                return
        if keys["refresh"] is True:
            store = featx.open("store")
            for row in np.flatnonzero(store.ok).tolist():
                if (path := Path("photos", store.keys[row])).exists():
                    current = xxhash.xxh3_64_intdigest(path.read_bytes())
                    assert store.image_checksums[row] == current

    def pack(self) -> None:
        with contextlib.suppress(FeatxError):
            run_job("pack", store="store")

    def flip(self) -> None:
        """Flip a bit of the store, which verify and a repair are to find."""
        if files := sorted(Path("store").rglob("*.h5")):
            path = self.random.choice(files)
            data = bytearray(path.read_bytes())
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            path.write_bytes(data)
            self.is_damaged = True

    def verify(self) -> None:
        with contextlib.suppress(FeatxError):
            if run_job("verify", store="store", verify={"repair": True}) == 0:
                self.is_damaged = False

    def check(self) -> None:
        """Every row that is ok has the features of the image whose checksum it has."""
        try:
            store = featx.open("store")
            keys, checksums, is_ok = store.keys.tolist(), store.image_checksums, store.ok
            rows = {name: store[name][:] for name in store}
        except FeatxError:
            # The listing comes after the manifest, and no row before it.
            assert self.is_damaged or not (MANIFEST.exists() and Path("store/samples.h5").exists())
            return
        assert len(set(keys)) == len(store)
        pairs = {a ^ b for a in self.rows for b in self.rows if a != b}
        for row in np.flatnonzero(is_ok).tolist():
            checksum = int(checksums[row])
            if checksum in pairs:  # layers of two images, which no command has accepted
                continue
            if checksum not in self.rows:
                assert checksum == UNKNOWN_IMAGE
                assert self.is_damaged
                continue
            for name, values in rows.items():
                np.testing.assert_allclose(values[row], self.rows[checksum][name], atol=1e-2)


@pytest.mark.parametrize("kind", ["folder", "table", "webdataset"])
@pytest.mark.parametrize("seed", range(5))
def test_rows_are_of_the_images_they_name(seed: int, kind: str) -> None:
    store = RandomCommands(seed, kind)
    acts = [store.command, store.change, store.verify, store.pack, store.flip]
    for act in store.random.choices(acts, [8, 5, 2, 1, 1], k=24):
        act()
        store.check()
