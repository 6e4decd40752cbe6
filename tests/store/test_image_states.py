"""images.h5: the states of the images, and which of them have changed since it was written."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from featx.storage import AtomicFolder
from featx.store import UNSETTLED, changed_states, write_image_states
from featx.store.image_states import image_states_file
from featx.types import IMAGE_STATE


def made_states(num_rows: int) -> np.ndarray:
    states = np.empty(num_rows, IMAGE_STATE)
    for i, name in enumerate(IMAGE_STATE.names or ()):
        states[name] = np.arange(num_rows) + 100 * i
    return states


@pytest.mark.parametrize("name", IMAGE_STATE.names or ())
def test_each_field_of_each_row_counts(tmp_path: Path, name: str) -> None:
    """Of more rows than are compared at once."""
    num_rows = 300_000
    path, states = tmp_path / "images.h5", made_states(num_rows)
    path.write_bytes(image_states_file(states))
    assert not changed_states(path, states).any()
    rows = [0, 1, *(1 << k for k in range(1, 19)), num_rows - 1]
    states[name][rows] += 1
    assert np.flatnonzero(changed_states(path, states)).tolist() == rows


def test_rows_that_the_file_lacks_are_unsettled(tmp_path: Path) -> None:
    path, states = tmp_path / "images.h5", made_states(10)
    path.write_bytes(image_states_file(states[:7]))
    states[8] = UNSETTLED
    assert np.flatnonzero(changed_states(path, states)).tolist() == [7, 9]
    path.write_bytes(image_states_file(made_states(12)))  # more than the listing has
    assert np.flatnonzero(changed_states(path, states)).tolist() == [8]


def test_without_a_file_that_can_be_read_every_state_has_changed(tmp_path: Path) -> None:
    path, states = tmp_path / "images.h5", made_states(10)
    states[3] = UNSETTLED
    every = [row for row in range(10) if row != 3]
    assert np.flatnonzero(changed_states(path, states)).tolist() == every
    whole = bytes(image_states_file(states))
    path.write_bytes(whole[: len(whole) // 2])
    assert np.flatnonzero(changed_states(path, states)).tolist() == every
    path.write_bytes(whole)
    with h5py.File(path, "r+") as file:
        del file["tag"]
    assert np.flatnonzero(changed_states(path, states)).tolist() == every


def test_the_file_is_written_only_if_it_changes(tmp_path: Path) -> None:
    path, disk = tmp_path / "images.h5", AtomicFolder(tmp_path)
    write_image_states(disk, path, made_states(10))
    before = path.stat().st_ino
    write_image_states(disk, path, made_states(10))
    assert path.stat().st_ino == before
    write_image_states(disk, path, made_states(11))
    assert not changed_states(path, made_states(11)).any()
