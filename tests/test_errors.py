"""Errors as a user sees them: a message first in a notebook, the usual traceback in a script."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
from conftest import run_python

import featx
from featx.errors import ConfigError, FeatxError, ObjectStoreError, counted, nearest


def raised() -> FeatxError:
    with pytest.raises(ConfigError) as caught:
        featx.extract(model="resnet18", data="nowhere", precision="fp12")
    return caught.value


def test_a_notebook_shows_the_message_and_the_users_own_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FEATX_DEBUG", raising=False)
    error = raised()
    lines = error._render_traceback_()
    assert lines[0] == f"ConfigError: {error}"
    text = "\n".join(lines)
    assert text.count("File ") == 1
    assert 'featx.extract(model="resnet18"' in text
    monkeypatch.setenv("FEATX_DEBUG", "1")
    whole = error._render_traceback_()
    assert whole[0] == lines[0]
    assert "schema.py" in "\n".join(whole)


def test_errors_without_a_traceback_and_of_other_modules() -> None:
    assert ConfigError("bad")._render_traceback_()[0] == "ConfigError: bad"
    assert ObjectStoreError(2, "gone", "s3://a")._render_traceback_()[0] == (
        "ObjectStoreError: s3://a: gone."
    )
    assert issubclass(featx.gradients.GradientAlarm, FeatxError)


def test_a_script_has_the_usual_traceback() -> None:
    error = raised()
    assert "Traceback (most recent call last)" in "".join(traceback.format_exception(error))
    code = "import featx; featx.extract(model='resnet18', data='nowhere', precision='fp12')"
    printed = run_python("-c", code, code=1).stderr
    assert printed.startswith("Traceback")
    assert printed.splitlines()[-1].startswith("featx.errors.ConfigError: ")


def test_ipython_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    """By IPython's own machinery, where it is installed."""
    shells: Any = pytest.importorskip("IPython.core.interactiveshell")
    shell = shells.InteractiveShell.instance()
    try:
        shell.run_cell("import featx\nfeatx.extract(model='resnet18', data='x', precision='fp12')")
    finally:
        shells.InteractiveShell.clear_instance()
    shown = capsys.readouterr().out
    assert shown.lstrip().startswith("ConfigError: ")
    assert "Traceback" not in shown
    assert "featx/config/schema.py" not in shown


def test_a_number_and_its_noun() -> None:
    assert [counted(n, "row") for n in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    assert counted(1, "image is", "images are") == "1 image is"
    assert counted(3, "image is", "images are") == "3 images are"


OPTIONS = [
    *("fold_batchnorm", "layers", "device", "target", "batch_size", "executor.workers"),
    *("attribute.method", "attribute.steps", "attribute.feature_map_layer", "data.root"),
    *("data.image_root", "probe.test_share", "probe.folds", "neighbors.key", "cka.rows"),
    *("verify.repair", "verify.reextract_rows", "model.factory", "model.weights", "model.args"),
    *("stats.reference", "stats.covariance", "reduce.k", "reduce.size"),
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fold", "fold_batchnorm, probe.folds"),  # a word of a longer name
        ("attribute.maps", "attribute.feature_map_layer"),  # its singular
        ("data.images", "data.image_root"),
        ("probe.test", "probe.test_share"),
        ("workers", "executor.workers"),  # the same word in a group
        ("similar.key", "neighbors.key"),  # in another group
        ("layrs", "layers"),  # a typo
        ("data.rot", "data.root"),  # a typo in a group, whose other names share the prefix
        ("reduce.kk", "reduce.k"),
        ("k", "reduce.k"),  # a letter
        ("verify.sample", "verify.repair, verify.reextract_rows"),  # nothing alike: the group
        ("stats.rows", "stats.reference, stats.covariance, cka.rows, verify.reextract_rows"),
        ("model.target", "model.factory, model.weights, model.args, target"),
    ],
)
def test_a_hint_finds_typos_words_and_groups(name: str, expected: str) -> None:
    assert nearest(name, OPTIONS) == f" Nearest: {expected}."


def test_a_hint_names_at_most_count_names() -> None:
    assert nearest("model.target", OPTIONS, count=2) == " Nearest: model.factory, model.weights."
    assert nearest("zzzzzz", OPTIONS) == ""
