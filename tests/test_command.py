"""The command as a user runs it: a process in an empty folder, its output, files and exit code."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import Completed, run_python, slow_except

import featx as package
from featx.__main__ import resume_command, run_command
from featx.cli import job_help_text
from featx.config import described_options
from featx.jobs import JOBS
from featx.models import read_catalogue

HERE = Path(__file__).parent

Featx = Callable[..., Completed]

RESNET = ("model=resnet18", "model.weights=null", "precision=fp32")


MISTAKES = [
    (["precison=fp32"], "unknown key 'precison'. Nearest: precision"),
    (
        ["job=extrct"],
        "expected one of attribute, cka, compare, distance, doctor, duplicates, export, extract, "
        "layers, mislabelled, models, neighbors, outliers, pack, plan, predict, probe, report, "
        "stats, status, verify, zeroshot. Nearest: extract",
    ),
    (["model=resnet5O"], "Nearest: resnet50"),
    (["model=facebook/dinov2-base"], "model=vit_base_patch14_dinov2.lvd142m"),
    (["data=folder"], "data.root=DIR"),
    (["data.root=photos"], "add data=folder"),
    (["reduce=agv"], "Nearest: avg"),
    (["reduce=avg", "reduce.p=4"], "reduce.p has an effect with reduce=gem only"),
    (["layers=[]"], "layers is empty"),
    (["layers={layer4: agv}"], "reduce=agv: expected one of"),
    (["batch_size=many"], "batch_size=many: expected auto, or a whole number"),
    (["part_rows=100"], "expected a power of two, such as 128"),
    (["batch_size=64", "part_rows=32"], "batch_size=64 is larger than part_rows=32"),
    (["device=tpu"], "device=tpu: expected auto, cpu"),
    (["model=custom"], "model.factory"),
    (["model=timm"], "model=timm needs model.name=NAME"),
    (
        ["model.factory=a:b"],
        "model.factory has an effect with model.library=custom or model.library=hub only",
    ),
    (["data.background=notacolour"], "notacolour: expected a colour name"),
    (["data=folder", "data.root=/a b/c=d,#[x]'é"], "/a b/c=d,#[x]'é does not exist"),
    (["data=/no/such/folder"], "data.root=/no/such/folder does not exist"),
    (["data=s3://bucket/photos"], "data.root=s3://bucket/photos: data=folder reads from a disk"),
    (
        ["data=hdf5", "data.root=https://host/a.h5", "data.dataset=images"],
        "data=hdf5 reads from a disk",
    ),
    (["data=cifar10"], "Nearest: torchvision."),
    (["out=runs/photos.h5"], "Give out=runs/photos, or another folder."),
    (["data=photo"], "data=./photos"),
    (["data.rot=3"], "Nearest: data.root"),
    (["+foo=1"], "unknown key 'foo'"),
    (["layers=["], "cannot read 'layers=['"),
    (["dtype=int8"], "dtype=int8: expected one of float16, float32"),
    (["max_failures=-1"], "max_failures=-1: expected a share"),
    (["reduce=mean"], "Nearest: avg"),
    (["reduce=true"], "reduce=true: expected one of"),
    (["out=null"], "out=null: expected a value"),
    (["seed=0x10"], "seed"),
    (["job=verify", "store=a", "model.weights=x"], "model.weights has no effect with job=verify"),
    (["job=verify"], "say which with store=DIR"),
    (["job=probe", "store=a", "model=resnet18"], "model has no effect with job=probe"),
    (["model=resnet18", "model.transform.mean=abc"], "model.transform.mean=abc: expected a list"),
    (["executor.devices=[0,1]"], "executor.devices is gone: executor.workers=2 takes"),
    (["executor=slurm", "executor.sbatch=gpu"], "expected a mapping of options of sbatch"),
    (["layers={a: {p: x}}"], "reduce.p"),
    (["probe.shots={a: 1}", "job=probe", "store=a"], "probe.shots"),
    (["--config-name", "nope"], "--config-name nope: there is no nope.yaml"),
    (["--resolve"], "--resolve flag can only be used"),
    (["--cfg", "job", "--run"], "Only one of --run"),
    (["-m", "job=status", "store=glob(*)"], "-m: these options make no run"),
    (["hydra/launcher=nope"], "hydra/launcher=nope: expected one of basic."),
    (["~reduce=1"], "no option can be deleted"),
    (["executor=[1]"], "executor=[1]: expected one of"),
    (["model=1e5"], "unknown model '1e5'"),
    (["fold_batchnorm=maybe"], "fold_batchnorm"),
    (["job=verify", "store=" + 300 * "x"], "x cannot be opened: File name too long.\n"),
    (["data=folder", "data.root=" + 300 * "x"], "x cannot be opened: File name too long.\n"),
    (["--config-dir", 300 * "x"], "x cannot be opened: File name too long.\n"),
]

ANSWERING = """
import contextlib, io, json, sys
from featx.__main__ import run_command

for line in sys.stdin:
    sys.argv = ["featx", *json.loads(line)]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run_command()
        except SystemExit as end:  # of --help and --version
            code = end.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue(), "torch" in sys.modules]), flush=True)
"""

Answer = tuple[int, str, str, bool]


@pytest.fixture(scope="module")
def folder_of_answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with code that leaves a mark, and with an experiment that names it."""
    folder = tmp_path_factory.mktemp("answers")
    (folder / "evil.py").write_text("open('was-here', 'w')\nclass Code: pass\n")
    (folder / "conf/experiment").mkdir(parents=True)
    text = "# @package _global_\nhydra: {callbacks: {a: {_target_: evil.Code}}}\n"
    (folder / "conf/experiment/x.yaml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def answer_to(folder_of_answers: Path) -> Iterator[Callable[[list[str]], Answer]]:
    """The command in one child process, which answers one list of arguments after the other.

    An answer is the exit code, stdout, stderr, and whether torch is loaded.
    """
    with subprocess.Popen(
        [sys.executable, "-c", ANSWERING],
        cwd=folder_of_answers,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:

        def ask(overrides: list[str]) -> Answer:
            assert child.stdin is not None
            assert child.stdout is not None
            print(json.dumps(overrides), file=child.stdin, flush=True)
            code, out, err, with_torch = json.loads(child.stdout.readline())
            return code, out, err, with_torch

        yield ask
        assert child.stdin is not None
        child.stdin.close()
    assert child.returncode == 0


HAS_OTHER_TIMM = importlib.metadata.version("timm") != read_catalogue().versions["timm"]
"""Whether timm is another one than that of the catalogue: names are then its own, with torch."""


@pytest.mark.parametrize(
    ("overrides", "message"), MISTAKES, ids=[" ".join(o)[:60] for o, _ in MISTAKES]
)
def test_a_mistake_ends_with_one_message_and_code_2_before_torch_loads(
    answer_to: Callable[[list[str]], Answer], overrides: list[str], message: str
) -> None:
    code, out, err, with_torch = answer_to(overrides)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    assert not with_torch or HAS_OTHER_TIMM


def test_a_sweep_leaves_nothing_where_it_was_started(
    answer_to: Callable[[list[str]], Answer], folder_of_answers: Path
) -> None:
    answer_to(["-m", "job=models", "models.query=zz1,zz2", "model.args.token=swordfish"])
    assert {path.name for path in folder_of_answers.iterdir()} == {"conf", "evil.py"}


def test_models_are_searched_without_torch(answer_to: Callable[[list[str]], Answer]) -> None:
    if HAS_OTHER_TIMM:
        pytest.skip("names of another timm than that of the catalogue are its own, with torch")
    code, out, _, with_torch = answer_to(["job=models", "models.query=dino"])
    assert code == 0
    assert "vit_small_patch14_dinov2.lvd142m" in out
    assert not with_torch


CODE_IN_OPTIONS = [
    "+hydra.callbacks.a._target_=evil.Code",
    "hydra.sweeper._target_=evil.Code",
    "+hydra.job_logging.handlers.a={class:evil.Code}",
    "+hydra.hydra_logging.handlers.a={class:logging.StreamHandler,stream:'ext://evil.Code'}",
    "experiment=x",
]


@pytest.mark.parametrize("option", CODE_IN_OPTIONS)
def test_no_code_that_a_config_names_is_run(
    answer_to: Callable[[list[str]], Answer], folder_of_answers: Path, option: str
) -> None:
    """Neither code in an option nor code in an experiment of the folder."""
    code, _, err, _ = answer_to(["job=doctor", option])
    assert code == 2, err
    assert option == "experiment=x" or "refused, a config names no code to run" in err
    assert not (folder_of_answers / "was-here").exists()


def test_a_mistake_is_found_within_seconds(featx: Featx) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = featx("precison=fp32")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2
    assert "unknown key 'precison'. Nearest: precision" in done.stderr
    # Of the processor: another program at work beside the tests does not count.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 4


@pytest.mark.parametrize("module", slow_except(["featx.jobs", "featx.config"], "featx.config"))
def test_a_signal_before_the_job_begins_ends_with_one_line(module: str, tmp_path: Path) -> None:
    """Also where Python turns the exception of a handler into another one, as of a descriptor."""
    name = {"featx.jobs": "check", "featx.config": "from_composed"}[module]
    code = f"""
import os, signal, sys
import {module}
import featx.__main__

class Descriptor:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.SIGTERM)

def define(*arguments):
    type("Owner", (), {{"field": Descriptor()}})

{module}.{name} = define
sys.argv = ["featx", "data=sample"]
featx.__main__.main()
"""
    done = run_python("-c", code, code=143, cwd=tmp_path)
    assert done.stderr == "\nstopped; nothing was written.\n"


@pytest.mark.parametrize(
    ("job", "shown"),
    slow_except(
        [
            ("extract", "stopped; the same command resumes after the last complete part."),
            ("layers", "stopped."),
        ],
        ("layers", "stopped."),
    ),
)
def test_a_signal_while_a_job_imports_ends_with_one_line(
    job: str, shown: str, tmp_path: Path
) -> None:
    """PyTorch ends the process where an exception meets its import; others turn it into theirs."""
    (tmp_path / "heavy.py").write_text("""
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(10):
        pass
except BaseException as error:
    raise RuntimeError from error
""")
    code = f"""
import sys
import featx.jobs
import featx.__main__

def run(*arguments):
    import heavy

featx.jobs.run = run
sys.argv = ["featx", "job={job}"]
featx.__main__.main()
"""
    done = run_python("-c", code, code=130, cwd=tmp_path, path=[tmp_path])
    assert done.stderr == f"\n{shown}\n"


def test_code_of_a_model_that_ends_the_process_is_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a script without `if __name__ == "__main__"` that model.factory imports."""
    (tmp_path / "script.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["job=layers", "model=custom", "model.factory=script:make"]
    monkeypatch.setattr(sys, "argv", ["featx", *arguments])
    assert run_command() == 1
    place = f"line 2 of {tmp_path}/script.py"
    assert f"{place} ends the process with sys.exit(0)" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["h5py", "torch"])
def test_a_file_with_the_name_of_a_library_is_named(tmp_path: Path, name: str) -> None:
    (file := tmp_path / f"{name}.py").touch()
    done = run_python("-m", "featx", "job=status", code=2, cwd=tmp_path)
    assert done.stderr.startswith(f"{file} is imported in place of the library {name}. Rename it")


def test_a_failed_run_of_a_sweep_is_its_exit_code_before_failed_images(tmp_path: Path) -> None:
    code = """
import sys
import featx.jobs
import featx.__main__
from featx.errors import RunError

def run(config, config_yaml):
    if config.models.query == "b":
        raise RunError("no")
    return 3

featx.jobs.run = run
sys.argv = ["featx", "-m", "job=models", "models.query=a,b"]
featx.__main__.main()
"""
    done = run_python("-c", code, code=1, cwd=tmp_path)
    assert "\nno\n" in done.stderr


def test_debug_shows_the_traceback(featx: Featx, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATX_DEBUG", "1")
    done = featx("data=folder", "data.root=/no/such/folder")
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "DataError" in done.stderr


@pytest.mark.parametrize("module", ["featx", "featx.__main__"])
def test_importing_featx_is_quick_and_loads_neither_torch_nor_hydra(module: str) -> None:
    """The command imports the second one in the process that watches over the one that computes."""
    code = (
        f"import sys, time; t = time.process_time(); import {module}; "
        "print(time.process_time() - t); "
        "assert not {'torch', 'hydra', 'omegaconf', 'h5py', 'numpy'} & set(sys.modules)"
    )
    assert float(run_python("-c", code).stdout) < 0.2


def test_the_help_fits_two_screens(answer_to: Callable[[list[str]], Answer]) -> None:
    code, out, *_ = answer_to(["--help"])
    assert code == 0
    for text in ("job=extract", "layers=null", "out=runs/<data>/<model>", "--help data"):
        assert f"\n  {text} " in out
    assert len(out.splitlines()) < 80
    assert max(map(len, out.splitlines())) <= 120


def test_every_option_is_in_the_help_of_a_job() -> None:
    listed = {
        line.partition("=")[0].strip()
        for job in JOBS
        for line in job_help_text(job, job.may_read).splitlines()
        if line.startswith("  ") and "=" in line
    }
    # The name of the job is in the table of jobs, and a group without a name is no option.
    assert listed >= {option.name for option in described_options() if option.type_text} - {"job"}


@pytest.mark.parametrize(
    ("topic", "shown", "hidden"),
    [
        ("data", ["data=textiles", "data.root=null"], ["probe.seeds=null", "model.name"]),
        ("probe", ["probe.seeds=null", "job=probe --help"], ["model.weights=default"]),
        ("model.transform", ["model.transform.crop=null"], ["model.weights=default"]),
        ("data.root", ["data.root=null"], ["data.boxes=null"]),
        ("extract", ["job=extract: Extract", "data.root=null"], ["probe.seeds=null"]),
        ("all", ["job=extract", "data.root=null", "probe.seeds=null", "log.json=false"], []),
    ],
)
def test_the_help_of_a_topic(
    answer_to: Callable[[list[str]], Answer],
    topic: str,
    shown: Sequence[str],
    hidden: Sequence[str],
) -> None:
    code, out, err, _ = answer_to(["--help", topic])
    assert (code, err) == (0, "")
    assert [text for text in shown if text not in out] == []
    assert [text for text in hidden if text in out] == []


def test_all_options_are_in_the_help_of_all(answer_to: Callable[[list[str]], Answer]) -> None:
    lines = answer_to(["-h", "all"])[1].splitlines()
    listed = {line.partition("=")[0].strip() for line in lines if "=" in line}
    assert listed >= {option.name for option in described_options()}


def test_an_unknown_topic_of_the_help_is_an_error(
    answer_to: Callable[[list[str]], Answer],
) -> None:
    code, _, err, _ = answer_to(["--help", "prob"])
    assert code == 2
    assert "--help prob: no job, group or option has this name. Nearest: probe." in err


def test_the_version_is_that_of_featx(answer_to: Callable[[list[str]], Answer]) -> None:
    assert answer_to(["--version"])[:2] == (0, f"featx {package.__version__}\n")


@pytest.mark.parametrize(
    "flags",
    [
        "-h",
        pytest.param("--cfg job", marks=pytest.mark.slow),
        pytest.param("--hydra-help", marks=pytest.mark.slow),
    ],
)
def test_nobody_has_to_read_the_help_to_its_end(flags: str, tmp_path: Path) -> None:
    command = f"set -o pipefail; {sys.executable} -m featx {flags} | head -1"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("shell", ["bash", pytest.param("zsh", marks=pytest.mark.slow)])
def test_odd_paths_arrive_from_a_shell(shell: str, tmp_path: Path) -> None:
    """Typed in single quotes, which every shell takes literally."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    names = ["a b", "c=d", "e,f", "g#h", "[i]", "jé", "2024_01", "1e5", "{k}", '"l', "(m)"]
    root = "/".join(names)
    command = f"{sys.executable} -m featx job=plan 'data=./{root}' 'out=./{root}/x'"
    done = subprocess.run(
        [shell, "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"data.root={root} does not exist" in done.stderr


def test_extract_on_the_sample_images(featx: Featx, tmp_path: Path) -> None:
    """The embedded images, no extra and no terminal: plain lines, a table, a plain HDF5 file."""
    model = ("model=shufflenet_v2_x0_5", "model.weights=null", "precision=fp32")
    done = featx("data=sample", *model, "layers=[conv5,fc]", "data.limit=5", "batch_size=1")
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stderr
    out = tmp_path / "runs" / "sample" / "shufflenet_v2_x0_5"
    assert 'featx.open("runs/sample/shufflenet_v2_x0_5")' in done.stdout
    names = {"features.h5", "featx.json", "samples.h5", "failures.csv", "summary.json", ".hydra"}
    assert names <= set(os.listdir(out))
    assert not (out / "parts").exists()
    with h5py.File(out / "features.h5") as file:
        assert file["features/conv5"].shape == (5, 1024, 7, 7)
        assert file["features/fc"].shape == (5, 1000)
        assert file["features/conv5"].attrs["layer"] == "conv5"
        assert file["label"].dtype == np.int64
        assert file["status"][:].tolist() == [0] * 5
        assert file.attrs["complete"]
        assert file.attrs["model"] == "torchvision/shufflenet_v2_x0_5"
        assert len(file.attrs["weights_sha256"]) == 64
    summary = json.loads((out / "summary.json").read_text())
    assert summary["rows"] == 5
    assert summary["images_per_second"] > 0
    assert {"read", "decode", "model", "write"} <= set(summary["seconds"])
    assert len(summary["runs"]) == 1


@pytest.mark.slow
def test_multirun_makes_one_store_a_model(featx: Featx, tmp_path: Path) -> None:
    done = featx(
        "-m", "model=resnet18,mobilenet_v2", "model.weights=null", "precision=fp32",
        "data=sample", "data.limit=3",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for model in ("resnet18", "mobilenet_v2"):
        assert (tmp_path / "runs" / "sample" / model / "features.h5").is_file()
    assert set(os.listdir(tmp_path)) == {"runs"}


@pytest.mark.slow
def test_plan_writes_nothing(featx: Featx, tmp_path: Path) -> None:
    done = featx("job=plan", "job.json=true", "data=sample", *RESNET, "layers=[layer4]")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["layers"]["layer4"] == {"shape": [512, 7, 7], "dtype": "float16", "bytes": 50176}
    assert plan["disk_needed"] == plan["rows"] * 50176
    assert plan["disk_free"] > 0
    assert plan["seconds"] > 0
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_the_command_that_resumes_deletes_nothing_and_can_be_pasted() -> None:
    given = ["data=folder", "data.root=my photos", "layers=[a,b]", "overwrite=true", "+overwrite=1"]
    assert resume_command(given) == (
        "python -m featx data=folder 'data.root=my photos' 'layers=[a,b]'"
    )


@pytest.mark.slow
def test_a_compiler_says_nothing(
    featx: Featx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    model = "model=resnet18", "model.weights=null", "compile=true", "precision=bf16"
    done = featx("job=plan", "data=sample", *model)
    assert (done.returncode, done.stderr) == (0, "")


EXHAUSTED = """
import errno, os, sys
import featx.jobs
from featx.__main__ import run_command

DISK = "/net/features.h5"
NUMBERS = errno.EIO, errno.ENOTCONN, errno.EISDIR
for error in (
    MemoryError("Unable to allocate 7.45 GiB"),
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    RuntimeError("can't start new thread"),
    OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)),  # of a fork
    OSError(errno.EFBIG, os.strerror(errno.EFBIG)),  # of shared memory
    FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/torchinductor_me"),
    *(OSError(number, os.strerror(number), DISK) for number in NUMBERS),
):
    def run(*arguments):
        raise error

    featx.jobs.run = run
    sys.argv = ["featx", "job=models"]
    assert run_command() == (2 if getattr(error, "filename", None) == DISK else 1), error

error = BlockingIOError(errno.EAGAIN, "write could not complete without blocking")
try:
    run_command()
except BlockingIOError:
    pass  # a pipe is no limit of processes
else:
    raise AssertionError
"""


def test_an_exhausted_limit_or_a_failing_disk_is_named() -> None:
    done = run_python("-c", EXHAUSTED)
    found = re.findall(r"can get no more (.*?):", done.stderr)
    memory = "memory (ulimit -v)"
    assert found == [memory] * 4 + [
        "open files (ulimit -n)",
        "processes or threads (ulimit -u)",
        "processes or threads (ulimit -u)",
        "bytes in one file (ulimit -f)",
    ]
    assert "Unable to allocate 7.45 GiB. Raise the limit" in done.stderr
    assert done.stderr.count("no temporary files can be written") == 2
    assert "TMPDIR=DIR in front of the command" in done.stderr
    assert "/net/features.h5 cannot be opened: Input/output error.\n" in done.stderr
    assert "Traceback" not in done.stderr


SURROUNDINGS = """
import os, sys, tempfile
from pathlib import Path
import featx.jobs
from featx.__main__ import run_command

def no_temporary_folder(*arguments):
    os.environ["TMPDIR"] = "/nowhere"
    tempfile._candidate_tempdir_list = lambda: ["/nowhere"]
    tempfile.gettempdir()

def no_home(*arguments):
    Path("~no-such-user/photos").expanduser()

for run in no_temporary_folder, no_home:
    featx.jobs.run = run
    sys.argv = ["featx", "job=models"]
    print(run_command())
os.rmdir(os.getcwd())
print(run_command())
"""


def test_what_lacks_around_a_command_is_named(tmp_path: Path) -> None:
    """No folder for temporary files, no home folder, and no current folder."""
    command = [sys.executable, "-c", SURROUNDINGS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "2", "2"]
    temporary, home, current = done.stderr.splitlines()
    assert "['/nowhere']. Free some space" in temporary
    assert "HOME=DIR" in home
    assert "cd" in current


JOB_WITH_SIGNAL = """
import os, signal, sys, time, weakref
import featx.jobs
from featx.__main__ import run_command

def send():
    os.kill(os.getpid(), signal.SIGTERM)

def run(*arguments):
    meet_signal()
    time.sleep(2)
    return 0

featx.jobs.run = run
sys.argv = ["featx", "job=models"]
"""

IN_CALLBACK = """
class Key:
    sends = False

    def __hash__(self):
        if self.sends:
            send()
        return 1

class Value:
    pass

def meet_signal():
    values, value = weakref.WeakValueDictionary(), Value()
    values[Key()] = value
    Key.sends = True
    del value  # calls back, which looks for the key
"""

IN_FINALIZER_WITHOUT_END = """
class Waiting:
    def __del__(self):
        send()
        while True:
            time.sleep(0.01)

def meet_signal():
    Waiting()
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [IN_CALLBACK, IN_FINALIZER_WITHOUT_END], ids=["callback", "del"])
def test_a_signal_where_python_drops_exceptions_ends_the_command(code: str) -> None:
    """As in callbacks of weak references, of which h5py has one for each of its objects."""
    program = f"{JOB_WITH_SIGNAL}{code}\nprint(run_command())"
    assert run_python("-c", program).stdout == "143\n"
