"""One byte of a store is another one: an error, or the right rows, or damage that is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import byte_flips
import h5py
import numpy as np
import pytest
from conftest import with_path

TARGETS = ("parts/part-000001.h5", "features.h5", "samples.h5", "featx.json")


def data_bytes(path: Path) -> set[int]:
    """Offsets of all bytes of an HDF5 file that are values of a dataset, as they are stored."""
    found: set[int] = set()

    def visit(name: str, item: Any) -> None:
        if not isinstance(item, h5py.Dataset):
            return
        if item.chunks is None:
            start = item.id.get_offset()
            if start is not None:
                found.update(range(start, start + item.id.get_storage_size()))
            return
        for i in range(item.id.get_num_chunks()):
            info = item.id.get_chunk_info(i)
            found.update(range(info.byte_offset, info.byte_offset + info.size))

    with h5py.File(path, "r") as file:
        file.visititems(visit)
    return found


def flip_all(
    pristine: Path, target: str, codec: str, flips: list[tuple[int, int]]
) -> list[dict[str, Any]]:
    """What became of each flip; one that took its process down has the exit status instead."""
    answers: list[dict[str, Any]] = []
    environment = with_path(Path(__file__).parent, Path(__file__).parents[1])
    while len(answers) < len(flips):
        rest = flips[len(answers) :]
        done = subprocess.run(
            [sys.executable, byte_flips.__file__, str(pristine), target, codec],
            input="".join(f"{offset} {mask}\n" for offset, mask in rest),
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        answers += lines
        if len(lines) < len(rest):
            assert done.returncode < 0, done.stderr
            offset, mask = rest[len(lines)]
            answers.append({"offset": offset, "mask": mask, "killed": -done.returncode})
    return answers


def verdict(answer: dict[str, Any], is_data: bool) -> str | None:
    """Why the outcome of a flip may not be, or None."""
    if "killed" in answer:
        return f"the process was ended by signal {answer['killed']}"
    for phase in ("read", "damages", "resumed"):
        if isinstance(answer[phase], dict):
            return f"{phase}: {answer[phase]['foreign']}"
    if not answer["unchanged"]:
        return "check_store wrote"
    wrong = answer["read"] if isinstance(answer["read"], list) else []
    if wrong and not answer["damages"]:
        return f"{wrong} wrong, and the check found nothing"
    if wrong and not is_data:
        return f"a flipped byte of metadata made {wrong} wrong"
    again = answer["resumed"] if isinstance(answer["resumed"], list) else []
    if again and not answer["damages"]:
        return f"after the resume {again} are wrong"
    if again and answer["target"] == "parts/part-000001.h5":
        return f"packing let {again} through"
    return None


def make_pristine(tmp_path: Path, target: str, codec: str) -> Path:
    run = byte_flips.flipped_run(codec)
    packed = target == "features.h5"
    return run.finish(tmp_path / "pristine", packed=packed)


def check_flips(
    tmp_path: Path,
    target: str,
    codec: str,
    num_meta: int,
    num_data: int,
) -> None:
    """Flip bytes and judge what came of it.

    Args:
        num_meta, num_data: how many bytes outside and inside of the datasets' values.
    """
    pristine = make_pristine(tmp_path, target, codec)
    path = pristine / target
    size = path.stat().st_size
    data = data_bytes(path) if target.endswith(".h5") else set()
    rng = np.random.default_rng(len(target))
    chosen = []
    outside = sorted(set(range(size)) - data)
    for offsets, count in ((outside, num_meta), (sorted(data), num_data)):
        some = rng.permutation(offsets)[:count].tolist()
        chosen += [int(offset) for offset in some]
    masks = [int(rng.integers(1, 256)) if i % 2 else 1 << int(rng.integers(8))
             for i in range(len(chosen))]  # fmt: skip
    flips = list(zip(sorted(chosen), masks, strict=True))
    answers = flip_all(pristine, target, codec, flips)
    assert len(answers) == len(flips)
    problems = []
    for answer in answers:
        answer["target"] = target
        if problem := verdict(answer, answer["offset"] in data):
            kind = "data" if answer["offset"] in data else "metadata"
            problems.append(f"{kind} byte {answer['offset']} ^ {answer['mask']}: {problem}")
    assert not problems, f"{len(problems)} of {len(flips)}:\n" + "\n".join(problems[:30])
    seen = [a for a in answers if a["damages"] or isinstance(a["read"], str)]
    assert seen, "no flip was ever noticed; the test proves nothing"


@pytest.mark.parametrize(
    "target",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "features.h5")) for name in TARGETS],
)
def test_a_sample_of_flipped_bytes(tmp_path: Path, target: str) -> None:
    check_flips(tmp_path, target, "none", num_meta=10, num_data=10)


@pytest.mark.slow
def test_a_sample_of_flipped_bytes_in_compressed_chunks(tmp_path: Path) -> None:
    check_flips(tmp_path, "parts/part-000001.h5", "zstd", num_meta=2, num_data=24)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_many_bytes_of_metadata(tmp_path: Path, target: str) -> None:
    check_flips(tmp_path, target, "none", num_meta=200, num_data=60)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["parts/part-000001.h5", "features.h5"])
@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_many_bytes_of_compressed_stores(tmp_path: Path, codec: str, target: str) -> None:
    check_flips(tmp_path, target, codec, num_meta=50, num_data=150)
