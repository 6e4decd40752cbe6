"""Which options a job reads: recorded while it runs, and compared with what it refuses."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import pickle
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from conftest import run_python
from tiny_model import KEYS, TRUSTED, extract, run_job, write_images

from featx.config import (
    Config,
    Kind,
    from_composed,
    from_keywords,
    given_keywords,
    option_tree,
    saved_yaml,
)
from featx.errors import ConfigError
from featx.jobs import JOBS, Input, base, check, unread

pytestmark = pytest.mark.usefixtures("in_tmp_path")

RUN = {**KEYS, "data": "photos", "part_rows": 32}


@dataclass(frozen=True)
class Call:
    """One run of a job, with the options that make it read as much as it can."""

    job: str
    keys: dict[str, Any]
    json: bool = False


CALLS = [
    Call("extract", {**RUN, "out": "new"}),
    Call("extract", {**RUN, "out": "new", "layers": ["deep"], "reduce": "avg", "pack": False}),
    Call(
        "attribute",
        {
            **RUN,
            "out": "maps",
            "layers": "deep",
            "attribute": {"feature_map_layer": "conv"},
        },
    ),
    Call("plan", {**RUN, "out": "new"}),
    Call("layers", {key: RUN[key] for key in ("model", "data", "precision", "batch_size")}),
    Call("stats", {**RUN, "out": "new"}),
    Call("probe", {"store": "store", "device": "cpu", "probe": {"l2": 0.1}}),
    Call("probe", {"out": "store", "device": "cpu", "probe": {"method": "knn", "k": 1}}),
    Call("predict", {"store": "probed", "data": "photos", "model": TRUSTED, "out": "p"}),
    Call("neighbors", {"store": "store", "layers": "conv", "out": "near"}),
    Call(
        "neighbors",
        {
            "store": "store",
            "layers": "conv",
            "model": TRUSTED,
            "neighbors": {"image": "photos/cat/000.png"},
        },
    ),
    Call("duplicates", {"store": "store", "layers": "conv", "out": "near"}),
    Call("outliers", {"store": "store", "layers": "conv", "out": "near"}),
    Call("mislabelled", {"store": "store", "layers": "conv", "out": "near", "device": "cpu"}),
    Call("compare", {"store": "[store,probed]", "out": "compared"}),
    Call("cka", {"store": "store", "out": "near"}),
    Call("distance", {"store": "[store,store]"}),
    Call("export", {"store": "store", "out": "exported"}),
    Call("export", {"store": "store", "export": {"format": "webdataset"}, "data": "photos"}),
    Call("verify", {"store": "store"}),
    Call(
        "verify",
        {"store": "store", "verify": {"reextract_rows": 4}, "model": TRUSTED, "data": "photos"},
    ),
    Call("verify", {"out": "store"}),
    Call("status", {"store": "store"}),
    Call("status", {"out": "store"}),
    Call("pack", {"out": "store"}),
]

# What the calls above do not come to, and why it is an option of the job all the same.
NOT_REACHED = {
    "extract": {"executor", "target", "profile", "tensorboard", "retry_failed"},
    "attribute": {"executor", "profile", "retry_failed"},
    # The plan is that of the run the same options would make, with its checks.
    "plan": {"max_failures", "executor", "target", "tensorboard", "grow"},
    "stats": {"executor", "target", "profile", "stats.reference"},
    "export": {"export.incomplete", "overwrite"},
    # What a saved config says of these is compared with what they say.
    "predict": {"data", "model", "reduce.name"},
    "verify": {"model", "reduce.name"},
    "neighbors": {"model", "reduce.name"},
}

LOOKED_AT = {"attribute": {"tensorboard"}, "plan": {"profile"}, "stats": {"codec"}}
"""Options that a job refuses, whose default it comes across in code that it shares."""


_CHECKS = {str(module.__file__) for module in (copy, dataclasses, base, pickle)}


_NO_JOBS = ("__post_init__", "__eq__", "has_default_out", "_digest", "in_this_process")


_GROUPS = (
    *("data", "reduce", "executor", "probe", "attribute", "stats"),
    *(name for name, option in option_tree().items() if option.members),
)
_OF_KINDS = {
    name
    for group in _GROUPS
    for name in option_tree()
    if (name == group or name.startswith(f"{group}."))
    and name not in ("data.name", "data.root", "reduce.name")
} | {"model.window.overlap"}
"""Options of one kind of data set, reduction, ...: their own checks refuse them with others."""


def _is_a_check(frame: FrameType | None) -> bool:
    """Whether a read is of a check, a copy or a comparison of the config, and of no job."""
    while frame is not None:
        code = frame.f_code
        if code.co_name in _NO_JOBS:
            return True
        if code.co_filename in _CHECKS:
            return True
        frame = frame.f_back
    return False


def sections(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of the groups and of the sections in them."""
    for each in fields(config):
        if is_dataclass(value := getattr(config, each.name)):
            yield prefix + each.name, value
            yield from sections(value, f"{prefix}{each.name}.")


@contextlib.contextmanager
def recorded(config: Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The dotted names of the options that are read of this very config, not of one in a store."""
    seen: set[str] = set()
    groups = dict(sections(config))
    prefixes = {id(config): "", **{id(value): f"{name}." for name, value in groups.items()}}
    known = set(option_tree())

    def read(self: Any, name: str) -> Any:
        option = prefixes.get(id(self), "-") + name
        if option in known and not _is_a_check(sys._getframe(1)):
            seen.add(option)
        return object.__getattribute__(self, name)

    with monkeypatch.context() as patch:
        for schema in {Config, *map(type, groups.values())}:
            patch.setattr(schema, "__getattribute__", read, raising=False)
        yield seen


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the images `photos`, their features in `store`, and `probed` with a probe."""
    folder = tmp_path_factory.mktemp("pristine")
    write_images(folder / "photos")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        extract("photos", layers=["conv", "pool"])
        extract("photos", out="probed")
        run_job("probe", store="probed", device="cpu", probe={"l2": 0.1})
    return folder


@pytest.fixture
def stores(pristine: Path, tmp_path: Path) -> None:
    """A copy of these folders in the current one."""
    shutil.copytree(pristine, tmp_path, dirs_exist_ok=True)


def leaves(names: set[str]) -> set[str]:
    """Options that are no groups."""
    types = option_tree()
    return {name for name in names if types[name].kind not in (Kind.GROUP, Kind.SECTION)}


def run(call: Call, monkeypatch: pytest.MonkeyPatch) -> tuple[Config, set[str]]:
    """The config of a call, and the options that its job reads."""
    node = from_keywords(call.keys)
    node["job"]["name"] = call.job
    config = from_composed(node)
    check(config, given_keywords(call.keys))
    with recorded(config, monkeypatch) as seen:
        JOBS.get(call.job).run(config, saved_yaml(node))
    return config, leaves(seen) - _OF_EVERY_JOB


_OF_EVERY_JOB = {"job.json", "job.name", "job.show", "log.json"}


@pytest.mark.parametrize("job", sorted({call.job for call in CALLS}))
def test_a_job_accepts_what_it_reads_and_refuses_the_rest(
    job: str, stores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: set[str] = set()
    accepted: set[str] = set()
    for call in (call for call in CALLS if call.job == job):
        config, now = run(call, monkeypatch)
        given = given_keywords(call.keys)
        now -= LOOKED_AT.get(job, set())
        assert not (refused := {name for name in now if unread(config, {*given, name})}), refused
        read |= now
        types = leaves(set(option_tree())) - _OF_EVERY_JOB
        accepted |= {name for name in types if not unread(config, {*given, name})}
    expected = NOT_REACHED.get(job, set()) | _OF_KINDS
    left = {n for n in accepted - read if n not in expected and n.split(".")[0] not in expected}
    assert not left, left


@pytest.mark.parametrize(
    ("job", "keys", "refused"),
    [
        ("probe", {"store": "store", "model": "resnet18"}, "model has no effect with job=probe"),
        ("probe", {"store": "store", "model": "efficientnet_lite0"}, "model has no effect"),
        ("probe", {"store": "store", "out": "other"}, "out has no effect with job=probe"),
        ("probe", {"store": "store", "data": {"limit": 3}}, r"data\.limit has no effect"),
        ("verify", {"store": "store", "model": {"args": {"a": 1}}}, r"model\.args has "),
        ("verify", {"store": "store", "device": "cpu"}, "device has no effect with job=verify"),
        ("verify", {"store": "store", "seed": 0}, "seed has no effect with job=verify"),
        ("status", {"store": "store", "device": "cpu"}, "device has no effect with job=status"),
        ("status", {"model": "resnet18", "layers": ["layer4"]}, "layers has no effect"),
        ("export", {"store": "store", "data": "photos"}, "data has no effect with job=export"),
        ("export", {"store": "store", "seed": 0}, "seed has no effect with job=export"),
        ("predict", {"store": "store", "batch_size": "auto"}, "batch_size has no effect"),
        ("report", {"store": "store", "dtype": "float32"}, "dtype has no effect with job=report"),
        ("layers", {"reduce": "avg"}, "reduce has no effect with job=layers"),
        ("extract", {"probe": {"k": None}}, r"probe\.k has an effect with job=probe only"),
        (
            *("extract", {"neighbors": {"metric": "euclidean"}}),
            "job=neighbors, job=outliers and job=export export.format=faiss only",
        ),
        ("extract", {"store": "photos"}, "job=extract writes its store to out=DIR"),
    ],
)
def test_what_is_given_and_not_read_is_refused_also_with_its_default(
    job: str, keys: dict[str, Any], refused: str
) -> None:
    if "args" in str(keys):
        keys["model"] = {"name": "custom", "library": "custom", "factory": "a:b", **keys["model"]}
    node = from_keywords(keys)
    node["job"]["name"] = job
    config = from_composed(node)
    with pytest.raises(ConfigError, match=refused):
        check(config, given_keywords(keys))


def test_a_store_may_be_named_by_the_model_and_the_data_that_made_it() -> None:
    keys = {"model": "resnet18", "data": "photos"}
    node = from_keywords(keys)
    node["job"]["name"] = "status"
    config = from_composed(node)
    check(config, given_keywords(keys))
    assert config.out == "runs/photos/resnet18"


def test_every_option_is_read_by_a_job() -> None:
    for option in leaves(set(option_tree())):
        assert any(job.may_read(option) for job in JOBS), f"no job reads {option}"


def test_a_job_names_existing_options_and_its_own_are_at_its_name() -> None:
    for job in JOBS:
        assert {*job.reads, *job.ignores} <= set(option_tree()), job.name
        if job.options is not None:
            assert type(getattr(Config(), job.name)) is job.options
        all_read = all(job.may_read(option) for option in base.RUN_OPTIONS)
        reads_store = job.input in (Input.STORE, Input.STORE_OR_OUT)
        assert reads_store or job.why != base.Job.why or all_read, f"job={job.name} says why"
    groups = {f.name for f in fields(Config) if is_dataclass(getattr(Config(), f.name))}
    own = {name for name in groups if name in JOBS}
    assert own == {job.name for job in JOBS if job.options is not None}


def test_an_option_that_most_jobs_read_names_the_others() -> None:
    config = Config(store="x")
    with pytest.raises(ConfigError, match=r"with all jobs except job=attribute, .* and job=plan"):
        check(config)
    assert {job.name for job in JOBS if job.input is Input.IMAGES} == {
        *("attribute", "extract", "layers", "plan", "stats")
    }


@pytest.mark.parametrize(
    ("argument", "imported"), [("job=status", {"base", "status"}), ("--help", None)]
)
def test_a_command_imports_its_job_only_and_the_help_no_torch(
    argument: str, imported: set[str] | None
) -> None:
    code = (
        "import atexit, sys; from featx.__main__ import run_command\n"
        "def tell():\n"
        "    print([name[11:] for name in sys.modules if name.startswith('featx.jobs.')])\n"
        "    print('torch' in sys.modules)\n"
        "atexit.register(tell)\n"  # --help ends the process
        "run_command()"
    )
    *_, names, has_torch = run_python("-c", code, argument).stdout.splitlines()
    assert has_torch == "False"
    found = set(ast.literal_eval(names))
    assert found == imported if imported is not None else found >= {job.name for job in JOBS}
