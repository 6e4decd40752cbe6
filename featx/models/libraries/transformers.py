"""model=transformers: backbones of transformers, from a folder that save_pretrained has written."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featx.config import InputSize, ModelConfig, TransformConfig, options
from featx.errors import ConfigError, ModelError, WeightsError
from featx.models.libraries.registry import LIBRARIES, ModelLibrary
from featx.models.transformers.families import embedding_of, family_of
from featx.models.transformers.folder import find_folder, read_config, read_state

if TYPE_CHECKING:
    import torch

    from featx.models.base import Backbone
    from featx.models.transformers.families import Family
    from featx.models.transformers.loading import Blueprint

_ATTENTION = ("eager", "sdpa")
"""Implementations of attention that need no further packages."""


@options("model")
class TransformersOptions(ModelConfig):
    """Options of model=transformers."""

    name: str = ""
    library: str = "transformers"
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments with which the library builds the model: attn_implementation, which is
    eager or sdpa. A resume refuses other values."""
    input_size: InputSize | None = None
    """Height and width of the images in pixels, such as [448,448], for families that take another
    size than that of config.json; the preprocessing follows."""
    transform: TransformConfig = field(default_factory=TransformConfig)
    """Preprocessing of the images, by default that of the folder."""

    needs = "model.name=FOLDER, with config.json, model.safetensors and preprocessor_config.json"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights not in (None, "default"):
            raise ConfigError(
                f"model.weights={self.weights}: the weights of model=transformers lie in the "
                "folder model.name. Leave the option out, or give null for random weights."
            )
        for name, value in self.args.items():
            if name != "attn_implementation" or value not in _ATTENTION:
                raise ConfigError(
                    f"model.args.{name}={value} cannot be given: the arguments of "
                    f"model=transformers are attn_implementation={' or '.join(_ATTENTION)}."
                )


class Transformers(ModelLibrary[TransformersOptions]):
    """Models of transformers."""

    def build(self, config: TransformersOptions, seed: int) -> Backbone:
        """Build the part of a model that reads images, with the weights of its folder."""
        from featx.models.base import Backbone, config_sha256, random_id
        from featx.models.preprocessing import change_preprocess
        from featx.models.transformers.loading import load_model
        from featx.models.transformers.loading import untrained as random_module
        from featx.models.transformers.processors import processor_choice

        folder, values, family = _open_folder(config)
        size = None if config.input_size is None else (config.input_size[0], config.input_size[1])
        choice = processor_choice(folder, size)
        plan, state = _plan(config, folder, values, family)
        _check_size(plan, family, choice.preprocess.crop, is_requested=size is not None)
        if state is None:
            module, weights = random_module(plan, seed), random_id(seed)
        else:
            module, weights = load_model(plan, state, config.name), config.name
        backbone = Backbone(
            module=module,
            name=f"transformers/{type(module).__name__}",
            weights=weights,
            preprocess=change_preprocess(choice.preprocess, config.transform),
            num_prefix_tokens=family.num_prefix_tokens(plan.config),
            has_class_token=family.has_class_token,
            embedding=embedding_of(module, family),
            stages=family.stage_names(module),
            reentrant=family.is_reentrant,
            args=dict(config.args),
            packages=("transformers",),
            provenance={
                "embedding": family.embedding,
                "prefix_tokens": family.num_prefix_tokens(plan.config),
                "processor": choice.name,
                "config_sha256": config_sha256(values),
            },
        )
        if not choice.is_proven:
            backbone.choices["preprocessing"] = (
                f"by {choice.name.partition(',')[0]} of transformers itself, image by image: the "
                "fast path cannot state what it does"
            )
        floats = {str(x.dtype)[6:] for x in (state or {}).values() if x.is_floating_point()}
        if floats and floats != {"float32"}:
            dtypes = ", ".join(sorted(floats))
            backbone.choices["parameters"] = f"{dtypes} in the folder, float32 in the run"
        return backbone

    def untrained(self, config: TransformersOptions, seed: int) -> torch.nn.Module:
        """The architecture with transformers' initialisation."""
        from featx.models.transformers.loading import untrained as random_module

        plan, _ = _plan(config, *_open_folder(config))
        return random_module(plan, seed)


def _open_folder(config: TransformersOptions) -> tuple[Path, dict[str, object], Family]:
    """Return the folder of a model, its config.json and its family."""
    from featx.models.transformers.loading import import_transformers

    import_transformers()  # before anything is downloaded
    folder = find_folder(config.name)
    values = read_config(folder)
    return folder, values, family_of(str(values["model_type"]))


def _plan(
    config: TransformersOptions, folder: Path, values: dict[str, object], family: Family
) -> tuple[Blueprint, dict[str, torch.Tensor] | None]:
    """Return what is built, and the tensors of the folder; None for random weights."""
    from featx.models.transformers.loading import blueprint

    state = None if config.weights is None else read_state(folder)
    return blueprint(values, family, state, config.args), state


def _check_size(plan: Blueprint, family: Family, crop: tuple[int, int], is_requested: bool) -> None:
    side = getattr(plan.config, "image_size", None)
    if family.takes_any_size or not side:
        return
    height, width = (side, side) if isinstance(side, int) else side
    if crop == (height, width):
        return
    model = f"a {plan.model.__name__} with this config.json takes images of {height} x {width}"
    if is_requested:
        raise ModelError(
            f"model.input_size={list(crop)}: {model} pixels only. Leave the option out, or name a "
            "model that takes other sizes, such as a DINOv2."
        )
    raise WeightsError(
        f"{model} pixels, and the image processor of the folder makes {crop[0]} x {crop[1]}. Give "
        f"'model.input_size=[{height},{width}]', or copy the preprocessor_config.json that belongs "
        "to the model."
    )


LIBRARIES.register(
    Transformers(
        "transformers",
        "Models of transformers: a folder with config.json, model.safetensors and "
        "preprocessor_config.json, or owner/model of the Hugging Face Hub.",
        TransformersOptions,
        takes_any_name=True,
        extra="transformers",
    )
)
