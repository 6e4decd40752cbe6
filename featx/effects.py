"""Which keys have an effect with which job, and which exclude each other: the rest is refused."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from featx.errors import ConfigError
from featx.object_path import is_url, place_of

if TYPE_CHECKING:
    from featx.config import Config

_OF_A_STORE = ("predict", "similar", "export", "report")
"""Jobs that read a store and write something else."""

_MAKE_STORES = ("extract", "attribute", "plan")
"""Jobs that make a store in out, or say what it would take."""

_INTO_BUCKETS = (*_MAKE_STORES, "verify", "status", "probe", "pack")
"""Jobs for which out may be a place in an object store; the others of them read the store there."""

_SPREAD = ("extract", "plan", "stats", "attribute")
"""Jobs that other processes may share."""

_WITH_JSON = (
    *("layers", "plan", "stats", "probe", "predict", "similar", "export", "report", "verify"),
    *("status", "bench"),
)
"""Jobs whose result can be printed as JSON."""

_ONLY_WITH = {
    "job.json": _WITH_JSON,
    "job.show": ("layers",),
    "store": ("verify", "status", "pack", "probe", *_OF_A_STORE),
    "layer": ("probe", *_OF_A_STORE),
    "stats": ("stats",),
    "verify": ("verify",),
    "profile": ("extract", "stats", "attribute"),
    "retry_failed": ("extract", "attribute"),
    "refresh": ("extract", "attribute"),
    "tensorboard": ("extract", "plan"),
    "devices": _SPREAD,
    "executor": _SPREAD,
    "attribute": ("attribute",),
    "probe": ("probe",),
    "similar": ("similar",),
    "export": ("export",),
    "report": ("report",),
    "bench": ("bench",),
}
"""key -> the jobs that look at it."""

_OF_EXTRACTING = (
    *("layers", "capture", "reduce", "precision", "compile", "fold", "decode", "batch_size"),
    *("part_rows", "dtype", "codec", "nonfinite", "max_failures", "grow"),
)
"""Keys of how features come about."""

_READS = "it reads a store that is there; `layer` says which of its layers"

_WITHOUT_EFFECT = {
    "stats": (
        ("dtype", "codec", "pack", "grow"),
        "statistics are taken in float64 of what the layers give, and no features are stored",
    ),
    "attribute": (
        ("layers", "capture", "reduce"),
        "attribute.method and attribute.layer say what is computed",
    ),
    "probe": ((*_OF_EXTRACTING, "overwrite"), _READS),
    "predict": (
        ("layers", "capture", "grow", "overwrite", "precision", "dtype", "codec"),
        "features are computed as the store's were; `layer` says which head is used",
    ),
    "report": ((*_OF_EXTRACTING, "overwrite"), _READS),
    "similar": ((*_OF_EXTRACTING, "overwrite"), _READS),
    "export": (_OF_EXTRACTING, _READS),
    "bench": (("grow", "overwrite"), "every run begins a store of its own"),
}
"""job -> keys that it does not look at, and why. verify, status and pack are told of a run by its
own command, with the job added, so they bear its keys."""


def default_of(config: Config, key: str) -> Any:
    """The value of a key that nobody gave."""
    found = next(f for f in fields(config) if f.name == key)
    return found.default if found.default_factory is MISSING else found.default_factory()


def _is_given(config: Config, key: str) -> bool:
    """Whether a key, such as job.json, differs from its default."""
    first, *rest = key.split(".")
    value, default = getattr(config, first), default_of(config, first)
    for name in rest:
        value, default = getattr(value, name), getattr(default, name)
    return bool(value != default)


def check_effects(config: Config) -> None:
    """Raise a ConfigError for keys without effect, and for keys that exclude each other."""
    job = config.job.name
    for key, jobs in _ONLY_WITH.items():
        if job not in jobs and _is_given(config, key):
            names = " and ".join(f"job={name}" for name in jobs)
            hint = " What a run captures is named by layers." if key == "layer" else ""
            raise ConfigError(f"{key} has an effect with {names} only.{hint}")
    keys, why = _WITHOUT_EFFECT.get(job, ((), ""))
    for key in keys:
        if _is_given(config, key):
            raise ConfigError(f"{key} has no effect with job={job}: {why}.")
    if job in _OF_A_STORE and config.store is None:
        raise ConfigError(f"job={job} needs store=DIR, the folder or features.h5 that it reads.")
    if config.retry_failed and config.overwrite:
        raise ConfigError(
            "retry_failed=true mends a store and overwrite=true deletes it; give one."
        )
    if config.refresh and config.overwrite:
        raise ConfigError("refresh=true mends a store and overwrite=true deletes it; give one.")
    if config.grow and config.overwrite:
        raise ConfigError("grow=true adds to a store and overwrite=true deletes it; give one.")


def check_places(config: Config) -> None:
    """Raise a ConfigError where out or store in an object store meets what needs a disk."""
    for key in ("out", "store"):
        if (place := getattr(config, key)) is not None and is_url(place):
            place_of(place)
    folder = config.executor.folder
    if folder is not None and is_url(folder):
        raise ConfigError(
            f"executor.folder={folder}: submitit, which tells the tasks what to do, needs a folder "
            "on a disk that all machines see."
        )
    if not is_url(config.out):
        return
    if config.job.name not in _INTO_BUCKETS:
        raise ConfigError(
            f"out={config.out}: job={config.job.name} writes to a disk only; choose a folder."
        )
    if config.job.name not in _MAKE_STORES:
        return  # it reads the store there
    given = {
        "pack=true": config.pack is True,
        "profile=true": config.profile,
        "tensorboard": config.tensorboard is not False,
    }
    for key in (key for key, is_given in given.items() if is_given):
        raise ConfigError(
            f"{key} needs a store on a disk, and out={config.out} lies in an object store. Leave "
            "it out, or choose a folder and copy the store when it is done."
        )
    if config.executor.name == "slurm" and folder is None:
        raise ConfigError(
            f"executor=slurm: out={config.out} lies in an object store, and what the tasks are to "
            "do travels in files. Say where with executor.folder=DIR, on a disk that all machines "
            "see."
        )
