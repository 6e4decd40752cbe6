"""Tables, facts and commands: aligned, and not wider than a terminal."""

from __future__ import annotations

import shlex

import pytest

from featx.base import command_text, facts, percent_text, printable, printable_lines, table

LONG = "encoder.layers.encoder_layer_11.self_attention.relative_position_bias.projection"


def test_a_name_that_does_not_fit_has_a_line_of_its_own() -> None:
    shown = table(("layer", "shape"), [("conv", "3x3"), (LONG, "1x" * 8 + "1")], width=60)
    assert shown.splitlines() == [
        "layer              shape",
        "conv                 3x3",
        LONG,
        "       1x1x1x1x1x1x1x1x1",
    ]
    assert LONG + "  " in table(("layer", "shape"), [(LONG, "3x3")], width=None)


def test_columns_that_are_too_wide_in_any_case_stay_together() -> None:
    shown = table(("layer", "text"), [("conv", "x" * 95)])
    assert shown.splitlines()[-1] == "conv   " + "x" * 95


def test_facts_are_broken_between_words() -> None:
    text = "one two three four five six seven"
    assert facts([("a", text), ("long", "b")], width=20).splitlines() == [
        "a     one two three", "      four five six", "      seven", "long  b",
    ]  # fmt: skip
    assert facts([("", "x" * 30)], width=20).strip() == "x" * 30  # a path has no words


@pytest.mark.parametrize("place", ["runs/photos", "/data/collection of 2026/" + "deep/" * 20])
def test_a_broken_command_is_one_command(place: str) -> None:
    command = command_text("job=predict", f"store={place}", "data=./new", "layers=[a,b]")
    shown = facts([("next", command)], width=60)
    assert [line for line in shown.splitlines() if len(line) > 60 and "/deep" not in line] == []
    one_line = shown.removeprefix("next").replace("\\\n", " ")
    assert shlex.split(one_line) == [
        *("python", "-m", "featx", "job=predict"), f"store={place}", "data=./new", "layers=[a,b]",
    ]  # fmt: skip


def test_percent() -> None:
    assert [percent_text(share) for share in (0.92563, 1.0, None)] == ["92.6 %", "100.0 %", "-"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"a\x1b[31m.jpg", r"a\x1b[31m.jpg"),
        (b"a\nb\tc\rd", r"a\x0ab\x09c\x0dd"),
        (b"\xff\xfe", r"\xff\xfe"),
        ("é ü.jpg".encode(), "é ü.jpg"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),
        ("gpj.\u202eexe", r"gpj.\u202eexe"),
    ],
)
def test_names_are_shown_as_one_line_without_control_characters(
    name: str | bytes, shown: str
) -> None:
    assert printable(name) == shown
    assert printable_lines(f"a\n\t{shown}") == f"a\n\t{shown}"
