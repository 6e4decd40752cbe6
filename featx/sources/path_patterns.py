"""Path patterns with braces and wildcards, such as 'train-{000..012}.tar' or 'images/*.csv'."""

from __future__ import annotations

import glob
import itertools
import os
import re
from pathlib import Path

from featx.errors import DataError
from featx.sources.base import FolderSource

_MAX_NAMES = 1_000_000
"""Maximum number of names that a pattern may expand to."""

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}")
_STARS = re.compile(r"[*?\[]")
_SPECIAL = re.compile(r"[{*?\[]")


def is_pattern(text: str) -> bool:
    """Return whether a text contains braces or wildcards."""
    return bool(_SPECIAL.search(text))


def has_stars(name: str) -> bool:
    """Return whether a name without braces contains wildcards and has to be searched for."""
    return bool(_STARS.search(name))


def base_of(pattern: str) -> str:
    """Return the fixed beginning of a pattern up to its last '/', which keys do not contain."""
    plain = _SPECIAL.split(pattern, maxsplit=1)[0]
    return plain[: plain.rfind("/") + 1]


def find_files(
    root: str, follow_links: bool, endings: tuple[bytes, ...], what: str
) -> tuple[list[tuple[bytes, str]], dict[str, int]]:
    """Find the files that data.root names: those in a folder, a single one, or those of a pattern.

    Returns (name, path) of each file in bytewise order of the names, and the counts of left-out
    entries by reason. A name is the path below the folder or behind the fixed beginning of the
    pattern. Of a folder, names with one of the lower-case `endings` are taken; paths that come from
    braces alone are returned whether or not they exist.
    """
    path = os.path.expanduser(root)  # noqa: PTH111 - names as they are typed
    if os.path.isdir(path):  # noqa: PTH112
        extensions = frozenset(ending[ending.rindex(b".") :] for ending in endings)
        listing = FolderSource(Path(path), follow_links, extensions, what=what).listing()
        keys = [key for key in listing.keys.tolist() if key.lower().endswith(endings)]
        return [(k, os.path.join(path, os.fsdecode(k))) for k in keys], dict(listing.skipped)
    if os.path.exists(path) or not is_pattern(path):  # noqa: PTH110
        return [(os.fsencode(os.path.basename(path)), path)], {}
    base, names = base_of(path), []
    for name in expand_braces(path):
        names += sorted(glob.glob(name, recursive=True)) if has_stars(name) else [name]  # noqa: PTH207
    return sorted({(os.fsencode(name[len(base) :]), name) for name in names}), {}


def expand_braces(pattern: str) -> list[str]:
    """Expand braces: 'a-{000..012}.tar' gives 13 names, '{a,b}' two; several braces multiply."""
    alternatives: list[list[str]] = []
    end = 0
    for match in _RANGE.finditer(pattern):
        alternatives.append([pattern[end : match.start()]])
        end = match.end()
        if match[3] is not None:
            alternatives.append(match[3].split(","))
            continue
        first, last = int(match[1]), int(match[2])
        if not first <= last < first + _MAX_NAMES:
            raise DataError(
                f"data.root={pattern}: {match[0]} is no range of up to {_MAX_NAMES} names."
            )
        width = len(match[1])
        alternatives.append([f"{number:0{width}d}" for number in range(first, last + 1)])
    alternatives.append([pattern[end:]])
    total = 1
    for texts in alternatives:
        total *= len(texts)
    if total > _MAX_NAMES:
        raise DataError(f"data.root={pattern} stands for {total} names, over {_MAX_NAMES}.")
    return ["".join(parts) for parts in itertools.product(*alternatives)]
