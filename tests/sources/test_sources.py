"""Every source through the whole run: the same features, resumed at the row, changes refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import made_sources
import pytest
from conftest import slow_except
from tiny_model import extract, run_job

from featx.config import member_groups
from featx.config.members import make_member
from featx.errors import StoreMismatchError
from featx.sources import open_source

pytestmark = pytest.mark.usefixtures("in_tmp_path", "cache_folder")


def encoded(photos: Path) -> dict[str, bytes]:
    """The images by their key, in the order of the keys."""
    return {
        os.fspath(path.relative_to(photos)): path.read_bytes()
        for path in sorted(photos.rglob("*.png"))
    }


@dataclass(frozen=True)
class Kind:
    """A source, and whether it can tell that an image changed under its key."""

    make: Callable[[made_sources.Images], dict[str, Any]]
    knows_images: bool = True


KINDS = {
    "tar": Kind(made_sources.tar),
    "tar.gz": Kind(made_sources.tar_gz),
    "csv": Kind(made_sources.csv, knows_images=False),
    "parquet": Kind(made_sources.parquet),
    "parquets": Kind(made_sources.parquets),
    "hdf5": Kind(made_sources.hdf5),
    "huggingface": Kind(made_sources.huggingface),
}


@pytest.mark.parametrize("name", slow_except(KINDS, "tar"))  # whose parts have tests of their own
def test_each_source_gives_the_folders_features_resumes_and_refuses_changes(
    name: str, photos: Path, computed: list[tuple[frozenset[str], int]]
) -> None:
    images = encoded(photos)
    reference = extract(photos, dtype="float32", out="folder", pack=False)
    data = KINDS[name].make(images)
    store = extract(data, dtype="float32", pack=False)
    assert store.ok.all()
    assert store["conv"][:].tobytes() == reference["conv"][:].tobytes()
    names = [store.classes[label] for label in store.labels]
    assert names == [key[:3] for key in images]
    # A worker that was given its keys reads without listing first.
    unlisted = open_source(make_member(member_groups()["data"], data))
    if name != "hdf5":  # whose images are pixels
        assert [unlisted.read(key.encode()) for key in store.keys] == list(images.values())
    # What is missing is done again, and nothing else.
    (Path("store") / "parts" / "part-000000.h5").unlink()
    (Path("store") / "parts" / "part-000002.h5").unlink()
    computed.clear()
    again = extract(data, dtype="float32", pack=False)
    assert [row for _, row in computed] == [0, 4, 16, 20]
    assert again["conv"][:].tobytes() == reference["conv"][:].tobytes()
    assert run_job("verify", store="store", verify={"reextract_rows": 3}) == 0
    # Another image under a known key.
    first = next(iter(images))
    changed = {**images, first: list(images.values())[-1] + b"behind its end"}
    KINDS[name].make(changed)
    if KINDS[name].knows_images:
        with pytest.raises(StoreMismatchError, match="image has changed"):
            extract(data, dtype="float32", pack=False)
    # One image fewer, and one more.
    KINDS[name].make(dict(list(images.items())[:-1]))
    with pytest.raises(StoreMismatchError, match="no longer in the data set"):
        extract(data, dtype="float32", pack=False)
    more = {**images, "dog/zzz.png": images[first]}
    KINDS[name].make(more)
    with pytest.raises(StoreMismatchError, match="1 new image that is"):
        extract(data, dtype="float32", pack=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tar", "hdf5"])
def test_a_source_grows_where_that_is_asked_for(name: str, photos: Path) -> None:
    images = encoded(photos)
    first = dict(list(images.items())[:13])
    extract(KINDS[name].make(first), dtype="float32", pack=False)
    data = KINDS[name].make(images)
    store = extract(data, dtype="float32", pack=False, grow=True)
    reference = extract(photos, dtype="float32", out="folder", pack=False)
    assert store["conv"][:].tobytes() == reference["conv"][:].tobytes()
    assert extract(data, dtype="float32", pack=False).complete
    key = next(iter(images))
    data = KINDS[name].make({**images, key: images[key] + b"!", "dog/zzz.png": images[key]})
    if name == "tar":
        with pytest.raises(StoreMismatchError, match="image has changed"):
            extract(data, dtype="float32", pack=False, grow=True)
