"""All options of the command, in one walk over the dataclasses of their groups.

The options of a group such as `data` depend on the member that is chosen: a member brings its own
dataclass, a subclass of the one that its group has in `Config`. The tree has the options of all
members, so that each is known by its type; an option that the chosen member does not read is
refused.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from featx.base import family, family_options
from featx.config.checks import (
    alternatives,
    default_of_field,
    hints_of,
    in_words,
    is_group,
    shown,
    without_marks,
)
from featx.config.members import MemberGroup, refuse_options_of_others
from featx.config.run_config import Config
from featx.errors import FeatxError


class Kind(Enum):
    """Kind of the value of an option."""

    TEXT = auto()
    """One text, such as a path, or one of some texts."""
    TEXTS = auto()
    """A list of texts."""
    NAMES = auto()
    """A text, a list of texts, or a mapping of texts."""
    MAPPING = auto()
    """A mapping with keys that no field lists."""
    GROUP = auto()
    """A group of options that is chosen by its name: `model=resnet50`."""
    SECTION = auto()
    """A group of options without a name of its own: `verify`."""
    OTHER = auto()
    """A number, a truth value, a choice of both, or a list of numbers."""


@dataclass(frozen=True)
class Option:
    """An option of the command.

    Attributes:
        name: dotted name, such as 'data.root'.
        hint: type of its field.
        default: its default; an instance for a group.
        kind: kind of its value.
        members: members of the family of its group that read it; empty for all.
        owner: dataclass whose field it is, for each of these members or of the group.
    """

    name: str
    hint: object
    default: Any
    kind: Kind
    members: tuple[str, ...]
    owners: tuple[type, ...]

    @property
    def is_optional(self) -> bool:
        """Whether its value may be null."""
        return type(None) in alternatives(self.hint)

    @property
    def type_text(self) -> str:
        """Its values in words, such as 'a whole number, or null'; '' for a section."""
        if self.kind is Kind.SECTION:
            return ""
        return "a name" if self.kind is Kind.GROUP else in_words(self.hint)

    @property
    def default_text(self) -> str:
        """Its default as it is written on the command line; '' for a section."""
        if self.kind in (Kind.GROUP, Kind.SECTION):
            return getattr(self.default, "name", "")
        return shown(self.default)

    @property
    def help(self) -> str:
        """What it does, with what selects the members that read it in front."""
        last = self.name.rpartition(".")[2]
        sentences = [_sentences(owner)[last] for owner in self.owners]
        if not self.members or len(self.members) != len(self.owners):
            choices = family(self.name) if self.name in family_options() else ()
            return sentences[0] + "".join(f" {each.name}: {each.help}" for each in choices)
        group = member_groups()[self.name.partition(".")[0]]
        members_of: dict[str, list[str]] = {}
        for member, sentence in zip(self.members, sentences, strict=True):
            members_of.setdefault(sentence, []).append(f"{group.option}={member}")
        return " ".join(f"{', '.join(names)}: {text}" for text, names in members_of.items())


def member_groups() -> Mapping[str, MemberGroup]:
    """Return the groups with a family of members by their names.

    The option `codec` also selects a member, but is no group: codecs have no options.
    """
    groups = {}
    for option in family_options():
        name, _, selector = option.partition(".")
        base = hints_of(Config)[name]
        if isinstance(base, type) and is_dataclass(base):
            groups[name] = MemberGroup(name, selector or "name", option, base)
    return groups


@functools.cache
def option_tree() -> Mapping[str, Option]:
    """Return every option by its dotted name, in the order of the groups: 'out', 'model', ..."""
    return MappingProxyType({option.name: option for option in _walk(Config, "", ())})


def _walk(cls: type, prefix: str, members: tuple[str, ...]) -> Iterator[Option]:
    """Iterate over the options of a group, those of its members and those in groups below it."""
    # Name of an option -> dataclasses that have it, and the members to which they belong.
    found: dict[str, tuple[tuple[type, ...], tuple[str, ...]]]
    found = {f.name: ((cls,), members) for f in fields(cls)}
    group = member_groups().get(prefix.rstrip("."))
    if group is not None and cls is group.base:
        for name, owner_of in group.readers().items():
            found[name] = (tuple(owner_of.values()), tuple(owner_of))

    for name, (owners, its_members) in found.items():
        described = [
            (hints_of(owner)[name], default_of_field(owner.__dataclass_fields__[name]))  # type: ignore[attr-defined]
            for owner in owners
        ]
        hint, default = described[0]
        if group is not None and any(each != described[0] for each in described):
            raise FeatxError(
                f"{group.option}={' and '.join(its_members)}: the option {name} has another type "
                "or default in each."
            )
        yield Option(prefix + name, hint, default, _kind_of(hint), its_members, owners)
        if is_dataclass(hint):
            yield from _walk(hint, f"{prefix}{name}.", its_members)  # type: ignore[arg-type]  # a class


def _kind_of(hint: object) -> Kind:
    if is_dataclass(hint):
        names = {f.name for f in fields(hint)}
        return Kind.GROUP if "name" in names else Kind.SECTION

    # A value may have several forms: `layers` is a text, a list of texts, or a mapping.
    forms = set()
    for part in map(without_marks, alternatives(hint)):
        origin = get_origin(part)
        inner = get_args(part)[0] if origin is list else part
        is_choice = get_origin(inner) is Literal
        if inner is str or (is_choice and all(isinstance(each, str) for each in get_args(inner))):
            forms.add(Kind.TEXTS if origin is list else Kind.TEXT)
        elif part is not type(None):
            forms.add(Kind.MAPPING if origin is dict else Kind.OTHER)
    if {Kind.TEXT, Kind.TEXTS} <= forms:
        return Kind.NAMES
    if len(forms) == 1:
        return forms.pop()
    return Kind.MAPPING if Kind.MAPPING in forms else Kind.OTHER


def known_keys() -> list[str]:
    """Return the dotted name of every option of the command: 'out', 'model.weights', ..."""
    return [*(option.name for option in described_options()), "model.name"]


@functools.cache
def default_values() -> Mapping[str, Any]:
    """Return the defaults of all options, groups of them as mappings; nothing is resolved."""
    values: dict[str, Any] = {}
    for name, option in option_tree().items():
        *groups, last = name.split(".")
        node = functools.reduce(lambda part, key: part[key], groups, values)
        node[last] = {} if is_group(option.default) else option.default
    return MappingProxyType(values)


def refuse_given_of_others(config: Config, given: Iterable[str]) -> None:
    """Refuse options of members that are not chosen, also if they were given their defaults.

    `given` are the dotted names of the options that were given.
    """
    for group in member_groups().values():
        prefix = f"{group.name}."
        names = sorted(
            {n.removeprefix(prefix).partition(".")[0] for n in given if n.startswith(prefix)}
        )
        chosen = group.select(vars(getattr(config, group.name)))
        refuse_options_of_others(group, chosen, names)


def described_options() -> list[Option]:
    """Return the options that the help and the documentation describe, in their order.

    A group's own name is the option of the group: model=resnet50, not model.name=resnet50.
    """
    return [option for option in option_tree().values() if not option.name.endswith(".name")]


@functools.cache
def _sentences(options: type) -> Mapping[str, str]:
    """Return the sentence of each field of a dataclass: the string below it in the source."""
    sentences: dict[str, str] = {}
    for owner in reversed(options.__mro__):
        if not is_dataclass(owner):
            continue
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
                sentences[before.target.id] = " ".join(str(after.value.value).split())
    return types.MappingProxyType(sentences)
