"""The examples of docs/downstream.md run as they stand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_store import MadeRun, make_run

PAGE = Path(__file__).parents[1] / "docs" / "downstream.md"

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def write_store(meaning: bool) -> MadeRun:
    """120 rows of two classes that lie apart, or do not; some failed, far away from all."""
    failed = (5, 50, 51)
    run = make_run(120, 32, {"avgpool": (8,)}, dtype="float16", failed=failed)
    labels = np.arange(120, dtype=np.int64) % 2
    features = run.features["avgpool"].copy()
    if meaning:
        features[:, 2] += (6 * labels - 3).astype(np.float16)
    features[:, 5] += 300  # a feature of another size
    listing = replace(run.listing, labels=labels)
    run = replace(run, listing=listing, features={"avgpool": features})
    run.write(Path("runs/photos"), packed=True)
    return run


def snippet(number: int) -> str:
    found = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(found) == 2
    return str(found[number])


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("meaning", [True, False])
def test_the_examples_learn_what_there_is_to_learn(number: int, meaning: bool) -> None:
    write_store(meaning)
    output: list[str] = []
    found: dict[str, object] = {"print": output.append}
    exec(snippet(number), found)
    (line,) = output
    accuracy = float(line.split()[1])
    assert accuracy > 0.95 if meaning else 0.2 < accuracy < 0.8
    if number == 0:
        assert "on 23 rows" in line, "117 rows are ok, a fifth of them is held out"


@pytest.mark.slow
def test_the_loader_of_the_example_gives_every_row_once() -> None:
    write_store(True)
    found: dict[str, object] = {"print": lambda line: None}
    exec(snippet(0).replace("range(10)", "range(1)"), found)
    rows = [
        row
        for features, _ in found["loader"]
        for row in features[:, 0].tolist()  # type: ignore[attr-defined]
    ]
    assert len(rows) == len(found["train"]) == 94  # type: ignore[arg-type]
    kept = found["dataset"].store["avgpool"][found["dataset"].rows[found["train"].indices]]  # type: ignore[attr-defined]
    assert sorted(rows) == sorted(kept[:, 0].tolist())
