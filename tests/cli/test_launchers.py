"""Launchers of Hydra that run the jobs of a multirun in other processes, as joblib and submitit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import Completed, run_featx
from tiny_model import COMMAND

TESTS = Path(__file__).parents[1]

LAUNCHER = '''
"""A launcher as hydra-joblib-launcher is, by the same library."""

import os

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import run_job, setup_globals
from hydra.plugins.launcher import Launcher
from joblib import Parallel, delayed
from omegaconf import open_dict


class PoolLauncher(Launcher):
    def setup(self, *, hydra_context, task_function, config):
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides, initial_job_idx):
        state = Singleton.get_state()
        return Parallel(n_jobs=2, backend="loky")(
            delayed(execute)(i, list(job), self.context, self.config, self.task, state)
            for i, job in enumerate(job_overrides, initial_job_idx)
        )


def execute(number, overrides, context, config, task, state):
    setup_globals()
    Singleton.set_state(state)
    # Hydra's own sweeper loads each config before; others leave that to the launcher.
    overrides += os.environ.get("FURTHER_OVERRIDES", "").split()
    own = context.config_loader.load_sweep_config(config, overrides)
    with open_dict(own):
        own.hydra.job.id, own.hydra.job.num = str(number), number
    HydraConfig.instance().set_config(own)
    return run_job(
        hydra_context=context, config=own, task_function=task,
        job_dir_key="hydra.sweep.dir", job_subdir_key="hydra.sweep.subdir",
    )


target = {"_target_": "hydra_plugins.pool.PoolLauncher"}
ConfigStore.instance().store(group="hydra/launcher", name="pool", node=target)
'''


@pytest.fixture
def folder(tmp_path: Path, extracted_once: Path) -> Path:
    """A folder with two stores and the launcher."""
    pytest.importorskip("joblib")
    for name in ("parts", "packed"):
        shutil.copytree(extracted_once / name, tmp_path / name)
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "pool.py").write_text(LAUNCHER)
    return tmp_path


def launch(folder: Path, *options: str) -> Completed:
    return run_featx(folder, "-m", "hydra/launcher=pool", *options, path=[folder, TESTS])


def test_each_run_has_a_process_of_its_own(folder: Path) -> None:
    done = launch(folder, "job=status", "store=parts,packed")
    assert done.returncode == 0, done.stderr
    assert "[1 of 2] store=parts" in done.stderr
    assert "[2 of 2] store=packed" in done.stderr
    assert done.stdout.count("21 of 21") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["job=status", "store=parts,nowhere"], 2, "store=nowhere ended with exit code 2"),
        ([*COMMAND[:-1], "data=./broken", "out=a,b"], 3, "out=a ended with exit code 3"),
        (["job=status", "store=parts", "job.jsn=true"], 2, "Nearest: job.json"),
    ],
)
def test_an_error_ends_the_command_with_its_code(
    folder: Path, options: list[str], code: int, message: str
) -> None:
    (folder / "broken").mkdir()
    (folder / "broken" / "a.jpg").write_bytes(b"no image")
    done = launch(folder, *options)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_no_code_that_a_config_names_is_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FURTHER_OVERRIDES", "+hydra.callbacks.own._target_=evil.Code")
    done = launch(folder, "job=status", "store=parts,packed")
    assert done.returncode == 2, done.stderr
    assert "refused, a config names no code to run" in done.stderr


@pytest.mark.slow
def test_choices_of_own_files_are_found(folder: Path) -> None:
    experiments = folder / "mine" / "experiment"
    experiments.mkdir(parents=True)
    for name in ("parts", "packed"):
        (experiments / f"{name}.yaml").write_text(f"job: status\nstore: {name}\n")
    done = launch(folder, "--config-dir", "mine", "experiment=glob([pa*])")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("21 of 21") == 2
