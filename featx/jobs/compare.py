"""job=compare: one table over several stores, such as those of a sweep."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from featx.analysis import compare_stores
from featx.analysis.probe import interval_text, score_text
from featx.base import Table, shown_path, size_text, write_csv
from featx.config import Config
from featx.errors import counted
from featx.jobs.base import JOBS, Input, Job, print_summary
from featx.storage import AtomicFolder, is_url, parse_path
from featx.types import Json

_COLUMNS = (
    *("store", "model", "weights", "layers", "width", "rows", "failed", "complete"),
    *("images_per_second", "bytes", "probe_layer", "probe_method", "metric", "value"),
    *("interval_low", "interval_high", "test_rows"),
)


def run(config: Config, config_yaml: str) -> int:
    """Describe each store, write the table to compare.csv, and print it."""
    found = compare_stores(str(config.store))
    roots = [parse_path(entry["store"]) for entry in found.stores]
    if any(map(is_url, roots)):
        folder = config.output_folder(roots[0], "compare")
    else:
        common = os.path.commonpath([root.parent for root in roots])
        folder = config.output_folder(Path(common), "")
    disk = AtomicFolder(folder)
    disk.make_folder(disk.root)
    path = disk.root / "compare.csv"
    with disk.stream_file(path) as file:
        write_csv(file, [_COLUMNS, *map(_line, found.stores)])
    rows = [("notes", "\n".join(found.notes) or None), ("file", shown_path(path))]
    print_summary(config, {**asdict(found), "file": str(path)}, _table(found.stores), rows)
    return 0


def _layer(entry: Json) -> str | None:
    """Return the layer of the probe, or the only one."""
    if entry["probe"] is not None:
        return str(entry["probe"]["layer"])
    return next(iter(entry["layers"])) if len(entry["layers"]) == 1 else None


def _line(entry: Json) -> tuple[object, ...]:
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


def _table(entries: Sequence[Json]) -> Table:
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
        if titles and probe is None:
            cells += ["-", "-"]
        elif titles:
            is_share = probe["is_share"]
            cells.append(score_text(probe["value"], is_share))
            cells.append(interval_text(probe["interval"], is_share))
        rows.append(cells)
    return Table(header, rows, left=3)


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
