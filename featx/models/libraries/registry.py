"""Registry of model libraries, and the backbone of the options of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from featx.base import Member, Registry, for_options
from featx.config import AUTO_LIBRARY, ModelConfig
from featx.errors import ModelError, nearest
from featx.models.catalogue import read_catalogue
from featx.models.name_hints import hint
from featx.models.transformers.families import FAMILIES

if TYPE_CHECKING:
    from torch import nn

    from featx.models.base import Backbone

OptionsT = TypeVar("OptionsT", bound=ModelConfig)

_ALIASES = {"hf": "transformers", "pt2": "export"}
"""Short names that users type -> names of libraries."""


@dataclass(frozen=True, kw_only=True)
class ModelLibrary(Member):
    """A model library as it is registered; made by `library_member`.

    Attributes:
        build: builds the backbone that the options of a model describe, on the CPU. The second
            argument is the seed of random weights. Raises ModelError, WeightsError or
            MissingExtraError.
        untrained: builds the same module with random weights of a seed, for model.init=reset.
        names: returns the names of all its models without importing the library; they are shown
            for a mistyped name.
        knows: whether it has a model of this name; imports nothing either.
        auto_rank: place among the libraries that model.library=auto asks, smallest first; None if
            it does not ask this one.
        weight_files: returns the files whose content decides the weights, empty if the options and
            the versions of packages decide them; None if neither is known. It imports nothing
            either.
    """

    build: Callable[[ModelConfig, int], Backbone]
    untrained: Callable[[ModelConfig, int], nn.Module]
    names: Callable[[], Collection[str]]
    knows: Callable[[str], bool]
    auto_rank: int | None
    weight_files: Callable[[ModelConfig], Sequence[Path] | None]


class _Libraries(Registry[ModelLibrary]):
    """All model libraries; auto stands for the first one that knows the name of the model."""

    def get(self, name: str) -> ModelLibrary:
        """Return a library by its name or its short name."""
        return super().get(_ALIASES.get(name, name))

    def __contains__(self, name: object) -> bool:
        """Return whether a library has this name or short name."""
        return super().__contains__(_ALIASES.get(name, name) if isinstance(name, str) else name)

    def asked_by_auto(self) -> list[ModelLibrary]:
        """Return the libraries that model.library=auto asks, in this order."""
        asked = [library for library in self if library.auto_rank is not None]
        return sorted(asked, key=lambda library: (library.auto_rank or 0, library.name))

    def select(self, name: str, values: Mapping[str, object]) -> ModelLibrary:
        """Return the library that the options of a model select.

        Args:
            name: value of model.library.
            values: options of the model, of which the name is read.

        Returns:
            The library; `auto` itself if it finds no library that knows the name.
        """
        library = self.get(name)
        if library.name != AUTO_LIBRARY:
            return library
        model = str(values["name"])
        return next((known for known in self.asked_by_auto() if known.knows(model)), library)


LIBRARIES = _Libraries("model.library", "featx.models.libraries", "featx.models")
"""All model libraries by their names."""


@dataclass(frozen=True, kw_only=True)
class LibraryFunctions(Generic[OptionsT]):
    """The functions of a library, for its own options.

    Attributes:
        build: builds the backbone that such options describe, as `ModelLibrary.build`.
        untrained: builds its module with random weights of a seed.
        names: returns the names of its models without importing the library.
        knows: whether it has a model of a name; None looks into `names`.
        weight_files: returns the files whose content decides the weights, empty if the options and
            the versions of packages decide them, or None. A finished store is recognised by them
            before the model is built; without this function the model is built every time.
    """

    build: Callable[[OptionsT, int], Backbone]
    untrained: Callable[[OptionsT, int], nn.Module]
    names: Callable[[], Collection[str]]
    knows: Callable[[str], bool] | None = None
    weight_files: Callable[[OptionsT], Sequence[Path] | None] | None = None


def library_member(
    name: str,
    help: str,
    options: type[OptionsT],
    functions: LibraryFunctions[OptionsT],
    *,
    auto_rank: int | None = None,
    extra: str | None = None,
) -> ModelLibrary:
    """Describe a library for `LIBRARIES.register` or for an entry point of `featx.models`.

    Args:
        name: value of the options `model` and `model.library` that selects the library.
        help: one sentence for `--help`.
        options: dataclass of its options, `ModelConfig` or a subclass whose field `library` has
            `name` as its default. The default of the field `name` is the model of `model=LIBRARY`;
            '' asks for model.name.
        functions: what the library does with such options.
        auto_rank: place among the libraries that `auto` asks; None leaves it out.
        extra: extra of featx that installs the packages it needs.
    """
    member, maker, names = f"model.library={name}", "featx.config.model_options", functions.names
    return ModelLibrary(
        name,
        help,
        None if options is ModelConfig else options,
        extra,
        build=for_options(member, options, functions.build, maker),
        untrained=for_options(member, options, functions.untrained, maker),
        names=names,
        knows=functions.knows or (lambda model: model in names()),
        auto_rank=auto_rank,
        weight_files=for_options(member, options, functions.weight_files or _unknown_files, maker),
    )


def _unknown_files(config: ModelConfig) -> None:
    """Return None: the files of the weights are not known."""


def resolve_library(config: ModelConfig) -> ModelLibrary:
    """Return the library to which a model belongs.

    It imports no library, so a mistyped name is reported at once.

    Args:
        config: model name and library, which may be 'auto'.

    Raises:
        ModelError: no library has the model; the message says what to type instead of a name of
            other programs, or lists the nearest names.
    """
    library = LIBRARIES.select(config.library, {"name": config.name})
    if library.knows(config.name):
        return library
    asked = LIBRARIES.asked_by_auto() if library.name == AUTO_LIBRARY else [library]
    left_out = read_catalogue().left_out  # deprecated names load other weights than they say
    names = sorted(
        {name for one in asked for name in set(one.names()) - left_out.get(one.name, frozenset())}
    )
    unknown = f"unknown model {config.name!r} (looked in {', '.join(one.name for one in asked)})."
    advice = hint(config.name) or nearest(config.name, names)
    if config.name.lower() in FAMILIES:
        advice += (
            f" {config.name.lower()} is a family of transformers: model=transformers "
            "model.name=FOLDER, with a folder of save_pretrained."
        )
    raise ModelError(
        f"{unknown}{advice} job=models models.query=WORDS searches the names. "
        "For your own module: model=custom model.factory=package.module:factory."
    )


def build_backbone(config: ModelConfig, seed: int) -> Backbone:
    """Build a backbone on the CPU, load its weights, freeze it and put it in eval mode.

    model.init=reset replaces the values of the weights by those of an untrained model.
    Preprocessing, names and architecture stay those of the given weights.

    Args:
        config: model, weights and the options of its library.
        seed: seed of random weights.

    Raises:
        ModelError: the model cannot be built.
        WeightsError: the weights cannot be found, read or loaded.
        MissingExtraError: a package is not installed.
    """
    library = resolve_library(config)
    backbone = library.build(config, seed)
    if config.init == "reset":
        from featx.models.base import reset_weights  # which imports torch

        try:
            reset_weights(backbone, library.untrained(config, seed), seed)
        except BaseException:
            backbone.give_back()
            raise
    return backbone
