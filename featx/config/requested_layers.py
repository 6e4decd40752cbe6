"""The layers, captures, reductions and gradient targets that a config asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from featx.base import family
from featx.config.checks import check_choice
from featx.config.reduce import ReduceConfig, make_reduce
from featx.errors import ConfigError

if TYPE_CHECKING:
    from featx.config.run_config import Config

PRESETS = ("embedding", "stages", "leaves", "all")
"""Names of sets of layers that `layers` takes instead of names."""

CAPTURES = ("output", "input", "grad_output", "grad_input", "attention")
"""Tensors of a layer that can be captured."""

GRADIENTS = ("grad_output", "grad_input")
"""The captures that need a backward pass."""

SCALARS = ("label", "predicted", "loss", "entropy", "logsumexp")
"""Numbers whose gradient can be taken, besides the logit of a class by its index."""

DEFAULT_LAYERS = "embedding"
"""Preset that a run takes if `layers` is null."""


def layer_requests(config: Config) -> list[tuple[str, ReduceConfig]]:
    """Return the options `layers`, in its three forms, and `capture` as one list.

    Returns:
        (name, glob or preset; reduction). A tensor that is not an output has its kind after the
        name, as in 'layer4:input'.
    """
    asked = DEFAULT_LAYERS if config.layers is None else config.layers
    if isinstance(asked, str):
        asked = [asked]
    if isinstance(asked, Mapping):
        pairs = [(str(name), _as_reduce(value)) for name, value in asked.items()]
    elif isinstance(asked, list | tuple) and all(isinstance(name, str) for name in asked):
        pairs = [(name, config.reduce) for name in asked]
    else:
        raise ConfigError(
            f"layers={asked}: expected a preset ({', '.join(PRESETS)}), a list such as "
            "[layer4,avgpool], or a mapping such as {layer4: avg}."
        )
    if not pairs:
        raise ConfigError(f"layers is empty: name a layer or a preset ({', '.join(PRESETS)}).")
    kinds = captures(config)
    return [
        (f"{name}:{kind}" if kind != "output" and ":" not in name else name, reduce)
        for name, reduce in pairs
        for kind in (kinds if ":" not in name else ("output",))
    ]


def with_statistics_at(config: Config, path: str | None) -> Config:
    """Return a config whose pca and whiten read their statistics from `path`, unless it is None."""
    if path is None:
        return config

    def moved(reduce: ReduceConfig) -> ReduceConfig:
        return reduce.with_statistics_path(path)

    layers = config.layers
    if isinstance(layers, Mapping):
        layers = {name: moved(_as_reduce(value)) for name, value in layers.items()}
    return replace(config, layers=layers, reduce=moved(config.reduce))


def captures(config: Config) -> tuple[str, ...]:
    """Return the option `capture` as a tuple."""
    asked = config.capture
    kinds = (asked,) if isinstance(asked, str) else tuple(asked or ())
    for kind in kinds:
        check_choice("capture", kind, CAPTURES)
    if not kinds or len(set(kinds)) < len(kinds):
        raise ConfigError(f"capture={asked}: expected some of {', '.join(CAPTURES)}.")
    return kinds


def _as_reduce(value: object) -> ReduceConfig:
    if isinstance(value, ReduceConfig):
        return value
    if isinstance(value, str):
        return make_reduce(value)
    if isinstance(value, Mapping):
        try:
            return make_reduce(**{"name": "none", **value})
        except ConfigError as error:
            raise ConfigError(f"layers: {error}") from error
    raise ConfigError(
        f"layers: {value} is not a reduction; expected one of "
        f"{', '.join(family('reduce').names())}, "
        "or a mapping such as {name: grid, size: 4}."
    )
