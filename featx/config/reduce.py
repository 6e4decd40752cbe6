"""Options of the group `reduce` that every reduction has."""

from __future__ import annotations

from collections.abc import Mapping

from featx.base import family
from featx.config.checks import hints_of, options
from featx.config.members import MemberGroup, make_member
from featx.errors import ConfigError, FeatxError


@options("reduce")
class ReduceConfig:
    """Reduction of a captured tensor to the stored row.

    A reduction with options of its own has them in a subclass in its own module, such as
    `featx.layers.reductions.GemOptions`; `make_reduce` finds it.
    """

    name: str = "none"
    """Name of the reduction; set by the option `reduce` itself."""

    def __post_init__(self) -> None:
        if not isinstance(self, family("reduce").get(self.name).options or ReduceConfig):
            raise FeatxError(
                f"reduce={self.name} has options of its own: make them by "
                f"make_reduce({self.name!r}, ...)."
            )

    @property
    def args(self) -> dict[str, float | str]:
        """Parameters of the reduction, as a store records them.

        pca and whiten add those of their statistics.
        """
        return {}

    @classmethod
    def values_of_args(cls, args: Mapping[str, object]) -> dict[str, object]:
        """Return the options of which a store has recorded these `args`; others of its parameters
        follow from the layer.
        """
        return {name: args[name] for name in hints_of(cls) if name in args}

    @property
    def statistics_path(self) -> str | None:
        """Path of the statistics of job=stats that the reduction reads, or None."""
        return None

    def with_statistics_path(self, path: str) -> ReduceConfig:
        """Return the options with another path of the statistics, if the reduction reads any."""
        return self


def make_reduce(name: str, **values: object) -> ReduceConfig:
    """Make the options of a reduction, by its name and the values of its own options."""
    group = MemberGroup("reduce", "name", "reduce", ReduceConfig)
    return make_member(group, {"name": name, **values})  # type: ignore[no-any-return]


def reduction_of_args(name: str, args: Mapping[str, object]) -> ReduceConfig:
    """Make the options of a reduction from its parameters, as a store records them."""
    options: type[ReduceConfig] = family("reduce").get(name).options or ReduceConfig
    return make_reduce(name, **options.values_of_args(args))


def reduction_options(value: object) -> ReduceConfig:
    """Return the reduction that a mapping in `layers` gives a layer: a name, or its options."""
    if isinstance(value, ReduceConfig):
        return value
    if isinstance(value, str):
        return make_reduce(value)
    if isinstance(value, Mapping):
        try:
            return make_reduce(**{"name": "none", **value})
        except ConfigError as error:
            raise ConfigError(f"layers: {error}") from error
    raise ConfigError(
        f"layers: {value} is not a reduction; expected one of "
        f"{', '.join(family('reduce').names())}, "
        "or a mapping such as {name: grid, size: 4}."
    )
