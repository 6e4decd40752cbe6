"""Config as a store keeps it: written without secrets, and read without trust."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from featx.base import family
from featx.config import DataConfig
from featx.config.all_options import group_class, member_groups
from featx.config.member_options import option_owners
from featx.config.run_config import Config
from featx.config.schema import config_schema, default_values, from_omegaconf
from featx.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def from_saved(text: str) -> Config:
    """Read a config that `saved_yaml` wrote.

    A store may come from a stranger, so no interpolation is resolved: a text that would read the
    environment stays as it is.

    Raises:
        ConfigError: it was saved by another version of featx, was changed, or names a member of a
            package that is not installed.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from featx.config import config_yaml

    def plain(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {key: plain(value) for key, value in part.items()}
        if isinstance(part, list):
            return [plain(value) for value in part]
        return part.replace("${", r"\${") if isinstance(part, str) else part

    try:
        options = plain(config_yaml.load(text))
        _leave_out_unread_transform(options)
        options.pop("bench", None)  # of earlier versions, as the next two
        if isinstance(options.get("export"), dict):
            options["export"].pop("push", None)
        if options.get("decode") == "gpu":  # the pixels agree closely
            options["decode"] = "fast"
        _check_members(options)
        node = OmegaConf.merge(config_schema(), _without_defaults(options, default_values()))
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError) as error:
        raise ConfigError(
            f"the config that the store keeps cannot be read: {str(error).splitlines()[0]}"
        ) from error
    return from_omegaconf(node)  # type: ignore[arg-type]  # a structured node merges to a DictConfig


def _without_defaults(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that differ from their defaults; OmegaConf takes 0.1 ms to merge each.

    Args:
        options: saved options, groups of them as mappings.
        defaults: the defaults in the same form.
    """
    different = {}
    for key, value in options.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            value = _without_defaults(value, default)
            if not value:
                continue
        # The representation also tells 1, 1.0 and true apart.
        elif key in defaults and repr(value) == repr(default):
            continue
        different[key] = value
    return different


def _leave_out_unread_transform(options: object) -> None:
    """Leave the preprocessing out of a config that was saved when only model=custom read it.

    Such a config contains the defaults of then, which no other model used, and not yet
    `model.transform.offset`.
    """
    model = options.get("model") if isinstance(options, dict) else None
    if not isinstance(model, dict) or model.get("library") == "custom":
        return
    transform = model.get("transform")
    if isinstance(transform, Mapping) and "offset" not in transform:
        del model["transform"]


def _check_members(saved: object) -> None:
    """Raise a ConfigError if a saved config names a member that is not installed here."""
    options = saved if isinstance(saved, Mapping) else {}
    for group in member_groups().values():
        values = options.get(group.group)
        if isinstance(values, Mapping) and group.selector in values:
            family(group.option).get(str(values[group.selector]))


def data_of_saved(saved: Config, options: DataConfig, store: str) -> DataConfig:
    """Return the options of the images of a store.

    Args:
        saved: config of the store, from `from_saved`.
        options: options of the command; its data.root is used if given.
        store: name of the store, for messages.

    Raises:
        ConfigError: the command gives no data.root, and the saved options contain a URL or read the
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


_SIGNED = re.compile(r"(\w://[^?]*)\?.*", re.DOTALL)
"""A URL with a query, in which a signed URL carries its secret."""


def is_secret(name: str) -> bool:
    """Return whether the value of an option of this name, such as token, is a secret."""
    return _SECRET.search(name) is not None


def saved_yaml(node: DictConfig) -> str:
    """Return the config as YAML for a store.

    Interpolations are resolved, except those that read the environment. Values of options such as
    token or password are replaced by "(redacted)", and so is the query of a URL.
    """
    from omegaconf import DictConfig, ListConfig

    from featx.config import config_yaml

    def walk(part: Any, may_hold_secrets: bool) -> Any:
        if isinstance(part, DictConfig):
            if part._is_none() or part._is_missing():
                return None
            values = {}
            for key in part:
                may_be_secret = may_hold_secrets and not (part is node and key in _WITHOUT_SECRETS)
                inner_value = value(part, key, may_be_secret)
                is_hidden = may_be_secret and inner_value is not None and is_secret(str(key))
                values[str(key)] = "(redacted)" if is_hidden else inner_value
            return values
        return [value(part, i, may_hold_secrets) for i in range(len(part))]

    def value(part: Any, key: Any, may_hold_secrets: bool) -> Any:
        raw = part._get_node(key)._value()
        if isinstance(raw, str) and "${" in raw and "env" in raw:  # its value may be a secret
            return raw
        inner = part[key]
        if isinstance(inner, DictConfig | ListConfig):
            return walk(inner, may_hold_secrets)
        return _SIGNED.sub(r"\1?(redacted)", inner) if isinstance(inner, str) else inner

    values = walk(node, may_hold_secrets=True)
    for group, name in _unread_plugin_options(node):
        values[group].pop(name, None)
    return config_yaml.dump(values)


def _unread_plugin_options(node: DictConfig) -> list[tuple[str, str]]:
    """Return (group, option) of the options that only members of other packages read.

    A store would otherwise need every package that was installed when it was made. Options of the
    members that are chosen are not among them.
    """
    unread = []
    for group in member_groups().values():
        chosen = group.select(node[group.group])
        for name, owners in option_owners(group.option, group_class(group)).items():
            members = [family(group.option).get(owner) for owner in owners]
            is_foreign = all(not _is_of_featx(member.options) for member in members)
            if is_foreign and chosen not in owners:
                unread.append((group.group, name))
    return unread


def _is_of_featx(options: type | None) -> bool:
    """Return whether a dataclass of options is part of featx."""
    return options is None or options.__module__.partition(".")[0] == "featx"
