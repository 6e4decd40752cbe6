"""A registry finds members by file name and by entry points, and names what is wrong."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from featx.base import Member, Registry, for_options
from featx.errors import ConfigError, FeatxError

FAMILY = """
from featx.base.registry import Member, Registry
SHAPES = Registry("shape", "{package}", "test.shapes")
"""
MEMBER = """
from {package} import SHAPES
from featx.base.registry import Member
SHAPES.register(Member("{name}", "A {name}."))
"""


@dataclass(frozen=True)
class Family:
    """A package of members in a temporary folder."""

    registry: Registry[Member]
    package: str


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Family:
    package = f"shapes_{abs(hash(str(tmp_path)))}"
    folder = tmp_path / package
    folder.mkdir()
    (folder / "__init__.py").write_text(FAMILY.format(package=package))
    for name in ("square", "circle"):
        (folder / f"{name}.py").write_text(MEMBER.format(package=package, name=name))
    (folder / "helpers.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    __import__(package)
    return Family(sys.modules[package].SHAPES, package)


def with_entry_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, text: str) -> None:
    """Make a module of another distribution known as an entry point."""
    module = f"plugin_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{module}.py").write_text(text)
    about = tmp_path / f"{module}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[test.shapes]\n{name} = {module}:MEMBER\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_one_member_is_imported_without_the_others(family: Family) -> None:
    assert family.registry.get("square").help == "A square."
    assert f"{family.package}.circle" not in sys.modules


def test_all_members_in_the_order_of_their_names(family: Family) -> None:
    assert family.registry.names() == ("circle", "square")
    assert "square" in family.registry
    assert "helpers" not in family.registry


def test_an_unknown_name_lists_what_there_is_and_the_nearest(family: Family) -> None:
    with pytest.raises(ConfigError, match=r"shape=sqare: expected one of circle, square.*square"):
        family.registry.get("sqare")


def test_a_module_that_registers_nothing_is_no_member(family: Family) -> None:
    with pytest.raises(ConfigError, match="shape=helpers: expected one of"):
        family.registry.get("helpers")


def test_two_members_of_one_name_are_refused(family: Family) -> None:
    family.registry.get("square")
    with pytest.raises(FeatxError, match="shape=square is registered twice"):
        family.registry.register(Member("square", "Another one."))


def test_a_member_of_another_distribution(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from featx.base.registry import Member\nMEMBER = Member('star', 'A star.')"
    with_entry_point(monkeypatch, tmp_path, "star", text)
    assert family.registry.get("star").help == "A star."
    assert family.registry.names() == ("circle", "square", "star")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_package", "cannot be imported: ModuleNotFoundError"),
        ("MEMBER = 7", "is no member called 'star'"),
        (
            "from featx.base.registry import Member\nMEMBER = Member('sun', '')",
            "is no member called 'star'",
        ),
    ],
)
def test_a_broken_entry_point_is_named_and_hides_no_other_member(
    family: Family,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    message: str,
) -> None:
    with_entry_point(monkeypatch, tmp_path, "star", text)
    with pytest.raises(ConfigError, match=message):
        family.registry.get("star")
    assert family.registry.names() == ("circle", "square")
    assert message in capsys.readouterr().err


def test_a_member_takes_its_own_options_only() -> None:
    double = for_options("shape=square", int, lambda side, by: side * by, maker="made()")
    assert double(3, 2) == 6
    with pytest.raises(FeatxError, match=r"shape=square was given str; .* made\(\) makes them"):
        double("3", 2)
