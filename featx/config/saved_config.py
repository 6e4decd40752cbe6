"""Config as a store keeps it: written without secrets, and read without trust."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from featx.base import family
from featx.config import DataConfig
from featx.config.all_options import Kind, default_values, member_groups, option_tree
from featx.config.run_config import Config
from featx.config.schema import from_values, merged_values, node_to_resolve
from featx.errors import ConfigError, gone

if TYPE_CHECKING:
    from omegaconf import DictConfig


def from_saved(text: str) -> Config:
    """Read a config that `saved_yaml` wrote.

    A store may come from a stranger, so no interpolation is resolved: a text that would read the
    environment stays as it is. Raises ConfigError if it has an option that this version of featx
    does not know, was changed, or names a member of a package that is not installed.
    """
    import yaml

    try:
        options = _of_this_version(_load_mapping(text))
        for group in member_groups().values():  # names a member that is not installed here
            if isinstance(values := options.get(group.name), Mapping) and group.selector in values:
                family(group.option).get(str(values[group.selector]))
        return from_values(merged_values(default_values(), options))
    except (yaml.YAMLError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"the config that the store keeps cannot be read: {reason}") from error


_RENAMED = (("data", "labels", "label_column"), ("model", "entry", "factory"))
"""Group, option of an earlier version, and the option that does the same."""

_MAKE_VALUES = ("model", "data", "layers", "reduce")
"""Groups whose options change what is stored."""


def _of_this_version(options: dict[str, Any]) -> dict[str, Any]:
    """Return saved options of an earlier version as those of this one that do the same."""
    for name, before, now in _RENAMED:
        group = _as_dict(options.get(name))
        if (value := group.pop(before, None)) is not None:
            group[now] = value
    checkpoint = _as_dict(_as_dict(options.get("model")).get("checkpoint"))
    if checkpoint.pop("resample", False):
        checkpoint["convert"] = "resample"
    if (layer := _as_dict(options.get("attribute")).pop("layer", None)) is not None:
        options["layers"] = [layer]
    for reduce in (options.get("reduce"), *_as_dict(options.get("layers")).values()):
        values = _as_dict(reduce)
        sides = {side: values.pop(side, None) for side in ("rows", "columns")}
        if any(sides.values()):  # of reduce=align 28 if one was not given
            values.pop("size", None)
            values.update({side: number or 28 for side, number in sides.items()})
    return _without_gone(options, "")


def _as_dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _without_gone(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return options without those that are gone. An option that changes what is stored stays if it
    has a value, so that it is refused.
    """
    kept: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        option = option_tree().get(name)
        may_matter = name.partition(".")[0] in _MAKE_VALUES and value is not None
        is_group = option is None or option.kind in (Kind.GROUP, Kind.SECTION)
        is_gone = gone(name) or (name == "probe.split" and gone(f"{name}={value}"))
        if isinstance(value, Mapping) and is_group:
            inner = _without_gone(value, f"{name}.")
            if inner or option is not None:
                kept[key] = inner
        elif may_matter or not is_gone:
            kept[key] = value
    return kept


def _load_mapping(text: str) -> dict[str, object]:
    """Read YAML that holds a mapping of plain values; an empty text is an empty mapping.

    The loader is that of Python: libyaml overflows the stack of the process where a file of a
    stranger nests ten thousand lists.
    """
    import yaml

    try:
        values = yaml.load(text, Loader=yaml.SafeLoader)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(values, dict | None):
        raise ValueError(f"it is a {type(values).__name__}, and a mapping was expected")
    return values or {}


def data_of_saved(saved: Config, options: DataConfig, store: str) -> DataConfig:
    """Return the options of the images of a store: those of its saved config, with data.root of
    `options`, those of the command, if it is given. `store` is its name in messages.

    Raises ConfigError if no data.root is given, and the saved options contain a URL or read the
    environment, by which a stranger's file could send secrets to another machine.
    """
    if options.root is not None:
        if options.name == saved.data.name:
            return replace(saved.data, root=options.root)
        common = {f.name: getattr(saved.data, f.name) for f in fields(DataConfig)}
        return replace(options, **{**common, "name": options.name, "root": options.root})
    for f in fields(saved.data):
        value = getattr(saved.data, f.name)
        if isinstance(value, str) and ("://" in value or "${" in value):
            raise ConfigError(
                f"{store} says data.{f.name}={value}. featx opens no URL and reads no environment "
                "because a file names it: say where the images are with data.root=."
            )
    return saved.data


_SECRET = re.compile(r"(^|_)(key|token|secret|password|passwd|credential)s?($|_)", re.IGNORECASE)


_WITHOUT_SECRETS = ("layers", "reduce")
"""Options whose names are names of layers and parameters of reductions, such as tokens."""


_OF_VALUES = ("job", "model", "data", "reduce", "conformance", "executor")
"""Groups that a store keeps whole; of the others it keeps what differs from the defaults."""


_SIGNED = re.compile(r"(\w://[^?]*)\?.*", re.DOTALL)
"""A URL with a query, in which a signed URL carries its secret."""


def is_secret(name: str) -> bool:
    """Return whether the value of an option of this name, such as token, is a secret."""
    return _SECRET.search(name) is not None


def saved_yaml(options: Mapping[str, Any] | DictConfig) -> str:
    """Return composed options as YAML for a store.

    Interpolations are resolved, except those that read the environment. Values of options such as
    token or password are replaced by "(redacted)", and so is the query of a URL.
    """
    import yaml

    node = node_to_resolve(options)
    kept = options if node is None else _resolved_but_environment(node)
    values = {
        name: _without_secrets(value, may_hold_secrets=name not in _WITHOUT_SECRETS)
        for name, value in kept.items()
    }
    for group in member_groups().values():
        chosen = group.select(values[group.name])
        values[group.name] = {
            name: value
            for name, value in values[group.name].items()
            if not (members := option_tree()[f"{group.name}.{name}"].members) or chosen in members
        }
    for name, default in default_values().items():
        if name not in _OF_VALUES and isinstance(default, Mapping):
            different = {k: v for k, v in values[name].items() if v != default[k]}
            values[name] = different
            if not different:
                del values[name]
    return str(yaml.safe_dump(values, allow_unicode=True, sort_keys=False))


def _resolved_but_environment(part: object) -> Any:
    """Return a node as plain values; interpolations of the environment, whose values may be
    secrets, stay as they are."""
    from omegaconf import DictConfig, ListConfig

    if not isinstance(part, DictConfig | ListConfig):
        return part
    keys: Any = part if isinstance(part, DictConfig) else range(len(part))
    values: dict[str, object] = {}
    for key in keys:
        raw = part._get_node(key)._value()  # type: ignore[union-attr]
        reads_environment = isinstance(raw, str) and "${" in raw and "env" in raw
        values[str(key)] = raw if reads_environment else _resolved_but_environment(part[key])
    return values if isinstance(part, DictConfig) else list(values.values())


def _without_secrets(value: object, may_hold_secrets: bool) -> Any:
    """Return a value whose options with names of secrets, and queries of URLs, are replaced."""
    if isinstance(value, Mapping):
        return {
            str(name): "(redacted)"
            if may_hold_secrets and inner is not None and is_secret(str(name))
            else _without_secrets(inner, may_hold_secrets)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [_without_secrets(inner, may_hold_secrets) for inner in value]
    return _SIGNED.sub(r"\1?(redacted)", value) if isinstance(value, str) else value
