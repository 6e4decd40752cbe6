"""model=hub model.name=FOLDER model.entry=FUNCTION: models of torch.hub."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any

from featx.base import log_message
from featx.config import CodeModelConfig, options
from featx.errors import ConfigError, ModelError, counted
from featx.models.libraries.registry import LIBRARIES, LibraryFunctions, library_member

if TYPE_CHECKING:
    from torch import nn

    from featx.models.base import Backbone
    from featx.models.hub.checkout import Checkout


@options("model")
class HubOptions(CodeModelConfig):
    """Options of model=hub."""

    name: str = ""
    library: str = "hub"
    entry: str | None = None
    """Function of hubconf.py that returns the torch.nn.Module."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function. A resume refuses other values."""

    def __post_init__(self) -> None:
        if not self.name or not self.entry:
            raise ConfigError(
                "model=hub needs model.name=FOLDER, a checkout with a hubconf.py (or "
                "owner/repo@COMMIT on GitHub), and model.entry=FUNCTION of this file."
            )
        super().__post_init__()

    @property
    def code(self) -> str:
        """Options of the command that name checkout and function."""
        return f"model=hub model.name={self.name} model.entry={self.entry}"

    def code_sha256(self) -> str | None:
        """SHA-256 of the .py files of the checkout; None if it is not on this machine."""
        from featx.models.hub.checkout import find_checkout

        try:
            return find_checkout(self.name).sha256()
        except (ModelError, OSError):
            return None


def build(config: HubOptions, seed: int) -> Backbone:
    """Build a model by a function of a checkout, and load weights if a file is given.

    Args:
        config: folder, function, its arguments, weights and preprocessing.
        seed: seed during the call of the function.

    Raises:
        ModelError: the checkout or its function is missing, fails, or returns no module; or its
            parameters are random where trained ones are promised, or the reverse.
        WeightsError: the weights cannot be read or loaded.
    """
    from featx.models.base import Backbone, random_id
    from featx.models.checkpoint import load_weights
    from featx.models.hub.checkout import find_checkout
    from featx.models.hub.entry import call_entry
    from featx.models.preprocessing import stated_preprocess
    from featx.models.user_code import args_of_values, has_class_token, read_own_weights

    checkout, entry, loading = find_checkout(config.name), str(config.entry), {}
    preprocess = stated_preprocess(config.transform)
    log_message(f"running {entry} of {checkout.hubconf}")
    code = checkout.sha256()
    if config.weights is None:
        module, weights = _untrained(checkout, config, seed, "model.weights=null"), random_id(seed)
    elif config.weights == "default":
        module, weights = _trained(checkout, config, seed), f"as {entry} loads them"
    else:
        weights = config.weights
        state = read_own_weights(weights, config.checkpoint)
        module = call_entry(checkout, entry, config.args, seed)
        loading = load_weights(module, state, weights, config.checkpoint.prefix)
    return Backbone(
        module=module,
        name=f"hub/{checkout.name}:{entry}",
        weights=weights,
        preprocess=preprocess,
        num_prefix_tokens=int(getattr(module, "num_prefix_tokens", 0)),
        has_class_token=has_class_token(module),
        args=args_of_values(config.args),
        checkpoint=loading,
        provenance={"entry": entry, "code_sha256": code},
    )


def untrained(config: HubOptions, seed: int) -> nn.Module:
    """Build the untrained model, for model.init=reset.

    Args:
        config: model options.
        seed: seed during the call of the function.

    Raises:
        ModelError: the function loads trained parameters.
    """
    from featx.models.hub.checkout import find_checkout

    return _untrained(find_checkout(config.name), config, seed, "model.init=reset")


def _untrained(checkout: Checkout, config: HubOptions, seed: int, option: str) -> nn.Module:
    """Return the model with random parameters.

    Raises:
        ModelError: the function loads trained parameters.
    """
    from featx.models.hub.entry import random_parameters, trained_parameters

    module, random = random_parameters(checkout, str(config.entry), config.args, seed)
    if trained := trained_parameters(module, random):
        raise ModelError(
            f"{option}: {config.entry} of {checkout.name} gives {_names_text(trained)} the same "
            "values whatever the seed, so it loads trained weights. It has to make an untrained "
            "model: see its arguments, such as 'model.args={pretrained: false}'."
        )
    return module


def _trained(checkout: Checkout, config: HubOptions, seed: int) -> nn.Module:
    """Return the model with the parameters that the function itself loads.

    Raises:
        ModelError: some of them are random.
    """
    from featx.models.hub.entry import random_parameters

    module, random = random_parameters(checkout, str(config.entry), config.args, seed)
    if random:
        raise ModelError(
            f"{config.entry} of {checkout.name} leaves {_names_text(random)} at random values, and "
            "model.weights=default promises the weights that it loads. See its arguments, such as "
            "'model.args={pretrained: true}'; or give model.weights=FILE, or model.weights=null "
            "for an untrained model."
        )
    return module


def _names_text(names: list[str]) -> str:
    """Number and first names of parameters."""
    return (
        f"{counted(len(names), 'parameter')} ({', '.join(names[:3])}{', ...' if names[3:] else ''})"
    )


LIBRARIES.register(
    library_member(
        "hub",
        "Models of torch.hub: a folder with hubconf.py, or owner/repo@COMMIT.",
        HubOptions,
        LibraryFunctions(build=build, untrained=untrained, names=tuple, knows=lambda name: True),
    )
)
