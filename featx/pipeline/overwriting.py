"""Resume of runs that overwrite=true started: the same command resumes instead of deleting.

A marker file in the folder of the parts holds a digest of the command. It is written before the
first part and deleted when everything is complete, so a killed process leaves it behind, however it
ends. A finished store has no marker, and overwrite=true deletes the store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from featx.base import log_message
from featx.config import Config, JobConfig, LogConfig, in_this_process
from featx.errors import StoreMismatchError
from featx.storage import AtomicFolder
from featx.store import DamagedManifestError

T = TypeVar("T")


class OverwriteMark:
    """Marker file with the digest of the command that overwrites a folder.

    Args:
        path: path of the marker file.
        config: config of the command.
        is_known: whether the config determines everything that is computed. It does not if the data
            set is a Python object; nothing is resumed then.
    """

    def __init__(self, path: Path, config: Config, is_known: bool = True) -> None:
        self.path = path
        self._request = command_digest(config).encode() if config.overwrite and is_known else None

    def write(self, disk: AtomicFolder) -> None:
        """Record that this command started the folder; does nothing without overwrite=true."""
        if self._request is not None:
            disk.replace(self.path, self._request)

    def remove(self, disk: AtomicFolder) -> None:
        """Record that the run is complete."""
        disk.remove(self.path)

    @property
    def is_of_this_command(self) -> bool:
        """Whether this command started the content of the folder and has not finished it."""
        if self._request is None:
            return False
        try:
            return self.path.read_bytes() == self._request
        except (FileNotFoundError, NotADirectoryError):
            return False


def resume_or_overwrite(config: Config, marker: OverwriteMark, run: Callable[[Config], T]) -> T:
    """Run a job with overwrite=true, or resume it if the same command started it before."""
    if marker.is_of_this_command:
        log_message(
            f"{marker.path.parent} was started by this command with overwrite=true and is not "
            "finished: it is resumed. To start from the first row again, delete the folder."
        )
        try:
            return run(replace(config, overwrite=False))
        # Images or libraries have changed since, so a resume is impossible. Other errors, such as a
        # disk that cannot be read now, are passed on: computed parts may still be there.
        except (StoreMismatchError, DamagedManifestError) as error:
            log_message(
                f"{error}\nIt cannot be resumed; overwrite=true starts it again from the first row."
            )
    return run(config)


def command_digest(config: Config) -> str:
    """Return the SHA-256 of what a command computes, as hex digits.

    Options on how it computes and reports are left out.
    """
    identifying = replace(
        in_this_process(config),
        job=JobConfig(config.job.name),
        log=LogConfig(),
        max_failures=0.01,
        pack="auto",
    )
    parts = {"config": asdict(identifying), "code": config.model.code_sha256()}
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
