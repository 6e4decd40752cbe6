"""Declaration of a job, and the checks and tables that are made from the declarations.

A job is one module of this package that registers a `Job` in `JOBS` under its name. A config alone
does not know which jobs exist: the command and the Python functions check it with `check`.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from typing import Any, TypeVar

from featx.base import Member, Registry, Section, as_text, log_message, print_result
from featx.config import (
    Config,
    from_composed,
    from_keywords,
    given_by_value,
    given_keywords,
    nested_keywords,
    refuse_given_of_others,
    saved_yaml,
    store_list,
    without_model,
    without_object,
)
from featx.errors import ConfigError
from featx.storage import is_url, path_text
from featx.types import Json, Source

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

RUN_OPTIONS = (
    *("model", "data", "layers", "capture", "reduce", "target", "out", "precision", "dtype"),
    *("batch_size", "device", "compile", "fold_batchnorm", "decode", "part_rows", "codec"),
    *("conformance", "max_failures", "nonfinite", "pack", "grow", "overwrite", "seed"),
)
"""Options of what a run computes and stores. Each other option is read by the jobs that name it."""

CUSTOM_CODE = ("model.name", "model.library", "model.factory")
"""Options that allow a job to import the code that a store names; see docs/security.md."""

_ALWAYS_READ = ("job.name", "log.json")
"""Options that every job reads."""


def code_options(config: Config) -> tuple[str, ...]:
    """Return CUSTOM_CODE if the config names the code of a model."""
    return () if config.model.code is None else CUSTOM_CODE


class Input(Enum):
    """Kind of input that a job reads."""

    IMAGES = "images"
    """The images that `data` names; the model computes."""
    STORE = "store"
    """The store that the option `store` names, which has to be given."""
    NOTHING = "nothing"
    """Neither images nor a store."""
    STORE_OR_OUT = "store or out"
    """The store that `store` names, or `out` if `store` is null."""


@dataclass(frozen=True, kw_only=True)
class Job(Member):
    """Declaration of a job.

    Options are named as on the command line; a group stands for all options in it. `options`, the
    dataclass of the job's own options, is the type of the field of `Config` with the job's name.

    Attributes:
        run: executes the job with a checked config and the same config as YAML; returns the exit
            code.
        input: what the job reads.
        reads: options that it reads, besides its own and those that `input` implies.
        ignores: options of the groups in `reads` that it does not read.
        why: why the other options of a run have no effect; completes "X has no effect with
            job=NAME: ". By default that of a job that reads a store.
        reads_with: returns the options that it reads in addition with a given config.
        reads_when: option that `reads_with` returns with some configs -> such a config, for
            messages; those in RUN_OPTIONS need none.
        check: raises a ConfigError for combinations of options that the job refuses.
        makes_store: whether it makes a store in `out`, or plans one; only such a job can write into
            a bucket.
        takes_gradients: whether it computes gradients of `target`, whatever is captured.
        takes_several_stores: whether `store` may be a list in brackets or a pattern.
        shows: values of `job.show` that it takes.
    """

    run: Callable[[Config, str], int]
    input: Input
    reads: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()
    why: str = "it reads an existing store; `layers` selects its layers"
    reads_with: Callable[[Config], Collection[str]] = lambda config: ()
    reads_when: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Config], None] = lambda config: None
    makes_store: bool = False
    takes_gradients: bool = False
    takes_several_stores: bool = False
    shows: tuple[str, ...] = ()

    def may_read(self, option: str) -> bool:
        """Return whether the job reads an option, whatever the values of the others are."""
        own_group = () if self.options is None else (self.name,)
        store = {Input.STORE: ("store",), Input.STORE_OR_OUT: ("store", "out")}
        show = ("job.show",) if self.shows else ()
        reads = (*_ALWAYS_READ, *own_group, *show, *store.get(self.input, ()), *self.reads)
        return _is_within(option, reads) and not _is_within(option, self.ignores)


JOBS: Registry[Job] = Registry("job", "featx.jobs")
"""All jobs, by name."""


def check(config: Config, given: Collection[str] | None = None) -> None:
    """Check a config, whose options were checked on their own, against the declaration of its job.

    `given` are the dotted names of the options that the command or the call gave, also those with
    their defaults; None takes the options that differ from their defaults.
    """
    job = JOBS.get(config.job.name)
    _check_object_store(config, job)
    if job.input is Input.STORE and config.store is None:
        raise ConfigError(
            f"job={job.name} needs store=DIR, the folder or features.h5 that it reads."
        )

    # A list of stores that the job does not take, or that has no brackets.
    store = config.store or ""
    is_list = store.startswith("[") or "," in store
    if is_list and not is_url(store) and not os.path.exists(store):  # noqa: PTH110 - see listed_stores
        if not job.takes_several_stores:
            raise ConfigError(
                f"store={store}: job={job.name} reads one store. With -m and store=A,B each is a "
                "run of its own; job=compare 'store=[A,B]' shows several in one table."
            )
        if not store.startswith("["):
            raise ConfigError(f"store={store}: a list is written in brackets, 'store=[{store}]'.")

    # Options that gradients exclude, or need.
    if job.input is Input.IMAGES and (job.takes_gradients or config.takes_gradients):
        if config.compile is True:
            raise ConfigError(
                "compile=true does not go with gradients: a compiled pass hides where they "
                "pass. Use compile=false."
            )
    elif job.input is Input.IMAGES and config.target != "predicted":
        jobs = "".join(f" and with job={other.name}" for other in JOBS if other.takes_gradients)
        raise ConfigError(
            f"target={config.target} has an effect with capture=grad_output or grad_input{jobs} "
            "only."
        )

    if job.shows and config.job.show not in (None, *job.shows):
        raise ConfigError(
            f"job.show={config.job.show}: job={job.name} has {', '.join(job.shows)} only."
        )
    job.check(config)

    if given is None:
        given = given_by_value(config)
    for sentence in unread(config, given).values():
        raise ConfigError(sentence)
    refuse_given_of_others(config, given)


def unread(config: Config, names: Collection[str]) -> dict[str, str]:
    """Return the options that the job of a config does not read: name -> sentence that says why the
    option has no effect. `names` are dotted; `model` stands for `model.name`.
    """
    job = JOBS.get(config.job.name)
    given = set()
    for name in names:
        group = getattr(config, name, None)
        is_choice = is_dataclass(group) and hasattr(group, "name")  # model=resnet50 is model.name
        given.add(f"{name}.name" if is_choice else name)

    also_read = set(job.reads_with(config))
    has_store = job.input is Input.STORE_OR_OUT and config.store is not None
    if job.input is Input.STORE_OR_OUT and not has_store and "out" not in given:
        # out=runs/<data>/<model>, and the options that name these two
        also_read |= {"data.name", "data.root", "data.dataset", *CUSTOM_CODE}

    sentences = {}
    for name in sorted(given):
        is_read = job.may_read(name) or _is_within(name, also_read)
        if is_read and not (has_store and name == "out"):
            continue
        option = name.removesuffix(".name")
        if _is_within(name, RUN_OPTIONS):
            sentences[option] = f"{option} has no effect with job={job.name}: {job.why}."
        else:
            sentences[option] = f"{option} has an effect {_readers_text(name)}."
            if name == "store" and job.makes_store:
                sentences[option] += f" job={job.name} writes its store to out=DIR."
    return sentences


def config_of_call(job: str, keys: Mapping[str, Any]) -> tuple[Config, str]:
    """Return the checked config of a call from Python, and the same config as YAML. Raises
    ConfigError if a keyword is unknown, or does not fit.
    """
    config, options = _config_and_options(job, keys)
    return config, saved_yaml(options)


def _config_and_options(job: str, keys: Mapping[str, Any]) -> tuple[Config, dict[str, Any]]:
    keys = nested_keywords(keys)
    options = from_keywords(keys)
    options["job"]["name"] = job
    config = from_composed(options)
    check(config, given_keywords(keys))
    return config, options


@contextlib.contextmanager
def call_of_job(
    job: str, keys: Mapping[str, Any], data: object
) -> Iterator[tuple[Config, str, Source | None]]:
    """Read a call from Python whose data set and model may be objects, which it can use inside.
    Yield the checked config, the same config as YAML, and the data set if it is an object. Raises
    ConfigError if a keyword is unknown or does not fit, and Interrupted on Ctrl-C, after a line
    that says what is kept.
    """
    from featx.models import given_factory
    from featx.pipeline import Interrupted, kept_text
    from featx.sources import source_of

    if data is not None:
        if "data" in keys:
            raise ConfigError("data is given twice: as the first argument, and as data=.")
        keys = {**keys, "data": data}
    options, data_set = without_object(nested_keywords(keys))
    options, model = without_model(options)
    with given_factory(model) as factory:
        if factory is not None:
            options["model"] = {**options["model"], "factory": factory}
        config, config_yaml = config_of_call(job, options)
        if model is not None and config.is_distributed:
            raise ConfigError(
                "model is a Python object, which worker processes cannot import. Leave executor "
                "out, or put what builds it into a file: model={'library': 'custom', "
                "'factory': 'package.module:function'}."
            )
        try:
            yield (
                config,
                config_yaml,
                None if data_set is None else source_of(data_set, config.data),
            )
        except KeyboardInterrupt as interrupt:
            log_message(f"\n{kept_text(config.out)}")
            raise Interrupted(getattr(interrupt, "signum", signal.SIGINT)) from None


def config_of_store_call(job: str, keys: Mapping[str, object], store: object) -> Config:
    """Return the checked config of a call from Python that reads a store. The store, its path, or a
    list of stores was given as the first argument or is a keyword. Raises ConfigError if a keyword
    is unknown, or does not fit.
    """
    if store is not None and "store" in keys:
        raise ConfigError("store is given twice: as the first argument, and as store=.")
    if isinstance(store, list | tuple) and store:
        store = store_list([path_text(each, "store") for each in store])
    elif store is not None:
        store = path_text(store, "store")
    return _config_and_options(job, keys if store is None else {**keys, "store": store})[0]


def with_keywords(options: type) -> Callable[[FunctionT], FunctionT]:
    """Return a decorator that shows the keywords of `**keys` and their defaults in the signature of
    a function.

    Type checkers take them from `Unpack[options]`; `help()` and notebooks take the signature. Other
    keywords of the function stay in front.
    """

    def decorate(function: FunctionT) -> FunctionT:
        plain_signature = inspect.signature(function)
        own = [
            each.replace(kind=each.POSITIONAL_OR_KEYWORD)
            if each.kind is each.POSITIONAL_ONLY
            else each
            for each in plain_signature.parameters.values()
            if each.kind is not each.VAR_KEYWORD
        ]
        names = {each.name for each in own}

        defaults, keywords = Config(), []
        for name, hint in options.__annotations__.items():
            if name in names or not hasattr(defaults, name):
                continue  # options of groups would be a hundred more
            default = getattr(defaults, name)
            if is_dataclass(default):
                # The name that selects a member, or {} if the group has none, and for `data`, which
                # a job finds through its store.
                default = {} if name == "data" else getattr(default, "name", {})
            kind, annotation = inspect.Parameter.KEYWORD_ONLY, hint.__forward_arg__
            keywords.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
        signature = inspect.Signature(
            [*own, *keywords], return_annotation=plain_signature.return_annotation
        )
        function.__signature__ = signature  # type: ignore[attr-defined]  # read by inspect
        return function

    return decorate


def run(config: Config, config_yaml: str) -> int:
    return JOBS.get(config.job.name).run(config, config_yaml)


def print_summary(config: Config, summary: Json, *sections: Section | None) -> None:
    """Print the result of a job: `summary` as JSON with job.json=true, else its sections."""
    print_result(json.dumps(summary, indent=2) if config.job.json else as_text(*sections))


def _check_object_store(config: Config, job: Job) -> None:
    if not is_url(config.out) or job.input is Input.STORE_OR_OUT:
        return
    if not job.makes_store:
        raise ConfigError(
            f"out={config.out}: job={job.name} writes to a disk only, because it changes files and "
            "merges them under a lock, and an object store has no locks. Choose a folder, and copy "
            "it when it is done."
        )
    grows = "its files grow during the run, and objects cannot"
    deletes = "it deletes the parts that it has packed, and an object store has no lock for that"
    for option, is_given, reason in (
        ("pack=true", config.pack is True, deletes),
        ("profile=true", config.profile, grows),
        ("tensorboard", config.tensorboard is not False, grows),
    ):
        if is_given:
            raise ConfigError(
                f"{option} needs a store on a disk, and out={config.out} lies in an object store: "
                f"{reason}. Leave it out, or choose a folder and copy the store when it is done."
            )
    if config.executor.name == "slurm" and config.executor.shared_folder is None:
        raise ConfigError(
            f"executor=slurm: out={config.out} lies in an object store, and what the tasks are to "
            "do travels in files. Say where with executor.folder=DIR, on a disk that all machines "
            "see."
        )


def _readers_text(option: str) -> str:
    """Return with which jobs an option has an effect: 'with job=cka and job=probe only'."""
    readers = [f"job={job.name}" for job in JOBS if job.may_read(option)]
    readers += [job.reads_when[option] for job in JOBS if option in job.reads_when]
    others = [f"job={job.name}" for job in JOBS if not job.may_read(option)]
    is_common = len(readers) > len(others)
    *names, last = others if is_common else readers
    listed = f"{', '.join(names)} and {last}" if names else last
    return f"with all jobs except {listed}" if is_common else f"with {listed} only"


def _is_within(name: str, options: Collection[str]) -> bool:
    """Return whether an option is one of `options`, or is in a group that is."""
    parts = name.split(".")
    return any(".".join(parts[: i + 1]) in options for i in range(len(parts)))
