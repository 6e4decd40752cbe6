"""featx.json: what is written is read, and what is not whole is never taken for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from made_store import MadeRun, joined, make_added, make_grown, make_run

from featx.base import digest
from featx.errors import ConfigError, StoreError
from featx.store import (
    DamagedManifestError,
    Manifest,
    StoreSession,
    load_manifest,
    read_manifest,
)

HERE = Path("featx.json")


def one_run() -> Manifest:
    return Manifest((make_run(29, 8, failed=[2]).identified().as_run(),))


def three_runs() -> Manifest:
    """Rows 0 to 29 of two layers, a third layer, then rows 29 to 39 of all three."""
    first = make_run(29, 8).identified()
    added = make_added(first, {"deep": (7,)}, part_rows=16, codec="gzip", dtype="float16")
    grown = make_grown(joined(first, added), 10, part_rows=4)
    later = (replace(added.as_run().grid, first_part=4),
             replace(grown.as_run().grid, num_rows=10, first_row=29, first_part=6))  # fmt: skip
    runs = [replace(r.as_run(), grid=g) for r, g in zip((added, grown), later, strict=True)]
    return Manifest((first.as_run(), *runs))


@pytest.mark.parametrize("make", [one_run, three_runs])
def test_what_is_written_is_read(make: Callable[[], Manifest]) -> None:
    manifest = make()
    text = manifest.to_json()
    again = Manifest.from_json(text, HERE)
    assert again == manifest
    assert again.to_json() == text
    assert [run.digest for run in again.runs] == [run.digest for run in manifest.runs]


def test_it_counts_rows_parts_and_layers_of_all_runs() -> None:
    manifest = three_runs()
    assert (manifest.num_rows, manifest.num_parts) == (39, 4 + 2 + 3)
    assert set(manifest.layers) == {"flat", "map", "deep"}
    assert manifest.first_run_with("deep") is manifest.runs[1]
    assert manifest.first_run_with("flat") is manifest.runs[0]
    covered = [part.index for run in manifest.runs for part in run.parts()]
    assert covered == list(range(9))
    assert [(p.start, p.stop) for p in manifest.runs[2].parts()] == [(29, 33), (33, 37), (37, 39)]
    assert manifest.listing_identity == manifest.runs[2].header.fingerprint["listing"]


def test_more_parts_than_their_names_can_number_are_refused_at_once(tmp_path: Path) -> None:
    made = make_run(29, 8).identified()
    run = replace(made.as_run(), grid=replace(made.grid, num_rows=500_000, part_rows=1))
    second = replace(run, grid=replace(run.grid, first_part=500_000))
    assert Manifest((run, second)).num_parts == 1_000_000
    larger = replace(run, grid=replace(run.grid, num_rows=500_001))
    message = "part_rows=1: the store would have 1000001 parts, and at most 1000000"
    with pytest.raises(ConfigError, match=message):
        Manifest((run, replace(larger, grid=replace(larger.grid, first_part=500_000))))
    many = replace(run, grid=replace(run.grid, num_rows=1_000_001))
    with pytest.raises(ConfigError, match=message):
        StoreSession(tmp_path / "store", many, made.listing)
    assert not (tmp_path / "store").exists()


def test_the_identity_changes_with_every_run_and_not_before() -> None:
    manifest = three_runs()
    identities = [manifest.digest_of(n) for n in (1, 2, 3)]
    assert len(set(identities)) == 3
    assert identities[0] == manifest.runs[0].digest == Manifest(manifest.runs[:1]).digest
    assert identities[2] == manifest.digest
    swapped = Manifest((manifest.runs[0], manifest.runs[2], manifest.runs[1]))
    assert swapped.digest != manifest.digest


@settings(max_examples=150, deadline=None)
@given(at=st.floats(0, 1), mask=st.integers(1, 255))
def test_no_flipped_byte_is_read_as_something_else(at: float, mask: int) -> None:
    """The text may stay the same in meaning, as with white space; else it is refused."""
    manifest = three_runs()
    data = bytearray(manifest.to_json())
    data[int(at * (len(data) - 1))] ^= mask
    try:
        found = Manifest.from_json(bytes(data), HERE)
    except StoreError:
        return
    assert found == manifest


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 0.999))
def test_a_beginning_of_it_is_damaged(share: float) -> None:
    data = three_runs().to_json().rstrip()
    with pytest.raises(DamagedManifestError, match="overwrite=true"):
        Manifest.from_json(data[: int(share * len(data))], HERE)


def claims(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest.update(values)


def layer(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["layers"][0].update(values)


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no power of two": claims(part_rows=12),
    "no rows per part": claims(part_rows=0),
    "negative rows per part": claims(part_rows=-8),
    "negative rows": claims(num_rows=-1),
    "rows without end": claims(num_rows=10**15),
    "infinite rows": claims(num_rows=float("inf")),
    "rows before the first": claims(first_row=-29),
    "parts that begin at 3": claims(first_part=3),
    "text for rows": claims(num_rows="many"),
    "no layers": lambda m: m.pop("layers"),
    "layers as text": claims(layers="flat"),
    "a layer twice": lambda m: m["layers"].append(m["layers"][0]),
    "a layer without rows": layer(shape=[-5]),
    "a layer of floats": layer(shape=[2.5]),
    "a layer of objects": layer(dtype="object"),
    "an unknown field": layer(more=1),
    "a fingerprint as text": claims(fingerprint="x"),
    "another fingerprint": claims(fingerprint={"model": "other"}),
    "no format": lambda m: m.pop("featx_format"),
    "a format as text": claims(featx_format="one"),
    "additions as text": claims(additions="x"),
    "additions that are no runs": claims(additions=[1]),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_claims_that_cannot_be_are_damage(kind: str) -> None:
    """Also where whoever made them put the right sha256 beside them."""
    values = json.loads(one_run().to_json())
    del values["sha256"]
    HOSTILE[kind](values)
    for more in ({}, {"sha256": digest(values)}):
        with pytest.raises(DamagedManifestError):
            Manifest.from_json(json.dumps({**values, **more}).encode(), HERE)


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"7", b"\xff\xfe", b'{"a": ', b"{}" * 2])
def test_what_is_no_manifest_is_damage(text: bytes) -> None:
    with pytest.raises(DamagedManifestError):
        Manifest.from_json(text, HERE)


def test_other_numbers_under_the_old_sum_are_damage() -> None:
    text = one_run().to_json()
    changed = text.replace(b'"num_rows": 29', b'"num_rows": 28')
    assert changed != text
    with pytest.raises(DamagedManifestError, match="differs from its own sha256"):
        Manifest.from_json(changed, HERE)


def test_a_newer_format_is_told_apart_from_damage(tmp_path: Path) -> None:
    values = {**json.loads(one_run().to_json()), "featx_format": 5}
    del values["sha256"]
    with pytest.raises(StoreError, match="Upgrade featx") as refused:
        Manifest.from_json(json.dumps({**values, "sha256": digest(values)}).encode(), HERE)
    assert not isinstance(refused.value, DamagedManifestError)


def test_a_flipped_format_is_damage() -> None:
    values = {**json.loads(one_run().to_json()), "featx_format": 3}
    with pytest.raises(DamagedManifestError):
        Manifest.from_json(json.dumps(values).encode(), HERE)


class TestCopies:
    @pytest.fixture
    def run(self) -> MadeRun:
        return make_run(29, 8).identified()

    def test_the_longest_is_taken(self, run: MadeRun, tmp_path: Path) -> None:
        """Older parts know nothing of the runs that came after them."""
        run.finish(tmp_path)
        make_grown(run, 9).finish(tmp_path, grow=True)
        whole = read_manifest(tmp_path)
        (tmp_path / "featx.json").write_bytes(b"")
        assert load_manifest(tmp_path) == (whole, False)

    def test_damaged_files_are_passed_over(self, run: MadeRun, tmp_path: Path) -> None:
        run.finish(tmp_path)
        whole = read_manifest(tmp_path)
        (tmp_path / "featx.json").write_bytes(b"")
        for index in (0, 1, 3):
            (tmp_path / "parts" / f"part-{index:06d}.h5").write_bytes(b"x" * 500)
        assert load_manifest(tmp_path) == (whole, False)

    def test_without_a_manifest_there_is_no_store(self, tmp_path: Path) -> None:
        assert load_manifest(tmp_path) == (None, True)
        assert load_manifest(tmp_path / "nothing") == (None, True)
        (tmp_path / "file").write_bytes(b"")
        assert load_manifest(tmp_path / "file") == (None, True)
