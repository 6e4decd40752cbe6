"""One byte of a store is another one: no row is wrong, and none is lost but those of its chunk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flip_campaign
import h5py
import numpy as np
import pytest
from conftest import run_python

pytestmark = pytest.mark.usefixtures("small_chunks")


def hit_rows(path: Path, offset: int) -> set[tuple[int, int]]:
    """The numbers of runs and the rows, of the chunk that has a stored byte at `offset`.

    A status that is not known any more costs the rows that failed: whether a row is ok is seen by
    its values, why it failed is not.
    """
    if path.suffix != ".h5" or path.name == "samples.h5":
        return set()
    with h5py.File(path) as file:
        start = int(file.attrs.get("start", 0))
        runs = {0, 1} if path.name == "features.h5" else {int("features/late" in file)}
        for name, first, low, high in chunks_of(file):
            if not low <= offset < high:
                continue
            dataset = file[name]
            rows = np.arange(first, min(first + dataset.chunks[0], len(dataset)))
            if name == "status":
                rows = rows[dataset[:][rows] != 0]
            elif len(runs) > 1:
                runs = {int(name == "features/late")}
            return {(run, start + row) for run in runs for row in rows.tolist()}
    return set()


def chunks_of(file: h5py.File) -> list[tuple[str, int, int, int]]:
    """Dataset, first row, and the stored bytes [low, high), of what no other place tells again."""
    found = []
    for name in ("status", *(f"features/{name}" for name in file["features"])):
        dataset = file[name]
        for i in range(dataset.id.get_num_chunks()):
            info = dataset.id.get_chunk_info(i)
            place = info.byte_offset, info.byte_offset + info.size
            found.append((name, info.chunk_offset[0], *place))
    return found


def flips_of(root: Path, count: int, seed: int) -> list[tuple[str, int, int]]:
    """File, offset and mask of flips spread evenly over the files of a store: small files are hit.

    Of files with rows, every other flip hits a chunk: the most of these small files is metadata.
    """
    rng = np.random.default_rng(seed)
    names = ("*.h5", "parts/*.h5", "featx.json", "failures.csv")
    files = sorted(path for name in names for path in root.glob(name))
    flips = []
    for i in range(count):
        path = files[i % len(files)]
        offset = int(rng.integers(path.stat().st_size))
        if i // len(files) % 2 == 0 and path.name.startswith(("features", "part")):
            with h5py.File(path) as file:
                chunks = chunks_of(file)
            _, _, low, high = chunks[int(rng.integers(len(chunks)))]
            offset = int(rng.integers(low, high))
        mask = rng.choice([1 << rng.integers(8), rng.integers(1, 256)], p=[0.75, 0.25])
        flips.append((str(path.relative_to(root)), offset, int(mask)))
    return flips


def answers_to(
    root: Path, kind: str, codec: str, flips: list[tuple[str, int, int]]
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while len(found) < len(flips):
        rest = flips[len(found) :]
        done = run_python(
            *(flip_campaign.__file__, root, kind, codec),
            path=[Path(__file__).parent, Path(__file__).parents[1]],
            code=None,
            input="".join(f"{name} {offset} {mask}\n" for name, offset, mask in rest),
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
    for phase in ("read", "after next run", "after repair alone", "after repair"):
        if isinstance(found[phase], list) and found[phase]:
            problems.append(f"{phase}: {found[phase]} are wrong")
    for phase in ("lost", "after repair", "next run"):
        if isinstance(found[phase], str):
            problems.append(f"{phase}: {found[phase]}")
    if not found["unchanged"]:
        problems.append("check_store wrote")
    if found["damages"]:
        problems.append(f"damaged after repair: {found['damages']}")
    hit = hit_rows(root / flip[0], flip[1])
    if isinstance(found["lost"], list):
        lost = {(run, row) for run, row in found["lost"]} - hit
        if lost:
            problems.append(f"repair lost {sorted(lost)}, hit were {sorted(hit)}")
    if isinstance(found["next run"], list) and found["missing"] is not None:
        computed, missing = ({(run, row) for run, row in found[k]} for k in ("next run", "missing"))
        if extra := computed - missing - hit:
            problems.append(f"the next run computed {sorted(extra)}, hit were {sorted(hit)}")
    return problems


@pytest.fixture
def small_chunks(set_chunk_bytes: Callable[[int], None]) -> None:
    """What the campaign sets in its own process is undone in this one."""
    set_chunk_bytes(flip_campaign.CHUNK_BYTES)


def campaign(tmp_path: Path, kind: str, codec: str, count: int, seed: int) -> None:
    root = tmp_path / "pristine"
    flip_campaign.make(root, kind, codec)
    flips = flips_of(root, count, seed)
    answers = answers_to(root, kind, codec, flips)
    problems = [
        f"{flip[0]} byte {flip[1]} ^ {flip[2]}: {problem}"
        for flip, found in zip(flips, answers, strict=True)
        for problem in problems_of(root, flip, found)
    ]
    assert not problems, f"{len(problems)} of {count} flips:\n" + "\n".join(problems[:40])
    assert any(found["found"] for found in answers), "no flip was noticed; this proves nothing"


@pytest.mark.parametrize("kind", ["packed", pytest.param("unfinished", marks=pytest.mark.slow)])
def test_some_flipped_bits_cost_no_other_row(tmp_path: Path, kind: str) -> None:
    campaign(tmp_path, kind, "none", 8, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", flip_campaign.KINDS)
@pytest.mark.parametrize("codec", ["none", "gzip", "zstd"])
def test_a_thousand_flipped_bits_cost_no_other_row(tmp_path: Path, kind: str, codec: str) -> None:
    """Sixty-seven for each of the 15 stores."""
    campaign(tmp_path, kind, codec, 67, seed=2)
