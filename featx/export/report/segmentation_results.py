"""Results of a probe of the classes of pixels, for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from featx.export.report.probe_metrics import metric_texts
from featx.export.selection import as_utf8

METRICS = {
    "miou": "mIoU",
    "pixel_accuracy": "Pixel accuracy",
    "mean_accuracy": "Mean accuracy",
    "patch_miou": "Patch mIoU",
}
"""Name in probe.json -> name for people of the metrics, the first one is the answer."""

CLASSES_SHOWN = 40
"""Maximum number of classes in the table, those with most test pixels."""


@dataclass(frozen=True)
class ClassResult:
    """Result of one class.

    Attributes:
        name: the class.
        share: share of the test pixels that are of it.
        iou: intersection over union.
        accuracy: share of its pixels that are right.
    """

    name: str
    share: float
    iou: float
    accuracy: float


@dataclass(frozen=True)
class SegmentationResults:
    """Contents of probe.json of such a probe.

    Attributes:
        layer: best layer.
        metrics: (name for people, value) at the top, the answer first.
        interval: 95 % interval of the answer, or None.
        rows: number of test images.
        crop: (height, width) in pixels of the part of an image that was predicted.
        layer_of_folds: (layer, number of folds that chose it), empty for one split.
        headers: names of the metrics.
        layers: (layer, width, grid, values of the metrics).
        classes: results of the classes with most test pixels.
        num_classes: number of all classes with a test pixel.
        notes: notes of the job.
    """

    layer: str
    metrics: list[tuple[str, str]]
    interval: tuple[float, float] | None
    rows: int
    crop: tuple[int, int]
    layer_of_folds: list[tuple[str, int]]
    headers: list[str]
    layers: list[tuple[str, int, tuple[int, int], list[str]]]
    classes: list[ClassResult]
    num_classes: int
    notes: tuple[str, ...]


def segmentation_results(result: Mapping[str, Any]) -> SegmentationResults:
    """Convert probe.json of such a probe.

    Args:
        result: contents of probe.json.

    Raises:
        LookupError, TypeError, ValueError: it is malformed.
    """
    interval, crop = result["interval"], result["masks"]["crop"]
    pixels = [int(count) for count in result["pixels_of_classes"]]
    order = sorted((i for i, count in enumerate(pixels) if count), key=lambda i: -pixels[i])
    classes = [
        ClassResult(
            as_utf8(str(result["classes"][i])),
            pixels[i] / sum(pixels),
            float(result["iou"][i]),
            float(result["accuracy_of_classes"][i]),
        )
        for i in order[:CLASSES_SHOWN]
    ]
    layers = [
        (
            as_utf8(str(layer)),
            int(about["features"]),
            (int(about["grid"][0]), int(about["grid"][1])),
            metric_texts(about["linear"], METRICS),
        )
        for layer, about in result["layers"].items()
    ]
    return SegmentationResults(
        layer=as_utf8(str(result["layer"])),
        metrics=list(zip(METRICS.values(), metric_texts(result, METRICS), strict=True)),
        interval=None if interval is None else (float(interval[0]), float(interval[1])),
        rows=int(result["rows"]),
        crop=(int(crop[0]), int(crop[1])),
        layer_of_folds=Counter(map(str, result.get("layer_of_folds", ()))).most_common(),
        headers=list(METRICS.values()),
        layers=layers,
        classes=classes,
        num_classes=len(order),
        notes=tuple(as_utf8(str(note)) for note in result["notes_on_rows"]),
    )
