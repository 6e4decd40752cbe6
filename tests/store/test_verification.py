"""What job=verify goes by: every kind of damage is found, a sound store of any shape passes."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import slow_except
from made_store import MadeRun, edited, joined, make_added, make_grown, make_run, stored_sums

from featx.errors import StoreError
from featx.storage import AtomicFolder
from featx.store import DamageReport, check_store
from featx.store.committed_parts import remove_parts
from featx.store.pack import pack
from featx.store.part_files import part_path


@pytest.fixture
def run() -> MadeRun:
    """Four parts of 8 rows, the last one short."""
    return make_run(29, 8, failed=[2, 17, 20], damaged=[5, 21]).identified()


def snapshot(root: Path) -> dict[Path, tuple[bytes, int]]:
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def checked(root: Path) -> DamageReport:
    """The report; that nothing was written, opened for writing or left behind is checked too."""
    before = snapshot(root)
    report = check_store(root)
    assert snapshot(root) == before
    json.dumps(report.as_dict())
    return report


def sound(root: Path, num_rows: int) -> DamageReport:
    report = checked(root)
    assert report.complete, report.as_dict()
    assert report.num_rows == num_rows
    assert report.num_chunks
    return report


class TestSound:
    @pytest.mark.parametrize("packed", [True, False])
    @pytest.mark.parametrize("failed", [[], list(range(29))], ids=["none failed", "all failed"])
    def test_any_number_of_failures(self, tmp_path: Path, failed: list[int], packed: bool) -> None:
        sound(make_run(29, 8, failed=failed).identified().copied(tmp_path, packed=packed), 29)

    @pytest.mark.parametrize("num_rows", [1, 7, 8, 9])
    def test_few_rows(self, tmp_path: Path, num_rows: int) -> None:
        made = make_run(num_rows, 8).identified()
        made.copied(tmp_path)
        sound(tmp_path, num_rows)
        pack(tmp_path)
        sound(tmp_path, num_rows)

    @pytest.mark.parametrize("packed", [True, False])
    def test_several_runs_with_failures_of_their_own(
        self, run: MadeRun, tmp_path: Path, packed: bool
    ) -> None:
        added = make_added(run, {"deep": (7,)}, failed=[2, 5])
        grown = make_grown(joined(run, added), 10, failed=[30])
        run.copied(tmp_path, packed=packed)
        sound(tmp_path, 29)
        added.finish(tmp_path, packed=packed)
        sound(tmp_path, 29)
        grown.finish(tmp_path, grow=True)
        sound(tmp_path, 39)
        pack(tmp_path)
        sound(tmp_path, 39)
        remove_parts(AtomicFolder(tmp_path))
        sound(tmp_path / "features.h5", 39)

    def test_a_packed_file_alone_and_a_moved_store(self, run: MadeRun, tmp_path: Path) -> None:
        run.copied(tmp_path / "s", packed=True)
        shutil.move(tmp_path / "s", tmp_path / "elsewhere")
        sound(tmp_path / "elsewhere", 29)
        (tmp_path / "alone").mkdir()
        shutil.copy(tmp_path / "elsewhere" / "features.h5", tmp_path / "alone" / "photos.h5")
        report = check_store(tmp_path / "alone" / "photos.h5")
        assert report.complete, report.as_dict()
        assert (report.num_files, report.num_rows) == (1, 29)

    def test_an_unfinished_store_is_sound_and_says_what_is_missing(
        self, run: MadeRun, tmp_path: Path
    ) -> None:
        run.write(tmp_path, [0, 2])
        report = checked(tmp_path)
        assert report.missing == ["part-000001.h5", "part-000003.h5"]
        assert report.damages == []
        assert not report.complete

    @pytest.mark.slow
    def test_three_hundred_parts_with_few_file_handles(self, tmp_path: Path) -> None:
        made = make_run(300, 1, {"flat": (2,)}).identified()
        made.copied(tmp_path)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Files that earlier tests in this process have left open count as well.
        num_open = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 40, hard))
        try:
            report = check_store(tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert report.complete, report.as_dict()
        assert report.num_files == 300


Change = Callable[[h5py.File], Any]


def overwrite(name: str, index: Any, value: Any) -> Change:
    """Another value under the old checksum, as a flipped bit leaves it."""
    return lambda file: file[name].__setitem__(index, value)


def replaced(name: str, make: Callable[[Any], Any]) -> Change:
    def change(file: h5py.File) -> None:
        values, attrs = file[name][()], dict(file[name].attrs)
        chunks = file[name].chunks
        del file[name]
        made = make(values)
        if chunks is not None:
            chunks = (min(chunks[0], len(made)), *made.shape[1:])
        file.create_dataset(name, data=made, chunks=chunks)
        file[name].attrs.update(attrs)

    return change


def summed(name: str, change: Change) -> Change:
    """The checksums are made to fit the new values: what is wrong is the meaning."""

    def both(file: h5py.File) -> None:
        change(file)
        file[f"checksums/{name}"][...] = stored_sums(file[name])

    return both


def link(name: str, made: Any) -> Change:
    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = made

    return change


IN_A_FILE: dict[str, tuple[Change, str]] = {
    "a value": (overwrite("features/flat", (1, 2), 7.5), "/features/flat differs"),
    "a value of a map": (overwrite("features/map", (5, 0, 1, 1), 7.5), "/features/map differs"),
    "a key": (overwrite("key", 3, b"other"), "/key differs"),
    "a key with its sum": (summed("key", overwrite("key", 3, b"other")), "/key is not that"),
    "a label": (overwrite("label", 3, 9), "/label differs"),
    "a label with its sum": (summed("label", overwrite("label", 3, 1)), "/label is not that"),
    "a status": (overwrite("status", 3, 4), "/status differs"),
    "a status with its sum": (summed("status", overwrite("status", 3, 4)), "names 1 rows"),
    "a reason": (overwrite("failures/message", 0, b"other"), "/failures differs"),
    "an exception": (overwrite("failures/error", 0, b"other"), "/failures differs"),
    "an absent row": (summed("status", overwrite("status", 3, 255)), "has status 255"),
    "an unknown status": (summed("status", overwrite("status", 3, 77)), "has status 77"),
    "a failed row called ok": (summed("status", overwrite("status", 2, 0)), "row 2 has status ok"),
    "NaN in a row that is ok": (
        summed("features/map", overwrite("features/map", (4, 1, 0, 0), np.nan)),
        "row 4 has status ok",
    ),
    "infinity in a row that is ok": (
        summed("features/flat", overwrite("features/flat", (4, 0), np.inf)), "row 4 has status ok"),
    "a value in a failed row": (
        summed("features/flat", overwrite("features/flat", (2, 0), 1.0)), "row 2 has status"),
    "a checksum": (overwrite("checksums/features/flat", 0, 1), "differs from its checksum"),
    "no checksums": (lambda file: file.__delitem__("checksums/features/flat"), "checksums"),
    "too many checksums": (
        replaced("checksums/features/flat", lambda v: np.append(v, v)), "checksums for"),
    "another fingerprint": (lambda f: f.attrs.modify("fingerprint", "00"), "fingerprint"),
    "another model": (lambda f: f.attrs.modify("model", "resnet18"), "attribute model"),
    "another transform": (lambda f: f.attrs.modify("transform", "none"), "transform"),
    "another codec": (lambda f: f.attrs.modify("codec", "gzip"), "codec"),
    "fewer failures": (lambda f: f.attrs.modify("num_failures", 0), "num_failures"),
    "another layer's name": (
        lambda f: f["features/flat"].attrs.modify("layer", "map"), "has layer map"),
    "another reduction": (
        lambda f: f["features/flat"].attrs.modify("reduce_p", 4.0), "reduce_p"),
    "a class": (overwrite("classes", 0, b"cow"), "/classes is not"),
    "a failure of another row": (overwrite("failures/row", 0, 1), "/failures"),
    "no failures": (lambda f: f.__delitem__("failures/message"), "failures/message"),
    "a layer too many": (lambda f: f["features"].copy("flat", "more"), "no layer more"),
    "a layer too few": (lambda f: f.__delitem__("features/map"), "features/map"),
    "fewer rows": (replaced("features/flat", lambda v: v[:-1]), "expected"),
    "wider rows": (replaced("features/flat", lambda v: np.hstack([v, v])), "expected"),
    "rows of doubles": (replaced("features/flat", lambda v: v.astype("f8")), "holds"),
    "big-endian labels": (replaced("label", lambda v: v.astype(">i8")), "/label is"),
    "labels as floats": (replaced("label", lambda v: v.astype("f8")), "/label is"),
    "wide status": (replaced("status", lambda v: v.astype("u2")), "/status is"),
    "fewer keys": (replaced("key", lambda v: v[:-1]), "/key is"),
    "a soft link": (link("features/flat", h5py.SoftLink("/features/map")), "another object"),
    "an external link": (link("features/flat", h5py.ExternalLink("x.h5", "/a")), "another object"),
    "checksums elsewhere": (
        link("checksums/features/flat", h5py.ExternalLink("/etc/x", "/a")), "another object"),
    "failures elsewhere": (
        link("failures/error", h5py.ExternalLink("/etc/x", "/a")), "another object"),
}  # fmt: skip


@pytest.mark.parametrize("packed", slow_except([True, False], True))
@pytest.mark.parametrize("kind", IN_A_FILE)
def test_damage_in_a_file_is_found_and_named(
    run: MadeRun, tmp_path: Path, kind: str, packed: bool
) -> None:
    run.copied(tmp_path, packed=packed)
    path = tmp_path / "features.h5" if packed else part_path(tmp_path, 0)
    change, words = IN_A_FILE[kind]
    if kind == "a status with its sum" and packed:
        words = "names 3 rows, /status 4"
    with edited(path) as file:
        change(file)
    report = checked(tmp_path)
    assert {damage.path for damage in report.damages} == {path}
    assert any(words in damage.what for damage in report.damages), report.as_dict()
    assert all(0 <= damage.start <= damage.stop <= 29 for damage in report.damages)
    assert report.missing == []


def test_rows_and_layer_of_damaged_chunks_are_named(run: MadeRun, tmp_path: Path) -> None:
    run.copied(tmp_path)
    for index, name in ((1, "features/map"), (3, "features/flat")):
        with h5py.File(part_path(tmp_path, index), "r+") as file:
            file[name][...] = 0.5
    assert [(d.path.name, d.start, d.stop, d.layer) for d in checked(tmp_path).damages] == [
        ("part-000001.h5", 8, 16, "map"),
        ("part-000003.h5", 24, 29, "flat"),
    ]


FILES = {
    "empty": lambda path: path.write_bytes(b""),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "cut": lambda path: os.truncate(path, path.stat().st_size * 2 // 3),
}


@pytest.mark.parametrize("damage", FILES)
class TestFiles:
    def test_a_part(self, run: MadeRun, tmp_path: Path, damage: str) -> None:
        run.copied(tmp_path)
        FILES[damage](part_path(tmp_path, 1))
        (found,) = checked(tmp_path).damages
        assert (found.path, found.start, found.stop) == (part_path(tmp_path, 1), 8, 16)

    def test_the_packed_file(self, run: MadeRun, tmp_path: Path, damage: str) -> None:
        run.copied(tmp_path, packed=True)
        FILES[damage](tmp_path / "features.h5")
        report = checked(tmp_path)
        assert [(d.path.name, d.start, d.stop) for d in report.damages] == [("features.h5", 0, 29)]
        assert len(report.missing) == 4

    def test_the_packed_file_hides_no_later_part(
        self, run: MadeRun, tmp_path: Path, damage: str
    ) -> None:
        run.copied(tmp_path, packed=True)
        make_added(run, {"deep": (3,)}).finish(tmp_path)
        FILES[damage](tmp_path / "features.h5")
        report = checked(tmp_path)
        assert [d.path.name for d in report.damages] == ["features.h5"]
        assert report.missing == [f"part-{i:06d}.h5" for i in range(4)]

    def test_the_listing(self, run: MadeRun, tmp_path: Path, damage: str) -> None:
        """Parts and features.h5 hold it too: it is never they that are blamed."""
        run.copied(tmp_path)
        FILES[damage](tmp_path / "samples.h5")
        assert [d.path.name for d in checked(tmp_path).damages] == ["samples.h5"]
        pack(tmp_path)
        assert [d.path.name for d in checked(tmp_path).damages] == ["samples.h5"]

    @pytest.mark.parametrize("packed", [True, False])
    def test_the_manifest(self, run: MadeRun, tmp_path: Path, damage: str, packed: bool) -> None:
        run.copied(tmp_path, packed=packed)
        FILES[damage](tmp_path / "featx.json")
        assert [d.path.name for d in checked(tmp_path).damages] == ["featx.json"]


@pytest.mark.parametrize("name", ["featx.json", "samples.h5"])
@pytest.mark.parametrize("packed", [True, False])
def test_a_lost_file_is_named(run: MadeRun, tmp_path: Path, name: str, packed: bool) -> None:
    run.copied(tmp_path, packed=packed)
    (tmp_path / name).unlink()
    (found,) = checked(tmp_path).damages
    assert (found.path.name, found.start, found.stop) == (name, 0, 0)
    assert "missing" in found.what


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["key", "label", "classes"])
def test_another_value_in_the_listing_is_the_listings_damage(
    run: MadeRun, tmp_path: Path, name: str, packed: bool
) -> None:
    run.copied(tmp_path, packed=packed)
    with h5py.File(tmp_path / "samples.h5", "r+") as file:
        file[name][1] = 7 if name == "label" else b"cow"
    assert [d.path.name for d in checked(tmp_path).damages] == ["samples.h5"]


def test_swapped_foreign_and_surplus_parts_are_named(run: MadeRun, tmp_path: Path) -> None:
    run.copied(tmp_path)
    other = run.changed(model="other").finish(tmp_path.parent / f"{tmp_path.name}-other")
    one, two = part_path(tmp_path, 0), part_path(tmp_path, 1)
    one.rename(tmp_path / "x")
    two.rename(one)
    (tmp_path / "x").rename(two)
    shutil.copy(part_path(other, 2), part_path(tmp_path, 2))
    shutil.copy(part_path(other, 3), part_path(tmp_path, 7))
    named = {d.path.name for d in checked(tmp_path).damages}
    assert named == {f"part-{i:06d}.h5" for i in (0, 1, 2, 7)}


def test_a_packed_file_of_another_run_is_named(run: MadeRun, tmp_path: Path) -> None:
    run.copied(tmp_path / "s", packed=True)
    run.changed(model="other").copied(tmp_path / "other", packed=True)
    shutil.copy(tmp_path / "other" / "features.h5", tmp_path / "s" / "features.h5")
    report = checked(tmp_path / "s")
    assert any("fingerprint" in d.what and d.stop == 29 for d in report.damages)


@pytest.mark.parametrize("name", ["key", "label", "classes"])
def test_a_packed_file_alone_vouches_for_its_listing(
    run: MadeRun, tmp_path: Path, name: str
) -> None:
    """There is no samples.h5 to compare with, but the fingerprint holds its sha256."""
    run.copied(tmp_path, packed=True)
    path = tmp_path / "features.h5"
    change = overwrite(name, 1, 1 if name == "label" else b"cow")
    with h5py.File(path, "r+") as file:
        (change if name == "classes" else summed(name, change))(file)
    # The checksum of /classes, which was not changed along, differs as well.
    damage, *_ = check_store(path).damages
    assert "not those of the extracted rows" in damage.what


def test_what_is_no_store_is_refused(run: MadeRun, tmp_path: Path) -> None:
    run.copied(tmp_path / "s")
    with h5py.File(tmp_path / "plain.h5", "w") as file:
        file["x"] = 1
    for path, words in (
        (tmp_path, "holds no store"),
        (tmp_path / "nothing", "holds no store"),
        (tmp_path / "plain.h5", "not a featx store"),
        (part_path(tmp_path / "s", 0), "one part of a store"),
    ):
        with pytest.raises(StoreError, match=words):
            check_store(path)


def test_a_file_that_cannot_be_read_now_is_no_damage(
    run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.copied(tmp_path)

    def failing(path: Path, **options: Any) -> h5py.File:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("featx.store.file_checks.open_hdf5", failing)
    with pytest.raises(StoreError, match="When it can be read"):
        check_store(tmp_path)


@pytest.mark.parametrize("moment", ["parts", "parts/part-000000.h5"])
def test_a_store_that_is_packed_or_grows_during_the_check_is_sound(
    run: MadeRun, tmp_path: Path, on_open: list[Callable[[str], None]], moment: str
) -> None:
    """The parts that the check found first are gone, or those of a later run are there."""
    grown, changes = make_grown(run, 9), [True]

    def changed_before(path: str) -> None:
        if changes and path == str(tmp_path / moment):
            grown.finish(tmp_path, grow=True, packed=changes.pop())

    run.copied(tmp_path)
    on_open.append(changed_before)
    report = check_store(tmp_path)
    assert report.complete, report.as_dict()
    assert report.num_rows == 38
    changes.append(False)
    grown = make_grown(grown, 3)
    report = check_store(tmp_path)
    assert report.complete, report.as_dict()
    assert report.num_rows in (38, 41)  # the parts that the check had found are still sound
