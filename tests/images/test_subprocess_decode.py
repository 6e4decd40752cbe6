"""One image decoded in a process of its own: the same pixels, or what became of the process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import broken_decoders
import numpy as np
import pytest
from broken_decoders import ABORT, CRASH, HANG, KILL, SLOW, gif
from conftest import make_image
from encoded_images import encode

from featx.errors import RunError
from featx.images import ImagePolicy
from featx.images.decode import decode_array
from featx.images.image_policy import SIMPLEJPEG
from featx.images.subprocess_decode import decode_in_subprocess
from featx.types import ImageFault, Status

POLICY = ImagePolicy("apply", (10, 20, 30), 10**7, SIMPLEJPEG)
IMAGE = make_image(300, 260)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of this process have decoders that crash and hang."""
    folder = broken_decoders.install(tmp_path / "broken")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)


def encoded(kind: str) -> bytes:
    return encode(IMAGE, kind)


def fault_of(data: bytes, limit_s: float = 60) -> ImageFault:
    with pytest.raises(ImageFault) as caught:
        decode_in_subprocess(data, POLICY, None, limit_s)
    return caught.value


@pytest.mark.parametrize(("kind", "at_least"), [("JPEG", 32), ("PNG", None)])
def test_the_same_pixels(kind: str, at_least: int | None) -> None:
    data = encoded(kind)
    found = decode_in_subprocess(data, POLICY, at_least, 60)
    assert np.array_equal(found, decode_array(data, POLICY, at_least))
    assert found.flags.writeable


def test_the_same_fault() -> None:
    data = encoded("PNG")[:500]
    with pytest.raises(ImageFault) as here:
        decode_array(data, POLICY, None)
    there = fault_of(data)
    assert (there.status, str(there), there.error) == (
        here.value.status,
        str(here.value),
        here.value.error,
    )


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(("comment", "name"), [(CRASH, "SIGSEGV"), (ABORT, "SIGABRT")])
def test_a_crash_is_a_fault(comment: bytes, name: str) -> None:
    fault = fault_of(gif(IMAGE, comment))
    assert (fault.status, fault.error) == (Status.CRASHES_DECODER, name)
    assert str(fault) == f"decoding it ends the process with {name}, also in a subprocess"


@pytest.mark.usefixtures("broken")
def test_a_hang_is_a_fault_after_its_limit() -> None:
    started_at = time.monotonic()
    fault = fault_of(gif(IMAGE, HANG), 0.3)
    assert time.monotonic() - started_at < 30
    assert (fault.status, fault.error) == (Status.TIMEOUT, "TimeoutError")
    assert "data.timeout_s=0.3" in str(fault)


@pytest.mark.usefixtures("broken")
def test_what_was_slow_elsewhere_is_an_image_here() -> None:
    plain = decode_array(gif(IMAGE), POLICY, None)
    assert np.array_equal(decode_in_subprocess(gif(IMAGE, SLOW), POLICY, None, 60), plain)


@pytest.mark.usefixtures("broken")
def test_a_child_that_is_killed_says_nothing_of_the_image() -> None:
    with pytest.raises(MemoryError, match="was killed"):
        decode_in_subprocess(gif(IMAGE, KILL), POLICY, None, 60)


def test_a_child_that_cannot_start_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "PIL.py").write_text("raise ImportError('no Pillow today')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(RunError, match="no Pillow today"):
        decode_in_subprocess(encoded("PNG"), POLICY, None, 60)
