"""Registry of model libraries, and the backbone of the options of a model."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from featx.base import Member, Registry
from featx.config import (
    AUTO_LIBRARY,
    ModelConfig,
    TransformConfig,
    UnpreparedModelConfig,
    WindowConfig,
)
from featx.errors import ConfigError, FeatxError, ModelError, nearest
from featx.models.catalogue import (
    hint,
    installed_version,
    known_names,
    listed_names,
    read_catalogue,
    search_models,
)
from featx.models.transformers.families import FAMILIES

if TYPE_CHECKING:
    from torch import nn

    from featx.models.base import Backbone

OptionsT = TypeVar("OptionsT", bound=ModelConfig)

_ALIASES = {"hf": "transformers", "pt2": "export"}
"""Short names that users type -> names of libraries."""


@dataclass(frozen=True)
class ModelLibrary(Member, Generic[OptionsT]):
    """A library of models. A subclass has `build` and `untrained`, and the rest where it needs it.

        LIBRARIES.register(Timm("timm", "Models of timm.", TimmOptions))

    Attributes:
        name: value of the options `model` and `model.library` that selects the library.
        help: one sentence for `--help`.
        options: dataclass of its options, a subclass of `ModelConfig` whose field `library` has
            `name` as its default; None for ModelConfig itself. The default of the field `name` is
            the model of `model=LIBRARY`; '' asks for model.name.
        extra: extra of featx that installs the packages it needs.
        auto_rank: place among the libraries that model.library=auto asks, smallest first; None if
            it does not ask this one.
        takes_any_name: whether it has models whose names it cannot list, such as folders.
    """

    auto_rank: int | None = None
    takes_any_name: bool = False

    def build(self, config: OptionsT, seed: int) -> Backbone:
        """Build the backbone that the options describe, on the CPU.

        Args:
            config: options of this library.
            seed: seed of random weights.

        Raises:
            ModelError: the model cannot be built.
            WeightsError: the weights cannot be found, read or loaded.
            MissingExtraError: a package is not installed.
        """
        raise NotImplementedError

    def untrained(self, config: OptionsT, seed: int) -> nn.Module:
        """Build the same module with the random weights of a seed, for model.init=reset."""
        raise NotImplementedError

    def own_names(self) -> Iterable[str]:
        """Return what a library of the catalogue itself lists, if it is of another version."""
        return ()

    def names(self) -> Collection[str]:
        """Return the names of all models, for the message about a mistyped one."""
        return known_names(self.name, self.own_names)

    def knows(self, name: str) -> bool:
        """Return whether it has a model of a name; imports no library for one of the catalogue."""
        if self.takes_any_name:
            return True
        is_installed = installed_version(self.name) is not None
        return (is_installed and name in listed_names(self.name)) or name in self.names()

    def weight_files(self, config: OptionsT) -> Sequence[Path] | None:
        """Return the files whose content decides the weights, without importing the library.

        There are none if the options and the versions of packages decide them. A finished store is
        recognised by the files before the model is built; None, if they are not known, builds it.
        """
        return None


AnyLibrary = ModelLibrary[Any]
"""Library with options of any class."""


class _Libraries(Registry[AnyLibrary]):
    """All model libraries; auto stands for the first one that knows the name of the model."""

    def get(self, name: str) -> AnyLibrary:
        """Return a library by its name or its short name."""
        return super().get(_ALIASES.get(name, name))

    def __contains__(self, name: object) -> bool:
        """Return whether a library has this name or short name."""
        return super().__contains__(_ALIASES.get(name, name) if isinstance(name, str) else name)

    def asked_by_auto(self) -> list[AnyLibrary]:
        """Return the libraries that model.library=auto asks, in this order."""
        asked = [library for library in self if library.auto_rank is not None]
        return sorted(asked, key=lambda library: (library.auto_rank or 0, library.name))

    def select(self, name: str, values: Mapping[str, object]) -> AnyLibrary:
        """Return the library that the options of a model select; auto if none knows the name."""
        library = self.get(name)
        if library.name != AUTO_LIBRARY:
            return library
        model = str(values["name"])
        return next((known for known in self.asked_by_auto() if known.knows(model)), library)


LIBRARIES = _Libraries("model.library", "featx.models.libraries", "featx.models")
"""All model libraries by their names."""


def resolve_library(config: ModelConfig) -> AnyLibrary:
    """Return the library to which a model belongs.

    It imports no library, so a mistyped name is reported at once.

    Raises:
        ModelError: no library has the model; the message says what to type instead of a name of
            other programs, or lists the nearest names.
    """
    library = LIBRARIES.select(config.library, {"name": config.name})
    if not isinstance(config, library.options or ModelConfig):
        raise FeatxError(
            f"model.library={library.name} was given {type(config).__qualname__}; "
            "featx.config.model_options makes the options of a library."
        )
    if library.knows(config.name):
        return library
    asked = LIBRARIES.asked_by_auto() if library.name == AUTO_LIBRARY else [library]
    unknown = f"unknown model {config.name!r} (looked in {', '.join(one.name for one in asked)})."
    advice = hint(config.name) or _named_alike(config.name, asked)
    if config.name.lower() in FAMILIES:
        advice += (
            f" {config.name.lower()} is a family of transformers: model=transformers "
            "model.name=FOLDER, with a folder of save_pretrained."
        )
    raise ModelError(
        f"{unknown}{advice} job=models models.query=WORDS searches the names. "
        "For your own module: model=custom model.factory=package.module:factory."
    )


def _named_alike(name: str, libraries: Iterable[AnyLibrary]) -> str:
    """Clause with the models that job=models finds for an unknown name, else with similar names."""
    catalogue = read_catalogue()
    available = {library.name: set(library.names()) for library in libraries}
    listed = [
        entry for entry in catalogue.entries if entry.name in available.get(entry.library, ())
    ]
    # Only timm takes the tag of the weights as a part of the name.
    found = [e.full_name if e.library == "timm" else e.name for e in search_models(name, listed)]
    names: set[str] = set()
    for library, known in available.items():
        # Deprecated names load other weights than they say.
        names |= known - catalogue.left_out.get(library, frozenset())
    if not found:
        return nearest(name, sorted(names))
    found += difflib.get_close_matches(name, sorted(names), cutoff=0.8)
    return f" Nearest: {', '.join(list(dict.fromkeys(found))[:5])}."


def build_backbone(config: ModelConfig, seed: int) -> Backbone:
    """Build a backbone on the CPU, load its weights, freeze it and put it in eval mode.

    model.init=reset replaces the values of the weights by those of an untrained model.
    Preprocessing, names and architecture stay those of the given weights.

    Raises:
        ConfigError: torch makes tensors of another dtype, or on another device.
        ModelError: the model cannot be built.
        WeightsError: the weights cannot be found, read or loaded.
        MissingExtraError: a package is not installed.
    """
    from featx.base import check_torch_defaults  # which imports torch

    check_torch_defaults()
    library = resolve_library(config)
    window = config.window.sides
    config_of_library = config if window is None else _for_windows(config, window)
    backbone = library.build(config_of_library, seed)
    if not hasattr(backbone, "module"):
        raise ModelError(
            f"build of model.library={library.name} returned {type(backbone).__name__}; expected a "
            "featx.models.Backbone."
        )
    try:
        check_torch_defaults()  # a factory may have changed them
        if window is not None:
            _take_windows(backbone, config, window)
        if config.init == "reset":
            from featx.models.base import reset_weights  # which imports torch

            reset_weights(backbone, library.untrained(config_of_library, seed), seed)
    except BaseException:
        backbone.give_back()
        raise
    return backbone


def _for_windows(config: ModelConfig, window: tuple[int, int]) -> ModelConfig:
    """Return options that build a model for images of the size of a window."""
    size, transform = list(window), _transform_of(config)
    changed: dict[str, Any] = {"window": WindowConfig()}
    if isinstance(config, UnpreparedModelConfig):  # which have no input size of their own
        changed["transform"] = replace(transform, crop=size, resize=size)
    elif transform.resize is not None:  # of the whole image
        changed["transform"] = replace(transform, resize=size)
    if hasattr(config, "input_size"):
        changed["input_size"] = size
    try:
        return replace(config, **changed)
    except ConfigError as error:
        raise ConfigError(
            f"model.window.size={size} builds the model for images of this size. {error}"
        ) from error


def _transform_of(config: ModelConfig) -> TransformConfig:
    """Return the options of the transform, which libraries of packages may lack."""
    return getattr(config, "transform", TransformConfig())


def _take_windows(backbone: Backbone, config: ModelConfig, window: tuple[int, int]) -> None:
    """Let images go through a backbone in windows."""
    from featx.models.preprocessing import windowed_preprocess  # which imports torch

    # Libraries without an input size build the model as it is: a convolutional network takes any
    # size, and the first forward pass of others fails.
    preprocess = replace(backbone.preprocess, crop=window)
    given = _transform_of(config).resize
    resize = given if given is None or isinstance(given, int) else (given[0], given[1])
    overlap = config.window.overlap
    backbone.preprocess = windowed_preprocess(preprocess, overlap, resize)
