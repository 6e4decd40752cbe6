"""job=pack: a store kept in parts becomes one file, or stays as it is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Stored
from made_store import dataset_digests, temporary_files
from tiny_model import extract_six_parts as extract
from tiny_model import run_job

import featx
from featx.errors import RunError, StoreError, StoreLockedError

PACKED = Path("store/features.h5")


pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_packed_later_is_what_is_packed_at_once(
    photos: Path, codec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "cat" / "000.png").write_bytes(b"no image")
    keys = {"layers": ["conv", "pool"], "codec": codec}
    kept = extract(photos, pack=False, **keys)
    extract(photos, out="at-once", **keys)
    before = kept["conv"][:].tobytes()
    assert run_job("pack", out="store") == 0
    assert "packed now, its parts are deleted" in capsys.readouterr().out
    assert dataset_digests("store") == dataset_digests("at-once")
    assert not Path("store/parts").exists()
    # A reader that had the parts open continues with the packed file.
    assert kept["conv"][:].tobytes() == before
    assert run_job("verify", out="store") == 0


def test_a_second_time_there_is_nothing_to_do(
    stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(pack=False)
    run_job("pack", out="store")
    before = PACKED.stat()
    for name in ("store", "store/features.h5"):
        assert run_job("pack", store=name) == 0
        assert "was packed already" in capsys.readouterr().out
        assert run_job("status", store=name) == 0
        assert "21 of 21, 100.0%" in capsys.readouterr().out
    after = PACKED.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.slow
def test_layers_that_came_later_join_the_packed_file(photos: Path) -> None:
    extract(photos)
    extract(photos, layers=["conv", "pool"], pack=False)
    assert Path("store/parts").is_dir()
    assert run_job("pack", out="store") == 0
    extract(photos, layers=["conv", "pool"], out="both")
    assert dataset_digests("store") == dataset_digests("both")
    assert run_job("verify", out="store", verify={"reextract_rows": 21}) == 0


def test_an_unfinished_store_is_refused_and_keeps_its_parts(stored: Stored) -> None:
    stored(pack=False)
    Path("store/parts/part-000003.h5").unlink()
    with pytest.raises(StoreError, match=r"1 part is missing, part-000003\.h5 first") as refused:
        run_job("pack", out="store")
    assert refused.value.exit_code == 2
    assert len(list(Path("store/parts").iterdir())) == 5
    assert not PACKED.exists()


def test_without_room_the_parts_are_kept(
    stored: Stored, set_free_disk: Callable[[int], None]
) -> None:
    stored(pack=False)
    before = featx.open("store")["conv"][:].tobytes()
    free = shutil.disk_usage(".").free
    set_free_disk(1000)
    with pytest.raises(RunError, match=r"needs \d+ bytes, but 1000 are free") as no_room:
        run_job("pack", out="store")
    set_free_disk(free)
    assert no_room.value.exit_code == 1
    assert not PACKED.exists()
    assert len(list(Path("store/parts").iterdir())) == 6
    assert featx.open("store")["conv"][:].tobytes() == before
    assert run_job("pack", out="store") == 0
    assert featx.open("store")["conv"][:].tobytes() == before


def test_a_part_that_is_damaged_is_named_and_never_packed(stored: Stored) -> None:
    photos = stored(pack=False)
    whole = featx.open("store")["conv"][:].tobytes()
    part = Path("store/parts/part-000002.h5")
    data = bytearray(part.read_bytes())
    values = featx.open("store")["conv"][9].tobytes()
    data[data.index(values)] ^= 1
    part.write_bytes(data)
    message = r"part-000002\.h5 is damaged.*next run.*The command of the run packs them"
    with pytest.raises(RunError, match=message) as failed:
        run_job("pack", out="store")
    assert failed.value.exit_code == 1
    assert not PACKED.exists()
    assert temporary_files(Path("store")) == []
    # The command that began the store computes what went, and packs.
    assert extract(photos)["conv"][:].tobytes() == whole


def test_what_is_no_store_and_a_damaged_file_are_refused_by_name(stored: Stored) -> None:
    photos = stored()
    for where in ("nowhere", "photos", "photos/cat/000.png"):
        with pytest.raises(StoreError, match=where) as refused:
            run_job("pack", store=where)
        assert refused.value.exit_code == 2
    assert sorted(path.name for path in photos.iterdir()) == ["cat", "dog"]
    os.truncate(PACKED, 3000)
    with pytest.raises(StoreError, match=r"features\.h5.*`python -m featx job=verify") as damaged:
        run_job("pack", out="store")
    *_, command, _ = str(damaged.value).split("`")
    store, repair = command.split()[-2:]
    assert (store, repair) == (f"store={Path('store').absolute()}", "verify.repair=true")
    with pytest.raises(StoreError, match=re.escape(f"`{command}`")):
        featx.open("store")


def test_a_running_writer_is_told_by_its_pid(stored: Stored) -> None:
    stored(pack=False)
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from featx.storage import exclusive_lock\n"
        "with exclusive_lock(Path('store/.lock')):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(60)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "held\n"
        with pytest.raises(
            StoreLockedError, match=f"another process, pid {writer.pid} on "
        ) as refused:
            run_job("pack", out="store")
    finally:
        writer.kill()
        writer.communicate()
    assert refused.value.exit_code == 2
    assert "{" not in str(refused.value)
    assert not PACKED.exists()
    # The lock goes with the process that held it.
    assert run_job("pack", out="store") == 0
