"""Description of several stores, such as those of a sweep, and what tells them apart."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featx.analysis.probe import METRICS
from featx.base import shown_path
from featx.config import listed_stores
from featx.errors import ConfigError, FeatxError, counted
from featx.storage import is_url
from featx.store import (
    FeatureStore,
    layout,
    open_if_path,
    raw_dtype,
    read_result,
    read_summary,
)
from featx.types import Json, count_different_images

_DIGEST = "test_keys_sha256"
"""Entry of a split in probe.json."""


@dataclass(frozen=True)
class StoreComparison:
    """What job=compare finds.

    Attributes:
        stores: one mapping of JSON types per store: store, model, weights, layers (name -> values
            of a row), rows, failed, complete, images_per_second, bytes (of the values as they are
            stored, without compression), and probe, the answer of job=probe or None.
        notes: reasons why numbers of the stores cannot be compared, and stores that were left out.
    """

    stores: list[dict[str, Any]]
    notes: list[str]


def compare_stores(
    stores: str | os.PathLike[str] | Iterable[FeatureStore | str | Path],
) -> StoreComparison:
    """Describe several stores, such as those of a sweep, by what their files say.

        pandas.DataFrame(compare_stores(["runs/a", "runs/b"]).stores)

    Args:
        stores: open stores, their paths, or patterns such as 'runs/*/*'. A store that is given
            twice is taken once.

    Raises:
        ConfigError: there is no store.
        StoreError: there is no store at a path, or it is damaged.
    """
    notes: list[str] = []
    deeper: list[Path] = []
    by_path = {os.path.realpath(each.root): each for each in _open_stores(stores, notes, deeper)}
    if left_out := [each for each in deeper if os.path.realpath(each) not in by_path]:
        notes.append(
            f"left out: {counted(len(left_out), 'store')} one folder deeper than the pattern, such "
            f"as {shown_path(min(left_out))}; 'store=[runs/*,runs/*/*]' takes both"
        )
    opened = list(by_path.values())
    entries = [_entry(store, notes) for store in opened]
    notes += [*_data_notes(opened), *_split_notes(entries)]
    return StoreComparison(entries, notes)


def _open_stores(
    given: str | os.PathLike[str] | Iterable[FeatureStore | str | Path],
    notes: list[str],
    deeper: list[Path],
) -> list[FeatureStore]:
    """Open the stores of a list, also one in brackets, or of patterns with `*`, `?` or `[`.

    Stores in folders that a pattern matches, and that are none, are added to `deeper`.
    """
    if isinstance(given, os.PathLike | bytes) or not isinstance(given, Iterable):
        return [open_if_path(given)]
    if isinstance(given, str) and (listed := listed_stores(given)) != [given]:
        given = listed
    if not isinstance(given, str):
        given = list(given)
        if not given:
            raise ConfigError("store=[]: expected stores, such as 'store=[runs/a,runs/b]'.")
        several = [
            _open_stores(each, notes, deeper) if isinstance(each, str) else [open_if_path(each)]
            for each in given
        ]
        return [store for stores in several for store in stores]
    if "," in given and not is_url(given) and not Path(given).exists():
        raise ConfigError(f"store={given}: a list is written in brackets, 'store=[{given}]'.")
    if not glob.has_magic(given) or is_url(given) or Path(given).exists():
        return [open_if_path(given)]
    stores, pattern = [], str(Path(given).expanduser())
    for path in sorted(map(Path, glob.glob(pattern, recursive=True))):  # noqa: PTH207
        if path.name == layout.PACKED and (path.parent / layout.MANIFEST).exists():
            path = path.parent  # the same store as that of its folder
        if not ((path / layout.MANIFEST).exists() or path.name == layout.PACKED):
            deeper += [manifest.parent for manifest in path.glob(f"*/{layout.MANIFEST}")]
            continue
        try:
            stores.append(open_if_path(path))
        except FeatxError as error:
            notes.append(f"left out: {error}")
    if not stores:
        raise ConfigError(
            f"store={given}: no store has such a path. A store is a folder with {layout.MANIFEST}; "
            f"'store=runs/*/*' are those that have a model's name in a data set's folder."
        )
    return stores


def _entry(store: FeatureStore, notes: list[str]) -> dict[str, object]:
    num_ok = int(store.ok.sum())
    widths = {name: int(np.prod(store[name].shape[1:], dtype=np.int64)) for name in store.layers}
    # bfloat16 takes two bytes, and is read as float32.
    sizes = {name: raw_dtype(store[name].stored_dtype).itemsize for name in store.layers}
    return {
        "store": str(store.root),
        "model": str(store.attrs.get("model", "")),
        "weights": str(store.attrs.get("weights", "")),
        "layers": widths,
        "rows": len(store),
        "failed": store.num_rows_present - num_ok,
        "complete": store.complete,
        "images_per_second": _images_per_second(store, notes),
        "bytes": len(store) * sum(widths[name] * sizes[name] for name in store.layers),
        "probe": _probe(store, notes),
    }


@contextlib.contextmanager
def _noting(path: Path, notes: list[str]) -> Iterator[None]:
    """Add a note if a file cannot be read in the block; that it is missing is no problem."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, LookupError, TypeError, ValueError) as error:
        notes.append(f"{shown_path(path)} cannot be read: {error!r}")


def _images_per_second(store: FeatureStore, notes: list[str]) -> float | None:
    """Return the speed of the last run that computed rows; None if it is unknown."""
    with _noting(store.folder / layout.SUMMARY, notes):
        speeds = [each["images_per_second"] for each in read_summary(store)["runs"]]
        return next((float(each) for each in reversed(speeds) if each is not None), None)
    return None


def _probe(store: FeatureStore, notes: list[str]) -> Json | None:
    """Return the answer of job=probe; None without one."""
    path = store.folder / layout.PROBE
    with _noting(path, notes):
        result = read_result(path)
        if result["rows_sha256"] != store.rows_sha256:
            notes.append(f"{shown_path(path)} belongs to another state of the store: left out")
            return None
        metric = METRICS[result["task"]][0]
        return {
            **{name: result[name] for name in ("layer", "method", "rows", "split")},
            "metric": metric.key,
            "title": metric.title,
            "is_share": metric.is_share,
            "value": result[metric.key],
            "interval": result.get("interval"),
        }
    return None


def _data_notes(stores: Sequence[FeatureStore]) -> Iterator[str]:
    """Yield notes about stores whose images or labels are not those of the first."""
    first, first_name = stores[0], shown_path(stores[0].root)
    # A store that grew has its rows in another order.
    first_order = np.argsort(first.key_bytes)
    for store in stores[1:]:
        name, order = shown_path(store.root), np.argsort(store.key_bytes)
        if not np.array_equal(store.key_bytes[order], first.key_bytes[first_order]):
            num_common = int(np.isin(store.key_bytes, first.key_bytes).sum())
            yield (
                f"{name} is of other images than {first_name}: {num_common} of its "
                f"{counted(len(store), 'key')} are among the {len(first)} there. Their numbers are "
                "not comparable."
            )
            continue
        if num_changed := count_different_images(
            store.image_checksums[order], first.image_checksums[first_order]
        ):
            yield (
                f"{name}: {counted(num_changed, 'image has', 'images have')} other bytes than in "
                f"{first_name}"
            )
        if not np.array_equal(_class_names(store)[order], _class_names(first)[first_order]):
            yield f"{name} has other labels than {first_name}"


def _class_names(store: FeatureStore) -> npt.NDArray[np.str_]:
    """Return the class of each row, (n,); '' without a label."""
    return np.array([*store.classes, ""])[store.labels]


def _split_notes(entries: Sequence[Json]) -> Iterator[str]:
    """Yield a note if probes were tested on different rows, or what tells two probes apart."""
    probed = [each for each in entries if each["probe"] is not None]
    if len(probed) < 2:
        return
    splits = [each["probe"]["split"] for each in probed]
    # A probe.json of an earlier state of featx has no digest: it then tells nothing.
    digests = {split[_DIGEST] for split in splits if _DIGEST in split}
    others = [{**split, _DIGEST: None} for split in splits]
    if len(digests) > 1 or any(split != others[0] for split in others):
        yield "the probes have different splits, so that their test rows differ"
    else:
        first, second = (shown_path(each["store"]) for each in probed[:2])
        yield (
            f"job=probe 'store=[{second},{first}]' tests whether two probes differ on the same rows"
        )
