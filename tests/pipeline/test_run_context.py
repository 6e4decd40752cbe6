"""What a run knows before its first part."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_model import MODEL

from featx.analysis import FEATURES
from featx.config import from_composed, from_keywords
from featx.pipeline import FeatureOutput, build_run_context
from featx.types import Listing

pytestmark = pytest.mark.usefixtures("in_tmp_path", "one_thread")


class Indexed:
    """Arrays with an index of 64 MiB, as of the rows of a table."""

    def listing(self) -> Listing:
        self.index = np.ones(64 << 17)
        keys = np.array([b"%d.npy" % i for i in range(8)])
        return Listing(keys, np.full(8, -1, np.int64))

    def read(self, key: bytes) -> bytes:
        return b"P6 32 32 255\n" + bytes(32 * 32 * 3)


def test_memory_of_the_listing_counts_what_the_source_holds() -> None:
    config = from_composed(from_keywords({"model": MODEL, "layers": ["conv"], "out": "store"}))
    output = FeatureOutput(config, source=Indexed())
    with build_run_context(config, "", FEATURES, output) as context:
        # Memory that this process has freed and kept is used first.
        assert 32 << 20 <= context.listing_bytes < 96 << 20
