"""Texts of `--help` and of `job=NAME --help`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence

from featx.base import Member
from featx.config import Option, described_options

_WIDTH = 120


def help_text(jobs: Iterable[Member], reads: Callable[[str], bool]) -> str:
    """Return the text of `--help`: the jobs, and the options of a run without those of its groups.

    Hydra's own help would list the members of every group first, which takes a second.

    Args:
        jobs: jobs of the command; all of them are imported.
        reads: whether the job of a run reads an option.
    """
    rows = [(f"job={job.name}", job.help) for job in jobs]
    options = [
        _described(each)
        for each in described_options()
        if "." not in each.name and reads(each.name)
    ]
    return (
        "featx: features of pretrained vision backbones, on disk.\n\n"
        "  python -m featx model=resnet50 layers=[layer4]\n"
        "  python -m featx data=folder data.root=photos model=resnet18 reduce=avg layers=stages\n"
        "  python -m featx job=layers model=vit_b_16\n"
        "  python -m featx -m model=resnet18,mobilenet_v2\n"
        "  python -m featx experiment=exact          # options of conf/experiment/exact.yaml\n\n"
        f"Jobs:\n{_in_columns(rows, max_lines=1)}\n\n"
        f"Options of a run and their defaults:\n{_in_columns(options, max_lines=1)}\n\n"
        "job=NAME --help shows all options of a job, job=extract --help those of a run,\n"
        "--cfg job the configuration, --hydra-help what else Hydra can do.\n"
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
