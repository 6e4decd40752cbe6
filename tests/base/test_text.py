"""Tables, facts and commands: aligned, and not wider than a terminal."""

from __future__ import annotations

import itertools
import os
import shlex

import pytest

from featx.base import (
    command_text,
    csv_cell,
    facts,
    number_text,
    percent_text,
    printable,
    size_text,
    table,
    time_text,
)

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


def test_columns_are_those_of_a_terminal() -> None:
    """A wide character takes two, and a combining one none."""
    shown = table(("class", "rows"), [("日本", "3"), ("e\u0301te\u0301", "12")])
    assert shown.splitlines() == ["class  rows", "日本      3", "e\u0301te\u0301      12"]


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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00004, "4e-05"),
        (0.000456, "0.00046"),
        (0.0012, "0.001"),
        (0.0, "0.000"),
        (-0.0004, "-0.0004"),
        (12.3456, "12.346"),
    ],
)
def test_small_numbers_are_not_zero(value: float, text: str) -> None:
    assert number_text(value) == text


def test_percent() -> None:
    assert [percent_text(share) for share in (0.92563, 1.0, None)] == ["92.6 %", "100.0 %", "-"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a b.jpg", "a b.jpg"),
        ("ü€ 日本\u3000\u00a0👩\u200d🔬", "ü€ 日本\u3000\u00a0👩\u200d🔬"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("a\nb\tc\rd\x00", "a\\nb\\tc\\rd\\x00"),
        ("\x9b2J\x85", "\\u009b2J\\u0085"),
        ("gpj.\u202eexe", "gpj.\\u202eexe"),
        (os.fsdecode(b"caf\xe9.jpg"), "caf\\xe9.jpg"),
        ("\ud800", "\\ud800"),
    ],
)
def test_text_of_any_origin_cannot_change_the_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown
    shown.encode()


@pytest.mark.parametrize("start", ["=", "+", "-", "@"])
def test_a_cell_is_no_formula(start: str) -> None:
    assert csv_cell(f"{start}cmd|' /C calc'!A0") == f"'{start}cmd|' /C calc'!A0"
    assert csv_cell(f"a{start}b") == f"a{start}b"


@pytest.mark.parametrize("number", ["-1", "+1.5", "-0.25e-3", "-inf", "0"])
def test_a_number_stays_a_number(number: str) -> None:
    assert csv_cell(number) == number


def test_two_texts_never_become_one_cell() -> None:
    texts = ["=a", "'=a", "''=a", "a", "'a", "\udce9", "\x00", "\\udce9", "\\xe9", "\\x00"]
    texts += ["\x85", "\udc85", "\\x85", "\\u0085"]
    texts += map("".join, itertools.product("\\n\n", repeat=3))
    cells = {csv_cell(text) for text in texts}
    assert len(cells) == len(texts)
    assert not any("\n" in cell for cell in cells)


def test_sizes_and_times_have_the_unit_that_fits() -> None:
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 2560: "2.5 KiB", 3 << 30: "3.0 GiB"}
    assert [size_text(size) for size in (*sizes, 5 << 40)] == [*sizes.values(), "5.0 TiB"]
    times = {41: "41 s", 99: "99 s", 720: "12 min", 5400: "1.5 h"}
    assert [time_text(seconds) for seconds in times] == list(times.values())
