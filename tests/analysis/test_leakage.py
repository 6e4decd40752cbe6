"""Near-duplicates across a split are searched in blocks, in the memory of one of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import run_python

SCRIPT = """
from pathlib import Path
from probe_problem import blobs, features_of
from featx.analysis.probe.leakage import near_duplicates
from featx.analysis.probe.splits import holdout
from featx.base import block_sizes, keep_freed_memory, own_process

def mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

own_process()
keep_freed_memory()
block_sizes.BLOCK_BYTES = 16 << 20
x, y = blobs(20_000, width=64)
features, split = features_of(Path(), x, y), holdout(y, 0.2, seed=0)
before = mib()
near_duplicates(features, "x", [split])
print(mib() - before, 4 * len(split.test) * len(x) >> 20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
@pytest.mark.slow
def test_near_duplicates_are_searched_in_the_memory_of_a_block(tmp_path: Path) -> None:
    """As in the command, whose malloc keeps what is freed."""
    done = run_python("-c", SCRIPT, path=[Path(__file__).parents[1]], cwd=tmp_path)
    grown, all_pairs = map(int, done.stdout.split())
    assert all_pairs > 300
    assert grown < 100, f"{grown} MiB, and the cosines of all pairs take {all_pairs}"
