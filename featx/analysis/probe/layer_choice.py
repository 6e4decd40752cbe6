"""Choice of the best layer, and nested cross-validation of that choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from featx.analysis.probe.metrics import ProbePredictions


def best_layer(layers: Mapping[str, Mapping[str, Any]], method: str) -> str:
    """Return the layer with the highest validation accuracy.

    Among layers with equal accuracy, the smallest loss decides.
    """
    return max(
        layers,
        key=lambda name: _merit(
            layers[name][method]["validation_accuracy"], layers[name][method]["validation_loss"]
        ),
    )


def _merit(accuracy: float, loss: float) -> tuple[float, float]:
    """Return the sort key, rounded because means over folds may differ in their last bits."""
    return round(accuracy, 12), -round(loss, 12)


@dataclass(frozen=True)
class Chosen:
    """Layer that a fold chose.

    Attributes:
        layer: name of the layer.
        merit: its accuracy on the validation rows, and the loss with a minus.
        predictions: its predictions for the test rows.
    """

    layer: str
    merit: tuple[float, float]
    predictions: ProbePredictions


class LayerChoice:
    """Layer that each fold chooses on its own validation rows.

    In k-fold cross-validation, the validation rows of one fold are test rows of another, so the
    accuracy of the layer that is best over all folds is optimistic. If each fold chooses its layer
    from its own training rows (nested cross-validation: M. Stone, Cross-Validatory Choice and
    Assessment of Statistical Predictions, JRSS B 36, 1974), test rows have no influence on the
    choice.

    Args:
        num_folds: number of folds.
    """

    def __init__(self, num_folds: int) -> None:
        self._best: list[Chosen | None] = [None] * num_folds

    def offer(
        self,
        layer: str,
        validation: Sequence[tuple[float, float]],
        predictions: Sequence[ProbePredictions],
    ) -> None:
        """Compare a layer with the best one so far, in every fold."""
        for fold, ((accuracy, loss), tested) in enumerate(
            zip(validation, predictions, strict=True)
        ):
            merit, best = _merit(accuracy, loss), self._best[fold]
            if best is None or merit > best.merit:
                self._best[fold] = Chosen(layer, merit, tested)

    @property
    def chosen(self) -> list[Chosen]:
        """Choice of each fold."""
        return [best for best in self._best if best is not None]
