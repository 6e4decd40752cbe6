"""Which layer is best, and how good a choice like that is on rows it has not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from featx.analysis.probe.metrics import Predictions


def best_layer(layers: Mapping[str, Mapping[str, Any]], method: str) -> str:
    """The layer with the highest validation accuracy of a method, of equals the smallest loss.

    Args:
        layers: name -> what probe.json says of it.
        method: that decides.
    """
    return max(
        layers,
        key=lambda name: _merit(
            layers[name][method]["validation_accuracy"], layers[name][method]["validation_loss"]
        ),
    )


def _merit(accuracy: float, loss: float) -> tuple[float, float]:
    """What is compared. Means over folds of equal shares may differ in their last bits."""
    return round(accuracy, 12), -round(loss, 12)


@dataclass(frozen=True)
class _Chosen:
    merit: tuple[float, float]
    layer: str
    predictions: Predictions


class LayerChoice:
    """The layer that each fold chooses on its own validation rows.

    With k-fold, the validation rows of one fold are tested in another, so the accuracy of the one
    layer that is best over all folds is optimistic. Chosen anew within the training rows of every
    fold (nested cross-validation: M. Stone, Cross-Validatory Choice and Assessment of Statistical
    Predictions, JRSS B 36, 1974), the layers are tested on rows that had no part in the choice.

    Args:
        num_folds: how many choices there are.
    """

    def __init__(self, num_folds: int) -> None:
        self._best: list[_Chosen | None] = [None] * num_folds

    def offer(
        self,
        layer: str,
        validation: Sequence[tuple[float, float]],
        predictions: Sequence[Predictions],
    ) -> None:
        """Take a layer where it is better than those before it.

        Args:
            layer: its name.
            validation: accuracy and loss on the validation rows, of each fold.
            predictions: on the test rows, of each fold.
        """
        for fold, ((accuracy, loss), tested) in enumerate(
            zip(validation, predictions, strict=True)
        ):
            merit, best = _merit(accuracy, loss), self._best[fold]
            if best is None or merit > best.merit:
                self._best[fold] = _Chosen(merit, layer, tested)

    @property
    def chosen(self) -> list[tuple[str, Predictions]]:
        """The layer of each fold, and its predictions."""
        return [(best.layer, best.predictions) for best in self._best if best is not None]
