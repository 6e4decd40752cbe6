"""The values in a file: datasets, columns, entries of JSON, words of a text."""

from __future__ import annotations

import contextlib
import csv
import json
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin  # noqa: F401 - registers the filter of zstd
import numpy as np
import yaml
from PIL import Image

Values = Iterator[tuple[str, Any]]
"""Names of the values of a file, and the values: arrays, texts, bytes, numbers."""

NORMALISED = (
    # Progress, a line every few seconds.
    (r"(?m)^\d+ of \d+ (images|rows), .*\bleft, .*\n", ""),
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d+)?)?", "DATE"),
    (r"[~<]?\d[\d.,]* (images|rows|parts|queries|epochs)(/s|/min| a second| per second)", "RATE"),
    (r"[~<]?\b\d[\d.,]*(e[+-]\d+)? ?(s|ms|min|h|seconds|minutes)\b", "TIME"),
    (r"\b\d[\d.,]* ?(KiB|MiB|GiB|TiB|KB|MB|GB|TB)\b", "SIZE"),
    (r"\b(pid|process|PID) \d+", "PROCESS"),
    (r"Limited by (.|\n)*?\.(?=\s)", "LIMITED"),
    (r"(?m): limited by .*$", ": LIMITED"),
    (r"(?m)^(rows/s|slow|seconds|start) .*\n( .*\n)*", ""),
    # What a killed process computed, as of its last heartbeat, one every ten seconds.
    (r"was killed(;| while it computed part)(.|\n)*?\.(?=\s)", "was killed"),
    (r"submitted (\d+) tasks: [\d, ]+", r"submitted \1 tasks"),
    # The report's page.
    (r"flex:[\d.]+", "SHARE"),
    (r"[\d.]+ images/s", "RATE"),
)
"""What differs from run to run in messages, and what stands for it."""


def read_values(path: Path) -> Values:
    """Yield the values of a file by the kind that its suffix names; else its text or bytes."""
    reader = _events if "tfevents" in path.name else READERS.get(path.suffix, _text)
    yield from reader(path)


def _text(path: Path) -> Values:
    """Words, since columns and line breaks move with the width of a rate; or JSON; or bytes."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        yield "", path.read_bytes()
        return
    if text.startswith(("{", "[")):
        with contextlib.suppress(ValueError):
            yield from _entries("", json.loads(text))
            return
    for pattern, replacement in NORMALISED:
        text = re.sub(pattern, replacement, text)
    yield "", text.split()


def _hdf5(path: Path) -> Values:
    with h5py.File(path) as file:
        names = ["/"]
        file.visit(names.append)
        for name in names:
            node = file[name]
            if isinstance(node, h5py.Dataset):
                yield name, np.asarray(node)
            for key, value in node.attrs.items():
                yield from _attribute(f"{name}@{key}", value)


def _attribute(name: str, value: Any) -> Values:
    text = value.decode() if isinstance(value, bytes) else value
    if not isinstance(text, str):
        yield name, np.asarray(value)
    elif text.startswith(("{", "[")):
        yield from _entries(name, json.loads(text))
    else:
        yield from _entries(name, yaml.safe_load(text) if "\n" in text else text)


def _entries(name: str, node: Any) -> Values:
    """Leaves of JSON or YAML; a list of numbers is one array."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _entries(f"{name}.{key}", value)
    elif isinstance(node, list) and not all(isinstance(x, int | float) for x in node):
        yield f"{name}.length", len(node)
        for index, value in enumerate(node):
            yield from _entries(f"{name}[{index}]", value)
    elif isinstance(node, list):
        yield name, np.asarray(node)
    elif name.endswith(".config") and isinstance(node, str):
        yield from _entries(name, yaml.safe_load(node))
    else:
        yield name, node


def _table(path: Path) -> Values:
    with path.open(newline="", errors="surrogateescape") as file:
        lines = list(csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ","))
    width = max(map(len, lines), default=0)
    for column in range(width):
        cells = [line[column] if column < len(line) else "" for line in lines]
        yield f"column {cells[0]}", np.asarray(cells)


def _numpy(path: Path) -> Values:
    found = np.load(path, allow_pickle=False)
    if isinstance(found, np.ndarray):
        yield "", found
    else:
        yield from found.items()


def _safetensors(path: Path) -> Values:
    from safetensors.numpy import load_file

    yield from load_file(path).items()


def _parquet(path: Path) -> Values:
    from pyarrow import parquet

    table = parquet.read_table(path)
    yield "schema", str(table.schema.remove_metadata())
    for name in table.column_names:
        yield name, np.asarray([str(value) for value in table[name].to_pylist()])


def _tar(path: Path) -> Values:
    with tarfile.open(path) as file:
        for member in file:
            content = file.extractfile(member)
            yield member.name, content.read() if content else member.linkname


def _events(path: Path) -> Values:
    """Scalars, histograms and texts of TensorBoard, without their times."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    # The attributes of a node of a graph are written in any order.
    arrange = sorted if path.suffix == ".graph" else bytes
    for number, event in enumerate(EventFileLoader(str(path)).Load()):
        yield f"{number}.graph", bytes(arrange(event.graph_def))
        for value in event.summary.value:
            content = value.SerializeToString(deterministic=True)
            yield f"{number}.{value.tag}.{event.step}", bytes(arrange(content))


def _image(path: Path) -> Values:
    with Image.open(path) as image:
        yield "", np.asarray(image)


READERS: dict[str, Callable[[Path], Values]] = {
    **dict.fromkeys((".h5", ".hdf5"), _hdf5),
    **dict.fromkeys((".csv", ".tsv"), _table),
    **dict.fromkeys((".npy", ".npz"), _numpy),
    **dict.fromkeys((".png", ".webp", ".jpg"), _image),
    ".json": lambda path: _entries("", json.loads(path.read_text())),
    ".yaml": lambda path: _entries("", yaml.safe_load(path.read_text())),
    ".safetensors": _safetensors,
    ".parquet": _parquet,
    ".tar": _tar,
}
