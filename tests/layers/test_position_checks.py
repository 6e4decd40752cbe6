"""Positions of tokens against the image: row-major order is taken, any other is refused."""

from __future__ import annotations

import pytest
import torch
from tiny_engine import assert_refused, backbone_of, bound, noise
from torch import nn

from featx.config import make_reduce
from featx.errors import ReduceError

GRID = ("tokens", "grid")
SCRAMBLED = ReduceError, r"tokens.*: .* positions are not in the row-major order"


class Patches(nn.Module):
    """(B, 3, 16, 16) -> `num_prefix` tokens and 4 x 4 patch tokens in a given order, (B, T, C)."""

    def __init__(self, order: list[int], num_prefix: int = 0) -> None:
        super().__init__()
        self.embed, self.tokens, self.mix = nn.Conv2d(3, 8, 4, 4), nn.Identity(), nn.Linear(8, 8)
        self.order, self.num_prefix = order, num_prefix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert len(x) > 1, "a squeeze() in the model fails for a single image"
        x = self.embed(x).flatten(2).transpose(1, 2)[:, self.order]
        x = x + 2 * self.mix(x.mean(1, keepdim=True))  # attention that looks everywhere
        front = torch.ones(len(x), self.num_prefix, 8)
        return self.tokens(torch.cat([front, x], 1))


ROW_MAJOR = list(range(16))
COLUMN_MAJOR = [4 * column + row for row in range(4) for column in range(4)]
BY_UNITS = [
    4 * (2 * a + c) + 2 * b + d for a in (0, 1) for b in (0, 1) for c in (0, 1) for d in (0, 1)
]


@pytest.mark.parametrize("num_prefix", [0, 1, 5])
def test_tokens_in_row_major_order_make_a_grid(num_prefix: int) -> None:
    module = Patches(ROW_MAJOR, num_prefix)
    backbone = backbone_of(module, 16, num_prefix)
    with bound(backbone, GRID) as engine:
        found = engine.run(noise(side=16))["tokens"]
    maps = module(noise(side=16))[:, num_prefix:].transpose(1, 2).reshape(4, 8, 4, 4)
    expected = torch.nn.functional.adaptive_avg_pool2d(maps, 2)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("order", [COLUMN_MAJOR, BY_UNITS, ROW_MAJOR[::-1]])
def test_tokens_in_another_order_are_refused(order: list[int]) -> None:
    """Hiera keeps them by mask units: a grid of them would be scrambled."""
    backbone = backbone_of(Patches(order), 16)
    assert_refused(*SCRAMBLED, backbone, GRID)
    with bound(backbone, ("tokens", "avg")) as engine:
        assert engine.run(noise(side=16))["tokens"].shape == (4, 8)


@pytest.mark.parametrize(
    ("order", "is_misplaced"),
    [(ROW_MAJOR, False), (COLUMN_MAJOR, True), (BY_UNITS, True), (ROW_MAJOR[::-1], True)],
)
@pytest.mark.parametrize("num_prefix", [0, 1])
def test_whole_rows_in_another_order_are_stored_without_places(
    order: list[int], is_misplaced: bool, num_prefix: int
) -> None:
    with bound(backbone_of(Patches(order, num_prefix), 16, num_prefix), "tokens") as engine:
        assert engine.captures.misplaced == ({"tokens"} if is_misplaced else set())


@pytest.mark.parametrize(("order", "is_misplaced"), [(ROW_MAJOR, False), (BY_UNITS, True)])
@pytest.mark.parametrize("num_prefix", [0, 1])
def test_samples_of_rows_in_another_order_are_stored_without_a_grid(
    order: list[int], is_misplaced: bool, num_prefix: int
) -> None:
    backbone = backbone_of(Patches(order, num_prefix), 16, num_prefix)
    with bound(backbone, ("tokens", make_reduce("sample"))) as engine:
        [spec] = engine.specs(engine.chosen)  # type: ignore[attr-defined]
    candidates = {"first": num_prefix, "num_candidates": 16}
    grid = {} if is_misplaced else {"rows": 4, "columns": 4}
    options = {"k": 16, "candidates": "patches", "seed": 0}
    assert spec.reduce_args == {**options, **candidates, **grid}


def test_groups_of_tokens_that_look_like_a_map_are_refused() -> None:
    """timm's nest: (groups, tokens of a group, C), as many groups as tokens."""

    class Groups(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.tokens = Patches(BY_UNITS), nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tokens(self.patches(x).reshape(len(x), 4, 4, 8))

    assert_refused(*SCRAMBLED, backbone_of(Groups(), 16), GRID)


def test_gradients_are_checked_by_the_tensor_they_belong_to() -> None:
    module = nn.Sequential(Patches(BY_UNITS), nn.Flatten(), nn.Linear(128, 3))
    assert_refused(*SCRAMBLED, backbone_of(module, 16), ("0.tokens:grad_output", "grid"))


def test_a_register_token_is_no_class_token() -> None:
    """timm's vit_little_patch16_reg4_gap_256 has four registers and pools the patches."""
    backbone = backbone_of(Patches(ROW_MAJOR, 4), 16, 4)
    backbone.has_class_token = False
    message = r"4 tokens in front .* are register tokens.*patch_avg"
    assert_refused(ReduceError, message, backbone, ("tokens", "cls"))
    with bound(backbone, ("tokens", "patch_avg")) as engine:
        found = engine.run(noise(side=16))["tokens"]
    expected = backbone.module(noise(side=16))[:, 4:].mean(1)
    assert torch.allclose(found, expected, atol=1e-6)


def test_tokens_that_the_image_does_not_change_are_refused() -> None:
    class Constant(Patches):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(0 * x)

    assert_refused(*SCRAMBLED, backbone_of(Constant(ROW_MAJOR), 16), GRID)
