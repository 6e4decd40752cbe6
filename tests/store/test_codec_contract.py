"""Every codec passes the contract."""

from __future__ import annotations

from typing import Any

import pytest

from featx.store import codecs
from featx.testing import CodecContract


@pytest.mark.parametrize("codec", codecs.CODECS.names())
class TestCodecs(CodecContract):
    @pytest.fixture
    def filters(self, codec: str) -> dict[str, Any]:
        return codecs.filters(codec)
