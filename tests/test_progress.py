"""What the command says of its speed."""

from __future__ import annotations

import pytest

from featx.progress import bottleneck

IDLE = {"read": 0.5, "decode": 1.0, "wait": 0.2, "model": 1.0, "copy": 0.1, "write": 0.1}


@pytest.mark.parametrize(
    ("busy", "device", "expected"),
    [
        ({"model": 8.5}, "cpu", "the model: 85% of the time; a GPU"),
        ({"model": 8.5}, "cuda", "the model: 85% of the time; compile=true"),
        ({"wait": 6.0, "decode": 19.0}, "cpu", "decoding: 1.9 of 2 threads busy, 60% of the time"),
        ({"wait": 6.0, "read": 19.0}, "cuda", "reading images: 1.9 of 2 threads busy"),
        ({"wait": 4.0, "decode": 8.0, "model": 5.0}, "cpu", "the model: 50% of the time"),
        ({"wait": 4.0, "decode": 8.0, "model": 5.0}, "cuda", "decoding: 0.8 of 2 threads busy"),
        ({"copy": 5.0}, "cuda", "copying from the device: 50% of the time"),
        ({"write": 4.0}, "cpu", "writing: 40% of the time"),
        ({"statistics": 7.0}, "cpu", "summing up: 70% of the time"),
    ],
)
def test_the_stage_that_the_others_wait_for(
    busy: dict[str, float], device: str, expected: str
) -> None:
    assert bottleneck({**IDLE, **busy}, 10.0, 2, device).startswith(expected)
