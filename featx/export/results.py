"""Results of other jobs in the folder of a store, as report and exports read them."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from featx.base import as_utf8, csv_cell, number_text
from featx.errors import StoreError
from featx.store import FeatureStore, read_result
from featx.types import Json

_SHOWN = 16
"""Maximum number of images of a ranking."""


def result_of(store: FeatureStore, file: str, log: Callable[[str], None]) -> Json | None:
    """Read the result file of a job, whose name has that of the job as its stem. Return None if the
    job has not run, or on another state of the store, which is logged.
    """
    path = store.folder / file
    try:
        result = read_result(path)
    except FileNotFoundError:
        return None
    if result.get("rows_sha256") != store.rows_sha256:
        log(f"{path} belongs to another state of the store: run job={path.stem} again")
        return None
    return result


def lines_of(store: FeatureStore, job: str, result: Json) -> Iterator[tuple[int, dict[str, str]]]:
    """Read the table of a job, line by line, with the row of the store that each is of. Raises
    StoreError if the table is missing, or is not the one that the result of the job names.
    """
    path = store.folder / f"{job}/{job}.csv"
    if not path.is_file():
        raise StoreError(f"{path} is missing: run job={job} again, which writes it.")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != result.get("file_sha256"):
        raise StoreError(
            f"{path} is not the table that belongs to {job}.json: the job was stopped between the "
            f"two, or the table was changed. Run job={job} again, which writes both."
        )
    for line in csv.DictReader(io.StringIO(data.decode(), newline="")):
        row = int(line["row"])
        if csv_cell(store.key_of(row)) == line["key"]:
            yield row, line


@dataclass(frozen=True)
class Ranking:
    """First rows of a ranking. `captions` has row of the store -> text below its image."""

    title: str
    text: str
    captions: dict[int, str]


def rankings_of(store: FeatureStore, log: Callable[[str], None]) -> list[Ranking]:
    """Read the rankings in the folder of a store; one of another state of the store is left out."""
    makers = {"outliers": _outliers, "mislabelled": _mislabelled}
    rankings = []
    for job, make in makers.items():
        file = f"{job}/{job}.json"
        try:
            if (result := result_of(store, file, log)) is not None:
                rankings += make(store, result)
        except (OSError, LookupError, TypeError, ValueError) as error:
            path = store.folder / file
            log(f"{path} is not as job={job} writes it, and left out: {error!r}")
    return [ranking for ranking in rankings if ranking.captions]


def _outliers(store: FeatureStore, result: Json) -> list[Ranking]:
    left_out = result["left_out"]
    others = "images" if left_out is None else f"rows of another {left_out}"
    distance = f"{result['metric']} distance in {result['layer']} to the {result['k']} nearest"
    return [
        Ranking(
            title,
            f"By {distance} {others}{of_class}, the farthest first (job=outliers).",
            {
                row: (as_utf8(one["class"]) + ", " if one["class"] else "") + number_text(one[name])
                for row, one in _rows(store, result[rows]).items()
            },
        )
        for rows, name, title, of_class in (
            ("farthest", "distance", "Far from all other images", ""),
            ("farthest_in_class", "class_distance", "Far from their class", " of the same class"),
        )
    ]


def _mislabelled(store: FeatureStore, result: Json) -> list[Ranking]:
    text = (
        f"Labels by their probability in {result['layer']}, from the fold of {result['folds']} "
        f"that did not train on the image; {result['doubtful']} of {result['rows']} labels are "
        "doubtful (job=mislabelled)."
    )
    captions = {
        row: f"{as_utf8(one['label'])} {number_text(one['p_label'])}, predicted "
        f"{as_utf8(one['predicted'])} {number_text(one['p_predicted'])}"
        for row, one in _rows(store, result["least_credible"]).items()
    }
    return [Ranking("Least credible labels", text, captions)]


def _rows(store: FeatureStore, described: list[Json]) -> dict[int, Json]:
    """Return the first rows whose key is that of the store."""
    return {
        int(one["row"]): one
        for one in described[:_SHOWN]
        if store.key_of(int(one["row"])) == one["key"]
    }
