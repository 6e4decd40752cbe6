"""Pages of the documentation that are made from the code: every key, every public name."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import featx
from featx.config.schema import described_keys


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages below reference/."""
    pages = {"reference/keys.md": keys_page(), "reference/python.md": python_page()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def keys_page() -> str:
    """Every key with its default and its sentence, a table for each group."""
    groups: dict[str, list[tuple[str, str, str]]] = {}
    rows = described_keys()
    parents = {key.split(".")[0] for key, _, _ in rows if "." in key}
    for key, default, sentence in rows:
        first = key.split(".")[0]
        groups.setdefault(first if first in parents else "", []).append((key, default, sentence))
    parts = [
        "# Every key\n\nA key goes on the command line as `key=value` (Hydra's syntax), or into "
        "`featx.extract(key=value)`. This page is made from the code; `python -m featx --help` "
        "prints the same."
    ]
    for name, found in sorted(groups.items()):
        lines = "\n".join(
            f"| `{key}` | {_code(default)} | {text}|"
            for key, default, text in [(k, d, t.replace("|", "\\|") + " ") for k, d, t in found]
        )
        title = f"`{name}`" if name else "Keys of a run"
        parts.append(f"## {title}\n\n| key | default | meaning |\n|---|---|---|\n{lines}")
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
