"""Every row says which image it was computed from; images that changed since are noticed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from tiny_model import extract, run_job

import featx
from featx.types import NO_IMAGE, UNKNOWN_IMAGE, image_checksum

LENIENT = {"max_failures": 30, "layers": ["conv", "deep"]}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def checksum_of(path: Path) -> int:
    """By hashlib alone, as docs/store-format.md tells it."""
    digest = hashlib.blake2b(path.read_bytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def paths_of(photos: Path, store: featx.FeatureStore) -> list[Path]:
    return [photos / key for key in store.keys.tolist()]


@pytest.mark.parametrize("pack", [True, False])
def test_every_row_has_the_checksum_of_its_image(photos: Path, pack: bool) -> None:
    (photos / "cat" / "broken.png").write_bytes(b"no image")
    (photos / "cat" / "empty.png").touch()
    store = extract(photos, pack=pack, **LENIENT)
    expected = [
        checksum_of(path) if path.stat().st_size else NO_IMAGE for path in paths_of(photos, store)
    ]
    assert store.image_checksums.tolist() == expected
    assert len(store.failures) == 2
    if pack:
        with h5py.File("store/features.h5") as file:
            assert file["image_checksum"].dtype == np.dtype("<u8")
            assert file["image_checksum"][:].tolist() == expected
    assert run_job("verify", store="store") == 0


def test_checksums_leave_room_for_what_is_not_known() -> None:
    assert UNKNOWN_IMAGE < NO_IMAGE < image_checksum(b"")


def test_a_box_has_the_checksum_of_its_whole_image(photos: Path) -> None:
    names = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))[:2]
    lines = [f"{name},{x},0,20,20" for name in names for x in (0, 3, 6)]
    Path("boxes.csv").write_text("\n".join(["path,x,y,width,height", *lines]) + "\n")
    store = extract({"name": "folder", "root": str(photos), "boxes": "boxes.csv"}, **LENIENT)
    expected = [checksum_of(photos / str(key).partition("#")[0]) for key in store.keys]
    assert store.image_checksums.tolist() == expected


def test_mended_images_have_new_checksums(photos: Path) -> None:
    first = sorted(photos.rglob("*.png"))[0]
    sound = first.read_bytes()
    first.write_bytes(sound[: len(sound) // 2])
    assert extract(photos, **LENIENT).image_checksums[0] == checksum_of(first)
    first.write_bytes(sound)
    assert extract(photos, retry_failed=True, **LENIENT).image_checksums[0] == image_checksum(sound)


def test_a_store_without_checksums_still_opens_and_says_that_they_are_not_known(
    photos: Path,
) -> None:
    extract(photos, **LENIENT)
    with h5py.File("store/features.h5", "r+") as file:
        del file["image_checksum"], file["checksums/image_checksum"]
    assert (featx.open("store").image_checksums == UNKNOWN_IMAGE).all()
    assert run_job("verify", store="store") == 0
