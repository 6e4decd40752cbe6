"""Flips bytes of a store, one at a time, and says what reading, checking and resuming make of it.

Run as a process of its own, because HDF5 may take the process down with it:
`python byte_flips.py PRISTINE TARGET` reads lines "offset mask" and answers each with a line of
JSON.
"""

from __future__ import annotations

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
from made_store import MadeRun, make_run

import featx
from featx.errors import FeatxError, StoreError
from featx.store import check_store
from featx.store.pack import pack

SECONDS = 10
ADDRESS_SPACE = 4 << 30


def flipped_run(codec: str) -> MadeRun:
    """Three parts of four rows; two rows failed."""
    shapes = {"flat": (5,), "map": (3, 2, 2)}
    return make_run(11, 4, shapes, codec=codec, failed=[2, 9]).identified()


def wrong_of(root: Path, run: MadeRun) -> list[str]:
    """What a reader gets that is not so; explanatory texts of failures are left out."""
    store = featx.open(root)
    wrong = []
    specs = {spec.name: spec for spec in run.specs}
    if set(store.layers) != set(specs):
        return [f"layers {store.layers}"]
    for name, spec in specs.items():
        found = store[name][:]
        if found.dtype != run.features[name].dtype or not np.array_equal(
            found, run.expected(name), equal_nan=True
        ):
            wrong.append(name)
        if store[name].attrs["layer"] != spec.layer or store[name].attrs["reduce"] != spec.reduce:
            wrong.append(f"attributes of {name}")
    keys = [os.fsdecode(key) for key in run.listing.keys.tolist()]
    columns = {
        "keys": (store.keys.tolist(), keys),
        "labels": (store.labels.tolist(), run.listing.labels.tolist()),
        "classes": (store.classes, run.listing.classes),
        "status": (store.status.tolist(), run.status().tolist()),
        "failures": ([f["row"] for f in store.failures], [f.row for f in run.failures]),
        "complete": (store.complete, True),
        "model": (store.attrs["model"], run.header.model),
        "weights": (store.attrs["weights_sha256"], run.header.weights_sha256),
    }
    return wrong + [name for name, (found, expected) in columns.items() if found != expected]


def attempt(act: Any) -> Any:
    """What it returns; for an error of featx its text, for any other one {"foreign": text}."""
    try:
        return act()
    except FeatxError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - which one it was is what the test is about
        return {"foreign": f"{type(error).__name__}: {error}"}


def resumed(root: Path, run: MadeRun) -> list[str]:
    """The same command again, twice where packing finds damage; then what a reader gets."""
    for _ in range(2):
        with run.session(root).hold() as session:
            run.compute_lost(session)
            for part in session.missing():
                session.commit(run.builder(part))
            if session.is_packed:
                break
            try:
                pack(root)
            except StoreError:
                continue
            session.finish_packing()
            break
    return wrong_of(root, run)


def answer(work: Path, target: str, offset: int, mask: int, run: MadeRun) -> dict[str, Any]:
    path = work / target
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)
    found: dict[str, Any] = {"offset": offset, "mask": mask}
    found["read"] = attempt(lambda: wrong_of(work, run))
    found["damages"] = attempt(lambda: [d.what for d in check_store(work).damages])
    found["unchanged"] = path.read_bytes() == data
    found["resumed"] = attempt(lambda: resumed(work, run))
    return found


def answer_lines(
    pristine: Path, work: Path, seconds: int, answer_line: Callable[[str], dict[str, Any]]
) -> None:
    """Answer each line of stdin by a line of JSON, on a copy of a store.

    Args:
        pristine: the store.
        work: folder of the copy, made anew for each line.
        seconds: time of one answer, after which a signal ends the process: HDF5 may hang.
        answer_line: flips the byte that a line names in `work`, and says what followed.
    """
    os.fsync = lambda descriptor: None  # nobody pulls the plug here
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    for line in sys.stdin:
        shutil.copytree(pristine, work)
        signal.alarm(seconds)
        found = answer_line(line)
        signal.alarm(0)
        shutil.rmtree(work)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


def main() -> None:
    pristine, target, codec = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    run = flipped_run(codec)
    work = pristine.parent / f"work-{os.getpid()}"
    wrong_of(pristine, run)  # what is loaded on first use is loaded

    def answer_line(line: str) -> dict[str, Any]:
        offset, mask = map(int, line.split())
        return answer(work, target, offset, mask, run)

    answer_lines(pristine, work, SECONDS, answer_line)


if __name__ == "__main__":
    main()
