"""Labels of a data set as classes of the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from timm.data.imagenet_info import ImageNetInfo

from featx.errors import DataError
from featx.pipeline.run_listing import target_labels
from featx.types import Listing

INFO = ImageNetInfo("imagenet-1k")
TIMM = tuple(INFO.index_to_description(i) for i in range(1000))
IDS = tuple(INFO.index_to_label_name(i) for i in range(1000))


def model(classes: tuple[str, ...] = (), ids: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(name="timm/net", weights="a1", classes=classes, class_ids=ids)


def listing(*names: str, labels: tuple[int, ...] = ()) -> Listing:
    """One row of each class, unless other labels are given."""
    chosen = labels or tuple(range(len(names)))
    keys = np.array([b"%03d.png" % i for i in range(len(chosen))])
    return Listing(keys, np.array(chosen, np.int64), names)


@pytest.mark.parametrize(
    ("names", "backbone", "expected"),
    [
        (("a", "b"), model(("a", "b")), [0, 1]),  # equal lists
        (("a", "b"), model(("b", "a")), [1, 0]),  # another order
        (("a", "b"), model(("c", "b", "x", "a")), [3, 1]),  # some of the model's
        (("Great white_shark", "Tinca  tinca"), model(TIMM), [2, 0]),
        (("tench", "GOLDFISH"), model(TIMM), [0, 1]),
        (("n01443537", "n01440764"), model(TIMM, IDS), [1, 0]),
        (("maillot",), model(TIMM), [638]),  # 639 is 'maillot, tank suit'
        (("0", "1", "10", "2"), model(), [0, 1, 10, 2]),  # numbers are indices
        (("007", "10"), model(TIMM), [7, 10]),
    ],
)
def test_classes_are_matched_by_name_or_number(
    names: tuple[str, ...], backbone: Any, expected: list[int]
) -> None:
    for target in ("label", "loss"):
        assert target_labels(target, listing(*names), backbone).tolist() == expected


@pytest.mark.parametrize(
    ("names", "backbone", "message"),
    [
        (("cat", "dog"), model(), "has no names of its classes to compare them with. Give labels"),
        (("a", "x"), model(("a", "b")), "1 of 2 classes of the data set match no single class"),
        (("crane",), model(TIMM), "match no single class of timm/net, such as crane"),  # two cranes
        (("1", "b"), model(("a", "b")), "such as 1"),  # numbers among names are names
    ],
)
def test_classes_without_one_match_are_refused(
    names: tuple[str, ...], backbone: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        target_labels("label", listing(*names), backbone)
    assert target_labels("predicted", listing(*names), backbone).tolist() == [*range(len(names))]


def test_only_classes_of_rows_have_to_match() -> None:
    """data.limit takes the first rows and keeps the classes of the whole data set."""
    rows = listing("a", "b", "unknown", labels=(1, 0, 1))
    assert target_labels("label", rows, model(("b", "a"))).tolist() == [0, 1, 0]


def test_rows_without_a_label_are_counted() -> None:
    rows = listing("a", labels=(0, -1, -1))
    with pytest.raises(DataError, match=r"2 images have no label, such as 001\.png"):
        target_labels("loss", rows, model(("a",)))
