"""Families: what is made from the registries agrees with them."""

from __future__ import annotations

from dataclasses import fields

import pytest
from conftest import run_python

from featx.base import family, family_options
from featx.config import (
    described_options,
    from_composed,
    from_keywords,
    member_groups,
    option_tree,
)
from featx.errors import ConfigError, FeatxError


def test_every_member_and_its_options_are_described() -> None:
    sentences = {option.name: option.help for option in described_options()}
    for option in family_options():
        for member in family(option):
            assert len(member.help) > 10
            assert member.help.endswith(".")
            assert f"{member.name}: {member.help}" in sentences[option]
    for name in option_tree():
        assert name.endswith(".name") or sentences[name]


def test_the_options_of_a_member_have_its_name() -> None:
    for group in member_groups().values():
        for member in family(group.option):
            if member.options is None:
                continue
            assert issubclass(member.options, group.base)
            if group.selector in ("name", "library"):
                default = {f.name: f.default for f in fields(member.options)}[group.selector]
                assert default == member.name


def test_an_option_of_another_member_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^data\.depth has an effect with data=folder only \(now data=table\)"
    ):
        from_composed(from_keywords({"data": {"name": "table", "root": "x.csv", "depth": 1}}))
    with pytest.raises(ConfigError, match=r"data=foldr: expected one of folder, .*: folder"):
        from_composed(from_keywords({"data": {"name": "foldr", "root": "x"}}))
    with pytest.raises(ConfigError, match=r"export\.format=xlsx: expected one of clam, "):
        from_composed(from_keywords({"export": {"format": "xlsx"}, "store": "x"}))


def test_an_undeclared_family_is_named() -> None:
    with pytest.raises(FeatxError, match=r"no family is declared for colour; known: codec, data"):
        family("colour")


def test_the_help_of_all_members_needs_no_torch() -> None:
    code = (
        "import sys; from featx.config.all_options import described_options; described_options();"
        "sys.exit('torch' in sys.modules or 'torchvision' in sys.modules)"
    )
    run_python("-c", code)
