"""Attributions: heat maps of a gradient target (a scalar of the model) over the pixels of images.

    saliency               max over channels of |d target / d pixel|
    input_x_gradient       gradient times normalised input, summed over channels
    gradcam                activations of a layer, weighted by their mean gradients
    guided_gradcam         Grad-CAM resized to the input, times guided backpropagation
    integrated_gradients   gradients between a baseline and the image, by Captum
    occlusion              decrease of the target where a square is hidden, by Captum

The first three share one forward and backward pass; Captum would need a forward pass for the
classes and another pass for each method. tests/analysis/test_attribution.py compares the results
with Captum's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from featx.analysis.attribution.methods import (
    Explained,
    baseline,
    captum_version,
    capture_output,
    check_rectifiers,
    grad_cam,
    guided_rectifiers,
    integrated_gradients,
    layer_map_view,
    occlusion,
)
from featx.config import BY_CAPTUM, DEFAULT_BASELINE, OF_A_LAYER, AttributeConfig, ReduceConfig
from featx.engine import (
    COMPUTE_DTYPES,
    AttachedCaptures,
    BufferSnapshot,
    Compute,
    Engine,
    Formats,
    PreparedWeights,
    TimedRows,
    check_row,
    spec_of,
)
from featx.errors import ConfigError, LayerError, ModelError
from featx.layers import (
    CapturePoint,
    ChosenLayers,
    Selection,
    Trace,
    check_positions,
    find_stages,
    has_known_positions,
    logits_of,
    named_point,
    target_classes,
    values_of_classes,
)
from featx.models import Backbone
from featx.types import LayerSpec

NUMBERS = ("target", "score", "probability")
"""Datasets with one number per row, stored next to the heat maps: the explained class, its value,
and its softmax probability."""

DELTA = "integrated_gradients_delta"
"""Dataset with the convergence error of integrated gradients: their sum minus the expected
value."""

_OF_THE_INPUT = ("saliency", "input_x_gradient")
"""Methods that need only the gradient of the input."""


class Attributor(Engine):
    """Engine whose captures are attributions: one heat map per method, and the explained numbers.

    Args:
        store_dtype: dtype of the heat maps in the store.
        layer: name of the module of gradcam and guided_gradcam; None takes the last stage, or the
            stage before it of a transformer with a class token.

    Raises:
        ConfigError: the window does not fit into the image.
        MissingExtraError: a method needs Captum, which is not installed.
    """

    uses_fp32_only = True
    can_be_replicated = False

    def __init__(
        self,
        backbone: Backbone,
        device: torch.device,
        store_dtype: str,
        target: str | int,
        options: AttributeConfig,
        layer: str | None = None,
    ) -> None:
        super().__init__(backbone, device, store_dtype, target)
        height, width = backbone.preprocess.crop
        window = options.window or max(1, min(height, width) // 7)
        if window > min(height, width):
            raise ConfigError(
                f"attribute.window={window} does not fit into the {height} x {width} pixels that "
                f"{backbone.name} sees."
            )
        if "occlusion" in options.methods:
            options = replace(options, window=window)
        self._captum = captum_version() if set(BY_CAPTUM) & set(options.methods) else ""
        self._options, self._layer_name = options, layer
        self._layer: CapturePoint | None = None
        self._maps: CapturePoint | None = None
        self._to_map: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
        self._to_feature_map: Callable[[torch.Tensor], torch.Tensor] = lambda x: x

    @property
    def takes_gradients(self) -> bool:
        """Always True; as a consequence, attributions are never compiled."""
        return True

    def select(self, traced: Trace) -> Selection:
        """Select one capture per method and one per number, named like their datasets. Raises
        LayerError if `layers` or attribute.feature_map_layer names no module, or the model has no
        stages.
        """
        methods = self._options.methods
        if set(OF_A_LAYER) & set(methods):
            layer = self._layer_name or self._last_stage(traced)
            self._layer = _module_point("layers", layer, traced)
        if self._options.feature_map_layer is not None:
            self._maps = _module_point(
                "attribute.feature_map_layer", self._options.feature_map_layer, traced
            )
        points = [self._point(method) for method in methods]
        if "integrated_gradients" in methods:
            integrated = self._point("integrated_gradients")
            points.append(replace(integrated, name=DELTA, dtype="float32"))
        of_no_class = self._target in ("entropy", "logsumexp")
        numbers = ("score",) if of_no_class else NUMBERS
        about = f"number (target {self._target})"
        points += [CapturePoint(name, "", about, dtype="float32") for name in numbers]
        return Selection([(point, ReduceConfig()) for point in points], [])

    def _point(self, method: str) -> CapturePoint:
        """Return the capture of a method.

        Its attribute `capture` lists everything that changes its values.
        """
        settings = [f"target {self._target}"]
        settings += [f"{key} {value}" for key, value in self._options.settings(method).items()]
        settings += [f"captum {self._captum}"] if method in BY_CAPTUM else []
        layer = self._layer.name if self._layer and method in OF_A_LAYER else ""
        return CapturePoint(method, layer, f"attribution ({', '.join(settings)})")

    def _last_stage(self, traced: Trace) -> str:
        """Return the last stage; for a transformer with a class token, the stage before.

        After the last block of such a transformer only the class token is used, so the gradients of
        the patches are zero.
        """
        try:
            named = self.backbone.stages or ()
            are_called = bool(named) and all(stage in traced.by_module for stage in named)
            stages = list(named) if are_called else find_stages(traced, self.backbone.classifier)
        except LayerError as error:
            raise LayerError(
                "no stages were found in this model; give 'layers=[NAME]', the last layer "
                "that still is a map. job=layers lists the layers."
            ) from error
        shapes = list(traced.by_module[traced.names[stages[-1]]][0].outputs.values())
        tokens = len(shapes) == 1 and len(shapes[0]) == 3 and self.backbone.num_prefix_tokens
        return stages[-2] if tokens and len(stages) > 1 else stages[-1]

    def attach_captures(self, chosen: ChosenLayers) -> None:
        """Prepare the computation, and check that each row depends only on its own image. Raises
        LayerError if the layer is not a map, or gets no gradient, ModelError if the model has no
        logits or mixes rows, or guided backpropagation does not support its activations.
        """
        self.captures = AttachedCaptures(tuple(point for point, _ in chosen))
        self.weights = PreparedWeights(self, self.captures, needs_gradients=True)
        x = self.trial_batch()
        if "guided_gradcam" in self._options.methods:
            check_rectifiers(self.module, x)
        if self._maps is not None:
            with (
                self.named_failure(x),
                torch.no_grad(),
                capture_output(self.module, self._maps) as outputs,
            ):
                self.module(x.clone())
            self._to_feature_map = layer_map_view(self.row_layout(self._maps, outputs[0]))
            self._check_positions(self._maps, outputs[0], self._to_feature_map)
        with self._short_settings():
            if self._layer is not None:
                self._to_map = self._map_of_layer(x)
            self.configure_compute(Compute("fp32", False, False, len(x)))
            values = self._pass(x)
            buffers = BufferSnapshot(self.module)
            regrouped_values = self._pass(self.regroup(x)[-1])
            buffers.check()
            # Occlusion is a small difference of large logits, so the tolerance is relative to the
            # logits.
            with self.named_failure(x), torch.no_grad():
                logits = logits_of(self.module(x.clone()))
            finite = logits[torch.isfinite(logits)].abs()
            rounding = 1e-5 * float(finite.max()) if len(finite) else 0.0
        for name in set(self._options.methods) & set(values):
            check_row(name, values[name][0], regrouped_values[name][-1], rounding)

    def configure_compute(self, compute: Compute, cast_once: bool = True) -> None:
        """Set how attributions are computed; may be called again with other settings."""
        self._prepare_weights(compute, cast_once)
        self._forward = self._attributions

    def formats(self, images: torch.Tensor, fold_batchnorm: bool = True) -> Formats:
        """Compare memory formats on two images, without folding and without values.

        Folding is left out because comparing heat maps takes hundreds of passes.
        """
        with self._short_settings():
            return replace(super().formats(images[:2], fold_batchnorm=False), values=None)

    def time_passes(
        self,
        images: torch.Tensor,
        repeats: int = 3,
        enough_s: float = float("inf"),
        known_rows: Mapping[str, torch.Tensor] | None = None,
    ) -> TimedRows:
        """Return rows of the first two images, and the time that they take in one batch."""
        # Some methods take hundreds of passes, and a rough value is enough to choose the size of
        # parts.
        return super().time_passes(images[:2], repeats=1)

    def specs(self, chosen: ChosenLayers) -> list[LayerSpec]:
        """Return shape and dtype of a row of each dataset."""
        with self._short_settings():
            values = self._pass(self.noise(3))
        compute_dtype = COMPUTE_DTYPES[self.compute.precision]
        return [
            spec_of(point, config, values[point.name], compute_dtype) for point, config in chosen
        ]

    @contextlib.contextmanager
    def _short_settings(self) -> Iterator[None]:
        """Use few integration steps, large occlusion squares and no labels inside the block.

        For checks with noise: they need only the shapes, and whether rows depend on each other.
        """
        full_options, options = self._options, self._options
        self._labels = None
        if "integrated_gradients" in options.methods:
            options = replace(options, steps=2)
        if "occlusion" in options.methods:
            options = replace(options, window=(min(self.backbone.preprocess.crop) + 1) // 2)
        self._options = options
        try:
            yield
        finally:
            self._options = full_options

    def _attributions(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        maps, output = self._plain_gradients(x)
        classes = target_classes(output, self._target, self._labels)
        score = values_of_classes(output, self._target, classes)
        explain = Explained(self.module, self._target)
        numbers = {"score": score}
        if classes is not None:
            numbers["target"] = classes
            probabilities = output.float().softmax(1).gather(1, classes[:, None])
            numbers["probability"] = probabilities[:, 0]
        if "guided_gradcam" in self._options.methods:
            with guided_rectifiers(self.module), torch.enable_grad():
                leaf = x.detach().requires_grad_()
                gradient = torch.autograd.grad(explain(leaf, classes).sum(), leaf)[0]
            cam = F.interpolate(
                maps["gradcam"][:, None], size=x.shape[2:], mode="bilinear", align_corners=False
            )
            maps["guided_gradcam"] = (gradient * cam).sum(1)
        if "integrated_gradients" in self._options.methods:
            steps = self._options.settings("integrated_gradients")["steps"]
            maps["integrated_gradients"], numbers[DELTA] = integrated_gradients(
                explain, x, classes, self._baseline(x), steps
            )
        if "occlusion" in self._options.methods:
            settings = self._options.settings("occlusion")
            maps["occlusion"] = occlusion(
                explain, x, classes, self._baseline(x), settings["window"], settings["stride"]
            )
        names = {point.name for point in self.captures.points}
        stored = {
            name: self.collector.cast(name, value) for name, value in maps.items() if name in names
        }
        return stored | {n: value.float() for n, value in numbers.items() if n in names}

    def _plain_gradients(self, x: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Compute the methods that share one backward pass, and the logits.

        Saliency: K. Simonyan, A. Vedaldi, A. Zisserman, Deep Inside Convolutional Networks, 2014.
        """
        reads_input = bool(set(_OF_THE_INPUT) & set(self._options.methods))
        logits, outputs, gradients = self._backward(x, reads_input)
        maps = {}
        if reads_input:
            gradient = gradients.pop(0)
            if gradient is None:
                raise ModelError(
                    f"target={self._target} has no gradient at the images: the model computes "
                    "without gradients, as in torch.no_grad() and with quantised layers. Use "
                    "attribute.method=occlusion, which needs none."
                )
            maps["saliency"] = gradient.abs().amax(1)
            maps["input_x_gradient"] = (gradient * x).sum(1)
        if outputs:
            maps["gradcam"] = grad_cam(self._to_map(outputs[0]), self._to_map(gradients[0]))
        return maps, logits

    def _backward(
        self, x: torch.Tensor, reads_input: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[Any]]:
        """Run a pass forward and back.

        If the gradient of the input is not read, the graph begins at the layer. Return the logits;
        the output of the layer, if there is one; and the gradients of the input, if it is read, and
        of that output, None where the target does not depend on them.
        """
        with torch.enable_grad(), capture_output(self.module, self._layer) as outputs:
            leaf = x.detach().requires_grad_(reads_input)
            logits = logits_of(self.module(leaf.clone()))  # a model may write to its input
            classes = target_classes(logits, self._target, self._labels)
            score = values_of_classes(logits, self._target, classes).sum()
            sources = [leaf] * reads_input + outputs
            gradients: list[Any] = [None] * len(sources)
            if sources and score.requires_grad:
                gradients = [*torch.autograd.grad(score, sources, allow_unused=True)]
        return logits.detach(), [output.detach() for output in outputs], gradients

    def _map_of_layer(self, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function that turns the layer's tensor into (B, C, h, w).

        For tokens, these are the patches alone.
        """
        point = self._layer
        assert point is not None
        with self.named_failure(x):
            _, [output], [gradient] = self._backward(x, False)
        to_map = layer_map_view(self.row_layout(point, output))
        if to_map(output).shape[2:].numel() == 1:
            raise LayerError(
                f"{point.name} has only one position, so it gives no heat map. Give "
                "'layers=[NAME]', a layer in front of the pooling; job=layers lists the layers."
            )
        if gradient is None or not to_map(gradient).any():
            raise LayerError(
                f"target={self._target} has no gradient at the positions of {point.name}, because "
                "the output of the model does not depend on them (after the last block of a "
                "transformer only the class token counts). Give an earlier one, 'layers=[NAME]'."
            )
        self._check_positions(point, output, to_map)
        return to_map

    def _check_positions(
        self,
        point: CapturePoint,
        output: torch.Tensor,
        to_map: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Check that positions of a layer are arranged as in the image, if its shape leaves it
        open.
        """
        if not has_known_positions(self.row_layout(point, output)):
            x = self.noise(1)
            with self.named_failure(x):
                check_positions(self.module, [(point, to_map)], x)

    def _baseline(self, x: torch.Tensor) -> torch.Tensor:
        return baseline(
            self._options.baseline or DEFAULT_BASELINE, x, self.backbone.preprocess.normalise
        )

    def feature_maps(self, images: torch.Tensor) -> torch.Tensor:
        """Compute the output of the layer attribute.feature_map_layer for (B, 3, H, W) images,
        uint8 in [0, 255] or normalised float32. Return (B, C, h, w) float32 on the CPU; for tokens,
        the patches. Raises LayerError if the output is not a map.
        """
        point = self._maps
        assert point is not None
        with (
            self.module_and_input(images) as (module, x),
            capture_output(module, point) as outputs,
        ):
            module(x)
        return self._to_feature_map(outputs[0]).float().cpu()


def _module_point(key: str, layer: str, traced: Trace) -> CapturePoint:
    point = named_point(layer, traced)
    if point.operation or point.capture != "output":
        raise LayerError(
            f"{key}={layer}: expected the name of a module, whose output is taken. job=layers "
            "lists them."
        )
    return point
