"""The bookkeeping of job=export: an export is whole or not there, what is not ours stays."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run_python, slow_except
from interruptions import files_of_at_most
from made_store import make_run, temporary_files
from processes import killed_at_sync
from tiny_model import job_result, run_job

import featx
from featx.errors import ConfigError, RunError, StoreError, StoreLockedError, StoreMismatchError
from featx.export import ExportFolder, selection
from featx.storage import exclusive_lock

pytestmark = pytest.mark.usefixtures("in_tmp_path", "without_retry_waits", "small_blocks")

KINDS = ("npy", "parquet", "safetensors", "zarr", "huggingface")
SMALL = {"shard_gib": 1000 / 2**30}


@pytest.fixture
def store() -> Path:
    return make_run(21, 8, failed=[3, 10]).copied(Path("store"))


def export(kind: str = "npy", out: str = "out", **keys: Any) -> int:
    options = {"format": kind, **(SMALL if kind in ("parquet", "safetensors") else {})}
    options |= keys.pop("export", {})
    return run_job("export", store="store", export=options, out=out, **keys)


def digests(folder: str = "out") -> dict[str, str]:
    """Name -> sha256 of every file but the record, which holds no rows."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and not path.relative_to(folder).parts[0].startswith((".", "_export"))
    }


def record(folder: str = "out") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "_export.json").read_text())
    return found


class StoppedError(Exception):
    """A process ends here."""


@pytest.mark.parametrize("kind", slow_except(KINDS, "npy", "parquet", "zarr"))
def test_an_export_that_was_stopped_anywhere_ends_as_one_that_was_not(
    kind: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(kind, out="at-once")
    expected = digests("at-once")
    read = selection.ExportSelection.read
    stops = 0
    for reads in (0, 3, 6, 9, 12):
        left = reads

        def stopping(self: Any, *arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise StoppedError
            return read(self, *arguments)

        with monkeypatch.context() as patched:
            patched.setattr(selection.ExportSelection, "read", stopping)
            try:
                export(kind)
            except StoppedError:
                stops += 1
        assert digests() in ({}, expected)
        assert temporary_files(Path("out")) == []
    assert stops >= 1
    export(kind)
    assert digests() == expected


def test_a_complete_export_is_not_written_again(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export("parquet")
    before = {path: path.stat().st_ino for path in Path("out/data").iterdir()}
    assert len(before) >= 3
    capsys.readouterr()
    export("parquet")
    assert "already complete" in capsys.readouterr().out
    assert {path: path.stat().st_ino for path in Path("out/data").iterdir()} == before
    export("parquet", overwrite=True)
    assert all(path.stat().st_ino != number for path, number in before.items())


@pytest.mark.slow
def test_killed_after_the_old_export_was_deleted(store: Path) -> None:
    export("npy", out="at-once", layers="flat")
    export("parquet")
    code = """
        from test_export_run import export
        export("npy", layers="flat", overwrite=True)
        """
    killed_at_sync(code, "_export.json")
    assert digests() == {}
    with pytest.raises(StoreMismatchError, match="format: parquet, now npy"):
        export("npy", layers="flat")
    export("npy", layers="flat", overwrite=True)
    assert temporary_files(Path("out")) == []
    assert digests() == digests("at-once")


def test_files_are_written_without_listing_their_folder_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 10,000 files a list of them for each would take most of the time."""
    listed, scandir = [], os.scandir

    def counting(path: Any = ".") -> Any:
        listed.append(os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counting)
    folder = ExportFolder(tmp_path)
    for number in range(20):
        with folder.file(f"{number}.csv") as file:
            file.write(b"%d" % number)
    assert listed == []
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(f"{number}.csv" for number in range(20))


def test_a_truncated_file_is_written_again(store: Path) -> None:
    export()
    expected = digests()
    os.truncate("out/features/map.npy", 300)
    export()
    assert digests() == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_by_sigkill(kind: str, store: Path) -> None:
    """In the middle of an export, with its first file written and not yet named."""
    export(kind, out="at-once")
    first = sorted(digests("at-once"))[0].split("/")[0].split(".")[0]
    code = f"""
        from featx.base import block_sizes
        from test_export_run import export
        block_sizes.BLOCK_BYTES = 400
        export({kind!r})
        """
    killed_at_sync(code, first)
    assert temporary_files(Path("out"))
    export(kind)
    assert temporary_files(Path("out")) == []
    assert digests() == digests("at-once")


def test_an_export_of_something_else_is_refused_and_named(store: Path) -> None:
    export()
    before = digests()
    with pytest.raises(StoreMismatchError, match=r"number of rows: 21, now 19") as refused:
        export(export={"ok_only": True})
    assert refused.value.exit_code == 2
    with pytest.raises(StoreMismatchError, match=r"format: npy, now parquet"):
        export("parquet")
    with pytest.raises(StoreMismatchError, match=r"layers: "):
        export(layers="flat")
    make_run(21, 8, failed=[3, 10], seed=5).write(Path("another"))
    with pytest.raises(StoreMismatchError, match="store's fingerprint"):
        run_job("export", store="another", out="out")
    make_run(21, 8, failed=[3, 11]).write(Path("third"))
    with pytest.raises(StoreMismatchError, match="sha256 of rows, keys, labels and status"):
        run_job("export", store="third", out="out")
    assert digests() == before


def test_overwrite_deletes_the_old_export_and_nothing_else(store: Path) -> None:
    export()
    Path("out/notes.txt").write_text("mine")
    export("parquet", overwrite=True)
    names = set(digests())
    assert "notes.txt" in names
    assert {name.split("/")[0] for name in names} == {"notes.txt", "data"}
    assert not Path("out/features").exists()


def test_a_folder_that_is_no_export_is_refused_and_left_alone(store: Path) -> None:
    Path("out").mkdir()
    Path("out/holiday.jpg").write_bytes(b"x")
    for overwrite in (False, True):
        with pytest.raises(StoreError, match=r"holds holiday\.jpg and is no export"):
            export(overwrite=overwrite)
    assert [path.name for path in Path("out").iterdir()] == ["holiday.jpg"]
    with pytest.raises(ConfigError, match="is the folder of a store"):
        export(out="store", overwrite=True)
    assert len(featx.open("store")) == 21


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"fingerprint": {}, "files": []}', "\0"])
def test_a_record_that_cannot_be_read_is_no_licence_to_delete(store: Path, text: str) -> None:
    export()
    Path("out/_export.json").write_text(text)
    before = digests()
    for overwrite in (False, True):
        with pytest.raises(StoreError, match=r"_export\.json cannot be read"):
            export(overwrite=overwrite)
    assert digests() == before


@pytest.mark.parametrize("name", ["../victim", "/etc/hostname", "a/../../victim", ""])
def test_a_record_cannot_delete_outside_of_its_folder(store: Path, name: str) -> None:
    export()
    Path("victim").write_text("mine")
    found = record()
    found["files"] = {name: 1}
    Path("out/_export.json").write_text(json.dumps(found))
    with pytest.raises(StoreError, match="not below it"):
        export(overwrite=True)
    assert Path("victim").read_text() == "mine"


def test_an_unfinished_store_is_refused_or_says_what_is_there() -> None:
    make_run(21, 8).write(Path("store"), parts=[1])
    with pytest.raises(StoreError, match=r"8 of 21 rows.*export\.incomplete=true"):
        export()
    assert not Path("out").exists()
    export(export={"incomplete": True})
    status = np.load("out/status.npy")
    assert (status == 255).tolist() == [not 8 <= row < 16 for row in range(21)]
    values = np.load("out/features/flat.npy")
    assert (np.isnan(values).all(axis=1) == (status == 255)).all()
    # More rows came: that is another export, of the same store.
    make_run(21, 8).finish(Path("store"))
    with pytest.raises(StoreMismatchError, match="overwrite=true"):
        export()
    export(overwrite=True)
    assert (np.load("out/status.npy") == 0).all()


def test_no_row_at_all_is_no_success() -> None:
    make_run(3, 4, failed=[0, 1, 2]).write(Path("store"))
    with pytest.raises(StoreError, match="nothing to export"):
        export(export={"ok_only": True})
    assert not Path("out").exists()


def test_a_second_export_into_one_folder_is_refused(store: Path) -> None:
    Path("out").mkdir()
    with (
        exclusive_lock(Path("out/.lock")),
        pytest.raises(StoreLockedError, match="another process"),
    ):
        export()
    export()


def test_a_full_disk_is_told_before_or_leaves_nothing_half(
    store: Path, set_free_disk: Callable[[int], None]
) -> None:
    free = shutil.disk_usage(".").free
    set_free_disk(100)
    with pytest.raises(RunError, match=r"needs about .* and 100 B are free"):
        export()
    set_free_disk(free)
    with (
        files_of_at_most(1000),
        pytest.raises(RunError, match=r"Raise the limit \(ulimit -f\)") as failed,
    ):
        export("parquet")
    assert failed.value.exit_code == 1
    assert digests() == {}
    assert temporary_files(Path("out")) == []
    export("npy")
    before = digests()
    with files_of_at_most(1000), pytest.raises(RunError, match="Raise the limit"):
        export("parquet", overwrite=True)
    assert digests() == before, "the old export stays until the new one is complete"


def test_a_disk_that_fails_while_files_get_their_names_ends_with_one_line(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as failing:
        failing.setattr(os, "rename", fails)
        failing.setattr(os, "rmdir", fails)  # the export cannot be cleared away either
        with pytest.raises(RunError, match=r"^writing \S+/out/features/flat.npy failed: Input"):
            export()
    export()
    expected = digests()
    assert temporary_files(Path("out")) == []
    export("npy", out="at-once")
    assert digests("at-once") == expected


def test_what_a_killed_export_left_is_deleted_though_its_files_are_there(store: Path) -> None:
    export()
    Path("out/.tmp-export/features").mkdir(parents=True)
    export()
    assert temporary_files(Path("out")) == []


def test_without_out_it_lies_next_to_the_store(store: Path) -> None:
    assert run_job("export", store="store") == 0
    assert Path("store/export-npy/features/flat.npy").exists()
    assert len(featx.open("store")) == 21
    assert (
        featx.export_store(store="store/", export={"format": "parquet"})
        == Path("store/export-parquet").absolute()
    )


def test_the_result_as_json(store: Path) -> None:
    found = job_result("export", store="store", out="out")
    assert (found["rows"], found["failures"], found["already"]) == (21, 2, False)
    assert found["bytes"] == sum(
        path.stat().st_size
        for path in Path("out").rglob("*")
        if path.is_file() and path.name not in ("_export.json", ".lock")
    )


def test_keys_without_effect_are_refused(store: Path) -> None:
    with pytest.raises(ConfigError, match=r"shard_gib has an effect with .*parquet"):
        export("zarr", export={"shard_gib": 1})
    for kind, instead in (
        ("lance", "parquet"),
        ("projector", "tensorboard"),
        ("thingsvision", "npy"),
    ):
        with pytest.raises(ConfigError, match=rf"export\.format={kind} is gone: .*{instead}"):
            export(kind)
    with pytest.raises(ConfigError, match=r"export\.push is gone: `hf upload "):
        run_job("export", store="store", export={"push": "me/photos"})
    with pytest.raises(ConfigError, match="job=export needs store=DIR"):
        run_job("export", out="out")


_MEASURED = """
import importlib, sys, threading, time
from featx.export.run import run_export
from featx.config.schema import from_keywords, from_composed
from featx.base import block_sizes
block_sizes.BLOCK_BYTES = 8 << 20

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) >> 10

def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)

peak = 0
threading.Thread(target=watch, daemon=True).start()
for kind in sys.argv[1:]:
    for store in ("small", "large"):
        options = {"format": kind, **({"shard_gib": 1 / 64} if kind == "safetensors" else {})}
        node = from_keywords({"store": store, "out": f"{kind}-{store}", "export": options})
        node["job"]["name"] = "export"
        peak = before = anonymous()
        run_export(from_composed(node))
        if store == "large":
            print(kind, peak - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_does_not_grow_with_the_store() -> None:
    """192 MiB of features in blocks of 4 MiB; safetensors holds shards, here of 16 MiB."""
    make_run(8, 8, {"x": (16,)}).write(Path("small"))
    make_run(12288, 4096, {"x": (4096,)}).write(Path("large"))
    done = run_python("-c", _MEASURED, *KINDS)
    grown = {line.split()[0]: int(line.split()[1]) for line in done.stdout.splitlines()}
    assert set(grown) == set(KINDS)
    assert all(mib < 96 for mib in grown.values()), grown
