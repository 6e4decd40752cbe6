"""Decoding of one image in a child process, which may crash or hang without harm to the run.

The child is `python -m featx.images.subprocess_decode`. It imports the decoder but not torch, reads
one request from stdin, and writes the pixels or the fault to stdout.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from featx.base import check_decoder_end, start_decoder
from featx.errors import RunError
from featx.images.decode import decode_array
from featx.images.image_policy import ImagePolicy
from featx.types import ImageFault, Status

_READY = b"!"
"""Byte that the child writes when its imports are done."""

_ORPHAN_MARGIN_S = 60
"""Seconds after its time limit at which a child ends itself, in case its parent is gone."""


def decode_in_subprocess(
    data: bytes, policy: ImagePolicy, at_least: int | None, limit_s: float | None
) -> npt.NDArray[Any]:
    """Decode an image in a child process, to the same pixels as `decode_array`.

    Args:
        data: encoded bytes.
        policy: as for `decode_array`.
        at_least: as for `decode_array`.
        limit_s: seconds that decoding may take, or None for no limit.

    Returns:
        As `decode_array`.

    Raises:
        ImageFault: the image cannot be decoded; its status names the reason, also if the child
            crashes (CRASHES_DECODER) or exceeds the limit (TIMEOUT).
        MemoryError: the child was killed, as the kernel does when memory is exhausted.
        RunError: no child can be started.
    """
    request = {"policy": asdict(policy), "at_least": at_least, "limit_s": limit_s}
    with start_decoder("featx.images.subprocess_decode", subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            child.stdout.read(len(_READY))  # the limit does not include the imports
            request_bytes = json.dumps(request).encode() + b"\n" + data
            answer, printed = child.communicate(request_bytes, timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            message = f"decoding takes longer than data.timeout_s={limit_s:g}, also in a subprocess"
            raise ImageFault(Status.TIMEOUT, message, "TimeoutError") from error
        finally:
            child.kill()
    if child.returncode == 0:
        return _pixels_of(answer)
    check_decoder_end(child.returncode, "one image")
    lines = printed.decode(errors="replace").strip().splitlines()
    raise RunError(
        "an image that crashes or hangs its decoder cannot be decoded in a subprocess: the "
        f"subprocess ended with {lines[-1] if lines else f'exit code {child.returncode}'}. Nothing "
        "committed is lost; the same command resumes the run."
    )


def _pixels_of(answer: bytes) -> npt.NDArray[Any]:
    """The pixels in the answer of a child.

    Raises:
        ImageFault: the answer is a fault.
    """
    line, _, pixels = answer.partition(b"\n")
    header = json.loads(line)
    if "status" in header:
        raise ImageFault(Status(header["status"]), header["message"], header["error"])
    return np.frombuffer(bytearray(pixels), header["dtype"]).reshape(header["shape"])


def _policy_of(values: Mapping[str, Any]) -> ImagePolicy:
    """The policy of a request, whose JSON has a list for the background."""
    red, green, blue = values["background"]
    return ImagePolicy(**{**values, "background": (red, green, blue)})


def _answer(request: Mapping[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """The answer to a request: a header with a shape or a fault, and the bytes of the pixels."""
    try:
        pixels = decode_array(data, _policy_of(request["policy"]), request["at_least"])
    except ImageFault as fault:
        return {"status": fault.status, "message": str(fault), "error": fault.error}, b""
    return {"shape": pixels.shape, "dtype": pixels.dtype.str}, pixels.tobytes()


def main() -> None:
    """Answer one request; the entry point of the child."""
    # Ctrl-C reaches the whole process group. The run decides when its children end.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    Image.init()  # Pillow would import its plug-ins with the first image
    answers = sys.stdout.buffer
    answers.write(_READY)
    answers.flush()
    request = json.loads(sys.stdin.buffer.readline())
    if (limit_s := request["limit_s"]) is not None:
        signal.setitimer(signal.ITIMER_REAL, limit_s + _ORPHAN_MARGIN_S)  # SIGALRM ends the process
    header, pixels = _answer(request, sys.stdin.buffer.read())
    answers.write(json.dumps(header).encode() + b"\n" + pixels)
    answers.flush()


if __name__ == "__main__":
    main()
