"""Listing of a run: rows of the store in its order, then new rows of the data set.

For target=label and target=loss, the labels of the rows are given as classes of the model.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from featx.base import log_message, log_step, name_text, printable
from featx.config import Config
from featx.errors import ConfigError, DataError, StoreMismatchError, counted
from featx.images import num_heic_without_decoder
from featx.sources import (
    check_class_names,
    check_listing,
    open_source,
    parent_key,
    similar_names,
    with_views,
)
from featx.storage import parse_path
from featx.store import (
    Manifest,
    growth_message,
    layout,
    listing_identity,
    merge_listing,
    missing_parts,
    read_listing,
)
from featx.types import NO_STATE, Listing, PathSource, Source

if TYPE_CHECKING:
    from featx.models import Backbone

_LABELS_HINT = (
    "Give labels that are numbers of the model's classes, with data=folder by a file such as "
    'data.classes=FILE.json with {"cat": 281}, or choose target=predicted or target=NUMBER'
)

_FILE_SUFFIXES = (".csv", ".h5", ".hdf5", ".npy", ".npz", ".parquet", ".pt", ".pth")
"""Endings of files, which nobody expects of a folder."""

_TRIED_PATHS = 16
"""Number of images of which one must exist before a model is loaded."""


def check_out(out: Path, config: Config) -> None:
    """Raise ConfigError if the folder of a run is a file, or does not exist and is named like one.

    The default of `out` may end as a file does, if `model` is a file: that is no model, which is
    said later.
    """
    if out.is_dir():
        return
    if out.exists():
        raise ConfigError(f"out={out} is a file; expected a folder for the store.")
    if out.suffix.lower() in _FILE_SUFFIXES and not config.has_default_out:
        folder = shlex.quote(f"out={out.with_suffix('')}")
        raise ConfigError(
            f"out={out} is named like a file, and a store is a folder, in which features.h5 holds "
            f"the rows. Give {folder}, or another folder."
        )


def list_images(
    config: Config,
    stored: Manifest | None = None,
    known_rows_only: bool = False,
    source: Source | None = None,
) -> tuple[Source, Listing]:
    """Open the data set of a config and list its rows in the order of the store.

    Args:
        config: checked config; `data.limit` is applied.
        stored: manifest of the store that is resumed, or None.
        known_rows_only: ignore images that the store does not contain yet.
        source: data set given as a Python object; None opens the data set of the config.

    Raises:
        DataError: the data set does not exist or is empty.
        StoreMismatchError: rows of the store are missing from the data set, or the data set has new
            rows and grow=true is not given. They are left out where the store cannot take them yet.
    """
    name = config.data.name if source is None else "a Python object"
    log_step(f"listing the images of {config.data.root or name} ...")
    source = open_source(config.data) if source is None else with_views(source, config.data)
    listing = source.listing()
    check_listing(listing)
    log_step(f"{counted(len(listing), 'image')} listed")
    check_class_names(listing.classes)
    for warning in (*listing.warnings, *similar_names(listing.classes)):
        log_message(warning, level="warning")
    listing = _some_rows(listing, config)
    if num_heic := num_heic_without_decoder(listing.keys):
        log_message(
            f"{counted(num_heic, 'image is', 'images are')} HEIC, which needs "
            'pip install "featx[heif]"; without it their rows fail.',
            level="warning",
        )
    if stored is not None:
        root = parse_path(config.out)
        before = _stored_listing(root, stored, listing)
        if before is not None and known_rows_only and _warn_of_gone_images(before, listing):
            return source, before
        if before is not None:
            _refuse_fewer_rows(root, before, listing, config)
            listing = merge_listing(root, before, listing)
            if known_rows_only:
                return source, before
        new_rows = len(listing) - stored.num_rows
        if new_rows > 0 and not config.grow:
            # Rows are added to all layers at once. Before, the layers of each run have to be
            # completed and refreshed by a command of their own, which cannot add rows.
            has_several_runs = len({run.names for run in stored.runs}) > 1
            must_wait = has_several_runs and (config.refresh or missing_parts(root, stored))
            if before is None or not must_wait:
                raise StoreMismatchError(growth_message(root, new_rows))
            names = ",".join(sorted(stored.layers))
            log_message(
                f"{counted(new_rows, 'new image')} left out: 'layers=[{names}]' grow=true adds "
                "them when all layers are complete.",
                level="warning",
            )
            return source, before
    return source, listing


def refuse_missing_images(source: Source, listing: Listing) -> None:
    """Refuse a data set of paths if none of some images, spread evenly over it, exists."""
    if not isinstance(source, PathSource):
        return
    rows = spread_rows(len(listing), _TRIED_PATHS)
    try:
        states = source.states(listing.keys[rows])
    except (FileNotFoundError, NotADirectoryError):  # of the folder that paths start from
        states = np.full(len(rows), NO_STATE)
    if states is not None and (states == NO_STATE).all():
        tried = f"{counted(len(rows), 'image')} that {'was' if len(rows) == 1 else 'were'} tried"
        first = bytes(listing.keys[rows[0]])
        raise DataError(
            f"none of {tried}, of {len(listing)}, exists. "
            f"{name_text(first)!r} was looked for at {source.place(first)}."
        )


def spread_rows(num_rows: int, count: int) -> npt.NDArray[np.int64]:
    """Return some rows, spread evenly over the data set."""
    return np.unique(np.linspace(0, num_rows - 1, count).astype(np.int64))


def _some_rows(listing: Listing, config: Config) -> Listing:
    """Return the rows that data.limit or data.sample takes, and note how many there are.

    Both count images where rows are views: an image has all of its views or none.
    """
    limit, sample = config.data.limit, config.data.sample
    if limit is None and sample is None:
        return listing
    images = listing
    parents: list[bytes] = []
    if config.data.has_views:  # one row of each image stands for all
        parents = [parent_key(key) for key in listing.keys.tolist()]
        images = listing.take(np.sort(np.unique(parents, return_index=True)[1]))
    taken = images if limit is None else images.head(limit)
    if sample is not None:
        taken = images.sample(sample)
    if config.data.has_views:
        chosen = {parent_key(key) for key in taken.keys.tolist()}
        taken = listing.take(np.flatnonzero([parent in chosen for parent in parents]))
    if len(taken) == len(listing):
        return listing
    option = f"data.limit={limit}" if limit is not None else f"data.sample={sample}"
    skipped = {
        **taken.skipped,
        f"of {counted(len(listing), 'image')} by {option}": (len(listing) - len(taken)),
    }
    return replace(taken, skipped=skipped)


def _warn_of_gone_images(stored: Listing, listed: Listing) -> bool:
    """Warn if images of a store are not in the data set any more; return whether any is not."""
    gone = stored.keys[~np.isin(stored.keys, listed.keys)]
    if len(gone):
        what = counted(len(gone), "image of the store is", "images of the store are")
        log_message(
            f"{what} gone, such as "
            f"{printable(name_text(bytes(gone[0])))}. Rows that a repair cannot "
            "compute for this reason are recorded as failed; all others stay.",
            level="warning",
        )
    return bool(len(gone))


def _refuse_fewer_rows(root: Path, stored: Listing, listed: Listing, config: Config) -> None:
    """Refuse data.limit or data.sample that takes fewer images than the store has."""
    for option in ("limit", "sample"):
        number = getattr(config.data, option)
        if number is not None and len(listed) < len(stored):
            keys = stored.keys.tolist()
            images = len({parent_key(key) for key in keys} if config.data.has_views else keys)
            raise StoreMismatchError(
                f"data.{option}={number} takes fewer images than the {images} that {root} has. "
                f"Give data.{option}={images}, or choose out=DIR for a new store."
            )


def _stored_listing(root: Path, stored: Manifest, listed: Listing) -> Listing | None:
    """Listing of the store, or None if no file holds it.

    If samples.h5 is damaged and no other file has a copy, the current listing of the data set is
    used, provided that it has the sha256 that the manifest records.
    """
    identity = stored.listing_identity
    before = read_listing(root, stored.num_rows, identity)
    if identity is None or (before is not None and listing_identity(before) == identity):
        return before
    if listing_identity(listed) == identity:
        return listed
    # grow=true was interrupted: the files of earlier runs have the first rows of the listing.
    for run in reversed(stored.runs[:-1]):
        run_identity = str(run.header.fingerprint.get("listing"))
        run_listing = read_listing(root, run.grid.stop_row, run_identity)
        if run_listing is not None and listing_identity(run_listing) == run_identity:
            merged = merge_listing(root, run_listing, listed)
            return merged if listing_identity(merged) == identity else None
    if before is not None:
        raise StoreMismatchError(
            f"{root / layout.LISTING} is damaged, no other file of the store has a whole copy, and "
            f"the data set now has another listing ({listing_identity(listed)}) than the store was "
            f"started with ({identity}). Put the data set back as it was then, choose out=DIR for "
            "a new store, or overwrite=true to delete this one."
        )
    return None


def target_labels(
    target: str | int | None, listing: Listing, backbone: Backbone
) -> npt.NDArray[np.int64]:
    """Return (N,) int64, the model's class of every row, for the targets 'label' and 'loss'.

    Classes whose names are all whole numbers are the model's classes of these numbers. Others are
    matched by name with the model's classes: in any case, with blanks for underscores, by any of
    the synonyms between commas, or by the identifier of a class (n01440764). For other targets
    the labels themselves are returned.
    """
    labels = listing.labels
    if target not in ("label", "loss"):
        return labels
    unlabelled = np.flatnonzero(labels < 0)
    if len(unlabelled):
        key = name_text(bytes(listing.keys[unlabelled[0]]))
        num_rows = counted(len(unlabelled), "image has", "images have")
        raise DataError(f"target={target}: {num_rows} no label, such as {key}. {_LABELS_HINT}.")
    used = np.unique(labels).tolist()
    names = [listing.classes[label] for label in used]
    table = np.full(len(listing.classes), -1, dtype=np.int64)
    table[used] = _match_classes(f"target={target}", names, backbone)
    return table[labels]


def _match_classes(origin: str, names: Sequence[str], backbone: Backbone) -> list[int]:
    """Return the class of the model for each name; raises DataError as `target_labels` does."""
    if all(name.isascii() and name.isdecimal() for name in names):
        return [int(name) for name in names]
    if not backbone.classes:
        raise DataError(
            f"{origin}: the classes of the data set are {_shown(names)}, and {backbone.name} with "
            f"weights {backbone.weights} has no names of its classes to compare them with. "
            f"{_LABELS_HINT}."
        )
    known: dict[str, set[int]] = {}
    for number, name in enumerate(backbone.classes):
        for text in {name, *name.split(",")}:
            known.setdefault(_normal(text), set()).add(number)
    for number, identifier in enumerate(backbone.class_ids):
        known.setdefault(_normal(identifier), set()).add(number)
    counts = Counter(backbone.classes)
    exact = {name: i for i, name in enumerate(backbone.classes) if counts[name] == 1}
    found = [{exact[n]} if n in exact else known.get(_normal(n), set()) for n in names]
    wrong = [name for name, numbers in zip(names, found, strict=True) if len(numbers) != 1]
    if wrong:
        raise DataError(
            f"{origin}: {len(wrong)} of {counted(len(names), 'class', 'classes')} of the data set "
            f"match no single class of {backbone.name}, such as {_shown(wrong)}. The model's "
            f"{len(backbone.classes)} classes are {_shown(backbone.classes)}. {_LABELS_HINT}."
        )
    return [numbers.pop() for numbers in found]


def _normal(name: str) -> str:
    """Return a name in lower case, with single blanks for underscores and blanks."""
    return " ".join(name.replace("_", " ").casefold().split())


def _shown(names: Sequence[str]) -> str:
    """Return the first names of a list, for a message."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
