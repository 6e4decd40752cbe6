"""Images that cannot be read or decoded: the fault that a test expects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from featx.types import ImageFault, Source, Status


@contextlib.contextmanager
def image_fault(status: Status, message: str = "") -> Iterator[None]:
    """The block has to raise an ImageFault of this status, with a message that matches."""
    with pytest.raises(ImageFault, match=message or None) as caught:
        yield
    assert caught.value.status == status


def fault_of(source: Source, key: bytes) -> ImageFault:
    """The fault that reading a row raises."""
    with pytest.raises(ImageFault) as caught:
        source.read(key)
    return caught.value
