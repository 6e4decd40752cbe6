"""Provenance of the values of a run: its fingerprint, and the header that a store records."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING, Any

from featx.base.version import __version__
from featx.config import GRADIENTS, Config
from featx.images import PILLOW
from featx.store import listing_identity
from featx.types import Json, LayerSpec, Listing, StoreHeader

if TYPE_CHECKING:
    from featx.engine import Engine
    from featx.images import DecodeSettings
    from featx.models import Backbone

_VERSIONED = ("torch", "torchvision", "timm", "pillow")


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
