"""Each format of job=export read by its own library, into one form that can be compared."""

from __future__ import annotations

import base64
import io
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from featx.types import Status


@dataclass
class Table:
    """What an export holds: key, row, label and status of its rows, and layer -> (n, ...)."""

    keys: list[str]
    rows: list[int]
    labels: list[int]
    status: list[int]
    layers: dict[str, np.ndarray]
    classes: list[str | None] | None = None
    """Name of each row's class, where the format has it."""
    files: list[str] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """The store's columns as the library gives them, bytes as text."""


def npy(out: Path) -> Table:
    layers = {p.stem: np.load(p, mmap_mode="r") for p in (out / "features").glob("*.npy")}
    assert all(isinstance(values, np.memmap) for values in layers.values())
    columns = {name: np.load(out / f"{name}.npy") for name in ("rows", "labels", "status", "keys")}
    names = json.loads((out / "classes.json").read_text("utf-8"))
    return Table(
        [key.decode("utf-8", "backslashreplace") for key in columns["keys"].tolist()],
        columns["rows"].tolist(),
        columns["labels"].tolist(),
        columns["status"].tolist(),
        layers,
        [names[label] if label >= 0 else None for label in columns["labels"].tolist()],
        columns={
            path.stem: _as_texts(np.load(path, mmap_mode="r"))
            for path in (out / "columns").glob("*.npy")
        },
    )


def csv(out: Path) -> Table:
    import pandas as pd

    rows = pd.read_csv(out / "rows.csv", keep_default_na=False, na_values={"class": ""})
    words = {status.label: int(status) for status in Status}
    listing = ("row", "key", "label", "class", "status")
    about = json.loads((out / "_export.json").read_text())["about"]["layers"]
    layers = {
        name: pd.read_csv(out / f"features/{name}.csv", index_col=0, dtype={0: str})
        .to_numpy(of_layer["dtype"])
        .reshape(-1, *of_layer["shape"])
        for name, of_layer in about.items()
    }
    return Table(
        [key.removeprefix("'") for key in rows["key"].astype(str)],
        rows["row"].tolist(),
        rows["label"].tolist(),
        [words[word] for word in rows["status"]],
        layers,
        [None if isinstance(name, float) else str(name) for name in rows["class"]],
        columns={name: rows[name].tolist() for name in rows if name not in listing},
    )


def _as_texts(values: np.ndarray) -> list[Any]:
    return [v.decode() if isinstance(v, bytes) else v for v in values.tolist()]


def parquet(out: Path) -> Table:
    import pyarrow.parquet as pq

    table = pq.read_table(out / "data")
    listing = ("key", "row", "label", "class", "status")
    about = json.loads(table.schema.metadata[b"featx"])
    layers = {}
    for name in about["layers"]:
        column = table.column(name).combine_chunks()
        shape = json.loads(table.schema.field(name).metadata[b"shape"])
        layers[name] = column.flatten().to_numpy().reshape(len(table), *shape)
    keys, rows, labels, classes, status = (table.column(name).to_pylist() for name in listing)
    files = sorted(path.name for path in (out / "data").iterdir())
    columns = {
        name: table.column(name).to_pylist()
        for name in table.column_names
        if name not in (*listing, *layers)
    }
    return Table(keys, rows, labels, status, layers, classes, files, columns)


def safetensors(out: Path) -> Table:
    from safetensors import safe_open

    found: dict[str, list[np.ndarray]] = {}
    files = sorted(out.glob("*.safetensors"))
    for path in files:
        with safe_open(path, framework="numpy") as shard:
            about = json.loads(shard.metadata()["featx"])
            names = about["classes"]
            for name in shard.keys():  # noqa: SIM118 - it is no mapping
                found.setdefault(name, []).append(shard.get_tensor(name))
    whole = {name: np.concatenate(values) for name, values in found.items()}
    keys, rows, labels, status = (whole.pop(name) for name in ("key", "row", "label", "status"))
    texts = [row.tobytes().rstrip(b"\0").decode("utf-8", "backslashreplace") for row in keys]
    classes = [names[label] if label >= 0 else None for label in labels.tolist()]
    layers = {name: whole.pop(name) for name in about["layers"]}
    columns = {}
    for name, values in whole.items():
        text = about["columns"][name.removeprefix("column.")] == "text"
        columns[name] = _as_texts(values.view(f"S{values.shape[1]}")[:, 0] if text else values)
    return Table(
        texts, rows.tolist(), labels.tolist(), status.tolist(), layers, classes,
        [path.name for path in files], columns,
    )  # fmt: skip


def zarr(out: Path) -> Table:
    import zarr

    group = zarr.open_group(out / "features.zarr", mode="r")
    assert group.metadata.zarr_format == 3
    names = group.attrs["featx"]["classes"]
    labels = group["label"][:].tolist()
    columns = group["columns"].arrays() if "columns" in group else ()
    return Table(
        group["key"][:].tolist(),
        group["row"][:].tolist(),
        labels,
        group["status"][:].tolist(),
        {name: array[:] for name, array in group["features"].arrays()},
        [names[label] if label >= 0 else None for label in labels],
        columns={name: array[:].tolist() for name, array in columns},
    )


def huggingface(out: Path) -> Table:
    from datasets import load_from_disk

    data = load_from_disk(str(out))
    listing = ("key", "row", "label", "status")
    layers: dict[str, Any] = {}
    columns: dict[str, list[Any]] = {}
    for name in data.column_names[len(listing) :]:
        kind = data.features[name]
        if not hasattr(kind, "feature"):
            columns[name] = data[name][:]
            continue
        while hasattr(kind, "feature"):
            kind = kind.feature
        layers[name] = data.with_format("numpy", dtype=np.dtype(kind.dtype))[:][name]
    keys, rows, labels, status = (data[name][:] for name in listing)
    classes = [data.features["label"].int2str(label) if label >= 0 else None for label in labels]
    files = sorted(path.name for path in out.glob("*.arrow"))
    return Table(keys, rows, labels, status, layers, classes, files, columns)


def webdataset(out: Path) -> Table:
    import webdataset as wds

    files = sorted(path.name for path in out.glob("*.tar"))
    urls = [str(out / name) for name in files]
    samples = list(wds.WebDataset(urls, shardshuffle=False, empty_check=False).decode())
    about = [sample["json"] for sample in samples]
    names = [key for key in samples[0] if key.endswith(".npy")]
    assert [sample["cls"] for sample in samples] == [row["label"] for row in about]
    return Table(
        [row["key"] for row in about],
        [row["row"] for row in about],
        [row["label"] for row in about],
        [row["status"] for row in about],
        {name[:-4]: np.stack([sample[name] for sample in samples]) for name in names},
        [row["class"] for row in about],
        files,
        {name: [row["columns"][name] for row in about] for name in about[0].get("columns", ())},
    )


def _listed(layers: dict[str, np.ndarray], keys: list[str], **more: Any) -> Table:
    """A table of a format that has neither status nor, unless given, row and label."""
    return Table(keys, more.pop("rows", []), more.pop("labels", []), [], layers, **more)


def fiftyone(out: Path) -> Table:
    """As FiftyOne's importer reads it; every value has the type that its field declares."""
    metadata = json.loads((out / "metadata.json").read_text("utf-8"))
    types = {
        field["db_field"]: field["ftype"].rpartition(".")[2] for field in metadata["sample_fields"]
    }
    python_types: dict[str, Any] = {
        "StringField": str, "IntField": int, "FloatField": float, "BooleanField": bool,
        "ListField": list, "ObjectIdField": dict, "EmbeddedDocumentField": dict,
    }  # fmt: skip
    samples = json.loads((out / "samples.json").read_text("utf-8"))["samples"]
    layers: dict[str, list[np.ndarray]] = {}
    for sample in samples:
        assert sample.pop("_media_type") == "image"
        assert 0 <= sample.pop("_rand") < 1
        for name, value in sample.items():
            if types[name] == "VectorField":
                file = zlib.decompress(base64.b64decode(value["$binary"]["base64"]))
                layers.setdefault(name, []).append(np.load(io.BytesIO(file)))
            else:
                assert type(value) is python_types[types[name]], name
    assert len({sample["_id"]["$oid"] for sample in samples}) == len(samples)
    names = metadata["default_classes"]
    classes = [sample.get("ground_truth", {}).get("label") for sample in samples]
    own = {"_id", "filepath", "tags", "key", "row", "ground_truth", *layers}
    return _listed(
        {name: np.stack(values) for name, values in layers.items()},
        [sample["key"] for sample in samples],
        rows=[sample["row"] for sample in samples],
        labels=[-1 if name is None else names.index(name) for name in classes],
        classes=classes,
        columns={
            name: [sample.get(name) for sample in samples] for name in types if name not in own
        },
    )


def clip_retrieval(out: Path) -> Table:
    """As clip-retrieval and embedding_reader read it: files of both folders in sorted order."""
    import pandas as pd

    vectors = sorted((out / "img_emb").glob("*.npy"))
    tables = [pd.read_parquet(path) for path in sorted((out / "metadata").glob("*.parquet"))]
    arrays = [np.load(path) for path in vectors]
    assert [len(array) for array in arrays] == [len(table) for table in tables]
    assert all(array.dtype == np.float16 for array in arrays)
    table = pd.concat(tables)
    (layer,) = json.loads((out / "_export.json").read_text())["fingerprint"]["layers"]
    return _listed(
        {layer: np.concatenate(arrays)},
        table["image_path"].tolist(),
        rows=table["row"].tolist(),
        labels=table["label"].tolist(),
        classes=table["class"].where(table["class"].notna(), None).tolist(),
        files=[path.name for path in vectors],
        columns={name: table[name].tolist() for name in table.columns[4:]},
    )


def faiss(out: Path) -> Table:
    import faiss
    import pandas as pd

    keys = pd.read_parquet(out / "keys.parquet")
    layers = {}
    for path in out.glob("*.index"):
        index = faiss.read_index(str(path))
        layers[path.stem] = np.stack([index.reconstruct(row) for row in keys["row"].tolist()])
    columns = {name: keys[name].tolist() for name in keys.columns[4:]}
    rows, labels = keys["row"].tolist(), keys["label"].tolist()
    return _listed(layers, keys["key"].tolist(), rows=rows, labels=labels, columns=columns)


def hloc(out: Path) -> Table:
    """A descriptor is the data set `global_descriptor` of the group that has the image's name."""
    import h5py

    layers, keys = {}, list[str]()
    for path in out.glob("global-feats-*.h5"):
        with h5py.File(path, "r", libver="latest") as file:
            names: list[str] = []
            file.visit(names.append)
            keys = [name for name in names if "global_descriptor" in file[name]]
            keys.sort(key=str.encode)
            rows = [file[key]["global_descriptor"].__array__() for key in keys]
        layers[path.stem.removeprefix("global-feats-")] = np.stack(rows)
    return _listed(layers, keys)


def trident(out: Path) -> Table:
    """As TRIDENT reads features with coordinates; keys are slide and corner."""
    import h5py

    layers, keys = {}, list[str]()
    for folder in out.glob("features_*"):
        keys, rows = [], []
        for path in sorted(folder.glob("*.h5")):
            with h5py.File(path, "r") as file:
                rows.append(file["features"][:])
                corners = file["coords"][:].tolist()
            keys += [f"{path.stem}#{x},{y}" for x, y in corners]
        layers[folder.name.removeprefix("features_")] = np.concatenate(rows)
    return _listed(layers, keys)


READERS = {
    "npy": npy,
    "csv": csv,
    "parquet": parquet,
    "safetensors": safetensors,
    "zarr": zarr,
    "huggingface": huggingface,
    "webdataset": webdataset,
    "clip_retrieval": clip_retrieval,
    "faiss": faiss,
    "hloc": hloc,
    "trident": trident,
    "fiftyone": fiftyone,
}
