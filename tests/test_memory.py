"""Memory does not grow with the number of images."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import run_python

SCRIPT = """
import json, resource, sys
import numpy as np
import featx
from featx.types import Listing
from tiny_model import KEYS

class Squares:
    def __init__(self, count):
        self.count = count

    def listing(self):
        keys = np.array([b"%07d" % i for i in range(self.count)])
        return Listing(keys, np.full(self.count, -1))

    def read(self, key):
        return b"P6 32 32 255\\n" + bytes([int(key) % 256]) * (3 * 32 * 32)

count = int(sys.argv[1])
store = featx.extract(
    **{**KEYS, "data": Squares(count), "layers": ["conv"], "batch_size": 64, "part_rows": 1024,
       "out": f"store-{count}"}
)
assert len(store) == count and store.complete
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
"""


@pytest.mark.slow
def test_a_hundred_times_the_images_take_no_more_memory(tmp_path: Path) -> None:
    peaks = {}
    for count in (1000, 100_000):
        done = run_python("-c", SCRIPT, count, path=[Path(__file__).parent], cwd=tmp_path)
        peaks[count] = json.loads(done.stdout.splitlines()[-1])
    sys.stdout.write(f"peak memory in KiB: {peaks}\n")
    assert peaks[100_000] < 1.05 * peaks[1000], peaks
