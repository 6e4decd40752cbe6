"""All metrics of a probe for the report, with their intervals and spreads as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from featx.export.report.html import DASH

_SHARES = {"accuracy": "Accuracy", "balanced_accuracy": "Balanced accuracy", "top5": "Top-5"}
"""Name in probe.json -> name for people of metrics that are shown in percent."""

CLASS_METRICS = {
    **_SHARES,
    "macro_f1": "Macro-F1",
    "auroc": "AUROC",
    "log_loss": "Log-loss",
    "mcc": "MCC",
    "kappa": "Kappa",
    "calibration_error": "Calibration error",
}
"""Name in probe.json -> name for people of the metrics of classes."""


@dataclass(frozen=True)
class Metric:
    """One metric as text.

    Attributes:
        name: name for people.
        value: its value, or DASH.
        interval: its 95 % interval, or ''.
        spread: mean and standard deviation over several splits, or ''.
        span: smallest and largest value over several splits, or ''.
        reason: reason for which it is not available, or ''.
    """

    name: str
    value: str
    interval: str = ""
    spread: str = ""
    span: str = ""
    reason: str = ""


@dataclass(frozen=True)
class SeedsAccuracy:
    """Accuracy over the splits of several seeds.

    Attributes:
        count: number of splits.
        mean: mean accuracy of the layers that the splits chose, in [0, 1].
        std: its standard deviation.
        low: smallest accuracy.
        high: largest accuracy.
        layers: (layer, number of splits that chose it), the most frequent first.
        layer: layer that the others are compared with.
    """

    count: int
    mean: float
    std: float
    low: float
    high: float
    layers: tuple[tuple[str, int], ...]
    layer: str


def metrics_of(about: Mapping[str, Any], result: Mapping[str, Any] | None) -> tuple[Metric, ...]:
    """Return the metrics of one entry of probe.json.

    Args:
        about: the entry, with all metrics.
        result: probe.json as a whole, for intervals and spreads of the best layer; None without.

    Raises:
        LookupError, TypeError, ValueError: it is malformed.
    """
    bootstrap = None if result is None else result["bootstrap"]
    seeds = None if result is None else result["seeds"]
    metrics = []
    for name, label in CLASS_METRICS.items():
        interval = None if bootstrap is None else bootstrap["intervals"][name]
        spread = None if seeds is None else seeds["chosen"][name]
        metrics.append(
            Metric(
                label,
                _metric_text(name, about[name]),
                "" if interval is None else _range_text(name, interval[0], interval[1]),
                "" if spread is None else _spread_text(name, spread),
                "" if spread is None else _range_text(name, spread["min"], spread["max"]),
                str(about["not_available"].get(name, "")),
            )
        )
    return tuple(metrics)


def repeated_of(seeds: Mapping[str, Any] | None) -> SeedsAccuracy | None:
    """Convert the entry `seeds` of probe.json; None without several seeds."""
    if seeds is None:
        return None
    accuracy = seeds["chosen"]["accuracy"]
    return SeedsAccuracy(
        count=len(seeds["seeds"]),
        mean=float(accuracy["mean"]),
        std=float(accuracy["std"]),
        low=float(accuracy["min"]),
        high=float(accuracy["max"]),
        layers=tuple(Counter(map(str, seeds["layer_of_splits"])).most_common()),
        layer=str(seeds["layer"]),
    )


def _metric_text(name: str, value: float | None) -> str:
    """Format a metric: percent for shares, three decimals for others; DASH if it is None."""
    if value is None:
        return DASH
    return f"{100 * float(value):.1f}\u202f%" if name in _SHARES else f"{float(value):.3f}"


def metric_texts(about: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return metrics of an entry of probe.json that are no shares as text; DASH for None."""
    return [DASH if about[name] is None else f"{float(about[name]):.3f}" for name in names]


def _range_text(name: str, low: float, high: float) -> str:
    """Format two ends of an interval."""
    if name in _SHARES:
        return f"{100 * float(low):.1f} {DASH} {100 * float(high):.1f}"
    return f"{float(low):.3f} {DASH} {float(high):.3f}"


def _spread_text(name: str, spread: Mapping[str, Any]) -> str:
    """Format mean and standard deviation."""
    mean, std = float(spread["mean"]), float(spread["std"])
    if name in _SHARES:
        return f"{100 * mean:.1f} ± {100 * std:.1f}"
    return f"{mean:.3f} ± {std:.3f}"
