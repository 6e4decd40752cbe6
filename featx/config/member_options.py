"""Option groups whose options depend on the member that is chosen, such as `data`.

A member brings its own dataclass, a subclass of the one that its group has in `Config`. A config is
composed with the options of all members, so that every option is known by its type. Then the
dataclass of the chosen member replaces them, and options of other members are refused.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass
from typing import Any, TypeVar, get_type_hints

from featx.base import family
from featx.errors import ConfigError, FeatxError, nearest

OptionsT = TypeVar("OptionsT")


@dataclass(frozen=True)
class MemberGroup:
    """An option group that a member is chosen for.

    Attributes:
        option: option that selects the member, as users write it: 'data', 'export.format'.
        group: name of the group: 'data', 'export'.
        selector: field of the group that holds the name of the member: 'name', 'format'.
    """

    option: str
    group: str
    selector: str

    @classmethod
    def of(cls, option: str) -> MemberGroup:
        """Return the group of the option that selects its member, such as 'export.format'."""
        group, _, selector = option.partition(".")
        return cls(option, group, selector or "name")

    def select(self, values: Mapping[str, Any]) -> str:
        """Return the name of the member that the options of the group select.

        Args:
            values: values by their fields.

        Raises:
            ConfigError: there is no such member.
        """
        return family(self.option).select(str(values[self.selector]), values).name


def default_of_field(f: Field[Any]) -> Any:
    """Return the default of a field; MISSING if it has none."""
    return f.default if f.default_factory is MISSING else f.default_factory()


def options_class(option: str, name: str, base: type[OptionsT]) -> type[OptionsT]:
    """Return the dataclass of the options of one member.

    Args:
        option: option that selects the member, such as 'data'.
        name: name of the member.
        base: dataclass of the group, which a member without own options has.

    Raises:
        ConfigError: there is no such member.
        FeatxError: the options of the member are no subclass of `base`.
    """
    options = family(option).get(name).options
    if options is None:
        return base
    if not issubclass(options, base):
        raise FeatxError(
            f"{option}={name}: its options {options.__qualname__} are no subclass of "
            f"{base.__qualname__}."
        )
    return options


def make_options(option: str, base: type[OptionsT], values: Mapping[str, Any]) -> OptionsT:
    """Make the options of a member.

    Args:
        option: option that selects the member, such as 'reduce' or 'model.library'.
        base: dataclass of the group.
        values: values by their fields, with the member among them.

    Raises:
        ConfigError: there is no such member, or a value is unknown, without effect or invalid.
    """
    group = MemberGroup.of(option)
    chosen = options_class(option, group.select(values), base)
    all_options: type = options_of_all(option, base)  # type: ignore[arg-type]  # a class is hashable
    names = [f.name for f in fields(all_options)]
    for key in values:
        if key not in names:
            raise ConfigError(
                f"{option}={values[group.selector]} has no option {key!r}; expected some of "
                f"{', '.join(names)}.{nearest(key, names)}"
            )
    refuse_options_of_others(group, base, values)
    member_names = {f.name for f in fields(chosen)}  # type: ignore[arg-type]  # every base is a dataclass
    return chosen(**{key: value for key, value in values.items() if key in member_names})


def option_owners(option: str, base: type) -> dict[str, tuple[str, ...]]:
    """Return the members that read each option; options of the group itself are left out.

    Args:
        option: option that selects the member.
        base: dataclass of the group.
    """
    common = {f.name for f in fields(base)}
    owners: dict[str, tuple[str, ...]] = {}
    for member in family(option):
        if member.options is not None:
            for f in fields(member.options):
                if f.name not in common:
                    owners[f.name] = (*owners.get(f.name, ()), member.name)
    return owners


@functools.cache
def options_of_all(option: str, base: type) -> type:
    """Make a dataclass with the options of all members of a family.

    It checks no values: they are checked by the dataclass of the member that is chosen.

    Args:
        option: option that selects the member.
        base: dataclass of the group, of which the result is a subclass.

    Raises:
        FeatxError: two members have an option of the same name with different types or defaults.
    """
    common = {f.name for f in fields(base)}
    added: dict[str, tuple[Any, Any]] = {}
    for member in family(option):
        if member.options is None:
            continue
        hints = get_type_hints(member.options, include_extras=True)
        for f in fields(member.options):
            if f.name in common:
                continue
            description = (hints[f.name], default_of_field(f))
            if added.setdefault(f.name, description) != description:
                raise FeatxError(
                    f"{option}={member.name}: another member has the option {f.name} with another "
                    "type or default."
                )
    return make_dataclass(
        base.__name__,
        [(name, hint, _field_of(default)) for name, (hint, default) in added.items()],
        bases=(base,),
        namespace={"__post_init__": lambda self: None},
    )


def _field_of(default: Any) -> Any:
    """Return a field with a default, which may be mutable."""
    if default is MISSING:
        return field()
    if isinstance(default, list | dict) or dataclasses.is_dataclass(default):
        return field(default_factory=lambda: copy.deepcopy(default))
    return field(default=default)


def refuse_options_of_others(group: MemberGroup, base: type, values: Mapping[str, Any]) -> None:
    """Refuse options that the chosen member does not read.

    Args:
        group: the group.
        base: dataclass of the group.
        values: values by their fields; an option with its default counts as not given.

    Raises:
        ConfigError: an option of another member has a value.
    """
    defaults = {f.name: default_of_field(f) for f in fields(options_of_all(group.option, base))}
    given = [
        name
        for name in values
        if name in defaults and _plain(values[name]) != _plain(defaults[name])
    ]
    refuse_names_of_others(group, base, group.select(values), given)


def refuse_names_of_others(
    group: MemberGroup, base: type, chosen: str, names: Iterable[str]
) -> None:
    """Refuse options that the chosen member does not read, whatever their values are.

    Args:
        group: the group.
        base: dataclass of the group.
        chosen: name of the member.
        names: fields of the group that were given.

    Raises:
        ConfigError: one is an option of other members.
    """
    owners_of = option_owners(group.option, base)
    for name in names:
        owners = owners_of.get(name, (chosen,))
        if chosen not in owners:
            members = " or ".join(f"{group.option}={owner}" for owner in owners)
            raise ConfigError(
                f"{group.group}.{name} has an effect with {members} only (now {group.option}="
                f"{chosen})."
            )


def _plain(value: Any) -> Any:
    """Return a value of an option, of which a nested group becomes a mapping."""
    is_group = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return dataclasses.asdict(value) if is_group else value
