"""Configs from composed YAML and overrides, and from the keywords of Python calls.

Hydra composes plain values; the dataclasses of the options check them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featx.base import family
from featx.config import OBJECT_SOURCE, DataConfig, model_choice, source_of_path
from featx.config.all_options import (
    Kind,
    default_values,
    known_keys,
    member_groups,
    option_tree,
)
from featx.config.checks import default_of_field, is_group
from featx.config.members import make_group, make_member, unknown_key
from featx.config.run_config import Config
from featx.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def default_node() -> DictConfig:
    """Return the defaults of all options as a node."""
    from omegaconf import OmegaConf

    return OmegaConf.create(dict(default_values()))


def from_omegaconf(node: DictConfig) -> Config:
    """Return the Config of a composed OmegaConf node; its job does not check it yet.

    Args:
        node: all options, those of all members included.

    Raises:
        ConfigError: an option is unknown or invalid.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        _name_lists_in_out(node)
        values = OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    return from_values(values)  # type: ignore[arg-type]  # texts are the keys


def _name_lists_in_out(node: DictConfig) -> None:
    """Replace ${layers} in `out` by layer4+avgpool, if it is a list: brackets are no folder."""
    from omegaconf import DictConfig, ListConfig, OmegaConf

    def text(match: re.Match[str]) -> str:
        value = OmegaConf.select(node, match[1])
        if not isinstance(value, DictConfig | ListConfig):
            return match[0]
        return "+".join(re.sub(r"[^\w.+@=-]", "_", str(each)) for each in value)

    out = OmegaConf.to_container(node, resolve=False)["out"]  # type: ignore[call-overload,index]
    node.out = re.sub(r"\$\{([\w.]+)\}", text, out) if isinstance(out, str) else out


def from_values(values: Mapping[str, Any]) -> Config:
    """Return the Config of plain values, groups of them as mappings."""
    groups = member_groups()
    made = {
        name: make_member(groups[name], value) if name in groups else value
        for name, value in values.items()
    }
    config = make_group(Config, made, "")
    _refuse_empty_texts(config, "")
    return config


def _refuse_empty_texts(options: Any, prefix: str) -> None:
    """Refuse empty texts such as `out=`: an empty path would be the current folder."""
    for f in fields(options):
        value, name = getattr(options, f.name), prefix + f.name
        if is_group(value):
            _refuse_empty_texts(value, f"{name}.")
        elif value == "" and not option_tree()[name].may_be_empty:
            raise ConfigError(f"{name} is empty: give a value, or leave {name} out.")


def from_keywords(values: Mapping[str, Any]) -> DictConfig:
    """Return the composed node of options that Python gives as keywords.

    `model="resnet50"`, `data="photos/"` (a folder, or the name of a packaged data set),
    `reduce="avg"` and `executor="local"` are taken as on the command line; each also takes a
    mapping, or the options of a member: `data=FolderOptions(root="photos")`.

    Raises:
        ConfigError: a key is unknown or a value of the wrong type.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    given = {}
    for name, value in values.items():
        if name not in {f.name for f in fields(Config)} - {"job", "log"}:
            raise unknown_key(name, [key.replace(".", "_") for key in known_keys()])
        given[name] = _values_of_group(name, value)
    given = _with_texts(given, "")
    try:
        return OmegaConf.merge(default_node(), given)  # type: ignore[return-value]  # a mapping
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error


def nested_keywords(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call with options of groups in mappings.

    `data_limit=10` and `**{"data.limit": 10}` become `data={"limit": 10}`, next to what `data` is
    given as.

    Raises:
        ConfigError: there is no such option, or it is given twice.
    """
    groups = {f.name for f in fields(Config)}
    nested = {name: value for name, value in values.items() if name in groups}
    options = {name.replace(".", "_"): name for name in option_tree()}
    for keyword, value in values.items():
        if keyword in groups:
            continue
        option = options.get(keyword.replace(".", "_"))
        if option is None:
            raise unknown_key(keyword, [name for name in options if not name.startswith("job")])
        group, *inner, last = option.split(".")
        node = nested[group] = dict(_as_mapping(group, nested.get(group, {})))
        for name in inner:
            node[name] = dict(node.get(name, {}))
            node = node[name]
        if last in node:
            raise ConfigError(f"{keyword} and {group} both give {option}; give it once.")
        node[last] = value
    return nested


def _as_mapping(group: str, value: Any) -> Mapping[str, Any]:
    """Return the value of a group as a mapping; an object is its source or factory."""
    value = _values_of_group(group, value)
    if isinstance(value, Mapping):
        return value
    return {"factory" if group == "model" else "source": value}


def _values_of_group(name: str, value: Any) -> Any:
    """Return the options of a group that is given by a text or by a dataclass as a mapping."""
    if is_group(value):
        return asdict(value)
    if name == "data" and isinstance(value, Mapping) and "root" in value and "name" not in value:
        return {"name": source_of_path(os.fspath(value["root"])), **value}
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        return value
    if name == "model":
        return model_choice(value)
    if name in ("reduce", "executor"):
        return {"name": value}
    if name == "data":
        return (
            {"name": value}
            if _is_packaged(value)
            else {"name": source_of_path(value), "root": value}
        )
    return value


def _is_packaged(name: str) -> bool:
    """Return whether a text names a source that needs no data.root, such as 'sample'."""
    sources = family("data")
    return name in sources and name != OBJECT_SOURCE and sources.get(name).options is None


def _with_texts(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values with paths as text.

    A number is refused as a text, because it may have been written in another way: 2024_01.
    """
    texts: dict[str, Any] = {}
    for name, value in values.items():
        option = option_tree().get(f"{prefix}{name}")
        if option is None:
            raise unknown_key(f"{prefix}{name}", known_keys())
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if option.kind in (Kind.GROUP, Kind.SECTION) and isinstance(value, Mapping):
            value = _with_texts(value, f"{prefix}{name}.")
        elements = {Kind.TEXT: [value], Kind.TEXTS: value}.get(option.kind)
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
        if is_group(value):
            defaults = {f.name: default_of_field(f) for f in fields(value)}
            names |= {f"{name}.{key}" for key in defaults if getattr(value, key) != defaults[key]}
        elif isinstance(value, Mapping) and option_tree()[name].kind in (Kind.GROUP, Kind.SECTION):
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
        if is_group(value):
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
    if isinstance(source, str | os.PathLike):  # a path is a folder or file of images, not a list
        if "root" in data:
            raise ConfigError("data.root and data.source are both paths; give one.")
        given = {k: v for k, v in data.items() if k != "source"}
        values["data"] = {**_values_of_group("data", {"root": source, **given})}
        return values, None
    if conflicts := {"name", "root"} & set(data):
        raise ConfigError(
            f"data.{min(conflicts)} has no effect with a data set given as an object."
        )
    values["data"] = {"name": OBJECT_SOURCE, **{k: v for k, v in data.items() if k != "source"}}
    return values, source


def without_model(values: Mapping[str, Any]) -> tuple[dict[str, Any], object | None]:
    """Separate a model that Python gave as an object from the options.

    `model=net` is short for `model={"library": "custom", "factory": net}`, and a function that
    returns a module may stand in the place of `net`.

    Returns:
        the options with the model as a mapping, whose factory is missing, and the object or None.
    """
    values = dict(values)
    model = values.get("model")
    if model is None or isinstance(model, str | os.PathLike) or is_group(model):
        return values, None
    if not isinstance(model, Mapping):
        model = {"factory": model}
    factory = model.get("factory")
    if factory is None or isinstance(factory, str):
        return values, None
    name = getattr(factory, "__name__", type(factory).__name__)
    own = {key: value for key, value in model.items() if key != "factory"}
    values["model"] = {"name": name.strip("<>"), "library": "custom", **own}
    return values, factory
