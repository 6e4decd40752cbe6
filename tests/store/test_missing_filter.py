"""Stores whose filters the reading process has not loaded, or does not have: never damage."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import run_python
from made_store import make_run

from featx.errors import MissingExtraError
from featx.store import codecs
from featx.store.hdf5_files import chunks_with_verdict

VERIFY = """
import sys
from pathlib import Path
{before}
from featx.errors import FeatxError
from featx.store import check_store, repair_files
for root in map(Path, sys.argv[1:]):
    try:
        report = check_store(root)
        print([damage.what for damage in report.damages], repair_files(report))
    except FeatxError as error:
        print(type(error).__name__, error)
"""

WITHOUT_PLUGIN = "sys.modules['hdf5plugin'] = None  # as if it were not installed"


def verified(*roots: Path, before: str = "") -> str:
    """What a process prints that verifies and repairs stores, and has imported nothing else."""
    return run_python("-c", VERIFY.format(before=before), *roots).stdout.strip()


@pytest.mark.slow
def test_no_codec_is_damage_in_a_new_process(tmp_path: Path) -> None:
    roots = []
    for codec in codecs.CODECS.names():
        run = make_run(29, 8, codec=codec).identified()
        roots += [run.copied(tmp_path / codec), run.copied(tmp_path / f"packed {codec}", True)]
    assert verified(*roots).splitlines() == ["[] []"] * len(roots)


def test_a_package_that_is_not_installed_is_named(tmp_path: Path) -> None:
    root = make_run(29, 8, codec="zstd").identified().copied(tmp_path, packed=True)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    printed = verified(root, before=WITHOUT_PLUGIN)
    assert printed.startswith(
        "MissingExtraError the data are compressed with the HDF5 filter 32015"
    )
    assert "pip install hdf5plugin" in printed
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_a_filter_that_no_package_has_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((4,))
        properties.set_filter(32099, h5py.h5z.FLAG_OPTIONAL, (1,))
        space = h5py.h5s.create_simple((4,))
        dataset = h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, space, properties)
        dataset.write_direct_chunk((0,), bytes(16))
        file["checksums/x"] = np.zeros(1, np.uint32)
    with h5py.File(path) as file, pytest.raises(MissingExtraError, match="filter 32099, which nei"):
        next(chunks_with_verdict(file, "x"))
