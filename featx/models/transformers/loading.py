"""Building a model of transformers and filling it with the tensors of its folder, all or none.

transformers itself fills what a file lacks with random values and a warning. Here a missing tensor
is an error, and a pooler that the file lacks is not built.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from featx.base import import_extra
from featx.errors import ModelError, WeightsError, counted, one_line
from featx.models.base import seeded
from featx.models.checkpoint import check_finite, log_left_out

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from featx.models.transformers.families import Family

_POOLING = "add_pooling_layer"
"""Argument of the classes whose pooler is optional."""


@dataclass(frozen=True)
class Blueprint:
    """A class of transformers with the configuration of one model."""

    model: type[PreTrainedModel]
    config: PretrainedConfig
    arguments: Mapping[str, object]


def import_transformers() -> ModuleType:
    """Import transformers, an optional package."""
    what = "model=transformers"
    return import_extra("transformers", what, "the extra transformers", "transformers")


def blueprint(
    config: Mapping[str, Any],
    family: Family,
    tensors: Mapping[str, torch.Tensor] | None,
    args: Mapping[str, object],
) -> Blueprint:
    """Return the class and the configuration of the part of a model that reads images.

    The pooler is built if the embedding needs it, or the tensors of the folder have one.
    """
    transformers = import_transformers()
    model_type = str(config["model_type"])
    values = {key: value for key, value in config.items() if key != "model_type"}
    try:
        if family.config is not None:
            model_config = getattr(transformers, family.config).from_dict(values)
        else:
            model_config = transformers.CONFIG_MAPPING[model_type].from_dict(values)
        if family.model is not None:
            model_config = getattr(model_config, "vision_config", model_config)
            model = getattr(transformers, family.model)
        else:
            model = transformers.MODEL_MAPPING[type(model_config)]
    except KeyError as error:
        raise ModelError(
            f"transformers {transformers.__version__} has no image model of the model_type "
            f"{model_type}. Update it (pip install -U transformers), or check config.json."
        ) from error
    except Exception as error:  # transformers checks values with exceptions of many kinds
        reason = one_line(error)
        raise ModelError(f"config.json describes no {model_type} model: {reason}") from error
    if model.main_input_name != "pixel_values":
        raise ModelError(
            f"a {model.__name__} (model_type {model_type}) reads {model.main_input_name}, not "
            "images alone. Name the folder of an image model."
        )
    arguments = {}
    if _POOLING in inspect.signature(model.__init__).parameters:
        needed = family.embedding == "pooler_output"
        has_pooler = tensors is not None and any(map(_is_of_pooler, tensors))
        arguments[_POOLING] = needed or has_pooler
    if "attn_implementation" in args:
        model_config._attn_implementation = args["attn_implementation"]
    return Blueprint(model, model_config, arguments)


def untrained(plan: Blueprint, seed: int) -> torch.nn.Module:
    """Return the model with transformers' own initialisation."""
    with seeded(seed), quiet(), _build_errors(plan):
        module: torch.nn.Module = plan.model(plan.config, **plan.arguments)
        return module.float()


def load_model(plan: Blueprint, state: Mapping[str, torch.Tensor], origin: str) -> torch.nn.Module:
    """Return the model with the tensors of a folder, in float32."""
    module, info = _from_state(plan, state, origin)
    missing = info["missing_keys"]
    no_pooler = missing and all(map(_is_of_pooler, missing)) and not any(map(_is_of_pooler, state))
    if no_pooler and plan.arguments.get(_POOLING):
        unpooled = replace(plan, arguments={**plan.arguments, _POOLING: False})
        module, info = _from_state(unpooled, state, origin)
    _check_loaded(module, info, origin)
    if left_out := [_own_name(name, module) for name in info["unexpected_keys"]]:
        log_left_out(left_out, origin, f"a {type(module).__name__}")
    return module  # type: ignore[no-any-return]  # transformers is not typed here


def _from_state(
    plan: Blueprint, state: Mapping[str, torch.Tensor], origin: str
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """Return the model that transformers makes of some tensors, and what it reports about them."""
    try:
        with seeded(0), quiet(), _build_errors(plan):
            # Without a folder, transformers looks for no files, adapters or code.
            module, info = plan.model.from_pretrained(
                None,
                config=plan.config,
                state_dict=dict(state),
                dtype=torch.float32,
                output_loading_info=True,
                **plan.arguments,
            )
    except RuntimeError as error:
        raise WeightsError(
            f"the weights of {origin} do not fit their config.json: {one_line(error)}"
        ) from error
    return module, info


def _is_of_pooler(name: str) -> bool:
    return ".pooler." in f".{name}"


def _check_loaded(module: PreTrainedModel, info: Mapping[str, Any], origin: str) -> None:
    children = {name for name, _ in module.named_children()}
    missing = sorted(info["missing_keys"])
    unexpected = sorted(
        name
        for name in info["unexpected_keys"]
        if _own_name(name, module).partition(".")[0] in children
    )
    misshapen = [str(entry[0]) for entry in info["mismatched_keys"]]
    if missing or unexpected or misshapen:
        raise WeightsError(
            f"the weights of {origin} are not those of a {type(module).__name__} with this "
            f"config.json: {counted(len(missing), 'tensor')} missing ({', '.join(missing[:3])}), "
            f"{len(unexpected)} left over ({', '.join(unexpected[:3])}), {len(misshapen)} of "
            f"another shape ({', '.join(misshapen[:3])}). transformers would fill the gaps with "
            "random values. Copy or download the whole folder, with its own config.json."
        )
    state = module.state_dict(keep_vars=True)
    check_finite(state, state, origin)


def _own_name(name: str, module: PreTrainedModel) -> str:
    """Return the name of a tensor without what stands for the whole model in front of it."""
    return name.removeprefix(f"{module.base_model_prefix}.")


@contextlib.contextmanager
def _build_errors(plan: Blueprint) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, AttributeError, AssertionError, KeyError, IndexError) as error:
        reason = one_line(error)
        raise ModelError(
            f"transformers cannot build a {plan.model.__name__} of this config.json: {reason}"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from writing progress bars and its own report on missing tensors."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
