"""Compares a request with an existing store: the same, an addition to it, or an error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from featx.base import differences
from featx.errors import StoreMismatchError, counted
from featx.store import layout
from featx.store.manifest import Manifest, Run
from featx.types import Json

_ROW_ENTRIES = ("listing",)
"""Entries of a fingerprint that describe the rows; a run that adds rows has other values."""

_RUN_ENTRIES = ("layers", "part_rows", "codec", "dtype", *_ROW_ENTRIES)
"""Entries that may differ between the runs of a store, besides those named layer.<name>."""


def merge_manifest(
    root: Path,
    before: Manifest,
    requested: Run,
    unfinished: Sequence[Run],
    grow: bool,
    recompute: bool = False,
) -> Manifest:
    """Add a request to the runs of a store; return `before` if nothing is new.

    Args:
        root: folder of the store, for messages.
        requested: all rows and the requested layers, as a run of their own.
        unfinished: runs of the store that lack parts.
        grow: whether new rows may be added to the store.
        recompute: whether rows of a finished run may be computed again while others lack parts.

    Raises:
        StoreMismatchError: the request does not fit the store.
    """
    new_rows = requested.grid.num_rows - before.num_rows
    _refuse_other_settings(root, before, requested, new_rows > 0)
    if new_rows > 0 and not grow:
        raise StoreMismatchError(growth_message(root, new_rows))
    is_finished = new_rows <= 0 and any(run.names == requested.names for run in before.runs)
    is_unfinished = any(run.names == requested.names for run in unfinished)
    if unfinished and not is_unfinished and not (recompute and is_finished):
        raise StoreMismatchError(
            f"{root} is not complete: it was started with "
            f"layers={_name_list(unfinished[0].names)}, and this command has "
            f"layers={_name_list(requested.names)}. Give the command that started it to complete "
            "it, out=DIR for a new store, or overwrite=true to delete it."
        )
    if new_rows > 0 and set(before.layers) != requested.names:
        raise StoreMismatchError(
            f"{root} has layers {_name_list(before.layers)}, and rows can only be added to all of "
            f"them, before other layers; this command has layers={_name_list(requested.names)}. "
            f"Give 'layers={_name_list(before.layers)}' grow=true first and other layers in a "
            "second command, or choose another out=DIR."
        )
    if new_rows <= 0 and requested.names <= set(before.layers):
        return before
    if new_rows <= 0 and (repeated := requested.names & set(before.layers)):
        raise StoreMismatchError(
            f"{root} has {_name_list(repeated)} already; only layers that it lacks can be added."
        )
    grid = layout.Grid(
        num_rows=new_rows if new_rows > 0 else before.num_rows,
        part_rows=requested.grid.part_rows,
        first_row=before.num_rows if new_rows > 0 else 0,
        first_part=before.num_parts,
    )
    return Manifest((*before.runs, replace(requested, grid=grid)))


def _refuse_other_settings(root: Path, before: Manifest, requested: Run, grows: bool) -> None:
    """Raise StoreMismatchError if settings differ that the runs of the store must share."""
    known = sorted(requested.names & set(before.layers))
    layer_settings = _layers_settings(requested, known)
    # If some runs have exactly these layers, the request must equal one of them, apart from rows
    # that were added since.
    same_layers = [run for run in before.runs if run.names == requested.names]
    if same_layers and not grows:
        latest = before.runs[-1].header.fingerprint
        rows = {key: latest.get(key) for key in _ROW_ENTRIES}
        stored = [
            {**_run_settings(run), **_layers_settings(run, known), **rows} for run in same_layers
        ]
        now = {**_run_settings(requested), **layer_settings}
        if all(differences(settings, now) for settings in stored):
            refuse_difference(root, stored[-1], now)
        return
    latest_run = before.runs[-1]
    stored_layers = {
        key: value
        for name in known
        for key, value in _layers_settings(before.first_run_with(name), [name]).items()
    }
    keys = () if grows else _ROW_ENTRIES
    refuse_difference(
        root,
        {**_shared_settings(latest_run, keys), **stored_layers},
        {**_shared_settings(requested, keys), **layer_settings},
    )


def _run_settings(run: Run) -> Json:
    settings = run.header.fingerprint
    return {
        **settings,
        **{key: settings.get(key) for key in _ROW_ENTRIES},
        "layers": sorted(settings.get("layers", [])),
        "part_rows": run.grid.part_rows,
        "codec": run.codec,
    }


def _layers_settings(run: Run, names: Iterable[str]) -> dict[str, object]:
    """Settings of a run that change the values of one of some layers only."""
    specs, entries = {spec.name: spec for spec in run.layers}, run.header.fingerprint
    return {
        f"layer {name}": {**asdict(specs[name]), "fingerprint_entry": entries.get(f"layer.{name}")}
        for name in names
    }


def _shared_settings(run: Run, keys: Sequence[str]) -> dict[str, object]:
    """Settings that all runs of a store share, and the entries named in `keys`."""
    settings = run.header.fingerprint
    return {
        **{key: settings.get(key) for key in keys},
        **{
            key: value
            for key, value in settings.items()
            if key not in _RUN_ENTRIES and not key.startswith("layer.")
        },
    }


def _name_list(names: Iterable[str]) -> str:
    return f"[{','.join(sorted(names))}]"


def growth_message(root: Path, new_rows: int) -> str:
    """Error message for a data set that has grown since the store was started."""
    return (
        f"the data set has {counted(new_rows, 'new image that is', 'new images that are')} not in "
        f"{root}. grow=true adds them after the existing rows, whose numbers do not change; "
        "out=DIR makes a new store."
    )


def refuse_difference(root: Path, before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raise StoreMismatchError if two mappings differ; the message names keys and both values."""
    changed = differences(before, now)
    if not changed:
        return
    # The fingerprint restates all of a layer as one text, which is of use only if nothing else
    # shows the difference.
    changed_layers = {key.removeprefix("layer ") for key, *_ in changed if key.startswith("layer ")}
    restated = {f"layer.{name}" for name in changed_layers}
    shown = [entry for entry in changed if entry[0] not in restated]
    lines = [line for entry in shown for line in _difference_lines(*entry)]
    raise StoreMismatchError(
        f"{root} was started with other settings:\n" + "\n".join(lines) + "\n"
        "Features of both would be mixed. Give the settings of the store to resume it, out=DIR "
        "for a new store, or overwrite=true to delete this one."
    )


def _difference_lines(key: str, old: object, new: object) -> list[str]:
    """Lines of a message about one difference; those of nested settings name each that differs."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return [f"  {key}: the store has {old!r}, now {new!r}"]
    inner = differences(old, new)
    if len(inner) > 1:
        inner = [entry for entry in inner if entry[0] != "fingerprint_entry"]
    return [
        line for name, *values in inner for line in _difference_lines(f"{key}, {name}", *values)
    ]
