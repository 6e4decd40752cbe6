"""The same command on its finished store ends without loading the model; any doubt loads it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from conftest import make_image, run_featx, run_python
from tiny_model import extract as extract_custom
from tiny_model import write_image, write_images

import featx
from featx.errors import FeatxError, StoreMismatchError
from featx.models import build_backbone

pytestmark = pytest.mark.usefixtures("in_tmp_path")

MODEL = {"name": "test_vit", "input_size": [32, 32]}

KEYS: dict[str, Any] = {
    "model": {**MODEL, "weights": "vit.pth"},
    "precision": "fp32",
    "batch_size": 4,
    "out": "store",
}

Extract = Callable[..., bool]


class StoppedError(FeatxError):
    """A model would be built now."""


def note_built(patch: pytest.MonkeyPatch, stops: bool = False) -> list[str]:
    """Names of the models that are built from now on; the first may stop the run instead."""
    names: list[str] = []

    def build(config: Any, seed: int) -> Any:
        names.append(config.name)
        if stops:
            raise StoppedError
        return build_backbone(config, seed)

    patch.setattr("featx.pipeline.run_context.build_backbone", build)
    return names


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that were built."""
    return note_built(monkeypatch)


def write_photos() -> Path:
    """Write images to ./photos, a minute old, so that their times stand for their bytes."""
    root = write_images(Path("photos"), 6)
    for path in root.rglob("*.png"):
        age(path)
    return root


def write_weights(path: str = "vit.pth", seed: int = 0) -> None:
    torch.manual_seed(seed)
    torch.save(timm.create_model("test_vit", img_size=32).state_dict(), path)


def command(names: list[str]) -> Extract:
    """A function that runs the command and returns if a model was built; `names` are the built."""

    def again(**keys: Any) -> bool:
        del names[:]
        with contextlib.suppress(StoppedError):
            featx.extract(**{**KEYS, "data": "photos", **keys})
        return bool(names)

    return again


@pytest.fixture
def photos() -> Path:
    return write_photos()


@pytest.fixture
def extract(photos: Path, built: list[str]) -> Extract:
    """A function that runs the command on a finished store and returns if a model was built."""
    write_weights()
    again = command(built)
    assert again(), "the first run builds it"
    return again


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images and weights, which no test changes, and the store of the command."""
    root = tmp_path_factory.mktemp("inputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        write_photos()
        write_weights()
        assert command(note_built(patch))(), "the first run builds it"
    (root / "store").rename(root / "finished")
    return root


@pytest.fixture
def finished(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in the folder of `inputs` with a copy of the finished store, which may be changed.

    The times and inodes of images and weights are part of what the command recognises, so these are
    the same files in every test.
    """
    monkeypatch.chdir(inputs)
    shutil.rmtree("store", ignore_errors=True)
    shutil.copytree("finished", "store")


@pytest.fixture
def would_build(finished: None, monkeypatch: pytest.MonkeyPatch) -> Extract:
    """As `extract_again`, of runs that stop where they would build the model."""
    return command(note_built(monkeypatch, stops=True))


@pytest.fixture
def extract_again(finished: None, built: list[str]) -> Extract:
    """As `extract`, for tests that change nothing but the store."""
    return command(built)


def age(path: Path, seconds: int = 60) -> None:
    """Make a file older."""
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns - seconds * 10**9))


def flip(path: Path, at: int) -> None:
    """Flip a bit of a file, and keep its times."""
    data, found = bytearray(path.read_bytes()), path.stat()
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def files(root: Path) -> dict[str, tuple[int, bytes]]:
    """Path -> modification time and content of all files of a folder."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes())
        for path in root.rglob("*")
        if path.is_file()
    }


def test_nothing_is_built_written_or_changed(
    extract_again: Extract, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(Path("store"))
    capsys.readouterr()
    assert not extract_again()
    assert files(Path("store")) == before
    printed = capsys.readouterr()
    assert "6 of 6 rows are there already" in printed.err
    assert "model   timm/test_vit, weights vit.pth" in printed.err
    assert printed.out.startswith("Done: 6 rows, 0 failed, ")
    assert "nothing was left to do" in printed.out


def test_options_without_effect_on_values_are_free(would_build: Extract) -> None:
    assert not would_build(max_failures=3)
    assert not would_build(executor={"name": "local", "workers": 2})
    assert not would_build(data={"name": "folder", "root": "photos"})


@pytest.mark.parametrize(
    "keys",
    [
        {"dtype": "float32"},
        {"precision": "auto"},
        {"layers": ["blocks.0"]},
        {"reduce": "avg", "layers": ["blocks.0"]},
        {"seed": 1},
        {"decode": "reference"},
        {"batch_size": 8},
        {"retry_failed": True},
        {"refresh": True},
        {"grow": True},
        {"overwrite": True},
        {"tensorboard": True},
        {"model": {**MODEL, "weights": None}},
        {"model": {**MODEL, "weights": "vit.pth", "init": "reset"}},
        {"data": {"name": "folder", "root": "photos", "limit": 6}},
    ],
    ids=str,
)
def test_other_options_build_the_model(would_build: Extract, keys: dict[str, Any]) -> None:
    assert would_build(**keys)


def replace_weights() -> None:
    found = Path("vit.pth").stat()
    other = Path("other/vit.pth")
    other.parent.mkdir()
    write_weights(str(other), seed=1)
    os.utime(other, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert other.stat().st_size == found.st_size
    other.replace("vit.pth")


def restore_summary(change: Callable[[dict[str, Any]], object]) -> Callable[[], None]:
    def damage() -> None:
        path = Path("store/summary.json")
        summary = json.loads(path.read_bytes())
        change(summary)
        path.write_text(json.dumps(summary))

    return damage


DOUBTS_OF_INPUTS: dict[str, Callable[[], object]] = {
    "weights touched": lambda: age(Path("vit.pth")),
    "image touched": lambda: age(sorted(Path("photos").rglob("*.png"))[0]),
}

DOUBTS_OF_THE_STORE: dict[str, Callable[[], object]] = {
    "states lost": lambda: Path("store/images.h5").unlink(),
    "listing lost": lambda: Path("store/samples.h5").unlink(),
    "listing damaged": lambda: flip(Path("store/samples.h5"), -40),
    "manifest lost": lambda: Path("store/featx.json").unlink(),
    "manifest damaged": lambda: flip(Path("store/featx.json"), 200),
    "rows cut": lambda: os.truncate("store/features.h5", 4000),
    "overwriting": lambda: Path("store/.overwriting").write_bytes(b"x"),
    "summary lost": lambda: Path("store/summary.json").unlink(),
    "summary cut": lambda: os.truncate("store/summary.json", 90),
    "summary empty": lambda: Path("store/summary.json").write_text("[]"),
    "no request": restore_summary(lambda summary: summary["runs"][0].pop("request")),
    "other request": restore_summary(lambda summary: summary["runs"][0].update(request="0" * 64)),
}


def check_doubt(extract: Extract, doubt: Callable[[], object]) -> None:
    """Any doubt builds the model, and the next time the store is known."""
    doubt()
    assert extract()
    assert not extract()
    assert len(featx.open("store")["embedding"][:]) == 6


@pytest.mark.slow
@pytest.mark.parametrize("doubt", DOUBTS_OF_INPUTS)
def test_a_doubt_of_the_inputs_builds_the_model_once(extract: Extract, doubt: str) -> None:
    check_doubt(extract, DOUBTS_OF_INPUTS[doubt])


@pytest.mark.parametrize("doubt", DOUBTS_OF_THE_STORE)
def test_a_doubt_of_the_store_builds_the_model(would_build: Extract, doubt: str) -> None:
    assert not would_build(), "without the doubt it is known"
    DOUBTS_OF_THE_STORE[doubt]()
    assert would_build()


@pytest.mark.slow
@pytest.mark.parametrize("doubt", DOUBTS_OF_THE_STORE)
def test_after_a_doubt_of_the_store_it_is_known_again(extract_again: Extract, doubt: str) -> None:
    check_doubt(extract_again, DOUBTS_OF_THE_STORE[doubt])


@pytest.mark.slow
def test_other_weights_of_the_same_size_and_time_are_refused(extract: Extract) -> None:
    replace_weights()
    with pytest.raises(StoreMismatchError, match="weights_sha256"):
        extract()


def test_changed_images_are_refused(extract: Extract) -> None:
    write_image(sorted(Path("photos").rglob("*.png"))[2], 99)
    with pytest.raises(StoreMismatchError, match="1 image has changed"):
        extract()


def test_new_images_are_refused_and_gone_ones_as_well(extract: Extract) -> None:
    make_image(40, 40).save("photos/cat/zzz.png")
    with pytest.raises(StoreMismatchError, match="grow=true"):
        extract()
    Path("photos/cat/zzz.png").unlink()
    assert not extract()
    sorted(Path("photos").rglob("*.png"))[0].unlink()
    with pytest.raises(StoreMismatchError):
        extract()


@pytest.mark.slow
def test_the_store_of_another_command_is_not_taken_for_its_own(extract: Extract) -> None:
    """Its summary is copied, and the command is the same but for the weights."""
    Path("vit.pth").rename("mine.pth")
    write_weights(seed=1)
    assert extract(out="second")
    shutil.copy("store/summary.json", "second/summary.json")
    shutil.rmtree("store")
    Path("second").rename("store")
    assert extract(), "the digest names the fingerprints of the store"


def test_other_versions_build_the_model(
    would_build: Extract, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.1" if name == "pillow" else real(name)
    )
    assert would_build()


@pytest.mark.slow
def test_failed_rows_are_told_and_decide_the_exit_code(
    extract: Extract, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("photos/cat/broken.png").write_bytes(b"no image")
    age(Path("photos/cat/broken.png"))
    assert extract(out="failing", max_failures=3)
    first = capsys.readouterr()
    assert not extract(out="failing", max_failures=3)
    again = capsys.readouterr()
    messages = [line for line in first.err.splitlines() if "broken.png" in line]
    assert messages
    assert [line for line in again.err.splitlines() if "broken.png" in line] == messages
    assert "1 failed" in again.out
    command = [
        *("data=photos", "out=failing", "model=test_vit", "model.weights=vit.pth"),
        *("model.input_size=[32,32]", "precision=fp32", "batch_size=4"),
    ]
    codes = [run_featx(Path(), *command, f"max_failures={n}").returncode for n in (0, 3)]
    assert codes[1] == 0
    assert codes[0] not in (0, 2)


@pytest.mark.slow
def test_a_model_of_the_users_code_is_always_built(photos: Path, built: list[str]) -> None:
    for _ in range(2):
        extract_custom(str(photos))
    assert built == ["tiny"] * 2
    assert json.loads(Path("store/summary.json").read_bytes())["request"] is None


@pytest.mark.slow
def test_statistics_of_a_reduction_may_be_written_again(photos: Path, built: list[str]) -> None:
    keys = {**KEYS, "model": {**MODEL, "weights": None}, "data": str(photos)}
    featx.stats(**{**keys, "out": "stats"})
    del built[:]
    for _ in range(2):
        featx.extract(**keys, reduce={"name": "pca", "stats": "stats", "k": 2})
    assert built == ["test_vit"] * 2


@pytest.mark.slow
def test_parts_that_are_not_packed_are_looked_at(extract: Extract) -> None:
    assert extract(out="parts", pack=False)
    assert extract(out="parts", pack=False)
    assert extract(out="parts"), "this one packs them"
    assert not extract(out="parts")


@pytest.mark.slow
def test_a_growing_store_is_known_again(extract: Extract, photos: Path) -> None:
    write_image(photos / "cat" / "x.png", 50)
    age(photos / "cat" / "x.png")
    assert extract(grow=True)
    assert not extract()


@pytest.mark.slow
def test_the_command_imports_no_torch(extract: Extract, photos: Path) -> None:
    command = [
        *("-X", "importtime", "-m", "featx", "data=photos", "out=made"),
        *("model=test_vit", "model.weights=vit.pth", "model.input_size=[32,32]"),
    ]
    runs = [run_python(*command) for _ in range(2)]
    imported = [{line.split("|")[-1].strip() for line in run.stderr.splitlines()} for run in runs]
    assert "torch" in imported[0]
    assert "numpy" in imported[1]
    assert not {name for name in imported[1] if name.split(".")[0] in ("torch", "timm")}
