"""Pages of the documentation that are made from the code: every option, every public name."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import featx
from featx.config.all_options import described_options


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages below reference/."""
    pages = {"reference/options.md": options_page(), "reference/python.md": python_page()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def options_page() -> str:
    """Every option with its default and its sentence, a table for each group."""
    groups: dict[str, list[tuple[str, str, str]]] = {}
    rows = described_options()
    parents = {key.split(".")[0] for key, _, _ in rows if "." in key}
    for key, default, sentence in rows:
        first = key.split(".")[0]
        groups.setdefault(first if first in parents else "", []).append((key, default, sentence))
    parts = [
        "# Every option\n\nAn option goes on the command line as `option=value` (Hydra's syntax), "
        "or into `featx.extract(option=value)`. This page is made from the code; "
        "`python -m featx --help` prints the same."
    ]
    for name, found in sorted(groups.items()):
        lines = "\n".join(
            f"| `{key}` | {_code(default)} | {text}|"
            for key, default, text in [(k, d, t.replace("|", "\\|") + " ") for k, d, t in found]
        )
        title = f"`{name}`" if name else "Options of a run"
        parts.append(f"## {title}\n\n| option | default | meaning |\n|---|---|---|\n{lines}")
    return "\n\n".join(parts) + "\n"


def python_page() -> str:
    """Every name of featx.__all__, as its docstring says."""
    names = [name for name in featx.__all__ if name != "__version__"]
    listed = "\n\n".join(f"::: featx.{name}" for name in names)
    return (
        "# Every name\n\n`import featx` loads neither torch nor Hydra; each name loads what it "
        f"needs on first use.\n\n{listed}\n\n::: featx.torch.FeatureDataset\n\n"
        "::: featx.torch.BlockShuffleSampler\n"
    )


def _code(default: str) -> str:
    return f"`{default}`" if default else ""
