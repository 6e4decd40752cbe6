"""Config sources of Hydra: the schema, the members of families, model names, the user's files."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write

from featx.base import Registry, family
from featx.cli.overrides import EXPERIMENTS, CommandLine, is_path
from featx.config import (
    Kind,
    default_values,
    known_keys,
    member_groups,
    model_choice,
    option_tree,
    source_of_path,
)
from featx.errors import ConfigError, gone, nearest

USER_CONF = Path("conf")
"""Folder below the current one whose experiments are found without --config-dir."""


_STR = "tag:yaml.org,2002:str"
_NULL = "tag:yaml.org,2002:null"


class Members(ConfigSource):
    """Config source with the members of one family; `job=status` imports no other job.

    The path of the source is the name of the group.
    """

    families: ClassVar[Mapping[str, Registry[Any]]] = {}

    @staticmethod
    def scheme() -> str:
        return "members"

    def options(self, name: str) -> dict[str, str]:
        """Return the options that a choice sets."""
        return {"name": self.families[self.path].get(name).name}

    def load_config(self, config_path: str) -> ConfigResult:
        node = OmegaConf.create(self.options(_choice(config_path)))
        return ConfigResult(
            provider=self.provider, path=config_path, config=node, header={"package": None}
        )

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.rstrip("/") == self.path

    def is_config(self, config_path: str) -> bool:
        is_choice = config_path.startswith(f"{self.path}/")
        return is_choice and _choice(config_path) in self.families[self.path]

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        has_names = self.is_group(config_path) and results_filter is not ObjectType.GROUP
        return [*self.families[self.path].names()] if has_names else []


class AnyModel(Members):
    """A config for every model name, such as `model=resnet50`, and for every model library.

    It is last in Hydra's search path, so a YAML file of that name of the user (`--config-dir`)
    takes precedence. Whether the model exists is checked when it is built.
    """

    @staticmethod
    def scheme() -> str:
        return "any-model"

    def options(self, name: str) -> dict[str, str]:
        return model_choice(name)

    def is_config(self, config_path: str) -> bool:
        return config_path.startswith(f"{self.path}/")

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


def _choice(config_path: str) -> str:
    return config_path.removesuffix(".yaml").partition("/")[2]


class ConfigFiles(FileConfigSource):
    """YAML files of the user, from --config-dir.

    A text option keeps its text, although YAML reads `out: 2024_01` as a number. A file at the top
    of the folder may be a plain mapping of options, without Hydra's list of defaults.
    """

    @staticmethod
    def scheme() -> str:
        return "config-files"

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        try:
            loaded = super().load_config(config_path)
            tree = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is no YAML: {error}") from error
        group = config_path.rpartition("/")[0].replace("/", ".")
        package = loaded.header.get("package") or ("_global_" if group == EXPERIMENTS else group)
        if isinstance(tree, yaml.MappingNode):
            keep_text(tree, "" if package == "_global_" else package)
            if package in ("", "_global_"):
                _name_choices(tree, is_primary=not package)
            loaded.config = OmegaConf.create(yaml.serialize(tree, Dumper=yaml.SafeDumper))
        loaded.header["package"] = package or None
        return loaded


def keep_text(node: yaml.MappingNode, prefix: str) -> None:
    """Turn the values of text options into texts, whatever they look like; null stays null."""
    for key, value in node.value:
        name = f"{prefix}.{key.value}".lstrip(".")
        option = option_tree().get(name)
        if "." in str(key.value) and key.value in option_tree():
            group, _, last = str(key.value).rpartition(".")
            raise ConfigError(
                f"{key.value} in a YAML file is written as {last} below {group}:\n"
                f"{group}:\n  {last}: ..."
            )
        if option is None:
            continue
        if option.kind in (Kind.TEXT, Kind.TEXTS, Kind.NAMES):
            _as_text(value)
        elif option.kind in (Kind.GROUP, Kind.SECTION) and isinstance(value, yaml.MappingNode):
            keep_text(value, name)


def _as_text(node: yaml.Node) -> None:
    if isinstance(node, yaml.ScalarNode) and node.tag != _NULL:
        node.tag, node.style = _STR, '"'
    elif isinstance(node, yaml.SequenceNode):
        for element in node.value:
            _as_text(element)
    elif isinstance(node, yaml.MappingNode):  # layers: their names, and reductions
        for name, reduction in node.value:
            _as_text(name)
            if isinstance(reduction, yaml.MappingNode):
                keep_text(reduction, "reduce")
            else:
                _as_text(reduction)


def _name_choices(tree: yaml.MappingNode, is_primary: bool) -> None:
    """Turn `model: resnet50` and `model: {name: resnet50}` into choices of Hydra's defaults list.

    A file that has such a list is left as it is.
    """
    if any(key.value == "defaults" for key, _ in tree.value):
        return
    choices = ["config"] if is_primary else []
    slash = (
        "" if is_primary else "/"
    )  # in an experiment, a name without one is a group below its own
    for entry in list(tree.value):
        key, value = entry
        option = option_tree().get(str(key.value))
        if option is None or option.kind is not Kind.GROUP:
            continue
        if isinstance(value, yaml.ScalarNode):
            name = str(value.value)
            tree.value.remove(entry)
            if key.value == "data" and is_path(name, []):
                path = yaml.serialize(yaml.ScalarNode(_STR, name, style='"')).strip()
                added = yaml.compose(f"data: {{root: {path}}}")
                assert isinstance(added, yaml.MappingNode)
                tree.value += added.value
                name = source_of_path(name)
        else:
            entries = {str(own.value): inner for own, inner in value.value}
            chosen, root = entries.get("name"), entries.get("root")
            if chosen is None and key.value == "data" and root is not None and root.tag != _NULL:
                name = source_of_path(str(root.value))
            elif chosen is None:
                continue
            else:
                name = str(chosen.value)
            # The choice has the name. Here it would also replace that of the command line.
            value.value = [inner for inner in value.value if inner[0].value != "name"]
            if not value.value:
                tree.value.remove(entry)
        choices.append(f"{{override {slash}{key.value}: {json.dumps(name)}}}")
    added = yaml.compose(f"defaults: [{', '.join([*choices, '_self_'])}]")
    assert isinstance(added, yaml.MappingNode)
    tree.value = [*added.value, *tree.value]


class Experiments(ConfigFiles):
    """Experiments of the user: files `experiment/NAME.yaml` in a folder, with options as above.

    Nothing else in the folder is read. These sources come first in Hydra's search path, so that
    the user's experiment of a name takes precedence over that of featx.
    """

    @staticmethod
    def scheme() -> str:
        return "experiments"

    def available(self) -> bool:
        return (Path(self.path) / EXPERIMENTS).is_dir()

    def is_group(self, config_path: str) -> bool:
        return config_path.rstrip("/") == EXPERIMENTS and super().is_group(config_path)

    def is_config(self, config_path: str) -> bool:
        return config_path.startswith(f"{EXPERIMENTS}/") and super().is_config(config_path)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return super().list(config_path, results_filter) if self.is_group(config_path) else []


class _SearchPath(SearchPathPlugin):
    """Search path of Hydra besides conf/: the user's folders, members, and model names."""

    folders: ClassVar[Sequence[Path]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in (USER_CONF.absolute(), *reversed(self.folders)):
            search_path.prepend("command-line", f"{Experiments.scheme()}://{folder}")
        for folder in self.folders:
            search_path.append("command-line", f"{ConfigFiles.scheme()}://{folder}")
        for group in Members.families:
            search_path.append("featx", f"{Members.scheme()}://{group}")
        search_path.append("featx", f"{AnyModel.scheme()}://model")


def register_with_hydra(jobs: Registry[Any], config_dirs: Sequence[Path] = ()) -> None:
    """Register the schema, the members of families and the search path with Hydra."""
    defaults = OmegaConf.create(dict(default_values()))
    ConfigStore.instance().store(name="schema", node=defaults)
    groups = [group for group in member_groups().values() if group.selector == "name"]
    Members.families = {"job": jobs, **{group.name: family(group.option) for group in groups}}
    _SearchPath.folders = tuple(config_dirs)
    for plugin in (AnyModel, Members, ConfigFiles, Experiments, _SearchPath):
        Plugins.instance().register(plugin)


@contextlib.contextmanager
def checked_hydra() -> Iterator[None]:
    """Refuse configs inside the block whose group `hydra` names code that Hydra would run.

    The file with all options of a sweep, secrets included, lies in a folder that is deleted in the
    end, unless another launcher needs it or hydra.sweep.dir is given.
    """
    load, until_end = ConfigLoaderImpl.load_configuration, contextlib.ExitStack()

    @functools.cache
    def folder_of_sweep() -> str:
        return until_end.enter_context(TemporaryDirectory(prefix="featx-"))

    def load_checked(self: ConfigLoaderImpl, *args: Any, **keywords: Any) -> DictConfig:
        config = load(self, *args, **keywords)
        options = config.hydra
        _check_targets("hydra", OmegaConf.to_container(options, resolve=False))
        is_own = options.launcher._target_.endswith(".BasicLauncher")
        if is_own and options.mode is RunMode.MULTIRUN and options.sweep.dir == "runs":
            with read_write(options):
                options.sweep.dir = folder_of_sweep()
        return config

    ConfigLoaderImpl.load_configuration = load_checked  # type: ignore[method-assign]
    try:
        with until_end:
            yield
    finally:
        ConfigLoaderImpl.load_configuration = load  # type: ignore[method-assign]


_TARGETS = {
    "_target_": ("hydra._internal.", "hydra_plugins."),
    "class": ("logging.",),
    "()": ("colorlog.ColoredFormatter",),
}
"""Key that Hydra or `logging.config` takes for an import path -> beginnings that are allowed."""


def _check_targets(name: str, value: object) -> None:
    """Raise a ConfigError if an entry of a config names code of others; `name` is its option."""
    if isinstance(value, dict):
        for key, entry in value.items():
            allowed = _TARGETS.get(str(key))
            if allowed and not str(entry).startswith(allowed):
                raise ConfigError(f"{name}.{key}={entry}: refused, a config names no code to run.")
            _check_targets(f"{name}.{key}", entry)
    elif isinstance(value, list):
        for entry in value:
            _check_targets(name, entry)
    elif str(value).startswith("ext://") and value not in ("ext://sys.stdout", "ext://sys.stderr"):
        raise ConfigError(f"{name}={value}: refused, a config names no code to run.")


def sweep_of(
    line: CommandLine, in_files: Mapping[str, str] | None = None
) -> tuple[int, frozenset[str]]:
    """Return the number of runs of a multirun, and the options that differ between them.

    `in_files` is `hydra.sweeper.params`: option -> its values, which files sweep over.
    """
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    values = [f"{key}={value}" for key, value in (in_files or {}).items()]
    values += [argument for argument in line.arguments if not argument.startswith("-")]
    running = GlobalHydra.instance().hydra
    # Without a loader `glob(*)` cannot be counted.
    parser = OverridesParser.create(None if running is None else running.config_loader)
    counts: dict[str, int] = {}  # of the options that differ; those of the command line replace
    for override in parser.parse_overrides(values):
        counts.pop(str(override.key_or_group), None)
        if override.is_discrete_sweep():  # an interval, for some sweepers, has no number of values
            counts[str(override.key_or_group)] = len(list(override.sweep_string_iterator()))
    return math.prod(counts.values()), frozenset(counts)


def explain_error(error: Exception) -> ConfigError:
    """Turn an error of Hydra or OmegaConf into one message that says what to do."""
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        chain.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    text = "\n".join(chain)
    unknown = re.search(
        r"Could not override '([^']+)'|Key '([^']+)' (?:is )?not in|[Cc]ould not find '([^']+)/",
        text,
    )
    if missing_config := re.search(r"Cannot find primary config '([^']+)'", text):
        name = missing_config.group(1)
        place = ", ".join(map(str, _SearchPath.folders)) or "conf/; --config-dir DIR adds a folder"
        return ConfigError(f"--config-name {name}: there is no {name}.yaml in {place}.")
    missing_choice = re.search(r"Could not find '((?:hydra/)?\w+)/([^']+)'", text)
    if missing_choice:
        group, choice = missing_choice.groups()
        if sentence := gone(f"{group}={choice}"):
            return ConfigError(sentence)
        options = re.search(rf"options in '{group}':\n((?:\t.*\n?)+)", text)
        names = options.group(1).split() if options else []
        return ConfigError(
            f"{group}={choice}: expected one of {', '.join(names)}.{nearest(choice, names)}"
            f"{_OF_ONES_OWN.get(group, '').format(choice)}"
        )
    key = next((name for name in unknown.groups() if name), None) if unknown else None
    if key is not None and key not in option_tree():
        return ConfigError(
            f"unknown key {key!r}.{nearest(key, known_keys())} python -m featx job=NAME --help "
            "lists the options of a job."
        )
    if (override := getattr(error, "override", None)) is not None:
        return ConfigError(
            f"cannot read {override.lstrip('+')!r}: {chain[0].splitlines()[0]}. A value with "
            "brackets, braces, commas or quotes goes into single quotes for the shell, texts "
            "inside it into double ones: 'layers=[layer4,\"blocks.*.mlp\"]', "
            "'model.args={depth: 20, name: \"a, b\"}'."
        )
    full_key = re.search(r"full_key: (?!_dummy_)(\S+)", text)  # a placeholder of OmegaConf
    place = f"{full_key.group(1)}: " if full_key else ""
    lines = [text.strip().splitlines()[0] for text in chain if text.strip()]
    outer = lines[0] if lines else "the configuration cannot be composed"
    # The outer messages of Hydra only name the override.
    if outer.startswith(("Error merging override", "In ")) and len(lines) > 1:
        outer = f"{outer}: {lines[1]}"
    return ConfigError(place + outer)


_OF_ONES_OWN = {
    "data": " For a folder: its path, such as data=./photos.",
    EXPERIMENTS: " An experiment of your own is conf/experiment/{0}.yaml, or "
    "experiment/{0}.yaml in the folder of --config-dir.",
}
"""Group -> what a choice can be besides the names that exist."""
