"""The packed file: the contract's datasets and attributes, and packing that fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import slow_except
from interruptions import files_of_at_most
from made_store import MadeRun, dataset_digests, make_run, pack_alone, temporary_files
from processes import killed_at_sync

from featx.base import digest
from featx.errors import RunError, StoreError
from featx.store import (
    DamageRecord,
    FeatureStore,
    Manifest,
    leftover_bytes,
    pack_parts,
    pack_store,
    packed_size_bound,
    reason_to_keep_parts,
)
from featx.store.pack import check_chunks, pack

CODECS = ["none", "gzip", "zstd"]


def part_files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "parts").iterdir()}


@pytest.fixture
def run() -> MadeRun:
    return make_run(num_rows=29, part_rows=8, failed=[2, 17, 20], damaged=[5, 21])


def test_auto_packs_up_to_256_gib_where_there_is_room() -> None:
    limit, endless = 256 << 30, 1 << 60
    assert reason_to_keep_parts(limit, endless) is None
    assert "256.0 GiB, and pack=auto packs up to" in str(reason_to_keep_parts(limit + 1, endless))
    needed = packed_size_bound(1000)
    assert reason_to_keep_parts(1000, needed) is None
    assert reason_to_keep_parts(1000, needed - 1) is not None
    text = str(reason_to_keep_parts(138 << 10, 800 << 10))
    assert text.startswith("packing needs 16.1 MiB, 16.0 MiB of them as a reserve for the disk")
    assert text.endswith(", and 800.0 KiB are free")


@pytest.mark.parametrize("codec", CODECS)
def test_every_dataset_and_attribute_of_the_contract_is_there(tmp_path: Path, codec: str) -> None:
    run = make_run(
        num_rows=29, part_rows=8, shapes={"layer4:input": (3, 2)}, dtype="float16", codec=codec,
        failed=[4],
    )  # fmt: skip
    run.write(tmp_path, packed=True)
    with h5py.File(tmp_path / "features.h5") as file:
        assert set(file) >= {"features", "key", "label", "status", "classes"}
        features = file["features/layer4:input"]
        assert (features.shape, features.dtype) == ((29, 3, 2), np.float16)
        assert np.isnan(features.fillvalue)
        assert {"layer", "capture", "reduce", "compute_dtype"} <= set(features.attrs)
        assert features.attrs["reduce_p"] == 3.0
        assert (file["key"].shape, file["key"].dtype) == ((29,), run.listing.keys.dtype)
        assert file["key"][:].tolist() == sorted(run.listing.keys.tolist())
        assert (file["label"].shape, file["label"].dtype) == ((29,), np.int64)
        assert file["label"][:].tolist() == run.listing.labels.tolist()
        assert (file["status"].shape, file["status"].dtype) == ((29,), np.uint8)
        assert json.loads(file["status"].attrs["names"])["0"] == "ok"
        assert [name.decode() for name in file["classes"][:]] == ["cat", "dög"]
        attrs = dict(file.attrs)
    assert attrs.pop("complete")
    assert attrs.pop("featx_format") == 4
    assert attrs.pop("fingerprint") == digest(run.header.fingerprint)
    assert json.loads(attrs.pop("versions")) == run.header.versions
    for name in ("config", "model", "weights", "weights_sha256", "transform"):
        assert attrs.pop(name) == getattr(run.header, name)
    assert Manifest.from_json(bytes(attrs.pop("manifest")), tmp_path).runs[0].codec == codec
    assert attrs.pop("text_checksums").shape == (1, 3)
    assert attrs == {"codec": codec, "num_failures": 1}


def test_datasets_are_plain_and_the_file_stands_alone(run: MadeRun, tmp_path: Path) -> None:
    run.write(tmp_path / "store", packed=True)
    shutil.move(tmp_path / "store" / "features.h5", tmp_path / "elsewhere.h5")
    shutil.rmtree(tmp_path / "store")
    with h5py.File(tmp_path / "elsewhere.h5") as file:
        check_chunks(file)

        def visit(name: str, item: object) -> None:
            assert isinstance(file.get(name, getlink=True), h5py.HardLink)
            if isinstance(item, h5py.Dataset):
                assert not item.is_virtual
                assert not item.external

        file.visititems(visit)
    store = FeatureStore(tmp_path / "elsewhere.h5")
    assert np.array_equal(store["map"], run.expected("map"), equal_nan=True)


@pytest.mark.slow
def test_the_order_of_the_parts_leaves_no_trace(run: MadeRun, tmp_path: Path) -> None:
    run.write(tmp_path / "a", packed=True)
    run.write(tmp_path / "b", [3, 1, 0, 2], packed=True)
    time.sleep(1.1)  # no time of day in the file either
    for part in (2, 0, 3, 1):
        run.write(tmp_path / "c", [part], packed=part == 1)
    first = dataset_digests(tmp_path / "a" / "features.h5")
    assert len(first) >= 8
    for other in ("b", "c"):
        assert dataset_digests(tmp_path / other / "features.h5") == first
        assert (tmp_path / other / "features.h5").read_bytes() == (
            tmp_path / "a" / "features.h5"
        ).read_bytes()


@pytest.mark.slow
def test_packing_reserves_enough_for_many_tiny_chunks(tmp_path: Path) -> None:
    run = make_run(num_rows=80, part_rows=1, shapes={"flat": (1,)}, failed=range(0, 80, 3))
    run.write(tmp_path)
    bound = packed_size_bound(sum(len(data) for data in part_files(tmp_path).values()))
    pack(tmp_path)
    assert (tmp_path / "features.h5").stat().st_size < bound
    assert np.array_equal(FeatureStore(tmp_path)["flat"], run.expected("flat"), equal_nan=True)


def test_a_missing_part_is_refused(run: MadeRun, tmp_path: Path) -> None:
    run.write(tmp_path, [0, 1, 3])
    with pytest.raises(StoreError, match=r"1 part is missing, part-000002\.h5 first"):
        pack(tmp_path)
    with pytest.raises(StoreError, match="holds no store"):
        pack(tmp_path / "parts")
    assert not (tmp_path / "features.h5").exists()


def test_a_store_that_another_process_packs_meanwhile_is_packed(
    run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without locks the parts may be packed, and removed, after the look at features.h5."""
    run.write(tmp_path / "store")
    run.copied(tmp_path / "packed", packed=True)
    packed, exists = tmp_path / "store" / "features.h5", Path.exists

    def other_process_is_faster(path: Path) -> bool:
        result = exists(path)
        if path == packed and not result:
            shutil.copy(tmp_path / "packed" / "features.h5", packed)
            shutil.rmtree(tmp_path / "store" / "parts")
        return result

    monkeypatch.setattr(Path, "exists", other_process_is_faster)
    pack(tmp_path / "store")
    assert packed.read_bytes() == (tmp_path / "packed" / "features.h5").read_bytes()


def test_swapped_or_foreign_parts_are_refused(run: MadeRun, tmp_path: Path) -> None:
    run.write(tmp_path / "a")
    run.changed(model="other").write(tmp_path / "b")
    parts = tmp_path / "a" / "parts"
    shutil.copy(parts / "part-000001.h5", parts / "part-000002.h5")
    with pytest.raises(StoreError, match=r"part-000002\.h5 holds the rows of another part"):
        pack(tmp_path / "a")
    shutil.copy(tmp_path / "b" / "parts" / "part-000002.h5", parts / "part-000002.h5")
    with pytest.raises(StoreError, match=r"part-000002\.h5 belongs to another run"):
        pack(tmp_path / "a")
    shutil.copytree(tmp_path / "b" / "parts", parts, dirs_exist_ok=True)
    with pytest.raises(StoreError, match=r"part-000000\.h5 belongs to another run"):
        pack(tmp_path / "a")
    assert not (tmp_path / "a" / "features.h5").exists()
    assert temporary_files(tmp_path) == []


def flip_a_bit_of(path: Path, name: str) -> None:
    with h5py.File(path) as file:
        info = file[name].id.get_chunk_info(0)
    data = bytearray(path.read_bytes())
    data[info.byte_offset + info.size // 2] ^= 4
    path.write_bytes(data)


def test_a_damaged_packed_file_with_lost_rows_is_refused(run: MadeRun, tmp_path: Path) -> None:
    root = run.copied(tmp_path / "store", packed=True)
    packed = root / "features.h5"
    flip_a_bit_of(packed, "features/map")
    data = bytearray(packed.read_bytes())
    data[data.index(b"fingerprint") + 60] ^= 1  # its value: HDF5 refuses the attributes
    packed.write_bytes(data)
    with run.session(root).hold():
        assert DamageRecord.read(root).files == {"features.h5", "part-000000.h5"}
    with pytest.raises(StoreError, match=r"is missing, part-000000\.h5 first"):
        pack(root)


@pytest.mark.parametrize("name", ["features/map", "key", "status"])
@pytest.mark.parametrize("codec", slow_except(["none", "zstd"], "zstd"))
def test_a_flipped_bit_in_a_part_never_reaches_the_packed_file(
    run: MadeRun, tmp_path: Path, name: str, codec: str
) -> None:
    """It is found, and the run computes the rows of the chunk again."""
    run = make_run(num_rows=29, part_rows=8, failed=[2, 17, 20], damaged=[5, 21], codec=codec)
    run.copied(tmp_path)
    flip_a_bit_of(tmp_path / "parts" / "part-000001.h5", name)
    others = part_files(tmp_path)
    others.pop("part-000001.h5")
    with pytest.raises(RunError, match=r"part-000001\.h5 is damaged .* the next run computes"):
        pack_parts(tmp_path)
    assert DamageRecord.read(tmp_path).files == {"part-000001.h5"}
    # All that is there is sound; the damaged one is made again where its chunks are right.
    left = part_files(tmp_path)
    left.pop("part-000001.h5", None)
    assert left == others
    assert not (tmp_path / "features.h5").exists()
    run.write(tmp_path, [1], packed=True)
    assert np.array_equal(FeatureStore(tmp_path)["flat"], run.expected("flat"), equal_nan=True)


def test_packing_again_keeps_the_file_that_is_there(run: MadeRun, tmp_path: Path) -> None:
    run.write(tmp_path)
    pack(tmp_path)
    before = (tmp_path / "features.h5").stat()
    pack(tmp_path)
    after = (tmp_path / "features.h5").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert temporary_files(tmp_path) == []


@pytest.mark.parametrize("reserves", [True, False])
def test_a_disk_without_room_leaves_the_parts_and_says_so(
    run: MadeRun,
    tmp_path: Path,
    without_retry_waits: None,
    monkeypatch: pytest.MonkeyPatch,
    reserves: bool,
) -> None:
    """RLIMIT_FSIZE refuses a file's growth just as a full disk does."""
    if not reserves:  # as on macOS
        monkeypatch.delattr(os, "posix_fallocate")
    run.write(tmp_path)
    before = part_files(tmp_path)
    message = r"features\.h5 failed.*featx\.open reads them"
    with files_of_at_most(1000), pytest.raises(RunError, match=message) as full:
        pack_parts(tmp_path)
    assert os.strerror(errno.EFBIG) in str(full.value)
    assert part_files(tmp_path) == before
    assert not (tmp_path / "features.h5").exists()
    assert temporary_files(tmp_path) == []
    store = FeatureStore(tmp_path)
    assert store.complete
    assert np.array_equal(store["flat"], run.expected("flat"), equal_nan=True)
    pack_alone(tmp_path)
    assert FeatureStore(tmp_path / "features.h5").complete


def test_an_interrupt_ends_packing_and_leaves_the_parts(
    run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write(tmp_path)
    before = part_files(tmp_path)
    real = os.pwrite

    def interrupted(*arguments: Any) -> int:
        os.kill(os.getpid(), signal.SIGINT)  # comes to the main thread
        time.sleep(0.1)
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack_parts(tmp_path)
    assert part_files(tmp_path) == before
    assert temporary_files(tmp_path) == []
    assert not (tmp_path / "features.h5").exists()


def test_many_chunks_of_maps_are_copied_to_their_own_rows(tmp_path: Path) -> None:
    """Rows so large that each is a chunk of its own, in parts of two."""
    run = make_run(num_rows=7, part_rows=2, shapes={"map": (4096, 8, 8)}, failed=[3])
    run.write(tmp_path, [3, 0, 2, 1], packed=True)
    assert np.array_equal(FeatureStore(tmp_path)["map"], run.expected("map"), equal_nan=True)


def pack_and_watch(root: Path, leftover: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack; the leftover has to be gone before the free space is looked at."""
    there: list[bool] = []
    real = shutil.disk_usage

    def watched(path: Path) -> Any:
        there.append(leftover.exists())
        return real(path)

    monkeypatch.setattr(shutil, "disk_usage", watched)
    assert leftover_bytes(root) >= leftover.stat().st_size > 0
    assert pack_store(root)
    assert there == [False]
    assert temporary_files(root) == []
    assert leftover_bytes(root) == 0


def test_packing_deletes_what_a_killed_packing_left(
    run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is as large as the store, and its space counts as free."""
    run.write(tmp_path)
    leftover = tmp_path / ".tmp-features.h5.1.2"
    leftover.write_bytes(bytes(1000))
    pack_and_watch(tmp_path, leftover, monkeypatch)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_packing_after_a_packing_that_was_killed(
    run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write(tmp_path)
    code = f"""
        from pathlib import Path
        from featx.store.pack import pack
        pack(Path({str(tmp_path)!r}))
        """
    killed_at_sync(code, "features.h5")
    [leftover] = temporary_files(tmp_path)
    pack_and_watch(tmp_path, leftover, monkeypatch)
    assert np.array_equal(FeatureStore(tmp_path)["map"], run.expected("map"), equal_nan=True)
