"""Texts of `--help`, `--help TOPIC` and `job=NAME --help`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence

from featx.base import Member
from featx.config import Option, described_options
from featx.errors import ConfigError, nearest

_WIDTH = 120

_COMMON = (
    *("model", "layers", "reduce", "data", "out"),
    *("precision", "dtype", "batch_size", "device", "executor"),
)
"""Options that most runs set."""


def help_text(jobs: Iterable[Member]) -> str:
    """Return the text of `--help`: the jobs, the options that most runs set, and the groups.

    Hydra's own help would list the members of every group first, which takes a second.
    """
    rows = [(f"job={job.name}", job.help) for job in jobs]
    common = [_described(each) for each in described_options() if each.name in _COMMON]
    names = [each.name.partition(".") for each in described_options()]
    groups = ", ".join(dict.fromkeys(group for group, dot, _ in names if dot))
    indent = " " * 24
    groups = textwrap.fill(
        f"Groups: {groups}.", _WIDTH, initial_indent=indent, subsequent_indent=indent
    )
    return (
        "featx: features of pretrained vision backbones, on disk.\n\n"
        "  python -m featx model=resnet50 'layers=[layer4]'\n"
        "  python -m featx data=folder data.root=photos model=resnet18 reduce=avg layers=stages\n"
        "  python -m featx job=layers model=vit_b_16\n"
        "  python -m featx -m model=resnet18,mobilenet_v2\n"
        "  python -m featx experiment=exact          # options of conf/experiment/exact.yaml\n\n"
        f"Jobs:\n{_in_columns(rows, max_lines=1)}\n\n"
        f"Options that most runs set, and their defaults:\n{_in_columns(common, max_lines=1)}\n\n"
        "More:\n"
        "  job=extract --help    All options of a run; job=NAME --help those of another job.\n"
        "  --help data           The options of a group, or one option, such as --help data.root.\n"
        f"{groups}\n"
        "  --help all            Every option.\n"
        "  --cfg job             The configuration; --hydra-help what else Hydra can do.\n\n"
        "Exit codes: 0 done, 1 the run failed (the same command resumes it), 2 a wrong command,\n"
        "config or store, 3 done with more failures than max_failures, 130 and 143 stopped.\n"
    )


def job_help_text(job: Member, reads: Callable[[str], bool]) -> str:
    """Return the text of `job=NAME --help`."""
    options = [_described(each) for each in described_options() if reads(each.name)]
    return (
        f"job={job.name}: {job.help}\n\nOptions that it reads, and their defaults:\n"
        f"{_in_columns(options)}\n\npython -m featx --help shows all jobs.\n"
    )


def options_help_text(topic: str, job_names: Collection[str]) -> str:
    """Return the text of `--help TOPIC` for a group, an option or 'all'."""
    options = [
        each
        for each in described_options()
        if topic == "all" or f"{each.name}.".startswith(f"{topic}.")
    ]
    if not options:
        topics = ["all", *job_names, *(each.name for each in described_options())]
        raise ConfigError(
            f"--help {topic}: no job, group or option has this name.{nearest(topic, topics)} "
            "python -m featx --help lists the jobs and groups."
        )
    text = f"Options and their defaults:\n{_in_columns([_described(each) for each in options])}\n"
    if topic in job_names:
        text += f"\npython -m featx job={topic} --help shows all options that the job reads.\n"
    return text


def _described(option: Option) -> tuple[str, str]:
    return f"{option.name}={option.default_text}", option.help


def _in_columns(rows: Sequence[tuple[str, str]], max_lines: int | None = None) -> str:
    """Return names with their sentences beside them, of which `max_lines` lines are shown."""
    width = max(len(name) for name, _ in rows)
    lines = []
    for name, text in rows:
        room = max(30, _WIDTH - width - 4)
        first, *more = textwrap.wrap(text, room, max_lines=max_lines, placeholder=" ...") or [""]
        lines.append(f"  {name:<{width}}  {first}")
        lines += [" " * (width + 4) + line for line in more]
    return "\n".join(lines)
