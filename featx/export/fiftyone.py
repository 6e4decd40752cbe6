"""export.format=fiftyone: a data set of images, features and results of jobs for FiftyOne.

The layout is that of `fiftyone.types.FiftyOneDataset`: metadata.json declares the fields, and
samples.json has one document per image, both in the extended JSON of MongoDB.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from PIL import Image

from featx.base import as_utf8, csv_cell, log_message, name_text
from featx.config import Config
from featx.errors import StoreError
from featx.export.base import FORMATS, ExportFolder, Format, FormatMember, literal, refuse_maps
from featx.export.results import lines_of, result_of
from featx.export.selection import (
    EncodedImages,
    ExportSelection,
    about_text,
    as_json_values,
    as_npy,
)
from featx.store import FeatureStore, layout
from featx.types import Array, Json

_VERSION = "1.0.0"
"""Version of FiftyOne whose layout is written; later ones convert it as they import it."""

_LISTING = (
    *("id", "filepath", "tags", "metadata", "media_type", "created_at", "last_modified_at"),
    *("key", "row"),
)
"""Fields of every sample of FiftyOne, and of every sample of an export."""

_RESULTS = {
    "ground_truth": "Classification",
    "prediction": "Classification",
    "cross_validated": "Classification",
    "label_probability": "FloatField",
    "outlier_distance": "FloatField",
    "duplicate_group": "IntField",
}
"""Field of a label or of a result -> its type; there is none of a job that has not run."""

_OF_LABEL = {
    "id": "ObjectIdField",
    "tags": "ListField",
    "label": "StringField",
    "confidence": "FloatField",
    "logits": "VectorField",
}
"""Field of a Classification -> its type."""

_OF_EVERY_SAMPLE = {
    "id": "ObjectIdField",
    "filepath": "StringField",
    "tags": "ListField",
    "created_at": "DateTimeField",
    "last_modified_at": "DateTimeField",
    "key": "StringField",
    "row": "IntField",
}
"""Field that every sample has -> its type."""

_COLUMN_TYPES = {"i": "IntField", "f": "FloatField", "b": "BooleanField", "S": "StringField"}
"""Kind of a dtype of numpy -> type of the field."""

_SAMPLE_BYTES = 2000
"""Approximate bytes of a document, without features."""

Field = dict[str, object]


class FiftyOne(Format):
    """metadata.json, samples.json, and in data/ the images that are not files of a folder.

    A sample has the key, the class, a vector for each layer, the columns of the data set, and what
    job=probe, mislabelled, outliers and duplicates have found; tags mark outliers, likely
    mislabelled images and near-duplicates.
    """

    def __init__(self, selection: ExportSelection, config: Config) -> None:
        super().__init__(selection, config)
        selection = self.selection
        refuse_maps(selection, "a sample of FiftyOne holds vectors")
        columns = selection.named_columns((*_LISTING, *_RESULTS))
        self._name_of: dict[str, str] = {}
        for name in (*selection.layers, *columns):
            # Fields are letters, digits and _. MongoDB and FiftyOne have their own with _ in front.
            field = re.sub(r"\W", "_", name).lstrip("_") or "column"
            while field in (*_LISTING, *_RESULTS, *self._name_of.values()):
                field += "_"
            self._name_of[name] = field
        self._columns = {self._name_of[name]: values for name, values in columns.items()}
        self._images = EncodedImages(selection, self.config)
        self._folder: Path | None = None
        if self._images.data.name == "folder":
            self._folder = Path(self._images.data.location).expanduser().absolute()
        self._image_bytes = self._images.mean_bytes  # images that are gone show before the rows
        self._results = _read_results(selection.store)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Description of the rows, of the results of jobs, and of the folder of the images."""
        text = json.dumps(self._results, sort_keys=True)
        return {
            **super().fingerprint,
            "results of jobs": _hash(text.encode()).hex(),
            "folder of the images": str(self._folder),
        }

    @property
    def num_bytes(self) -> int:
        image_bytes = 0.0 if self._folder else self._image_bytes
        text_bytes = _SAMPLE_BYTES + 4 * self.selection.row_bytes() / 3
        return int(len(self.selection) * (image_bytes + text_bytes))

    def write(self, folder: ExportFolder) -> None:
        """Write the images, the samples and the metadata."""
        with contextlib.ExitStack() as until_written:
            data = None
            if any(self._file_of(key) is None for key in self.selection.each_key()):
                data = until_written.enter_context(folder.folder("data"))
            self._write_samples(folder, self._paths(data))
        with folder.file("metadata.json") as file:
            file.write(json.dumps(self._metadata(), indent=1).encode())

    def _file_of(self, key: bytes) -> str | None:
        """Return the path of an image that is a file of a folder; None if a sample cannot name it,
        because MongoDB holds UTF-8 only.
        """
        path = str(self._folder / name_text(key)) if self._folder else None
        return path if path is not None and as_utf8(path) == path else None

    def _paths(self, data: Path | None) -> Iterator[str]:
        """Yield the path of each image, which is read: it must be that of its row. Images that a
        sample cannot name where they are are copied into the folder `data`.
        """
        for position, key in enumerate(self.selection.each_key()):
            encoded = self._images.read(position)
            path = self._file_of(key)
            if path is None:
                assert data is not None, "made if any image is copied"
                assert encoded is not None, "failed rows are left out"
                path = f"data/{self._copy(data, position, key, encoded)}"
            yield path

    def _copy(self, folder: Path, position: int, key: bytes, encoded: bytes) -> str:
        """Write an image into a folder. Returns its name."""
        suffix = Path(name_text(key)).suffix.lower()
        if encoded.startswith((b"P5", b"P6")):  # pixels of an array, which no browser shows
            buffer, suffix = io.BytesIO(), ".png"
            Image.open(io.BytesIO(encoded)).save(buffer, "PNG")
            encoded = buffer.getvalue()
        name = f"{int(self.selection.rows[position]):09d}{as_utf8(suffix)}"
        (folder / name).write_bytes(encoded)
        return name

    def _write_samples(self, folder: ExportFolder, paths: Iterable[str]) -> None:
        """Write samples.json, with the paths of the images in the order of the rows."""
        selection, n = self.selection, len(self.selection)
        each_path = iter(paths)
        with folder.file("samples.json") as file:
            file.write(b'{"samples": [')
            for start, stop, values in selection.blocks(0, n):
                keys, classes = selection.key_texts(start, stop), selection.class_texts(start, stop)
                columns = {
                    name: _column(of_all[start:stop]) for name, of_all in self._columns.items()
                }
                for position in range(start, stop):
                    place = position - start
                    row, raw = int(selection.rows[position]), bytes(selection.keys[position])
                    fields = {
                        "key": keys[place],
                        "row": row,
                        "ground_truth": _classification(raw, "ground_truth", classes[place]),
                        **self._results.get(row, {}),
                        **{name: column[place] for name, column in columns.items()},
                    }
                    digest = _hash(raw)
                    sample = {
                        "_id": {"$oid": digest.hex()},
                        "filepath": next(each_path),
                        "tags": [],
                        "_media_type": "image",
                        "_rand": int.from_bytes(digest[:6]) / 2**48,
                        **{name: value for name, value in fields.items() if value is not None},
                        **{
                            self._name_of[name]: _vector(layer_values[place])
                            for name, layer_values in values.items()
                        },
                    }
                    file.write((b",\n" if position else b"\n") + json.dumps(sample).encode())
            file.write(b"\n]}\n")

    def _metadata(self) -> dict[str, object]:
        """Return the document of the data set, which declares the fields of its samples."""
        selection = self.selection
        found = {"ground_truth", *(name for each in self._results.values() for name in each)}
        return {
            "name": selection.store.root.name,
            "version": _VERSION,
            "media_type": "image",
            "sample_fields": [
                *(_field(name, kind) for name, kind in _OF_EVERY_SAMPLE.items()),
                *(_field(name, kind) for name, kind in _RESULTS.items() if name in found),
                *(
                    _field(name, _COLUMN_TYPES[values.dtype.kind])
                    for name, values in self._columns.items()
                ),
                *(_field(self._name_of[layer], "VectorField") for layer in selection.layers),
            ],
            "default_classes": selection.classes,
            "info": {"featx": about_text(selection)},
        }

    def opening(self, out: Path) -> str:
        return (
            "import fiftyone as fo\n"
            f"dataset = fo.Dataset.from_dir({literal(str(out))}, fo.types.FiftyOneDataset)\n"
            "session = fo.launch_app(dataset)"
        )


def _read_results(store: FeatureStore) -> dict[int, Json]:
    """Read what jobs have found in a store. Returns row -> fields of its sample, with its tags."""
    fields: dict[int, dict[str, Any]] = defaultdict(dict)
    results = {
        job: result_of(store, file, log_message)
        for job, file in (
            ("probe", layout.PROBE),
            *((job, f"{job}/{job}.json") for job in ("outliers", "mislabelled", "duplicates")),
        )
    }
    if missing := [job for job, result in results.items() if result is None]:
        log_message(
            f"nothing is exported of job={', '.join(missing)}, which has not run on this store; "
            "after it has, overwrite=true exports again"
        )
    for job in ("probe", "mislabelled"):
        about = results[job] or {}
        if (column := about.get("split", about).get("label_column")) is not None:
            log_message(
                f"what job={job} has found is left out: it predicts the column {column}, and "
                "samples have the labels of the store"
            )
            results[job] = None
    keys, name_of_cell = store.key_bytes, {csv_cell(name): as_utf8(name) for name in store.classes}

    def predict(row: int, field: str, line: Mapping[str, str]) -> None:
        name, p = line["predicted"], line["p_predicted"]
        fields[row][field] = _classification(
            bytes(keys[row]), field, name_of_cell.get(name, name), float(p) if p else None
        )

    def tag(row: int, name: str) -> None:
        fields[row].setdefault("tags", []).append(name)

    if (result := results["probe"]) is not None:
        for row, line in _test_lines(store, result):
            predict(row, "prediction", line)
    if (result := results["outliers"]) is not None:
        for row, line in lines_of(store, "outliers", result):
            fields[row]["outlier_distance"] = float(line["distance"])
        shown = (*result["farthest"], *result["farthest_in_class"])
        for row in sorted({int(one["row"]) for one in shown}):
            tag(row, "outlier")
    if (result := results["mislabelled"]) is not None:
        for row, line in lines_of(store, "mislabelled", result):
            fields[row]["label_probability"] = float(line["p_label"])
            predict(row, "cross_validated", line)
            if line["doubtful"]:
                tag(row, "mislabelled")
    if (result := results["duplicates"]) is not None:
        for row, line in lines_of(store, "duplicates", result):
            fields[row]["duplicate_group"] = int(line["group"])
            tag(row, "near-duplicate")
    return dict(fields)


def _test_lines(store: FeatureStore, result: Json) -> Iterator[tuple[int, dict[str, str]]]:
    """Return the predictions of a probe for test rows of its store, by the layer it has chosen."""
    from featx.analysis.probe import is_of_answer, read_prediction_lines  # which imports torch

    if result["task"] != "classification" or result["split"]["kind"] == "test_store":
        log_message("predictions of the probe are left out: they are not classes of these rows")
        return
    row_of_cell = {csv_cell(str(key)): row for row, key in enumerate(store.keys.tolist())}
    path = store.folder / layout.PROBE
    lines = read_prediction_lines(path.parent, result)
    if lines is None:
        raise StoreError(
            f"the predictions that {path} names are missing or were changed: run job=probe again, "
            "which writes both."
        )
    for line in lines:
        if is_of_answer(line, result):
            yield row_of_cell[line["key"]], line


def _hash(data: bytes) -> bytes:
    """Return twelve bytes, as many as an identifier of MongoDB has."""
    return blake2b(data, digest_size=12).digest()


def _classification(
    key: bytes, field: str, label: str | None, confidence: float | None = None
) -> Json | None:
    """Return a label of FiftyOne; None without one."""
    if label is None:
        return None
    return {
        "_id": {"$oid": _hash(key + b"#" + field.encode()).hex()},
        "_cls": "Classification",
        "tags": [],
        "label": label,
        **({} if confidence is None else {"confidence": confidence}),
    }


def _column(values: Array) -> list[object]:
    """Return the values of a column; MongoDB refuses text that is no UTF-8."""
    return [as_utf8(each) if isinstance(each, str) else each for each in as_json_values(values)]


def _vector(values: Array) -> dict[str, object]:
    """Return a vector as FiftyOne stores it, an .npy file compressed by zlib."""
    data = base64.b64encode(zlib.compress(as_npy(values), 1)).decode()
    return {"$binary": {"base64": data, "subType": "00"}}


def _field(name: str, kind: str) -> Field:
    """Declare a field of a class of FiftyOne."""
    embedded, fields = None, list[Field]()
    if kind == "Classification":
        embedded = f"fiftyone.core.labels.{kind}"
        fields = [_field(name, kind) for name, kind in _OF_LABEL.items()]
        kind = "EmbeddedDocumentField"
    return {
        "name": name,
        "ftype": f"fiftyone.core.fields.{kind}",
        "embedded_doc_type": embedded,
        "subfield": "fiftyone.core.fields.StringField" if kind == "ListField" else None,
        "fields": fields,
        "db_field": "_id" if name == "id" else name,  # its name in the documents of MongoDB
    }


FORMATS.register(
    FormatMember(
        "fiftyone",
        "A data set for FiftyOne, with predictions, outliers and near-duplicates.",
        make=FiftyOne,
        holds_failed_rows=False,
    )
)
