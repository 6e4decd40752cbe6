"""Translation of the arguments of the command into Hydra's grammar of overrides.

Hydra guesses the type of a value from its form: it reads `out=2024_01` as a number and rejects
`data.root=/a b`. Here the type of the option decides. A text is passed to Hydra in quotes with
every character as it was typed; all other values are left to Hydra.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

from featx.base import family
from featx.config import Kind, Option, not_options, option_tree, source_of_path
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
_QUOTED = re.compile(r""""(?:\\"|[^"])*"|'(?:\\'|[^'])*'""", re.DOTALL)
_OTHER_QUOTES = tuple("\u2018\u2019\u201a\u201c\u201d\u201e\xab")
"""Quotes that text programs type and no shell knows."""
_SWEEP = re.compile(r"(?:choice|range|interval|glob|shuffle|sort|tag)\(.*\)", re.DOTALL)
_LIKE_A_NUMBER = re.compile(
    r"[\d+.-][\d_]*\.?[\d_]*(e[+-]?\d+)?|null|true|false|nan|[+-]?inf", re.IGNORECASE
)
_BRACKETS = {"[": "]", "{": "}", "(": ")"}


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
    for override in _last_overrides(overrides):
        arguments += _translate(override, is_multirun, config_dirs, given)
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
    if not value.startswith("{") or not _is_closed(value):
        return [override]
    entries = {}
    for entry in _pieces(value[1:-1]):
        name, colon, inner = entry.partition(":")
        if not colon:
            raise ConfigError(f"{key}: expected name: value in {value}.")
        entries[name.strip()] = inner.strip()
    chosen = entries.pop("library" if "library" in entries else "name", None)
    if chosen is None and key == "data" and "root" in entries:
        chosen = source_of_path(_unquoted(entries["root"]))
    choice = [] if chosen is None else [f"{key}={chosen}"]
    return choice + [f"{key}.{name}={inner}" for name, inner in entries.items()]


def _last_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides without those that a later one of the same option replaces."""
    last_index = {_key_of(override) or override: i for i, override in enumerate(overrides)}
    return [override for i, override in enumerate(overrides) if i in last_index.values()]


def _check_shell_words(overrides: Sequence[str]) -> None:
    """Refuse overrides with quotes that no shell knows, and a path that was cut at its blanks."""
    for i, argument in enumerate(overrides):
        if argument.startswith(_OTHER_QUOTES):
            raise ConfigError(
                f"cannot read {argument!r}: {argument[0]} is no quote of the shell. Type ' in its "
                "place."
            )
        words = itertools.takewhile(lambda text: "=" not in text, overrides[i + 1 :])
        whole = " ".join([argument, *words])
        is_cut = "=" in argument and whole != argument
        if is_cut and Path(whole.partition("=")[2]).expanduser().exists():
            raise ConfigError(
                f"cannot read {overrides[i + 1]!r}: the shell divides arguments at blanks. Put the "
                f"option in quotes: '{whole}'"
            )


_TABLES = ("csv", "tsv", "parquet")
"""Kinds of files that data=table reads."""


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
        return [_format_group(EXPERIMENTS, value, is_multirun)]
    if (key := _key_of(override)) is None:
        return [override]
    option = option_tree().get(key)
    if key == "data" and is_path(value, config_dirs):
        if "data.root" in given:
            raise ConfigError(
                f"data={value} says where the images are, and data.root is given too; give one."
            )
        given.add("data.root")
        pieces = _pieces(value) if is_multirun else [value]
        kinds = {source_of_path(piece) for piece in pieces}
        if len(kinds) > 1:
            raise ConfigError(f"data={value}: one sweep takes paths of one kind.")
        return [f"data={kinds.pop()}", "data.root=" + ",".join(_quote(piece) for piece in pieces)]
    if key == "data" and value in _TABLES:
        return ["data=table"]
    if _takes_any_key(key):
        return [f"++{key}={value}"]  # Hydra adds no key to a mapping without this sign
    if option is None:
        return [override]
    if option.kind is Kind.GROUP:
        return [_format_group(key, value, is_multirun)]
    if option.kind is Kind.SECTION and value != "null" and not value.startswith(("{", "${")):
        first = next(name for name in option_tree() if name.startswith(f"{key}."))
        raise not_options(key, value, first.rpartition(".")[2])
    return [f"{key}={_format_value(key, value, option, is_multirun)}"]


def _takes_any_key(key: str) -> bool:
    """Return whether an option is a mapping with arbitrary keys, or lies in one."""
    parts = key.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    options = [option_tree()[name] for name in names if name in option_tree()]
    return any(option.kind is Kind.MAPPING for option in options)


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
        hint = f" For a store: store={argument}"
    elif "/" in argument or Path(argument).exists():
        hint = f" For a folder of images: data={argument}"
    else:
        hint = f" For a model: model={argument}"
    return f"cannot read {argument!r}: options are given as key=value.{hint}"


def _format_group(key: str, value: str, is_multirun: bool) -> str:
    """Return the choice of a group: one name, or several with -m."""
    if not value or value == "null":
        raise ConfigError(f"{key}={value}: expected a name; leave {key} out for its default.")
    if not is_multirun and len(pieces := _pieces(value)) > 1:
        raise ConfigError(
            f"{key}={value} names {len(pieces)} of which a run takes one. With -m each is a run of "
            f"its own: python -m featx -m {key}={value}"
        )
    if is_multirun and _SWEEP.fullmatch(value):
        return f"{key}={value}"
    return f"{key}=" + ",".join(_format_text(piece) for piece in _pieces(value))


def _format_value(key: str, value: str, option: Option, is_multirun: bool) -> str:
    """Return the value of an option in the grammar of Hydra."""
    if value == "null" and not option.is_optional:
        raise ConfigError(
            f"{key}=null: expected a value; leave {key} out for its default."
            + (f" For the text null: '{key}=\"null\"'" if option.kind is Kind.TEXT else "")
        )
    if value == "null" or (is_multirun and _SWEEP.fullmatch(value)):
        return value
    if option.kind is Kind.TEXT:
        if is_multirun:
            return ",".join(
                piece if piece == "null" and option.is_optional else _format_text(piece)
                for piece in _pieces(value)
            )
        return _format_text(value)
    if option.kind in (Kind.NAMES, Kind.TEXTS):
        pieces = _pieces(value)
        if len(pieces) > 1 and not is_multirun:
            raise ConfigError(
                f"{key}={value}: a list is written in brackets: '{key}=[{value}]'. With -m each "
                "is a run of its own."
            )
        if option.kind is Kind.TEXTS and any(not piece.startswith("[") for piece in pieces):
            raise ConfigError(f"{key}={value}: expected a list: '{key}=[{value}]'.")
        return ",".join(_format_names(key, piece) for piece in pieces)
    if value == "None" and option.is_optional:
        return "null"  # as Python writes it; no other value of such an option is text
    if not is_multirun and "," in value and len(_pieces(value)) > 1:
        raise ConfigError(
            f"{key}={value}: several values need -m, and each is a run of its own: python -m featx "
            f"-m {key}={value}"
        )
    return value


def _format_names(key: str, value: str) -> str:
    """Return a text, or a list or mapping of texts, in the grammar of Hydra."""
    if value.startswith("[") and _is_closed(value):
        elements = _pieces(value[1:-1]) if value[1:-1].strip() else []
        if elements and not elements[-1].strip():
            elements.pop()  # [a,b,]
        return "[" + ",".join(_format_text(element.strip()) for element in elements) + "]"
    if value.startswith("{") and _is_closed(value):
        entries = _pieces(value[1:-1]) if value[1:-1].strip() else []
        return "{" + ",".join(_format_entry(key, entry.strip()) for entry in entries) + "}"
    return value if value[:1] in ("[", "{") else _format_text(value)


def _format_entry(key: str, entry: str) -> str:
    """Return an entry `name: value`; the last colon outside of brackets separates the two."""
    colons = [i for i in _outer_indices(entry) if entry[i] == ":"]
    if not colons:
        raise ConfigError(f"{key}: expected name: value in {{{entry}}}.")
    name, value = entry[: colons[-1]].strip(), entry[colons[-1] + 1 :].strip()
    name = _unquoted(name)
    # Hydra's keys cannot be quoted, and 1.10 is the number 1.1 to it.
    if _LIKE_A_NUMBER.fullmatch(name) and not (name.isdigit() and name == str(int(name))):
        raise ConfigError(
            f"{key}: {name} in a mapping is read as a number. Name it in a list instead: "
            f"'{key}=[{name}]'."
        )
    name = re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", name)
    return f"{name}: {_format_reduction(key, value)}"


def _format_reduction(key: str, value: str) -> str:
    """Return the value of a layer: null, a text, or options of `reduce` as a mapping."""
    if value == "null":
        return value
    if not value.startswith("{") or not _is_closed(value):
        return _format_text(value)
    entries = []
    for entry in _pieces(value[1:-1]):
        name, colon, inner = entry.partition(":")
        option, inner = option_tree().get(f"reduce.{name.strip()}"), inner.strip()
        if option is not None:
            inner = _format_value(f"{key}: {name}", inner, option, False)
        entries.append(name + colon + inner)
    return "{" + ",".join(entries) + "}"


def _format_text(value: str) -> str:
    """Return a text in quotes for Hydra, without the quotes that may have been typed around it."""
    return value if _QUOTED.fullmatch(value) else _quote(value)


def _unquoted(text: str) -> str:
    return text[1:-1] if _QUOTED.fullmatch(text) else text


def _quote(text: str) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text=text, quote=Quote.double).with_quotes()


def _is_closed(value: str) -> bool:
    """Return whether the first bracket of a value is closed by its last character."""
    depths = _depths(value)
    return depths[-1] == 0 and all(depths[:-1])


def _pieces(value: str) -> list[str]:
    """Split a value at the commas outside of quotes and brackets."""
    edges = [-1, *(i for i in _outer_indices(value) if value[i] == ","), len(value)]
    return [value[a + 1 : b] for a, b in itertools.pairwise(edges)]


def _outer_indices(value: str) -> list[int]:
    """Return the indices of the characters outside of quotes and brackets."""
    depths = [0, *_depths(value)]
    return [i for i in range(len(value)) if depths[i] == depths[i + 1] == 0]


def _depths(value: str) -> list[int]:
    """Return the number of brackets and quotes that are open after each character.

    A quote opens only at the beginning of an element: `it's` contains none.
    """
    depths: list[int] = []
    closing: list[str] = []
    previous = ","
    for i, char in enumerate(value):
        if closing and closing[-1] in "'\"":
            if char == closing[-1] and previous != "\\":
                closing.pop()
        elif char in "'\"" and previous in ",[{(:" and char in value[i + 1 :]:
            closing.append(char)
        elif char in _BRACKETS:
            closing.append(_BRACKETS[char])
        elif closing and char == closing[-1]:
            closing.pop()
        depths.append(len(closing))
        previous = previous if char.isspace() else char
    return depths
