"""job=pack: copy the parts of a finished store into one features.h5."""

from __future__ import annotations

from featx.base import facts, print_result, size_text
from featx.config import Config
from featx.errors import ConfigError, StoreError
from featx.jobs.base import JOBS, Input, Job
from featx.storage import is_url
from featx.store import layout, no_store_at, pack_store


def run(config: Config, config_yaml: str) -> int:
    """Pack the store and print where the file is; returns the exit code 0."""
    root = layout.folder_of_packed(config.store_path())
    if not root.is_dir():
        raise StoreError(f"{no_store_at(root)} job=pack takes the store's folder.")
    did = pack_store(root)
    path = root / layout.PACKED
    text = "packed now, its parts are deleted" if did else "was packed already"
    print_result(facts([("file", str(path)), ("size", size_text(path.stat().st_size)), ("", text)]))
    return 0


def _check(config: Config) -> None:
    root = config.store or config.out
    if is_url(root):
        raise ConfigError(
            f"{root} lies in an object store, and packing needs a disk: it deletes the parts that "
            "it has packed, and an object store has no lock for that. Copy the store to a disk, "
            "pack it, and copy it back."
        )


JOBS.register(
    Job(
        "pack",
        "Pack the parts of a finished store into one features.h5.",
        run=run,
        input=Input.STORE_OR_OUT,
        why="it packs the store that `store` or `out` names",
        check=_check,
    )
)
