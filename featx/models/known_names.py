"""Names that other programs have for models, and what featx takes instead.

Another name is never taken silently: weights of one name differ between libraries. An unknown name
that other programs know ends in an error that names the options to type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from featx.models.catalogue import read_catalogue
from featx.models.hugging_face import HUB_NAME, find_json
from featx.models.known_models import KnownModel, known_models
from featx.models.model_names import registered_names
from featx.models.transformers.families import FAMILIES

_WEIGHTS = (".pth", ".pt", ".safetensors", ".bin", ".ckpt")
"""Endings of files of weights."""

_SHOWN_TAGS = 4
"""Largest number of tags of open_clip in a message."""


def hint(name: str, names: Iterable[str]) -> str:
    """Return sentences that say what to type instead of an unknown name; '' if none is known.

    Args:
        name: name of a model that no library has.
        names: names of the models of the libraries that were asked.
    """
    sentences = (
        list(_hints_of_path(name))
        or list(_hints_of_known(name, names))
        or list(_hints_of_hub(name))
    )
    return "".join(f" {sentence}" for sentence in sentences)


def hint_elsewhere(name: str) -> str:
    """Return sentences about a name that another library or another program has for a model.

    Args:
        name: name of a model that its library, such as transformers, does not find.
    """
    names = (registered_names("torchvision") | registered_names("timm")) - {name}
    sentences = [each for each in _hints_of_known(name, names) if f"model.name={name}." not in each]
    return "".join(f" {sentence}" for sentence in sentences)


def hint_of_family(name: str) -> str:
    """Return a sentence about a name that is a family of transformers; '' if it is none."""
    if name.lower() not in FAMILIES:
        return ""
    return (
        f" {name.lower()} is a family of transformers: model=transformers model.name=FOLDER, with "
        "a folder of save_pretrained."
    )


def plain(name: str) -> str:
    """Return a name in lower case without separators: 'ResNet-50' and 'resnet50' are equal."""
    return re.sub(r"[\W_]", "", name.lower())


def _hints_of_path(name: str) -> Iterator[str]:
    """Yield what to type for a folder or a file of weights."""
    try:
        path = Path(name).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, RuntimeError):  # too long for a path; no such user
        return
    if is_file and path.suffix in _WEIGHTS:
        yield f"It is a file: model=NAME model.weights={name}, with the name of its model."
    elif is_folder:
        yield from _hints_of_folder(name, path)
    elif not is_file and name.startswith(("/", "./", "../", "~")):
        yield "There is no such file or folder."


def _hints_of_folder(name: str, path: Path) -> Iterator[str]:
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


def _hints_of_known(name: str, names: Iterable[str]) -> Iterator[str]:
    """Yield what to type for a name of other programs, or for another spelling of a name."""
    lower = name.lower()
    exact = [m for m in known_models() if lower in (m.original.lower(), m.hugging_face.lower())]
    if exact:
        for model in exact:
            yield from _hints_of_model(model, name)
        return
    yield from _hints_of_other_library(name)
    if spelled := spellings(name, names):
        yield f"The name is spelled otherwise: {' or '.join(spelled)}."
    for model in known_models():
        # A model of the hub that has the name of an architecture says nothing more than that.
        if plain(name) in map(plain, model.names) and (model.original or not spelled):
            yield from _hints_of_model(model, name)


def spellings(name: str, names: Iterable[str]) -> list[str]:
    """Return what to type for the names that differ from one in case and separators only.

    Args:
        name: unknown name.
        names: known names.
    """
    plain_name, known_names = plain(name), set(names)
    options = [
        f"model={entry.option} ({entry.library})"
        for entry in read_catalogue().entries
        if entry.name in known_names
        and name not in (entry.name, entry.full_name)
        and (
            plain(entry.full_name) == plain_name
            or (entry.is_default and plain(entry.name) == plain_name)
        )
    ]
    return options or [f"model={each}" for each in sorted(known_names) if plain(each) == plain_name]


def _hints_of_other_library(name: str) -> Iterator[str]:
    """Yield the options to type for a name of another library, also if it is typed LIBRARY/NAME."""
    owner, _, rest = name.partition("/")
    for entry in read_catalogue().entries:
        if entry.library != "open_clip" and name in (entry.full_name, entry.name):
            yield f"{entry.library} has it: model={entry.option}."
            return
        is_repository = entry.repository.lower() == name.lower()
        if entry.library == owner and rest in (entry.full_name, entry.name) and not is_repository:
            yield f"{entry.library} has {rest}: model={entry.option}."
            return
    architecture = name.replace("/", "-")
    tags = [
        entry.tag
        for entry in read_catalogue().entries
        if entry.library == "open_clip" and entry.name == architecture and entry.tag
    ]
    if tags:
        tags_text = ", ".join(tags[:_SHOWN_TAGS]) + (", ..." if tags[_SHOWN_TAGS:] else "")
        yield (
            f"open_clip has it: model=open_clip model.name={architecture} model.weights=TAG, with "
            f"one of the tags {tags_text}."
        )


def _hints_of_model(model: KnownModel, name: str) -> Iterator[str]:
    """Yield what to type for a known model."""
    is_original = name.lower() == model.original.lower()
    if is_original or not model.hugging_face:
        yield f"{model.original} is {model.code}'s name."
    else:
        yield (
            f"{model.hugging_face} is a model of the Hugging Face Hub for transformers: "
            f"model=transformers model.name={model.hugging_face}."
        )
    for library, option in model.options:
        if not model.evidence:
            weights = "the same architecture"
        elif is_original:
            weights = "the same weights"
        else:
            weights = f"the weights of {model.code}'s {model.original}"
        yield f"{library} has {weights}: model={option}."
    if is_original and model.hugging_face:
        yield f"transformers: model=transformers model.name={model.hugging_face}."


def _hints_of_hub(name: str) -> Iterator[str]:
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
