"""What is typed in the first hour and answered with what to type instead, or with a note."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from made_store import make_run
from tiny_model import extract, job_config, write_image, write_images

import featx
from featx.errors import (
    ConfigError,
    DataError,
    LayerError,
    ModelError,
    StoreMismatchError,
    WeightsError,
)

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def limited(number: int) -> dict[str, object]:
    return {"name": "folder", "root": "photos", "limit": number}


@pytest.mark.parametrize("option", ["limit", "sample"])
def test_a_smaller_limit_is_named(option: str) -> None:
    write_images(Path("photos"), 9)
    extract({"name": "folder", "root": "photos", option: 6})
    with pytest.raises(StoreMismatchError, match=rf"than the 6 .* Give data\.{option}=6, or"):
        extract({"name": "folder", "root": "photos", option: 4})
    extract({"name": "folder", "root": "photos", option: 6})


def test_a_smaller_limit_counts_images_where_rows_are_views() -> None:
    write_images(Path("photos"), 9)
    data = {"name": "folder", "root": "photos", "views": ["original", "hflip"]}
    extract({**data, "limit": 6})
    with pytest.raises(StoreMismatchError, match=r"than the 6 .* Give data\.limit=6, or"):
        extract({**data, "limit": 4})


@pytest.mark.slow
def test_a_store_of_other_images_is_said_to_be_one() -> None:
    write_images(Path("photos"), 6)
    extract("photos")
    for image in Path("photos").rglob("*.png"):
        image.rename(image.with_stem("new_" + image.stem))
    with pytest.raises(StoreMismatchError, match=r"None of its rows .* other images than .*/new_"):
        extract("photos")


def test_a_layer_in_the_name_of_out_has_no_brackets() -> None:
    assert job_config("extract", layers=["conv", "pool.1"], out="runs/z_${layers}").out == (
        "runs/z_conv+pool.1"
    )
    assert job_config("extract", layers=["blocks.*"], out="a_${layers}").out == "a_blocks._"
    assert job_config("extract", layers="stages", out="a_${layers}_[1]").out == "a_stages_[1]"


def test_a_reduction_that_leaves_a_vector_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    write_images(Path("photos"), 6)
    extract("photos", layers=["conv", "head"], reduce="avg")
    shown = " ".join(capsys.readouterr().err.split())
    assert "note head has no positions: reduce=avg leaves a vector as it is" in shown
    extract("photos", layers=["conv"], reduce="avg", out="maps")
    assert "no positions" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("conv: max", r"in braces: 'layers=\{conv: max\}'"),
        ("conv:mean", r"in braces: 'layers=\{conv: avg\}'"),
        ("conv:grad", r"Nearest: grad_input, grad_output\."),
    ],
)
def test_a_reduction_after_a_colon_is_answered_with_braces(typed: str, answer: str) -> None:
    write_images(Path("photos"), 6)
    with pytest.raises(LayerError, match=answer):
        extract("photos", layers=[typed])


def test_one_new_image_is_one() -> None:
    write_images(Path("photos"), 6)
    extract(limited(5))
    with pytest.raises(StoreMismatchError, match=r"has 1 new image that is not in .*store\. grow="):
        extract("photos")


def test_a_probe_is_offered_where_ok_rows_have_two_classes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_images(Path("photos"), 6)
    extract(limited(2), layers=["conv"], out="cats")  # two cats; the dogs are left out
    assert "job=probe" not in capsys.readouterr().out
    for image in Path("photos/dog").iterdir():
        image.write_text("no image")
    extract("photos", layers=["conv"], out="failed", max_failures=3)
    assert "job=probe" not in capsys.readouterr().out
    write_image(Path("photos/dog/new.png"), 9)
    extract("photos", layers=["conv"], out="both", max_failures=3)
    assert "job=probe" in capsys.readouterr().out


@pytest.mark.slow
def test_more_workers_than_parts_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    write_images(Path("photos"), 4)
    extract("photos", executor={"name": "local", "workers": 3})
    shown = " ".join(capsys.readouterr().err.split())
    assert "4 rows in 1 part: 2 workers have no work" in shown
    if (os.cpu_count() or 1) < 3:
        assert "3 workers of 1 thread share" in shown
        assert "fewer threads" not in shown


def test_a_key_of_another_folder_is_answered_with_the_same_file() -> None:
    store = featx.open(make_run(2000, 512).write(Path("store")))
    key = str(store.keys[1500])
    name = key.rpartition("/")[2]
    with pytest.raises(KeyError, match=f"Nearest: {key}"):
        store.row(f"/home/me/photos/{name}")


def test_a_second_export_names_the_layers() -> None:
    make_run(20, 8).write(Path("store"))
    options = {"store": "store", "export": {"format": "npy"}}
    featx.export_store(**options, layers=["flat", "map"])
    with pytest.raises(StoreMismatchError, match=r"layers: flat, map; now flat\n"):
        featx.export_store(**options, layers=["flat"])


def test_all_wrong_boxes_are_one_error() -> None:
    for name in ("a", "b"):
        write_image(Path("photos") / f"{name}.png", 1)
    lines = ["path,x,y,width,height", "a.png,0,0,9,9", "a.png,1,1,0,5", "b.png,1,1", ",1,1,2,2"]
    Path("boxes.csv").write_text("\n".join([*lines, *["b.png,1,1,x,3"] * 12]))
    data = {"name": "folder", "root": "photos", "boxes": "boxes.csv"}
    with pytest.raises(DataError) as caught:
        extract(data)
    text = str(caught.value)
    assert "boxes.csv: 15 lines are wrong.\nline 3: 1,1,0,5 of 'a.png' is no box" in text
    assert "\nline 4: there are fewer fields than columns" in text
    assert text.endswith("\nand 5 more")
    Path("boxes.csv").write_text("\n".join(lines[:3]))
    with pytest.raises(DataError, match=r"boxes\.csv, line 3: 1,1,0,5 of"):
        extract(data)


def test_random_weights_of_the_hub_are_no_advice_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def unresolved(*args: Any) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unresolved)
    write_images(Path("photos"), 2)
    model = {"name": "hf-hub:facebook/dinov2-base", "weights": None}
    with pytest.raises(WeightsError) as caught:
        featx.extract("photos", model=model, out="store")
    assert "model.weights=null" not in str(caught.value)
    assert "model=transformers model.name=facebook/dinov2-base" in str(caught.value)


def test_a_name_of_other_weights_is_answered_with_theirs() -> None:
    write_images(Path("photos"), 2)
    with pytest.raises(ConfigError, match=r"Give model=resmlp_12_224\.fb_dino\."):
        featx.extract("photos", model="resmlp_12_224_dino", out="store")


def test_a_file_of_weights_as_model_is_answered_with_its_option() -> None:
    """Also where `out` is not given and would be named for the file."""
    write_images(Path("photos"), 2)
    Path("my weights.pth").write_bytes(b"")
    with pytest.raises(ModelError, match=r"model=NAME 'model\.weights=my weights\.pth'"):
        featx.extract("photos", model="my weights.pth")
    with pytest.raises(ConfigError, match=r"named like a file, .* Give 'out=my store', or"):
        featx.extract("photos", model="my weights.pth", out="my store.pth")
