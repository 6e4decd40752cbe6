"""The preset `stages` of models that no library describes: the blocks, or a refusal with lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from featx.errors import LayerError
from featx.layers import find_stages, trace_forward


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        return self.proj((query @ key.transpose(1, 2)).softmax(-1) @ value)


class FeedForward(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma


class Block(nn.Module):
    """Four children that give tokens: more than a model of three blocks has blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.ls1, self.mlp, self.ls2 = Attention(), Scale(), FeedForward(), Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.ls1(self.attn(x))
        return x + self.ls2(self.mlp(x))


class Pairs(nn.Module):
    """Lists of [attention, feed-forward] at any depth; the sums are operations of this module."""

    def __init__(self, *sizes: int, kinds: tuple[Any, ...] = (Attention, FeedForward)) -> None:
        super().__init__()
        made: list[Any] = [kinds]
        for size in sizes:
            made = [made * size]

        def build(each: Any) -> nn.Module:
            return nn.ModuleList(map(build, each)) if isinstance(each, list | tuple) else each()

        self.layers = build(made[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.layers.modules():
            if type(each) in (Attention, FeedForward):
                x = x + each(x)
        return x


class Two(nn.Module):
    """Blocks that give two tensors, with a list of two equal modules inside."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for part in self.parts:
            x = part(x)
        return x, x


class Chain(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


class Tokens(nn.Module):
    """A transformer with one class token less: patches, a body, a classifier."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.patch, self.body = nn.Conv2d(3, 8, 8, 8), body
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.body(tokens)).mean(1))


def stages(model: nn.Module) -> list[str]:
    return find_stages(trace_forward(model.eval(), torch.randn(2, 3, 32, 32)))


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("body", [Chain, nn.Sequential])
def test_blocks_are_taken_and_not_the_inside_of_one(depth: int, body: Any) -> None:
    stem = "body.blocks" if body is Chain else "body"
    found = stages(Tokens(body(*(Block() for _ in range(depth)))))
    assert found == [f"{stem}.{i}" for i in range(depth)]


def test_blocks_inside_of_a_module_of_a_sequence() -> None:
    encoder = Chain(*(Block() for _ in range(3)))
    found = stages(nn.Sequential(Tokens(encoder), nn.Linear(5, 2)))
    assert found == [f"0.body.blocks.{i}" for i in range(3)]


@pytest.mark.parametrize("sizes", [(1,), (3,), (6,), (2, 2), (1, 3), (2, 1, 2)])
def test_pairs_are_refused_with_candidates(sizes: tuple[int, ...]) -> None:
    with pytest.raises(LayerError, match=r"not certain.*Candidates: ") as caught:
        stages(Tokens(Pairs(*sizes)))
    stars = ".*" * len(sizes)
    count = torch.Size(sizes).numel()
    assert f"'body.layers{stars}.0' ({count} Attention)" in str(caught.value)
    assert f"'body.layers{stars}.1' ({count} FeedForward)" in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        Chain(*(part() for _ in range(3) for part in (Attention, FeedForward))),
        Chain(Two(), Two(), Two()),
        Pairs(3, kinds=(FeedForward, FeedForward)),
        nn.Sequential(Chain(Block(), Block()), Pairs(2), Chain(Block(), Block())),
    ],
    ids=["alternating", "two tensors", "equal pairs", "several lists"],
)
def test_what_is_not_certain_is_refused(body: nn.Module) -> None:
    with pytest.raises(LayerError, match=r"not certain.*Candidates: '.*\d \w+\)"):
        stages(Tokens(body))


def test_a_head_that_is_most_of_the_model_is_no_part_of_stages() -> None:
    """The maps are those of a small backbone; a transformer comes after them."""
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 3, 3, 2, 1))
    body = nn.Sequential(*(Chain(Attention()) for _ in range(3)))
    model = nn.Sequential(backbone, nn.Upsample(32), Tokens(body))
    assert stages(backbone) == ["0", "1"]
    assert stages(model) == ["2.body.0", "2.body.1", "2.body.2"]


class Pyramid(nn.Module):
    """Lists of blocks that are not called themselves, one for each number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.block = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        for blocks in self.block:
            for block in blocks:
                tokens = block(tokens)
            tokens = tokens[:, ::4]
        return tokens.mean(1)


def test_the_last_block_of_each_list_of_a_pyramid() -> None:
    assert stages(Pyramid()) == ["block.0.1", "block.1.1", "block.2.1"]


class Decoded(nn.Module):
    """Maps of three sizes around a transformer: patches, blocks of tokens, a decoder."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.patch, self.up, self.head = nn.Conv2d(3, 8, 8, 8), nn.Upsample(8), nn.Conv2d(8, 2, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.decoder = nn.ConvTranspose2d(8, 8, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = self.patch(x)
        tokens = maps.flatten(2).transpose(1, 2)
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.decoder(self.up(tokens.transpose(1, 2).reshape(maps.shape))))


def test_patches_before_blocks_of_tokens_do_not_stand_for_them() -> None:
    assert stages(Decoded(2)) == ["blocks.0", "blocks.1"]


class UNet(nn.Module):
    """Maps become smaller in the encoder, and as large as before in the decoder."""

    def __init__(self, has_encoder_blocks: bool) -> None:
        super().__init__()
        sizes = [4, 8, 16, 32]
        self.encoder = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.ReLU())
            if has_encoder_blocks
            else nn.Conv2d(a, b, 3, 2, 1)
            for a, b in zip([3, *sizes], sizes, strict=False)
        )
        self.decoder = nn.ModuleList(
            nn.Sequential(nn.ConvTranspose2d(b, a, 2, 2), nn.ReLU())
            for a, b in zip(sizes[-2::-1], sizes[::-1], strict=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = []
        for block in self.encoder:
            x = block(x)
            maps.append(x)
        for block, skipped in zip(self.decoder, maps[-2::-1], strict=True):
            x = block(x) + skipped
        return x


@pytest.mark.parametrize("has_encoder_blocks", [False, True])
def test_blocks_of_a_decoder_are_no_stages(has_encoder_blocks: bool) -> None:
    """segmentation_models_pytorch's Unet has both, and with VGG the encoder has no blocks."""
    with pytest.raises(LayerError, match=r"not certain.*'decoder\.\*' \(3 Sequential\)") as caught:
        stages(UNet(has_encoder_blocks))
    assert ("'encoder.*' (4 Sequential)" in str(caught.value)) == has_encoder_blocks
