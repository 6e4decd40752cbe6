"""What is begun by overwrite=true and not finished: the same command resumes it, not deletes it.

A small file beside the parts holds the digest of the command. It is written before the first part
and deleted when everything is there, so a process that is killed leaves it, in whatever way it
ends. A finished store has none, and overwrite=true deletes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from featx.base.console import log_message
from featx.config import JobConfig, LogConfig
from featx.config.run_config import Config, in_this_process
from featx.errors import StoreMismatchError
from featx.storage.local_folder import AtomicFolder
from featx.store.manifest import DamagedManifestError

T = TypeVar("T")


class OverwriteMark:
    """The file that says by which command a folder was begun anew.

    Args:
        path: of the file.
        config: of the command.
        is_known: whether the config says all of what is computed; a data set given as an object
            from Python is not in it, and nothing is resumed then.
    """

    def __init__(self, path: Path, config: Config, is_known: bool = True) -> None:
        self.path = path
        self._request = _digest(config) if config.overwrite and is_known else None

    def write(self, disk: AtomicFolder) -> None:
        """Say that this command has begun the folder anew; nothing unless it has overwrite=true."""
        if self._request is not None:
            disk.replace(self.path, self._request)

    def remove(self, disk: AtomicFolder) -> None:
        """Say that what was begun is finished."""
        disk.remove(self.path)

    @property
    def is_of_this_command(self) -> bool:
        """Whether this command has begun what is there, and not finished it."""
        if self._request is None:
            return False
        try:
            return self.path.read_bytes() == self._request
        except (FileNotFoundError, NotADirectoryError):
            return False


def resumed_or_anew(config: Config, mark: OverwriteMark, run: Callable[[Config], T]) -> T:
    """Run a job that overwrite=true begins anew, or that it resumes where it began it before.

    Args:
        config: of the command.
        mark: of the folder that it writes to.
        run: the job, given the config with overwrite=false where it resumes.

    Raises:
        FeatxError: as of `run`.
    """
    if mark.is_of_this_command:
        log_message(
            f"{mark.path.parent} was begun by this command with overwrite=true and is not "
            "finished: it is resumed. To start anew once more, delete the folder."
        )
        try:
            return run(replace(config, overwrite=False))
        # Images or libraries have changed since. A disk that cannot be read now is another matter:
        # what was computed may be there still.
        except (StoreMismatchError, DamagedManifestError) as error:
            log_message(f"{error}\nIt cannot be resumed; overwrite=true starts it anew.")
    return run(config)


def _digest(config: Config) -> bytes:
    """A hash of what the command computes; how it computes and reports it is left out."""
    asked = replace(
        in_this_process(config),
        job=JobConfig(config.job.name),
        log=LogConfig(),
        max_failures=0.01,
        pack="auto",
    )
    target = config.model.target
    parts = {"config": asdict(asked), "code": None if target is None else _source_of(target)}
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest().encode()


def _source_of(target: str) -> str | None:
    """A hash of the file of package.module:factory, which may be edited between two commands."""
    name = target.partition(":")[0].replace(".", os.sep)
    for folder in (*sys.path, ""):
        for ending in (".py", f"{os.sep}__init__.py"):
            path = Path(folder, name + ending)
            if path.is_file():
                return hashlib.sha256(path.read_bytes()).hexdigest()
    return None
