"""Translation of the arguments of the command into overrides of Hydra."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

from featx.base import family
from featx.cli.override_values import (
    format_group,
    format_value,
    is_closed,
    named_values,
    pieces_of,
    quoted,
    unquoted,
)
from featx.config import Kind, not_options, option_tree, source_of_path
from featx.errors import ConfigError, nearest

_WITH_VALUE = (
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn"),
    *("--config-dir", "-cd", "--experimental-rerun", "--info", "-i"),
)
"""Flags of Hydra that take a value."""

_FLAGS = (
    *("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r"),
    *("--multirun", "-m", "--shell-completion", "-sc", *_WITH_VALUE),
)

EXPERIMENTS = "experiment"
"""Group of experiments: `experiment=NAME` reads experiment/NAME.yaml."""

_OVERRIDE = re.compile(r"(?P<sign>\+\+|\+)?(?P<key>[A-Za-z_][\w./@-]*)=(?P<value>.*)", re.DOTALL)
_TOPIC = re.compile(r"[A-Za-z][\w.]*")
"""Name of a job, a group or an option, which --help describes."""
_OTHER_QUOTES = tuple("\u2018\u2019\u201a\u201c\u201d\u201e\xab")
"""Quotes that text programs type and no shell knows."""


@dataclass(frozen=True)
class CommandLine:
    """Parsed arguments of the command.

    Attributes:
        typed: the arguments as they were typed.
        arguments: flags, and overrides in the grammar of Hydra.
        given: dotted names of the options that were given; 'model' for `model=resnet50`.
        config_dirs: folders given with --config-dir.
        has_files: whether options come from files as well.
        wants_help: whether --help was given.
        help_topics: names given with --help, such as 'probe' of `--help probe`.
    """

    typed: Sequence[str]
    arguments: list[str]
    given: frozenset[str] = frozenset()
    config_dirs: Sequence[Path] = ()
    has_files: bool = False
    wants_help: bool = False
    help_topics: Sequence[str] = ()

    @property
    def job(self) -> str | None:
        """Name of the job if one is given."""
        jobs = [text.partition("=")[2] for text in self.typed if text.startswith("job=")]
        return jobs[-1] if jobs else None


def read_command_line(argv: Sequence[str], jobs: Container[str] = ()) -> CommandLine:
    """Translate the arguments of the command, without the name of the program. Raises ConfigError
    if one is neither a flag nor an override, or a value cannot be read.
    """
    is_multirun = any(argument in ("-m", "--multirun") for argument in argv)
    if any(argument in ("--shell-completion", "-sc") for argument in argv):
        return CommandLine(argv, list(argv))
    for flag in ("--cfg", "-c", "--info", "-i"):
        if is_multirun and flag in argv:
            raise ConfigError(f"{flag} and -m exclude each other: it shows the config of one run.")
    wants_help = any(argument in ("--help", "-h") for argument in argv)
    help_topics: list[str] = []
    arguments: list[str] = []
    overrides: list[str] = []
    config_dirs: list[Path] = []
    arguments_left = iter(argv)
    for argument in arguments_left:
        flag, has_value, value = argument.partition("=")
        if flag in ("--config-dir", "-cd"):
            config_dirs.append(_config_dir(value if has_value else next(arguments_left, "")))
        elif flag in ("--config-name", "-cn"):
            file = value if has_value else next(arguments_left, "")
            if file.removesuffix(".yaml") == "config":
                raise ConfigError(
                    f"{flag} {file}: featx has a file of this name, which Hydra would read "
                    "instead. Copy yours under another name, and give that."
                )
            arguments += ["--config-name", file]
        elif argument in _WITH_VALUE:
            arguments += [argument, *itertools.islice(arguments_left, 1)]
        elif wants_help and _TOPIC.fullmatch(argument):
            help_topics.append(argument)
        elif (word := argument.lstrip("-")) in jobs:
            raise ConfigError(
                f"cannot read {argument!r}: options are given as key=value. For the job: job={word}"
            )
        elif argument.startswith("-") and flag not in _FLAGS:
            raise ConfigError(_unknown_flag(argument))
        elif argument.startswith("-"):
            arguments.append(argument)
        else:
            overrides += _options_of_group(argument)

    given = {name for override in overrides if (name := _key_of(override)) is not None}
    _check_shell_words(overrides)
    # A later override of the same option replaces an earlier one.
    last_index = {_key_of(override) or override: i for i, override in enumerate(overrides)}
    for i in sorted(last_index.values()):
        arguments += _translate(overrides[i], is_multirun, config_dirs, given)
    has_files = bool(config_dirs) or any(each.startswith(f"{EXPERIMENTS}=") for each in arguments)
    names = frozenset(given)
    return CommandLine(argv, arguments, names, config_dirs, has_files, wants_help, help_topics)


def _config_dir(value: str) -> Path:
    folder = Path(value).expanduser().absolute()
    if not value or not folder.is_dir():
        raise ConfigError(f"--config-dir {value}: {folder} is no folder.")
    return folder


def _unknown_flag(argument: str) -> str:
    """Return the error message for an unknown flag such as `--model`."""
    name = argument.lstrip("-")
    key, has_value, value = name.partition("=")
    key = key.replace("-", "_")
    names = option_tree()
    text = value if has_value else "VALUE"
    if key not in names and key:
        same = [option for option in names.values() if option.name.endswith(f".{key}")]
        if same:
            shown = "true" if same[0].hint is bool and not has_value else text
            options = " or ".join(f"{option.name}={shown}" for option in same)
            return f"{argument}: options are given as key=value, without dashes: {options}"
    if key not in names:
        flags = [flag for flag in _FLAGS if flag.startswith("--")]
        return (
            f"unknown flag {argument}.{nearest(argument, flags)} Options are given as key=value, "
            "without dashes, such as model=resnet50; python -m featx job=NAME --help lists those "
            "of a job."
        )
    return f"{argument}: options are given as key=value, without dashes: {key}={text}"


def _key_of(override: str) -> str | None:
    """Return the dotted name of the option that an override sets.

    None for options of Hydra and for experiments, which are no options of a run.
    """
    match = _OVERRIDE.fullmatch(override)
    if match is None or match["key"].split(".")[0].split("/")[0] in ("hydra", EXPERIMENTS):
        return None
    return match["key"]


def _options_of_group(override: str) -> list[str]:
    """Return `reduce={name: grid, size: 4}` as `reduce=grid` and `reduce.size=4`, and all other
    overrides as they are.
    """
    match = _OVERRIDE.fullmatch(override)
    option = match and option_tree().get(match["key"])
    if not match or not option or option.kind is not Kind.GROUP:
        return [override]
    key, value = match["key"], match["value"].strip()
    if not value.startswith("{") or not is_closed(value):
        return [override]
    entries = dict(named_values(key, value))
    chosen = entries.pop("library" if "library" in entries else "name", None)
    if chosen is None and key == "data" and "root" in entries:
        chosen = source_of_path(unquoted(entries["root"]))
    choice = [] if chosen is None else [f"{key}={chosen}"]
    return choice + [f"{key}.{name}={inner}" for name, inner in entries.items()]


def _check_shell_words(overrides: Sequence[str]) -> None:
    """Refuse overrides with quotes that no shell knows, and a path, list or mapping that was cut at
    its blanks.
    """
    for i, argument in enumerate(overrides):
        if argument.startswith(_OTHER_QUOTES):
            raise ConfigError(
                f"cannot read {argument!r}: {argument[0]} is no quote of the shell. Type ' in its "
                "place."
            )
        words = itertools.takewhile(lambda text: "=" not in text, overrides[i + 1 :])
        whole = " ".join([argument, *words])
        if "=" not in argument or whole == argument:
            continue
        value, whole_value = argument.partition("=")[2], whole.partition("=")[2]
        is_bracket = value.startswith(("[", "{")) and not is_closed(value)
        if (is_bracket and is_closed(whole_value)) or Path(whole_value).expanduser().exists():
            raise ConfigError(
                f"cannot read {overrides[i + 1]!r}: the shell divides arguments at blanks. Put the "
                f"option in quotes: {shlex.quote(whole)}"
            )


def _translate(
    override: str, is_multirun: bool, config_dirs: Sequence[Path], given: set[str]
) -> list[str]:
    """Return an override in the grammar of Hydra; two overrides for `data=PATH`.

    The signs of Hydra, as in `+seed=1`, are left out: every option exists.
    """
    match = _OVERRIDE.fullmatch(override)
    if override.startswith("~"):
        raise ConfigError(f"{override}: no option can be deleted; leave it out, or give null.")
    if match is None:
        raise ConfigError(_unreadable_text(override))
    value = match["value"]
    if match["key"] == EXPERIMENTS:
        return [format_group(EXPERIMENTS, value, is_multirun)]
    if (key := _key_of(override)) is None:
        return [override]
    option = option_tree().get(key)
    if key == "data" and is_path(value, config_dirs):
        if "data.root" in given:
            raise ConfigError(
                f"data={value} says where the images are, and data.root is given too; give one."
            )
        given.add("data.root")
        pieces = pieces_of(value) if is_multirun else [value]
        kinds = {source_of_path(piece) for piece in pieces}
        if len(kinds) > 1:
            raise ConfigError(f"data={value}: one sweep takes paths of one kind.")
        return [f"data={kinds.pop()}", "data.root=" + ",".join(quoted(piece) for piece in pieces)]
    if key == "data" and value in ("csv", "tsv", "parquet"):  # files that data=table reads
        return ["data=table"]

    # A mapping with arbitrary keys, or an entry of one: Hydra adds none without this sign.
    parts = key.split(".")
    groups = [option_tree().get(".".join(parts[: i + 1])) for i in range(len(parts))]
    if any(group is not None and group.kind is Kind.MAPPING for group in groups):
        return [f"++{key}={value}"]

    if option is None:
        return [override]
    if option.kind is Kind.GROUP:
        return [format_group(key, value, is_multirun)]
    if option.kind is Kind.SECTION and value != "null" and not value.startswith(("{", "${")):
        first = next(name for name in option_tree() if name.startswith(f"{key}."))
        raise not_options(key, value, first.rpartition(".")[2])
    return [f"{key}={format_value(key, value, option, is_multirun)}"]


def is_path(value: str, config_dirs: Sequence[Path]) -> bool:
    """Return whether `data=VALUE` is the path of a folder of images, not the name of a source."""
    files = [folder / "data" / f"{value}.yaml" for folder in config_dirs]
    if not value or value in family("data") or any(file.is_file() for file in files):
        return False
    return "/" in value or value[0] in "~." or Path(value).exists()


def _unreadable_text(argument: str) -> str:
    """Return the error message for an argument without `key=`."""
    if "=" in argument:
        return f"cannot read {argument!r}: the name of an option stands before the first '='."
    from featx.store import layout  # which imports numpy

    if argument == "help":
        hint = " For help: --help"
    elif argument in option_tree():
        hint = f" {argument} needs a value: {argument}=VALUE."
    elif Path(argument, layout.MANIFEST).exists():
        hint = f" For a store: {shlex.quote(f'store={argument}')}"
    elif "/" in argument or Path(argument).exists():
        hint = f" For a folder of images: {shlex.quote(f'data={argument}')}"
    else:
        hint = f" For a model: model={argument}"
    return f"cannot read {argument!r}: options are given as key=value.{hint}"
