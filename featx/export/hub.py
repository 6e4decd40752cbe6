"""export.push: uploads a complete export to a data set repository of the Hugging Face Hub."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from featx.base import import_extra
from featx.errors import RunError
from featx.export.base import Format

_CARD = "README.md"


def check_push() -> None:
    """Check that huggingface_hub is installed, before anything is written.

    Raises:
        MissingExtraError: it is not.
    """
    import_extra("huggingface_hub", "export.push", "the package huggingface_hub", "huggingface")


def push(folder: Path, names: Iterable[str], repository: str, written: Format) -> str:
    """Upload the files of an export in one commit; a repository that does not exist is private.

    The token is that of huggingface_hub: HF_TOKEN, or the one of `hf auth login`. Files that the
    repository holds already are not uploaded again.

    Args:
        folder: folder of the export.
        names: names of its files and folders, without its record, which contains local paths.
        repository: name of the repository, 'owner/name'.
        written: format of the export.

    Returns:
        URL of the repository.

    Raises:
        RunError: the Hub refuses the upload or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    # The variable is read here, as huggingface_hub reads it only when it is imported.
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    paths = [path for name in names for path in _files(folder / name)]
    operations: list[Any] = [
        CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in paths
    ]
    tables = [path.relative_to(folder).as_posix() for path in paths if path.suffix == ".parquet"]
    operations.append(CommitOperationAdd(_CARD, _card(repository, written, tables).encode()))
    try:
        url = api.create_repo(repository, repo_type="dataset", private=True, exist_ok=True)
        message = f"Features of {written.selection.about['model']}, exported by featx"
        api.create_commit(repository, operations, commit_message=message, repo_type="dataset")
    except Exception as error:  # errors of the Hub, of HTTP and of threads have no common base
        raise RunError(
            f"export.push={repository}: {type(error).__name__}: {error}\n"
            f"The export itself is complete in {folder}. Log in with `hf auth login`, or set "
            "HF_TOKEN to a token that may write, and give the same command again."
        ) from error
    return str(url)


def _files(path: Path) -> list[Path]:
    """Return a file, or the files of a folder, in order."""
    if path.is_dir():
        return sorted(inner for inner in path.rglob("*") if inner.is_file())
    return [path]


def _card(repository: str, written: Format, tables: Sequence[str]) -> str:
    """Return the text of the data set card: how to load the rows, and where they come from.

    Args:
        repository: name of the repository.
        written: format of the export.
        tables: paths of its Parquet files. They are named one by one, because the repository may
            still hold files of an earlier export with other rows.
    """
    kind = written.config.export.format
    header: dict[str, Any] = {"tags": ["featx", "image-features"]}
    if kind == "parquet":
        header["configs"] = [{"config_name": "default", "data_files": list(tables)}]
        lines = f'from datasets import load_dataset\n\nrows = load_dataset("{repository}")["train"]'
    else:
        lines = (
            "from huggingface_hub import snapshot_download\n\n"
            f'folder = snapshot_download("{repository}", repo_type="dataset")'
        )
    about = {**written.selection.about}
    layers = ", ".join(f"`{name}` {one['shape']}" for name, one in about["layers"].items())
    facts = [
        ("model", about["model"]),
        ("weights", f"{about['weights']} (SHA-256 {about['weights_sha256']})"),
        ("transform", about["transform"]),
        ("layers", layers),
        ("rows", f"{len(written.selection)}"),
        ("format", f"`{kind}` of featx"),
    ]
    table = "\n".join(f"- {name}: {value}" for name, value in facts)
    text = yaml.safe_dump(header, sort_keys=False)
    return f"---\n{text}---\n\n# Image features\n\n```python\n{lines}\n```\n\n{table}\n"
