"""verify.reextract_rows: which differences of rows extracted again it notices, and which not."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import slow_except
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from made_store import stored_sums
from tiny_model import MODEL, extract_in_steps, job_output, run_job, write_image
from tiny_model import extract as extract_and_pack

from featx.analysis.reproducibility import MIN_AGREEMENT, agreement
from featx.errors import StoreMismatchError
from featx.jobs import verify

extract = partial(extract_and_pack, pack=False)
"""The rows are the same, and packing takes longer than all the rest."""


pytestmark = pytest.mark.usefixtures("in_tmp_path")


def reextract(count: int = 21, **keys: Any) -> tuple[int, dict[str, Any]]:
    """Exit code and findings of verify.reextract_rows over `count` rows, all of them as a rule."""
    options = {"store": "store", "verify": {"reextract_rows": count}, **keys}
    code, output = job_output("verify", **options)
    found: dict[str, Any] = output["reextracted"]
    assert found["identical"] + found["close"] + len(found["different"]) == found["rows"]
    return code, found


def assert_untouched(rows: int = 21, **keys: Any) -> None:
    assert reextract(**keys) == (
        0,
        {"rows": rows, "identical": rows, "close": 0, "different": []},
    )


AUTO = {"batch_size": "auto", "part_rows": "auto", "precision": "auto", "compile": "auto"}
UNEVEN = {"batch_size": 3, "part_rows": 8}
"""Neither the part nor the data set ends with a whole batch."""

WHOLE = {"layers": ["*"], "reduce": "flatten", "pack": True}

SETTINGS: list[dict[str, Any]] = [
    *(AUTO, UNEVEN, WHOLE, {"batch_size": 16, "part_rows": 32}, {"decode": "reference"}),
    *({"dtype": "bfloat16"}, {"dtype": "float32", "codec": "zstd"}, {"precision": "bf16"}),
    {"layers": {"conv": "avg", "deep": {"name": "grid", "size": 2}, "embedding": "none"}},
    {"layers": {"conv": {"name": "sample", "k": 3}, "embedding": "none"}},
]


@pytest.mark.parametrize("keys", slow_except(SETTINGS, UNEVEN), ids=str)
def test_an_untouched_store_is_identical_in_every_row(photos: Path, keys: dict[str, Any]) -> None:
    extract(photos, **keys)
    assert_untouched()


@pytest.mark.slow
def test_no_more_rows_are_drawn_than_asked_for_and_the_seed_chooses_them(photos: Path) -> None:
    extract(photos)
    assert_untouched(5, count=5)
    for path in (photos / "cat").iterdir():
        write_image(path, 1000 + int(path.stem))
    found = [reextract(6, seed=seed)[1]["different"] for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


def test_failed_rows_are_identical_while_they_fail_in_the_same_way(photos: Path) -> None:
    (photos / "cat" / "000.png").write_bytes(b"no image")
    (photos / "dog" / "003.png").write_bytes(b"")
    extract(photos)
    assert_untouched()
    (photos / "dog" / "003.png").write_bytes(b"no image")
    (photos / "dog" / "009.png").write_bytes(b"no image")
    write_image(photos / "cat" / "000.png", 0)
    code, found = reextract()
    assert code == verify.EXIT_DAMAGED
    assert found["different"] == [
        "row 0 (cat/000.png): was unsupported, is ok now",
        "row 11 (dog/003.png): was empty, is unsupported now",
        "row 12 (dog/009.png): was ok, is unsupported now",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_replaced_image_and_two_swapped_ones_are_found(photos: Path, dtype: str) -> None:
    store = extract(photos, dtype=dtype)
    rows = [3, 8, 19]
    replaced, first, second = (photos / str(store.keys[row]) for row in rows)
    write_image(replaced, 4711)
    first.rename("x.png")
    second.rename(first)
    Path("x.png").rename(second)
    code, found = reextract()
    assert code == verify.EXIT_DAMAGED
    # Their batches are computed again as well, and no neighbour has changed.
    assert found["identical"] == 18
    assert [int(line.split()[1]) for line in found["different"]] == rows
    assert f"({store.keys[3]}): has an agreement of" in found["different"][0]


def write_rows(rows: np.ndarray) -> None:
    """Replace the rows of a packed store together with their checksums."""
    with h5py.File("store/features.h5", "r+") as file:
        data = file["features/conv"]
        data[:] = rows
        file["checksums/features/conv"][:] = stored_sums(data)


def test_rows_in_each_others_places_and_rows_twice_as_long_are_found(photos: Path) -> None:
    """What no checksum finds: they were changed before the file was written."""
    rows = extract_and_pack(photos, batch_size=8, part_rows=8, dtype="float32")["conv"][:]
    swapped = rows.copy()
    swapped[[2, 5]] = rows[[5, 2]]
    write_rows(swapped)
    assert run_job("verify", out="store") == 0
    code, found = reextract()
    assert code == verify.EXIT_DAMAGED
    assert [int(line.split()[1]) for line in found["different"]] == [2, 5]
    write_rows(2 * rows)  # the cosine is 1
    assert len(reextract()[1]["different"]) == 21


@pytest.mark.slow
def test_a_store_of_several_runs(photos: Path) -> None:
    extract(photos)
    extract(photos, layers=["pool"], dtype="float32")
    extract_and_pack(photos, layers=["deep"], part_rows=8, batch_size=4)
    assert_untouched()
    key = str(extract(photos).keys[7])
    write_image(photos / key, 4711)
    assert [line.split()[1] for line in reextract()[1]["different"]] == ["7"]


@pytest.mark.slow
def test_a_store_that_grew_by_a_higher_limit_and_by_new_images(photos: Path) -> None:
    """Its first run saw ten rows only, and the order of its rows is not that of their names."""
    limited = {"name": "folder", "root": str(photos), "limit": 10}
    extract(limited)
    extract(limited, layers=["pool"])
    assert_untouched(10)
    extract(photos, layers=["conv", "pool"], grow=True)
    for i in range(3):
        write_image(photos / "ant" / f"{i}.png", 50 + i)
    store = extract(photos, layers=["conv", "pool"], grow=True)
    assert str(store.keys[21]) == "ant/0.png"
    assert_untouched(24, count=100)


def test_images_that_are_new_do_not_matter_and_one_that_is_gone_is_named(photos: Path) -> None:
    key = str(extract(photos).keys[20])
    write_image(photos / "ant" / "0.png", 50)
    write_image(photos / "dog" / "004.png", 51)
    assert_untouched()
    (photos / key).unlink()
    with pytest.raises(StoreMismatchError, match=f"1 row whose image.*{key}"):
        reextract()


@pytest.mark.slow
def test_images_and_store_that_moved(photos: Path, tmp_path: Path) -> None:
    extract(photos)
    Path("store").rename("elsewhere")
    assert_untouched(store="elsewhere")
    photos.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="photos does not exist"):
        reextract(store="elsewhere")
    moved = {"name": "folder", "root": str(tmp_path / "moved")}
    assert_untouched(store="elsewhere", data=moved)
    # Images of other names are another data set.
    shutil.copytree(tmp_path / "moved" / "cat", tmp_path / "other")
    with pytest.raises(StoreMismatchError, match="21 rows whose images are no longer"):
        reextract(store="elsewhere", data={"name": "folder", "root": str(tmp_path / "other")})


def test_an_unfinished_store_is_compared_where_it_is_there(photos: Path) -> None:
    extract(photos, part_rows=4)
    for index in (1, 3, 4):
        Path(f"store/parts/part-{index:06d}.h5").unlink()
    for row in (0, 4):  # the second one is not there
        write_image(photos / "cat" / f"{6 * row:03d}.png", 4711)
    code, found = reextract()
    assert code == verify.EXIT_DAMAGED
    assert (found["rows"], found["identical"]) == (9, 8)


@pytest.mark.slow
def test_a_part_lost_of_the_first_of_two_runs(photos: Path) -> None:
    """Rows that one run lacks are not taken for identical."""
    extract(photos)
    extract(photos, layers=["conv", "pool"])
    Path("store/parts/part-000001.h5").unlink()
    code, found = reextract()
    assert code == verify.EXIT_INCOMPLETE
    assert (found["rows"], found["identical"]) == (13, 13)
    write_image(photos / "cat" / "000.png", 4711)
    assert [line.split()[1] for line in reextract()[1]["different"]] == ["0"]


@pytest.mark.slow
def test_a_part_lost_of_a_store_that_grew_in_layers_and_rows(photos: Path) -> None:
    """The last run made a layer that is finished and one that is not."""
    extract_in_steps(photos, pack=False)
    Path("store/parts/part-000001.h5").unlink()
    code, found = reextract()
    assert code == verify.EXIT_INCOMPLETE
    assert (found["rows"], found["identical"]) == (17, 17)


@pytest.mark.slow
def test_a_row_not_finite_in_one_layer_is_compared_in_the_other(photos: Path) -> None:
    """The status of a row is that of all its layers; a run may know better of its own."""
    clean = extract(photos, layers=["deep"], out="clean", dtype="float32")["deep"][:]
    means = np.sort(clean.mean((1, 2, 3)))
    model = {**MODEL, "args": {"poison": float(means[10:12].mean())}}
    keys = {"model": model, "nonfinite": "record", "dtype": "float32"}
    assert (~extract(photos, layers=["pool"], **keys).ok).sum() == 10
    store = extract(photos, layers=["pool", "conv"], **keys)
    assert np.isfinite(store["conv"][:]).all()
    assert_untouched()
    key = str(store.keys[np.flatnonzero(~store.ok)[3]])
    write_image(photos / key, 4711)
    assert len(reextract()[1]["different"]) == 1


FLOATS = arrays(np.float64, st.integers(1, 6), elements=st.floats(-1e3, 1e3))


@given(FLOATS, st.floats(0.9, 1.1))
def test_agreement_is_one_for_the_same_and_less_for_longer_ones(
    a: np.ndarray, factor: float
) -> None:
    if not np.linalg.norm(a) > 1e-3:
        return
    assert agreement(a, a) == 1
    assert agreement(a, -a) == pytest.approx(-1)
    assert agreement(a, a * factor) == pytest.approx(1 - (factor - 1) ** 2 / (2 * factor))
    assert (agreement(a, a * factor) >= MIN_AGREEMENT) == (
        (factor - 1) ** 2 / (2 * factor) <= 1 - MIN_AGREEMENT
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
def test_agreement_with_what_is_no_direction_is_none(bad: float) -> None:
    good = np.array([1.0, 2.0])
    assert agreement(np.array([bad, bad]), good) == -1
    assert agreement(good, np.array([bad, 0.0])) == -1
