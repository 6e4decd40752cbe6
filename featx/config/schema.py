"""Configs from composed YAML and overrides, and from the keywords of Python calls.

Hydra composes plain values; the dataclasses of the options check them.
"""

from __future__ import annotations

import copy
import numbers
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featx.base import family
from featx.config import OBJECT_SOURCE, DataConfig, model_choice, source_of_path
from featx.config.all_options import Kind, default_values, known_keys, member_groups, option_tree
from featx.config.checks import choices_of, default_of_field, is_group, not_options
from featx.config.members import make_group, make_member, unknown_key
from featx.config.run_config import Config
from featx.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def from_composed(options: Mapping[str, Any] | DictConfig) -> Config:
    """Return the Config of composed options; its job does not check it yet.

    `options` are all, those of all members included: the node that Hydra composed, or the values
    that `from_keywords` returned. Raises ConfigError if one is unknown or invalid.
    """
    from omegaconf.errors import OmegaConfBaseException

    try:
        node = node_to_resolve(options)
        values = options if node is None else _resolved(node)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    return from_values(values)


def node_to_resolve(options: Mapping[str, object] | DictConfig) -> DictConfig | None:
    """Return composed options as a node, or None if they are plain values without interpolations.

    Making a node takes 0.1 s, and few calls from Python have interpolations.
    """
    from omegaconf import OmegaConf

    if OmegaConf.is_config(options):
        return options  # type: ignore[return-value]
    return OmegaConf.create(dict(options)) if _has_interpolation(options) else None


def _has_interpolation(value: object) -> bool:
    """Return whether a text of a value reads another option or the environment."""
    if isinstance(value, Mapping):
        return any(map(_has_interpolation, value.values()))
    if isinstance(value, list):
        return any(map(_has_interpolation, value))
    return isinstance(value, str) and "${" in value


def _resolved(node: DictConfig) -> Any:
    """Values of a node. A list in `out`, as in ${layers}, becomes layer4+avgpool: brackets are no
    folder.
    """
    from omegaconf import DictConfig, ListConfig, OmegaConf

    out = OmegaConf.to_container(node, resolve=False)["out"]  # type: ignore[call-overload,index]
    names = re.findall(r"\$\{([\w.]+)\}", out) if isinstance(out, str) else []
    for name in names:
        value = OmegaConf.select(node, name)
        if isinstance(value, DictConfig | ListConfig):
            text = "+".join(re.sub(r"[^\w.+@=-]", "_", str(each)) for each in value)
            out = out.replace(f"${{{name}}}", text)
    node.out = out
    return OmegaConf.to_container(node, resolve=True)


def from_values(values: Mapping[str, Any]) -> Config:
    """Return the Config of plain values, groups of them as mappings."""
    made = dict(values)
    for name, group in member_groups().items():
        if not isinstance(values[name], Mapping):
            raise not_options(name, values[name], group.selector)
        defaults, selectors = default_values()[name], ("name", group.selector)
        given = {
            option: value
            for option, value in values[name].items()
            if option in selectors or option not in defaults or value != defaults[option]
        }
        made[name] = make_member(group, given)
    config = make_group(Config, made, "")
    if config.out == Config.out and config.store is None:
        return replace(config, out=config.default_out)
    return config  # a job that reads `store` writes into its folder if `out` is not given


def from_keywords(values: Mapping[str, object]) -> dict[str, Any]:
    """Return all options of a call whose keywords give some of them, for `from_composed`.

    `model="resnet50"`, `data="photos/"` (a folder, or the name of a packaged data set),
    `reduce="avg"` and `executor="local"` are taken as on the command line; each also takes a
    mapping, or the options of a member: `data=FolderOptions(root="photos")`. Raises ConfigError if
    a key is unknown or a value of the wrong type.
    """
    given = {}
    for name, value in values.items():
        if name == "job":
            raise ConfigError(
                "job is no keyword: each function does one job, such as featx.stats and "
                f"featx.write_report. The others are commands: python -m featx job={value}."
            )
        if name not in {f.name for f in fields(Config)} - {"job", "log"}:
            raise unknown_key(name, [key.replace(".", "_") for key in known_keys()])
        given[name] = _values_of_group(name, value)
    return merged_values(default_values(), _with_texts(given, ""))


def merged_values(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    """Return a copy of the defaults with other values; groups are merged option by option."""
    merged = copy.deepcopy(dict(defaults))
    for name, value in values.items():
        default = defaults.get(name)
        is_group = isinstance(default, Mapping) and default and isinstance(value, Mapping)
        merged[name] = merged_values(default, value) if is_group else value  # type: ignore[arg-type]
    return merged


_MEMBER_KEYWORDS = {
    "data_root": ("data", "data", "name"),
    "model_name": ("model", "model.library", "library"),
}
"""Keyword with which a text given for a group, `data="table"` or `model="timm"`, is the name of a
member -> the group, the family of its members, and the option that selects one."""


def nested_keywords(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call with options of groups in mappings.

    `data_limit=10` and `**{"data.limit": 10}` become `data={"limit": 10}`, next to what `data` is
    given as.
    """
    groups = {f.name for f in fields(Config)}
    nested = {name: value for name, value in values.items() if name in groups}
    for keyword, (group, name, selector) in _MEMBER_KEYWORDS.items():
        text, members = nested.get(group), family(name)
        is_given = keyword in values or keyword.replace("_", ".") in values
        if is_given and isinstance(text, str) and text in members:
            nested[group] = {selector: members.get(text).name}
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


def _as_mapping(group: str, value: Any) -> Mapping[str, object]:
    """Return the options that the value of a group gives; an object is its source or factory."""
    if is_group(value):
        given = {name.partition(".")[2] for name in given_keywords({group: value})}
        if (members := member_groups().get(group)) is not None:
            given.add(members.selector)
        return {name: inner for name, inner in asdict(value).items() if name in given}
    value = _values_of_group(group, value)
    if isinstance(value, Mapping):
        return value
    return {"factory" if group == "model" else "source": value}


def _values_of_group(name: str, value: Any) -> Any:
    """Return the options of a group that is given by a text or by a dataclass as a mapping."""
    if is_group(value):
        return asdict(value)
    root = value.get("root") if name == "data" and isinstance(value, Mapping) else None
    if isinstance(root, str | os.PathLike) and "name" not in value:
        return {"name": source_of_path(os.fspath(root)), **value}
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        return value
    if name == "model":
        return model_choice(value)
    if name in ("reduce", "executor"):
        return {"name": value}
    if name == "data":
        sources = family("data")
        # A folder that is named like a source is a path, unless the source needs no data.root.
        if value in sources and value != OBJECT_SOURCE:
            needs_root = sources.get(value).options is not None
            if not (needs_root and Path(value).exists()):
                return {"name": value}
        return {"name": source_of_path(value), "root": value}
    return value


def _with_texts(values: Mapping[str, object], prefix: str) -> dict[str, Any]:
    """Return the values as plain ones, with paths as text.

    A number is refused as a text, because it may have been written in another way: 2024_01.
    """
    texts: dict[str, Any] = {}
    for name, value in values.items():
        option = option_tree().get(f"{prefix}{name}")
        if option is None:
            raise unknown_key(f"{prefix}{name}", known_keys())
        if option.kind in (Kind.GROUP, Kind.SECTION):
            if not isinstance(value, Mapping):
                expected = "a name or " if option.kind is Kind.GROUP else ""
                group = member_groups().get(f"{prefix}{name}")
                example = "" if group is None else f", such as {{{group.selector!r}: {value!r}}}"
                raise ConfigError(
                    f"{prefix}{name} is a {type(value).__name__}; expected {expected}a mapping of "
                    f"options{example if isinstance(value, str) else ''}."
                )
            texts[name] = _with_texts(value, f"{prefix}{name}.")
            continue
        value = texts[name] = _plain_value(f"{prefix}{name}", value)
        elements = {Kind.TEXT: [value], Kind.TEXTS: value}.get(option.kind)
        for element in elements or ():
            is_number = isinstance(element, int | float) and not isinstance(element, bool)
            if is_number and not choices_of(option.hint):  # of a choice, the values are named later
                raise ConfigError(
                    f"{prefix}{name}={value!r}: expected text, and {element!r} is a number; put it "
                    f"in quotes: {str(element)!r}."
                )
    return texts


def _plain_value(name: str, value: Any) -> Any:
    """Return a value as YAML has it: paths are text, tuples and arrays lists; ConfigError if it has
    none.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, numbers.Integral):  # that of numpy as well
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if is_group(value):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, int) else str(key): _plain_value(f"{name}.{key}", inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain_value(f"{name}[{i}]", inner) for i, inner in enumerate(value)]
    # An array, a column of pandas, or a boolean of numpy.
    if hasattr(value, "tolist") and not isinstance(value, type):
        return _plain_value(name, value.tolist())
    if type(value).__module__ == "torch":  # a device or a dtype
        return str(value).removeprefix("torch.")
    raise ConfigError(
        f"{name} is a {type(value).__name__}; expected text, a number, a list or a mapping."
    )


def given_keywords(values: Mapping[str, Any]) -> frozenset[str]:
    """Return the dotted names of the options that a call gives by its keywords."""
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
        if f.name == "out" and value == config.default_out:
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
    `data={"name": "folder", "root": "photos"}`. Returns the options, with `data={"name": "python"}`
    if there is an object, and the object or None.
    """
    values = dict(values)
    data = values.get("data")
    if data is None or isinstance(data, str | Path | DataConfig):
        return values, None
    if not isinstance(data, Mapping):
        data = {"source": data}
    if type(data).__name__ == "DatasetDict":  # of Hugging Face
        raise ConfigError(
            f"data is a DatasetDict of the splits {', '.join(map(str, data))}; give one of them, "
            f"such as data_set[{next(iter(data), 'train')!r}]."
        )
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


def without_model(values: Mapping[str, object]) -> tuple[dict[str, Any], object | None]:
    """Separate a model that Python gave as an object from the options.

    `model=net` is short for `model={"library": "custom", "factory": net}`, and a function that
    returns a module may stand in the place of `net`. Returns the options with the model as a
    mapping, whose factory is missing, and the object or None.
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
