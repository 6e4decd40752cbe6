"""docs/security.md: every guarantee names a test, and those that had none have one here."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import socket
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY, Stored
from tiny_model import KEYS, MODEL, extract, run_job
from torch import nn

import featx
from featx.config import (
    from_composed,
    from_keywords,
    from_saved,
    known_keys,
    model_options,
    saved_yaml,
)
from featx.errors import ConfigError
from featx.models import build_backbone
from featx.store import Manifest, load_manifest
from featx.store.pack import pack

PAGE = (REPOSITORY / "docs" / "security.md").read_text(encoding="utf-8")


def guarantees() -> list[tuple[str, str]]:
    """(guarantee, test) of every line of the page's tables."""
    lines = re.findall(
        r"^\| (?!guarantee|trusted|not trusted|assumed|-|\|)(.+) \| (`test_.+`) \|$", PAGE, re.M
    )
    return [(text, name) for text, names in lines for name in re.findall(r"`(test_\w+)`", names)]


def names_of_tests() -> set[str]:
    found: set[str] = set()
    for path in (REPOSITORY / "tests").rglob("test_*.py"):
        found.update(re.findall(r"^ *def (test_\w+)", path.read_text(encoding="utf-8"), re.M))
    return found


def test_every_guarantee_names_an_existing_test() -> None:
    named = guarantees()
    section = PAGE[PAGE.index("## Guarantees") : PAGE.index("## Not guaranteed")]
    rows = [
        line for line in section.splitlines() if line.startswith("| ") and "| test |" not in line
    ]
    assert len(rows) > 20
    assert len({text for text, _ in named}) == len(rows)
    assert {name for _, name in named} <= names_of_tests()


# Weights and models


def test_no_key_and_no_line_trusts_code_of_a_hub() -> None:
    """model=hub has its own loader, for a folder that the command names."""
    assert not [key for key in known_keys() if "hub" in key or "trust" in key]
    calls = (
        "torch.hub.load(",
        "torch.hub.list",
        "trust_remote_code",
        "load_state_dict_from_url",
        "hydra.utils",
        "eval(",
        "exec(",
    )
    # Unparsing all files takes seconds.
    with_a_word = re.compile(
        r"\b(hub|hydra|eval|exec|load_state_dict_from_url|trust_remote_code|weights_only)\b"
    )
    for path in (REPOSITORY / "featx").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if with_a_word.search(source) else ():
            if isinstance(node, ast.Call | ast.Attribute):
                text = ast.unparse(node)
                assert not text.startswith(calls), f"{path}: {text}"
            if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "weights_only"):
                assert ast.unparse(node.value) == str(node.arg == "weights_only"), path


# Configs


def test_hydra_is_new_enough() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    # Code in a config was run with Hydra 1.4, which loads configs by another method.
    assert "hydra-core>=1.3.7,<1.4" in project["dependencies"]
    version = importlib.metadata.version("hydra-core").split(".")[:3]
    assert tuple(int(number) for number in version) >= (1, 3, 7)


@pytest.mark.parametrize("where", ["", "model.", "data.", "reduce.", "job."])
def test_a_target_in_a_config_is_an_unknown_key(where: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    lines = f"{{_target_: os.mkdir, path: {mark}}}"
    text = lines if not where else f"{where[:-1]}: {lines}"
    with pytest.raises(ConfigError, match=r"_target_|path"):
        from_saved(text)
    assert not mark.exists()


def test_arguments_of_a_users_model_are_plain_values(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    args = {"poison": None, "hang": {"_target_": "os.mkdir", "path": str(mark)}}
    node = from_keywords({**KEYS, "model": {**MODEL, "args": args}})
    assert from_composed(node).model.args["hang"] == args["hang"]
    assert not mark.exists()


def test_what_a_store_keeps_of_arguments_holds_no_secret() -> None:
    def kept(url: str) -> dict[str, object]:
        args = {"api_token": "hunter2", "url": url, "scale": 2.0, "on": None}
        options = model_options(
            library="custom", factory="test_security:factory", weights=None, args=args
        )
        return dict(build_backbone(options, seed=0).args)

    found = kept("https://host/x?sig=hunter2")
    assert "hunter2" not in str(found)
    assert (found["scale"], found["on"]) == (2.0, None)
    assert "api_token" not in found
    assert found["url"] != kept("https://host/y?sig=hunter2")["url"]


def factory(**args: object) -> nn.Module:
    """What a config names."""
    return nn.Flatten()


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.mkdir [{}]", "!!python/name:os.system", "!!python/module:os"]
)
def test_yaml_tags_make_no_objects(tag: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with pytest.raises(ConfigError, match="cannot be read"):
        from_saved(f"out: {tag.format(mark)}")
    assert not mark.exists()


def test_a_signed_url_is_saved_without_its_signature() -> None:
    url = "https://host/train-{000..003}.tar?X-Amz-Signature=hunter2&X-Amz-Expires=600"
    node = from_keywords({"data": {"name": "webdataset", "root": url}})
    text = saved_yaml(node)
    assert "hunter2" not in text
    assert "https://host/train-{000..003}.tar?(redacted)" in text
    assert from_composed(node).data.root == url


FOREIGN = [
    "http://127.0.0.1:9/${oc.env:FEATX_TEST_SECRET}.tar",
    "${oc.env:FEATX_TEST_SECRET}",
    "s3://bucket/hunter.tar",
]


def write_foreign(store: Path, place: str) -> None:
    """Let the config of a store say what a stranger wants it to say, and pack it."""
    manifest, _ = load_manifest(store)
    assert manifest is not None
    run = manifest.runs[0]
    config = yaml.safe_load(run.header.config)
    config["data"] |= {"name": "webdataset", "root": place}
    header = replace(run.header, config=yaml.safe_dump(config))
    (store / "featx.json").write_bytes(Manifest((replace(run, header=header),)).to_json())
    pack(store)
    shutil.rmtree(store / "parts")


def test_a_strangers_store_reads_no_environment_and_opens_no_url(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object, **keys: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setenv("FEATX_TEST_SECRET", "hunter2")
    monkeypatch.setattr(socket.socket, "connect", refused)
    photos = stored(pack=False)
    for number, place in enumerate(FOREIGN):
        store = f"foreign{number}"
        shutil.copytree("store", store)
        write_foreign(Path(store), place)
        with pytest.raises(ConfigError, match="opens no URL and reads no environment") as refusal:
            run_job("verify", store=store, verify={"reextract_rows": 2})
        assert "hunter2" not in str(refusal.value)
        assert place in str(refusal.value)
        with pytest.raises(ConfigError, match="opens no URL and reads no environment"):
            run_job("export", store=store, export={"format": "webdataset"})
        # What the command names is what counts.
        data = {"name": "folder", "root": str(photos)}
        assert run_job("verify", store=store, verify={"reextract_rows": 2}, data=data) in (0, 1)


@pytest.mark.slow
def test_our_own_reference_to_the_environment_is_kept_as_text(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHOTOS", str(photos))
    store = extract({"name": "folder", "root": "${oc.env:PHOTOS}"})
    assert store.ok.all()
    assert "${oc.env:PHOTOS}" in str(featx.open("store").attrs["config"])
    with pytest.raises(ConfigError, match=r"data\.root=\$\{oc\.env:PHOTOS\}"):
        run_job("verify", store="store", verify={"reextract_rows": 2})
    data = {"name": "folder", "root": str(photos)}
    assert run_job("verify", store="store", verify={"reextract_rows": 2}, data=data) == 0
