"""Origin of a store, its rows, the speed of its runs, and the rows that failed.

Features are not read. All functions return JSON types, which the templates read.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from featx.base import as_utf8, size_text
from featx.errors import counted
from featx.export.report.html import without_folder, without_folders
from featx.export.report.probe_results import ROLES
from featx.pipeline import RESPONSE
from featx.storage import paths_in
from featx.store import FeatureStore, layout, manifest_of, read_summary
from featx.types import Status

CLASSES_SHOWN = 40
"""Maximum number of classes in the table of rows by class."""

STAGES = {
    "read": "reading the files, all decoders together",
    "decode": "decoding and resizing, all decoders together",
    "wait": "the model waited for images",
    "model": "the forward passes",
    "copy": "values from the device",
    "statistics": "summing up",
    "write": "building and committing parts",
    "pack": "the parts into one file",
}
"""Stage of a run -> its description."""

_NUMBERS = ("images_per_second", "peak_memory_mib")
"""Entries of a run in summary.json that are numbers or absent."""

FAILURES_SHOWN = 8
"""Maximum number of rows that are shown per reason."""

NOT_OPENED = frozenset({"crashes decoder", "timeout", "too large"})
"""Labels of statuses whose images are not opened again, because that could crash or hang."""


_EXPLAINED = {
    Status.MISSING: ("Missing", "The file is listed and cannot be found."),
    Status.EMPTY: ("Empty", "The file has no bytes."),
    Status.UNSUPPORTED: ("Not an image", "The file has no known image format."),
    Status.DECODE_ERROR: ("Not decodable", "The format is known, its data are damaged."),
    Status.TRUNCATED: (
        "Truncated",
        "The file ends early, as after an interrupted download or copy. The missing part is grey.",
    ),
    Status.TOO_LARGE: ("Too large", "The image has more pixels than data.max_pixels allows."),
    Status.TRANSFORM_ERROR: (
        "Not preprocessed",
        "A box reaches outside its image, or the transform of the model failed.",
    ),
    Status.NON_FINITE: ("Not finite", "The model returned NaN or infinity for this image."),
    Status.TIMEOUT: ("Too slow", "Decoding took longer than data.timeout_s."),
    Status.CRASHES_DECODER: ("Crashes the decoder", "Decoding ended the process."),
    Status.DAMAGED_AND_IMAGE_GONE: (
        "Damaged, image gone",
        "The row was in a damaged chunk of the store, and its image is not there any more.",
    ),
}
"""Status -> title and explanation for people."""

_PLAIN = frozenset({"empty", "unsupported", "truncated"})
"""Labels of statuses whose messages add nothing to the explanation."""

_MODEL = {
    "model": "Model",
    "weights": "Weights",
    "weights_sha256": "SHA-256",
    "transform": "Preprocessing",
    "fingerprint": "Fingerprint",
}
"""Attribute of the store -> its name for people."""


def provenance_of(
    store: FeatureStore, roles: npt.NDArray[np.int8] | None, folders: Sequence[str]
) -> dict[str, object]:
    """Collect the origin of a store and counts of its rows, for a page that does not contain the
    paths of `folders`. `roles` are (N,) indices into ROLES, None without a probe. Return model
    (name and value of the model, its weights and preprocessing), versions and size as text; runs of
    the manifest, or one made of the store's attributes; num_rows, num_ok, num_failed, num_absent
    (not computed yet), num_unlabelled, num_classes, num_ok_classes (those with an ok row); classes
    (the largest ones with their rows by role); and pending (layers of an unfinished run).
    """
    manifest = manifest_of(store)
    runs = [
        {
            "layers": [spec.name for spec in run.layers],
            "rows": f"{run.grid.first_row} to {run.grid.stop_row - 1}",
            "config": _redacted_config(run.header.config, folders),
            # Each option that was `auto`.
            "resolved": [
                (key, without_folders(str(v), folders))
                for key, v in run.resolved.items()
                if key != RESPONSE
            ],
        }
        for run in (manifest.runs if manifest else ())
    ]
    if not runs:
        config = _redacted_config(str(store.attrs.get("config", "")), folders)
        runs = [{"layers": store.layers, "rows": "all", "config": config, "resolved": []}]
    ok, absent, labelled = store.ok, store.status == Status.ABSENT, store.labels >= 0
    num_classes = len(store.classes)

    def count_by_class(chosen: npt.NDArray[np.bool_]) -> list[int]:
        counts: list[int] = np.bincount(store.labels[chosen], minlength=num_classes).tolist()
        return counts

    rows, fine = count_by_class(labelled), count_by_class(labelled & ok)
    rows_of_role = [
        count_by_class(labelled & (roles == role))
        for role in range(len(ROLES) if roles is not None else 0)
    ]
    order = np.argsort(-np.array(rows, np.int64), kind="stable")[:CLASSES_SHOWN].tolist()
    return {
        "model": [
            (shown, without_folders(as_utf8(str(store.attrs.get(name, "unknown"))), folders))
            for name, shown in _MODEL.items()
        ],
        "versions": _versions(store.attrs),
        "size": _size(store),
        "runs": runs,
        "num_rows": len(store),
        "num_ok": int(ok.sum()),
        "num_failed": int((~ok & ~absent).sum()),
        "num_absent": int(absent.sum()),
        "num_unlabelled": int((~labelled).sum()),
        "num_classes": num_classes,
        "num_ok_classes": int(np.count_nonzero(fine)),
        "classes": [
            {
                "name": as_utf8(store.classes[i]),
                "rows": rows[i],
                "ok": fine[i],
                "roles": [counts[i] for counts in rows_of_role],
            }
            for i in order
        ],
        "pending": [name for run in runs for name in run["layers"] if name not in store],
    }


def _redacted_config(config: str, folders: Sequence[str]) -> str:
    """Return the YAML of a config without data.root and without absolute paths."""
    try:
        values = yaml.safe_load(config)
        values["data"]["root"] = "(left out)"
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, LookupError):
        return without_folders(config, folders)  # written by another program
    # A path with spaces may have several lines in `config`.
    values = _without_folders_in_values(values, folders)
    text = yaml.safe_dump(values, allow_unicode=True, sort_keys=False, width=math.inf)
    return str(text).rstrip()


def _without_folders_in_values(value: object, folders: Sequence[str]) -> object:
    if isinstance(value, dict):
        return {key: _without_folders_in_values(each, folders) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_folders_in_values(each, folders) for each in value]
    return without_folders(without_folder(value), folders) if isinstance(value, str) else value


def _size(store: FeatureStore) -> str:
    packed = store.root if store.root.is_file() else store.root / layout.PACKED
    if packed.exists():
        return f"{size_text(packed.stat().st_size)}, one packed file"
    sizes = []
    for path in paths_in(store.root / layout.PARTS, layout.PART_GLOB):
        with contextlib.suppress(FileNotFoundError):  # packed meanwhile
            sizes.append(path.stat().st_size)
    return f"{size_text(sum(sizes))}, {counted(len(sizes), 'part')}, not packed"


def _versions(attrs: Mapping[str, object]) -> str:
    try:
        versions = json.loads(str(attrs.get("versions", "")))
        return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    except (ValueError, AttributeError):
        return "unknown"


def speed_of(store: FeatureStore) -> dict[str, object]:
    """Return the runs of a store as in summary.json, and `missing`, why there are none."""
    try:
        runs = read_summary(store)["runs"]
        for run in runs:
            numbers = [*run["seconds"].values(), *(run.get(name) for name in _NUMBERS)]
            sum(0.0 if number is None else float(number) for number in numbers)
        return {"runs": runs, "missing": ""}
    except FileNotFoundError:
        missing = "There is no summary.json yet: a run writes it when it ends."
        if store.root != store.folder:
            missing = "A single file records no times; summary.json is in the folder of the store."
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        missing = f"summary.json cannot be read: {error}."
    return {"runs": [], "missing": missing}


def reasons_of(store: FeatureStore) -> list[dict[str, Any]]:
    """Return the reasons of all failed rows, the most frequent first.

    Each has status, title and explanation for people, count, opened (whether the images may be read
    again), partial (whether a part of them may be readable), plain (whether the explanation says
    all that the messages say), the most frequent messages with their counts, and the rows shown.
    """
    failures = store.failures
    # Merged files may have a status without a message.
    with_message = {failure["row"] for failure in failures}
    failed = np.flatnonzero(~store.ok & (store.status != Status.ABSENT))
    failures += [
        {"row": row, "status": _label(store, row), "error": "", "message": ""}
        for row in failed.tolist()
        if row not in with_message
    ]
    reasons, titles = [], {status.label: texts for status, texts in _EXPLAINED.items()}
    for status, count in Counter(failure["status"] for failure in failures).most_common():
        rows = [failure for failure in failures if failure["status"] == status]
        title, explanation = titles.get(status, (status.capitalize(), ""))
        messages = Counter(str(row["message"] or row["error"]) for row in rows)
        reasons.append({
            "status": status,
            "title": title,
            "explanation": explanation,
            "count": count,
            "opened": status not in NOT_OPENED,
            "partial": status == Status.TRUNCATED.label,
            "plain": status in _PLAIN,
            "messages": messages.most_common(3),
            "shown": [row["row"] for row in rows[:FAILURES_SHOWN]],
        })  # fmt: skip
    return reasons


def _label(store: FeatureStore, row: int) -> str:
    """Return the label of a row's status, also of a status that a later version of featx wrote."""
    value = int(store.status[row])
    return Status(value).label if value in set(Status) else f"status {value}"
