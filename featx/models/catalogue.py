"""Facts about the models of torchvision, timm and open_clip, read without importing these.

The figures are in catalogue.tsv, which scripts/model_catalogue makes from the libraries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from featx.models.model_names import registered_names

FILE = Path(__file__).with_name("catalogue.tsv")

OWN_REPOSITORY = "="
"""Abbreviation in the file for the repository timm/NAME.TAG."""

COLUMNS = (
    *("library", "name", "tag", "width", "input", "parameters", "licence"),
    *("repository", "file"),
)
"""Columns of the file; a figure that is not known is empty."""


@dataclass(frozen=True)
class CatalogueEntry:
    """A model with certain weights.

    Attributes:
        library: name of the library that builds it.
        name: name in the library.
        tag: the library's name of the weights; '' for a model without pretrained weights, or whose
            weights have no name.
        width: number of values of the embedding; None if it is not known, or if the model has no
            vector for an image.
        input_size: (height, width) of the images in pixels; None if it is not known.
        parameters: number of parameters, of a CLIP model those of the image tower; None if it is
            not known.
        licence: licence of the weights as the library states it; '' if it states none.
        repository: owner/model of the Hugging Face Hub with the weights, or ''.
        file: name of the file of the weights, or '' for the usual names of the hub.
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
    is_default: bool = False
    in_file: bool = False

    @property
    def full_name(self) -> str:
        """Name with the tag: 'resnet50.a1_in1k' for timm, 'resnet50 IMAGENET1K_V2' elsewhere."""
        return f"{self.name}{'.' if self.library == 'timm' else ' '}{self.tag}".rstrip(". ")

    @property
    def option(self) -> str:
        """Text to type after `model=`, such as 'resnet50' or 'timm model.name=resnet50'."""
        if self.library == "packaged":
            return self.name
        if self.library == "timm" and self.tag:
            return self.full_name
        # The library torchvision is asked before timm, so that a name of both needs a library.
        found_by_name = self.library == "torchvision" or (
            self.library == "timm" and self.name not in _names_before_timm()
        )
        text = self.name if found_by_name else f"{self.library} model.name={self.name}"
        if self.is_default or not self.in_file:
            return text
        return f"{text} model.weights={self.tag or 'null'}"


@dataclass(frozen=True)
class Catalogue:
    """Content of the file.

    Attributes:
        versions: library -> version that the figures are of.
        entries: all models with their weights; the default weights of a model come first.
        left_out: library -> names that it knows and that are not listed: deprecated ones, and
            models that featx does not feed, such as detectors.
    """

    versions: dict[str, str]
    entries: tuple[CatalogueEntry, ...]
    left_out: dict[str, frozenset[str]]


@cache
def read_catalogue() -> Catalogue:
    """Return the content of the file."""
    versions: dict[str, str] = {}
    left_out: dict[str, frozenset[str]] = {}
    entries: list[CatalogueEntry] = []
    with_default: set[tuple[str, str]] = set()
    for line in FILE.read_text(encoding="utf-8").splitlines():
        kind, *values = line.split("\t")
        if kind == "# version":
            versions[values[0]] = values[1]
        elif kind == "# left out":
            left_out[values[0]] = frozenset(values[1].split())
        elif not kind.startswith("#"):
            library, (name, tag, width, size, parameters, licence, repository, file) = kind, values
            height, _, breadth = size.partition("x")
            # The library open_clip loads no weights unless a tag is given.
            is_default = (
                (library, name) not in with_default and bool(tag) and library != "open_clip"
            )
            with_default.add((library, name))
            entries.append(
                CatalogueEntry(
                    library,
                    name,
                    tag,
                    int(width) if width else None,
                    (int(height), int(breadth)) if size else None,
                    int(parameters) if parameters else None,
                    licence,
                    f"timm/{name}.{tag}" if repository == OWN_REPOSITORY else repository,
                    file,
                    is_default,
                    in_file=True,
                )
            )
    return Catalogue(versions, tuple(entries), left_out)


@cache
def _names_before_timm() -> frozenset[str]:
    """Return the names that model=NAME finds in another library than timm."""
    return registered_names("torchvision") | {"efficientnet_lite0"}
