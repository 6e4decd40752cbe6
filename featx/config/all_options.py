"""All options, those of every member of a family included, with their defaults and sentences."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import textwrap
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from types import MappingProxyType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from featx.base import family, family_options
from featx.config.checks import MAY_BE_EMPTY
from featx.config.member_options import (
    MemberGroup,
    option_owners,
    options_of_all,
    refuse_names_of_others,
)
from featx.config.run_config import Config


def member_groups() -> dict[str, MemberGroup]:
    """Return the groups with a family of members by their names.

    The option `codec` also selects a member, but is no group: codecs have no options.
    """
    hints = _hints()
    groups = {}
    for option in family_options():
        group = MemberGroup.of(option)
        if is_dataclass(hints[group.group]):
            groups[group.group] = group
    return groups


def group_class(group: MemberGroup) -> type:
    """Return the dataclass that a group has in `Config`, with the options of all its members."""
    return _hints()[group.group]


@functools.cache
def _hints() -> Mapping[str, type]:
    """Return the types of the fields of `Config`."""
    return get_type_hints(Config)


def refuse_given_of_others(config: Config, given: Iterable[str]) -> None:
    """Refuse options of members that are not chosen, also if they were given their defaults.

    Args:
        config: config of the command.
        given: dotted names of the options that were given.

    Raises:
        ConfigError: an option has no effect.
    """
    for group in member_groups().values():
        prefix = f"{group.group}."
        names = sorted(name.removeprefix(prefix) for name in given if name.startswith(prefix))
        chosen = group.select(vars(getattr(config, group.group)))
        refuse_names_of_others(group, group_class(group), chosen, names)


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


@dataclass(frozen=True)
class OptionDescription:
    """An option as `--help` and the documentation show it.

    Attributes:
        name: dotted name, such as 'data.root'.
        type: its values in words, such as 'a whole number, or null'; '' for a group without a name
            of its own.
        default: default as it is written on the command line; '' for such a group.
        help: what it does. An option that only some members of a family read has their names in
            front.
    """

    name: str
    type: str
    default: str
    help: str


def describe_options() -> list[OptionDescription]:
    """Return the description of every option of the command, in the order of the groups."""
    return _describe_fields(all_options(), "")


def _describe_fields(options: Any, prefix: str) -> list[OptionDescription]:
    """Return the options of a dataclass instance, nested ones included."""
    rows = []
    group = member_groups().get(prefix.rstrip("."))
    owners = {} if group is None else option_owners(group.option, group_class(group))
    hints = get_type_hints(type(options), include_extras=True)
    for f in fields(options):
        value = getattr(options, f.name)
        is_group = is_dataclass(value)
        # A group's own name is the option of the group: model=resnet50, not model.name=resnet50.
        default = getattr(value, "name", "") if is_group else value
        text = str(default).lower() if isinstance(default, bool) else str(default)
        text = re.sub(r"\$\{(\w+)\.name\}", r"<\1>", text)
        if f.name != "name":
            text = "null" if default is None else text
            if group is not None and f.name in owners:
                sentence = _sentence_of_members(group.option, f.name, owners[f.name])
            else:
                sentence = _sentences(options.__class__)[f.name] + _choices(prefix + f.name)
            values = _values_in_words(hints[f.name]) if not is_group else "a name" if text else ""
            rows.append(OptionDescription(prefix + f.name, values, text, sentence))
        if is_group:
            rows += _describe_fields(value, f"{prefix}{f.name}.")
    return rows


def _values_in_words(hint: Any) -> str:
    """Return the values of a type in words; an annotation that is a text says them itself."""
    if get_origin(hint) is Annotated:
        texts = [text for text in hint.__metadata__ if text != MAY_BE_EMPTY]
        return str(texts[0]) if texts else _values_in_words(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return ", or ".join(_values_in_words(option) for option in get_args(hint))
    words = {
        str: "a text",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        list: "a list",
        dict: "a mapping",
        type(None): "null",
    }
    words_of_type = words[get_origin(hint) or hint]
    if get_origin(hint) is list:
        words_of_type += " of texts" if get_args(hint) == (str,) else " of numbers"
    return words_of_type


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
    sentences: dict[str, str] = {}
    for owner in reversed(options.__mro__):
        if not is_dataclass(owner) or getattr(owner, "__module__", "types") == "types":
            continue  # object, and classes made by make_dataclass, which have no source
        node = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        if not isinstance(node, ast.ClassDef):
            continue
        for node_before, node_after in itertools.pairwise(node.body):
            if (
                isinstance(node_before, ast.AnnAssign)
                and isinstance(node_before.target, ast.Name)
                and isinstance(node_after, ast.Expr)
                and isinstance(node_after.value, ast.Constant)
            ):
                sentences[node_before.target.id] = " ".join(str(node_after.value.value).split())
    return MappingProxyType(sentences)
