"""Stores of the present format in git open, verify, resume, and are what this code writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from golden_stores import CODECS, GOLDEN, PARTS, TOKENS, golden_run, golden_tokens
from made_store import MadeRun, dataset_digests, make_added

from featx.store import FeatureStore, check_store, dtypes, read_manifest, repair_files


@pytest.fixture(params=[*CODECS, PARTS])
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[MadeRun, Path]:
    """A run, and a copy of the store that holds it."""
    copy = shutil.copytree(GOLDEN / request.param, tmp_path / "golden")
    return run_of(request.param), Path(copy)


def run_of(name: str) -> MadeRun:
    return golden_run("gzip" if name == PARTS else name)


def assert_reads(root: Path, run: MadeRun) -> None:
    store = FeatureStore(root)
    assert store.complete
    ok = [row for row in range(11) if row not in (2, 9)]
    for spec in run.specs:
        values = dtypes.from_raw(run.features[spec.name], spec.dtype)
        found = store[spec.name][:]
        np.testing.assert_array_equal(found[ok], values[ok], strict=True)
        assert np.isnan(found[[2, 9]]).all()
    assert store.status.tolist() == run.status().tolist()
    assert store.labels.tolist() == run.listing.labels.tolist()
    assert store.classes == run.listing.classes
    assert [store.row(bytes(key)) for key in run.listing.keys] == list(range(11))
    assert [f["row"] for f in store.failures] == [2, 9]
    assert store.failures[1]["message"] == run.failures[1].message
    assert store.attrs["config"] == run.header.config


def test_it_opens_and_reads_right(golden: tuple[MadeRun, Path]) -> None:
    run, root = golden
    assert_reads(root, run)
    if (root / "features.h5").exists():
        assert_reads(root / "features.h5", run)


def test_it_verifies(golden: tuple[MadeRun, Path]) -> None:
    _, root = golden
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    report = check_store(root)
    assert report.complete, report.as_dict()
    assert report.num_rows == 11
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("name", [*CODECS, PARTS, TOKENS])
def test_this_code_writes_the_same(tmp_path: Path, name: str) -> None:
    run, root = golden_tokens() if name == TOKENS else run_of(name), GOLDEN / name
    packed = (root / "features.h5").exists()
    now = run.finish(tmp_path / "now", packed=packed)
    files = sorted(path.relative_to(root) for path in root.rglob("*.h5"))
    assert files == sorted(path.relative_to(now) for path in now.rglob("*.h5"))
    for file in files:
        assert dataset_digests(root / file) == dataset_digests(now / file), file
    assert (root / "featx.json").read_bytes() == (now / "featx.json").read_bytes()
    manifest = read_manifest(root)
    assert manifest is not None
    assert manifest.runs == (run.as_run(),)


def test_the_same_command_finds_it_done_and_packs_it(golden: tuple[MadeRun, Path]) -> None:
    run, root = golden
    before = {path: path.read_bytes() for path in root.rglob("*.h5")}
    with run.session(root).hold() as session:
        assert session.missing() == []
        assert session.is_packed == (root / "features.h5").exists()
        assert session.failures == list(run.failures)
    assert {path: path.read_bytes() for path in before} == before
    run.finish(root, packed=True)
    assert_reads(root, run)
    assert check_store(root).complete


def test_what_is_lost_of_it_is_computed_again(golden: tuple[MadeRun, Path]) -> None:
    run, root = golden
    if (root / "features.h5").exists():
        data = bytearray((root / "features.h5").read_bytes())
        (root / "features.h5").write_bytes(data[: len(data) // 2])
    else:
        (root / "parts" / "part-000001.h5").unlink()
    repair_files(check_store(root))
    with run.session(root).hold() as session:
        run.compute_lost(session)
    run.finish(root, packed=True)
    assert_reads(root, run)
    assert check_store(root).complete


def test_layers_can_be_added_to_it(golden: tuple[MadeRun, Path]) -> None:
    run, root = golden
    added = make_added(run, {"deep": (7,)}, failed=[2, 5])
    added.finish(root, packed=True)
    store = FeatureStore(root)
    np.testing.assert_array_equal(store["deep"][:], added.expected("deep"), strict=True)
    values = run.features["float32"]
    ok = [row for row in range(11) if row not in (2, 9)]
    np.testing.assert_array_equal(store["float32"][ok], values[ok], strict=True)
    assert store.status[[2, 5, 9]].all()
    assert check_store(root).complete
