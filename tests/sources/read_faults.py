"""Images that a source cannot read."""

from __future__ import annotations

import pytest

from featx.types import ImageFault, Source


def fault_of(source: Source, key: bytes) -> ImageFault:
    """The fault that reading an image raises."""
    with pytest.raises(ImageFault) as caught:
        source.read(key)
    return caught.value
