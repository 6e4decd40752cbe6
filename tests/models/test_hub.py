"""model=hub: functions of a hubconf.py, against torch.hub.load."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import extract, run_job

from featx.config import TransformConfig, model_options
from featx.errors import ConfigError, ModelError, StoreMismatchError, WeightsError
from featx.jobs import base as jobs
from featx.models import Backbone, build_backbone

HUBCONF = '''
dependencies = ["torch"]
from featx_test_nets.small import SmallNet
from featx_test_width import WIDTH

def small(pretrained=False, scale=1.0, half=False):
    """A small network."""
    import torch
    print("loading")
    net = SmallNet(WIDTH, scale)
    if pretrained:
        numbers = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for x in list(net.parameters())[2 if half else 0 :]:
                x.copy_(torch.randn(x.shape, generator=numbers) / 10)
    return net

def not_a_model():
    return "text"

def asks():
    return input("Do you trust this repository (y/N)?")

def imports_what_is_missing():
    import yaml_of_nobody

_private = small
'''
NETS = """
from torch import nn

class SmallNet(nn.Module):
    def __init__(self, width, scale):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 8, stride=8)
        self.head = nn.Linear(width, 4)
        self.scale = scale

    def forward(self, x):
        return self.head(self.stem(x).relu().mean((2, 3))) * self.scale
"""


def write_clone(folder: Path, width: int = 6) -> Path:
    """A checkout as `git clone` leaves it."""
    files = {
        "hubconf.py": HUBCONF,
        "featx_test_width.py": f"WIDTH = {width}\n",
        "featx_test_nets/__init__.py": "",
        "featx_test_nets/small.py": NETS,
        ".git/hooks/x.py": "",
        "README.md": "A network.",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder `clone` with a hubconf.py; its parent is the current folder."""
    monkeypatch.chdir(tmp_path)
    return write_clone(tmp_path / "clone")


TRAINED = {"pretrained": True}


def built(folder: Path | str, entry: str = "small", seed: int = 0, **more: Any) -> Backbone:
    options = {"args": TRAINED, "transform": TransformConfig(resize=32, crop=32), **more}
    config = model_options(library="hub", name=str(folder), factory=entry, **options)
    return build_backbone(config, seed)


RUN = {
    "model": {
        "library": "hub", "name": "clone", "factory": "small", "args": TRAINED,
        "transform": {"resize": 32, "crop": 32},
    },
    "layers": ["embedding"],
}  # fmt: skip
"""Options of a run with the network of the checkout."""


def test_the_model_is_that_of_torch_hub(clone: Path) -> None:
    backbone = built("clone", args={"pretrained": True, "scale": 2.0})
    with without_modules_of_tests():
        expected = torch.hub.load(str(clone), "small", source="local", pretrained=True, scale=2.0)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(backbone.module(x), expected.eval()(x))
    assert backbone.name == "hub/clone:small"
    assert backbone.args == {"pretrained": True, "scale": 2.0}
    assert backbone.weights == "as small loads them"


@contextlib.contextmanager
def without_modules_of_tests() -> Iterator[None]:
    """Forget what torch.hub leaves in sys.modules."""
    yield
    for name in [name for name in sys.modules if name.startswith("featx_test_")]:
        del sys.modules[name]


def test_two_checkouts_in_one_process_do_not_mix(clone: Path, tmp_path: Path) -> None:
    write_clone(tmp_path / "other", width=10)
    before, path = set(sys.modules), list(sys.path)
    assert built("clone").module.stem.weight.shape[0] == 6
    assert built("other").module.stem.weight.shape[0] == 10
    assert built("clone").module.stem.weight.shape[0] == 6
    assert not {name for name in set(sys.modules) - before if "featx_test" in name}
    assert "hubconf" not in sys.modules
    assert sys.path == path
    assert not list(clone.rglob("__pycache__"))


def test_an_edited_checkout_is_seen_and_has_another_digest(clone: Path) -> None:
    first = built("clone")
    (clone / "featx_test_width.py").write_text("WIDTH = 7\n")  # of the same size and second
    second = built("clone")
    assert second.module.stem.weight.shape[0] == 7
    assert first.provenance["code_sha256"] != second.provenance["code_sha256"]
    (clone / "README.md").write_text("changed")
    (clone / ".git" / "hooks" / "x.py").write_text("changed")
    assert built("clone").provenance == second.provenance


def test_new_images_after_an_edit_are_refused(clone: Path, photos: Path) -> None:
    extract(photos, **RUN)
    fingerprint = json.loads(Path("store/featx.json").read_text())["fingerprint"]
    assert (fingerprint["model.entry"], fingerprint["model.args"]) == ("small", TRAINED)
    code = {key: RUN["model"][key] for key in ("library", "name", "factory")}
    run_job("probe", store="store")
    image = str(next(photos.glob("*/*.png")))
    jobs_of_new_images: dict[str, dict[str, Any]] = {
        "neighbors": {"store": "store", "neighbors": {"image": image}},
        "predict": {"store": "store", "data": photos},
    }
    for job, options in jobs_of_new_images.items():
        assert run_job(job, model=code, **options) == 0
    source = NETS.replace(".relu()", ".sigmoid()")  # a model with the same weights
    (clone / "featx_test_nets" / "small.py").write_text(source)
    for job, options in jobs_of_new_images.items():
        with pytest.raises(StoreMismatchError, match=r"model\.code_sha256: was"):
            run_job(job, model=code, **options)


def test_a_store_does_not_lead_to_a_checkout(
    clone: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extract(photos, **RUN)
    capsys.readouterr()
    asked = {"store": "store", "verify": {"reextract_rows": 2}}
    other = {"library": "hub", "name": "clone", "factory": "asks"}
    for values in ({}, {"model": other}):
        config, text = jobs.config_of_call("verify", {**asked, **values})
        with pytest.raises(ConfigError, match=r"add model=hub model\.name=clone"):
            jobs.run(config, text)
    assert "loading" not in capsys.readouterr().err


def test_weights_are_what_the_option_promises(clone: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"4 parameters \(stem\.weight.*random.*default promises"):
        built("clone", args={})
    with pytest.raises(ModelError, match=r"leaves 2 parameters \(stem\.weight, stem\.bias\)"):
        built("clone", args={"pretrained": True, "half": True})
    with pytest.raises(ModelError, match=r"model\.weights=null: small.*loads trained weights"):
        built("clone", weights=None)
    with pytest.raises(ModelError, match=r"model\.init=reset: small.*loads trained weights"):
        built("clone", init="reset")
    random = built("clone", args={}, weights=None, seed=3)
    assert random.weights == "random (seed 3)"
    assert random.weights_sha256 == built("clone", args={}, weights=None, seed=3).weights_sha256
    assert random.weights_sha256 != built("clone", args={}, weights=None, seed=4).weights_sha256
    state = {f"model.{name}": x for name, x in built("clone").module.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "w.pth")
    loaded = built("clone", args={}, weights=str(tmp_path / "w.pth"))
    assert loaded.weights_sha256 == built("clone").weights_sha256
    assert loaded.checkpoint["prefix"] == "state_dict/model."
    reset = built("clone", args={}, weights=str(tmp_path / "w.pth"), init="reset")
    assert torch.equal(
        reset.module.stem.weight, built("clone", args={}, weights=None).module.stem.weight
    )
    torch.save({"other": torch.zeros(3)}, tmp_path / "o.pth")
    with pytest.raises(WeightsError):
        built("clone", args={}, weights=str(tmp_path / "o.pth"))


REFUSED = {
    "smal": r"no function 'smal'\. Nearest: small",
    "_private": "no function '_private'",
    "not_a_model": r"returned a str, expected a torch\.nn\.Module",
    "asks": "fails with EOFError",
    "imports_what_is_missing": "No module named 'yaml_of_nobody'.*pip install yaml_of_nobody",
}


@pytest.mark.parametrize("entry", REFUSED)
def test_entries_that_give_no_model_are_refused(entry: str, clone: Path) -> None:
    with pytest.raises(ModelError, match=REFUSED[entry]):
        built("clone", entry=entry, args={})


def test_arguments_that_do_not_fit_are_refused(clone: Path) -> None:
    with pytest.raises(ModelError, match=r"unexpected keyword argument 'pretraind'.*It takes \("):
        built("clone", args={"pretraind": True})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dependencies = ['torch', 'cv2x', 'skimagex.io']\nimport cv2x",
         r"No module named 'cv2x'\. To install: pip install cv2x"),
        ("dependencies = ['torch', 'cv2x', 'skimagex.io']",
         r"needs cv2x, skimagex\.io .*are not installed\. To install: pip install cv2x"),
        ("dependencies = ['yaml_', 'torch']", r"needs yaml_ .*is not installed"),
        ("def small(:", "fails with SyntaxError"),
        ("raise OSError('a file is missing')", "fails with OSError: a file is missing"),
    ],
)  # fmt: skip
def test_a_hubconf_that_cannot_run_ends_in_one_message(
    text: str, message: str, clone: Path
) -> None:
    (clone / "hubconf.py").write_text(text)
    with pytest.raises(ModelError, match=message):
        built("clone")


def test_names_that_are_no_checkout_are_refused(clone: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    cases = {
        "empty": r"has no hubconf\.py",
        "nothing": r"no such folder.*Expected a clone with a hubconf\.py\.$",
        "owner/repo": r"git clone https://github\.com/owner/repo clone; then model\.name=clone",
        "owner/repo@main": r"git clone .*/repo clone && git -C clone checkout main; then model",
        "owner/repo:v1.0": r"featx fetches no code: .* && git -C clone checkout v1\.0; then model",
        f"owner/repo@{'a' * 40}": f"git -C clone checkout {'a' * 40}; then model",
    }
    for name, message in cases.items():
        with pytest.raises(ModelError, match=message):
            built(name)
    for values in ({"name": "clone"}, {"factory": "small"}):
        with pytest.raises(ConfigError, match=r"model=hub needs model\.name=FOLDER"):
            model_options(**{"library": "hub", "name": "", **values})


def test_a_module_that_another_one_hides_is_refused(clone: Path) -> None:
    (clone / "torchvision").mkdir()
    (clone / "torchvision" / "__init__.py").write_text("")
    import torchvision

    with pytest.raises(ModelError, match="its module torchvision cannot be imported"):
        built("clone")
    assert sys.modules["torchvision"] is torchvision


def test_an_environment_inside_of_a_checkout_is_no_part_of_it(clone: Path) -> None:
    before = built("clone").provenance["code_sha256"]
    for folder in (".venv/lib/site-packages", "env/lib/site-packages"):
        package = clone / folder / "featx_test_installed.py"
        package.parent.mkdir(parents=True)
        package.write_text("VALUE = 1")
        assert built("clone").provenance["code_sha256"] == before
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(package.parent))
            text = (clone / "hubconf.py").read_text()
            (clone / "hubconf.py").write_text(text + "import featx_test_installed\n")
            built("clone")
            assert sys.modules.pop("featx_test_installed").VALUE == 1
            (clone / "hubconf.py").write_text(text)


def test_parameters_without_values_are_refused(clone: Path) -> None:
    text = "from torch import nn\ndef lazy():\n    return nn.Sequential(nn.LazyLinear(3))\n"
    text += "def meta():\n    return nn.Linear(3, 3, device='meta')\n"
    (clone / "hubconf.py").write_text(text)
    for weights in ("default", None):
        with pytest.raises(ModelError, match="have no values yet"):
            built("clone", "lazy", args={}, weights=weights)
        with pytest.raises(ModelError, match="are on the meta device"):
            built("clone", "meta", args={}, weights=weights)


def test_what_the_code_prints_stays_out_of_the_result(
    clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built("clone")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "loading" in printed.err
    assert f"running small of {clone / 'hubconf.py'}" in printed.err
