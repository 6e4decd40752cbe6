"""Comparisons of a model before a run starts, with its own library and with a golden file.

Images of the data set go through the path of the library; a golden file has images of its own, and
was written by the user's own code. What a backbone provides for the library's path:
`preprocess.reference`, the library's own transform; `module`, whose forward pass is the library's;
and `embedding.compute`, if the library defines the embedding.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from PIL import Image

from featx.base import elements, log_message
from featx.config import Config
from featx.engine import Engine, explain_missing_plain_path, plain_rows
from featx.errors import ModelError
from featx.images import Loader, is_decoded_reduced
from featx.models import Golden, read_golden
from featx.pipeline.conformance import (
    FORWARD,
    MAX_LEVELS,
    MEAN_LEVELS,
    Compared,
    Conformance,
    RowDifferences,
    judge,
    pixel_differences,
    row_differences,
)
from featx.types import ImageFault, LayerSpec, Listing, Source, ViewSource

if TYPE_CHECKING:
    from featx.layers import ChosenLayers

NUM_COMPARED_IMAGES = 8
"""Images that go through the library's own transform."""

_FORWARD_IMAGES = 4
"""Images of the judgement of the forward pass. A wrong kernel or hook differs in every image."""

_GOLDEN_BATCH = 4
"""Images of one forward pass of a golden file."""


@dataclass(frozen=True)
class TrialImages:
    """Images of the data set that were loaded as the run will load them.

    Attributes:
        images: (n, 3, H, W), uint8 in [0, 255] or normalised float32.
        is_reference: whether the run uses the library's own transform.
        sizes: with windows, (height, width) of each whole image; `images` are windows then.
    """

    rows: Sequence[int]
    images: torch.Tensor
    source: Source
    listing: Listing
    is_reference: bool
    sizes: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class PlainPath:
    """Pixels and rows of some trial images, by their `numbers`, on the library's own path.

    `pixels` are (n, 3, H, W) float32 by its transform. Rows of the first images are by layer:
    `on_same_pixels` those of the pixels of the run, `end_to_end` those of `pixels`; `not_compared`
    has the reason why a layer is in neither.
    """

    numbers: Sequence[int]
    pixels: torch.Tensor
    on_same_pixels: Mapping[str, torch.Tensor]
    end_to_end: Mapping[str, torch.Tensor]
    not_compared: Mapping[str, str]


def take_plain_path(
    config: Config,
    engine: Engine,
    chosen: ChosenLayers,
    loader: Loader,
    trial: TrialImages,
) -> PlainPath:
    """Send some trial images through the library's own transform and forward pass.

    The engine must have no settings configured yet, since these change its weights.
    """
    why_not = {
        point.name: why
        for point, reduce in chosen
        if (why := explain_missing_plain_path(point, reduce))
    }
    compared = [pair for pair in chosen if pair[0].name not in why_not]

    # Some trial images, at even distances, go through the library's own transform.
    num_images, num_wanted = len(trial.rows), NUM_COMPARED_IMAGES
    numbers = sorted({i * num_images // num_wanted for i in range(num_wanted) if num_images})
    if trial.is_reference:
        pixels = trial.images[numbers]
    else:
        loaded = list(loader.results([trial.rows[i] for i in numbers], by_library=True))
        images = [x for x in loaded if isinstance(x, torch.Tensor)]
        numbers = [i for i, x in zip(numbers, loaded, strict=True) if isinstance(x, torch.Tensor)]
        pixels = torch.stack(images) if images else trial.images[:0].float()

    if not compared or not numbers:
        return PlainPath(numbers, pixels, {}, {}, why_not)
    num_compared = engine.captures.num_compared
    library_pixels = engine.normalise(pixels[:num_compared])
    if trial.is_reference:
        rows = _plain_rows(config, engine, compared, library_pixels)
        return PlainPath(numbers, pixels, rows, rows, why_not)
    num_forward = min(_FORWARD_IMAGES, num_compared)
    run_pixels = engine.normalise(trial.images[numbers[:num_forward]])
    # One pass for both: on a CPU a pass has costs that do not depend on the number of images.
    rows = _plain_rows(config, engine, compared, torch.cat([run_pixels, library_pixels]))
    same = {name: values[: len(run_pixels)] for name, values in rows.items()}
    end_to_end = {name: values[len(run_pixels) :] for name, values in rows.items()}
    return PlainPath(numbers, pixels, same, end_to_end, why_not)


def _plain_rows(
    config: Config, engine: Engine, chosen: ChosenLayers, x: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Rows of normalised images by the plain path, in batches that fit on the device."""
    batch_size = config.batch_size
    size = len(x) if batch_size == "auto" else min(len(x), int(batch_size))
    try:
        batches = [plain_rows(engine, chosen, batch) for batch in torch.split(x, size)]
    except torch.OutOfMemoryError:  # the batch size of the run is found later
        batches = [plain_rows(engine, chosen, batch) for batch in torch.split(x, 1)]
    # A layer that is not called in every batch makes the run itself stop, with its name.
    names = [name for name in batches[0] if all(name in rows for rows in batches)]
    return {name: torch.cat([rows[name] for rows in batches]) for name in names}


def compare_with_plain_path(
    engine: Engine,
    plain: PlainPath | None,
    golden: Mapping[str, object] | None,
    trial: TrialImages,
    trial_rows: Mapping[str, torch.Tensor] | None,
    specs: Sequence[LayerSpec],
    mode: str,
) -> Conformance | None:
    """Compare the engine at the settings of the run with the plain path; None if there is neither.

    `plain` is what the library's own path gave, `golden` the differences to `model.golden`, and
    `trial_rows` the rows of all trial images at these settings, if they are known. Raises
    ModelError if a promise is broken, and mode is strict.
    """
    judged = None
    if plain is not None:
        judged = judge(_compared(engine, plain, trial, trial_rows, specs))
        enforce(judged, mode)
    if golden is not None:
        judged = judged or Conformance({}, "")
        text = f"{golden['compared']} of model.golden within {golden['error']:.1e}"
        line = f"{judged.line}\n{text}" if judged.line else text
        judged = replace(judged, differences={**judged.differences, "golden": golden}, line=line)
    return judged


def _compared(
    engine: Engine,
    plain: PlainPath,
    trial: TrialImages,
    trial_rows: Mapping[str, torch.Tensor] | None,
    specs: Sequence[LayerSpec],
) -> Compared:
    rows = _engine_rows(engine, plain, trial, trial_rows)
    # A class index or a count jumps where pixels hardly differ.
    integer_layers = {spec.name for spec in specs if "int" in spec.compute_dtype}
    preprocess = engine.backbone.preprocess
    pixels = None
    if not trial.is_reference:
        run_pixels = engine.normalise(trial.images[plain.numbers]).cpu()
        pixels = pixel_differences(run_pixels, plain.pixels, preprocess.std)
    source = trial.source
    keys = [bytes(trial.listing.keys[trial.rows[i]]) for i in plain.numbers]
    resize = preprocess.resize

    def is_reduced(number: int) -> bool:
        if isinstance(source, ViewSource) or resize is None:
            return False  # boxes and views are of images of full size
        at_least = resize if isinstance(resize, int) else max(resize)
        try:
            return is_decoded_reduced(source.read(keys[number]), at_least)
        except (OSError, ImageFault):
            return False

    return Compared(
        keys=[key.decode("utf-8", "replace") for key in keys],
        precision=engine.compute.precision,
        interpolation=preprocess.interpolation,
        pixels=pixels,
        forward=_differences(rows, plain.on_same_pixels),
        end_to_end=_differences(rows, plain.end_to_end, integer_layers),
        not_compared=plain.not_compared,
        is_reduced=is_reduced,
    )


def _differences(
    rows: Mapping[str, torch.Tensor],
    plain: Mapping[str, torch.Tensor],
    excluded: Container[str] = (),
) -> dict[str, RowDifferences]:
    """Differences of the rows of each layer, apart from those in `excluded`."""
    return {
        name: row_differences(rows[name][: len(values)], values)
        for name, values in plain.items()
        if name not in excluded
    }


def _engine_rows(
    engine: Engine,
    plain: PlainPath,
    trial: TrialImages,
    trial_rows: Mapping[str, torch.Tensor] | None,
) -> Mapping[str, torch.Tensor]:
    """Rows of the compared images by the engine."""
    if not plain.end_to_end:
        return {}
    if trial_rows is not None:
        return {name: rows[plain.numbers] for name, rows in trial_rows.items()}
    images = trial.images[plain.numbers]
    # A compiled model takes batches of one size only; others would compile it again.
    size = engine.compute.batch_size
    size = size if engine.compute.compile else min(size, len(images))
    rows_of_batches: dict[str, list[torch.Tensor]] = {}
    for start in range(0, len(images), size):
        batch = images[start : start + size]
        full_batch = torch.cat([batch] * -(-size // len(batch)))[:size]
        for name, rows in engine.run(full_batch).items():
            rows_of_batches.setdefault(name, []).append(rows[: len(batch)].clone())
    return {name: torch.cat(rows) for name, rows in rows_of_batches.items()}


def enforce(conformance: Conformance, mode: str) -> None:
    """Log a warning if a run breaks a promise; raise ModelError if mode is strict."""
    for note in conformance.notes:
        log_message(f"note: {note}")
    if not conformance.broken:
        return
    sentences = " ".join(conformance.broken)
    if mode == "strict":
        raise ModelError(
            "this run would give other features than the model's own library, compared before its "
            f"start. {sentences} decode=reference takes the library's own pixels, precision=fp32 "
            "fold_batchnorm=false compile=false its own forward pass; conformance.mode=warn runs "
            "as it is. With a model of a library this is an error of featx: please report it."
        )
    log_message(sentences, level="warning")


def check_golden(engine: Engine, chosen: ChosenLayers, path: str) -> dict[str, object]:
    """Compare a model and its transform with a golden file; the differences are JSON types."""
    golden = read_golden(path)
    levels = _pixel_levels(engine, golden, path)
    shape = tuple(golden.expected.shape)
    candidates = _golden_candidates(engine, chosen, golden.inputs)
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


def _golden_candidates(
    engine: Engine, chosen: ChosenLayers, inputs: torch.Tensor
) -> Mapping[str, torch.Tensor]:
    """Compute the output, the embedding and the requested layers of the model for some inputs."""
    batches: dict[str, list[torch.Tensor]] = {}
    compared = [pair for pair in chosen if not explain_missing_plain_path(*pair)]
    library = engine.backbone.embedding
    for start in range(0, len(inputs), _GOLDEN_BATCH):
        x = inputs[start : start + _GOLDEN_BATCH].to(engine.device)
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
