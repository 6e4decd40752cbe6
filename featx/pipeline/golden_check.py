"""Comparison of a model with a golden file, which the user's own code has written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from featx.base import elements
from featx.engine import Engine, explain_missing_plain_path, plain_rows
from featx.errors import ModelError
from featx.models import Golden, read_golden
from featx.pipeline.conformance import (
    FORWARD,
    MAX_LEVELS,
    MEAN_LEVELS,
    pixel_differences,
    row_differences,
)

if TYPE_CHECKING:
    from featx.layers import ChosenLayers

_CHUNK = 4
"""Images of one forward pass."""


def check_golden(engine: Engine, chosen: ChosenLayers, path: str) -> dict[str, Any]:
    """Compare a model and its transform with a golden file; the differences are JSON types."""
    golden = read_golden(path)
    levels = _pixel_levels(engine, golden, path)
    shape = tuple(golden.expected.shape)
    candidates = _candidates(engine, chosen, golden.inputs)
    fitting = {name: rows for name, rows in candidates.items() if tuple(rows.shape) == shape}
    if not fitting:
        listed = ", ".join(f"{name} {tuple(x.shape[1:])}" for name, x in candidates.items())
        raise ModelError(
            f"model.golden={path} has features of shape {shape[1:]}, and {engine.backbone.name} "
            f"gives {listed}. Write what one of these gives, or request the layer that it is."
        )
    errors = {
        name: float(row_differences(rows, golden.expected).errors.max())
        for name, rows in fitting.items()
    }
    name = min(errors, key=lambda name: errors[name])
    if errors[name] > FORWARD["fp32"]:
        raise ModelError(
            f"{engine.backbone.name} with the weights {engine.backbone.weights} is not the model "
            f"of model.golden={path}: on the inputs in the file its {name} differs by "
            f"{errors[name]:.2g} (relative L2 of the worst of {len(golden.inputs)} images); "
            f"expected at most {FORWARD['fp32']:g}. Names and shapes agree, so it may be a "
            "look-alike with other padding, epsilon or activation, or another checkpoint. Nothing "
            "was computed."
        )
    return {
        "images": len(golden.inputs),
        "levels": levels,
        "compared": name,
        "error": float(f"{errors[name]:.3g}"),
    }


def _pixel_levels(engine: Engine, golden: Golden, path: str) -> dict[str, float]:
    """Differences of the transforms in levels of 255, as JSON types."""
    preprocess = engine.backbone.preprocess
    own = torch.stack([preprocess.reference(Image.fromarray(image)) for image in golden.images])
    if own.shape != golden.inputs.shape:
        raise ModelError(
            f"model.golden={path} has inputs of {tuple(golden.inputs.shape[2:])} pixels, and "
            f"{engine.backbone.name} takes {tuple(own.shape[2:])}. model.input_size sets the size."
        )
    differences = pixel_differences(own, golden.inputs, preprocess.std)
    largest, mean = float(differences.largest.max()), float(differences.mean.max())
    most = MAX_LEVELS.get(preprocess.interpolation, min(MAX_LEVELS.values()))
    if largest > most or mean > MEAN_LEVELS:
        raise ModelError(
            f"the transform of {engine.backbone.name} ({preprocess.describe()}) is not that of "
            f"model.golden={path}: pixels differ by up to {largest:.0f} of 255 levels and by "
            f"{mean:.2g} on average; expected at most {most:.0f} and {MEAN_LEVELS:g}. "
            "model.transform changes single values. Nothing was computed."
        )
    return {"max": float(f"{largest:.3g}"), "mean": float(f"{mean:.3g}")}


def _candidates(
    engine: Engine, chosen: ChosenLayers, inputs: torch.Tensor
) -> Mapping[str, torch.Tensor]:
    """Compute the output, the embedding and the requested layers of the model for some inputs."""
    batches: dict[str, list[torch.Tensor]] = {}
    compared = [pair for pair in chosen if not explain_missing_plain_path(*pair)]
    library = engine.backbone.embedding
    for start in range(0, len(inputs), _CHUNK):
        x = inputs[start : start + _CHUNK].to(engine.device)
        with engine.named_failure(x), torch.no_grad():
            rows = {
                "output" + "".join(f".{step}" for step in way): value
                for way, value in elements(engine.module(x.clone())).items()
            }
            if library is not None:
                rows["embedding"] = library.compute(x.clone())
        if compared:
            rows |= plain_rows(engine, compared, x)
        for name, value in rows.items():
            batches.setdefault(name, []).append(value.float().cpu())
    return {name: torch.cat(rows) for name, rows in batches.items()}
