"""All options, those of every member of a family included, with their defaults and sentences."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import textwrap
from dataclasses import field, fields, is_dataclass, make_dataclass
from types import MappingProxyType
from typing import Any, get_type_hints

from featx.base import family, family_options
from featx.config.member_options import (
    MemberGroup,
    option_owners,
    options_of_all,
)
from featx.config.run_config import Config


def member_groups() -> dict[str, MemberGroup]:
    """Return the groups with a family of members by their names.

    The option `codec` also selects a member, but is no group: codecs have no options.
    """
    hints = get_type_hints(Config)
    found = {}
    for option in family_options():
        group = MemberGroup.of(option)
        if is_dataclass(hints[group.group]):
            found[group.group] = group
    return found


def group_class(group: MemberGroup) -> type:
    """Return the dataclass that a group has in `Config`, with the options of all its members."""
    found: type = get_type_hints(Config)[group.group]
    return found


@functools.cache
def config_class() -> type[Config]:
    """Make the class of a config that has the options of all members in its groups.

    It checks no values; `schema.from_omegaconf` makes a checked `Config` of it.
    """
    groups = [
        (group.group, base, field(default_factory=options_of_all(group.option, base)))
        for group in member_groups().values()
        for base in (group_class(group),)
    ]
    return make_dataclass(
        "Config", groups, bases=(Config,), namespace={"__post_init__": lambda self: None}
    )


@functools.cache
def all_options() -> Config:
    """Return the defaults of all options, in their groups those of all members."""
    return config_class()()


def described_options() -> list[tuple[str, str, str]]:
    """Return (option, default, sentence) of every option of the command.

    An option that only some members of a family read has their names in front of its sentence.
    """
    return _described(all_options(), "")


def _described(options: Any, prefix: str) -> list[tuple[str, str, str]]:
    """Return the options of a dataclass instance, nested ones included."""
    rows = []
    group = member_groups().get(prefix.rstrip("."))
    owners = {} if group is None else option_owners(group.option, group_class(group))
    for f in fields(options):
        value = getattr(options, f.name)
        nested = is_dataclass(value)
        # A group's own name is the option of the group: model=resnet50, not model.name=resnet50.
        default = getattr(value, "name", "") if nested else value
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        shown = re.sub(r"\$\{(\w+)\.name\}", r"<\1>", shown)
        if f.name != "name":
            shown = "null" if default is None else shown
            if group is not None and f.name in owners:
                sentence = _sentence_of_members(group.option, f.name, owners[f.name])
            else:
                sentence = _sentences(options.__class__)[f.name] + _choices(prefix + f.name)
            rows.append((prefix + f.name, shown, sentence))
        if nested:
            rows += _described(value, f"{prefix}{f.name}.")
    return rows


def _choices(option: str) -> str:
    """Return the members that an option selects, each with its sentence; '' if it selects none."""
    if option not in family_options():
        return ""
    return "".join(f" {member.name}: {member.help}" for member in family(option))


def _sentence_of_members(option: str, name: str, members: tuple[str, ...]) -> str:
    """Return the sentence of an option of some members, with what selects them in front."""
    members_of: dict[str, list[str]] = {}
    for member in members:
        options = family(option).get(member).options
        if options is not None:
            members_of.setdefault(_sentences(options)[name], []).append(f"{option}={member}")
    return " ".join(f"{', '.join(names)}: {text}" for text, names in members_of.items())


@functools.cache
def _sentences(options: type) -> MappingProxyType[str, str]:
    """Return the sentence of each field of a dataclass: the string below it in the source."""
    found: dict[str, str] = {}
    for owner in reversed(options.__mro__):
        if not is_dataclass(owner) or getattr(owner, "__module__", "types") == "types":
            continue  # object, and classes made by make_dataclass, which have no source
        node = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        if not isinstance(node, ast.ClassDef):
            continue
        for before, after in itertools.pairwise(node.body):
            if (
                isinstance(before, ast.AnnAssign)
                and isinstance(before.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                found[before.target.id] = " ".join(str(after.value.value).split())
    return MappingProxyType(found)
