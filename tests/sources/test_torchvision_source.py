"""Data sets of torchvision on the disk, written here in their own formats."""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import pickle
import shlex
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from featx.config import DataConfig
from featx.errors import ConfigError, DataError
from featx.images import ImagePolicy, decode_pillow
from featx.sources import open_source
from featx.sources.torchvision import TorchvisionOptions
from featx.types import Source

POLICY = ImagePolicy.from_config(DataConfig())
RNG = np.random.default_rng(0)


def torchvision(root: Path, dataset: str, **keys: object) -> Source:
    return open_source(TorchvisionOptions(root=str(root), dataset=dataset, **keys))


def decoded(source: Source) -> np.ndarray:
    keys = source.listing().keys.tolist()
    return np.stack([np.asarray(decode_pillow(source.read(key), POLICY)) for key in keys])


def write_mnist(folder: Path, name: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The idx files of MNIST: big-endian sizes, then bytes."""
    pixels = RNG.integers(0, 256, (count, 28, 28), dtype=np.uint8)
    labels = np.arange(count, dtype=np.uint8) % 10
    folder.mkdir(parents=True, exist_ok=True)
    head = struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28)
    (folder / f"{name}-images-idx3-ubyte").write_bytes(head + pixels.tobytes())
    head = struct.pack(">4BI", 0, 0, 8, 1, count)
    (folder / f"{name}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())
    return pixels, labels


@pytest.mark.parametrize("name", ["MNIST", "FashionMNIST"])
def test_mnist(tmp_path: Path, name: str) -> None:
    train = write_mnist(tmp_path / name / "raw", "train", 12)
    test = write_mnist(tmp_path / name / "raw", "t10k", 7)
    for split, (pixels, labels) in ((None, train), ("train", train), ("test", test)):
        source = torchvision(tmp_path, name, split=split)
        listing = source.listing()
        assert listing.keys[1] == b"000001"
        assert listing.labels.tolist() == labels.tolist()
        assert len(listing.classes) == 10
        np.testing.assert_array_equal(decoded(source)[..., 0], pixels)
    write_mnist(tmp_path / "more", "train", 15)
    labels_file = tmp_path / name / "raw" / "train-labels-idx1-ubyte"
    (tmp_path / "more" / labels_file.name).replace(labels_file)
    with pytest.raises(DataError, match="has 12 images and 15 labels"):
        torchvision(tmp_path, name)
    labels_file.write_bytes(b"")
    with pytest.raises(DataError, match=f"has no {name}, or not all of it"):
        torchvision(tmp_path, name)


def write_cifar(
    root: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> tuple[np.ndarray, list[int]]:
    """CIFAR's pickles, (n, 3072) planes of colour; their checksums are put into torchvision's."""
    from torchvision import datasets

    make: Any = getattr(datasets, kind)
    key = "labels" if kind == "CIFAR10" else "fine_labels"
    names = [f"class {i}" for i in range(10 if kind == "CIFAR10" else 100)]
    folder = root / make.base_folder
    folder.mkdir(parents=True)
    pixels, labels = [], []

    def write(name: str, content: object) -> list[str]:
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        return [name, hashlib.md5(data).hexdigest()]

    lists: dict[str, list[list[str]]] = {"train_list": [], "test_list": []}
    for which, files in lists.items():
        for name, _ in getattr(make, which):
            some = RNG.integers(0, 256, (4, 3072), dtype=np.uint8)
            found = RNG.integers(0, len(names), 4).tolist()
            files.append(write(name, {"data": some, key: found}))
            if which == "train_list":
                pixels.append(some)
                labels += found
    for which, files in lists.items():
        monkeypatch.setattr(make, which, files)
    meta = dict(make.meta)
    meta["md5"] = write(meta["filename"], {meta["key"]: names})[1]
    monkeypatch.setattr(make, "meta", meta)
    return np.concatenate(pixels).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels


@pytest.mark.parametrize("kind", ["CIFAR10", "CIFAR100"])
def test_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    pixels, labels = write_cifar(tmp_path, monkeypatch, kind)
    source = torchvision(tmp_path, kind)
    listing = source.listing()
    assert listing.labels.tolist() == labels
    assert listing.classes[3] == "class 3"
    np.testing.assert_array_equal(decoded(source), pixels)
    assert len(torchvision(tmp_path, kind, split="test").listing()) == 4
    # A pickle that is not the one of the checksum is never opened.
    batch = next((tmp_path).glob("cifar-10*/*batch*" if kind == "CIFAR10" else "cifar-100*/train"))
    batch.write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(DataError, match=f"has no {kind}, or not all of it"):
        torchvision(tmp_path, kind)


def test_image_folder_and_its_splits(tmp_path: Path) -> None:
    for name in ("train/cat/1.png", "train/dog/2.png", "val/cat/3.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 8), "red").save(tmp_path / name)
    listing = torchvision(tmp_path, "ImageFolder", split="train").listing()
    assert listing.keys.tolist() == [b"cat/1.png", b"dog/2.png"]
    assert listing.classes == ("cat", "dog")
    assert len(torchvision(tmp_path / "val", "ImageFolder").listing()) == 1


def test_food101_and_pets_are_read_as_the_files_they_are(tmp_path: Path) -> None:
    food = tmp_path / "food-101"
    for name in ("pizza/9", "pizza/10", "apple_pie/1"):
        (food / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (food / "images" / f"{name}.jpg").write_bytes(name.encode())
    (food / "meta").mkdir()
    train = {"pizza": ["pizza/9", "pizza/10"], "apple_pie": ["apple_pie/1"]}
    (food / "meta" / "train.json").write_text(json.dumps(train))
    source = torchvision(tmp_path, "Food101")
    listing = source.listing()
    assert listing.keys.tolist() == [
        b"food-101/images/apple_pie/1.jpg",
        b"food-101/images/pizza/10.jpg",
        b"food-101/images/pizza/9.jpg",
    ]
    assert listing.labels.tolist() == [0, 1, 1]
    assert listing.classes == ("apple_pie", "pizza")
    assert source.read(b"food-101/images/pizza/9.jpg") == b"pizza/9"
    pets = tmp_path / "oxford-iiit-pet"
    (pets / "images").mkdir(parents=True)
    (pets / "annotations").mkdir()
    (pets / "images" / "Abyssinian_1.jpg").write_bytes(b"cat")
    (pets / "annotations" / "test.txt").write_text("Abyssinian_1 1 1 1\n")
    source = torchvision(tmp_path, "OxfordIIITPet", split="test")
    assert source.listing().classes == ("Abyssinian",)
    assert source.read(source.listing().keys.tolist()[0]) == b"cat"


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("CIFAR10", "train=True"),
        ("MNIST", "train=True"),
        ("Food101", "split='train'"),
        ("Flowers102", "split='train'"),
        ("OxfordIIITPet", "split='trainval'"),
    ],
)
@pytest.mark.parametrize("folder", ["photos", "it's $HOME"])
def test_missing_files_say_which_call_downloads_them(
    tmp_path: Path, name: str, split: str, folder: str
) -> None:
    """The command holds its root as it is, in Python inside of a shell."""
    root = tmp_path / folder
    with pytest.raises(DataError, match=f"has no {name}, or not all of it") as caught:
        torchvision(root, name)
    program, flag, code = shlex.split(str(caught.value).splitlines()[-1])
    assert (program, flag) == ("python", "-c")
    call = f"{name}(root={str(root)!r}, {split}, download=True)"
    expected = f"from torchvision.datasets import {name}; {call}"
    assert ast.dump(ast.parse(code)) == ast.dump(ast.parse(expected))
    assert list(tmp_path.iterdir()) == []


def test_unknown_names_and_splits(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"data\.dataset=CIFAR: expected one of .* Nearest: CIFAR10"
    ):
        torchvision(tmp_path, "CIFAR")
    with pytest.raises(DataError, match=r"data\.split=val: CIFAR10 has train and test"):
        torchvision(tmp_path, "CIFAR10", split="val")
    with pytest.raises(ConfigError, match=r"data=torchvision needs data\.dataset"):
        TorchvisionOptions(root="x")


def test_a_compressed_download_alone_is_not_enough(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST" / "raw", "train", 3)
    for path in list((tmp_path / "MNIST" / "raw").iterdir()):
        path.with_suffix(".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    with pytest.raises(DataError, match="has no MNIST"):
        torchvision(tmp_path, "MNIST")
