"""The key `executor`: where the parts of a run are computed."""

from __future__ import annotations

from dataclasses import dataclass

from featx.options.checks import check_choice

EXECUTORS = ("local",)


@dataclass
class ExecutorConfig:
    """Where the parts of a run are computed."""

    name: str = "local"
    """Taken from the key `executor` itself."""

    def __post_init__(self) -> None:
        check_choice("executor", self.name, EXECUTORS)
