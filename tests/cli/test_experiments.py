"""experiment=NAME: experiments of featx and of users, with the checks of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from featx.base import shipped_folder
from featx.cli import explain_error, read_command_line, register_with_hydra
from featx.config import Config, from_composed
from featx.errors import ConfigError
from featx.jobs import JOBS, check

pytestmark = pytest.mark.usefixtures("in_tmp_path")

MINE = """\
model: {name: resnet18, weights: 2024_01}
data: ./photos
layers: [1.10, layer4]
reduce: {name: gem, p: 4}
out: 1e5
seed: 3
"""


def typed(*argv: str) -> Config:
    """The config of a command as it is typed."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    line = read_command_line(argv)
    register_with_hydra(JOBS, line.config_dirs)
    overrides = [word for word in line.arguments if not word.startswith("-")]
    with hydra.initialize_config_dir(str(shipped_folder("conf")), version_base="1.3"):
        try:
            config = from_composed(hydra.compose("config", overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise explain_error(error) from error
    check(config, line.given)
    return config


def write(text: str, folder: str = "conf", name: str = "my_run") -> Path:
    path = Path(folder, "experiment", f"{name}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.slow
def test_experiments_of_featx() -> None:
    names = [path.stem for path in shipped_folder("conf").glob("experiment/*.yaml")]
    found = {name: typed(f"experiment={name}") for name in names}
    plain = typed()
    assert all(config != plain for config in found.values())
    exact = found["exact"]
    assert exact == typed("+experiment=exact")  # as Hydra's documentation writes it
    assert (exact.decode, exact.precision, exact.dtype) == ("reference", "fp32", "float32")
    assert found["compare_layers"].layers == {"stages": "avg", "embedding": "none"}
    assert found["web_images"].allowed_failures(40) == 40


@pytest.mark.parametrize("folder", ["conf", "elsewhere"])
def test_an_experiment_of_ones_own_reads_as_the_command_line(folder: str) -> None:
    write(MINE, folder)
    where = () if folder == "conf" else ("--config-dir", folder)
    found = typed(*where, "experiment=my_run")
    assert (found.model.name, found.model.weights) == ("resnet18", "2024_01")
    assert (found.data.name, found.data.root) == ("folder", "./photos")
    assert (found.layers, found.out, found.seed) == (["1.10", "layer4"], "1e5", 3)
    assert (found.reduce.name, found.reduce.p) == ("gem", 4)
    other = typed(*where, "experiment=my_run", "model=resnet34", "reduce.p=5", "seed=5")
    assert (other.model.name, other.reduce.p, other.seed) == ("resnet34", 5, 5)
    assert other.data.root == "./photos"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("{root: photos}", ("folder", "photos")),
        ("{root: rows.csv, limit: 3}", ("table", "rows.csv")),
    ],
)
def test_data_root_without_a_source_means_the_source_of_its_path(
    data: str, expected: tuple[str, str]
) -> None:
    write(f"data: {data}\n")
    found, as_typed = typed("experiment=my_run").data, typed(f"data={data}").data
    assert (found.name, found.root) == (as_typed.name, as_typed.root) == expected
    other = typed("experiment=my_run", "data=webdataset").data
    assert (other.name, other.root) == ("webdataset", expected[1])


@pytest.mark.slow
def test_ones_own_experiment_precedes_that_of_featx_and_config_dir_both() -> None:
    write("seed: 1\n", name="exact")
    assert typed("experiment=exact").seed == 1
    write("seed: 2\n", "elsewhere", name="exact")
    assert typed("--config-dir", "elsewhere", "experiment=exact").seed == 2
    write("model: resnet18\n", name="2024_01")
    assert typed("experiment=2024_01").model.name == "resnet18"


def test_an_experiment_of_hydras_form() -> None:
    write(
        "# @package _global_\ndefaults:\n  - override /model: resnet18\n  - override /reduce: gem\n"
        "reduce: {p: 4}\n"
    )
    found = typed("experiment=my_run")
    assert (found.model.name, found.reduce.name, found.reduce.p) == ("resnet18", "gem", 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("precison: fp32\n", "unknown key 'precison'.*precision"),
        ("precision: fp31\n", "precision=fp31: expected one of"),
        ("model.weights: null\n", "written as weights below model"),
        ("reduce: {name: avg, p: 4}\n", r"reduce\.p"),
        ("data: textilles\n", "data=textilles: expected one of"),
        ("out: [a\n", r"experiment/my_run\.yaml is no YAML"),
    ],
)
def test_an_experiment_takes_the_checks_of_the_command_line(text: str, message: str) -> None:
    write(text)
    with pytest.raises(ConfigError, match=message):
        typed("experiment=my_run")


def test_an_unknown_experiment_says_where_experiments_are() -> None:
    write(MINE)
    with pytest.raises(ConfigError, match=r"my_rum: expected one of .*exact, my_run.* Nearest: "):
        typed("experiment=my_rum")
    with pytest.raises(ConfigError, match=r"conf/experiment/my_rum\.yaml"):
        typed("experiment=my_rum")
    with pytest.raises(ConfigError, match="names 2 of which a run takes one"):
        typed("experiment=exact,web_images")


def test_several_experiments_are_several_runs() -> None:
    line = read_command_line(["-m", "experiment=exact,web_images", "seed=1"])
    assert 'experiment="exact","web_images"' in line.arguments
    assert line.has_files
    with pytest.raises(ConfigError, match="--cfg and -m exclude each other"):
        read_command_line(["-m", "experiment=exact,web_images", "--cfg", "job"])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.input_size=800", "[height, width] in pixels (16384 at most), or null"),
        ("model.input_size=[a,b]", "[height, width] in pixels (16384 at most), or null"),
        ("model.args=3", "a mapping, such as {depth: 20}"),
        ("probe.seeds=[1]", "2 to 10000, as `seed` chooses the split of one, or null"),
        ("probe.l2=abc", "a number of at least 0, or null"),
        ("refresh=maybe", "auto, or true or false"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_type_to_give(
    override: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        typed("model=resnet18", override)
    assert str(refusal.value) == f"{override}: expected {expected}."
