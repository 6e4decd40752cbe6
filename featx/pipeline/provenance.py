"""Provenance of the values of a run: its fingerprint, and the header that a store records.

A model of the user's code may compute other features than the store has with the same weights: its
code can have changed, or something that is neither a weight nor printed, such as the active
adapter. Its response to noise shows that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING, Any

import numpy as np

from featx.base.version import __version__
from featx.config import GRADIENTS, Config
from featx.errors import StoreMismatchError
from featx.images import PILLOW
from featx.store import listing_identity
from featx.types import Json, LayerSpec, Listing, ResumeState, StoreHeader

if TYPE_CHECKING:
    import torch

    from featx.engine import Engine
    from featx.images import DecodeSettings
    from featx.models import Backbone

_VERSIONED = ("torch", "torchvision", "timm", "pillow")

RESPONSE = "response"
"""Entry of `Run.resolved` with the values of the response of the model that started the store."""

_NUM_VALUES = 64
"""Largest number of values of a response."""

_SAME_MODEL, _SAME_LOW_PRECISION = 1e-4, 3e-2
"""Largest relative L2 difference between responses of one model, in two processes or on two kinds
of device; the second if its weights are not float32."""

_MODEL_ENTRIES = ("weights_sha256", "transform")
"""Entries of a fingerprint that belong to the model, besides those named model.<name>."""


def fingerprint(
    config: Config,
    engine: Engine,
    decoding: DecodeSettings,
    specs: list[LayerSpec],
    listing: Listing,
    part_rows: int,
) -> dict[str, Any]:
    """Every setting that changes values, as JSON types; a resume with another one is refused."""
    backbone, policy, data = engine.backbone, decoding.policy, config.data
    jpeg = policy.jpeg
    return {
        "model": backbone.name,
        "weights": backbone.weights,
        "weights_sha256": backbone.weights_sha256,
        **({"model.args": dict(backbone.args)} if backbone.args else {}),
        **({"model.checkpoint": dict(backbone.checkpoint)} if backbone.checkpoint else {}),
        **{f"model.{name}": value for name, value in backbone.provenance.items()},
        "model.init": config.model.init,
        **{f"layer.{spec.name}": layer_line(spec, config) for spec in specs},
        "layers": [spec.name for spec in specs],
        "transform": backbone.preprocess.describe(),
        "decode": "reference" if decoding.reference else "fast",
        "jpeg": jpeg,
        # The version of Pillow is among the library versions below.
        **({} if jpeg == PILLOW else {f"version.{jpeg}": version_of(jpeg)}),
        **({} if policy.heif is None else {"version.pillow_heif": policy.heif}),
        "data.exif": policy.exif,
        "data.background": list(policy.background),
        "data.max_pixels": policy.max_pixels,
        **policy.of_unusual_images(),
        **({"data.crops": list(data.crop_bounds)} if data.crops else {}),
        "listing": listing_identity(listing),
        "device": engine.device.type,
        **asdict(engine.compute),
        "part_rows": part_rows,
        "nonfinite": config.nonfinite,
        **{f"version.{name}": version for name, version in _versions(backbone).items()},
    }


def layer_line(spec: LayerSpec, config: Config) -> str:
    """Description of the values of a layer as one line; for gradients with the gradient target."""
    target = f", target {config.target}" if spec.capture in GRADIENTS else ""
    of_layer = f" of {spec.layer}" if spec.layer else ""
    return (
        f"{spec.capture}{of_layer}, reduce {spec.reduce} {dict(spec.reduce_args)}, "
        f"shape {list(spec.shape)}{target}"
    )


def header(config_yaml: str, backbone: Backbone, settings: Json) -> StoreHeader:
    """Header of a run, which every file of the store records."""
    return StoreHeader(
        fingerprint=settings,
        config=config_yaml,
        model=backbone.name,
        weights=backbone.weights,
        weights_sha256=backbone.weights_sha256,
        transform=backbone.preprocess.describe(),
        versions={**_versions(backbone), "featx": __version__},
    )


def _versions(backbone: Backbone) -> Mapping[str, str]:
    return {name: _version_of(name) for name in (*_VERSIONED, *backbone.packages)}


_version_of = functools.cache(version_of)


@dataclass(frozen=True)
class Response:
    """Values that a model returns for fixed noise, evenly spaced over its output, with six digits.

    `limit` is the largest difference from a response of the same model.
    """

    values: list[float]
    limit: float


def response_of(engine: Engine) -> Response | None:
    """Return the response of a model; None if it returns random, non-finite or no values."""
    first, second = _pass_noise(engine), _pass_noise(engine)
    if not first or not all(map(math.isfinite, first)):
        return None
    dtypes = {str(parameter.dtype) for parameter in engine.module.parameters()}
    limit = _SAME_MODEL if dtypes <= {"torch.float32"} else _SAME_LOW_PRECISION
    return Response(first, limit) if _difference(first, second) <= limit else None


def _pass_noise(engine: Engine) -> list[float]:
    """Return values of all tensors that the model returns for two images of noise."""
    import torch

    from featx.base import elements

    x = engine.noise(2)
    with engine.named_failure(x), torch.no_grad():
        output = engine.module(x)
    parts = [
        _spaced(tensor.flatten()).float().cpu()
        for tensor in elements(output).values()
        if tensor.is_floating_point() and tensor.layout == torch.strided
    ]
    values = _spaced(torch.cat(parts)).tolist() if parts else []
    return [float(f"{value:.6g}") for value in values]


def _spaced(values: torch.Tensor) -> torch.Tensor:
    """Return values of a vector, evenly spaced."""
    return values[:: max(1, len(values) // _NUM_VALUES)][:_NUM_VALUES]


def check_response(
    code: str, response: Response | None, fingerprint: Json, state: ResumeState
) -> None:
    """Raise StoreMismatchError if a model has another response than the one that started a store.

    `code` is what makes the model, for the message. Other settings are refused elsewhere.
    """
    before = state.resolved.get(RESPONSE)
    if not before or response is None:
        return
    # Settings of the model or of its input that differ in the two fingerprints.
    names = {*_MODEL_ENTRIES}
    names |= {name for name in {*fingerprint, *state.fingerprint} if name.startswith("model.")}
    if any(fingerprint.get(name) != state.fingerprint.get(name) for name in names):
        return
    difference = _difference(before, response.values)
    if difference > response.limit:
        raise StoreMismatchError(
            f"{state.what} started with another model than {code} makes now, although weights and "
            f"printed layers are the same: what it returns for noise differs by {difference:.2g} "
            f"(relative L2 difference; expected at most {response.limit:g}). Its code may have "
            "changed, or an active adapter, a flag or a constant. Put that back, or extract again "
            "with another out=DIR or overwrite=true."
        )


def _difference(before: Sequence[float], now: Sequence[float]) -> float:
    """Return the L2 difference relative to the longer one; infinite for other numbers of values."""
    if len(before) != len(now):
        return math.inf
    length = max(np.linalg.norm(before), np.linalg.norm(now))
    return float(np.linalg.norm(np.subtract(before, now)) / (length or 1.0))
