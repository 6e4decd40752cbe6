"""images.h5: the states of the images, and which of them have changed since it was written."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from featx.storage import AtomicFolder
from featx.store import UNSETTLED, add_image_checksums, changed_states, write_image_states
from featx.types import IMAGE_STATE, UNKNOWN_IMAGE


def made_states(num_rows: int) -> np.ndarray:
    states = np.empty(num_rows, IMAGE_STATE)
    for i, name in enumerate(IMAGE_STATE.names or ()):
        states[name] = np.arange(num_rows) + 100 * i
    return states


def made_checksums(num_rows: int) -> np.ndarray:
    return np.arange(num_rows, dtype=np.uint64) + 1000


@pytest.mark.parametrize("name", IMAGE_STATE.names or ())
def test_each_field_of_each_row_counts(tmp_path: Path, name: str) -> None:
    """Of more rows than are compared at once."""
    num_rows = 300_000
    path, states = tmp_path / "images.h5", made_states(num_rows)
    write_image_states(AtomicFolder(tmp_path), path, states, made_checksums(len(states)))
    assert not changed_states(path, states).any()
    rows = [0, 1, *(1 << k for k in range(1, 19)), num_rows - 1]
    states[name][rows] += 1
    assert np.flatnonzero(changed_states(path, states)).tolist() == rows


def test_rows_that_the_file_lacks_are_unsettled(tmp_path: Path) -> None:
    path, states = tmp_path / "images.h5", made_states(10)
    write_image_states(AtomicFolder(tmp_path), path, states[:7], made_checksums(7))
    states[8] = UNSETTLED
    assert np.flatnonzero(changed_states(path, states)).tolist() == [7, 9]
    # More than the listing has.
    write_image_states(AtomicFolder(tmp_path), path, made_states(12), made_checksums(12))
    assert np.flatnonzero(changed_states(path, states)).tolist() == [8]


def test_without_a_file_that_can_be_read_every_state_has_changed(tmp_path: Path) -> None:
    path, states = tmp_path / "images.h5", made_states(10)
    states[3] = UNSETTLED
    every = [row for row in range(10) if row != 3]
    assert np.flatnonzero(changed_states(path, states)).tolist() == every
    write_image_states(AtomicFolder(tmp_path), path, states, made_checksums(len(states)))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert np.flatnonzero(changed_states(path, states)).tolist() == every
    path.write_bytes(whole)
    with h5py.File(path, "r+") as file:
        del file["tag"]
    assert np.flatnonzero(changed_states(path, states)).tolist() == every


def test_the_file_is_written_only_if_it_changes(tmp_path: Path) -> None:
    path, disk = tmp_path / "images.h5", AtomicFolder(tmp_path)
    write_image_states(disk, path, made_states(10), made_checksums(10))
    before = path.stat().st_ino
    write_image_states(disk, path, made_states(10), made_checksums(10))
    assert path.stat().st_ino == before
    write_image_states(disk, path, made_states(11), made_checksums(11))
    assert not changed_states(path, made_states(11)).any()


def test_a_state_of_an_image_with_another_checksum_does_not_count(tmp_path: Path) -> None:
    path, states, checksums = tmp_path / "images.h5", made_states(10), made_checksums(10)
    checksums[[2, 3]] = UNKNOWN_IMAGE  # not stored when the file was written
    write_image_states(AtomicFolder(tmp_path), path, states, checksums)
    of_rows = made_checksums(10)
    of_rows[[3, 5, 7]] = 1, UNKNOWN_IMAGE, 1
    assert np.flatnonzero(changed_states(path, states, of_rows)).tolist() == [7]
    with h5py.File(path, "r+") as file:  # as earlier versions wrote it
        del file["image_checksum"]
    assert not changed_states(path, states, of_rows).any()


def test_checksums_are_added_to_the_states_that_are_there(tmp_path: Path) -> None:
    path, disk, states = tmp_path / "images.h5", AtomicFolder(tmp_path), made_states(10)
    add_image_checksums(disk, path, made_checksums(10))
    assert not path.exists(), "the data set knows no states"
    write_image_states(disk, path, states[:8], np.full(8, UNKNOWN_IMAGE))
    add_image_checksums(disk, path, made_checksums(10))  # of a data set that has grown
    assert np.flatnonzero(changed_states(path, states, made_checksums(10))).tolist() == [8, 9]
    assert changed_states(path, states, made_checksums(10) + np.uint64(1)).all()
