"""Headers of tars: the same members as Python's tarfile finds, and what is damaged is said."""

from __future__ import annotations

import io
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_shards import header_of_size, pax_header

from featx.sources.tar_headers import CutOffError, TarMember, members

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def tar_of(files: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form, encoding="utf-8") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def found(data: bytes) -> list[TarMember]:
    return list(members(lambda offset, length: data[offset : offset + length]))


def cut_off(data: bytes) -> tuple[list[bytes], CutOffError]:
    names: list[bytes] = []
    found = members(lambda offset, length: data[offset : offset + length])
    with pytest.raises(CutOffError) as caught:
        names.extend(member.name for member in found)
    return names, caught.value


@pytest.mark.parametrize("form", FORMATS)
def test_members_are_those_that_tarfile_finds(form: str) -> None:
    names = ["a.jpg", "d/" * 40 + "b.png", "é.jpg", "x" * 90, "empty"]
    names += [] if form == "ustar" else ["n" * 300 + ".jpg", "d/" * 200 + "c.jpg"]
    files = {name: name.encode() * i for i, name in enumerate(reversed(names))}
    data = tar_of(files, FORMATS[form])
    got = {m.name.decode(): data[m.offset : m.offset + m.size] for m in found(data)}
    assert got == files
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert [(m.name, m.offset_data, m.size) for m in tar] == [
            (m.name.decode(), m.offset, m.size) for m in found(data)
        ]


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_characters="\0/", codec="utf-8"), min_size=1, max_size=120),
        st.binary(max_size=1500),
        max_size=6,
    ),
    st.sampled_from(sorted(FORMATS.values())[1:]),
)
def test_any_names_and_sizes(files: dict[str, bytes], form: int) -> None:
    data = tar_of(files, form)
    assert {m.name: data[m.offset : m.offset + m.size] for m in found(data)} == {
        name.encode(): content for name, content in files.items()
    }


def test_a_tar_of_the_system_is_read_with_links_and_folders(tmp_path: Path) -> None:
    (tmp_path / "in" / "cat").mkdir(parents=True)
    (tmp_path / "in" / "cat" / "1.jpg").write_bytes(b"one")
    (tmp_path / "in" / "link.jpg").symlink_to("cat/1.jpg")
    (tmp_path / "in" / "hard.jpg").hardlink_to(tmp_path / "in" / "cat" / "1.jpg")
    with (tmp_path / "in" / "holes.jpg").open("wb") as sparse:
        sparse.seek(1 << 20)
        sparse.write(b"end")
    for form in ("gnu", "pax", "ustar", "v7"):
        sparse_too = ["--sparse"] if form in ("gnu", "pax") else []
        command = ["tar", f"--format={form}", *sparse_too, "--sort=name", "-cf", "x.tar", "-C"]
        subprocess.run([*command, "in", "."], cwd=tmp_path, check=True)
        data = (tmp_path / "x.tar").read_bytes()
        regular = [m for m in found(data) if m.regular]
        assert b"one" in [data[m.offset : m.offset + m.size] for m in regular]
        names = {m.name.removeprefix(b"./") for m in found(data)}
        assert {b"cat/1.jpg", b"link.jpg", b"hard.jpg"} <= names
        links = {m.name for m in found(data) if not m.regular}
        assert b"./link.jpg" in links
        if sparse_too:
            assert sum(b"holes" in name for name in links) == 1
        else:
            assert b"./holes.jpg" in {m.name for m in regular}


def test_a_size_beyond_eight_gigabytes_is_understood() -> None:
    info = tarfile.TarInfo("big.jpg")
    info.size = 9 << 30
    header = info.tobuf(tarfile.GNU_FORMAT)
    names, error = cut_off(header)
    assert names == []
    assert error.cut is not None
    assert error.cut.size == 9 << 30


def test_checksums_of_signed_bytes_are_right_as_well() -> None:
    """Old writers summed them so; tarfile takes both."""
    header = bytearray(tarfile.TarInfo("é.jpg").tobuf(tarfile.GNU_FORMAT))
    rest = header[:148] + header[156:]
    for total, right in ((256 + sum(b - 256 * (b > 127) for b in rest), True), (1, False)):
        header[148:156] = b"%06o\0 " % total
        if right:
            assert [m.name for m in found(bytes(header) + bytes(1024))] == ["é.jpg".encode()]
        else:
            assert "is damaged" in str(cut_off(bytes(header) + bytes(1024))[1])


FILES = {"a.jpg": b"a" * 700, "b.jpg": b"b" * 700, "c.jpg": b"c" * 700}


@pytest.mark.parametrize("length", range(0, 5 * 1024, 256))
def test_wherever_it_is_cut_the_whole_members_are_found_and_the_cut_is_said(length: int) -> None:
    data = tar_of(FILES, tarfile.USTAR_FORMAT)
    names, error = cut_off(data[:length])
    # Header and two blocks of data a member.
    assert names == [b"a.jpg", b"b.jpg", b"c.jpg"][: (length + 324) // 1536]
    assert "ends" in str(error)


def test_a_damaged_header_ends_the_tar_and_is_said() -> None:
    data = bytearray(tar_of(FILES, tarfile.USTAR_FORMAT))
    data[1536 + 100] ^= 1
    names, error = cut_off(bytes(data))
    assert names == [b"a.jpg"]
    assert str(error) == "the header at byte 1536 is damaged"
    with tarfile.open(fileobj=io.BytesIO(bytes(data))) as tar:
        assert tar.getnames() == ["a.jpg"]  # tarfile says nothing: hence a reader of our own


def test_two_tars_joined_by_cat_are_not_taken_for_one() -> None:
    data = tar_of({"a.jpg": b"1"}) + tar_of({"b.jpg": b"2"})
    names, error = cut_off(data)
    assert names == [b"a.jpg"]
    assert "has bytes after its end marker" in str(error)


def test_an_extended_header_that_claims_gigabytes_is_not_read() -> None:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = b"L", 5 << 30
    asked: list[int] = []

    def read(offset: int, length: int) -> bytes:
        asked.append(length)
        return info.tobuf(tarfile.GNU_FORMAT)[offset : offset + length]

    with pytest.raises(CutOffError, match="claims a name of"):
        list(members(read))
    assert max(asked) <= 512


@pytest.mark.parametrize(
    "start",
    [
        header_of_size(b"\x80" + b"\xff" * 11),  # base 256, all bits
        header_of_size(b"\xff" * 12),  # base 256, negative
        header_of_size(b"-0000000001\0"),
        header_of_size(b"\x80" + bytes(3) + b"\xff" * 8),
        pax_header({"size": "-5"}),
        pax_header({"size": "9" * 30}),
        pax_header({"size": "9" * 5000}),  # more digits than int() takes
    ],
)
def test_impossible_sizes_end_the_tar(start: bytes) -> None:
    whole = tar_of({"first.png": b"1"}, tarfile.USTAR_FORMAT)[:1024]
    names, error = cut_off(whole + start + bytes(1024))
    assert names == [b"first.png"]
    assert "claims an impossible size" in str(error) or "is damaged" in str(error)


@pytest.mark.slow
def test_a_pax_header_of_a_mebibyte_is_read_in_linear_time() -> None:
    records = {f"k{i}": "v" for i in range(78_000)}
    data = pax_header(records) + bytes(1024)
    assert len(data) > 900_000
    started = time.process_time()
    assert [member.name for member in found(data)] == [b"a.png"]
    assert time.process_time() - started < 1  # it took 5 s


@pytest.mark.parametrize("text", [b"1" * 262_144, b"3 a" * 87_000 + b"="])
def test_a_hostile_pax_header_is_refused_in_linear_time(text: bytes) -> None:
    """tarfile of Python before 3.11.10 takes more than a minute for the first (CVE-2024-6232)."""
    header = tarfile.TarInfo("././@PaxHeader")
    header.type, header.size = tarfile.XHDTYPE, len(text)
    started = time.process_time()
    names, error = cut_off(header.tobuf(tarfile.USTAR_FORMAT) + text + bytes(20 << 10))
    assert names == []
    assert "is damaged" in str(error)
    assert time.process_time() - started < 1


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damage_anywhere_gives_members_or_an_error_but_nothing_else(data: st.DataObject) -> None:
    whole = bytearray(tar_of({**FILES, "n" * 150: b"x", "é" * 80: b"y"}))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        for member in found(bytes(whole)):
            assert 0 <= member.offset <= member.offset + member.size <= len(whole)
    except CutOffError:
        pass
