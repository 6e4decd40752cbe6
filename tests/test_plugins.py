"""The example of docs/plugins.md, really installed, adds a source, a model library and a format."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPOSITORY, run_featx, run_python
from PIL import Image
from tiny_model import job_config

import featx
from featx.config import from_saved
from featx.errors import ConfigError, DataError
from featx.images import read_image
from featx.pipeline import list_images
from featx.types import Listing

EXAMPLE = REPOSITORY / "tests" / "example_plugin"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the example, without network."""
    pytest.importorskip("hatchling", reason="hatchling builds the example")
    folder = tmp_path_factory.mktemp("plugins")
    copy = shutil.copytree(EXAMPLE, folder / "example")
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    run_python(*pip, "--target", folder / "site", copy)
    return folder / "site"


STRIPES = (
    *("data=stripes", "data.num_images=5", "model=resnet18", "model.weights=null"),
    *("layers=[avgpool]", "out=store"),
)


def test_an_installed_package_adds_a_source_and_a_format(installed: Path, tmp_path: Path) -> None:
    done = run_featx(tmp_path, *STRIPES, "executor.workers=2", "part_rows=4", path=[installed])
    assert done.returncode == 0, done.stderr
    store = featx.open(tmp_path / "store")
    assert store.ok.all()
    assert list(store.keys) == ["0001", "0002", "0003", "0004", "0005"]
    again = run_featx(tmp_path, *STRIPES, path=[installed])
    assert again.returncode == 0, again.stderr
    done = run_featx(
        tmp_path, "job=export", "store=store", "export.format=keys", "out=e", path=[installed]
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "e" / "keys.txt").read_text().split() == list(store.keys)


def test_an_installed_package_adds_a_model_library(installed: Path, tmp_path: Path) -> None:
    run = ("data=stripes", "model.weights=null", "layers=['1']", "out=store")
    done = run_featx(
        tmp_path, *run, "model=patches", "executor.workers=2", "part_rows=4", path=[installed]
    )
    assert done.returncode == 0, done.stderr
    store = featx.open(tmp_path / "store")
    assert store["1"].shape == (8, 8, 1, 1)
    assert store.attrs["model"] == "patches/patches16"
    done = run_featx(tmp_path, *run, "model=patches", "model.name=patches8", path=[installed])
    assert (done.returncode, "'patches/patches16'" in done.stderr) == (2, True), done.stderr
    done = run_featx(tmp_path, *run, "model=patches", "model.name=patches9", path=[installed])
    assert (done.returncode, "Nearest: patches8" in done.stderr) == (2, True), done.stderr
    done = run_featx(tmp_path, *run, "model=resnet18", "model.width=4", path=[installed])
    refused = "model.width has an effect with model.library=patches only"
    assert (done.returncode, refused in done.stderr) == (2, True), done.stderr


def test_its_options_are_described_and_checked(installed: Path, tmp_path: Path) -> None:
    text = " ".join(run_featx(tmp_path, "job=extract", "--help", path=[installed]).stdout.split())
    assert "data.num_images=8 data=stripes: Number of images." in text
    assert "stripes: Computed images of stripes." in text
    done = run_featx(tmp_path, *STRIPES, "data.num_images=0", path=[installed])
    assert (done.returncode, "num_images=0: expected a whole number" in done.stderr) == (
        2,
        True,
    )
    done = run_featx(
        tmp_path, "data=sample", "data.num_images=4", "model=resnet18", path=[installed]
    )
    assert done.returncode == 2
    assert "data.num_images has an effect with data=stripes only" in done.stderr


def test_stores_of_other_sources_do_not_depend_on_the_package(
    installed: Path, tmp_path: Path
) -> None:
    run = ("data=sample", "model=resnet18", "model.weights=null", "layers=[avgpool]", "out=store")
    assert run_featx(tmp_path, *run, path=[installed]).returncode == 0
    config = str(featx.open(tmp_path / "store").attrs["config"])
    assert "num_images: 8" not in config
    assert from_saved(config).data.name == "sample"


def test_without_the_package_its_store_says_what_is_missing(
    installed: Path, tmp_path: Path
) -> None:
    assert run_featx(tmp_path, *STRIPES, path=[installed]).returncode == 0
    config = str(featx.open(tmp_path / "store").attrs["config"])
    with pytest.raises(ConfigError, match="data=stripes: expected one of folder"):
        from_saved(config)
    done = run_featx(tmp_path, *STRIPES)
    assert (done.returncode, "data=stripes: expected one of" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("file", "line", "wrong", "message"),
    [
        ("patches", "return Backbone(module,", "return (module,", "returned tuple; expected a"),
        ("patches", "random_id(seed), pre", "None, pre", "weights of the Backbone is a NoneType"),
        ("patches", "Backbone(module,", "Backbone([],", "module of the Backbone is a list; exp"),
        (
            "stripes",
            "import io",
            "import io\nimport sys\nsys.exit(1)",
            "cannot be imported: System",
        ),
        ("stripes", "def listing(", "def list_rows(", "expected an object with listing() and read"),
        ("keys", "with folder.file", "return\n        with folder.file", "keys wrote no file"),
    ],
)
def test_a_mistake_of_the_package_is_named(
    installed: Path, tmp_path: Path, file: str, line: str, wrong: str, message: str
) -> None:
    site = Path(shutil.copytree(installed, tmp_path / "site"))
    source = site / "featx_example" / f"{file}.py"
    source.write_text(source.read_text().replace(line, wrong))
    run = ["data=stripes", "model=patches", "layers=['1']", "out=store"]
    done = run_featx(tmp_path, *run, path=[site])
    if file == "keys":
        export = ["job=export", "store=store", "export.format=keys", "out=e"]
        done = run_featx(tmp_path, *export, path=[site])
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_the_commands_of_the_docs_run(installed: Path, tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / "plugins.md").read_text(encoding="utf-8")
    for line in re.findall(r"^python -m featx (.*)", text, re.M):
        done = run_featx(tmp_path, *shlex.split(line), path=[installed])
        assert done.returncode == 0, f"{line}\n{done.stderr}"


def test_the_docs_show_the_example() -> None:
    text = (REPOSITORY / "docs" / "plugins.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```(?:python|toml)\n# ([\w/.]+)\n(.*?)^```", text, re.M | re.S)
    *of_package, (test, _) = shown
    assert len(of_package) == 4
    assert test == "test_my_source.py"
    for path, block in of_package:
        assert (EXAMPLE / path).read_text(encoding="utf-8") == block, path


class OneKeyTwice:
    """A source of a package with a mistake in its listing."""

    def listing(self) -> Listing:
        return Listing(np.array([b"a", b"a"]), np.full(2, -1))

    def read(self, key: bytes) -> bytes:
        return key


def test_what_a_source_lists_and_reads_is_checked(tmp_path: Path) -> None:
    source: Any = OneKeyTwice()
    config = job_config("extract", out=str(tmp_path / "store"))
    with pytest.raises(DataError, match="expected different keys in bytewise order"):
        list_images(config, source=source)
    source.listing = lambda: iter([b"a"])
    with pytest.raises(DataError, match=r"list_iterator; expected a featx\.types\.Listing"):
        list_images(config, source=source)
    source.read = lambda key: Image.new("RGB", (8, 8))
    with pytest.raises(DataError, match=r"read\(b'a'\) of the source returned Image; expected"):
        read_image(source, b"a")
