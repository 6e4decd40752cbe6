"""The layers, captures, reductions and gradient targets that a config asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, get_args

from featx.base import family
from featx.config.checks import names_tuple
from featx.config.reduce import ReduceConfig, make_reduce
from featx.errors import ConfigError

PRESETS = ("embedding", "output", "stages", "leaves", "all")
"""Names of sets of layers that `layers` takes instead of names."""

Capture = Literal["output", "input", "grad_output", "grad_input", "attention"]
CAPTURES: tuple[str, ...] = get_args(Capture)
"""Tensors of a layer that can be captured."""

GRADIENTS = ("grad_output", "grad_input")
"""The captures that need a backward pass."""

SCALARS = ("label", "predicted", "loss", "entropy", "logsumexp")
"""Numbers whose gradient can be taken, besides the logit of a class by its index."""

DEFAULT_LAYERS = "embedding"
"""Preset that a run takes if `layers` is null."""


class LayerOptions(Protocol):
    """The options of a `Config` that say which tensors a run stores."""

    @property
    def layers(self) -> Any:
        """Preset, list of names, or mapping of names to reductions; None for the default."""

    @property
    def capture(self) -> Any:
        """Tensor of a layer, or a list of them."""

    @property
    def reduce(self) -> ReduceConfig:
        """Reduction of the layers without one of their own."""


def layer_requests(config: LayerOptions) -> list[tuple[str, ReduceConfig]]:
    """Return the options `layers`, in its three forms, and `capture` as one list.

    Returns:
        (name, glob or preset; reduction). A tensor that is not an output has its kind after the
        name, as in 'layer4:input'.
    """
    layers = DEFAULT_LAYERS if config.layers is None else config.layers
    if isinstance(layers, str):
        layers = [layers]
    if isinstance(layers, Mapping):
        pairs = [
            (str(name), config.reduce if value is None else reduction_options(value))
            for name, value in layers.items()
        ]
    elif isinstance(layers, list | tuple) and all(isinstance(name, str) for name in layers):
        pairs = [(name, config.reduce) for name in layers]
    else:
        raise ConfigError(
            f"layers={layers}: expected a preset ({', '.join(PRESETS)}), a list such as "
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


def captures(config: LayerOptions) -> tuple[str, ...]:
    """Return the option `capture` as a tuple."""
    return names_tuple(config.capture)


def reduction_options(value: object) -> ReduceConfig:
    """Return the reduction that a mapping in `layers` gives a layer: a name, or its options."""
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
