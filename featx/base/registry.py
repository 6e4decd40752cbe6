"""Registry: the members of a family, such as all sources, found by name.

A member is one file in the package of its family, and registers itself when that file is imported.
Small members share a module that registers each of them.
Other distributions add members by entry points. No list of members exists anywhere else: options,
help, documentation and tables are made from the registry.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Concatenate, Generic, ParamSpec, TypeVar

from featx.base.console import log_message
from featx.errors import ConfigError, FeatxError, gone, nearest


@dataclass(frozen=True)
class Member:
    """Declaration of a member of a family.

    Attributes:
        name: value of the option that selects the member, such as 'folder' of `data=folder`.
        help: one sentence for `--help` and the documentation.
        options: dataclass of its options, or None if it has none of its own.
        extra: extra of featx that installs the packages it needs, such as 'zarr', or None.
    """

    name: str
    help: str
    options: type | None = None
    extra: str | None = None


MemberT = TypeVar("MemberT", bound=Member)
OptionsT = TypeVar("OptionsT")
ResultT = TypeVar("ResultT")
ParamsT = ParamSpec("ParamsT")


def for_options(
    member: str,
    options: type[OptionsT],
    function: Callable[Concatenate[OptionsT, ParamsT], ResultT],
    maker: str | None = None,
) -> Callable[Concatenate[object, ParamsT], ResultT]:
    """Let a function of one member be called with the options of any member of its family.

    A registry calls the functions of all its members in one way, while each member declares its own
    options. The returned function raises a FeatxError if its first argument is no instance of
    `options`.

    Args:
        member: option and name of the member for the message, such as 'data=folder'.
        function: function whose first argument are such options.
        maker: name of the function that makes the options of any member, for the message.
    """

    def call(config: object, /, *args: ParamsT.args, **kwargs: ParamsT.kwargs) -> ResultT:
        """Call `function` if the options are those of this member."""
        if not isinstance(config, options):
            advice = "" if maker is None else f" {maker} makes them."
            raise FeatxError(
                f"{member} was given {type(config).__qualname__}; expected "
                f"{options.__qualname__}.{advice}"
            )
        return function(config, *args, **kwargs)

    return call


class Registry(Generic[MemberT]):
    """Members of one family by their names.

    Args:
        option: option that selects a member, such as 'data', for messages.
        package: package whose modules are the members, such as 'featx.sources', or the one module
            that registers all members of a small family.
        entry_points: group of the entry points by which other distributions add members, such as
            'featx.sources', or None if the family is closed.
    """

    def __init__(self, option: str, package: str, entry_points: str | None = None) -> None:
        self.option = option
        self.package = package
        self._group = entry_points
        self._members: dict[str, MemberT] = {}
        self._is_complete = False

    def register(self, member: MemberT) -> MemberT:
        """Add a member; called once by the module that defines it.

        Raises FeatxError if another member has this name.
        """
        known = self._members.get(member.name)
        if known is not None and known != member:
            raise FeatxError(f"{self.option}={member.name} is registered twice.")
        self._members[member.name] = member
        return member

    def get(self, name: str) -> MemberT:
        """Return a member; imports no other member than this one where that can be avoided.

        Raises ConfigError if no member has this name, or the package that adds it cannot be
        imported.
        """
        if name not in self._members:
            self._import_one(name)
        if name not in self._members:
            if sentence := gone(f"{self.option}={name}"):
                raise ConfigError(sentence)
            names = self.names()
            if name not in self._members:
                raise ConfigError(
                    f"{self.option}={name}: expected one of {', '.join(names)}."
                    f"{nearest(name, names)}"
                )
        return self._members[name]

    def select(self, name: str, values: Mapping[str, object]) -> MemberT:
        """Return the member that the values of all options of a group select.

        It is that of the name, unless a family overrides this method; raises as `get`.
        """
        return self.get(name)

    def names(self) -> tuple[str, ...]:
        """Return the names of all members in alphabetical order."""
        return tuple(member.name for member in self)

    def __contains__(self, name: object) -> bool:
        """Return whether a member has this name; imports no other member."""
        if isinstance(name, str) and name not in self._members:
            self._import_one(name)
        return name in self._members

    def __iter__(self) -> Iterator[MemberT]:
        """Iterate over all members in the order of their names; imports all of them."""
        if not self._is_complete:
            folder = getattr(importlib.import_module(self.package), "__path__", ())
            for module in pkgutil.iter_modules(folder):
                importlib.import_module(f"{self.package}.{module.name}")
            for entry in self._entry_points:
                if entry.name not in self._members:
                    try:
                        self._load(entry)
                    except ConfigError as error:  # the other members can still be used
                        log_message(str(error), level="warning")
            self._is_complete = True
        return iter(sorted(self._members.values(), key=lambda member: member.name))

    def _import_one(self, name: str) -> None:
        """Import the module or the entry point of this name, if there is one."""
        home = importlib.import_module(self.package)
        may_be_module = name.isidentifier() and hasattr(home, "__path__")
        if may_be_module and importlib.util.find_spec(f"{self.package}.{name}") is not None:
            importlib.import_module(f"{self.package}.{name}")
        if name in self._members:
            return
        for entry in self._entry_points:
            if entry.name == name:
                self._load(entry)

    @functools.cached_property
    def _entry_points(self) -> tuple[EntryPoint, ...]:
        """Entry points of other distributions for this family.

        They are looked up once, because that reads the metadata of every installed distribution.
        """
        return () if self._group is None else tuple(entry_points(group=self._group))

    def _load(self, entry: EntryPoint) -> None:
        owner = entry.dist.name if entry.dist is not None else entry.value
        try:
            member = entry.load()
        except (Exception, SystemExit) as error:  # code of another package may raise anything
            raise ConfigError(
                f"{self.option}={entry.name} of the package {owner} cannot be imported: "
                f"{type(error).__name__}: {error}. Update or uninstall {owner}."
            ) from error
        if not isinstance(member, Member) or member.name != entry.name:
            raise ConfigError(
                f"{self.option}={entry.name} of the package {owner}: the entry point "
                f"{entry.value} is no member called {entry.name!r}; expected an object as "
                f"{self.package} registers."
            )
        self.register(member)  # type: ignore[arg-type]  # the family's own subclass of Member
