"""Metrics of a probe as printed text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from featx.base import percent_text
from featx.errors import counted

METRICS = (
    ("balanced accuracy", "balanced_accuracy"), ("top-5", "top5"), ("macro-F1", "macro_f1"),
    ("AUROC", "auroc"), ("log-loss", "log_loss"), ("MCC", "mcc"), ("kappa", "kappa"),
    ("ECE", "calibration_error"),
)  # fmt: skip
"""(name for people, name in probe.json) of all metrics but the accuracy, in printed order."""

_SHARES = ("balanced_accuracy", "top5")
"""Metrics that are printed in percent."""


def number_text(value: float | None) -> str:
    """Format a metric that is not printed in percent; '-' if it is not available."""
    return "-" if value is None else f"{value:.3f}"


def metric_text(name: str, value: float | None) -> str:
    """Format a metric of METRICS; '-' if it is not available."""
    if value is not None and name in _SHARES:
        return percent_text(value)
    return number_text(value)


def metrics_text(result: dict[str, Any]) -> str:
    """Return the metrics of the best layer, and why others are not available."""
    texts = [
        f"{label} {metric_text(name, result[name])}"
        + (f" ({result['calibration_bins']} bins)" if name == "calibration_error" else "")
        for label, name in METRICS
        if result[name] is not None
    ]
    lines = [", ".join(texts[i : i + 4]) for i in range(0, len(texts), 4)]
    return "\n".join([*lines, *not_available(result)])


def intervals_text(bootstrap: dict[str, Any]) -> str:
    """Return the bootstrap intervals of all metrics."""
    texts = []
    for label, name in (("accuracy", "accuracy"), *METRICS):
        if (interval := bootstrap["intervals"][name]) is None:
            continue
        low, high = interval
        percent = name in ("accuracy", *_SHARES)
        text = f"{interval_text(interval)} %" if percent else f"{low:.3f} - {high:.3f}"
        texts.append(f"{label} {text}")
    lines = [", ".join(texts[i : i + 3]) for i in range(0, len(texts), 3)]
    undefined = [
        f"{count} resamples without {name} are left out of its interval"
        for name, count in bootstrap["undefined"].items()
    ]
    units = counted(bootstrap["units"], bootstrap["unit"])
    about = f"95 %, {bootstrap['resamples']} resamples of {units}"
    return "\n".join([*lines, about, *undefined])


def seeds_metrics_text(result: dict[str, Any]) -> str:
    """Return mean and standard deviation over the splits of the metrics of the chosen layers."""
    chosen = result["seeds"]["chosen"]
    texts = []
    for label, name in METRICS:
        if (spread := chosen[name]) is not None:
            factor, unit, digits = (100, " %", 1) if name in _SHARES else (1, "", 3)
            mean, std = factor * spread["mean"], factor * spread["std"]
            texts.append(f"{label} {mean:.{digits}f} ± {std:.{digits}f}{unit}")
    return "\n".join(", ".join(texts[i : i + 3]) for i in range(0, len(texts), 3))


def not_available(about: dict[str, Any]) -> list[str]:
    """Return one line per reason for which metrics are not available."""
    names: dict[str, list[str]] = {}
    for label, name in METRICS:
        if (reason := about["not_available"].get(name)) is not None:
            names.setdefault(reason, []).append(label)
    return [f"not available: {', '.join(labels)}; {reason}" for reason, labels in names.items()]


def points_text(share: float, sign: str = "") -> str:
    """Format a difference of shares in percentage points, without a sign of zero."""
    rounded = round(100 * share, 1) or 0.0  # not -0.0
    return f"{rounded:{sign if rounded else ''}.1f}"


def interval_text(interval: Sequence[float]) -> str:
    """Return an interval of shares in percent, without the sign: '85.6 - 96.4'."""
    low, high = (f"{100 * edge:.1f}" for edge in interval)
    return f"{low} - {high}"
