"""Stores that released versions wrote open, verify, go on and pack; the files are in git."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_store import MadeRun, dataset_digests, make_added, make_run

from featx.errors import StoreError
from featx.store.manifest import read_manifest
from featx.store.reader import FeatureStore
from featx.store.repair import set_damage_aside
from featx.store.verification import check_store

FORMAT_1 = Path(__file__).parent / "format_1"


@pytest.fixture
def run() -> MadeRun:
    """As the first release made it."""
    return make_run(11, 4, dtype="float16", codec="gzip", failed=(2, 9))


@pytest.fixture(params=["packed", "parts"])
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FORMAT_1 / request.param, tmp_path / "old"))


def assert_reads(root: Path, run: MadeRun) -> None:
    store = FeatureStore(root)
    assert store.complete
    for name in run.features:
        np.testing.assert_array_equal(store[name][:], run.expected(name), strict=True)
    assert store.status.tolist() == run.status().tolist()
    assert store.labels.tolist() == run.listing.labels.tolist()
    assert store.classes == run.listing.classes
    assert [store.row(bytes(key)) for key in run.listing.keys] == list(range(11))
    assert [f["row"] for f in store.failures] == [2, 9]
    assert store.failures[1]["message"] == run.failures[1].message


def test_it_opens_and_reads_right(run: MadeRun, old: Path) -> None:
    assert_reads(old, run)
    if (old / "features.h5").exists():
        assert_reads(old / "features.h5", run)


def test_it_verifies(run: MadeRun, old: Path) -> None:
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    report = check_store(old)
    assert report.complete, report.as_dict()
    assert report.num_rows == 11
    assert {path: path.read_bytes() for path in before} == before


def test_a_packed_file_of_then_does_not_say_enough_to_be_verified_alone() -> None:
    with pytest.raises(StoreError, match="verify the store's folder"):
        check_store(FORMAT_1 / "packed" / "features.h5")


def test_the_same_command_finds_it_done_and_packs_it(
    run: MadeRun, old: Path, tmp_path: Path
) -> None:
    was_packed = (old / "features.h5").exists()
    before = {path: path.read_bytes() for path in old.rglob("*.h5")}
    with run.session(old).hold() as session:
        assert session.missing() == []
        assert session.packed == was_packed
        assert session.failures == list(run.failures)
    assert {path: path.read_bytes() for path in before} == before
    run.finish(old, packed=True)
    assert_reads(old, run)
    assert check_store(old).complete
    whole = dataset_digests(run.finish(tmp_path / "now", packed=True) / "features.h5")
    if was_packed:
        for later in ("failures", "image_checksum", "classes"):
            del whole[f"checksums/{later}"]  # which that time did not know
        del whole["image_checksum"]
    assert dataset_digests(old / "features.h5") == whole


def test_what_is_lost_of_it_is_done_again(run: MadeRun, old: Path) -> None:
    if (old / "features.h5").exists():
        data = bytearray((old / "features.h5").read_bytes())
        (old / "features.h5").write_bytes(data[: len(data) // 2])
    else:
        (old / "parts" / "part-000001.h5").unlink()
    set_damage_aside(check_store(old))
    assert not check_store(old).complete
    run.finish(old, packed=True)
    assert_reads(old, run)


def test_its_manifest_reads_as_what_is_written_today(run: MadeRun, old: Path) -> None:
    manifest = read_manifest(old)
    assert manifest is not None
    # The configuration stood in the parts and features.h5 only.
    assert manifest.runs == (replace(run, header=replace(run.header, config="")).as_run(),)


def test_layers_can_be_added_to_it(run: MadeRun, old: Path) -> None:
    made = make_added(run, {"deep": (7,)}, failed=[2, 5])
    fingerprint = {**made.header.fingerprint}
    del fingerprint["listing"]  # these made-up stores do not have it; real ones do
    added = replace(made, header=replace(made.header, fingerprint=fingerprint))
    added.finish(old, packed=True)
    store = FeatureStore(old)
    for made in (run, added):
        for name in made.features:
            np.testing.assert_array_equal(store[name][:], made.expected(name), strict=True)
    assert store.status[[2, 5, 9]].all()
    assert check_store(old).complete


def test_packing_keeps_the_configuration_that_its_parts_state(run: MadeRun, tmp_path: Path) -> None:
    old = Path(shutil.copytree(FORMAT_1 / "parts", tmp_path / "old"))
    run.finish(old, packed=True)
    assert FeatureStore(old).attrs["config"] == run.header.config
