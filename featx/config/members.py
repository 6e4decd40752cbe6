"""Options of the member that is chosen in a group: of a model library, a source, a reduction.

A member brings its own dataclass, a subclass of the one that its group has in `Config`. An option
that the chosen member does not read is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

from featx.base import family
from featx.config.checks import hints_of
from featx.errors import ConfigError, FeatxError, nearest

OptionsT = TypeVar("OptionsT")


@dataclass(frozen=True)
class MemberGroup:
    """A group of options that a member is chosen for.

    Attributes:
        name: name of the group: 'data', 'export'.
        selector: field of the group that holds the name of the member: 'name', 'format'.
        option: option that selects the member, as users write it: 'data', 'export.format'.
        base: dataclass of the group in `Config`, which a member without own options has.
    """

    name: str
    selector: str
    option: str
    base: type

    def select(self, values: Mapping[str, Any]) -> str:
        """Return the name of the member that the options of the group select."""
        return family(self.option).select(str(values[self.selector]), values).name

    def readers(self) -> dict[str, dict[str, type]]:
        """Return the options that only some members have: name -> member -> its dataclass."""
        common = {f.name for f in fields(self.base)}
        found: dict[str, dict[str, type]] = {}
        for member in family(self.option):
            own = member.options or self.base
            for f in fields(own):
                if f.name not in common:
                    found.setdefault(f.name, {})[member.name] = own
        return found


def make_member(group: MemberGroup, values: Mapping[str, object]) -> Any:
    """Make the options of the member that values select; `values` are those that were given."""
    chosen = group.select(values)
    cls: type[Any] = family(group.option).get(chosen).options or group.base
    if not issubclass(cls, group.base):
        raise FeatxError(
            f"{group.option}={chosen}: its options {cls.__qualname__} are no subclass of "
            f"{group.base.__qualname__}."
        )
    own = hints_of(cls)
    refuse_options_of_others(group, chosen, [name for name in values if name not in own])
    return make_group(cls, {name: values[name] for name in values if name in own}, group.name)


def make_group(cls: type[OptionsT], values: Mapping[str, Any], name: str) -> OptionsT:
    """Make the options of a group of plain values; groups below it may be mappings."""
    hints, prefix = hints_of(cls), f"{name}." if name else ""
    made = {}
    for key, value in values.items():
        if key not in hints:
            raise unknown_key(f"{prefix}{key}", [f"{prefix}{known}" for known in hints])
        if isinstance(value, Mapping) and is_dataclass(hints[key]):
            value = make_group(hints[key], value, f"{prefix}{key}")
        elif isinstance(value, Mapping):  # Hydra reads the key of {"4": avg} as a number
            value = {str(k) if isinstance(k, int) else k: v for k, v in value.items()}
        made[key] = value
    return cls(**made)


def refuse_options_of_others(group: MemberGroup, chosen: str, names: Iterable[str]) -> None:
    """Refuse options that the chosen member does not read, whatever their values are."""
    names = list(names)
    if not names:
        return
    readers = group.readers()
    known = [*(f.name for f in fields(group.base)), *readers]
    for name in names:
        if name not in known:
            raise unknown_key(f"{group.name}.{name}", [f"{group.name}.{each}" for each in known])
        if name in readers and chosen not in readers[name]:
            members = " or ".join(f"{group.option}={member}" for member in readers[name])
            raise ConfigError(
                f"{group.name}.{name} has an effect with {members} only (now {group.option}="
                f"{chosen})."
            )


def unknown_key(name: str, known: Iterable[str]) -> ConfigError:
    """The error for an option that does not exist."""
    return ConfigError(f"unknown key {name!r}.{nearest(name, known)}")
