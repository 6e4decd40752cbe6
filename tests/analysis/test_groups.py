"""Which rows belong together: by the keys of boxes and frames, and by a column."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_store import make_labelled

from featx.analysis.probe import LabelledRows
from featx.analysis.probe.groups import row_groups
from featx.analysis.probe.labelled_rows import labelled_rows
from featx.errors import StoreError
from featx.sources import origin_of
from featx.sources.row_keys import box_key, frame_key
from featx.store import FeatureStore

pytestmark = pytest.mark.usefixtures("one_thread")


def labelled(root: Path, keys: list[bytes], **columns: np.ndarray) -> LabelledRows:
    """Rows with these keys and columns, all of them ok and labelled."""
    order = np.argsort(np.array(keys), kind="stable")
    run = make_labelled({"x": np.zeros((len(keys), 2))}, np.arange(len(keys)) % 2, ["a", "b"])
    listing = replace(
        run.listing,
        keys=np.array(keys)[order],
        columns={name: values[order] for name, values in columns.items()},
    )
    replace(run, listing=listing).write(root, packed=True)
    return labelled_rows(FeatureStore(root))


def test_what_a_key_was_taken_from() -> None:
    box = box_key(b"cat/a#1.jpg", 1, 2, 30, 40)
    assert box == b"cat/a#1.jpg#1,2,30,40"
    assert origin_of(box) == (b"cat/a#1.jpg", "image")
    assert origin_of(box + b"#hflip") == origin_of(b"cat/a#1.jpg#crop12") == origin_of(box)
    frame = frame_key(b"talks/me@home.mp4", 12.5)
    assert frame == b"talks/me@home.mp4@00012.500"
    assert origin_of(frame) == (b"talks/me@home.mp4", "video")
    assert origin_of(frame_key(b"long.mp4", 123456.0)) == (b"long.mp4", "video")
    assert origin_of(box_key(frame, 1, 2, 3, 4)) == (b"talks/me@home.mp4", "video")
    assert origin_of(frame + b"#rot90") == (b"talks/me@home.mp4", "video")
    for key in (b"a.jpg", b"a#1.jpg", b"a@00012.000.png", b"a#1,2,3", b"#1,2,3,4", b"a@12.000"):
        assert origin_of(key) == (key, None)


def test_images_of_their_own_have_no_groups(tmp_path: Path) -> None:
    assert row_groups(labelled(tmp_path / "s", [b"a.jpg", b"b.jpg", b"c.jpg"])) is None


def test_boxes_are_grouped_by_image_and_frames_by_video(tmp_path: Path) -> None:
    boxes = [b"a.jpg#0,0,5,5", b"a.jpg#5,0,5,5", b"b.jpg", b"b.jpg#0,0,5,5"]
    found = row_groups(labelled(tmp_path / "boxes", boxes))
    assert found is not None
    assert (found.by, found.of_row.tolist()) == ("image", [0, 0, 1, 1])
    assert found.as_dict() == {"by": "image", "groups": 2, "largest": 2, "rows_without_value": 0}
    frames = [frame_key(b"%d.mp4" % (i // 3), i) for i in range(6)]
    found = row_groups(labelled(tmp_path / "frames", frames))
    assert found is not None
    assert (found.by, found.of_row.tolist()) == ("video", [0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize(
    ("values", "groups", "missing"),
    [
        (np.array([b"p", b"q", b"p", b"", b""]), [0, 1, 0, 2, 3], 2),
        (np.array([7, 8, 7, 9, 9]), [0, 1, 0, 2, 2], 0),
        (np.array([7.5, 8, 7.5, np.nan, np.nan]), [0, 1, 0, 2, 3], 2),
        (np.array([True, False, True, False, False]), [1, 0, 1, 0, 0], 0),
    ],
)
def test_a_column_groups_rows_and_one_without_a_value_is_alone(
    tmp_path: Path, values: np.ndarray, groups: list[int], missing: int
) -> None:
    rows = labelled(tmp_path / "s", [b"%d.jpg" % i for i in range(5)], patient=values)
    found = row_groups(rows, "patient")
    assert found is not None
    assert (found.by, found.num_missing) == ("patient", missing)
    assert found.of_row.tolist() == groups
    with pytest.raises(StoreError, match="has no column 'pattient'; it has patient"):
        row_groups(rows, "pattient")


def test_a_column_and_the_keys_together_join_what_either_links(tmp_path: Path) -> None:
    keys = [b"%s.jpg#%d,0,5,5" % (name, i) for name in (b"a", b"b", b"c", b"d") for i in (0, 1)]
    slides = np.array([b"s1", b"s2", b"s2", b"s3", b"s4", b"", b"", b"s5"])
    found = row_groups(labelled(tmp_path / "s", keys, slide=slides), "slide")
    assert found is not None
    assert found.by == "image and slide"
    assert found.of_row.tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
