"""Reading a store needs numpy and h5py only, in a process that has imported nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import run_python
from made_store import make_run

_READ = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        known = top in sys.stdlib_module_names or top in ("featx", "numpy", "h5py", *sys.argv[2:])
        if not known and not top.startswith("_"):
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Refused())
import numpy as np
import featx
store = featx.open(sys.argv[1])
np.savez("read.npz", keys=store.key_bytes, labels=store.labels, status=store.status,
         failures=len(store.failures), row=store.row(store.keys[5]), xy=store.xy("flat")[0],
         rows=store["map"][[7, 2]], **{name: store[name][:] for name in store})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "packed", "has_xxhash"),
    [("none", True, False), ("gzip", False, True)],
)
def test_a_store_is_read_with_numpy_and_h5py_alone(
    tmp_path: Path, codec: str, packed: bool, has_xxhash: bool
) -> None:
    run = make_run(29, 8, codec=codec, failed=[3])
    root = run.write(tmp_path / "store", packed=packed)
    others = ["xxhash"] if has_xxhash else []
    done = run_python("-c", _READ, root, *others, cwd=tmp_path)
    assert ("xxhash is not installed" in done.stderr) is not has_xxhash
    with np.load(tmp_path / "read.npz") as found:
        assert found["keys"].tolist() == run.listing.keys.tolist()
        assert found["labels"].tolist() == run.listing.labels.tolist()
        assert found["status"].tolist() == run.status().tolist()
        assert int(found["row"]) == 5
        for name in ("flat", "map"):
            assert np.array_equal(found[name], run.expected(name), equal_nan=True)
        assert np.array_equal(found["rows"], run.expected("map")[[7, 2]])


def test_damage_is_seen_with_xxhash_and_verifying_needs_it(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['xxhash'] = None\n"
        "from featx.store import check_store\nfrom pathlib import Path\n"
        "check_store(Path(sys.argv[1]))"
    )
    root = make_run(29, 8).write(tmp_path / "store")
    done = run_python("-c", code, root, code=1)
    assert "writing and verifying a store need the package xxhash" in done.stderr
