"""`embedding`, `stages` and `reduce=grid` of one member of every file of timm; the docs say it."""

from __future__ import annotations

import pytest
import timm
from conftest import slow_except
from timm.models._registry import _module_to_models
from timm_survey import MEMBERS, Member, documented_rows, survey

from featx.models import read_catalogue

FAST = (
    "test_convnext",  # a module called stages
    "test_vit2",  # a register and no class token
)


def _documented(member: Member) -> str:
    start = f"| {member.file} | `{member.name}` |"
    return next(row for row in documented_rows("timm") if row.startswith(start))


def test_the_table_has_a_member_of_every_file_of_timm() -> None:
    if timm.__version__ == read_catalogue().versions["timm"]:  # others have other files
        assert {member.file for member in MEMBERS} == set(_module_to_models)
    rows = [row.split(" | ")[:2] for row in documented_rows("timm")]
    assert rows == [[f"| {member.file}", f"`{member.name}`"] for member in MEMBERS]


@pytest.mark.parametrize(
    "member",
    slow_except(MEMBERS, *(member for member in MEMBERS if member.name in FAST)),
    ids=lambda member: member.name,
)
def test_a_member_is_as_the_table_says(member: Member) -> None:
    assert survey(member) == _documented(member)
