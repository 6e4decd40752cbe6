"""The snippets of docs/looking-inside.md run as they stand, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "looking-inside.md"


@pytest.mark.slow
def test_the_snippets_run_and_say_what_the_page_says() -> None:
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(snippets) == 14
    found: dict[str, object] = {}
    output: list[str] = []
    found["print"] = lambda *values: output.append(" ".join(map(str, values)))
    torch.manual_seed(0)
    for snippet in snippets:
        exec(snippet, found)
    promised = re.findall(r"#  ?(torch\.Size\([^)]*\))", "".join(snippets))
    assert len(promised) == 3
    assert [line for line in output if line in promised] == promised
    assert any(line.startswith("tensor(-") for line in output), "the sum before its ReLU"
    assert found["gradcam"].shape == (2, 7, 7)  # type: ignore[attr-defined]
