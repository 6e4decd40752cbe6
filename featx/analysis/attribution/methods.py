"""Methods of attribution: Grad-CAM, guided backpropagation, and those that Captum computes."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable, Iterator

import torch
from torch import nn

from featx.base import After, ModuleHooks, TensorHooks
from featx.config import BY_CAPTUM
from featx.errors import LayerError, MissingExtraError, ModelError, ReduceError
from featx.layers import CapturePoint, RowLayout, edit, logits_of, map_view, values_of_classes

_RECTIFIERS = (nn.ReLU, nn.ReLU6)
_RECTIFIER_NODES = ("ReluBackward", "HardtanhBackward")
_OTHER_ACTIVATIONS = ("Silu", "Gelu", "Hardswish", "LeakyRelu", "Elu", "Mish", "Softplus", "Prelu")

_BLUR_SHARE = 1 / 16
"""Standard deviation of baseline=blur, as a share of the shorter side of the image."""


def grad_cam(activations: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    """Compute Grad-CAM: relu(sum_c w_c A_c), with w_c the mean gradient of channel c over
    positions. Return (B, h, w) float32, at least 0.

    R. R. Selvaraju et al., Grad-CAM: Visual Explanations from Deep Networks via Gradient-based
    Localization, ICCV 2017.
    """
    weights = gradients.float().mean((2, 3))
    return torch.einsum("bc,bchw->bhw", weights, activations.float()).relu()


@contextlib.contextmanager
def capture_output(module: nn.Module, point: CapturePoint | None) -> Iterator[list[torch.Tensor]]:
    """Yield a list that receives the output of a layer in the block, for its gradient to be
    computed.

    The model continues with a copy, because an in-place activation may follow. If no tensor before
    the layer requires a gradient, the graph begins here. Raises LayerError if the model ran without
    the layer.
    """
    outputs: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and not tensor.requires_grad:
            tensor = tensor.detach().requires_grad_()
        outputs.append(tensor)
        return tensor.clone()

    with contextlib.nullcontext() if point is None else edit(module, {point.name: keep}):
        yield outputs


def layer_map_view(rows: RowLayout) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that turns a layer's tensor (B, ...) into (B, C, h, w)."""
    try:
        return map_view("grid", rows)
    except ReduceError as error:
        raise LayerError(
            f"{rows.layer} gives rows of shape {rows.shape}, expected a map (C, h, w) or (h, w, C) "
            "of the proportions of the image, or patch tokens (T, C). job=layers lists all layers."
        ) from error


@contextlib.contextmanager
def guided_rectifiers(module: nn.Module) -> Iterator[None]:
    """Let only positive gradients pass backwards through a module's rectifiers, inside the block.

    J. T. Springenberg et al., Striving for Simplicity, 2015. The output of each call of a rectifier
    has its own hook, so rectifiers that are called several times, work in place or are shared
    between layers are handled correctly.
    """

    gradients = TensorHooks()

    def hook(rectifier: nn.Module, args: object, kwargs: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            gradients.add(output, lambda gradient: gradient.clamp(min=0))

    with _hooked_rectifiers(module, hook):
        yield


def _hooked_rectifiers(module: nn.Module, hook: After) -> ModuleHooks:
    """Return hooks that run after each call of a ReLU or ReLU6."""
    hooks = ModuleHooks()
    for part in module.modules():
        if isinstance(part, _RECTIFIERS):
            hooks.add(part, after=hook)
    return hooks


def check_rectifiers(module: nn.Module, x: torch.Tensor) -> None:
    """Check that all activations of a model are rectifier modules, for guided backpropagation."""
    calls: list[str] = []

    def count(rectifier: nn.Module, *_: object) -> None:
        calls.append(type(rectifier).__name__)

    with _hooked_rectifiers(module, count), torch.enable_grad():
        output = module(x.clone().requires_grad_().clone())
    nodes = list(_graph_nodes(output)) if isinstance(output, torch.Tensor) else []
    num_unseen = sum(node.startswith(_RECTIFIER_NODES) for node in nodes) - len(calls)
    other_activations = sorted(
        {kind for kind in _OTHER_ACTIVATIONS for node in nodes if node.startswith(kind)}
    )
    reason = ""
    if other_activations:
        reason = f"it has {', '.join(other_activations)}"
    elif num_unseen > 0:
        reason = f"{num_unseen} of its rectifiers are calls of F.relu, which no hook sees"
    elif not calls:
        reason = "it has none"
    if reason:
        raise ModelError(
            "guided_gradcam needs a model whose activations are all nn.ReLU or nn.ReLU6 modules, "
            f"and {reason}. Use attribute.method=gradcam, or integrated_gradients for fine detail."
        )


def _graph_nodes(output: torch.Tensor) -> Iterator[str]:
    """Yield the name of every operation in the autograd graph of a tensor."""
    pending, seen = [output.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node.name()
        pending.extend(following for following, _ in node.next_functions)


def captum_version() -> str:
    """Return the version of Captum."""
    try:
        import captum.attr  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"attribute.method={' and '.join(BY_CAPTUM)} come with the extra attribution: "
            'pip install "featx[attribution]". The other methods need no more than featx.'
        ) from error
    return importlib.metadata.version("captum")


class Explained(nn.Module):
    """The model in the form that Captum needs: one number per image, for fixed classes.

    Classes are predicted once, because the prediction may change where the image is hidden or dark.
    """

    def __init__(self, module: nn.Module, target: str | int) -> None:
        super().__init__()
        self._module = module
        self._target = target

    def forward(self, x: torch.Tensor, classes: torch.Tensor | None = None) -> torch.Tensor:
        """Return the target of each image, (B,)."""
        # The model may write to its input, which Captum uses again.
        return values_of_classes(logits_of(self._module(x.clone())), self._target, classes)


def integrated_gradients(
    explain: Explained,
    x: torch.Tensor,
    classes: torch.Tensor | None,
    baselines: torch.Tensor,
    steps: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute integrated gradients by Gauss-Legendre quadrature. Return (B, H, W) summed over
    channels, and (B,) their sum minus f(x) - f(baseline).

    M. Sundararajan, A. Taly, Q. Yan, Axiomatic Attribution for Deep Networks, ICML 2017.
    """
    from captum.attr import IntegratedGradients

    integrated, delta = IntegratedGradients(explain).attribute(
        x.detach(),
        baselines=baselines,
        additional_forward_args=classes,
        n_steps=steps,
        internal_batch_size=len(x),  # by default, all steps of all images form one batch
        return_convergence_delta=True,
    )
    return integrated.sum(1).to(x.dtype), delta


def occlusion(
    explain: Explained,
    x: torch.Tensor,
    classes: torch.Tensor | None,
    baselines: torch.Tensor,
    window: int,
    stride: int,
) -> torch.Tensor:
    """Compute the (B, H, W) decrease of the target when a square is hidden.

    A pixel gets the mean over the squares that contain it.

    M. D. Zeiler, R. Fergus, Visualizing and Understanding Convolutional Networks, ECCV 2014.
    """
    from captum.attr import Occlusion

    occluded: torch.Tensor = Occlusion(explain).attribute(
        x,
        sliding_window_shapes=(x.shape[1], window, window),
        strides=(x.shape[1], stride, stride),
        baselines=baselines,
        additional_forward_args=classes,
    )
    return occluded[:, 0].to(x.dtype)  # all channels are hidden together


def baseline(
    name: str, x: torch.Tensor, normalise: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the normalised input (B, C, H, W) that stands for the absence of an image."""
    if name == "mean":
        return torch.zeros_like(x)
    if name == "black":
        black = torch.zeros(1, x.shape[1], 1, 1, dtype=torch.uint8, device=x.device)
        return normalise(black).expand_as(x).contiguous()
    from torchvision.transforms.v2.functional import gaussian_blur

    sigma = max(1.0, _BLUR_SHARE * min(x.shape[2:]))
    radius = min(int(3 * sigma), min(x.shape[2:]) - 1)
    blurred: torch.Tensor = gaussian_blur(x, [2 * radius + 1] * 2, [sigma] * 2)
    return blurred
