"""job=compare: one table over several stores, such as those of a sweep."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from featx.analysis.probe import METRICS
from featx.base import percent_text, shown_path, size_text
from featx.config import Config
from featx.errors import ConfigError, FeatxError, counted
from featx.jobs.base import JOBS, Input, Job, Table, print_summary
from featx.jobs.similarity_files import write_csv
from featx.storage import AtomicFolder, is_url, parse_path
from featx.store import FeatureStore, layout, read_result
from featx.types import NO_IMAGE

_COLUMNS = (
    *("store", "model", "weights", "layers", "width", "rows", "failed", "complete"),
    *("images_per_second", "bytes", "probe_layer", "probe_method", "metric", "value"),
    *("interval_low", "interval_high", "test_rows"),
)


@dataclass(frozen=True)
class StoreComparison:
    """What job=compare finds.

    Attributes:
        stores: one mapping of JSON types per store: store, model, weights, layers (name -> values
            of a row), rows, failed, complete, images_per_second, bytes, and probe, the answer of
            job=probe or None.
        notes: reasons why numbers of the stores cannot be compared, and stores that were left out.
    """

    stores: list[dict[str, Any]]
    notes: list[str]


def compare_stores(stores: str | Iterable[FeatureStore | str | Path]) -> StoreComparison:
    """Describe several stores, such as those of a sweep, by what their files say.

        pandas.DataFrame(compare_stores(["runs/a", "runs/b"]).stores)

    Args:
        stores: open stores or their paths, or a pattern such as 'runs/*/*'.

    Raises:
        ConfigError: there is no store.
        StoreError: there is no store at a path, or it is damaged.
    """
    notes: list[str] = []
    opened = _open_stores(stores, notes)
    entries = [_entry(store, notes) for store in opened]
    notes += [*_data_notes(opened), *_split_notes(entries)]
    return StoreComparison(entries, notes)


def run(config: Config, config_yaml: str) -> int:
    """Describe each store, write the table to compare.csv, and print it."""
    found = compare_stores(str(config.store))
    disk = AtomicFolder(_output_folder(config, found))
    disk.make_folder(disk.root)
    path = disk.root / "compare.csv"
    with disk.stream_file(path) as file:
        write_csv(file, _COLUMNS, map(_line, found.stores))
    rows = [("notes", "\n".join(found.notes) or None), ("file", shown_path(path))]
    print_summary(config, {**asdict(found), "file": str(path)}, _table(found.stores), rows)
    return 0


def _open_stores(
    given: str | Iterable[FeatureStore | str | Path], notes: list[str]
) -> list[FeatureStore]:
    """Open the stores of a list, also one in brackets, or of a pattern with `*`, `?` or `[`."""
    if isinstance(given, str) and given.startswith("[") and given.endswith("]"):
        given = [part.strip() for part in given[1:-1].split(",") if part.strip()]
    if not isinstance(given, str):
        stores = [_open(each) for each in given]
        if not stores:
            raise ConfigError("store=[]: expected stores, such as 'store=[runs/a,runs/b]'.")
        return stores
    if not glob.has_magic(given) or is_url(given):
        return [_open(given)]
    stores, pattern = [], str(Path(given).expanduser())
    for path in sorted(map(Path, glob.glob(pattern, recursive=True))):  # noqa: PTH207
        if not ((path / layout.MANIFEST).exists() or path.name == layout.PACKED):
            continue
        try:
            stores.append(_open(path))
        except FeatxError as error:
            notes.append(f"left out: {error}")
    if not stores:
        raise ConfigError(
            f"store={given}: no store has such a path. A store is a folder with {layout.MANIFEST}; "
            f"'store=runs/*/*' are those that have a model's name in a data set's folder."
        )
    return stores


def _open(store: FeatureStore | str | Path) -> FeatureStore:
    return store if isinstance(store, FeatureStore) else FeatureStore(store, verify="rows")


def _entry(store: FeatureStore, notes: list[str]) -> dict[str, Any]:
    """Describe a store as JSON types."""
    num_ok = int(store.ok.sum())
    widths = {name: int(np.prod(store[name].shape[1:], dtype=np.int64)) for name in store.layers}
    return {
        "store": str(store.root),
        "model": str(store.attrs.get("model", "")),
        "weights": str(store.attrs.get("weights", "")),
        "layers": widths,
        "rows": len(store),
        "failed": store.num_rows_present - num_ok,
        "complete": store.complete,
        "images_per_second": _images_per_second(store, notes),
        "bytes": sum(store[name].nbytes for name in store.layers),
        "probe": _probe(store, notes),
    }


def _images_per_second(store: FeatureStore, notes: list[str]) -> float | None:
    """Return the speed of the last run that computed rows; None if it is unknown."""
    try:
        runs = read_result(store.root / layout.SUMMARY)["runs"]
        speeds = [each["images_per_second"] for each in runs]
        return next((float(each) for each in reversed(speeds) if each is not None), None)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, LookupError, TypeError, ValueError) as error:
        notes.append(f"{shown_path(store.root / layout.SUMMARY)} cannot be read: {error}")
        return None


def _probe(store: FeatureStore, notes: list[str]) -> dict[str, Any] | None:
    """Return the answer of job=probe; None without one."""
    folder = store.root if store.root.is_dir() else store.root.parent
    path = folder / layout.PROBE
    try:
        result = read_result(path)
        if result["fingerprint"] != str(store.attrs.get("fingerprint")):
            notes.append(f"{shown_path(path)} belongs to another state of the store: left out")
            return None
        metric = METRICS[result["task"]][0]
        return {
            "layer": result["layer"],
            "method": result["method"],
            "metric": metric.key,
            "title": metric.title,
            "is_share": metric.is_share,
            "value": result[metric.key],
            "interval": result.get("interval"),
            "rows": result["rows"],
            "split": result["split"],
        }
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, LookupError, TypeError, ValueError) as error:
        notes.append(f"{shown_path(path)} cannot be read: {error!r}")
        return None


def _data_notes(stores: Sequence[FeatureStore]) -> Iterator[str]:
    """Yield notes about stores whose images or labels are not those of the first."""
    first, first_name = stores[0], shown_path(stores[0].root)
    for store in stores[1:]:
        name = shown_path(store.root)
        if not np.array_equal(np.sort(store.key_bytes), np.sort(first.key_bytes)):
            num_common = int(np.isin(store.key_bytes, first.key_bytes).sum())
            yield (
                f"{name} is of other images than {first_name}: {num_common} of its "
                f"{counted(len(store), 'key')} are there too. Their numbers are not comparable."
            )
        elif np.array_equal(store.key_bytes, first.key_bytes):
            mine, others = store.image_checksums, first.image_checksums
            known = (mine > NO_IMAGE) & (others > NO_IMAGE)
            if num_changed := int((mine != others)[known].sum()):
                yield (
                    f"{name}: {counted(num_changed, 'image has', 'images have')} other bytes than "
                    f"in {first_name}"
                )
            if store.classes != first.classes or not np.array_equal(store.labels, first.labels):
                yield f"{name} has other labels than {first_name}"


def _split_notes(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a note if probes were tested on different rows, or what tells two probes apart."""
    probed = [each for each in entries if each["probe"] is not None]
    if len(probed) < 2:
        return
    if any(each["probe"]["split"] != probed[0]["probe"]["split"] for each in probed):
        yield "the probes have different splits, so that their test rows differ"
    else:
        first, second = (shown_path(each["store"]) for each in probed[:2])
        yield (
            f"job=probe store={second} probe.compare_store={first} tests whether two probes "
            "differ on the same rows"
        )


def _output_folder(config: Config, found: StoreComparison) -> Path:
    """Return `out`, or the folder that contains all stores."""
    roots = [parse_path(entry["store"]) for entry in found.stores]
    if any(map(is_url, roots)):
        return config.output_folder(roots[0], "compare")
    return config.output_folder(Path(os.path.commonpath([root.parent for root in roots])), "")


def _layer(entry: Mapping[str, Any]) -> str | None:
    """Return the layer of the probe, or the only one."""
    if entry["probe"] is not None:
        return str(entry["probe"]["layer"])
    return next(iter(entry["layers"])) if len(entry["layers"]) == 1 else None


def _line(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a line of compare.csv."""
    probe, layer = entry["probe"] or {}, _layer(entry)
    low, high = probe.get("interval") or ("", "")
    speed = entry["images_per_second"]
    return (
        *(entry[name] for name in ("store", "model", "weights")),
        *(" ".join(entry["layers"]), entry["layers"].get(layer, "")),
        *(entry["rows"], entry["failed"], "yes" if entry["complete"] else "no"),
        *("" if speed is None else f"{speed:.6g}", entry["bytes"]),
        *(probe.get(name, "") for name in ("layer", "method", "metric", "value")),
        *(low, high, probe.get("rows", "")),
    )


def _table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a row for each store, without the columns that are empty."""
    header = ["store", "model", "layer", "width", "rows", "failed", "images/s", "size"]
    titles = {each["probe"]["title"] for each in entries if each["probe"] is not None}
    if titles:
        header += ["/".join(sorted(titles)), "95 % interval"]
    rows = []
    for entry in entries:
        layer, speed, probe = _layer(entry), entry["images_per_second"], entry["probe"]
        num_rows = f"{entry['rows']}{'' if entry['complete'] else ' (incomplete)'}"
        cells = [
            *(shown_path(entry["store"]), entry["model"]),
            layer or counted(len(entry["layers"]), "layer"),
            str(entry["layers"].get(layer, "-")),
            *(num_rows, str(entry["failed"])),
            *("-" if speed is None else f"{speed:.1f}", size_text(entry["bytes"])),
        ]
        if titles:
            cells += ["-", "-"] if probe is None else _probe_cells(probe)
        rows.append(cells)
    return Table(header, rows, left=3)


def _probe_cells(probe: Mapping[str, Any]) -> list[str]:
    """Return the first metric of a probe and its interval."""
    value, interval = probe["value"], probe["interval"]
    if not probe["is_share"]:
        return ["-" if value is None else f"{value:.3f}", "-"]
    ends = None if interval is None else [f"{100 * end:.1f}" for end in interval]
    return [percent_text(value), "-" if ends is None else " - ".join(ends)]


JOBS.register(
    Job(
        "compare",
        "Compare stores in one table: model, layers, rows, speed, size and probe.",
        run=run,
        input=Input.STORE,
        reads=("job.json", "out"),
        why="it describes existing stores",
        takes_several_stores=True,
    )
)
