"""Width of what each job prints for long names of layers and long paths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_model import MODEL, write_images
from torch import nn
from zoo import TwoStageConvNet

from featx import jobs
from featx.base import WIDTH
from featx.config import from_composed, from_keywords, saved_yaml

pytestmark = pytest.mark.usefixtures("in_tmp_path")

PHOTOS = "Photographs of the collection/2026-11 second delivery"
STORE = "runs/second delivery/vision_model_large_patch14_336"
DEEP = "vision_tower.encoder.layers.encoder_layer_11.attention"


def long_names() -> nn.Module:
    """A factory: a tiny model within modules of long names."""
    *outer, last = DEEP.split(".")
    module: nn.Module = nn.Sequential()
    module.add_module(last, TwoStageConvNet())
    for name in reversed(outer):
        inner, module = module, nn.Sequential()
        module.add_module(name, inner)
    return module


OF_MODEL: dict[str, Any] = {
    "model": {**MODEL, "name": "long", "factory": "test_output_width:long_names"},
    "data": PHOTOS,
}
LAYERS = {f"{DEEP}.conv": "avg", f"{DEEP}.head": "none"}
FIXED = {"precision": "fp32", "compile": False, "batch_size": 4, "part_rows": 4}
RUN = {**OF_MODEL, **FIXED, "layers": LAYERS, "out": STORE}
CODE = {"model": {key: OF_MODEL["model"][key] for key in ("name", "library", "factory")}}

ONE = {"store": STORE, "layers": f"{DEEP}.head"}
OF_MAPS = {"layers": f"{DEEP}.deep", "attribute": {"per_class": 1}}

CALLS: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any]], ...] = (
    ("plan", RUN, {}),
    ("layers", OF_MODEL, {}),
    ("layers", {**OF_MODEL, "layers": ["**"]}, {}),
    ("layers", {**OF_MODEL, "layers": ["**"]}, {"show": "cost"}),
    ("layers", {**OF_MODEL, "layers": ["**"]}, {"show": "values"}),
    ("extract", RUN, {}),
    ("extract", RUN, {}),
    ("stats", {**RUN, "out": f"{STORE}/statistics"}, {}),
    ("probe", {"store": STORE, "probe": {"method": ["linear", "knn", "ridge"]}}, {"show": "all"}),
    ("probe", {"store": STORE, "probe": {"seeds": 3, "bootstrap": 100}}, {"show": "all"}),
    ("probe", {"store": STORE, "probe": {"folds": 5, "shots": [1, 2]}}, {}),
    ("predict", {"store": STORE, "data": PHOTOS, "out": f"{STORE}/new", **CODE}, {}),
    ("neighbors", {**ONE, "neighbors": {"key": "cat/000.png"}}, {}),
    ("neighbors", ONE, {}),
    ("duplicates", ONE, {}),
    ("cka", {"store": STORE}, {}),
    ("distance", {"store": f"[{STORE},{STORE}]"}, {}),
    ("status", {"store": STORE}, {}),
    ("verify", {"store": STORE, **CODE}, {}),
    ("report", {"store": STORE}, {}),
    ("attribute", {**OF_MODEL, **FIXED, **OF_MAPS, "out": f"{STORE}-maps"}, {}),
)
"""Job, options, and options of the group `job`; all but job=export, which prints Python lines."""


@pytest.mark.slow
def test_no_line_is_wider_than_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(tmp_path / PHOTOS, 16)
    for job, keys, of_job in CALLS:
        node = from_keywords(keys)
        node["job"].update({"name": job, **of_job})
        config = from_composed(node)
        jobs.check(config)
        jobs.run(config, saved_yaml(node))
        printed = "".join(capsys.readouterr())
        assert [line for line in printed.splitlines() if len(line) > WIDTH] == [], job
        assert printed.count("\n") > 2
