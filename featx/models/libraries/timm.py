"""model=timm: backbones of timm, with their pretrained tags and data configs."""

from __future__ import annotations

import contextlib
import inspect
import math
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from featx.base import log_message
from featx.config import LibraryModelConfig, check_weights_like, options
from featx.errors import ConfigError, FeatxError, ModelError, WeightsError, first_line, one_line
from featx.models.catalogue import hint
from featx.models.hugging_face import is_cached, read_json, resolve_hub
from featx.models.libraries.registry import LIBRARIES, ModelLibrary
from featx.models.timm_metadata import timm_classes, timm_stages

if TYPE_CHECKING:
    from torch import nn

    from featx.images import Preprocess
    from featx.models.base import Backbone, LibraryEmbedding

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


@options("model")
class TimmOptions(LibraryModelConfig):
    """Options of model=timm."""

    name: str = ""
    library: str = "timm"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_args(_REFUSED_ARGS)
        if "img_size" in self.args:
            raise ConfigError(
                "model.args.img_size cannot be given: 'model.input_size=[HEIGHT,WIDTH]' sets the "
                "size of the model and of its images together."
            )
        num = self.args.get("in_chans", 3)
        mean, std = self.transform.mean or (), self.transform.std or ()
        if num != 3 and (self.transform.scale is None or not len(mean) == len(std) == num):
            values = ",".join(["0.5"] * num) if type(num) is int else "..."
            raise ConfigError(
                f"model.args.in_chans={num}: images are RGB of 8 bits, unless the options say how "
                "their numbers become those of the model. Give model.transform.scale, such as "
                "65535, and mean and standard deviation of each channel, of values after the "
                f"division: 'model.transform.mean=[{values}]' 'model.transform.std=[{values}]'."
            )

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) of the images in pixels, or None for the size of the weights."""
        return None if self.input_size is None else (self.input_size[0], self.input_size[1])


class Timm(ModelLibrary[TimmOptions]):
    """Models of timm."""

    def build(self, config: TimmOptions, seed: int) -> Backbone:
        """Build a timm model: `name`, `name.tag`, or `hf-hub:owner/model`."""
        from featx.models.base import config_sha256, random_id
        from featx.models.preprocessing import change_preprocess

        file = config.weights_file
        check_weights_like(config.weights_like, has_file=file is not None)
        config.checkpoint.check_effect(has_file=file is not None, is_converted=True)
        name = _tagged_name(config)
        loading: Mapping[str, object] = {}
        missing: tuple[str, ...] = ()
        if file is not None:
            module, loading, missing = _create_from_file(file, config, name, seed)
            origin = file
        elif config.weights is None:
            module, origin = _create_offline(name, config.args, config.size, seed), random_id(seed)
        else:
            module = _create_pretrained(name, config, seed)
            origin = f"timm {module.pretrained_cfg.get('tag') or 'default'}"
        is_rgb = config.transform.scale is None
        backbone = wrap(module, f"timm/{name}", origin, config.size, is_rgb)
        backbone.preprocess = change_preprocess(backbone.preprocess, config.transform)
        if file is None and config.weights is not None and module.num_classes:
            backbone.classes, backbone.class_ids = timm_classes(module)
        backbone.args = dict(config.args)
        backbone.checkpoint, backbone.missing_heads = loading, missing
        if name.startswith(_LOCAL):
            of_folder = read_json(Path(name.removeprefix(_LOCAL)) / "config.json")
            backbone.provenance = {"config_sha256": config_sha256(of_folder)}
        return backbone

    def untrained(self, config: TimmOptions, seed: int) -> nn.Module:
        """The architecture with timm's initialisation, and the classes of a file in `weights`."""
        file, args = config.weights_file, config.args
        name = _tagged_name(config)
        if file is not None and "num_classes" not in args:
            loaded, _, _ = _create_from_file(file, config, name, seed)
            args = {**args, "num_classes": loaded.num_classes}
        module: nn.Module = _create_offline(name, args, config.size, seed)
        return module

    def knows(self, name: str) -> bool:
        """Return whether timm has NAME or NAME.TAG, or may find hf-hub:NAME and its like."""
        return name.startswith(_SCHEMES) or super().knows(name.split(".")[0])

    def own_names(self) -> list[str]:
        """Return what timm lists, which is not its deprecated names."""
        import timm

        return timm.list_models()

    def weight_files(self, config: TimmOptions) -> list[Path] | None:
        """Return the file of the weights; a tag may be another file of the hub tomorrow."""
        if config.name.startswith(_SCHEMES):
            return None
        if config.weights_file is not None:
            return [Path(config.weights_file)]
        return [] if config.weights is None else None


def _refuse_other_weights(old: str, name: str) -> None:
    """Refuse a deprecated name whose weights timm has under a tag that it no longer loads for it.

    timm loads resmlp_12_224.fb_in1k for resmlp_12_224_dino, whose weights are
    resmlp_12_224.fb_dino.
    """
    import timm

    word = old.removeprefix(f"{name}_")
    tagged = [each for each in timm.list_pretrained(f"{name}.*") if word in each.partition(".")[2]]
    if "." not in name and word != old and tagged:
        raise ConfigError(
            f"model.name={old} is a deprecated name of timm, which would load other weights for "
            f"it than the name says. Give model={' or model='.join(tagged)}."
        )


def _tagged_name(config: TimmOptions) -> str:
    """Return the name of a model with the tag of its weights, or of weights that a file is like."""
    import timm
    from timm.models._registry import _deprecated_models

    name = str(_deprecated_models.get(config.name) or config.name)
    if name != config.name:
        _refuse_other_weights(config.name, name)
        text = f"model.name={config.name} is a deprecated name of timm, which loads {name} for it"
        log_message(text, level="warning")
    if config.weights_like is not None:
        if "." in name.split(":")[-1] or ":" in name:
            raise ConfigError(
                f"model.weights_like={config.weights_like}: model.name={name} says already which "
                "preprocessing the file has. Leave one of them out."
            )
        name = f"{name}.{config.weights_like}"
    elif config.weights not in (None, "default") and config.weights_file is None:
        name = f"{name.split('.', 1)[0]}.{config.weights}"
    if ":" not in name and "." in name:
        base, tag = name.split(".", 1)
        tags = [each.split(".", 1)[1] for each in timm.list_pretrained(f"{base}.*")]
        if tag not in tags:
            known = ", ".join(tags) or "none"
            raise WeightsError(f"timm has no weights {tag!r} for {base}; it has: {known}.")
    return name


# Creation of the module


def _create(
    name: str, pretrained: bool, args: Mapping[str, Any], size: tuple[int, int] | None, seed: int
) -> nn.Module:
    """Create a model for images of `size`, (height, width), or of the size of the weights."""
    import timm

    from featx.models.base import seeded

    def create(**more: object) -> nn.Module:
        with seeded(seed):
            return timm.create_model(name, pretrained=pretrained, **{**args, **more})

    try:
        if size is None:
            return create()
        try:
            module = create(img_size=size)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            module = create()  # a convolutional network, which takes images of any size
    except FeatxError:  # about the weights; some are a ValueError as well
        raise
    except (
        TypeError, ValueError, AssertionError, AttributeError, KeyError, RuntimeError,
    ) as error:  # fmt: skip
        if isinstance(error, RuntimeError) and "Unknown model" not in str(error):
            raise  # about a download or the weights
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
    return module


def _create_offline(
    name: str, args: Mapping[str, Any], size: tuple[int, int] | None, seed: int
) -> nn.Module:
    """Create a model without weights; only a model that the hub alone knows is downloaded."""
    if name.startswith(_LOCAL):
        _check_folder(name)
    elif ":" in name:
        with _weights_errors(name, None, is_random=True):
            return _create(name, False, args, size, seed)
    return _create(name, False, args, size, seed)


def _create_pretrained(name: str, config: TimmOptions, seed: int) -> Any:
    """Create a model with weights of timm, the hub or a folder."""
    import timm

    size, cfg = config.size, None
    if name.startswith(_LOCAL):
        _check_folder(name)
    elif ":" not in name:
        cfg = timm.get_pretrained_cfg(name)
        if cfg is None or not (cfg.has_weights or cfg.hf_hub_id or cfg.url):
            raise WeightsError(
                f"timm has no pretrained weights for {name}. Give model.weights=PATH to a local "
                ".safetensors or .pth, or model.weights=null for random weights."
            )
    with _weights_errors(name, cfg):
        module = _create(name, True, config.args, size, seed)
        if config.args or size:
            _check_whole(name, module, config, seed)
    return module


def _create_from_file(
    file: str, config: TimmOptions, name: str, seed: int
) -> tuple[nn.Module, Mapping[str, object], tuple[str, ...]]:
    """Create a model with the tensors of a file, as `load_with_heads` does.

    A head that the file lacks, or that does not fit, is left out, unless model.args states the
    number of classes.
    """
    from featx.models.checkpoint import load_with_heads
    from featx.models.checkpoint_match import timm_conversion

    module = _create_offline(name, config.args, config.size, seed)
    names = (getattr(module, "pretrained_cfg", None) or {}).get("classifier") or ()
    heads = (names,) if isinstance(names, str) else tuple(names)
    conversion = timm_conversion(module)
    convert = config.checkpoint.convert
    if convert in ("timm", "resample") and conversion is None:
        raise ConfigError(
            f"model.checkpoint.convert={convert}: timm has no function that converts files of "
            f"{name}. Leave the option out."
        )

    def with_classes(number: int) -> nn.Module:
        if number == module.num_classes:
            return module
        return _create_offline(name, {**config.args, "num_classes": number}, config.size, seed)

    change = None if "num_classes" in config.args else with_classes
    return load_with_heads(module, file, config.checkpoint, heads, change, conversion)


# Weights: what exists, what can be downloaded, and whether they fill a model


def _check_folder(name: str) -> None:
    """Check that the folder of a model local-dir:FOLDER holds its config as timm writes it."""
    folder = Path(name.removeprefix(_LOCAL))
    file = folder / "config.json"
    if not file.is_file():
        raise WeightsError(
            f"model.name={name}: there is no {file}. Expected a folder with config.json and "
            "model.safetensors, as timm.models.save_for_hf writes it."
        )
    config = read_json(file)
    if config.get("model_type") == "timm_wrapper":  # with other names of the tensors
        raise WeightsError(
            f"{folder} was written by transformers around a model of timm. Give the model and the "
            f"file: model.name={config.get('architecture', 'NAME')} "
            f"model.weights={folder / 'model.safetensors'}."
        )


@contextlib.contextmanager
def _weights_errors(name: str, cfg: Any, is_random: bool = False) -> Iterator[None]:
    """Turn errors of downloading and loading weights into a WeightsError that says what to do.

    If the name of the hub cannot be resolved, the error is raised at once. `cfg` is timm's config
    of the weights; a model of a folder or of the hub has none. With `is_random` only the
    config.json of the model is read.
    """
    import torch
    from huggingface_hub.constants import ENDPOINT, HF_HUB_CACHE
    from safetensors import SafetensorError

    is_folder = name.startswith(_LOCAL)
    repository = name.split(":", 1)[1] if cfg is None else cfg.hf_hub_id
    url = None if cfg is None else cfg.url
    # The file that is requested first: for hf-hub: names the architecture, otherwise the weights.
    files = ("config.json",) if cfg is None else ("model.safetensors", "pytorch_model.bin")
    checkpoints = Path(torch.hub.get_dir()) / "checkpoints"
    has_file = url and (checkpoints / Path(urlparse(url).path).name).exists()
    try:
        if repository and not (is_folder or has_file or is_cached(repository, files)):
            resolve_hub()
        yield
    except (OSError, RuntimeError, pickle.UnpicklingError, SafetensorError) as error:
        if is_folder:
            raise WeightsError(
                f"model.name={name}: the weights of this folder do not load: {one_line(error)}. "
                "Expected the tensors of the architecture in config.json with the given "
                "model.args, as timm.models.save_for_hf writes them."
            ) from error
        if isinstance(error, RuntimeError) and "loading state_dict" in str(error):
            raise WeightsError(
                f"the weights of {name} do not fit the model that model.args and model.input_size "
                f"ask for: {one_line(error)}"
            ) from error
        place = HF_HUB_CACHE if repository else checkpoints
        if isinstance(error, pickle.UnpicklingError | SafetensorError):
            raise WeightsError(
                f"the weights of {name} in {place} cannot be read: {first_line(error)} Expected a "
                "file of tensors only."
            ) from error
        weights, advice = str(url), f"download {url}"
        if repository:
            weights, advice = f"{repository}/{files[0]}", f"run `hf download {repository}`"
        if is_random:
            raise WeightsError(
                f"{weights}, which says what {name} is, is not on this machine and cannot be "
                f"downloaded ({first_line(error)}). Looked in {place} and at {ENDPOINT}. Either "
                f"{advice} on a machine with internet access and copy the result into that folder, "
                "or name a model of timm without hf-hub:, which needs no file for random weights."
                f"{hint(str(repository)) if '/' in str(repository) else ''}"
            ) from error
        raise WeightsError(
            f"the weights {weights} of {name} are not on this machine and cannot be downloaded "
            f"({first_line(error)}). Looked in {place} and at {ENDPOINT if repository else url}. "
            f"Either {advice} on a machine with internet access and copy the result into that "
            "folder, or give model.weights=PATH to a local .safetensors or .pth "
            "(model.weights=null runs with random weights)."
        ) from error


def _check_whole(name: str, module: nn.Module, config: TimmOptions, seed: int) -> None:
    """Check that weights leave no parameter of a model at its initial value.

    timm loads without `strict` if model.args change the head or the pooling, and reports parameters
    that the weights lack (such as fc_norm of global_pool=avg) to its log only. So values are
    compared: what equals the initial value was loaded only if the model without these arguments has
    the same value under the same name.
    """
    from featx.models.base import tensor_digest
    from featx.models.checkpoint_match import COUNTER

    def digests(of_module: nn.Module) -> dict[str, bytes]:
        """Digest of each tensor, so that two models need not be in memory at once."""
        return {key: tensor_digest(tensor) for key, tensor in of_module.state_dict().items()}

    loaded = digests(module)
    initial = digests(_create(name, False, config.args, config.size, seed))
    same = [key for key in loaded if loaded[key] == initial.get(key) and not key.endswith(COUNTER)]
    default = digests(_create(name, True, {}, None, seed)) if same else {}
    if absent := [key for key in same if loaded[key] != default.get(key)]:
        raise WeightsError(
            f"the weights of {name} lack {', '.join(absent[:5])}{', ...' if absent[5:] else ''} of "
            "the model that model.args ask for, which would stay random. Leave the argument out "
            "that adds these parameters; model.args.num_classes=0 builds a model without its head."
        )


# The backbone of a module


def wrap(
    module: nn.Module,
    name: str,
    weights: str,
    size: tuple[int, int] | None = None,
    is_rgb: bool = True,
) -> Backbone:
    """Make a backbone of a timm model; `size` and `is_rgb` are as for `preprocess_of`."""
    from featx.models.base import Backbone

    return Backbone(
        module=module,
        name=name,
        weights=weights,
        preprocess=preprocess_of(module, size, is_rgb),
        num_prefix_tokens=int(getattr(module, "num_prefix_tokens", 0)),
        has_class_token=any(
            name.rpartition(".")[2] == "cls_token" for name, _ in module.named_parameters()
        ),
        embedding=embedding_of(module),
        stages=timm_stages(module),
        reentrant=True,
    )


def preprocess_of(
    module: nn.Module, size: tuple[int, int] | None = None, is_rgb: bool = True
) -> Preprocess:
    """timm's evaluation transform for the weights of a module.

    Images of another `size` (height, width) get the share of the centre that the weights ask for.
    The channels of images that are not RGB of 8 bits are stated by options.
    """
    from timm.data.config import resolve_model_data_config
    from timm.data.transforms_factory import create_transform

    from featx.images import Preprocess

    asked = {} if size is None else {"input_size": (3, *size)}
    try:
        data = resolve_model_data_config(module, asked)  # type: ignore[no-untyped-call]
        channels, height, width = data["input_size"]
        scaled = math.floor(height / data["crop_pct"]), math.floor(width / data["crop_pct"])
        mean, std = (tuple(data[key]) for key in ("mean", "std"))
        reference = create_transform(**data, is_training=False)
    except Exception as error:  # of many kinds, about the config.json of a folder or of the hub
        raise ModelError(
            f"timm cannot prepare images as the config of this model says: {one_line(error)}."
        ) from error
    if is_rgb and channels != 3:
        raise ModelError(
            f"this model takes {channels} channels, and images are RGB of 8 bits, unless "
            "model.transform.scale, mean and std say otherwise."
        )
    # timm resizes in four ways, and the fast path follows two of them. Borders, and sizes that are
    # not square but keep the proportions of the image, are left to timm.
    resize: int | tuple[int, int] | None = None
    if data["crop_mode"] == "squash":
        resize = scaled
    elif data["crop_mode"] == "center" and scaled[0] == scaled[1]:
        resize = scaled[0]
    return Preprocess(
        reference=reference,
        crop=(height, width),
        resize=resize,
        interpolation=data["interpolation"],
        mean=mean,
        std=std,
    )


def embedding_of(module: Any) -> LibraryEmbedding:
    """timm's own embedding: the pre-logits, or the output of a model without a classifier."""
    from featx.models.base import LibraryEmbedding

    # The encoder of MobileNetV5 lacks the argument that all other models of timm have. It is looked
    # for now, because the class that `_expose_pre_logits` makes has another signature.
    head = getattr(module, "forward_head", None)
    has_argument = head is not None and "pre_logits" in inspect.signature(head).parameters

    def compute(x: Any) -> Any:
        if not has_argument:
            return module(x)
        try:
            return module.forward_head(module.forward_features(x), pre_logits=True)
        except NotImplementedError:  # an encoder without a classifier
            return module(x)

    return LibraryEmbedding(compute, lambda: _expose_pre_logits(module))


def _expose_pre_logits(module: Any) -> None:
    """Add a module `pre_logits` to a model; each forward pass calls it with the pre-logits.

    The class of the model becomes a subclass, as by `expose_embedding`.
    """
    from torch import nn

    base: Any = type(module)

    class WithPreLogits(base):  # type: ignore[misc]
        def forward_head(self, x: object, *args: object, **keywords: object) -> object:
            logits = super().forward_head(x, *args, **keywords)
            if not keywords.get("pre_logits"):
                self.pre_logits(super().forward_head(x, pre_logits=True))
            return logits

    WithPreLogits.__name__, WithPreLogits.__qualname__ = base.__name__, base.__qualname__
    module.add_module("pre_logits", nn.Identity())
    module.__class__ = WithPreLogits


LIBRARIES.register(
    Timm(
        "timm",
        "Models of timm, also of the Hugging Face Hub (hf-hub:owner/model).",
        TimmOptions,
        auto_rank=2,
    )
)
