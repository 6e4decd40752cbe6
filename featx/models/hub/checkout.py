"""Checkouts with a hubconf.py: a folder, or a commit of a repository on GitHub."""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import shutil
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from featx.base import log_message
from featx.errors import ModelError, one_line
from featx.models.known_names import hint_elsewhere

GITHUB = "https://github.com"

_REPOSITORY = r"(?P<owner>[A-Za-z0-9-]+)/(?P<repository>[\w.-]+)"
_COMMIT = re.compile(rf"{_REPOSITORY}@(?P<commit>[0-9a-f]{{40}})", re.ASCII)
_REFERENCE = re.compile(rf"{_REPOSITORY}[@:](?P<reference>.+)", re.ASCII)

_TIMEOUT_S = 60.0
_LARGEST_BYTES = 4 * 2**30
"""Bytes of an unpacked checkout above which it is not unpacked."""


@dataclass(frozen=True)
class Checkout:
    """A folder with a hubconf.py.

    Attributes:
        folder: its absolute path.
        name: the folder as the user named it, or owner/repo@commit.
    """

    folder: Path
    name: str

    @property
    def hubconf(self) -> Path:
        """The file with the functions that build models."""
        return self.folder / "hubconf.py"

    def sha256(self) -> str:
        """SHA-256 over paths and contents of all .py files of the checkout."""
        sha = hashlib.sha256()
        for path in self._sources():
            data = path.read_bytes()
            sha.update(f"{path.relative_to(self.folder).as_posix()} {len(data)};".encode())
            sha.update(data)
        return sha.hexdigest()

    def holds(self, place: Path) -> bool:
        """Return whether a file or a folder is part of the checkout."""
        root = self.folder.resolve()
        place = place.resolve()
        return place.is_relative_to(root) and not any(
            map(_is_foreign, place.relative_to(root).parts)
        )

    def _sources(self) -> Iterator[Path]:
        """Files of Python code in the order of their paths; links to folders are not followed."""
        for folder, folders, files in os.walk(self.folder):
            folders[:] = sorted(name for name in folders if not _is_foreign(name))
            yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def find_checkout(name: str, server: str = GITHUB) -> Checkout:
    """Return the checkout that model.name names; a commit of GitHub is fetched if it is not here.

    Args:
        name: a folder, or owner/repo@COMMIT with the 40 hex digits of a commit.
        server: URL of GitHub.

    Raises:
        ModelError: there is no such folder, it has no hubconf.py, a branch, tag or short hash is
            named, or the commit cannot be fetched.
    """
    folder = Path(name).expanduser()
    if commit := _COMMIT.fullmatch(name):
        folder = _of_commit(commit["owner"], commit["repository"], commit["commit"], server)
    elif not folder.is_dir() and (reference := _REFERENCE.fullmatch(name)):
        raise ModelError(
            f"model.name={name}: {reference['reference']!r} is no full commit. A branch or a tag "
            "can be moved and a short hash can become ambiguous, so that the same command would "
            "run other code tomorrow. Name the commit by its 40 hex digits (`git ls-remote "
            f"https://github.com/{reference['owner']}/{reference['repository']}` shows those of "
            "branches and tags): model.name="
            f"{reference['owner']}/{reference['repository']}@COMMIT."
        )
    elif not folder.is_dir():
        raise ModelError(
            f"model.name={name}: no such folder (looked in {Path.cwd()}). Expected a checkout "
            "with a hubconf.py, or owner/repo@COMMIT with the 40 hex digits of a commit on GitHub."
            f"{hint_elsewhere(name)}"
        )
    checkout = Checkout(folder.absolute(), name)
    if not checkout.hubconf.is_file():
        raise ModelError(
            f"model.name={name}: {folder} has no hubconf.py, the file in which a repository for "
            "torch.hub defines its models. Name the top folder of the checkout; other code is "
            "loaded with model=custom."
        )
    return checkout


def _is_foreign(name: str) -> bool:
    """Return whether a folder below a checkout is no part of it, such as .git or an environment."""
    return name.startswith(".") or name == "site-packages"


def _of_commit(owner: str, repository: str, commit: str, server: str) -> Path:
    """Return the folder of a commit, which is fetched if it is not in the cache of torch.hub.

    torch.hub itself would refuse commits that are no tip of a branch, ask on stdin whether the
    repository is to be trusted, and trust it from then on whatever commit is asked for.

    Raises:
        ModelError: it cannot be fetched.
    """
    import torch

    target = Path(torch.hub.get_dir(), f"{owner}_{repository}_{commit}")  # torch.hub's own name
    if target.is_dir():
        return target
    url = f"{server}/{owner}/{repository}/zipball/{commit}"
    log_message(f"fetching {url}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".featx-") as folder:
            packed = Path(folder, "commit.zip")
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as found, packed.open("wb") as out:
                shutil.copyfileobj(found, out)
            unpacked = _unpack(packed, Path(folder, "files"), commit)
            try:
                unpacked.rename(target)
            except OSError:
                if not target.is_dir():  # another process was first otherwise
                    raise
    except (OSError, http.client.HTTPException, zipfile.BadZipFile, ValueError) as error:
        reason = one_line(error)
        is_unknown = isinstance(error, urllib.error.HTTPError) and error.code == 404
        what = "GitHub has no such commit, or it is not public" if is_unknown else reason
        raise ModelError(
            f"model.name={owner}/{repository}@{commit}: the commit is not in {target.parent} and "
            f"cannot be fetched ({what}). On a machine with internet access: git clone "
            f"https://github.com/{owner}/{repository} && git -C {repository} checkout {commit}. "
            "Then copy the folder and give it as model.name=FOLDER."
        ) from error
    return target


def _unpack(packed: Path, folder: Path, commit: str) -> Path:
    """Unpack an archive of GitHub into a new folder, and return the folder of the checkout in it.

    Raises:
        ValueError: it is not the archive of this commit.
    """
    with zipfile.ZipFile(packed) as archive:
        # git writes the commit into the comment of every archive that it makes.
        if archive.comment != commit.encode():
            raise ValueError(f"the archive is of commit {archive.comment[:40]!r}")
        if sum(member.file_size for member in archive.infolist()) > _LARGEST_BYTES:
            raise ValueError(f"its files have over {_LARGEST_BYTES >> 30} GiB")
        archive.extractall(folder)  # which keeps all members below the folder
    inside = list(folder.iterdir())
    if len(inside) != 1 or not inside[0].is_dir():
        raise ValueError("the archive does not hold one folder")
    return inside[0]
