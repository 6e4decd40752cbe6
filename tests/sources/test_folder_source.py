"""The folder source: which rows there are, in which order, and what reading one may say."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import run_python
from hypothesis import given, settings
from hypothesis import strategies as st
from image_faults import fault_of, image_fault

from featx.errors import ConfigError, DataError
from featx.sources import FolderOptions, FolderSource, open_source
from featx.sources.base import EXTENSIONS, MAX_FILE_BYTES
from featx.types import Source, Status

OUT_OF_FOLDER = "links out of the folder (data.follow_links=true follows them)"
NOBODY = 65534


def write(root: Path, *names: str | bytes, content: bytes = b"image") -> None:
    """Files below a folder, with their folders."""
    for name in names:
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120 - bytes paths
        Path(os.fsdecode(path)).write_bytes(content)


def keys_of(root: Path, **options: bool) -> list[bytes]:
    return FolderSource(root, **options).listing().keys.tolist()


@pytest.mark.parametrize(
    ("names", "hint"),
    [
        (("train/cat/1.png", "Val/dog/2.png", "new/3.png"), "Val and train: data.root={}/Val has"),
        (("train/cat/1.png",), "train: data.root={}/train has the classes in it"),
        (("train/1.png", "val/2.png"), ""),
        (("test/a/1.png", "cat/a/2.png"), ""),
        (("1.png",), ""),
    ],
)
def test_folders_of_train_and_val_are_said_to_be_no_classes(
    names: tuple[str, ...], hint: str, tmp_path: Path
) -> None:
    write(tmp_path, *names)
    note = FolderSource(tmp_path).listing().label_note
    assert note.startswith(hint.format(tmp_path)) if hint else note == ""


@contextlib.contextmanager
def without_root_rights() -> Iterator[Path]:
    """A new folder owned by a user whom permissions bind, and this process as that user."""
    folder = Path(tempfile.mkdtemp())
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.chown(folder, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        for path, _, _ in os.walk(folder):
            Path(path).chmod(0o700)
        shutil.rmtree(folder)


# What is listed, and in which order


def test_keys_are_relative_paths_with_extension_in_bytewise_order(tmp_path: Path) -> None:
    """'-' < '.' < '/' < capitals < '_' < small letters < everything beyond ASCII."""
    names = ["b/1.jpg", "a/x.png", "a-/x.png", "a.d/x.png", "B/1.jpg", "é/1.jpg", "_/1.jpg"]
    write(tmp_path, *names, "z.jpg", "a/y/z/deep.jpg", "10.jpg", "9.jpg")
    keys = keys_of(tmp_path)
    assert keys == [
        b"10.jpg",
        b"9.jpg",
        b"B/1.jpg",
        b"_/1.jpg",
        b"a-/x.png",
        b"a.d/x.png",
        b"a/x.png",
        b"a/y/z/deep.jpg",
        b"b/1.jpg",
        b"z.jpg",
        "é/1.jpg".encode(),
    ]
    assert keys == sorted(keys)


def test_times_that_int64_does_not_hold(tmp_path: Path) -> None:
    """File systems store times up to 2446 and more, and int64 nanoseconds up to 2262."""
    write(tmp_path, "a.jpg", "b.jpg", "c.jpg")
    os.utime(tmp_path / "a.jpg", (0, 13_569_465_600))
    os.utime(tmp_path / "b.jpg", (0, -631_152_000))
    source = FolderSource(tmp_path)
    keys = source.listing().keys
    before = source.states(keys)
    assert before["mtime_ns"][1] == -631_152_000 * 10**9
    assert before.tolist() == source.states(keys).tolist()
    (tmp_path / "a.jpg").write_bytes(b"other")
    os.utime(tmp_path / "a.jpg", (0, 13_569_465_600))
    assert (before != source.states(keys)).tolist() == [True, False, False]


def test_every_extension_counts_in_any_case(tmp_path: Path) -> None:
    names = [f"{i}{e.decode()}" for i, e in enumerate(sorted(EXTENSIONS))]
    names += [f"c{i}{e.decode().upper()}" for i, e in enumerate(sorted(EXTENSIONS))]
    write(tmp_path, *names, "x.JpG")
    assert keys_of(tmp_path) == sorted(os.fsencode(name) for name in [*names, "x.JpG"])


def test_hidden_and_other_files_are_left_out_and_counted(tmp_path: Path) -> None:
    write(tmp_path, "a.jpg", ".a.jpg", "._a.jpg", "c/.DS_Store", ".git/x.jpg")
    write(tmp_path, "notes.txt", "jpg", "a.jpg.bak", "c/b.jpg~", "c/.jpg")
    listing = FolderSource(tmp_path).listing()
    assert listing.keys.tolist() == [b"a.jpg"]
    assert listing.skipped == {"hidden": 5, "other names": 4}


SYSTEM = ["@eaDir", "#recycle", "#snapshot", "@Recycle", "$RECYCLE.BIN", "__MACOSX", "lost+found"]


@pytest.mark.parametrize("name", [*SYSTEM, "System Volume Information", "$Recycle.Bin"])
def test_folders_of_nas_devices_and_systems_are_left_out(tmp_path: Path, name: str) -> None:
    write(tmp_path, f"{name}/a.jpg", f"cat/{name}/b.jpg", f"cat/{name}.jpg", f"cat/x{name}/c.jpg")
    listing = FolderSource(tmp_path).listing()
    keys = sorted([f"cat/{name}.jpg", f"cat/x{name}/c.jpg"])
    assert [key.decode() for key in listing.keys.tolist()] == keys
    assert listing.classes == ("cat",)
    assert listing.skipped == {"folders of the system, such as @eaDir": 2}


def test_a_folder_named_like_an_image_is_a_folder(tmp_path: Path) -> None:
    write(tmp_path, "album.jpg/1.jpg")
    listing = FolderSource(tmp_path).listing()
    assert listing.keys.tolist() == [b"album.jpg/1.jpg"]
    assert listing.classes == ("album.jpg",)


def test_the_first_sub_folder_is_the_label(tmp_path: Path) -> None:
    """Classes in bytewise order; -1 without a sub-folder; folders without images are no class."""
    write(tmp_path, "dog/1.jpg", "dog/old/2.jpg", "Zebra/1.jpg", "cat/x/y/1.jpg", "loose.jpg")
    write(tmp_path, "empty/notes.txt")
    listing = FolderSource(tmp_path).listing()
    assert listing.classes == ("Zebra", "cat", "dog")
    assert dict(zip(listing.keys.tolist(), listing.labels.tolist(), strict=True)) == {
        b"Zebra/1.jpg": 0,
        b"cat/x/y/1.jpg": 1,
        b"dog/1.jpg": 2,
        b"dog/old/2.jpg": 2,
        b"loose.jpg": -1,
    }
    assert listing.labels.dtype == np.int64


def test_a_file_and_a_class_of_similar_names_keep_their_labels(tmp_path: Path) -> None:
    write(tmp_path, "a.jpg", "a/1.jpg", "a.jpg.d/1.jpg")
    listing = FolderSource(tmp_path).listing()
    assert listing.classes == ("a", "a.jpg.d")
    assert listing.keys.tolist() == [b"a.jpg", b"a.jpg.d/1.jpg", b"a/1.jpg"]
    assert listing.labels.tolist() == [-1, 1, 0]


def test_names_that_are_not_utf8_survive(tmp_path: Path) -> None:
    write(tmp_path, b"caf\xe9/\xff\xfe.jpg", content=b"odd")
    write(tmp_path, b"caf\xc3\xa9/ \n'\".jpg", content=b"utf8")
    source = FolderSource(tmp_path)
    listing = source.listing()
    assert listing.keys.tolist() == [b"caf\xc3\xa9/ \n'\".jpg", b"caf\xe9/\xff\xfe.jpg"]
    assert [os.fsencode(name) for name in listing.classes] == [b"caf\xc3\xa9", b"caf\xe9"]
    assert [source.read(bytes(key)) for key in listing.keys] == [b"utf8", b"odd"]


def test_a_root_that_is_not_utf8(tmp_path: Path) -> None:
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    write(root, "a.jpg")
    assert keys_of(root) == [b"a.jpg"]


NAMES = st.binary(min_size=1, max_size=12).filter(
    lambda name: not set(name) & set(b"\0/") and not name.startswith(b".")
)


@settings(max_examples=40, deadline=None)
@given(st.sets(st.tuples(NAMES, NAMES), min_size=1, max_size=8))
def test_any_names_come_back_sorted_and_readable(names: set[tuple[bytes, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected = sorted(a + b"/" + b + b".jpg" for a, b in names)
        for key in expected:
            write(Path(folder), key, content=key)
        source = FolderSource(Path(folder))
        keys = source.listing().keys.tolist()
        assert keys == expected
        assert [source.read(key) for key in keys] == expected


def test_very_deep_folders(tmp_path: Path) -> None:
    """Deeper than Python's recursion limit; paths within the system's limit."""
    folder = tmp_path
    for _ in range(1100):
        folder = f"{folder}/d"
        os.mkdir(folder)  # noqa: PTH102 - a Path of this depth is slow
    os.close(os.open(f"{folder}/1.jpg", os.O_CREAT))
    assert keys_of(tmp_path) == [b"d/" * 1100 + b"1.jpg"]
    subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)  # shutil.rmtree recurses


def test_the_working_folder_does_not_matter_after_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "images/a.jpg")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    source = FolderSource(Path("images"))
    source.listing()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert source.read(b"a.jpg") == b"image"


def many_files(root: Path, num_folders: int, num_files: int) -> None:
    """Class folders of empty images; all but the first are links to it, which are made faster."""
    (root / "class-000").mkdir()
    for i in range(num_files):
        os.close(os.open(f"{root}/class-000/{i}.jpg", os.O_CREAT))
    for i in range(1, num_folders):
        (root / f"class-{i:03d}").symlink_to("class-000")


def test_hundred_thousand_files_are_listed_quickly(tmp_path: Path) -> None:
    many_files(tmp_path, 100, 1000)
    started_at = time.process_time()
    listing = FolderSource(tmp_path).listing()
    assert time.process_time() - started_at < 5
    names = sorted(f"{i}.jpg".encode() for i in range(1000))
    assert listing.keys.tolist() == [b"class-%03d/%s" % (i, n) for i in range(100) for n in names]
    assert listing.labels.tolist() == [i for i in range(100) for _ in range(1000)]


@pytest.mark.slow
def test_a_million_files_are_listed_within_20_seconds_and_500_mb(tmp_path: Path) -> None:
    many_files(tmp_path, 100, 10_000)
    program = (
        "import re, sys, time; from pathlib import Path\n"
        "from featx.sources.base import FolderSource\n"
        "started_at = time.perf_counter(); n = len(FolderSource(Path(sys.argv[1])).listing())\n"
        # getrusage would count the peak of this test's process as well, which it began as.
        "peak = re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]\n"
        "print(n, time.perf_counter() - started_at, peak)"
    )
    count, seconds, peak_kib = run_python("-c", program, tmp_path).stdout.split()
    assert int(count) == 1_000_000
    assert float(seconds) <= 20
    assert int(peak_kib) <= 500 * 1024


# Errors that end the run before it starts


def test_what_is_no_folder_of_images_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.root=.*nowhere does not exist"):
        FolderSource(tmp_path / "nowhere").listing()
    with pytest.raises(DataError, match="For chosen files, give a CSV file"):
        FolderSource(tmp_path / "*" / "a.jpg").listing()
    with pytest.raises(DataError, match=r"no images below .*\.jpg.*Left out: nothing\."):
        FolderSource(tmp_path).listing()
    write(tmp_path, "a.log", "b.md", ".c.jpg", "d.csv/e")
    with pytest.raises(DataError, match=r"Left out: 1 hidden, 3 other names\.$"):
        FolderSource(tmp_path).listing()
    write(tmp_path, "s/featx.json")
    with pytest.raises(DataError, match=r"s is a store, without images .* as store=.*s\.$"):
        FolderSource(tmp_path / "s").listing()
    write(tmp_path, "f.tar", "g.CSV")
    with pytest.raises(DataError, match=r" Some may be read with data=table or data=webdataset\.$"):
        FolderSource(tmp_path).listing()
    write(tmp_path, "saved/state.json", "saved/data-00000-of-00001.arrow")
    with pytest.raises(DataError, match=r" Some may be read with data=huggingface\.$"):
        FolderSource(tmp_path / "saved").listing()


def test_a_sub_folder_that_cannot_be_listed_is_an_error() -> None:
    """Its images would silently be missing from the store."""
    with without_root_rights() as folder:
        write(folder, "a/1.jpg", "locked/2.jpg")
        (folder / "locked").chmod(0o000)
        with pytest.raises(DataError, match=r"cannot list .*/locked: Permission denied"):
            FolderSource(folder).listing()


def test_a_link_into_a_locked_folder_is_an_error() -> None:
    """What it leads to, an image or a folder full of them, cannot be known."""
    with without_root_rights() as folder:
        write(folder, "a/1.jpg", "a/locked/inner/2.jpg")
        (folder / "link").symlink_to(folder / "a/locked/inner")
        (folder / "a/locked").chmod(0o000)
        with pytest.raises(DataError, match="Permission denied"):
            FolderSource(folder).listing()


def test_a_path_too_long_to_be_listed_is_a_row_that_failed(tmp_path: Path) -> None:
    write(tmp_path, "a.jpg")
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=here)
        inner = os.open("d" * 250, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    source = FolderSource(tmp_path)
    keys = source.listing().keys.tolist()
    assert keys[0] == b"a.jpg"
    assert len(keys) == 2
    with image_fault(Status.MISSING, "file name too long"):
        source.read(keys[1])


# Reading one file


def folder_becomes_a_file(path: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.touch()


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


CHANGES: dict[str, tuple[Callable[[Path], object], Status, str]] = {
    "emptied": (lambda path: path.write_bytes(b""), Status.EMPTY, ""),
    "too large": (lambda path: os.truncate(path, MAX_FILE_BYTES + 1), Status.TOO_LARGE, ""),
    "gone": (Path.unlink, Status.MISSING, "no such file"),
    "its folder gone": (lambda path: shutil.rmtree(path.parent), Status.MISSING, "no such file"),
    "its folder a file": (folder_becomes_a_file, Status.MISSING, "not a directory"),
    "a folder": (replaced_by(Path.mkdir), Status.MISSING, "not a regular file"),
    "a fifo": (replaced_by(os.mkfifo), Status.MISSING, "not a regular file"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_file_became_after_the_listing_is_a_row_that_failed(
    tmp_path: Path, change: str
) -> None:
    act, status, words = CHANGES[change]
    write(tmp_path, "a/1.jpg", "b/1.jpg")
    source = FolderSource(tmp_path)
    source.listing()
    act(tmp_path / "a/1.jpg")
    fault = fault_of(source, b"a/1.jpg")
    assert fault.status == status
    assert words in str(fault).lower()
    assert source.read(b"b/1.jpg") == b"image"


def test_a_locked_file_is_missing() -> None:
    with without_root_rights() as folder:
        write(folder, "a.jpg", "b.jpg")
        (folder / "a.jpg").chmod(0o000)
        source = FolderSource(folder)
        assert len(source.listing()) == 2
        fault = fault_of(source, b"a.jpg")
        assert (fault.status, fault.error) == (Status.MISSING, "PermissionError")
        assert source.read(b"b.jpg") == b"image"


@pytest.mark.timeout(20)
def test_a_fifo_with_an_image_name_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, "a.jpg")
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "link.jpg").symlink_to("pipe.jpg")
    listing = FolderSource(tmp_path).listing()
    assert listing.keys.tolist() == [b"a.jpg"]
    assert listing.skipped == {"not a regular file": 2}


def test_no_file_stays_open(tmp_path: Path) -> None:
    """A million failing rows must not use up the process's descriptors."""
    write(tmp_path, "good.jpg", "folder.jpg/1.jpg")
    write(tmp_path, "empty.jpg", content=b"")
    os.mkfifo(tmp_path / "pipe.jpg")
    source = FolderSource(tmp_path)
    source.listing()
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    for _ in range(20):
        source.read(b"good.jpg")
        for key in (b"folder.jpg", b"empty.jpg", b"pipe.jpg", b"nothing.jpg"):
            fault_of(source, key)
    after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    assert after <= before


# The environment fails: never a row


def test_a_root_that_vanished_is_no_fault_of_the_image(tmp_path: Path) -> None:
    write(tmp_path, "root/a.jpg")
    source = FolderSource(tmp_path / "root")
    source.listing()
    (tmp_path / "root").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        source.read(b"a.jpg")
    (tmp_path / "away").rename(tmp_path / "root")
    assert source.read(b"a.jpg") == b"image"


def test_an_empty_folder_in_the_roots_place_is_no_fault_of_the_image(tmp_path: Path) -> None:
    """What an unmounted disk leaves behind: its mount point, empty."""
    write(tmp_path, "root/a.jpg")
    source = FolderSource(tmp_path / "root")
    source.listing()
    (tmp_path / "root").rename(tmp_path / "away")
    (tmp_path / "root").mkdir()
    with pytest.raises(OSError, match="replaced or unmounted") as caught:
        source.read(b"a.jpg")
    assert caught.value.errno == errno.ESTALE


def test_a_root_that_was_locked_is_no_fault_of_the_image() -> None:
    """An expired ticket of a network file system refuses everything at once."""
    with without_root_rights() as folder:
        write(folder, "a.jpg")
        source = FolderSource(folder)
        source.listing()
        folder.chmod(0o000)
        with pytest.raises(PermissionError):
            source.read(b"a.jpg")


def test_too_many_open_files_is_no_fault_of_the_image(tmp_path: Path) -> None:
    write(tmp_path, "a.jpg")
    source = FolderSource(tmp_path)
    source.listing()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            source.read(b"a.jpg")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert source.read(b"a.jpg") == b"image"


# Links


def test_links_inside_the_folder_are_followed(tmp_path: Path) -> None:
    write(tmp_path, "a/1.jpg", content=b"one")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/same.jpg").symlink_to("../a/1.jpg")
    (tmp_path / "c").symlink_to("a")
    source = FolderSource(tmp_path)
    listing = source.listing()
    assert listing.keys.tolist() == [b"a/1.jpg", b"b/same.jpg", b"c/1.jpg"]
    assert listing.classes == ("a", "b", "c")
    assert {source.read(bytes(key)) for key in listing.keys} == {b"one"}


def test_links_out_of_the_folder_are_refused_and_counted(tmp_path: Path) -> None:
    write(tmp_path, "outside/1.jpg", "outside/2.jpg", "root/a.jpg")
    root = tmp_path / "root"
    (root / "file.jpg").symlink_to(tmp_path / "outside/1.jpg")
    (root / "folder").symlink_to("../outside")
    (root / "gone.jpg").symlink_to(tmp_path / "outside/none.jpg")
    (root / "twice.jpg").symlink_to("folder/2.jpg")  # inside at first sight only
    listing = FolderSource(root).listing()
    assert listing.keys.tolist() == [b"a.jpg"]
    assert listing.skipped == {OUT_OF_FOLDER: 4}


def test_a_neighbour_whose_name_starts_alike_is_outside(tmp_path: Path) -> None:
    write(tmp_path, "root/a.jpg", "root-private/b.jpg")
    (tmp_path / "root/link.jpg").symlink_to(tmp_path / "root-private/b.jpg")
    assert keys_of(tmp_path / "root") == [b"a.jpg"]


def test_links_out_of_the_folder_are_followed_on_request(tmp_path: Path) -> None:
    write(tmp_path, "outside/1.jpg", "root/a.jpg")
    root = tmp_path / "root"
    (root / "file.jpg").symlink_to(tmp_path / "outside/1.jpg")
    (root / "folder").symlink_to("../outside")
    source = FolderSource(root, follow_links=True)
    listing = source.listing()
    assert listing.keys.tolist() == [b"a.jpg", b"file.jpg", b"folder/1.jpg"]
    assert listing.skipped == {}
    assert source.read(b"folder/1.jpg") == b"image"


def test_a_root_that_is_a_link_is_the_folder_it_leads_to(tmp_path: Path) -> None:
    write(tmp_path, "real/a/1.jpg")
    (tmp_path / "root").symlink_to("real")
    (tmp_path / "real/b").symlink_to("a")
    assert keys_of(tmp_path / "root") == [b"a/1.jpg", b"b/1.jpg"]


@pytest.mark.timeout(20)
def test_a_loop_of_links_ends_and_lists_nothing_twice(tmp_path: Path) -> None:
    write(tmp_path, "a/b/1.jpg")
    (tmp_path / "a/b/self").symlink_to(".")
    (tmp_path / "a/b/up").symlink_to("..")
    (tmp_path / "a/b/top").symlink_to(tmp_path)
    listing = FolderSource(tmp_path).listing()
    assert listing.keys.tolist() == [b"a/b/1.jpg"]
    assert listing.skipped == {"links to a folder above": 3}


@pytest.mark.timeout(20)
def test_two_folders_that_link_to_each_other(tmp_path: Path) -> None:
    write(tmp_path, "a/1.jpg", "b/2.jpg")
    (tmp_path / "a/to-b").symlink_to("../b")
    (tmp_path / "b/to-a").symlink_to("../a")
    listing = FolderSource(tmp_path).listing()
    assert listing.keys.tolist() == [b"a/1.jpg", b"a/to-b/2.jpg", b"b/2.jpg", b"b/to-a/1.jpg"]
    assert listing.skipped == {"links to a folder above": 2}


@pytest.mark.timeout(20)
def test_a_followed_link_to_a_folder_above_the_root_ends(tmp_path: Path) -> None:
    write(tmp_path, "root/1.jpg", "beside/2.jpg")
    (tmp_path / "root/up").symlink_to("..")
    assert keys_of(tmp_path / "root", follow_links=True) == [b"1.jpg", b"up/beside/2.jpg"]


def test_a_dangling_link_is_a_row_that_says_missing(tmp_path: Path) -> None:
    """Nor may a link to itself, which can never be opened, look like a failing disk."""
    write(tmp_path, "a.jpg")
    (tmp_path / "b.jpg").symlink_to("nothing.jpg")
    (tmp_path / "c").symlink_to("nothing")
    (tmp_path / "d.jpg").symlink_to("d.jpg")
    source = FolderSource(tmp_path)
    listing = source.listing()
    assert listing.keys.tolist() == [b"a.jpg", b"b.jpg", b"d.jpg"]
    assert listing.skipped == {"other names": 1}
    for key in (b"b.jpg", b"d.jpg"):
        assert fault_of(source, key).status == Status.MISSING


# What counts, how deep, and under which class


def folder(root: Path, **keys: object) -> Source:
    return open_source(FolderOptions(root=str(root), **keys))


def test_extensions_name_what_counts(tmp_path: Path) -> None:
    write(tmp_path, "a.jpg", "b.PNG", "c.img", "d.tar.jpg", "img")
    source = folder(tmp_path, extensions=["PNG", ".img"])
    assert source.listing().keys.tolist() == [b"b.PNG", b"c.img"]
    assert source.listing().skipped == {"other names": 3}
    with pytest.raises(DataError, match=r"searched every depth for names ending in \.gif\. Left"):
        folder(tmp_path, extensions=["gif"]).listing()
    with pytest.raises(ConfigError, match=r"data\.extensions is empty"):
        folder(tmp_path, extensions=[])


def test_depth_bounds_how_far_down_images_are_looked_for(tmp_path: Path) -> None:
    write(tmp_path, "0.jpg", "a/1.jpg", "a/b/2.jpg", "a/b/c/3.jpg", "d/e/f/g/4.jpg")
    found = [len(folder(tmp_path, depth=depth).listing()) for depth in (0, 1, 2, 3, 4, None)]
    assert found == [1, 2, 3, 4, 5, 5]
    listing = folder(tmp_path, depth=1).listing()
    assert listing.skipped == {"folders below data.depth": 2}
    assert listing.classes == ("a",)
    with pytest.raises(ConfigError, match=r"data\.depth=-1"):
        folder(tmp_path, depth=-1)
    with pytest.raises(DataError, match="searched a depth up to 0"):
        folder(tmp_path / "d", depth=0).listing()


@pytest.mark.parametrize(
    ("name", "text", "classes", "labels"),
    [
        (
            "c.json",
            '{"n1": "tench", "n2": "shark", "n3": "tench"}',
            ("shark", "tench"),
            [1, 0, 1, -1],
        ),
        ("c.json", '{"n1": 2, "n2": 0, "n3": 2, "gone": 9}', ("0", "1", "2"), [2, 0, 2, -1]),
        ("c.csv", 'n1,"tench, big"\nn2,0\nn3,0\n', ("0", "tench, big"), [1, 0, 0, -1]),
        ("c.csv", "n1,1\r\nn2,0\r\n\r\nn3,1\r\n", ("0", "1"), [1, 0, 1, -1]),
        ("c.csv", 'n1,"a\u2028n2,b"\nn2,b\nn3,b\n', ("a\u2028n2,b", "b"), [0, 1, 1, -1]),
    ],
)
def test_a_file_names_the_classes(
    tmp_path: Path, name: str, text: str, classes: tuple[str, ...], labels: list[int]
) -> None:
    write(tmp_path / "p", "n1/a.jpg", "n2/x/b.jpg", "n3/c.jpg", "z.jpg")
    (tmp_path / name).write_text(text)
    source = folder(tmp_path / "p", classes=str(tmp_path / name))
    listing = source.listing()
    assert (listing.classes, listing.labels.tolist()) == (classes, labels)
    assert listing.labels.dtype == np.int64
    assert source.read(b"n1/a.jpg") == b"image"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.json", '{"n1": "x"}', "has no class for 1 folder of the data set, such as n2"),
        ("c.json", '["n1"]', "expected one object"),
        ("c.json", '{"n1": [1], "n2": 2}', "expected one object"),
        ("c.json", "{", "is no JSON"),
        ("c.json", '{"n1": 1, "n2": 2, "n1": 3}', "two classes for the folder n1"),
        ("c.json", '{"n1": 1, "n2": "x"}', "found labels of kind name, number"),
        ("c.csv", "n1,x\nn2\n", "'n2' has 1 columns; expected two"),
        ("c.csv", "n1,x\nn1,y\nn2,y\n", "two classes for the folder n1"),
        ("none.csv", None, "cannot be read as text"),
    ],
)
def test_a_file_of_classes_that_does_not_fit_is_an_error(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    write(tmp_path / "p", "n1/a.jpg", "n2/b.jpg")
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        folder(tmp_path / "p", classes=str(tmp_path / name)).listing()


def test_a_file_of_another_kind_says_which(tmp_path: Path) -> None:
    for name, kind in (("a.tar", "webdataset"), ("a.csv", "table"), ("a.h5", "hdf5")):
        write(tmp_path, name)
        with pytest.raises(DataError, match=f"is a file, not a folder.* with data={kind}"):
            folder(tmp_path / name).listing()
    write(tmp_path, "a.zip", "a.tar.bz2")
    for name in ("a.zip", "a.tar.bz2"):
        with pytest.raises(DataError, match=r"is a file, not a folder.* Unpack the archive first"):
            folder(tmp_path / name).listing()
    write(tmp_path, "b.jpg")
    for name in ("b.jpg", "*.jpg"):
        with pytest.raises(DataError, match="give a CSV file with the column path"):
            folder(tmp_path / name).listing()
