"""Reads a complete stats.h5 layer by layer, summarises it, and compares two of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import h5py

from featx.analysis.statistics.covariance import gaussian_distance, spread
from featx.analysis.statistics.moments import Moments
from featx.analysis.statistics.part_moments import norms_summary
from featx.analysis.statistics.stats_file import (
    STATS_FILE,
    attributes_of,
    check_layer,
    read_layer,
    reading,
)
from featx.analysis.statistics.tokens import explain_missing_norms
from featx.analysis.value_settings import model_values, refuse_other_values
from featx.errors import ConfigError, StoreError
from featx.storage import path_text
from featx.types import Failure


def open_stats(path: str | Path) -> Statistics:
    """Open the statistics that job=stats computed. The path is that of a stats.h5, or the folder
    that contains it. Raises StoreError if the file is missing, incomplete, damaged, or of a newer
    format.
    """
    return Statistics(path)


class Statistics(Mapping[str, Moments]):
    """A complete stats.h5 as a mapping layer -> Moments; a layer is read when it is accessed.

        stats = featx.open_stats("runs/photos")
        stats["avgpool"].mean           # (D,) float64; .covariance(), .second_moment, .count

    Args:
        path: the file, or the folder that contains it.

    Attributes:
        attributes: root attributes: model, weights_sha256, transform, num_failed, ...
        settings: everything that changes the values, by option name.

    Raises:
        StoreError: the file is missing, incomplete, damaged, or of a newer format.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path_text(path)).expanduser()
        self.path = path / STATS_FILE if path.is_dir() else path
        if not self.path.is_file():
            raise StoreError(f"there is no statistics file {self.path}. job=stats makes one.")
        self._stamp = _stamp_of(self.path)
        with reading(self.path) as file:
            self.attributes = attributes_of(file)
            self._layers = tuple(file["layers"])
            if not self.attributes["complete"]:
                raise StoreError(
                    f"{self.path} holds rows {self.attributes['start']} to "
                    f"{self.attributes['stop']} of a run that is not complete. Its statistics will "
                    "be in the file next to the folder."
                )
            self.settings: dict[str, Any] = json.loads(self.attributes["settings"])

    def __getitem__(self, layer: str) -> Moments:
        return self.layer(layer)[0]

    def __contains__(self, layer: object) -> bool:
        return layer in self._layers

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        return f"Statistics({str(self.path)!r}, layers: {', '.join(self._layers)})"

    def layer(self, name: str) -> tuple[Moments, dict[str, Any]]:
        """Return the moments of a layer, and its description as `about` returns it. Raises
        LayerError if there is no such layer, StoreError if the file has changed since it was
        opened.
        """
        with self._reading() as file:
            moments, attributes = read_layer(file, self.path, name)
            return moments, self._all_attributes(attributes)

    def about(self, name: str) -> dict[str, Any]:
        """Return the attributes of the file and of a layer: capture, reduce, shape, row, kind, ...
        Raises LayerError if there is no such layer, StoreError if the file has changed since it was
        opened.
        """
        with self._reading() as file:
            check_layer(file, self.path, name)
            return self._all_attributes(attributes_of(file[f"layers/{name}"]))

    def _reading(self) -> AbstractContextManager[h5py.File]:
        """Open the file, whose checksum was verified by the constructor, if it is unchanged."""
        if _stamp_of(self.path) != self._stamp:
            raise StoreError(f"{self.path} has changed since it was opened; open it again.")
        return reading(self.path, compare=False)

    def _all_attributes(self, attributes: Mapping[str, object]) -> dict[str, object]:
        """Merge the attributes of a layer, those of the file, and settings of the values."""
        settings = {"target": self.settings.get("target"), **model_values(self.settings)}
        return {**settings, **self.attributes, **attributes}


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    """Return inode, size and mtime, which change with a write; None if the file is gone."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def frechet_distance(
    a: Statistics | str | Path, b: Statistics | str | Path, layer: str | None = None
) -> float:
    """Compute the Fréchet distance of two data sets in a layer; the FID, with an Inception model.

        featx.frechet_distance("runs/real/stats.h5", "runs/made/stats.h5", "avgpool")

    Args:
        a: statistics or their path; covariances are divided by n - 1, as in the published code.
        layer: name of the layer; may be None if both have only one in common.

    Raises:
        StoreMismatchError: models, transforms or tensors differ.
        LayerError: one of the files has no such layer.
        ConfigError: `layer` is None although there are several layers or none, or only variances
            are stored.
        StoreError: a file is missing, incomplete or damaged.
    """
    a, b = (x if isinstance(x, Statistics) else open_stats(x) for x in (a, b))
    if layer is None:
        common = [name for name in a if name in b]
        if len(common) != 1:
            names = ", ".join(common) or "none"
            raise ConfigError(f"name the layer: {a.path} and {b.path} have in common: {names}.")
        layer = common[0]
    refuse_other_values(a.about(layer), b.about(layer), f"{a.path} and {b.path}, {layer}")
    return gaussian_distance(a[layer], b[layer])


def summary_of(
    statistics: Statistics, reference: Statistics | None, failures: Sequence[Failure]
) -> dict[str, Any]:
    """Return the result of a finished file as JSON types, with distances to other statistics, if
    any.
    """
    layers, distances = {}, {}
    for name in statistics:
        moments = statistics[name]
        about = statistics.about(name)
        norms, reason = None, None
        if moments.norms is not None:
            norms = norms_summary(moments.norms)
        elif "averaged_from" in about:
            reason = explain_missing_norms(about["averaged_from"], {**about, "reduce": "none"})
        else:
            reason = explain_missing_norms(about["shape"], about)
        layers[name] = {**spread(moments), "token_norms": norms, "no_token_norms": reason}
        if reference is not None and name in reference:
            subject = f"{statistics.path} and {reference.path}, {name}"
            refuse_other_values(about, reference.about(name), subject)
            other = reference[name]
            has_covariances = min(moments.count, other.count) > 1
            distances[name] = gaussian_distance(moments, other) if has_covariances else None
    return {
        "rows": statistics.attributes["stop"],
        "failures": len(failures),
        "file": str(statistics.path),
        "layers": layers,
        "frechet": distances,
    }
