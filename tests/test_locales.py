"""Names are bytes: a store is the same in every locale, and no text of a name becomes a formula."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import featx

MODEL = """
import torch
def make():
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 8, 3, 4), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    return torch.nn.Sequential(*layers)
"""
COMMAND = [
    *("-m", "featx", "data=folder", "data.root=images", "out=store", "model=custom"),
    *("model.factory=tiny:make", 'layers=["2"]', "precision=fp32", "compile=false"),
    "max_failures=9",
]
CALL = """
import featx
store = featx.extract(
    data={"name": "folder", "root": "images"}, out="store", precision="fp32", compile=False,
    model={"library": "custom", "factory": "tiny:make"}, layers=["2"], max_failures=9,
)
assert store.row("\\u00e9l\\u00e9phant/b\\u00e9.png") == store.ok.nonzero()[0][-1]
"""


def python(folder: Path, *arguments: str, **env: str) -> str:
    path = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        check=False,
    )
    text = (done.stdout + done.stderr).decode("utf-8", "surrogateescape")
    assert done.returncode == 0, text
    return text


def made_images(folder: Path) -> None:
    (folder / "tiny.py").write_text(MODEL)
    rng = np.random.default_rng(0)
    for name in (b"chat/a.png", "éléphant/bé.png".encode(), b"latin\xe9/c.png"):
        file = folder / "images" / os.fsdecode(name)
        file.parent.mkdir(parents=True)
        Image.fromarray(rng.integers(0, 255, (64, 64, 3), np.uint8)).save(file)
    (folder / "images" / "brisé.png").write_bytes(b"none")


@pytest.fixture(scope="module")
def locales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("locales")
    if shutil.which("localedef") is None:
        pytest.skip("localedef makes the locale")
    target = folder / "en_US.ISO-8859-1"
    made = subprocess.run(
        ["localedef", "-i", "en_US", "-f", "ISO-8859-1", target], capture_output=True, check=False
    )
    if not target.exists():
        pytest.skip(f"localedef cannot make the locale: {made.stderr.decode()}")
    return folder


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param("POSIX", COMMAND, id="POSIX-command"),
        pytest.param(
            "en_US.ISO-8859-1", ["-c", CALL], id="ISO-8859-1-call", marks=pytest.mark.slow
        ),
        pytest.param("POSIX", ["-c", CALL], id="POSIX-call", marks=pytest.mark.slow),
        pytest.param("en_US.ISO-8859-1", COMMAND, id="ISO-8859-1-command", marks=pytest.mark.slow),
    ],
)
def test_a_store_is_the_same_in_every_locale(
    tmp_path: Path, locales: Path, name: str, arguments: list[str]
) -> None:
    made_images(tmp_path)
    locale = {"LC_ALL": name, "LOCPATH": str(locales), "PYTHONUTF8": "0"}
    messages = python(tmp_path, *arguments, **locale)
    store = featx.open(tmp_path / "store")
    assert store.classes == ("chat", "latin\udce9", "éléphant")
    assert store.key_bytes.tolist()[-1] == "éléphant/bé.png".encode()
    assert store.row("éléphant/bé.png") == 3
    assert "brisé.png" in (tmp_path / "store/failures.csv").read_text("utf-8")
    if arguments is COMMAND:
        assert "brisé.png" in messages
    verified = python(tmp_path, "-m", "featx", "job=verify", "store=store", **locale)
    assert "complete and sound" in verified
