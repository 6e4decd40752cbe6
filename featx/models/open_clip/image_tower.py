"""The part of a CLIP model that reads images: weights, preprocessing, embedding and tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from featx.errors import ModelError, WeightsError, first_line, one_line
from featx.models.hugging_face import is_cached, resolve_hub
from featx.models.open_clip.sources import ClipSource, import_open_clip

if TYPE_CHECKING:
    import torch

    from featx.images import Preprocess
    from featx.models.base import LibraryEmbedding
    from featx.models.open_clip.options import OpenClipOptions


def random_tower(source: ClipSource, seed: int) -> torch.nn.Module:
    """Return the image tower with open_clip's initialisation.

    The text tower is not built: it has as many parameters, and may need files of the hub.

    Args:
        source: the model.
        seed: seed of the random weights.

    Raises:
        ModelError: the configuration describes no image tower.
    """
    import_open_clip()
    from open_clip.model import _build_vision_tower

    from featx.models.base import seeded

    try:
        vision = {**source.model["vision_cfg"], "timm_model_pretrained": False}
        with seeded(seed):
            module: torch.nn.Module = _build_vision_tower(
                source.model["embed_dim"], vision, source.uses_quick_gelu
            )
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        reason = one_line(error)
        raise ModelError(f"open_clip cannot build {source.name}: {reason}.") from error
    return module.eval()


def load_tower(
    source: ClipSource, config: OpenClipOptions, seed: int
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return the image tower with its weights, and what the fingerprint says about their loading.

    Args:
        source: the model.
        config: options, of which `checkpoint` is read.
        seed: seed of random weights.

    Raises:
        WeightsError: the weights cannot be downloaded, read or loaded.
    """
    from featx.models.checkpoint import load_match, read_weights
    from featx.models.checkpoint_match import match_checkpoint

    if source.tag is not None:
        return _of_tag(source), {}
    module = random_tower(source, seed)
    if source.file is None:
        return module, {}
    origin = str(source.file)
    state = read_weights(source.file, config.checkpoint.sha256)
    match = match_checkpoint(module, state, origin, config.checkpoint)
    return module, load_match(module, match, origin)


def _of_tag(source: ClipSource) -> torch.nn.Module:
    """Return the image tower of a tag, as open_clip loads it: the whole model, strictly.

    Raises:
        WeightsError: the weights are not on this machine and cannot be downloaded.
    """
    open_clip = import_open_clip()
    with download_errors(open_clip.get_pretrained_cfg(source.name, source.tag), source):
        model = open_clip.create_model(
            source.name, pretrained=source.tag, force_quick_gelu=source.uses_quick_gelu
        )
    module: torch.nn.Module = model.visual
    return module.eval()


@contextlib.contextmanager
def download_errors(pretrained_cfg: dict[str, Any], source: ClipSource) -> Iterator[None]:
    """Turn errors of a download into a WeightsError that says what to do.

    If the name of the server cannot be resolved, the error is raised at once.
    """
    repository = str(pretrained_cfg.get("hf_hub") or "").strip("/")
    parts = repository.split("/")
    files = parts[2:] or ["open_clip_model.safetensors", "open_clip_pytorch_model.bin"]
    repository = "/".join(parts[:2])
    try:
        if repository and "file" not in pretrained_cfg and not is_cached(repository, files):
            resolve_hub()
        yield
    except (OSError, RuntimeError, ValueError) as error:
        reason = first_line(error)
        advice = f"`hf download {repository}`" if repository else pretrained_cfg.get("url")
        raise WeightsError(
            f"the weights {source.tag} of {source.name} are not on this machine and cannot be "
            f"loaded ({reason}). Fetch them with {advice} on a machine with internet access, and "
            f"give the file: model.weights=FILE model.weights_like={source.tag}."
        ) from error


def preprocess_of(source: ClipSource, module: torch.nn.Module) -> Preprocess:
    """Return open_clip's evaluation transform for the weights of a model.

    Args:
        source: the model.
        module: its image tower, which knows the size of its images.
    """
    import_open_clip()
    from open_clip.transform import PreprocessCfg, image_transform_v2, merge_preprocess_dict

    from featx.images import Preprocess

    values = merge_preprocess_dict(PreprocessCfg(), dict(source.preprocess))
    values["size"] = getattr(module, "image_size", values["size"])
    cfg = PreprocessCfg(**values)
    _, height, width = cfg.input_size
    # open_clip pads for `longest`, and resizes otherwise for images that are not square.
    resize: int | tuple[int, int] | None = None
    if cfg.resize_mode == "squash":
        resize = (height, width)
    elif cfg.resize_mode == "shortest" and height == width:
        resize = height
    return Preprocess(
        reference=image_transform_v2(cfg, is_train=False),
        crop=(height, width),
        resize=resize,
        interpolation="bilinear" if cfg.interpolation == "bilinear" else "bicubic",
        mean=(cfg.mean[0], cfg.mean[1], cfg.mean[2]),
        std=(cfg.std[0], cfg.std[1], cfg.std[2]),
    )


def embedding_of(module: torch.nn.Module, is_normalised: bool) -> LibraryEmbedding:
    """Return the embedding of an image, as encode_image computes it.

    Args:
        module: image tower.
        is_normalised: whether it is divided by its length.
    """
    import torch.nn.functional as F

    from featx.models.base import LibraryEmbedding, expose_embedding

    def embedding(output: Any) -> torch.Tensor:
        # The towers of CoCa return their tokens as well.
        vector: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return F.normalize(vector, dim=-1) if is_normalised else vector

    return LibraryEmbedding(
        lambda x: embedding(module(x)), lambda: expose_embedding(module, embedding)
    )


def num_prefix_tokens(module: Any) -> int:
    """Return the number of class and register tokens before the patch tokens of a tower."""
    if hasattr(module, "trunk"):  # a model of timm
        return int(getattr(module.trunk, "num_prefix_tokens", 0))
    return int(hasattr(module, "class_embedding"))


def has_class_token(module: Any) -> bool:
    """Return whether the first of these is a class token."""
    if hasattr(module, "trunk"):
        return getattr(module.trunk, "cls_token", None) is not None
    return hasattr(module, "class_embedding")


def stages_of(module: Any) -> tuple[str, ...] | None:
    """Return the names of the stages of a tower, or None to find them from shapes."""
    from featx.models.timm_metadata import timm_stages

    if hasattr(module, "trunk"):
        names = timm_stages(module.trunk)
        return None if names is None else tuple(f"trunk.{name}" for name in names)
    if hasattr(module, "transformer"):
        number = len(module.transformer.resblocks)
        return tuple(f"transformer.resblocks.{i}" for i in range(number))
    names = tuple(f"layer{i}" for i in range(1, 5))
    return names if all(hasattr(module, name) for name in names) else None
