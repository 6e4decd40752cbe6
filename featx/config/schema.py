"""The options as users meet them: described, and taken from YAML, overrides or Python."""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featx.config import PACKAGED_DATA, DataConfig
from featx.config.job_rules import check_given, given_by_value
from featx.config.option_types import Kind, option_types
from featx.config.run_config import Config
from featx.errors import ConfigError, nearest

if TYPE_CHECKING:
    from omegaconf import DictConfig


def described_keys() -> list[tuple[str, str, str]]:
    """(key, default, sentence) of every key of the command, for --help and the README.

    The sentence is the string under the field, which only the source holds.
    """
    sentences: dict[tuple[str, str], str] = {}
    sources = sorted(Path(__file__).parent.glob("*.py"))
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sources]
    for node in itertools.chain.from_iterable(tree.body for tree in trees):
        if isinstance(node, ast.ClassDef):
            for before, after in itertools.pairwise(node.body):
                if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr):
                    assert isinstance(before.target, ast.Name)
                    assert isinstance(after.value, ast.Constant)
                    text = " ".join(str(after.value.value).split())
                    sentences[node.name, before.target.id] = text

    def walk(node: Any, prefix: str) -> list[tuple[str, str, str]]:
        rows = []
        for f in fields(node):
            value = getattr(node, f.name)
            nested = is_dataclass(value)
            # A group's own name is the key of the group: model=resnet50, not model.name=resnet50.
            default = getattr(value, "name", "") if nested else value
            shown = str(default).lower() if isinstance(default, bool) else str(default)
            shown = re.sub(r"\$\{(\w+)\.name\}", r"<\1>", shown)
            sentence = sentences[type(node).__name__, f.name]
            if f.name != "name":
                shown = "null" if default is None else shown
                rows.append((prefix + f.name, shown, sentence))
            if nested:
                rows += walk(value, f"{prefix}{f.name}.")
        return rows

    return walk(Config(), "")


@functools.cache
def config_schema() -> DictConfig:
    """All keys with their types and defaults; merging copies it."""
    from omegaconf import OmegaConf

    schema: DictConfig = OmegaConf.structured(Config)
    return schema


def known_keys() -> list[str]:
    """Every key of the command, dotted: 'out', 'model.weights', ..."""

    names = [key for key, _, _ in described_keys()]
    return [*names, "model.name"]


def from_omegaconf(node: DictConfig, given: Collection[str] | None = None) -> Config:
    """A checked Config from a composed OmegaConf node.

    Args:
        node: of all options.
        given: the dotted names of the options that the command or the call gave, which its job has
            to read; None takes those that differ from their defaults.

    Raises:
        ConfigError: for the first key that does not fit.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _refuse_added_keys(node, Config, "")
    try:
        config = OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    assert isinstance(config, Config)
    _refuse_empty_texts(config, "")
    check_given(config, given_by_value(config) if given is None else given)
    return config


def _refuse_empty_texts(options: Any, prefix: str) -> None:
    """`out=` is a mistake: an empty path would be the folder that the command runs in."""
    for f in fields(options):
        value, name = getattr(options, f.name), prefix + f.name
        if is_dataclass(value):
            _refuse_empty_texts(value, f"{name}.")
        elif value == "" and not option_types()[name].may_be_empty:
            raise ConfigError(f"{name} is empty: give a value, or leave {name} out.")


def _refuse_added_keys(node: DictConfig, schema: type, prefix: str) -> None:
    """Hydra's `+key=value` adds what no field knows; it would have no effect."""
    names = {f.name for f in fields(schema)}
    defaults = schema()
    for key in node:
        if key not in names:
            unknown = prefix + str(key)
            raise ConfigError(f"unknown key {unknown!r}.{nearest(unknown, known_keys())}")
        if schema is Config and is_dataclass(nested := getattr(defaults, str(key))):
            _refuse_added_keys(node[key], type(nested), f"{prefix}{key}.")


def from_keywords(values: Mapping[str, Any]) -> DictConfig:
    """The same keys from Python; short forms as on the command line.

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
        values["model"] = {"name": model}
    for group in ("reduce", "executor"):
        if isinstance(name := values.get(group), str):
            values[group] = {"name": name}
    if isinstance(data := values.get("data"), str):
        packaged = data in PACKAGED_DATA
        values["data"] = {"name": data} if packaged else {"name": "folder", "root": data}
    try:
        merged = OmegaConf.merge(config_schema(), values)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    return merged  # type: ignore[return-value]  # a structured node merges to a DictConfig


def _with_texts(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The values with paths as text; a number is none, for its text is not known any more.

    Raises:
        ConfigError: a number is given where a text is expected.
    """
    found: dict[str, Any] = {}
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
        found[name] = value
    return found


def given_keywords(values: Mapping[str, Any]) -> frozenset[str]:
    """The dotted names of the options that a call gives.

    Args:
        values: its keywords, as of `from_keywords`.
    """
    names = set()
    for name, value in values.items():
        inner = option_types()[name].kind in (Kind.GROUP, Kind.SECTION)
        if inner and isinstance(value, Mapping):
            names |= {f"{name}.{key}" for key in value}
        else:
            names.add(name)
    return frozenset(names)


def without_object(values: Mapping[str, Any]) -> tuple[dict[str, Any], object | None]:
    """The keys without the data set that Python gave as an object, and that object or None.

    `data=dataset` is short for `data={"source": dataset}`, as `data="photos"` is for
    `data={"name": "folder", "root": "photos"}`; what travels on is `data={"name": "python"}`.
    """
    values = dict(values)
    data = values.get("data")
    if data is None or isinstance(data, str | Path | DataConfig):
        return values, None
    if not isinstance(data, Mapping):
        data = {"source": data}
    if (given := data.get("source")) is None:
        return values, None
    if other := {"name", "root"} & set(data):
        raise ConfigError(f"data.{min(other)} has no effect with a data set given as an object.")
    values["data"] = {"name": "python", **{k: v for k, v in data.items() if k != "source"}}
    return values, given
