"""Overrides -> Config, by Hydra: the schema, `model=ANY_NAME`, and errors in our own words."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from featx.config import Config
from featx.errors import ConfigError, nearest
from featx.keys import described_keys, known_keys


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
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    store.store(group="hydra/help", name="featx", node=_help())
    Plugins.instance().register(AnyModel)


def _help() -> dict[str, str]:
    """What `--help` prints, in the form of Hydra's hydra/help group."""
    rows = described_keys()
    width = max(len(f"{key}={default}") for key, default, _ in rows)
    lines = []
    for key, default, sentence in rows:
        first, *more = textwrap.wrap(sentence, max(30, 118 - width)) or [""]
        lines.append(f"  {f'{key}={default}':<{width}}  {first}")
        lines += [" " * (width + 4) + line for line in more]
    keys = "\n".join(lines)
    template = (
        "featx: features of pretrained vision backbones, on disk.\n\n"
        "  python -m featx model=resnet50 layers=[layer4]\n"
        "  python -m featx data=folder data.root=photos model=resnet18 reduce=avg layers=stages\n"
        "  python -m featx job=layers model=vit_b_16\n"
        "  python -m featx -m model=resnet18,mobilenet_v2\n\n"
        f"Keys and their defaults:\n{keys}\n\n"
        "--cfg job shows the configuration, --hydra-help what else Hydra can do.\n"
        "Exit codes: 0 done, 1 the run failed (the same command goes on), 2 a wrong command,\n"
        "config or store, 3 done with more failures than max_failures, 130 and 143 stopped.\n"
    )
    return {"app_name": "featx", "header": "", "footer": "", "template": template}


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
        example = "'layers=[layer4,avgpool]'"
        if "{" in override:
            example = "'data.root=\"train-{000..012}.tar\"' with both kinds of quotes"
        return ConfigError(
            f"cannot read {override!r}: {chain[0].splitlines()[0]}. Quote what the shell or Hydra "
            f"would take apart, for example {example}."
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
