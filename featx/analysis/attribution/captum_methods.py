"""Heat maps that Captum computes, integrated gradients and occlusion, with their inputs."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import torch
from torch import nn

from featx.config import BY_CAPTUM
from featx.errors import MissingExtraError
from featx.layers import logits_of, values_of_classes

_BLUR_SHARE = 1 / 16
"""Standard deviation of baseline=blur, as a share of the shorter side of the image."""


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
        sliding_window_shapes=(3, window, window),
        strides=(3, stride, stride),
        baselines=baselines,
        additional_forward_args=classes,
    )
    return occluded[:, 0].to(x.dtype)  # the three channels are hidden together


def baseline(
    name: str, x: torch.Tensor, normalise: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the normalised input (B, 3, H, W) that stands for the absence of an image."""
    if name == "mean":
        return torch.zeros_like(x)
    if name == "black":
        black = torch.zeros(1, 3, 1, 1, dtype=torch.uint8, device=x.device)
        return normalise(black).expand_as(x).contiguous()
    from torchvision.transforms.v2.functional import gaussian_blur

    sigma = max(1.0, _BLUR_SHARE * min(x.shape[2:]))
    radius = min(int(3 * sigma), min(x.shape[2:]) - 1)
    blurred: torch.Tensor = gaussian_blur(x, [2 * radius + 1] * 2, [sigma] * 2)
    return blurred
