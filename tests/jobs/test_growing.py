"""A store that gets more layers or more rows, and what keeps its place meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import Stored
from interruptions import stopped_after
from made_store import dataset_digests
from tiny_model import extract_six_parts as extract
from tiny_model import run_job, write_image

import featx
from featx.errors import StoreMismatchError

PACKED = Path("store/features.h5")
PART = Path("store/parts/part-000005.h5")


pytestmark = pytest.mark.usefixtures("in_tmp_path")


def rows_of(path: Path) -> dict[str, bytes]:
    """key -> the bytes of its row in every layer, with label and status, by plain h5py."""
    with h5py.File(path) as file:
        columns = [file[f"features/{name}"][:] for name in sorted(file["features"])]
        names = file["classes"][:].tolist()
        labels = [names[label] if label >= 0 else b"" for label in file["label"][:].tolist()]
        return {
            key.decode(): b"".join(
                [label, bytes([status]), *(column[i].tobytes() for column in columns)]
            )
            for i, (key, label, status) in enumerate(
                zip(file["key"][:].tolist(), labels, file["status"][:].tolist(), strict=True)
            )
        }


def values_of(digests: Mapping[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in digests.items() if not name.startswith("failures")}


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_a_layer_more_is_computed_alone_and_equals_a_run_with_both(
    photos: Path, computed: list[tuple[frozenset[str], int]], packed: bool
) -> None:
    (photos / "cat" / "012.png").write_bytes(b"no image")
    extract(photos, layers=["pool"], pack=packed)
    old = featx.open("store")["pool"][:].tobytes()
    computed.clear()
    both = extract(photos, layers=["conv", "pool"], pack=packed)
    assert {layers for layers, _ in computed} == {frozenset({"conv"})}
    assert len(computed) == 6
    assert both["pool"][:].tobytes() == old
    assert both.complete
    assert both.layers == ("conv", "pool")
    extract(photos, layers=["conv", "pool"], out="at-once", pack=packed)
    at_once = featx.open("at-once")
    for layer in both.layers:
        assert both[layer][:].tobytes() == at_once[layer][:].tobytes()
    assert both.failures == at_once.failures
    if packed:
        assert dataset_digests("store") == dataset_digests("at-once")


def test_what_is_there_already_is_not_done_again(
    photos: Path, computed: list[tuple[frozenset[str], int]]
) -> None:
    extract(photos, layers="all")
    files = PACKED, Path("store/featx.json")
    before = [path.read_bytes() for path in files]
    computed.clear()
    for layers in ("all", ["pool", "conv"], {"conv": "none"}):
        assert extract(photos, layers=layers).complete
    assert computed == []
    assert [path.read_bytes() for path in files] == before


OTHER_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"layers": ["pool"], "precision": "bf16"}, "precision: the store has 'fp32', now 'bf16'"),
    ({"layers": ["pool"], "decode": "reference"}, "decode: the store has 'fast', now 'ref"),
    ({"layers": ["pool"], "batch_size": 2}, "batch_size: the store has 4, now 2"),
    # A layer that is added, and a finished one that is asked for otherwise.
    ({"layers": ["conv", "pool"], "reduce": "avg"}, "layer conv, reduce: .* 'none', now 'avg'"),
    ({"layers": {"conv": "avg", "pool": "none"}}, "layer conv, reduce: .* 'none', now 'avg'"),
]
"""Of the layers that a store has, test_resume.py changes every setting."""


def test_other_settings_do_not_join_a_store(stored: Stored) -> None:
    photos = stored(pack=False)
    before = dataset_digests(PART), Path("store/featx.json").read_bytes()
    for keys, message in OTHER_SETTINGS:
        with pytest.raises(StoreMismatchError, match=message) as refused:
            extract(photos, **keys)
        assert refused.value.exit_code == 2
        assert "overwrite=true" in str(refused.value)
        assert "out=DIR" in str(refused.value)
        assert ", as: " not in str(refused.value)  # the layer's settings as one text
        assert "fingerprint_entry" not in str(refused.value)
        assert (dataset_digests(PART), Path("store/featx.json").read_bytes()) == before


@pytest.mark.slow
def test_a_part_of_each_of_two_runs_is_lost(photos: Path) -> None:
    """No command names both runs at once; the message has to say one that resumes."""
    extract(photos, pack=False)
    extract(photos, layers=["conv", "pool"], pack=False)
    whole = extract(photos, out="whole", layers=["conv", "pool"])
    Path("store/parts/part-000001.h5").unlink()
    Path("store/parts/part-000009.h5").unlink()
    with pytest.raises(
        StoreMismatchError,
        match=r"started with layers=\[conv\], and this command has layers=\[conv,pool\]",
    ):
        extract(photos, layers=["conv", "pool"])
    extract(photos)
    extract(photos, layers=["conv", "pool"])
    assert dataset_digests("store") == dataset_digests(whole.root)


@pytest.mark.slow
def test_new_images_are_refused_with_their_number_until_grow_is_given(photos: Path) -> None:
    extract(photos)
    old = rows_of(PACKED)
    order = featx.open("store").keys.tolist()
    for i, name in enumerate(["ant/0.png", "cat/001.png", "loose.png"]):
        write_image(photos / name, 50 + i)
    before = PACKED.read_bytes()
    with pytest.raises(StoreMismatchError, match=r"3 new images that are not in .*store\. grow"):
        extract(photos)
    assert PACKED.read_bytes() == before
    store = extract(photos, grow=True)
    assert store.keys.tolist() == [*order, "ant/0.png", "cat/001.png", "loose.png"]
    assert store.classes == ("cat", "dog", "ant")
    assert store.labels[21:].tolist() == [2, 0, -1]
    grown = rows_of(PACKED)
    assert {key: grown[key] for key in old} == old
    assert store.complete
    assert store.row("ant/0.png") == 21
    # The command that grew it finds nothing to do, and so does the one without grow.
    before = PACKED.read_bytes()
    extract(photos, grow=True)
    extract(photos)
    assert PACKED.read_bytes() == before


@pytest.mark.slow
def test_new_rows_are_those_of_a_store_made_at_once(photos: Path) -> None:
    """To the last bit where the batches are the same: four rows a batch, new ones behind."""
    extract({"name": "folder", "root": str(photos), "limit": 8}, layers=["conv", "pool"])
    extract(photos, layers=["conv", "pool"], grow=True)
    extract(photos, layers=["conv", "pool"], out="at-once")
    assert rows_of(PACKED) == rows_of(Path("at-once/features.h5"))
    assert values_of(dataset_digests("store")) == values_of(dataset_digests("at-once"))


def test_images_that_are_gone_are_named_and_nothing_is_lost(stored: Stored) -> None:
    photos = stored()
    before = PACKED.read_bytes()
    (photos / "cat" / "000.png").unlink()
    write_image(photos / "cat" / "001.png", 50)
    for grow in (False, True):
        with pytest.raises(StoreMismatchError, match=r"1 row whose image.*such as cat/000\.png"):
            extract(photos, grow=grow)
    assert PACKED.read_bytes() == before


def test_rows_are_added_to_all_layers_or_to_none(
    photos: Path, computed: list[tuple[frozenset[str], int]]
) -> None:
    limited = {"name": "folder", "root": str(photos), "limit": 8}
    extract(limited)
    extract(limited, layers=["pool"])
    before = PACKED.read_bytes()
    for layers in (["conv"], ["conv", "pool", "deep"]):
        with pytest.raises(StoreMismatchError, match=r"'layers=\[conv,pool\]' grow=true first"):
            extract(photos, layers=layers, grow=True)
    assert PACKED.read_bytes() == before
    computed.clear()
    extract(photos, layers=["conv", "pool"], grow=True)
    assert [start for _, start in computed] == [8, 12, 16, 20]


@pytest.mark.slow
def test_layers_are_completed_and_refreshed_before_rows_are_added(
    photos: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What each message advises works, although there are new images all the time."""
    both = ["conv", "pool"]
    extract(photos, layers=["conv"])
    with stopped_after(2):
        extract(photos, layers=["pool"])
    write_image(photos / "ant" / "0.png", 50)
    with pytest.raises(StoreMismatchError, match=r"started with layers=\[pool\]"):
        extract(photos, layers=both, grow=True)
    extract(photos, layers=["pool"])
    left_out = "1 new image left out: 'layers=[conv,pool]' grow=true adds them"
    assert left_out in capfd.readouterr().err
    write_image(photos / "cat" / "000.png", 1000)
    advice = r"once with each of 'layers=\[conv\]' and 'layers=\[pool\]'"
    for grow, more in ((False, ""), (True, ", without grow=true")):
        with pytest.raises(StoreMismatchError, match=advice + more):
            extract(photos, layers=both, grow=grow, refresh=True)
    with pytest.raises(StoreMismatchError, match=r"\('layers=\[pool\]'\)"):
        extract(photos, layers=["conv"], refresh=True)
    extract(photos, layers=["pool"], refresh=True)
    extract(photos, layers=both, grow=True)
    extract(photos, layers=both, out="whole")
    assert rows_of(PACKED) == rows_of(Path("whole/features.h5"))


@pytest.mark.slow
def test_growing_resumes_after_a_stop(photos: Path) -> None:
    extract({"name": "folder", "root": str(photos), "limit": 6})
    with stopped_after(2):
        extract(photos, grow=True)
    rows = featx.open("store").num_rows_present
    assert rows in (14, 18)  # the next part may have become whole while this one was committed
    assert np.flatnonzero(featx.open("store").status == 255).tolist() == list(range(rows, 21))
    # Another new image while it is not finished: it waits for its turn.
    write_image(photos / "ant" / "0.png", 50)
    with pytest.raises(StoreMismatchError, match="1 new image that is"):
        extract(photos)
    (photos / "ant" / "0.png").unlink()
    store = extract(photos)
    assert store.complete
    extract({"name": "folder", "root": str(photos), "limit": 6}, out="other")
    extract(photos, out="other", grow=True)
    assert dataset_digests("store") == dataset_digests("other")


@pytest.mark.slow
def test_new_images_while_the_growth_before_is_not_finished(photos: Path) -> None:
    """grow=true twice: the rows of both growths are at their places in the end."""
    extract({"name": "folder", "root": str(photos), "limit": 6}, pack=False)
    extract(photos, grow=True, pack=False)
    order = featx.open("store").keys.tolist()
    Path("store/parts/part-000004.h5").unlink()
    write_image(photos / "ant" / "0.png", 50)
    store = extract(photos, grow=True)
    assert store.complete
    assert store.keys.tolist() == [*order, "ant/0.png"]
    assert run_job("verify", out="store", verify={"reextract_rows": 30}) == 0


@pytest.mark.slow
def test_growing_by_rows_that_fail(photos: Path) -> None:
    (photos / "cat" / "000.png").write_bytes(b"no image")
    extract(photos)
    (photos / "ant").mkdir()
    (photos / "ant" / "0.png").write_bytes(b"")
    store = extract(photos, grow=True)
    assert [(f["row"], f["status"]) for f in store.failures] == [(0, "unsupported"), (21, "empty")]
    lines = Path("store/failures.csv").read_text().splitlines()
    assert [line.split(",")[:3] for line in lines[1:]] == [
        ["0", "cat/000.png", "unsupported"],
        ["21", "ant/0.png", "empty"],
    ]


def test_layers_of_a_store_stay_if_every_row_failed_in_a_later_one(photos: Path) -> None:
    before = extract(photos, layers=["conv"])["conv"][:].tobytes()
    for path in photos.rglob("*.png"):
        path.write_bytes(b"")
    assert not extract(photos, layers=["pool"], max_failures=1.0).ok.any()
    after = extract(photos, layers=["conv"], max_failures=1.0)
    assert after.layers == ("conv", "pool")
    assert after["conv"][:].tobytes() == before


def test_a_store_that_grew_by_rows_that_all_failed_is_started_again(photos: Path) -> None:
    sound = {path: path.read_bytes() for path in sorted(photos.rglob("*.png"))}
    new = photos / "dog" / "new.png"
    for path in sound:
        path.write_bytes(b"")
    extract(photos, max_failures=1.0)
    new.write_bytes(b"")
    assert not extract(photos, max_failures=1.0, grow=True).ok.any()
    for path, data in sound.items():
        path.write_bytes(data)
    assert extract(photos, max_failures=1.0).ok.sum() == len(sound)
