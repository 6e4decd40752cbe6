"""Names that other programs have for models, and what featx takes instead.

Another name is never taken silently: weights of one name differ between libraries. An unknown name
that other programs know ends in an error that names the options to type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from featx.models.catalogue import read_catalogue
from featx.models.hugging_face import HUB_NAME
from featx.models.json_files import find_json

_WEIGHTS = (".pth", ".pt", ".safetensors", ".bin", ".ckpt")
"""Endings of files of weights."""

_SHOWN_TAGS = 4
"""Largest number of tags of open_clip in a message."""


@dataclass(frozen=True)
class KnownModel:
    """A model that other programs name.

    Attributes:
        original: name in the code of its authors, or ''.
        code: that code, such as "torch.hub's".
        hugging_face: owner/model of the Hugging Face Hub for transformers, or ''.
        options: library -> what one types after `model=`.
        evidence: text in the library's own table of weights (URL or file) that shows that all
            `options` are the weights of `original`; '' if only the architecture is known to be the
            same.
    """

    original: str = ""
    code: str = ""
    hugging_face: str = ""
    options: tuple[tuple[str, str], ...] = ()
    evidence: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All names, also those of the hub without their owner."""
        return tuple(
            filter(None, (self.original, self.hugging_face, self.hugging_face.partition("/")[2]))
        )


def hint(name: str, names: Iterable[str]) -> str:
    """Return sentences that say what to type instead of an unknown name; '' if none is known.

    Args:
        name: name of a model that no library has.
        names: names of the models of the libraries that were asked.
    """
    sentences = list(_of_path(name)) or list(_of_known(name, names)) or list(_of_hub(name))
    return "".join(f" {sentence}" for sentence in sentences)


def plain(name: str) -> str:
    """Return a name in lower case without separators: 'ResNet-50' and 'resnet50' are equal."""
    return re.sub(r"[\W_]", "", name.lower())


def _of_path(name: str) -> Iterator[str]:
    """Yield what to type for a folder or a file of weights."""
    try:
        path = Path(name).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, RuntimeError):  # too long for a path; no such user
        return
    if is_file and path.suffix in _WEIGHTS:
        yield f"It is a file: model=NAME model.weights={name}, with the name of its model."
    elif is_folder:
        yield from _of_folder(name, path)
    elif not is_file and name.startswith(("/", "./", "../", "~")):
        yield "There is no such file or folder."


def _of_folder(name: str, path: Path) -> Iterator[str]:
    """Yield what to type for a folder that holds a model."""
    if (path / "open_clip_config.json").is_file():
        yield f"It is a folder of open_clip: model=open_clip model.name={name}."
        return
    config = find_json(path / "config.json")
    if config is None:
        if "/" in name:
            yield "It is a folder without the config.json of a model."
    elif "model_type" in config:
        yield f"It is a folder of transformers: model=transformers model.name={name}."
    elif "architecture" in config:
        yield f"It is a folder of timm: model=timm model.name=local-dir:{name}."


def _of_known(name: str, names: Iterable[str]) -> Iterator[str]:
    """Yield what to type for a name of other programs, or for another spelling of a name."""
    asked = name.lower()
    exact = [m for m in KNOWN if asked in (m.original.lower(), m.hugging_face.lower())]
    if exact:
        for model in exact:
            yield from _of_model(model, name)
        return
    yield from _of_other_library(name)
    if found := spellings(name, names):
        yield f"The name is spelled otherwise: {' or '.join(found)}."
    for model in KNOWN:
        # A model of the hub that has the name of an architecture says nothing more than that.
        if plain(name) in map(plain, model.names) and (model.original or not found):
            yield from _of_model(model, name)


def spellings(name: str, names: Iterable[str]) -> list[str]:
    """Return what to type for the names that differ from one in case and separators only.

    Args:
        name: unknown name.
        names: known names.
    """
    asked, known = plain(name), set(names)
    found = [
        f"model={entry.option} ({entry.library})"
        for entry in read_catalogue().entries
        if entry.name in known
        and name not in (entry.name, entry.full_name)
        and (plain(entry.full_name) == asked or (entry.is_default and plain(entry.name) == asked))
    ]
    return found or [f"model={each}" for each in sorted(known) if plain(each) == asked]


def _of_other_library(name: str) -> Iterator[str]:
    """Yield what to type for a name of a library that was not asked."""
    for entry in read_catalogue().entries:
        if entry.library != "open_clip" and name in (entry.full_name, entry.name):
            yield f"{entry.library} has it: model={entry.option}."
            return
    asked = name.replace("/", "-")
    tags = [
        entry.tag
        for entry in read_catalogue().entries
        if entry.library == "open_clip" and entry.name == asked and entry.tag
    ]
    if tags:
        shown = ", ".join(tags[:_SHOWN_TAGS]) + (", ..." if tags[_SHOWN_TAGS:] else "")
        yield (
            f"open_clip has it: model=open_clip model.name={asked} model.weights=TAG, with one of "
            f"the tags {shown}."
        )


def _of_model(model: KnownModel, name: str) -> Iterator[str]:
    """Yield what to type for a known model."""
    is_original = name.lower() == model.original.lower()
    if is_original or not model.hugging_face:
        yield f"{model.original} is {model.code} name."
    else:
        yield (
            f"{model.hugging_face} is a model of the Hugging Face Hub for transformers: "
            f"model=transformers model.name={model.hugging_face}."
        )
    for library, option in model.options:
        if not model.evidence:
            what = "the same architecture"
        elif is_original:
            what = "the same weights"
        else:
            what = f"the weights of {model.code} {model.original}"
        yield f"{library} has {what}: model={option}."
    if is_original and model.hugging_face:
        yield f"transformers: model=transformers model.name={model.hugging_face}."


def _of_hub(name: str) -> Iterator[str]:
    """Yield what to type for owner/model of the Hugging Face Hub."""
    if not HUB_NAME.fullmatch(name):
        return
    entries = [e for e in read_catalogue().entries if e.repository.lower() == name.lower()]
    for entry in entries:
        yield f"{entry.library} has the weights of {entry.repository}: model={entry.option}."
    if not entries:
        yield (
            "A name with a slash is that of a folder, which is not here, or of the Hugging Face "
            f"Hub: model=transformers model.name={name} if it is a model for transformers, "
            f"model=hf-hub:{name} if it is one for timm."
        )


def _torch_hub() -> Iterator[KnownModel]:
    """Yield the models of torch.hub of Meta."""
    hub = "torch.hub's"
    sizes = {"s": "small", "b": "base", "l": "large", "g": "giant"}
    for short, size in sizes.items():
        for suffix, of_hub, of_timm in (("", "", ""), ("_reg", "with-registers-", "_reg4")):
            yield KnownModel(
                f"dinov2_vit{short}14{suffix}",
                hub,
                f"facebook/dinov2-{of_hub}{size}",
                (("timm", f"vit_{size}_patch14{of_timm}_dinov2.lvd142m"),),
                f"dinov2_vit{short}14{of_timm}_pretrain.pth",
            )
    for short, size, file in (("s", "small", "deitsmall"), ("b", "base", "vitbase")):
        for patch in (8, 16):
            yield KnownModel(
                f"dino_vit{short}{patch}",
                hub,
                f"facebook/dino-vit{short}{patch}",
                (("timm", f"vit_{size}_patch{patch}_224.dino"),),
                f"dino_{file}{patch}_pretrain.pth",
            )
    vits = {
        "s16": "small_patch16",
        "s16plus": "small_plus_patch16",
        "b16": "base_patch16",
        "l16": "large_patch16",
        "h16plus": "huge_plus_patch16",
        "7b16": "7b_patch16",
    }
    for short, size in vits.items():
        yield KnownModel(
            f"dinov3_vit{short}",
            hub,
            f"facebook/dinov3-vit{short}-pretrain-lvd1689m",
            (("timm", f"vit_{size}_dinov3.lvd1689m"),),
        )
    for size in ("tiny", "small", "base", "large"):
        yield KnownModel(
            f"dinov3_convnext_{size}",
            hub,
            f"facebook/dinov3-convnext-{size}-pretrain-lvd1689m",
            (("timm", f"convnext_{size}.dinov3_lvd1689m"),),
        )


def _clip() -> Iterator[KnownModel]:
    """Yield the models of OpenAI's CLIP."""
    vits = {
        "ViT-B/32": ("base-patch32", "vit_base_patch32_clip_quickgelu_224"),
        "ViT-B/16": ("base-patch16", "vit_base_patch16_clip_quickgelu_224"),
        "ViT-L/14": ("large-patch14", "vit_large_patch14_clip_quickgelu_224"),
        "ViT-L/14@336px": ("large-patch14-336", "vit_large_patch14_clip_quickgelu_336"),
    }
    for name, (of_hub, of_timm) in vits.items():
        of_clip = name.replace("/", "-").replace("@336px", "-336")
        yield KnownModel(
            name,
            "OpenAI CLIP's",
            f"openai/clip-vit-{of_hub}",
            (
                ("open_clip", f"open_clip model.name={of_clip} model.weights=openai"),
                ("timm", f"{of_timm}.openai"),
            ),
            name.replace("/", "-").replace("@", "-") + ".pt",
        )
    for name in ("RN50", "RN101", "RN50x4", "RN50x16", "RN50x64"):
        yield KnownModel(
            name,
            "OpenAI CLIP's",
            options=(("open_clip", f"open_clip model.name={name} model.weights=openai"),),
            evidence=f"{name}.pt",
        )


def _mae() -> Iterator[KnownModel]:
    """Yield the masked autoencoders of Meta."""
    for size, patch in (("base", 16), ("large", 16), ("huge", 14)):
        yield KnownModel(
            f"mae_vit_{size}_patch{patch}",
            "the MAE code's",
            f"facebook/vit-mae-{size}",
            (("timm", f"vit_{size}_patch{patch}_224.mae"),),
            f"mae_pretrain_vit_{size}.pth",
        )


def _hub_models() -> Iterator[KnownModel]:
    """Yield further models of the Hugging Face Hub, with an architecture of timm or torchvision."""
    timm = {
        "google/vit-base-patch16-224": "vit_base_patch16_224.orig_in21k_ft_in1k",
        "google/vit-base-patch16-224-in21k": "vit_base_patch16_224.orig_in21k",
        "google/vit-base-patch16-384": "vit_base_patch16_384.orig_in21k_ft_in1k",
        "google/vit-base-patch32-224-in21k": "vit_base_patch32_224.orig_in21k",
        "google/vit-large-patch16-224-in21k": "vit_large_patch16_224.orig_in21k",
        "google/vit-large-patch32-384": "vit_large_patch32_384.orig_in21k_ft_in1k",
        "google/vit-huge-patch14-224-in21k": "vit_huge_patch14_224.orig_in21k",
        "microsoft/beit-base-patch16-224": "beit_base_patch16_224.in22k_ft_in22k_in1k",
        "microsoft/beit-large-patch16-224": "beit_large_patch16_224.in22k_ft_in22k_in1k",
        "microsoft/swin-tiny-patch4-window7-224": "swin_tiny_patch4_window7_224.ms_in1k",
        "microsoft/swin-small-patch4-window7-224": "swin_small_patch4_window7_224.ms_in1k",
        "microsoft/swin-base-patch4-window7-224": "swin_base_patch4_window7_224.ms_in22k_ft_in1k",
        "microsoft/swin-large-patch4-window7-224": "swin_large_patch4_window7_224.ms_in22k_ft_in1k",
        "microsoft/swinv2-tiny-patch4-window8-256": "swinv2_tiny_window8_256.ms_in1k",
        "microsoft/swinv2-small-patch4-window8-256": "swinv2_small_window8_256.ms_in1k",
        "microsoft/swinv2-base-patch4-window8-256": "swinv2_base_window8_256.ms_in1k",
        "google/siglip-base-patch16-224": "vit_base_patch16_siglip_224.webli",
        "google/siglip-base-patch16-256": "vit_base_patch16_siglip_256.webli",
        "google/siglip-base-patch16-384": "vit_base_patch16_siglip_384.webli",
        "google/siglip-base-patch16-512": "vit_base_patch16_siglip_512.webli",
        "google/siglip-large-patch16-256": "vit_large_patch16_siglip_256.webli",
        "google/siglip-large-patch16-384": "vit_large_patch16_siglip_384.webli",
        "google/siglip-so400m-patch14-224": "vit_so400m_patch14_siglip_224.webli",
        "google/siglip-so400m-patch14-384": "vit_so400m_patch14_siglip_384.webli",
        "google/siglip2-base-patch16-224": "vit_base_patch16_siglip_224.v2_webli",
        "google/siglip2-base-patch16-256": "vit_base_patch16_siglip_256.v2_webli",
        "google/siglip2-base-patch16-384": "vit_base_patch16_siglip_384.v2_webli",
        "google/siglip2-large-patch16-256": "vit_large_patch16_siglip_256.v2_webli",
        "google/siglip2-so400m-patch14-384": "vit_so400m_patch14_siglip_378.v2_webli",
        "facebook/convnextv2-tiny-1k-224": "convnextv2_tiny.fcmae_ft_in1k",
        "facebook/convnextv2-base-1k-224": "convnextv2_base.fcmae_ft_in1k",
        "facebook/convnextv2-tiny-22k-224": "convnextv2_tiny.fcmae_ft_in22k_in1k",
        "facebook/convnextv2-base-22k-224": "convnextv2_base.fcmae_ft_in22k_in1k",
    }
    for size in ("tiny", "small", "base"):
        for of_hub, of_timm in (("", ""), ("distilled-", "_distilled")):
            name = f"facebook/deit-{size}-{of_hub}patch16-224"
            timm[name] = f"deit_{size}{of_timm}_patch16_224.fb_in1k"
    for name, option in timm.items():
        yield KnownModel(hugging_face=name, options=(("timm", option),))
    for size in ("tiny", "small", "base", "large"):
        options = (
            ("timm", f"convnext_{size}.fb_in1k"),
            ("torchvision", f"convnext_{size}"),
        )
        yield KnownModel(hugging_face=f"facebook/convnext-{size}-224", options=options)
    torchvision = {
        **{f"microsoft/resnet-{depth}": f"resnet{depth}" for depth in (18, 34, 50, 101, 152)},
        **{f"google/efficientnet-b{size}": f"efficientnet_b{size}" for size in range(8)},
        "google/mobilenet_v2_1.0_224": "mobilenet_v2",
    }
    for name, option in torchvision.items():
        yield KnownModel(hugging_face=name, options=(("torchvision", option),))


KNOWN = (*_torch_hub(), *_clip(), *_mae(), *_hub_models())
"""Models that other programs name."""
