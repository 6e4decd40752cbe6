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
        "::: featx.torch.BlockShuffleSampler\n"
    )


_COMMAND = re.compile(
    r'<div class="highlight">'
    r"(?=<pre[^>]*>(?:<span></span>)?<code>(?:python|pip|featx|eval|autoload) )"
)
"""Beginning of a block of code whose first word is a command."""


def on_page_content(html: str, **kwargs: object) -> str:
    """Mark blocks of commands, which docs/site.css wraps."""
    return _COMMAND.sub('<div class="highlight command">', html)
