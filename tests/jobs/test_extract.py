"""featx.extract in this process, on tiny models of our own: what can go wrong with a row."""

from __future__ import annotations

import json
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_model import MODEL as TINY
from tiny_model import run_job
from zoo import TwoStageConvNet

import featx
from featx.errors import NonFiniteError, RunError

pytestmark = pytest.mark.usefixtures("in_tmp_path")


MODEL = {**TINY, "transform": {"resize": 64, "crop": 64}}


def scaled(scale: float) -> TwoStageConvNet:
    """A factory: every parameter of the tiny model multiplied."""
    model = TwoStageConvNet()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


class Fickle(TwoStageConvNet):
    """Skips a layer from its eighth call on."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.deep(self.conv(x))
        if self.calls < 8:
            y = self.pool(y)
        return self.head(y.mean((2, 3)))


def extract(data: object, **keys: object) -> featx.FeatureStore:
    settings = {"precision": "fp32", "batch_size": 8, "out": "store"}
    return featx.extract(**{"model": MODEL, "layers": ["pool"], **settings, "data": data, **keys})


def test_rows_labels_and_keys_belong_together_and_no_thread_stays(photo_folder: Path) -> None:
    before = set(threading.enumerate())
    store = extract(photo_folder)
    assert store.complete
    assert list(store.keys) == sorted(store.keys)
    assert store.classes == ("cat", "dog")
    folders = [key.split("/")[0] if "/" in key else None for key in store.keys]
    expected = [store.classes.index(name) if name else -1 for name in folders]
    assert store.labels.tolist() == expected
    alone = extract(photo_folder / "dog", out="alone", batch_size=1)
    for i, key in enumerate(alone.keys):
        row = store.row(f"dog/{key}")
        np.testing.assert_allclose(store["pool"][row], alone["pool"][i], rtol=2e-3, atol=1e-4)
    assert store.attrs["weights_sha256"] == alone.attrs["weights_sha256"]
    assert not set(threading.enumerate()) - before


@pytest.mark.slow
def test_a_notebook_gets_the_store_and_no_text_unless_it_asks(
    photo_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    extract(photo_folder)
    text = capfd.readouterr()
    assert "precision  fp32" in text.err
    assert "Done: " in text.out
    extract(photo_folder, verbose=False)
    assert capfd.readouterr() == ("", "")

    class Kernel:
        """The part of a notebook's kernel by which it is recognised."""

        config = {"IPKernelApp": {}}  # noqa: RUF012

    kernel = types.SimpleNamespace(get_ipython=Kernel)
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    for verbose in (None, True):
        extract(photo_folder, verbose=verbose)
        text = capfd.readouterr()
        assert ("precision  fp32" in text.out) is ("Done: " in text.out) is bool(verbose)


def test_a_value_too_large_for_float16_stops_the_run(photo_folder: Path) -> None:
    model = {**MODEL, "factory": "test_extract:scaled", "args": {"scale": 1e4}}
    with pytest.raises(NonFiniteError, match=r"layer pool, row 0 \(.*over 65504.*dtype=float32"):
        extract(photo_folder, model=model)
    assert extract(photo_folder, model=model, dtype="float32", out="wide").ok.all()


def test_recorded_non_finite_rows_are_failures(photo_folder: Path) -> None:
    clean = extract(photo_folder, out="clean", layers=["embedding"], dtype="float32")
    means = clean["embedding"][:].mean(1)
    between = float(np.sort(means)[10:12].mean())
    poisoned = means > between
    keys = {"model": {**MODEL, "args": {"poison": between}}, "layers": ["embedding"]}
    store = extract(photo_folder, nonfinite="record", dtype="float32", **keys)
    assert (~store.ok).tolist() == poisoned.tolist()
    assert {f["status"] for f in store.failures} == {"non finite"}
    assert np.isnan(store["embedding"][poisoned]).all()
    kept = store["embedding"][~poisoned]
    np.testing.assert_allclose(kept, clean["embedding"][~poisoned], rtol=1e-6)
    with pytest.raises(NonFiniteError, match=r"nan in fp32\..* To mark such rows and continue"):
        extract(photo_folder, out="strict", dtype="float32", **keys)


def test_rows_too_small_for_float16_are_reported(
    photo_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """float16 makes zeros of them without a word; they are counted and named."""
    model = {**MODEL, "factory": "test_extract:scaled", "args": {"scale": 1e-9}}
    keys = {"model": model, "layers": ["pool"]}
    store = extract(photo_folder, **keys)
    assert (store["pool"][:] == 0).all()
    assert "warning: 21 rows of pool have no value above 6.1e-5" in capfd.readouterr().err
    assert json.loads((tmp_path / "store" / "summary.json").read_text())["underflow_rows"] == {
        "pool": 21
    }
    assert extract(photo_folder, out="wide", dtype="float32", **keys)["pool"][:].any(axis=1).all()
    assert "warning" not in capfd.readouterr().err


def test_every_image_failing_is_not_success_and_comes_with_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad").mkdir()
    for name in ("x.jpg", "y.png"):
        (tmp_path / "bad" / name).write_bytes(b"no")
    store = extract("bad", max_failures=1.0, verbose=False)
    assert not store.ok.any()
    warned = "warning: all images failed (2), so no row of the store has features"
    assert warned in capfd.readouterr().err
    keys = {"model": MODEL, "data": "bad", "layers": ["pool"], "max_failures": 5, "out": "s"}
    assert run_job("extract", **keys) == 3


def test_a_model_that_changes_its_mind_is_stopped(photo_folder: Path) -> None:
    model = {**MODEL, "factory": "test_extract:Fickle"}
    with pytest.raises(RunError, match=r"pool.* did not fire"):
        extract(photo_folder, model=model, batch_size=1)
