"""What to type instead of a name that a library does not have, and that other programs may have.

Another name is never taken silently: weights of one name differ between libraries.
"""

from __future__ import annotations

from pathlib import Path

from featx.models.catalogue import plain, read_catalogue
from featx.models.hugging_face import HUB_NAME, find_json

_MOST = 4
"""Largest number of models in a sentence."""


def hint(name: str) -> str:
    """Return sentences that say what to type instead of an unknown name; '' if none is known."""
    if found := _hint_of_path(name) or hint_elsewhere(name):
        return found
    if HUB_NAME.fullmatch(name):
        return (
            " A name with a slash is that of a folder, which is not here, or of the Hugging Face "
            f"Hub: model=transformers model.name={name} if it is a model for transformers, "
            f"model=hf-hub:{name} if it is one for timm."
        )
    return ""


def hint_elsewhere(name: str) -> str:
    """Return sentences about the models that libraries and other programs call alike.

    Case and separators do not count, and timm/NAME is NAME of timm.
    """
    key = plain(name)
    same: list[str] = []
    alike: list[str] = []
    transformers: list[str] = []
    for entry in read_catalogue().entries:
        others = [each.lstrip("~") for each in entry.also]
        names = {entry.full_name, *others, *(each.rpartition("/")[2] for each in others)}
        if entry.is_default or entry.library == "open_clip":
            names |= {entry.name, f"{entry.library}/{entry.name}"}
        is_same = name.lower() in (entry.repository.lower(), *map(str.lower, entry.also))
        if is_same or key in map(plain, names):
            (same if is_same else alike).append(f"model={entry.option} ({entry.library})")
            transformers += [each[1:] for each in entry.also if each[0] == "~" and "/" in each]
    folders = [f"model=transformers model.name={each}" for each in dict.fromkeys(transformers)]
    parts = {
        "The same weights": same,
        "The same name or architecture": [] if same else alike,
        "A model of the Hugging Face Hub": folders,
    }
    return "".join(
        f" {title}: {' or '.join(options[:_MOST])}{', ...' if options[_MOST:] else ''}."
        for title, options in parts.items()
        if options
    )


def _hint_of_path(name: str) -> str:
    """Return what to type for a file of weights or a folder of a model; '' for another name."""
    try:
        path = Path(name).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, RuntimeError):  # too long for a path; no such user
        return ""
    config = find_json(path / "config.json") if is_folder else None
    if is_file and path.suffix in (".pth", ".pt", ".safetensors", ".bin", ".ckpt"):
        return f" It is a file: model=NAME model.weights={name}, with the name of its model."
    if is_folder and (path / "open_clip_config.json").is_file():
        return f" It is a folder of open_clip: model=open_clip model.name={name}."
    if config is not None and "model_type" in config:
        return f" It is a folder of transformers: model=transformers model.name={name}."
    if config is not None and "architecture" in config:
        return f" It is a folder of timm: model=timm model.name=local-dir:{name}."
    if is_folder and config is None and "/" in name:
        return " It is a folder without the config.json of a model."
    if not (is_file or is_folder) and name.startswith(("/", "./", "../", "~")):
        return " There is no such file or folder."
    return ""
