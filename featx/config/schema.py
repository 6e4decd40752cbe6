"""Configs from composed YAML and overrides, and from the keywords of Python calls."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from featx.base import family
from featx.config import OBJECT_SOURCE, DataConfig, model_choice
from featx.config.all_options import all_options, config_class, group_class, member_groups
from featx.config.member_options import (
    MemberGroup,
    default_of_field,
    options_class,
    refuse_options_of_others,
)
from featx.config.options import Kind, option_types
from featx.config.run_config import Config
from featx.errors import ConfigError, gone, nearest

if TYPE_CHECKING:
    from omegaconf import DictConfig


@functools.cache
def config_schema() -> DictConfig:
    """Return all options with their types and defaults; merging copies it."""
    return _structured_node(config_class())  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def default_values() -> Mapping[str, Any]:
    """Return the defaults of all options, groups of them as mappings; nothing is resolved."""
    from omegaconf import OmegaConf

    values: dict[str, Any] = OmegaConf.to_container(config_schema(), resolve=False)  # type: ignore[assignment]  # a structured node has texts as keys
    return MappingProxyType(values)


def known_keys() -> list[str]:
    """Return the dotted name of every option of the command: 'out', 'model.weights', ..."""
    names = [name for name in option_types() if not name.endswith(".name")]
    return [*names, "model.name"]


def from_omegaconf(node: DictConfig) -> Config:
    """Return the Config of a composed OmegaConf node; its job does not check it yet.

    Args:
        node: all options, those of all members included.

    Raises:
        ConfigError: an option is unknown or invalid.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _refuse_added_keys(node, all_options(), "")
    try:
        chosen = {
            group.group: _with_options_of_choice(node, group) for group in member_groups().values()
        }
        values: dict[str, Any] = {}
        for f in fields(Config):
            value = chosen[f.name] if f.name in chosen else node[f.name]
            values[f.name] = OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    config = Config(**values)
    _refuse_empty_texts(config, "")
    return config


def _refuse_empty_texts(options: Any, prefix: str) -> None:
    """Refuse empty texts such as `out=`: an empty path would be the current folder."""
    for f in fields(options):
        value, name = getattr(options, f.name), prefix + f.name
        if is_dataclass(value):
            _refuse_empty_texts(value, f"{name}.")
        elif value == "" and not option_types()[name].may_be_empty:
            raise ConfigError(f"{name} is empty: give a value, or leave {name} out.")


def _with_options_of_choice(node: DictConfig, group: MemberGroup) -> DictConfig:
    """Return the options of a group as those of the member that is chosen.

    Args:
        node: all options of the command; it stays as it is.
        group: the group.

    Raises:
        ConfigError: there is no such member, or an option of another member has a value.
    """
    from omegaconf import OmegaConf

    base = group_class(group)
    options = node[group.group]
    values: dict[str, Any] = OmegaConf.to_container(options, resolve=False)  # type: ignore[assignment]  # a structured node has texts as keys
    values[group.selector] = options[group.selector]  # resolved, as the member is found by it
    chosen: type[Any] = options_class(group.option, group.select(values), base)
    refuse_options_of_others(group, base, values)
    names = {f.name for f in fields(chosen)}
    member_values = {key: value for key, value in values.items() if key in names}
    options_node: DictConfig = OmegaConf.merge(_structured_node(chosen), member_values)  # type: ignore[assignment, arg-type]  # a structured node merges to a DictConfig; a class is hashable
    # Interpolations such as ${out} are looked up in all options. Assigning it to `node` would
    # do the same, but needs a deep copy of all options, which takes most of the time of a call.
    options_node._set_parent(node)
    options_node._set_key(group.group)
    return options_node


@functools.cache
def _structured_node(options: type) -> DictConfig:
    """Return a dataclass with its defaults as a typed node; merging copies it."""
    from omegaconf import OmegaConf

    schema: DictConfig = OmegaConf.structured(options)
    return schema


def _refuse_added_keys(node: DictConfig, options: Any, prefix: str) -> None:
    """Refuse options that `+key=value` of Hydra adds and that no field has: they have no effect.

    Args:
        node: options of the command.
        options: dataclass instance with every known option.
        prefix: group of the options, such as 'data.', or ''.
    """
    names = {f.name for f in fields(options)}
    for key in node:
        if key not in names:
            unknown = prefix + str(key)
            raise ConfigError(f"unknown key {unknown!r}.{nearest(unknown, known_keys())}")
        if not prefix and is_dataclass(nested := getattr(options, str(key))):
            _refuse_added_keys(node[key], nested, f"{prefix}{key}.")


def from_keywords(values: Mapping[str, Any]) -> DictConfig:
    """Return the composed node of options that Python gives as keywords.

    `model="resnet50"`, `data="photos/"` (a folder, or the name of a packaged data set),
    `reduce="avg"` and `executor="local"` are taken as on the command line; each also takes a
    mapping.

    Raises:
        ConfigError: a key is unknown or a value of the wrong type.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for key in values:
        if key not in {f.name for f in fields(Config)} - {"job", "log"}:
            raise ConfigError(f"unknown key {key!r}.{nearest(key, known_keys())}")
    values = _with_texts(values, "")
    if isinstance(model := values.get("model"), str):
        values["model"] = model_choice(model)
    for group in ("reduce", "executor"):
        if isinstance(name := values.get(group), str):
            values[group] = {"name": name}
    if isinstance(data := values.get("data"), str):
        values["data"] = {"name": data} if _is_packaged(data) else {"name": "folder", "root": data}
    try:
        merged = OmegaConf.merge(config_schema(), values)
    except OmegaConfBaseException as error:
        reason = gone(str(error.full_key)) or str(error).splitlines()[0]
        raise ConfigError(reason) from error
    return merged  # type: ignore[return-value]  # a structured node merges to a DictConfig


def _is_packaged(name: str) -> bool:
    """Return whether a text names a source that needs no data.root, such as 'sample'."""
    sources = family("data")
    return name in sources and name != OBJECT_SOURCE and sources.get(name).options is None


def _with_texts(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values with paths as text.

    A number is refused as a text, because it may have been written in another way: 2024_01.

    Raises:
        ConfigError: a number is given where a text is expected.
    """
    texts: dict[str, Any] = {}
    for name, value in values.items():
        option = option_types().get(f"{prefix}{name}")
        kind = None if option is None else option.kind
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if kind in (Kind.GROUP, Kind.SECTION) and isinstance(value, Mapping):
            value = _with_texts(value, f"{prefix}{name}.")
        elements = [value] if kind is Kind.TEXT else value if kind is Kind.TEXTS else []
        for element in elements or ():
            if isinstance(element, int | float):
                raise ConfigError(
                    f"{prefix}{name}={value!r}: expected text, and {element!r} is a number; put it "
                    f"in quotes: {str(element)!r}."
                )
        texts[name] = value
    return texts


def given_keywords(values: Mapping[str, Any]) -> frozenset[str]:
    """Return the dotted names of the options that a call gives.

    Args:
        values: its keywords, as for `from_keywords`.
    """
    names = set()
    for name, value in values.items():
        is_group = option_types()[name].kind in (Kind.GROUP, Kind.SECTION)
        if is_group and isinstance(value, Mapping):
            names |= {f"{name}.{key}" for key in value}
        else:
            names.add(name)
    return frozenset(names)


def given_by_value(config: Config) -> frozenset[str]:
    """Return the dotted names of the options that differ from their defaults."""
    names: set[str] = set()
    defaults = Config()
    for f in fields(config):
        value, default = getattr(config, f.name), getattr(defaults, f.name)
        if f.name == "out" and value == f"runs/{config.data.name}/{config.model.name}":
            continue
        if is_dataclass(value):
            different = {
                inner.name
                for inner in fields(value)
                if getattr(value, inner.name)
                != getattr(default, inner.name, default_of_field(inner))  # of a member only
            } - {"library"}  # which model=LIBRARY brings along
            names |= {f"{f.name}.{name}" for name in different}
        elif value != default:
            names.add(f.name)
    return frozenset(names)


def without_object(values: Mapping[str, Any]) -> tuple[dict[str, Any], object | None]:
    """Separate a data set that Python gave as an object from the options.

    `data=dataset` is short for `data={"source": dataset}`, as `data="photos"` is for
    `data={"name": "folder", "root": "photos"}`.

    Returns:
        the options, with `data={"name": "python"}` if there is an object, and the object or None.
    """
    values = dict(values)
    data = values.get("data")
    if data is None or isinstance(data, str | Path | DataConfig):
        return values, None
    if not isinstance(data, Mapping):
        data = {"source": data}
    if (source := data.get("source")) is None:
        return values, None
    if conflicts := {"name", "root"} & set(data):
        raise ConfigError(
            f"data.{min(conflicts)} has no effect with a data set given as an object."
        )
    values["data"] = {"name": OBJECT_SOURCE, **{k: v for k, v in data.items() if k != "source"}}
    return values, source
