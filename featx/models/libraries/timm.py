"""model=timm: backbones of timm, with their pretrained tags and data configs."""

from __future__ import annotations

import contextlib
import math
import pickle
import socket
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from featx.config import LibraryModelConfig
from featx.errors import ConfigError, FeatxError, ModelError, WeightsError
from featx.models.libraries.registry import LIBRARIES, library_member
from featx.models.model_names import registered_names

if TYPE_CHECKING:
    import torch

    from featx.images import Preprocess
    from featx.models.base import Backbone, LibraryEmbedding

_COUNTER = "num_batches_tracked"
"""Counter of BatchNorm, which eval mode never reads."""

_LOCAL = "local-dir:"
"""Beginning of the name of a model whose config and weights are in a folder."""

_SCHEMES = ("hf-hub:", "hf_hub:", "timm:", _LOCAL)
"""Beginnings of names that say where timm finds a model."""


_REFUSED_ARGS = {
    "pretrained": "model.weights says which weights are loaded",
    "pretrained_cfg": "name the weights in model.weights or model.name",
    "pretrained_cfg_overlay": "name the weights in model.weights or model.name",
    "pretrained_strict": "featx loads whole models only",
    "checkpoint_path": "give the file as model.weights=PATH",
    "cache_dir": "set HF_HUB_CACHE",
    "features_only": "name the layers in the option layers",
    "out_indices": "name the layers in the option layers",
    "scriptable": "it changes no values",
    "exportable": "it changes no values",
}
"""Arguments of timm.create_model -> what to do instead."""

_patch_lock = threading.Lock()
"""Protects the method of torch that `_whole_models` replaces."""


@dataclass
class TimmOptions(LibraryModelConfig):
    """Options of model=timm."""

    name: str = ""
    library: str = "timm"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_args(_REFUSED_ARGS)
        if self.args.get("in_chans", 3) != 3:
            raise ConfigError("model.args.in_chans: featx reads RGB images, which have 3 channels.")
        if "img_size" in self.args:
            raise ConfigError(
                "model.args.img_size cannot be given: model.input_size=[HEIGHT,WIDTH] sets the "
                "size of the model and of its images together."
            )


def build(config: TimmOptions, seed: int) -> Backbone:
    """Build a timm model: `name`, `name.tag`, or `hf-hub:owner/model`.

    Args:
        config: name and weights.
        seed: seed of random weights.

    Raises:
        ModelError: the model does not take three channels.
        WeightsError: the weights do not exist, or cannot be downloaded, read or loaded.
    """
    import timm

    from featx.models.base import random_id, timm_classes
    from featx.models.checkpoint import is_weights_file, load_weights, read_weights
    from featx.models.preprocessing import changed_preprocess

    module: Any

    name, weights = _present_name(config.name), config.weights
    size = None if config.input_size is None else (config.input_size[0], config.input_size[1])
    local = weights is not None and is_weights_file(weights)
    if config.checkpoint.prefix is not None and not local:
        raise ConfigError(
            "model.checkpoint.prefix has an effect with a file in model.weights only."
        )
    if weights not in (None, "default") and not local:
        name = f"{name.split('.', 1)[0]}.{weights}"
    _check_tag(timm, name)
    pretrained = weights is not None and not local
    cfg = _pretrained_cfg(timm, name) if pretrained else None
    # For a model that only the hub knows, even the architecture is downloaded.
    downloads = None
    if name.startswith(_LOCAL):
        _check_folder(name)
    elif pretrained or ":" in name:
        downloads = _download_errors(name, cfg)
    whole = _whole_models(name) if pretrained and (config.args or size) else None
    with downloads or contextlib.nullcontext(), whole or contextlib.nullcontext():
        module = _created(name, pretrained, config.args, size, seed)
    if local:
        assert weights is not None
        load_weights(module, read_weights(Path(weights)), weights, config.checkpoint.prefix)
    tag = module.pretrained_cfg.get("tag") or "default"
    origin = weights if local else f"timm {tag}" if pretrained else random_id(seed)
    assert origin is not None
    backbone = wrap(module, f"timm/{name}", origin, size)
    backbone.preprocess = changed_preprocess(backbone.preprocess, config.transform)
    backbone.classes = timm_classes(module) if pretrained and module.num_classes else ()
    backbone.args = dict(config.args)
    return backbone


def _created(
    name: str, pretrained: bool, args: Mapping[str, Any], size: tuple[int, int] | None, seed: int
) -> torch.nn.Module:
    """Create a model of timm.

    Args:
        name: name for timm.create_model.
        pretrained: whether timm loads the weights.
        args: model.args.
        size: (height, width) of the images, or None for that of the weights.
        seed: seed of random weights.

    Raises:
        ModelError: the model does not take these arguments or this size.
    """
    import timm

    from featx.models.base import seeded

    def create(**more: Any) -> Any:
        with seeded(seed):
            return timm.create_model(name, pretrained=pretrained, **{**args, **more})

    try:
        if size is None:
            return create()  # type: ignore[no-any-return]  # timm's models are modules
        try:
            module = create(img_size=size)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            module = create()  # a convolutional network, which takes images of any size
    except FeatxError:  # about the weights; some are a ValueError as well
        raise
    except (TypeError, ValueError, AssertionError, KeyError) as error:
        raise ModelError(
            f"timm cannot build {name} with model.args={dict(args)}"
            f"{'' if size is None else f' and model.input_size={list(size)}'}: {error}."
        ) from error
    built = getattr(getattr(module, "patch_embed", None), "img_size", None)
    if built is not None and tuple(built) != size:
        raise ModelError(
            f"{name} was built for images of {tuple(built)} pixels, and model.input_size="
            f"{list(size)}; it takes no other size."
        )
    return module  # type: ignore[no-any-return]


@contextlib.contextmanager
def _whole_models(name: str) -> Iterator[None]:
    """Refuse weights that leave parameters of a model at their initial values.

    timm loads without `strict` if model.args change the head or the pooling, and reports parameters
    that the weights lack (such as fc_norm of global_pool=avg) to its log only.

    Args:
        name: name of the model, for messages.

    Raises:
        WeightsError: parameters or buffers are not in the weights, or do not fit.
    """
    from torch import nn

    load = nn.Module.load_state_dict
    missing: list[list[str]] = []

    def recorded(module: nn.Module, state: Mapping[str, Any], *args: Any, **keywords: Any) -> Any:
        try:
            result = load(module, state, *args, **keywords)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise WeightsError(
                f"the weights of {name} do not fit the model that model.args and model.input_size "
                f"ask for: {reason}"
            ) from error
        missing.append([key for key in result.missing_keys if not key.endswith(_COUNTER)])
        return result

    with _patch_lock:
        nn.Module.load_state_dict = recorded  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.load_state_dict = load  # type: ignore[method-assign]
    if not missing:
        raise ModelError(
            f"{name} loads its weights in a way that featx cannot check with model.args or "
            "model.input_size; leave these out."
        )
    if absent := missing[-1]:
        raise WeightsError(
            f"the weights of {name} lack {', '.join(absent[:5])}{', ...' if absent[5:] else ''} of "
            "the model that model.args ask for, which would stay random. Leave the argument out "
            "that adds these parameters; model.args.num_classes=0 builds a model without its head."
        )


def untrained(config: TimmOptions, seed: int) -> torch.nn.Module:
    """The architecture with timm's initialisation."""
    return build(replace(config, weights=None, init="loaded"), seed).module


def wrap(
    module: torch.nn.Module, name: str, weights: str, size: tuple[int, int] | None = None
) -> Backbone:
    """Make a backbone of a timm model, with its preprocessing, embedding and stages.

    Args:
        module: model of timm.
        name: library and model.
        weights: description of the weights.
        size: as for `preprocess_of`.
    """
    from featx.models.base import Backbone, timm_stages

    return Backbone(
        module=module,
        name=name,
        weights=weights,
        preprocess=preprocess_of(module, size),
        num_prefix_tokens=int(getattr(module, "num_prefix_tokens", 0)),
        has_class_token=any(
            name.rpartition(".")[2] == "cls_token" for name, _ in module.named_parameters()
        ),
        embedding=embedding_of(module),
        stages=timm_stages(module),
        reentrant=True,
    )


def preprocess_of(module: torch.nn.Module, size: tuple[int, int] | None = None) -> Preprocess:
    """timm's evaluation transform for the weights of a module.

    Args:
        module: model of timm.
        size: (height, width) of the images in pixels, with the share of the centre that the weights
            ask for; None takes the size of the weights.

    Raises:
        ModelError: the model does not take three channels.
    """
    from timm.data.config import resolve_model_data_config
    from timm.data.transforms_factory import create_transform

    from featx.images import Preprocess

    asked = {} if size is None else {"input_size": (3, *size)}
    data: dict[str, Any] = resolve_model_data_config(module, asked)  # type: ignore[no-untyped-call]
    channels, height, width = data["input_size"]
    if channels != 3:
        raise ModelError(f"this model takes {channels} channels; featx reads RGB images.")
    # timm resizes in four ways, and the fast path follows two of them. Borders, and sizes that are
    # not square but keep the proportions of the image, are left to timm.
    scaled = math.floor(height / data["crop_pct"]), math.floor(width / data["crop_pct"])
    resize: int | tuple[int, int] | None = None
    if data["crop_mode"] == "squash":
        resize = scaled
    elif data["crop_mode"] == "center" and scaled[0] == scaled[1]:
        resize = scaled[0]
    return Preprocess(
        reference=create_transform(**data, is_training=False),
        crop=(height, width),
        resize=resize,
        interpolation=data["interpolation"],
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
    )


def embedding_of(module: Any) -> LibraryEmbedding:
    """timm's own embedding: the pre-logits, or the output of a model without a classifier."""
    from featx.models.base import LibraryEmbedding

    def compute(x: torch.Tensor) -> Any:
        try:
            return module.forward_head(module.forward_features(x), pre_logits=True)
        except NotImplementedError:  # an encoder without a classifier
            return module(x)

    return LibraryEmbedding(compute, lambda: _expose_pre_logits(module))


def _expose_pre_logits(module: Any) -> None:
    """Add a module `pre_logits` to a model; each forward pass calls it with the pre-logits.

    The class of the model becomes a subclass, instead of a method of the object being replaced, so
    that deep copies of the model work.
    """
    import torch

    base: Any = type(module)

    class WithPreLogits(base):  # type: ignore[misc]
        def forward_head(self, x: Any, *args: Any, **keywords: Any) -> Any:
            logits = super().forward_head(x, *args, **keywords)
            if not keywords.get("pre_logits"):
                self.pre_logits(super().forward_head(x, pre_logits=True))
            return logits

    WithPreLogits.__name__, WithPreLogits.__qualname__ = base.__name__, base.__qualname__
    module.add_module("pre_logits", torch.nn.Identity())
    module.__class__ = WithPreLogits


def _present_name(name: str) -> str:
    """The present name of a model whose name is deprecated; create_model would warn."""
    from timm.models._registry import _deprecated_models

    return str(_deprecated_models.get(name) or name)


def _check_tag(timm: Any, name: str) -> None:
    """Check that timm has a pretrained tag.

    Raises:
        WeightsError: it has not; the message lists the tags.
    """
    if ":" in name or "." not in name:
        return
    base, tag = name.split(".", 1)
    tags = [n.split(".", 1)[1] for n in timm.list_pretrained(f"{base}.*")]
    if tag not in tags:
        known = ", ".join(tags) or "none"
        raise WeightsError(f"timm has no weights {tag!r} for {base}; it has: {known}.")


def _check_folder(name: str) -> None:
    """Check that the folder of a model local-dir:FOLDER holds its config.

    Raises:
        WeightsError: it does not.
    """
    file = Path(name.removeprefix(_LOCAL)) / "config.json"
    if not file.is_file():
        raise WeightsError(
            f"model.name={name}: there is no {file}. Expected a folder with config.json and "
            "model.safetensors, as timm.models.save_for_hf writes it."
        )


def _pretrained_cfg(timm: Any, name: str) -> Any:
    """timm's config of the pretrained weights; None for a model of the hub.

    Raises:
        WeightsError: timm has no weights for the model.
    """
    if ":" in name:
        return None
    cfg = timm.get_pretrained_cfg(name)
    if cfg is None or not (cfg.has_weights or cfg.hf_hub_id or cfg.url):
        raise WeightsError(
            f"timm has no pretrained weights for {name}. Give model.weights=PATH to a local "
            ".safetensors or .pth, or model.weights=null for random weights."
        )
    return cfg


@contextlib.contextmanager
def _download_errors(name: str, cfg: Any) -> Iterator[None]:
    """Turn errors of a download into a WeightsError that says what to do.

    If the name of the hub cannot be resolved, the error is raised at once.
    """
    import huggingface_hub
    import torch
    from huggingface_hub.constants import ENDPOINT, HF_HUB_CACHE

    repository = name.split(":", 1)[1] if cfg is None else cfg.hf_hub_id
    url = None if cfg is None else cfg.url
    # The file that is requested first: for hf-hub: names the architecture, otherwise the weights.
    files = ("config.json",) if cfg is None else ("model.safetensors", "pytorch_model.bin")
    checkpoints = Path(torch.hub.get_dir()) / "checkpoints"
    cached = (url and (checkpoints / Path(urlparse(url).path).name).exists()) or any(
        isinstance(huggingface_hub.try_to_load_from_cache(repository, file), str)
        for file in files
        if repository
    )

    def failed(reason: object) -> WeightsError:
        what, looked, way = str(url), str(checkpoints), f"download {url}"
        if repository:
            what, looked = f"{repository}/{files[0]}", HF_HUB_CACHE
            way = f"run `hf download {repository}`"
        return WeightsError(
            f"the weights {what} of {name} are not on this machine and cannot be downloaded "
            f"({reason}). Looked in {looked} and at {ENDPOINT if repository else url}. Either "
            f"{way} on a machine with internet access and copy the result into that folder, or "
            "give model.weights=PATH to a local .safetensors or .pth (model.weights=null runs "
            "with random weights)."
        )

    try:
        if repository and not cached and not urllib.request.getproxies():
            # The client of the hub would try an unresolvable name again for most of a minute.
            socket.getaddrinfo(urlparse(ENDPOINT).hostname, 443)
        yield
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"the weights of {name} in {HF_HUB_CACHE if repository else checkpoints} cannot be "
            f"read: {str(error).splitlines()[0]} Expected a file of tensors only."
        ) from error
    except (OSError, RuntimeError) as error:
        raise failed(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def knows(name: str) -> bool:
    """Whether timm has a model: by its name, by name.tag, or where only timm can look, such as
    hf-hub:owner/model."""
    return name.startswith(_SCHEMES) or name.split(".", 1)[0] in registered_names("timm")


LIBRARIES.register(
    library_member(
        "timm",
        "Models of timm, also of the Hugging Face Hub (hf-hub:owner/model).",
        TimmOptions,
        build=build,
        untrained=untrained,
        names=lambda: registered_names("timm"),
        knows=knows,
        auto_rank=2,
    )
)
