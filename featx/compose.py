"""Overrides -> Config, by Hydra: the schema, `model=ANY_NAME`, and errors in our own words."""

from __future__ import annotations

import re
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from featx.config import Config, known_keys
from featx.errors import ConfigError, nearest


class AnyModel(ConfigSource):
    """A config for every model name: `model=resnet50` without a conf/model/resnet50.yaml.

    It stands last in Hydra's search path, so a YAML of that name, ours or the user's
    (`--config-dir`), comes first. Whether the name exists is found out when the model is built.
    """

    @staticmethod
    def scheme() -> str:
        return "any-model"

    def load_config(self, config_path: str) -> ConfigResult:
        name = config_path.removesuffix(".yaml").removeprefix("model/")
        node = OmegaConf.create({"name": name})
        return ConfigResult(
            provider=self.provider, path=config_path, config=node, header={"package": None}
        )

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.rstrip("/") == "model"

    def is_config(self, config_path: str) -> bool:
        return config_path.startswith("model/")

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


def register() -> None:
    """Tell Hydra the schema and the source of model names."""
    ConfigStore.instance().store(name="schema", node=Config)
    Plugins.instance().register(AnyModel)


def explain(error: Exception) -> ConfigError:
    """A Hydra or OmegaConf error as one message that says what to do."""
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        chain.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    text = "\n".join(chain)
    unknown = re.search(
        r"Could not override '([^']+)'|Key '([^']+)' (?:is )?not in|"
        r"[Cc]ould not find '([^']+)/[^']*'.*|Could not append to config\. .* item '?([^' ]+)'?",
        text,
    )
    missing_choice = re.search(r"Could not find '(\w+)/([^']+)'", text)
    if missing_choice:
        group, choice = missing_choice.groups()
        options = re.search(rf"options in '{group}':\n((?:\t.*\n?)+)", text)
        names = options.group(1).split() if options else []
        return ConfigError(
            f"{group}={choice}: expected one of {', '.join(names)}.{nearest(choice, names)}"
        )
    if unknown:
        key = next(found for found in unknown.groups() if found)
        keys = known_keys()
        return ConfigError(
            f"unknown key {key!r}.{nearest(key, keys)} python -m featx --help lists every key."
        )
    if (override := getattr(error, "override", None)) is not None:
        return ConfigError(
            f"cannot read {override!r}: {chain[0].splitlines()[0]}. Quote what the shell or Hydra "
            "would take apart, for example 'layers=[layer4,avgpool]'."
        )
    full_key = re.search(r"full_key: (\S+)", text)
    where = f"{full_key.group(1)}: " if full_key else ""
    return ConfigError(where + _first_line(chain))


def _first_line(chain: list[Any]) -> str:
    """The innermost message that says something: Hydra's outer ones name only the override."""
    lines = [text.strip().splitlines()[0] for text in chain if text.strip()]
    outer = lines[0] if lines else "the configuration cannot be composed"
    if outer.startswith(("Error merging override", "In ")) and len(lines) > 1:
        return f"{outer}: {lines[1]}"
    return outer
