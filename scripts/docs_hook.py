"""Parts of the documentation site that are made from the code: the page of every public name.

The pages of options and jobs are files, which `scripts/reference` writes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import featx


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the page of each group of options to the contents, behind that of all options."""
    folder = Path(config.docs_dir) / "reference" / "options"
    names = sorted(path.stem for path in folder.glob("*.md") if path.stem != "run")
    pages = [f"reference/options/{name}.md" for name in ("run", *names)]
    nav: list[Any] = config.nav or []
    reference = next(part["Reference"] for part in nav if "Reference" in part)
    reference.insert(reference.index("reference/options.md") + 1, {"Options by group": pages})
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the page of every public name."""
    files.append(File.generated(config, "reference/python.md", content=python_page()))
    return files


def python_page() -> str:
    """Every name of featx.__all__, as its docstring says."""
    names = [name for name in featx.__all__ if name != "__version__"]
    listed = "\n\n".join(f"::: featx.{name}" for name in names)
    return (
        "# Every name\n\n`import featx` loads neither torch nor Hydra; each name loads what it "
        f"needs on first use.\n\n{listed}\n\n::: featx.torch.FeatureDataset\n\n"
        "::: featx.torch.BlockShuffleSampler\n\n::: featx.torch.TokenDataset\n"
    )


_COMMAND = re.compile(
    r'<div class="(?=highlight"><pre[^>]*>(?:<span></span>)?'
    r"<code>(?:python|pip|featx|eval|autoload|git|docker)(?: |<span))"
)
"""Beginning of a block of code whose first word is a command; the language sh has spans in it."""

_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
_HEADER = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
_CELL = re.compile(r"<td\b")
_TAG = re.compile(r"<[^>]+>")

_STACKED_COLUMNS = 3
"""Smallest number of columns of a table whose cells stand below each other on a phone."""


def on_page_content(html: str, **kwargs: object) -> str:
    """Mark what docs/site.css changes: blocks of commands wrap, wide tables stack on a phone."""
    return _TABLE.sub(_with_labels, _COMMAND.sub('<div class="command ', html))


def _with_labels(table: re.Match[str]) -> str:
    """Return a table in which each cell carries the name of its column."""
    text = table[0]
    labels = [_TAG.sub("", header).strip() for header in _HEADER.findall(text)]
    if len(labels) < _STACKED_COLUMNS:
        return text

    def labelled(row: re.Match[str]) -> str:
        left = iter(labels)
        return _CELL.sub(lambda cell: f'{cell[0]} data-label="{next(left, "")}"', row[0])

    return _ROW.sub(labelled, text).replace("<table>", "<table data-stacked>", 1)
