"""Tar shards on a disk: which rows there are, what reading one gives, and what is kept."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import sys
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from image_faults import fault_of
from made_shards import header_of_size, write_shards, write_tar

from featx.errors import ConfigError, DataError, MissingExtraError
from featx.sources import open_source, tar_index
from featx.sources.path_patterns import expand_braces
from featx.sources.webdataset import ShardSource, WebDatasetOptions
from featx.types import ImageFault, Listing, Status

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def cache(cache_folder: Path) -> Path:
    return cache_folder / "shards"


def shards(root: Path | str, **keys: object) -> ShardSource:
    source = open_source(WebDatasetOptions(root=str(root), **keys))
    assert isinstance(source, ShardSource)
    return source


def rows_of(listing: Listing) -> dict[bytes, str | None]:
    names = [*listing.classes, None]
    return {
        k: names[v] for k, v in zip(listing.keys.tolist(), listing.labels.tolist(), strict=True)
    }


def contents(source: ShardSource) -> dict[bytes, bytes]:
    return {key: source.read(key) for key in source.listing().keys.tolist()}


# What is listed


def test_keys_are_shard_and_member_and_labels_their_class_folders(tmp_path: Path) -> None:
    write_tar(tmp_path / "s" / "b.tar", {"dog/1.jpg": b"1", "cat/2.JPG": b"2", "3.png": b"3"})
    write_tar(tmp_path / "s" / "sub" / "b.tar", {"dog/1.jpg": b"4"})
    write_tar(tmp_path / "s" / "a.tar.gz", {"./cat/old/9.webp": b"5"})
    write_tar(tmp_path / "s" / "c.tgz", {"10.jpg": b"6", "9.jpg": b"7"})
    source = shards(tmp_path / "s")
    assert rows_of(source.listing()) == {
        b"a.tar.gz/cat/old/9.webp": "cat",
        b"b.tar/3.png": None,
        b"b.tar/cat/2.JPG": "cat",
        b"b.tar/dog/1.jpg": "dog",
        b"c.tgz/10.jpg": None,
        b"c.tgz/9.jpg": None,
        b"sub/b.tar/dog/1.jpg": "dog",
    }
    assert list(contents(source).values()) == [b"5", b"3", b"2", b"1", b"6", b"7", b"4"]
    keys = source.listing().keys.tolist()
    assert keys == sorted(keys)


def test_a_cls_next_to_the_image_is_the_label(tmp_path: Path) -> None:
    files = {"a.cls": b"2", "a.jpg": b"x", "b.left.jpg": b"x", "b.right.jpg": b"x", "b.cls": b"0\n"}
    files |= {"c.d.jpg": b"x", "c.d.cls": b"1", "none.jpg": b"x", "a.txt": b"9", "a.json": b"{}"}
    listing = shards(write_tar(tmp_path / "x.tar", files)).listing()
    assert listing.classes == ("0", "1", "2")
    assert dict(zip(listing.keys.tolist(), listing.labels.tolist(), strict=True)) == {
        b"x.tar/a.jpg": 2,
        b"x.tar/b.left.jpg": 0,
        b"x.tar/b.right.jpg": 0,
        b"x.tar/c.d.jpg": 1,
        b"x.tar/none.jpg": -1,
    }
    assert listing.skipped == {"other names": 2}


@pytest.mark.parametrize(
    ("files", "expected", "left_out"),
    [
        ({"0.input.jpg": b"x", "0.output.cls": b"4"}, {"0.input.jpg": 4}, {}),
        ({"0.jpg": b"x", "0.label.cls": b"4"}, {"0.jpg": 4}, {}),
        ({"d/0.jpg": b"x", "d/0.outputs.cls": b"4"}, {"d/0.jpg": 4}, {}),
        (
            {"0.img.jpg": b"x", "0.cls": b"4", "0.label.cls": b"5"},
            {"0.img.jpg": 4},
            {".cls of no": 1},
        ),
        (
            {"0.jpg": b"x", "0.fine_label.cls": b"4", "0.coarse_label.cls": b"5"},
            {"0.jpg": None},
            {"several .cls of one image": 2},
        ),
        # Names with dots that are no keys of WebDataset: the label of image 2 is not that of 1.
        ({"i.2.jpg": b"x", "i.1.cls": b"1"}, {"i.2.jpg": None}, {".cls of no image": 1}),
        ({"0.jpg": b"x", "1.cls": b"1"}, {"0.jpg": None}, {".cls of no image": 1}),
        ({"0.jpg": b"x", "0.CLS": b"3"}, {"0.jpg": 3}, {}),
    ],
)
def test_which_cls_belongs_to_an_image(
    tmp_path: Path,
    files: dict[str, bytes],
    expected: dict[str, int | None],
    left_out: dict[str, int],
) -> None:
    listing = shards(write_tar(tmp_path / "x.tar", files)).listing()
    found = {
        os.fsdecode(key).removeprefix("x.tar/"): None if label < 0 else label
        for key, label in zip(listing.keys.tolist(), listing.labels.tolist(), strict=True)
    }
    assert found == expected
    assert len(listing.skipped) == len(left_out)
    for (reason, count), (start, expected_count) in zip(
        listing.skipped.items(), left_out.items(), strict=True
    ):
        assert reason.startswith(start)
        assert count == expected_count


def test_what_looks_like_labels_and_is_not_used_is_said(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"0.jpg": b"x", "0.index": b"4", "0.json": b"{}"})
    note = shards(tmp_path / "a.tar").listing().label_note
    assert "no .cls members and no folders" in note
    assert "members that are not used end in .index, .json" in note
    write_tar(tmp_path / "b.tar", {"cat/0.jpg": b"x", "dog/1.jpg": b"x", "dog/1.cls": b"4"})
    listing = shards(tmp_path / "b.tar").listing()
    assert listing.labels.tolist() == [-1, 4]
    assert "1 image lies in a folder and has no .cls member, so no label" in listing.warnings[0]


def test_two_cls_of_one_name_have_to_agree(tmp_path: Path) -> None:
    def write(numbers: tuple[bytes, bytes]) -> Path:
        with tarfile.open(tmp_path / "x.tar", "w") as tar:
            for name, content in (("0.jpg", b"x"), *(("0.cls", number) for number in numbers)):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        return tmp_path / "x.tar"

    with pytest.raises(DataError, match=r"two members 0\.cls, which hold 4 and 9; expected one"):
        shards(write((b"4", b"9"))).listing()
    assert shards(write((b"4", b"4\n"))).listing().labels.tolist() == [4]


def test_a_cls_may_hold_the_name_of_the_class(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    write_tar(tmp_path / "s" / "a.tar", {"0.jpg": b"x", "0.cls": b"dog\n", "1.jpg": b"x"})
    write_tar(tmp_path / "s" / "b.tar", {"2.jpg": b"x", "2.cls": "Bär".encode(), "2.cls ": b"9"})
    write_tar(tmp_path / "s" / "c.tar", {"3.jpg": b"x", "3.cls": b"dog"})
    for _ in range(2):  # the second time from the cache
        rows = rows_of(shards(tmp_path / "s").listing())
        assert list(rows.values()) == ["dog", None, "Bär", "dog"]
    write_tar(tmp_path / "s" / "d.tar", {"4.jpg": b"x", "4.cls": b"None"})
    (warning,) = shards(tmp_path / "s").listing().warnings
    assert "s: 1 row has the text 'None', which counts as a class" in warning
    write_tar(tmp_path / "s" / "d.tar", {"4.jpg": b"x", "4.cls": b"7"})
    with pytest.raises(
        DataError, match=r"'dog' for a\.tar/0\.jpg and 7 for d\.tar/4\.jpg; expected"
    ):
        shards(tmp_path / "s").listing()


@pytest.mark.parametrize(
    "content",
    [b"", b" \n", b"1.5", b"-2", b"1" * 30, b"a\0", b"\xff", b"c" * 300, b"3,7", b"[0 1]"],
)
def test_a_cls_that_is_no_number_and_no_name_is_an_error(tmp_path: Path, content: bytes) -> None:
    write_tar(tmp_path / "x.tar", {"a.jpg": b"x", "a.cls": content})
    with pytest.raises(DataError, match=r"x\.tar: a\.cls holds b.*expected the number or the"):
        shards(tmp_path / "x.tar").listing()


def test_links_devices_hidden_and_other_names_are_left_out_and_counted(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name, kind in (("l.jpg", b"2"), ("h.jpg", b"1"), ("dev.jpg", b"3"), ("pipe.jpg", b"6")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        for name in (
            "a.jpg",
            "._a.jpg",
            "__MACOSX/._b.jpg",
            "../../up.jpg",
            "a.txt",
            "jpg",
            ".jpg",
        ):
            tar.addfile(tarfile.TarInfo(name))
    listing = shards(tmp_path / "x.tar").listing()
    assert listing.keys.tolist() == [b"x.tar/a.jpg"]
    assert listing.skipped == {"no regular files": 4, "hidden": 4, "other names": 2}


def test_nothing_is_extracted_whatever_the_names_say(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", {"/tmp/featx-evil.jpg": b"x", "a/b.jpg": b"y"})
    source = shards(tmp_path / "x.tar")
    assert contents(source) == {b"x.tar/a/b.jpg": b"y", b"x.tar/tmp/featx-evil.jpg": b"x"}
    assert not Path("/tmp/featx-evil.jpg").exists()


def test_extensions_say_what_counts(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", {"a.jpg": b"1", "b.PNG": b"2", "c.img": b"3"})
    assert len(shards(tmp_path / "x.tar").listing()) == 2
    assert list(contents(shards(tmp_path / "x.tar", extensions=["img", ".png"])).values()) == [
        b"2",
        b"3",
    ]


def test_brace_ranges_and_globs_name_shards(tmp_path: Path) -> None:
    write_shards(tmp_path / "s", 9, 3)
    every = rows_of(shards(tmp_path / "s").listing())
    assert rows_of(shards(f"{tmp_path}/s/train-{{000..002}}.tar").listing()) == every
    assert rows_of(shards(f"{tmp_path}/s/train-*.tar").listing()) == every
    mixed = shards(f"{tmp_path}/{{s,s}}/train-00[0-2].tar").listing()
    assert rows_of(mixed) == {b"s/" + key: name for key, name in every.items()}
    two = shards(f"{tmp_path}/s/train-{{001..002}}.tar").listing()
    assert two.keys[0] == b"train-001.tar/0003.png"
    with pytest.raises(DataError, match=r"train-003\.tar no such file or directory"):
        shards(f"{tmp_path}/s/train-{{000..003}}.tar").listing()


def test_braces_expand() -> None:
    assert expand_braces("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert expand_braces("{9..10}") == ["9", "10"]
    assert expand_braces("{x,y}/{0..1}") == ["x/0", "x/1", "y/0", "y/1"]
    assert expand_braces("plain.tar") == ["plain.tar"]
    for wrong in ("{5..3}", "{0..9999999}", "{0..999}{0..999}{0..9}"):
        with pytest.raises(DataError, match=r"data\.root="):
            expand_braces(wrong)


@pytest.mark.parametrize(
    "root",
    ["pipe:curl http://x/a.tar", "pipe:cat a.tar", "exec://x.tar", "zip://a.tar::http://x/y"],
)
def test_commands_and_chained_urls_are_refused(root: str) -> None:
    with pytest.raises(DataError, match=r"Commands \(pipe:\) and chained URLs \(::\) are refused"):
        shards(root).listing()


def test_passwords_in_a_url_are_refused() -> None:
    with pytest.raises(DataError, match="user name or a password") as caught:
        shards("https://me:hunter2@host/a.tar").listing()
    assert "hunter2" not in str(caught.value)


def test_errors_before_the_start_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data=webdataset needs data\.root"):
        WebDatasetOptions()
    with pytest.raises(DataError, match=r"nowhere\.tar no such file"):
        shards(tmp_path / "nowhere.tar").listing()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no images below .*\.tar"):
        shards(tmp_path / "empty").listing()
    (tmp_path / "x.tar").write_bytes(b"")
    with pytest.raises(DataError, match=r"x\.tar .*is empty"):
        shards(tmp_path / "x.tar").listing()
    with pytest.raises(DataError, match=r"no images in 1 shard of .*Left out: 1 other names"):
        shards(write_tar(tmp_path / "x.tar", {"a.txt": b"x"})).listing()
    source = shards(write_tar(tmp_path / "x.tar", {"a.jpg": b"x", "./a.jpg": b"x", "b.jpg": b"y"}))
    assert source.listing().keys.tolist() == [b"x.tar/a.jpg", b"x.tar/b.jpg"]
    fault = fault_of(source, b"x.tar/a.jpg")
    assert (fault.status, "two members of this name" in str(fault)) == (Status.DECODE_ERROR, True)
    assert source.read(b"x.tar/b.jpg") == b"y"


# What reading gives


@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_rows_in_any_order_from_several_threads(tmp_path: Path, ending: str) -> None:
    source = shards(write_shards(tmp_path / "s", 60, 3, ending))
    listing = source.listing()
    assert len(listing) == 60
    keys = 3 * listing.keys.tolist()
    random.Random(0).shuffle(keys)
    with ThreadPoolExecutor(8) as threads:
        for key, data in zip(keys, threads.map(source.read, keys), strict=True):
            assert data == (tmp_path / "loose" / os.fsdecode(key).rpartition("/")[2]).read_bytes()


@pytest.mark.slow
def test_a_compressed_shard_is_read_in_any_order(tmp_path: Path) -> None:
    files = {f"{i:02d}.jpg": random.Random(i).randbytes(1 << 20) for i in range(40)}
    files["40.jpg"] = bytes(5 << 20)
    source = shards(write_tar(tmp_path / "x.tar.gz", files))
    keys = [f"x.tar.gz/{name}".encode() for name in files]
    source.listing()
    for order in (keys[::-1], random.Random(0).sample(keys, len(keys))):
        assert [source.read(key) for key in order] == [files[k[-6:].decode()] for k in order]


def test_without_indexed_gzip_a_compressed_shard_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "indexed_gzip", None)
    write_tar(tmp_path / "x.tar.gz", {"1.jpg": b"1"})
    with pytest.raises(MissingExtraError, match=r'pip install "featx\[shards\]"'):
        shards(tmp_path / "x.tar.gz").listing()
    assert len(shards(write_tar(tmp_path / "x.tar", {"1.jpg": b"1"})).listing()) == 1


@pytest.mark.parametrize(
    ("hostile", "message"),
    [
        (b"", "is empty; expected a tar"),
        (b"<html>404</html>" * 100, "is no tar: the header at byte 0 is damaged"),
        (header_of_size(b"\xff" * 12) + bytes(1024), "impossible size"),
        (b"BZh91AY", "is compressed with bzip2"),
        (gzip.compress(bytes(20 << 20), mtime=0), "expand to more than"),
        (gzip.compress(b"x" * 2000, mtime=0)[:-8] + bytes(8), "is no tar|is damaged"),
    ],
    ids=["empty", "HTML", "negative", "bzip2", "bomb", "damaged gzip"],
)
def test_a_hostile_shard_is_one_row_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hostile: bytes, message: str
) -> None:
    monkeypatch.setattr("featx.sources.tar_index.FREE_BYTES", 1 << 20)
    write_tar(tmp_path / "s" / "a.tar", {"0.jpg": b"x", "0.cls": b"1"})
    (tmp_path / "s" / "b.tar").write_bytes(hostile)
    for _ in range(2):  # the second listing comes from the index on the disk
        source = shards(tmp_path / "s")
        listing = source.listing()
        is_named = hostile[:5] == b"a.png"  # the header of a member with an impossible size
        row = b"b.tar/a.png" if is_named else b"b.tar/(the shard)"
        assert rows_of(listing) == {b"a.tar/0.jpg": "1", row: None}
        assert source.read(b"a.tar/0.jpg") == b"x"
        fault = fault_of(source, row)
        assert fault.status == (Status.TRUNCATED if is_named else Status.DECODE_ERROR)
        assert re.search(message, str(fault))
        (reason,) = listing.skipped
        start = "shard that ends early (b.tar: " if is_named else "refused shard (b.tar "
        assert reason.startswith(start)


def test_folders_of_nas_devices_and_systems_are_left_out(tmp_path: Path) -> None:
    folders = [
        "@eaDir",
        "#recycle",
        "#snapshot",
        "@Recycle",
        "$RECYCLE.BIN",
        "__MACOSX",
        "lost+found",
    ]
    names = [f"{name}/a.jpg" for name in (*folders, "System Volume Information", "cat/@eaDir")]
    path = write_tar(tmp_path / "x.tar", dict.fromkeys([*names, "cat/@eaDir.jpg"], b"x"))
    listing = shards(path).listing()
    assert rows_of(listing) == {b"x.tar/cat/@eaDir.jpg": "cat"}
    assert listing.skipped == {"in folders of the system, such as @eaDir": 9}


def test_empty_and_huge_members_are_failures_of_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("featx.sources.webdataset.MAX_FILE_BYTES", 1000)
    source = shards(
        write_tar(tmp_path / "x.tar", {"e.jpg": b"", "h.jpg": bytes(1001), "o.jpg": b"x"})
    )
    source.listing()
    assert fault_of(source, b"x.tar/e.jpg").status == Status.EMPTY
    assert fault_of(source, b"x.tar/h.jpg").status == Status.TOO_LARGE
    assert source.read(b"x.tar/o.jpg") == b"x"
    assert fault_of(source, b"x.tar/o.jpgx").status == Status.MISSING


@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_a_truncated_shard_gives_whole_members_and_a_row_that_says_so(
    tmp_path: Path, ending: str
) -> None:
    files = {f"{i}.jpg": random.Random(i).randbytes(3000) for i in range(6)}
    path = write_tar(tmp_path / f"x.{ending}", files)
    write_tar(tmp_path / f"y.{ending}", {"0.jpg": b"y"})
    path.write_bytes(path.read_bytes()[:12_000])
    source = shards(f"{tmp_path}/*.{ending}")
    listing = source.listing()
    whole = {k: v for k, v in files.items() if f"x.{ending}/{k}".encode() in listing.keys.tolist()}
    assert len(whole) >= 3
    bad = []
    for key in listing.keys.tolist():
        expected = b"y" if key.startswith(b"y") else whole.get(os.fsdecode(key).split("/")[1])
        try:
            assert source.read(key) == expected
        except ImageFault as fault:
            bad.append((key, fault))
    assert len(bad) == 1
    assert bad[0][1].status == Status.TRUNCATED
    assert f"x.{ending} is not whole" in str(bad[0][1])
    assert [f"x.{ending}" in why for why in listing.skipped] == [True]


@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_a_shard_changed_while_it_is_read_is_no_fault_of_its_images(
    tmp_path: Path, ending: str
) -> None:
    path = write_tar(tmp_path / f"x.{ending}", {"a.jpg": b"old"})
    key = f"x.{ending}/a.jpg".encode()
    source = shards(path)
    source.listing()
    write_tar(path, {"b.jpg": b"longer content", "a.jpg": b"new"})
    with pytest.raises(OSError, match="changed while it was in use"):
        source.read(key)
    source.listing()
    assert source.read(key) == b"new"
    path.unlink()
    if ending == "tar":
        with pytest.raises(FileNotFoundError):
            source.read(key)


def test_a_shard_of_a_time_that_int64_does_not_hold(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", {"a.jpg": b"1"})
    os.utime(path, (0, 13_569_465_600))
    source = shards(path)
    assert source.states(source.listing().keys)["mtime_ns"] == (1 << 63) - 1


def test_a_shard_of_the_same_size_and_time_is_another_shard(tmp_path: Path) -> None:
    members, states = {"a.jpg": b"1", "b.jpg": b"2"}, []
    for some in (members, dict(reversed(members.items()))):
        path = write_tar(tmp_path / "x.tar", some)
        os.utime(path, (1e9, 1e9))
        source = shards(path)
        states.append(source.states(source.listing().keys[:1]))
        assert source.read(b"x.tar/a.jpg") == b"1"
    assert states[0] != states[1]


def test_a_wrong_checksum_of_a_compressed_shard_is_an_error(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar.gz", {"a.jpg": random.Random(0).randbytes(5000)})
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"x\.tar\.gz is damaged: CRC.*get the shard again"):
        shards(path).listing()


# What is kept


def indexed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards whose headers are read from now on."""
    seen: list[str] = []
    build = tar_index.build
    lock = threading.Lock()

    def noted(shard: tar_index.Shard, endings: frozenset[bytes]) -> tar_index.TarIndex:
        with lock:
            seen.append(os.fsdecode(shard.name))
        return build(shard, endings)

    monkeypatch.setattr(tar_index, "build", noted)
    return seen


def same(one: Listing, other: Listing) -> bool:
    return (
        one.keys.tobytes() == other.keys.tobytes()
        and one.labels.tobytes() == other.labels.tobytes()
        and (one.classes, one.skipped) == (other.classes, other.skipped)
    )


def test_headers_are_read_once_and_again_where_a_shard_changed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = indexed(monkeypatch)
    write_shards(tmp_path / "s", 9, 3)
    first = shards(tmp_path / "s").listing()
    assert sorted(seen) == ["train-000.tar", "train-001.tar", "train-002.tar"]
    assert len(list(cache.iterdir())) == 3
    assert cache.stat().st_mode & 0o777 == 0o700
    seen.clear()
    assert same(shards(tmp_path / "s").listing(), first)
    assert seen == []
    os.utime(tmp_path / "s" / "train-001.tar", ns=(1, 1))
    assert same(shards(tmp_path / "s").listing(), first)
    assert seen == ["train-001.tar"]
    seen.clear()
    shards(tmp_path / "s", extensions=["png"]).listing()
    assert len(seen) == 3  # what counts as an image is part of it


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "of another", "json"])
def test_a_damaged_index_is_made_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    write_shards(tmp_path / "s", 6, 2)
    first = shards(tmp_path / "s").listing()
    one, two = sorted(cache.iterdir())
    data = bytearray(one.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "json":
        data = bytearray(json.dumps({}).encode())
    one.write_bytes(
        {"cut": data[:-9], "empty": b"", "of another": two.read_bytes()}.get(damage, data)
    )
    seen = indexed(monkeypatch)
    assert same(shards(tmp_path / "s").listing(), first)
    assert len(seen) == 1
    assert same(shards(tmp_path / "s").listing(), first)
    assert len(seen) == 1


def test_without_a_place_for_indexes_headers_are_read_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    seen = indexed(monkeypatch)
    write_shards(tmp_path / "s", 3, 1)
    assert same(shards(tmp_path / "s").listing(), shards(tmp_path / "s").listing())
    assert len(seen) == 2
