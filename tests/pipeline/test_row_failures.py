"""What is said of rows that failed, and the exit code."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tiny_model import MODEL, extract

from featx.config import Config
from featx.pipeline import exit_code
from featx.pipeline.row_failures import failures_text
from featx.store import read_heartbeats
from featx.types import Failure, Status


@pytest.mark.parametrize(
    ("rows", "failed", "allowed", "said"),
    [
        (22, 0, 0.01, None),
        (200, 2, 0.01, None),
        (22, 2, 0.01, "2 of 22 images failed, more than max_failures=0.01 (0 images). See there."),
        (3, 3, 10, "3 of 3 images failed, all of them. See there."),  # nothing came of the run
    ],
)
def test_more_failures_than_are_allowed_or_nothing_else(
    capsys: pytest.CaptureFixture[str], rows: int, failed: int, allowed: float, said: str | None
) -> None:
    code = exit_code(Config(max_failures=allowed), rows, failed, "See there.")
    assert code == (0 if said is None else 3)
    assert capsys.readouterr().err.splitlines() == ([] if said is None else [said])


def test_failures_are_grouped_by_their_message() -> None:
    heic = (Status.UNSUPPORTED, 'HEIC needs pip install "featx[heif]"')
    kinds = [heic, heic, (Status.UNSUPPORTED, "no image")]
    kinds += [(Status.TRUNCATED, f"{number} bytes are missing") for number in (3, 14, 159)]
    kinds += [(Status.DECODE_ERROR, f"reason {letter}") for letter in "abcdefghij"]
    failures = [
        Failure(row, b"%d.jpg" % row, status, "Error", message)
        for row, (status, message) in enumerate(kinds)
    ]
    text = failures_text(failures)
    assert text.splitlines()[:4] == [
        "16 images failed:",
        "  3 truncated, such as 3.jpg: 3 bytes are missing",
        '  2 unsupported, such as 0.jpg: HEIC needs pip install "featx[heif]"',
        "  1 unsupported, such as 2.jpg: no image",
    ]
    assert text.splitlines()[-1] == "  3 decode error for other reasons"


@pytest.mark.slow
@pytest.mark.usefixtures("in_tmp_path", "quick_heartbeats")
def test_the_heartbeat_of_a_run_counts_them(photos: Path) -> None:
    (photos / "cat" / "000.png").write_bytes(b"no image")
    seen, ended = {None}, threading.Event()

    def look() -> None:
        while not ended.wait(0.01):
            seen.update(record.values["failures"] for record in read_heartbeats(Path("store")))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        extract(photos, model={**MODEL, "args": {"pause_s": 0.03}})
    finally:
        ended.set()
        thread.join()
    assert seen == {None, 1}
