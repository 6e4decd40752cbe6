"""Every row says which image it was computed from; images that changed since are noticed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import made_sources
import numpy as np
import pytest
import xxhash
from conftest import slow_except
from interruptions import died_at_disk_change, same_values, stopped_after
from PIL import Image
from tiny_model import extract_six_parts as extract
from tiny_model import job_result, run_job, write_image

from featx import FeatureStore
from featx import open as open_store
from featx.analysis import compare_stores
from featx.errors import FeatxError, StoreMismatchError
from featx.pipeline import changed_images, row_updates
from featx.sources.pixel_encoding import encode_array
from featx.types import NO_IMAGE, UNKNOWN_IMAGE, Part, image_checksum

pytestmark = pytest.mark.usefixtures("in_tmp_path")

LENIENT = {"max_failures": 30, "layers": ["conv", "deep"]}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The keys of the images whose bytes were compared with a row's checksum."""
    seen: list[bytes] = []
    read = changed_images.read_image

    def noted(source: Any, key: bytes) -> bytes:
        seen.append(key)
        return read(source, key)

    monkeypatch.setattr(changed_images, "read_image", noted)
    return seen


def checksum_of(path: Path) -> int:
    """By xxhash alone, as docs/store-format.md tells it."""
    return xxhash.xxh3_64_intdigest(path.read_bytes())


def paths_of(photos: Path, store: FeatureStore) -> list[Path]:
    return [photos / key for key in store.keys.tolist()]


def test_every_row_has_the_checksum_of_its_image(photos: Path) -> None:
    (photos / "cat" / "broken.png").write_bytes(b"no image")
    (photos / "cat" / "empty.png").touch()
    store = extract(photos, **LENIENT)
    expected = [
        checksum_of(path) if path.stat().st_size else NO_IMAGE for path in paths_of(photos, store)
    ]
    assert store.image_checksums.tolist() == expected
    assert len(store.failures) == 2
    with h5py.File("store/features.h5") as file:
        assert file["image_checksum"].dtype == np.dtype("<u8")
        assert file["image_checksum"][:].tolist() == expected
    assert run_job("verify", store="store") == 0


def sorted_photos(photos: Path) -> list[Path]:
    return sorted(photos.rglob("*.png"))


def age(photos: Path, seconds: float = 100.0) -> None:
    """Images that were not changed just now, so that their states are kept."""
    for path in photos.rglob("*"):
        if path.is_file():
            before = path.stat().st_mtime_ns
            os.utime(path, ns=(before, before - int(seconds * 1e9)))


@pytest.mark.slow
@pytest.mark.parametrize(("pack", "aged"), [(True, False), (False, True)])
def test_a_changed_image_is_refused_and_refreshed(
    photos: Path, pack: bool, aged: bool, computed: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    if aged:
        age(photos)
    keys = {**LENIENT, "pack": pack}
    before = extract(photos, **keys)
    values = before["conv"][:]
    changed = sorted_photos(photos)[5]
    write_image(changed, 1000)
    with pytest.raises(StoreMismatchError, match=r"1 image has changed.*cat/030\.png"):
        extract(photos, **keys)
    assert run_job("verify", store="store") == 2
    assert "cat/030.png" in capfd.readouterr().out
    computed.clear()
    after = extract(photos, refresh=True, **keys)
    assert [start for _, start in computed] == [4]  # one batch of six
    whole = extract(photos, out="whole", **keys)
    assert same_values(after, whole)
    rest = np.arange(21) != 5
    assert after["conv"][rest].tobytes() == values[rest].tobytes()
    assert after["conv"][5].tobytes() != values[5].tobytes()
    assert Path("store/features.h5").exists() == pack
    assert run_job("verify", store="store") == 0
    extract(photos, **keys)


def test_a_repeated_command_with_refresh_auto_computes_what_has_changed(
    photos: Path, computed: list[Any], compared: list[bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    age(photos)
    keys = {**LENIENT, "refresh": "auto"}
    extract(photos, **keys)
    computed.clear()
    extract(photos, **keys)
    assert not computed
    assert not compared
    changed = sorted_photos(photos)[5]
    write_image(changed, 1000)
    capfd.readouterr()
    after = extract(photos, verbose=True, **keys)
    assert [start for _, start in computed] == [4]  # one batch of six
    output = capfd.readouterr()
    assert output.err.count("1 image may have changed") == 1
    assert set(compared) == {b"cat/030.png"}
    assert "1 row computed again" in output.out
    assert same_values(after, extract(photos, out="whole", **LENIENT))
    changed.write_bytes(b"no image")
    broken = extract(photos, **keys)
    assert [failure["key"] for failure in broken.failures] == ["cat/030.png"]
    assert np.isnan(broken["conv"][5]).all()
    write_image(changed, 1000)
    assert same_values(extract(photos, **keys), after)


def test_results_of_rows_before_a_refresh_are_left_out(photos: Path) -> None:
    """The fingerprint of the store is that of before."""
    before = extract(photos, **LENIENT)
    assert run_job("probe", store="store", layers="conv", device="cpu") == 0
    assert not compare_stores("store").notes
    write_image(sorted_photos(photos)[5], 1000)
    after = extract(photos, refresh=True, **LENIENT)
    assert after.attrs["fingerprint"] == before.attrs["fingerprint"]
    (note,) = compare_stores("store").notes
    assert "probe.json belongs to another state of the store: left out" in note


@pytest.mark.parametrize("is_older", slow_except([False, True], True))
def test_states_of_another_run_with_equal_settings_hide_no_change(
    photos: Path, is_older: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    age(photos)
    extract(photos)
    shutil.copytree("store", "before")
    changed = sorted_photos(photos)[1]
    write_image(changed, 77)
    age(photos)
    extract(photos, overwrite=True)
    shutil.copy("store/images.h5", "before/images.h5")
    if is_older:  # a file without checksums is read as before
        with h5py.File("before/images.h5", "r+") as file:
            del file["image_checksum"]
        extract(photos, out="before")
        return
    with pytest.raises(StoreMismatchError, match="1 image has changed"):
        extract(photos, out="before")
    assert "1 image may have changed: the bytes are compared" in capfd.readouterr().err


def test_a_touched_image_is_read_once(photos: Path, compared: list[bytes]) -> None:
    age(photos)
    extract(photos, **LENIENT)
    extract(photos, **LENIENT)
    assert not compared
    touched = sorted_photos(photos)[7]
    os.utime(touched, (0, 0))
    extract(photos, **LENIENT)
    assert compared == [b"cat/042.png"]
    extract(photos, **LENIENT)
    assert run_job("verify", store="store") == 0
    assert compared == [b"cat/042.png"]


@pytest.mark.slow
def test_an_image_that_was_just_written_is_read_until_it_rests(
    photos: Path, compared: list[bytes]
) -> None:
    # The first run of a process may take longer than an image counts as just written.
    extract(photos, out="first", **LENIENT)
    for photo in sorted_photos(photos):
        os.utime(photo)
    extract(photos, **LENIENT)
    extract(photos, **LENIENT)
    assert len(compared) == 21
    age(photos)
    extract(photos, **LENIENT)
    assert len(compared) == 42
    extract(photos, **LENIENT)
    assert len(compared) == 42


@pytest.mark.slow
def test_the_time_of_change_may_be_that_of_before(photos: Path) -> None:
    age(photos)
    extract(photos, **LENIENT)
    changed = sorted_photos(photos)[3]
    info = changed.stat()
    data = bytearray(changed.read_bytes())
    data[-30] ^= 1
    changed.write_bytes(data)
    os.utime(changed, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert (changed.stat().st_size, changed.stat().st_mtime_ns) == (info.st_size, info.st_mtime_ns)
    with pytest.raises(StoreMismatchError, match="1 image has changed"):
        extract(photos, **LENIENT)


@pytest.mark.slow
@pytest.mark.parametrize("is_finished", [True, False])
def test_a_store_that_grows_is_refused_and_refreshed(
    photos: Path, is_finished: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with contextlib.nullcontext() if is_finished else stopped_after(2):
        extract(photos, **LENIENT)
    write_image(sorted_photos(photos)[1], 1000)
    write_image(photos / "eel" / "1.png", 1001)
    with pytest.raises(StoreMismatchError, match=r"cat/006\.png"):
        extract(photos, grow=True, **LENIENT)
    capfd.readouterr()
    after = extract(photos, grow=True, refresh=True, **LENIENT)
    assert capfd.readouterr().err.count("may have changed") == 1
    assert same_values(after, extract(photos, out="whole", **LENIENT))


def test_layers_are_not_added_to_rows_of_changed_images(photos: Path) -> None:
    """The store stays as it was, so that the command of its layers can refresh it."""
    extract(photos, layers=["conv"])
    manifest = Path("store/featx.json").read_bytes()
    write_image(sorted_photos(photos)[1], 1000)
    for refresh in (False, True):
        with pytest.raises(StoreMismatchError, match=r"refresh=true.*\('layers=\[conv\]'\)"):
            extract(photos, layers=["deep"], refresh=refresh)
        assert Path("store/featx.json").read_bytes() == manifest
    extract(photos, layers=["conv"], refresh=True)
    after = extract(photos, layers=["deep"])
    assert same_values(after, extract(photos, out="whole", layers=["conv", "deep"]))


@pytest.mark.slow
def test_finished_layers_are_refreshed_while_others_are_unfinished(
    photos: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    extract(photos, layers=["conv"])
    with stopped_after(2):
        extract(photos, layers=["deep"])
    write_image(sorted_photos(photos)[-1], 1000)
    with pytest.raises(StoreMismatchError, match=r"refresh=true.*\('layers=\[conv\]'\)"):
        extract(photos, layers=["deep"])
    with pytest.raises(StoreMismatchError, match=r"is not complete: it was started with .*deep"):
        extract(photos, layers=["conv"])
    extract(photos, layers=["conv"], refresh=True)
    assert "store is not complete: it lacks rows of 'layers=[deep]'" in capfd.readouterr().err
    after = extract(photos, layers=["deep"])
    assert same_values(after, extract(photos, out="whole", layers=["conv", "deep"]))


@pytest.mark.slow
def test_finished_layers_are_refreshed_while_rows_are_added(
    photos: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    both = ["conv", "deep"]
    for layer in both:
        extract(photos, layers=[layer])
    for number in range(9):
        write_image(photos / "eel" / f"{number}.png", 1000 + number)
    with stopped_after(1):
        extract(photos, layers=both, grow=True)
    write_image(sorted_photos(photos)[0], 2000)
    with pytest.raises(
        StoreMismatchError, match=r"each of 'layers=\[conv\]' and 'layers=\[deep\]'"
    ):
        extract(photos, layers=both, grow=True)
    with pytest.raises(StoreMismatchError, match=r"\('layers=\[deep\]'\)"):
        extract(photos, layers=["conv"], refresh=True)
    assert re.search(r"2[5-9] of 30 rows are there already", capfd.readouterr().err)
    extract(photos, layers=["deep"], refresh=True)
    after = extract(photos, layers=both, grow=True)
    assert same_values(after, extract(photos, out="whole", layers=both))


@pytest.mark.slow
def test_layers_from_another_image_are_refused_at_the_end(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image that changes after it was looked at twice and before it is read."""
    before = extract(photos, layers=["conv"])
    looks = []
    with monkeypatch.context() as patch:
        changes = row_updates.image_changes

        def changed_later(*args: Any, **keys: Any) -> Any:
            looks.append(changes(*args, **keys))
            if len(looks) == 2:
                write_image(sorted_photos(photos)[1], 1000)
            return looks[-1]

        patch.setattr(row_updates, "image_changes", changed_later)
        with pytest.raises(StoreMismatchError, match=r"1 image has changed.*cat/006\.png"):
            extract(photos, layers=["conv", "deep"])
    images = before.image_checksums[1], checksum_of(sorted_photos(photos)[1])
    assert open_store("store").image_checksums[1] not in (UNKNOWN_IMAGE, NO_IMAGE, *images)
    with pytest.raises(
        FeatxError, match=r"1 row was computed for deep from other images .* cat/006\.png"
    ):
        run_job("pack", store="store")
    with pytest.raises(StoreMismatchError, match=r"\('layers=\[conv\]'\)"):
        extract(photos, layers=["conv", "deep"])
    after = extract(photos, layers=["conv"], refresh=True)
    assert same_values(after, extract(photos, out="whole", layers=["conv", "deep"]))


@pytest.mark.slow
def test_a_failed_image_that_was_mended_is_told_and_refreshed(
    photos: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = sorted_photos(photos)[4]
    sound = path.read_bytes()
    path.write_bytes(sound[:50])
    extract(photos, **LENIENT)
    capfd.readouterr()
    path.write_bytes(sound)
    assert len(extract(photos, **LENIENT).failures) == 1
    assert "1 failed image has changed since: refresh=true" in capfd.readouterr().err
    after = extract(photos, refresh=True, **LENIENT)
    assert not after.failures
    assert same_values(after, extract(photos, out="whole", **LENIENT))


def test_an_image_that_is_gone_keeps_its_row(
    photos: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = [str(path.relative_to(photos)) for path in sorted_photos(photos)]
    (photos / "table.csv").write_text("\n".join(["path", *names]) + "\n")
    table = {"name": "table", "root": str(photos / "table.csv")}
    before = extract(table, **LENIENT)["conv"][:]
    (photos / names[4]).unlink()
    capfd.readouterr()
    after = extract(table, refresh=True, **LENIENT)
    assert f"1 image is missing or empty now: {names[4]}" in capfd.readouterr().err
    assert after["conv"][:].tobytes() == before.tobytes()
    assert run_job("verify", store="store") == 0
    output = capfd.readouterr().out
    assert "unchanged for 20 rows" in output
    assert f"missing or empty now for 1 row: {names[4]}" in output


@pytest.mark.slow
def test_images_elsewhere_are_not_compared_and_verify_says_so(
    photos: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    extract(photos, **LENIENT)
    photos.rename(photos.with_name("elsewhere"))
    assert run_job("verify", store="store") == 0
    assert "not compared: data.root=" in " ".join(capfd.readouterr().out.split())
    assert run_job("verify", store="store/features.h5") == 0
    assert "not compared: a file alone" in capfd.readouterr().out
    moved = {"name": "folder", "root": str(photos.with_name("elsewhere"))}
    assert job_result("verify", store="store", data=moved)["images"]["compared"] == 21


def test_a_link_that_leads_to_another_image_is_noticed(photos: Path) -> None:
    names = sorted_photos(photos)
    (photos / "cat" / "link.png").symlink_to(names[0])
    age(photos)
    extract(photos, **LENIENT)
    (photos / "cat" / "link.png").unlink()
    (photos / "cat" / "link.png").symlink_to(names[1])
    with pytest.raises(StoreMismatchError, match=r"1 image has changed.*cat/link\.png"):
        extract(photos, **LENIENT)


@pytest.mark.slow
def test_all_boxes_of_a_changed_image_are_refreshed(photos: Path, compared: list[bytes]) -> None:
    names = [str(path.relative_to(photos)) for path in sorted_photos(photos)[:4]]
    lines = [f"{name},{x},0,20,20" for name in names for x in (0, 3, 6)]
    Path("boxes.csv").write_text("\n".join(["path,x,y,width,height", *lines]) + "\n")
    data = {"name": "folder", "root": str(photos), "boxes": "boxes.csv"}
    age(photos)
    extract(data, **LENIENT)
    write_image(photos / names[1], 1000)
    with pytest.raises(StoreMismatchError, match="1 image has changed"):
        extract(data, **LENIENT)
    assert len(compared) == 1  # an image is read once for all its boxes
    after = extract(data, refresh=True, **LENIENT)
    assert same_values(after, extract(data, out="whole", **LENIENT))
    expected = [checksum_of(photos / str(key).partition("#")[0]) for key in after.keys]
    assert after.image_checksums.tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize("make", [made_sources.tar, made_sources.hdf5, made_sources.parquet])
def test_a_container_that_was_written_again(
    photos: Path, make: Callable[[made_sources.Images], dict[str, Any]], compared: list[bytes]
) -> None:
    images = {path.name: path.read_bytes() for path in sorted_photos(photos)}
    data = make(images)
    root = Path(data["root"])
    for path in root.iterdir() if root.is_dir() else [root]:
        os.utime(path, (1e9, 1e9))
    extract(data, **LENIENT)
    extract(data, **LENIENT)
    assert not compared
    make(images)
    extract(data, **LENIENT)  # other times, the same images
    assert len(compared) == 21
    write_image(photos / "other.png", 1000)
    images[list(images)[6]] = (photos / "other.png").read_bytes()
    make(images)
    with pytest.raises(StoreMismatchError, match="1 image has changed"):
        extract(data, **LENIENT)
    after = extract(data, refresh=True, **LENIENT)
    assert same_values(after, extract(data, out="whole", **LENIENT))


class Generated:
    """A map-style data set that says nothing of where its items come from."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Any:
        return self.items[row]


@pytest.mark.slow
def test_a_data_set_of_a_class_is_compared_when_it_is_refreshed(
    photos: Path, compared: list[bytes]
) -> None:
    data = Generated([np.asarray(Image.open(path)) for path in sorted_photos(photos)])
    store = extract(data, **LENIENT)
    assert store.image_checksums.tolist() == [image_checksum(encode_array(a)) for a in data.items]
    data.items[3] = data.items[4]
    extract(data, **LENIENT)  # it says nothing of its images, and is not read for nothing
    after = extract(data, refresh=True, **LENIENT)
    assert len(compared) == len(data), "and not once more after the refresh"
    assert same_values(after, extract(data, out="whole", **LENIENT))


def test_layers_that_are_added_with_a_refresh_compare_every_image_once(
    photos: Path, compared: list[bytes]
) -> None:
    data = Generated([np.asarray(Image.open(path)) for path in sorted_photos(photos)])
    extract(data, layers=["conv"])
    extract(data, layers=["deep"], refresh=True)
    assert len(compared) == len(data)


@pytest.mark.slow
@pytest.mark.parametrize("dies_at", range(1, 16))
def test_a_refresh_cut_off_anywhere_resumes_to_the_same_store(photos: Path, dies_at: int) -> None:
    """Every change of the disk in turn is the last one of a process."""
    before = extract(photos, **LENIENT)
    for row in (2, 7):
        write_image(sorted_photos(photos)[row], 1000 + row)
    with died_at_disk_change(dies_at):
        extract(photos, refresh=True, **LENIENT)
    half = open_store("store")
    others = np.setdiff1d(np.arange(21), [2, 7])
    assert half["deep"][others].tobytes() == before["deep"][others].tobytes()
    age(photos)
    after = extract(photos, refresh=True, **LENIENT)
    assert same_values(after, extract(photos, out="whole", **LENIENT))
    assert run_job("verify", store="store") == 0


@pytest.mark.slow
def test_a_repair_continues_if_another_image_has_changed(
    photos: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    extract(photos, pack=False, **LENIENT)
    write_image(sorted_photos(photos)[1], 1000)
    part = Path("store/parts/part-000003.h5")
    part.write_bytes(part.read_bytes()[:1000])
    assert run_job("verify", store="store", verify={"repair": True}) == 2  # the image, not the part
    captured = capfd.readouterr()
    assert "warning: 1 image has changed" in captured.err
    assert "changed since for 1 row: cat/006.png" in captured.out
    after = extract(photos, pack=False, refresh=True, **LENIENT)
    assert same_values(after, extract(photos, out="whole", **LENIENT))


@pytest.mark.slow
def test_a_damaged_checksum_costs_no_row(photos: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = extract(photos, **LENIENT)
    packed = Path("store/features.h5")
    data = bytearray(packed.read_bytes())
    data[data.index(before.image_checksums[8:12].tobytes())] ^= 1
    packed.write_bytes(data)
    assert run_job("verify", store="store") == 2
    assert "/image_checksum differs from its checksum" in capfd.readouterr().out
    assert run_job("verify", store="store", verify={"repair": True}) == 0
    after = open_store("store")
    assert after["conv"][:].tobytes() == before["conv"][:].tobytes()
    known = after.image_checksums != UNKNOWN_IMAGE
    assert (after.image_checksums[known] == before.image_checksums[known]).all()
    capfd.readouterr()
    extract(photos, **LENIENT)
    assert "rows do not say which image" in capfd.readouterr().err


def test_the_batches_of_many_changed_images_are_found_at_once() -> None:
    """Not by a look at all of these images for each part."""
    parts = [Part(index, 256 * index, 256 * index + 256) for index in range(1000)]
    session: Any = SimpleNamespace(parts_with=lambda rows: parts, etag=lambda part: None)
    context: Any = SimpleNamespace(batch_rows=32)
    began = time.process_time()
    sink = row_updates._RowReplacement(context, session, range(0, 256_000, 2))
    assert time.process_time() - began < 3
    assert sink.missing() == [Part(row // 256, row, row + 32) for row in range(0, 256_000, 32)]
