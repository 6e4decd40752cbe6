"""Images as data sets of every kind, in the current folder.

A function takes the images by their key, in the order of the keys, and returns the options of the
data set. The class of an image is the first three letters of its key.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from made_shards import write_tar
from PIL import Image

Images = Mapping[str, bytes]


def in_two_files(images: Images) -> list[dict[str, bytes]]:
    """The first three images and the others: one more at the end moves none to another file."""
    return [dict(islice(images.items(), *ends)) for ends in ((0, 3), (3, None))]


def tar(images: Images, ending: str = "tar") -> dict[str, Any]:
    for number, some in enumerate(in_two_files(images)):
        write_tar(Path("shards") / f"{number}.{ending}", some)
    return {"name": "webdataset", "root": "shards"}


def tar_gz(images: Images) -> dict[str, Any]:
    return tar(images, "tar.gz")


def csv(images: Images) -> dict[str, Any]:
    for key, data in images.items():
        path = Path("loose") / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    rows = "".join(f"{key},{key[:3]}\n" for key in images)
    Path("t.csv").write_text(f"path,label\n{rows}")
    return {"name": "table", "root": "t.csv", "image_root": "loose"}


def write_parquet(path: str, images: Images) -> None:
    pa = pytest.importorskip("pyarrow", reason="the extra table is not installed")
    from pyarrow import parquet

    rows = [{"bytes": data, "path": key} for key, data in images.items()]
    table = pa.table({"image": rows, "label": [key[:3] for key in images]})
    parquet.write_table(table, path, row_group_size=3)


def parquet(images: Images) -> dict[str, Any]:
    write_parquet("t.parquet", images)
    return {"name": "table", "root": "t.parquet"}


def parquets(images: Images) -> dict[str, Any]:
    Path("set").mkdir(exist_ok=True)
    for number, some in enumerate(in_two_files(images)):
        write_parquet(f"set/{number}.parquet", some)
    return {"name": "table", "root": "set"}


def hdf5(images: Images) -> dict[str, Any]:
    pixels = [np.asarray(Image.open(io.BytesIO(data))) for data in images.values()]
    with h5py.File("t.h5", "w") as file:
        file["images"] = np.stack(pixels)
        file["labels"] = [key[:3] for key in images]
    return {"name": "hdf5", "root": "t.h5", "dataset": "images", "label_column": "labels"}


def huggingface(images: Images) -> dict[str, Any]:
    datasets = pytest.importorskip("datasets", reason="the extra huggingface is not installed")
    columns = {
        "image": [{"bytes": data, "path": None} for data in images.values()],
        "label": [key[:3] for key in images],
    }
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns, features=kinds).save_to_disk("saved")
    return {"name": "huggingface", "root": "saved"}
