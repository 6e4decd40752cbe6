"""Jobs as commands of their own, in processes that have imported nothing; their surroundings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import run_python

RUN = "data=sample out=store codec=zstd 'layers={blocks.0:avg,embedding:none}' precision=fp32"


def command(folder: Path, arguments: str, redirect: str = "", **env: str) -> tuple[int, str, str]:
    """Run a command in a shell; return its exit code, stdout and stderr."""
    done = subprocess.run(
        ["bash", "-c", f"exec {sys.executable} -m featx {arguments} {redirect}"],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirect", "code"),
    [
        (">&-", 0),
        ("2>&-", 0),
        ("<&-", 0),
        (">&- 2>&- <&-", 0),
        (">/dev/full", 1),
        ("2>/dev/full", 0),  # the log is lost, the run is not
    ],
)
def test_closed_and_full_streams(tmp_path: Path, redirect: str, code: int) -> None:
    found, _, errors = command(tmp_path, RUN, redirect)
    assert found == code, errors
    assert "Traceback" not in errors
    assert (redirect != ">/dev/full") or "stdout cannot be written" in errors
    assert command(tmp_path, "job=verify store=store")[0] == 0


SURROUNDINGS = """
import locale, logging, os, signal, sys, threading, warnings
import numpy, sympy, torch, featx  # torch imports sympy, which adds a filter of warnings

def state():
    # torch itself sets this one when its compiler is imported.
    variables = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    return [str(each) for each in (
        sorted(variables.items()), os.getcwd(), sys.path, sys.argv, os.umask(os.umask(0)),
        [signal.getsignal(number) for number in signal.valid_signals()],
        warnings.filters, logging.root.handlers, logging.root.level, logging.root.manager.disable,
        locale.setlocale(locale.LC_ALL), torch.get_default_dtype(), torch.get_num_threads(),
        torch.is_grad_enabled(), torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        torch.initial_seed(), torch.random.get_rng_state().sum(), numpy.random.get_state()[1][:9],
        sys.stdout, sys.stderr, sys.excepthook, torch.nn.Module.load_state_dict,
    )]

calls = {
    "extract": lambda: featx.extract(data="sample", out="store", precision="fp32", verbose=False),
    "open": lambda: featx.open("store")["embedding"][:],
}
featx.open, featx.extract  # these are imported when first used
for name, call in calls.items():
    before = state()
    call()
    print([pair for pair in zip(before, state()) if pair[0] != pair[1]])
"""


@pytest.mark.slow
def test_a_process_is_as_before_after_each_public_call(tmp_path: Path) -> None:
    done = run_python("-c", SURROUNDINGS, cwd=tmp_path)
    assert done.stdout.splitlines()[-2:] == ["[]"] * 2
