"""Which keys have an effect with which job, and which exclude each other: the rest is refused."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from featx.config.member_options import default_of_field
from featx.errors import ConfigError
from featx.storage.s3_path import is_url, parse_path

if TYPE_CHECKING:
    from featx.config.run_config import Config

_OF_A_STORE = ("predict", "neighbors", "duplicates", "cka", "export", "report")
"""Jobs that read a store and write something else."""

_MAKE_STORES = ("extract", "attribute", "plan")
"""Jobs that make a store in out, or say what it would take."""

_INTO_BUCKETS = (*_MAKE_STORES, "verify", "status", "probe", "pack")
"""Jobs for which out may be a place in an object store; the others of them read the store there."""

_SPREAD = ("extract", "plan", "stats", "attribute")
"""Jobs that other processes may share."""

_WITH_JSON = (
    *("layers", "plan", "stats", "probe", "predict", "neighbors", "duplicates", "cka"),
    *("export", "report", "verify", "status", "bench"),
)
"""Jobs whose result can be printed as JSON."""

_ONLY_WITH = {
    "job.json": _WITH_JSON,
    "job.show": ("layers",),
    "store": ("verify", "status", "pack", "probe", *_OF_A_STORE),
    "stats": ("stats",),
    "verify": ("verify",),
    "profile": ("extract", "stats", "attribute"),
    "retry_failed": ("extract", "attribute"),
    "refresh": ("extract", "attribute", "stats"),
    "tensorboard": ("extract", "plan"),
    "executor": _SPREAD,
    "attribute": ("attribute",),
    "probe": ("probe",),
    "neighbors": ("neighbors",),
    "duplicates": ("duplicates",),
    "cka": ("cka",),
    "export": ("export",),
    "report": ("report",),
    "bench": ("bench",),
}
"""option -> the jobs that read it. A group stands for all options in it."""

_EVERYWHERE = ("job.name", "log")
"""Options that every job reads."""

_READS = {
    "verify": (
        ("store", "out", "data.name", "data.root"),
        "it reads the store that `store` or `out` names, and its images",
    ),
    "status": (("store", "out"), "it reads the store that `store` or `out` names"),
    "pack": (("store", "out"), "it packs the store that `store` or `out` names"),
    "probe": (
        ("store", "out", "layers", "device", "seed"),
        "it reads a store that is there; `layers` says which of its layers",
    ),
    "neighbors": (
        ("store", "out", "layers", "device"),
        "it reads a store that is there; `layers` says which of its layers",
    ),
    "duplicates": (
        ("store", "out", "layers", "device"),
        "it reads a store that is there; `layers` says which of its layers",
    ),
    "cka": (
        ("store", "out", "layers", "device", "seed"),
        "it reads a store that is there; `layers` says which of its layers",
    ),
    "export": (
        ("store", "out", "layers", "overwrite"),
        "it reads a store that is there; `layers` says which of its layers",
    ),
    "report": (
        ("store", "out", "layers", "device", "seed", "data.name", "data.root"),
        "it reads a store that is there; `layers` says which of its layers",
    ),
    "predict": (
        ("store", "out", "layers", "device", "data", "max_failures"),
        "features are computed as the store's were; `layers` says which head is used",
    ),
}
"""Jobs that read a store -> the options that they read beside those of `_ONLY_WITH`, and why the
others have no effect. All other jobs compute, and read what `_WITHOUT_EFFECT` does not list."""

_OF_A_RUN = (
    *(
        "out",
        "compile",
        "fold_batchnorm",
        "part_rows",
        "codec",
        "max_failures",
        "nonfinite",
        "pack",
    ),
    *("grow", "overwrite", "layers", "reduce", "target"),
)
"""Options of what a run computes and writes."""

_WITHOUT_EFFECT = {
    "stats": (
        ("dtype", "codec", "pack", "grow"),
        "statistics are taken in float64 of what the layers give, and no features are stored",
    ),
    "attribute": (
        ("layers", "capture", "reduce"),
        "attribute.method and attribute.layer say what is computed",
    ),
    "layers": (_OF_A_RUN, "it lists every layer there is, and stores nothing"),
    "bench": (
        ("grow", "overwrite", "out", "data.limit"),
        "every run begins a store of its own, of bench.num_images images",
    ),
}
"""Jobs that compute -> options that they do not read, and why."""

_OF_CUSTOM_CODE = ("model.name", "model.library", "model.factory")
"""Options that let a job import the code that a store names; see docs/security.md."""


def selects_stored_layers(config: Config) -> bool:
    """Whether `layers` names layers of a store that is read, not layers to capture."""
    return config.job.name == "probe" or config.job.name in _OF_A_STORE


def default_of(config: Config, key: str) -> Any:
    """The value of a key that nobody gave."""
    found = next(f for f in fields(config) if f.name == key)
    return found.default if found.default_factory is MISSING else found.default_factory()


def given_by_value(config: Config) -> frozenset[str]:
    """The options that differ from their defaults, by their dotted names."""
    found = set()
    for f in fields(config):
        value, default = getattr(config, f.name), default_of(config, f.name)
        if f.name == "out" and value == f"runs/{config.data.name}/{config.model.name}":
            continue
        if is_dataclass(value):
            names = {
                inner.name
                for inner in fields(value)
                if getattr(value, inner.name)
                != getattr(default, inner.name, default_of_field(inner))  # of a member only
            } - {"library"}  # which the name of a packaged model brings along
            found |= {f"{f.name}.{name}" for name in names}
        elif value != default:
            found.add(f.name)
    return frozenset(found)


def unread(config: Config, names: Collection[str]) -> dict[str, str]:
    """The options that the job of a config does not read.

    Args:
        config: checked.
        names: of the options to look at, dotted; of a group that is chosen, such as model, its own
            or that of the choice (model.name).

    Returns:
        name -> the sentence that says why it has no effect.
    """
    job = config.job.name
    found = {}
    names = {_option_of(config, name) for name in names}
    for name in sorted(names):
        shown = name.removesuffix(".name")
        if _stands_for(name, _EVERYWHERE):
            continue
        jobs = next((jobs for key, jobs in _ONLY_WITH.items() if _stands_for(name, (key,))), None)
        if jobs is not None:
            if job not in jobs:
                only = " and ".join(f"job={other}" for other in jobs)
                found[shown] = f"{shown} has an effect with {only} only."
        elif job in _READS:
            if not _stands_for(name, _read_of_store(config, names)):
                found[shown] = f"{shown} has no effect with job={job}: {_READS[job][1]}."
        elif job in _WITHOUT_EFFECT and _stands_for(name, _WITHOUT_EFFECT[job][0]):
            found[shown] = f"{shown} has no effect with job={job}: {_WITHOUT_EFFECT[job][1]}."
    return found


def _option_of(config: Config, name: str) -> str:
    """The option that a group's own name sets: model=resnet50 is model.name."""
    group = getattr(config, name, None)
    return f"{name}.name" if is_dataclass(group) and hasattr(group, "name") else name


def _stands_for(name: str, keys: Collection[str]) -> bool:
    """Whether an option is one of some, or lies in a group that is."""
    parts = name.split(".")
    return any(".".join(parts[: i + 1]) in keys for i in range(len(parts)))


def _read_of_store(config: Config, names: Collection[str]) -> tuple[str, ...]:
    """The options that a job on a store reads, as it is given."""
    job = config.job.name
    read = set(_READS[job][0])
    if job not in _OF_A_STORE and config.store is not None:
        read.discard("out")  # `store` says where it is
    if config.store is None and "out" not in names and job not in _OF_A_STORE:
        # out=runs/<data>/<model>, and what names these two
        read |= {"data.name", "data.root", "data.dataset", *_OF_CUSTOM_CODE}
    if job == "verify" and (config.verify.reextract_rows or config.verify.repair):
        read |= {"data.name", "data.root", "device", "reduce.name", "reduce.stats"}
        read |= {"seed"} if config.verify.reextract_rows else set()
    if job == "neighbors" and config.neighbors.recall is not None:
        read.add("seed")
    if job == "export" and config.export.format == "webdataset":
        read |= {"data.name", "data.root"}
    if job == "predict":
        read |= {"reduce.name", "reduce.stats"}
    if job in ("predict", "verify") and config.model.library == "custom":
        read |= set(_OF_CUSTOM_CODE)
    return tuple(read)


def check_given(config: Config, given: Collection[str]) -> None:
    """Raise a ConfigError for the first of the options given that the job does not read.

    Args:
        config: checked.
        given: the dotted names of the options that were given, also those with their defaults.
    """
    for sentence in unread(config, given).values():
        raise ConfigError(sentence)


def check_combinations(config: Config) -> None:
    """Raise a ConfigError for options that exclude or need each other."""
    job = config.job.name
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
            parse_path(place)
    folder = config.executor.shared_folder
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
