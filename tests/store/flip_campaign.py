"""Flips bits of whole stores and says which rows a repair or the next run computes again.

Run as a process of its own, because HDF5 may take the process down with it: `python
flip_campaign.py FOLDER KIND CODEC` reads lines "file offset mask" and answers each with JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from made_store import MadeRun, make_added, make_run

import featx
from featx.errors import FeatxError, StoreError, StoreMismatchError
from featx.store import check_store, layout, load_manifest, missing_parts, repair_files
from featx.store.pack import pack

SECONDS = 20
"""The time of one answer, after which a signal ends the process: HDF5 may hang."""

ADDRESS_SPACE = 4 << 30

CHUNK_BYTES = 48
"""One row of /features/map and of /features/late, two of /features/flat; a part has four."""

KINDS = ("packed", "parts", "unfinished", "two runs", "unfinished addition")


def runs_of(kind: str, codec: str) -> list[MadeRun]:
    """One run of three parts of four rows, or with another one that adds a layer."""
    first = make_run(11, 4, {"flat": (5,), "map": (3, 2, 2)}, codec=codec, failed=[2, 9])
    first = first.identified()
    if "run" not in kind and "addition" not in kind:
        return [first]
    return [first, make_added(first, {"late": (7,)}, part_rows=4, codec=codec)]


def make(root: Path, kind: str, codec: str) -> None:
    """The store before anything is flipped."""
    first, *later = runs_of(kind, codec)
    packed = kind not in ("parts", "unfinished")
    first.finish(root, at_most=2 if kind == "unfinished" else None, packed=packed)
    for run in later:
        run.finish(root, at_most=2 if "unfinished" in kind else None, packed=kind == "two runs")


def missing_rows(root: Path) -> set[tuple[int, int]]:
    """The number of a run and the row, of each that is not in the store."""
    manifest, _ = load_manifest(root)
    assert manifest is not None
    return {
        (manifest.runs.index(run), row)
        for run, parts in missing_parts(root, manifest)
        for part in parts
        for row in range(part.start, part.stop)
    }


def finished(root: Path, runs: list[MadeRun]) -> list[tuple[int, int]]:
    """Give the command again until the store is whole; the rows of runs that were computed."""
    computed = set()
    numbers = [*range(len(runs))]
    for number in [*numbers[::-1], *numbers]:  # the last one first
        run = runs[number]
        for _ in range(3):  # packing may find damage
            with contextlib.suppress(StoreMismatchError), run.session(root).hold() as session:
                computed |= {(number, row) for row in run.compute_lost(session)}
                for part in session.missing():
                    computed |= {(number, row) for row in range(part.start, part.stop)}
                    session.commit(run.builder(part))
                if not session.is_complete or session.is_packed:
                    break
                try:
                    pack(root)
                except StoreError:
                    continue
                session.finish_packing()
                break
    return sorted(computed)


def wrong_in(root: Path, runs: list[MadeRun]) -> list[str]:
    """What a reader gets that is not so; rows that are not there do not count."""
    store = featx.open(root)
    failed = {failure.row for run in runs for failure in run.failures}
    status = runs[0].status()
    there = store.status != 255
    wrong = []
    for run in runs:
        for spec in run.specs:
            if spec.name not in store:
                continue
            found, expected = store[spec.name][:], run.expected(spec.name)
            rows = there & ~np.isnan(found).reshape(len(found), -1).all(1)
            if found.dtype != expected.dtype or not np.array_equal(found[rows], expected[rows]):
                wrong.append(spec.name)
            attrs = store[spec.name].attrs
            if attrs["layer"] != spec.layer or attrs["reduce"] != spec.reduce:
                wrong.append(f"attributes of {spec.name}")
    if not np.array_equal(store.status[there], status[there]):
        wrong.append("status")
    listing = runs[0].listing
    if [os.fsencode(key) for key in store.keys.tolist()] != listing.keys.tolist():
        wrong.append("keys")
    if store.labels.tolist() != listing.labels.tolist() or store.classes != listing.classes:
        wrong.append("labels")
    if {failure["row"] for failure in store.failures} != {r for r in failed if there[r]}:
        wrong.append("failures")
    for name in ("model", "weights_sha256"):
        if store.attrs[name] != getattr(runs[0].header, name):
            wrong.append(name)
    return wrong


def attempt(act: Callable[[], Any]) -> Any:
    """What it returns; for an error of featx its text, for any other one {"foreign": text}."""
    try:
        return act()
    except FeatxError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - which one it was is what the test is about
        return {"foreign": f"{type(error).__name__}: {error}"}


def repaired(root: Path) -> list[tuple[int, int]]:
    """job=verify verify.repair=true, as far as the store goes; the rows of runs that it lost."""
    before = missing_rows(root)
    repair_files(check_store(root))
    return sorted(missing_rows(root) - before)


def damages_of(root: Path) -> list[str]:
    return [damage.what for damage in check_store(root).damages]


def answer(work: Path, target: str, offset: int, mask: int, runs: list[MadeRun]) -> dict[str, Any]:
    path = work / target
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)
    found: dict[str, Any] = {}
    found["read"] = attempt(lambda: wrong_in(work, runs))
    found["found"] = attempt(lambda: damages_of(work))
    found["unchanged"] = path.read_bytes() == data
    again = work.with_name("again")
    shutil.copytree(work, again)
    try:
        found["missing"] = sorted(missing_rows(again)) if target != "featx.json" else None
        found["next run"] = attempt(lambda: finished(again, runs))
        found["after next run"] = attempt(lambda: wrong_in(again, runs))
    finally:
        shutil.rmtree(again)
    found["lost"] = attempt(lambda: repaired(work))
    found["after repair alone"] = attempt(lambda: wrong_in(work, runs))
    found["after repair"] = attempt(lambda: [finished(work, runs), wrong_in(work, runs)][1])
    found["damages"] = attempt(lambda: damages_of(work))
    return found


def main() -> None:
    folder, kind, codec = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    layout.CHUNK_BYTES = layout.CHUNK_BYTES_COMPRESSED = CHUNK_BYTES
    runs = runs_of(kind, codec)
    work = folder.parent / f"work-{os.getpid()}" / "store"
    wrong_in(folder, runs)  # what is loaded on first use is loaded

    os.fsync = lambda descriptor: None  # nobody pulls the plug here
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    for line in sys.stdin:
        target, offset, mask = line.split()
        shutil.copytree(folder, work)
        signal.alarm(SECONDS)
        found = answer(work, target, int(offset), int(mask), runs)
        signal.alarm(0)
        shutil.rmtree(work)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
