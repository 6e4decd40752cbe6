"""One flipped bit anywhere in a store: no row is lost but those of a chunk that was hit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import flip_campaign
import h5py
import numpy as np
import pytest
from conftest import with_path


def hit_rows(path: Path, offset: int) -> tuple[str, int, int] | None:
    """The dataset and the rows of the file whose stored chunk has a byte at `offset`."""
    if path.suffix != ".h5" or path.name == "samples.h5":
        return None
    with h5py.File(path) as file:
        names = [f"features/{name}" for name in file["features"]]
        for name in ("status", *names):
            dataset = file[name]
            for i in range(dataset.id.get_num_chunks()):
                info = dataset.id.get_chunk_info(i)
                if info.byte_offset <= offset < info.byte_offset + info.size:
                    first = info.chunk_offset[0] + int(file.attrs.get("start", 0))
                    return name, first, first + dataset.chunks[0]
    return None


def flips_of(root: Path, count: int, seed: int) -> list[tuple[str, int, int]]:
    """Flips spread evenly over the files of a store, so that small files are hit as well."""
    rng = np.random.default_rng(seed)
    names = ("*.h5", "parts/*.h5", "featx.json", "failures.csv")
    files = sorted(path for name in names for path in root.glob(name))
    flips = []
    for i in range(count):
        path = files[i % len(files)]
        offset = int(rng.integers(path.stat().st_size))
        flips.append((str(path.relative_to(root)), offset, int(rng.integers(8))))
    return flips


def answers_to(
    root: Path, kind: str, codec: str, flips: list[tuple[str, int, int]]
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while len(found) < len(flips):
        rest = flips[len(found) :]
        done = subprocess.run(
            [sys.executable, flip_campaign.__file__, str(root), kind, codec],
            input="".join(f"{name} {offset} {bit}\n" for name, offset, bit in rest),
            capture_output=True,
            text=True,
            env=with_path(Path(__file__).parent, Path(__file__).parents[1]),
            check=False,
        )
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        found += lines
        if len(lines) < len(rest):
            assert done.returncode < 0, done.stderr
            found.append({"killed": -done.returncode})
    return found


def problems_of(root: Path, flip: tuple[str, int, int], found: dict[str, Any]) -> list[str]:
    if "killed" in found:
        return [f"the process was ended by signal {found['killed']}"]
    problems = [
        f"{phase}: {value['foreign']}" for phase, value in found.items() if isinstance(value, dict)
    ]
    for phase in ("read", "after next run", "after repair"):
        if isinstance(found[phase], list) and found[phase]:
            problems.append(f"{phase}: {found[phase]} are wrong")
    for phase in ("lost", "after repair", "next run"):
        if isinstance(found[phase], str):
            problems.append(f"{phase}: {found[phase]}")
    if found["damages"]:
        problems.append(f"damaged after repair: {found['damages']}")
    hit = hit_rows(root / flip[0], flip[1])
    lost = found["lost"] if isinstance(found["lost"], list) else []
    if len(lost) > (0 if hit is None else 1):
        problems.append(f"repair lost parts {lost}, hit was {hit}")
    computed, missing = found["next run"], found["missing"]
    if isinstance(computed, list) and missing is not None:
        extra = set(computed) - set(missing)
        if len(extra) > (0 if hit is None else 1):
            problems.append(f"the next run computed parts {sorted(extra)} again, hit was {hit}")
    return problems


def campaign(tmp_path: Path, kind: str, codec: str, count: int, seed: int) -> None:
    root = tmp_path / "pristine"
    flip_campaign.make(root, kind, codec)
    flips = flips_of(root, count, seed)
    problems = [
        f"{flip[0]} byte {flip[1]} bit {flip[2]}: {problem}"
        for flip, found in zip(flips, answers_to(root, kind, codec, flips), strict=True)
        for problem in problems_of(root, flip, found)
    ]
    assert not problems, f"{len(problems)} of {count} flips:\n" + "\n".join(problems[:40])


@pytest.mark.parametrize("kind", ["packed", "unfinished"])
def test_some_flipped_bits_cost_no_other_row(tmp_path: Path, kind: str) -> None:
    campaign(tmp_path, kind, "none", 12, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", flip_campaign.KINDS)
@pytest.mark.parametrize("codec", ["none", "lzf", "gzip", "zstd", "blosc2"])
def test_a_thousand_flipped_bits_cost_no_other_row(tmp_path: Path, kind: str, codec: str) -> None:
    """Forty for each of the 25 stores."""
    campaign(tmp_path, kind, codec, 40, seed=2)
