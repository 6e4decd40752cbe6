"""job=plan on a store that exists: what the run would compute, or why it would be refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tiny_model import KEYS, extract, job_result, run_job, write_image, write_images

from featx.errors import StoreMismatchError

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def plan(**keys: Any) -> Any:
    return job_result("plan", **{**KEYS, "data": "photos", **keys})


def test_rows_that_are_there_are_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    photos = write_images(Path("photos"), 10)
    of_row = 8 * 4 * 4 * 2
    new = plan()
    assert (new["rows"], new["rows_left"], new["disk_needed"]) == (10, 10, 10 * of_row)
    extract(photos, pack=False)
    Path("store/parts/part-000001.h5").unlink()
    run_job("plan", **KEYS, data="photos")
    assert "2 of 10 images, the others are in the store: about" in capsys.readouterr().out
    left = plan()
    assert (left["rows"], left["rows_left"], left["disk_needed"]) == (10, 2, 2 * of_row)
    packing = [each["disk_needed_while_packing"] for each in (plan(pack=False), left, new)]
    assert packing == sorted(set(packing))  # the rows that are there are copied too
    assert plan(overwrite=True)["rows_left"] == 10
    extract(photos)
    finished = plan()
    assert (finished["rows_left"], finished["disk_needed"], finished["seconds"]) == (0, 0, 0)
    write_image(photos / "cat" / "001.png", 99)
    grown = plan(grow=True)
    assert (grown["rows"], grown["rows_left"], grown["disk_needed"]) == (11, 1, of_row)


def test_a_run_that_would_be_refused_is_refused() -> None:
    extract(write_images(Path("photos"), 5))
    assert plan(layers=["pool"], dtype="float32")["rows_left"] == 5
    for keys in ({"dtype": "float32"}, {"codec": "zstd"}, {"layers": ["pool"], "seed": 1}):
        with pytest.raises(StoreMismatchError, match="was started with other settings"):
            plan(**keys)


def test_the_values_of_a_batch_are_counted_as_memory() -> None:
    write_images(Path("photos"), 10)
    few, many = (plan(layers=[name], batch_size=1024, part_rows=1024) for name in ("pool", "conv"))
    values = [
        math.prod(found["layers"][name]["shape"]) for found, name in ((few, "pool"), (many, "conv"))
    ]
    # What the listing takes is measured, and differs by some pages.
    assert many["memory"] - few["memory"] > 5 * 4 * 1024 * (values[1] - values[0]) > 10**6


@pytest.mark.parametrize(
    ("free", "helps"), [(1, False), (10 * 8 * 4 * 4 * 2 + 1, True)], ids=["parts", "packed file"]
)
def test_pack_false_is_advised_where_it_makes_room(
    free: int, helps: bool, set_free_disk: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(Path("photos"), 10)
    set_free_disk(free)
    run_job("plan", **{**KEYS, "data": "photos", "pack": True})
    shown = capsys.readouterr().out
    assert "NOT ENOUGH disk space: choose another out=DIR, or a reduction" in shown
    assert ("pack=false" in shown) == helps
