"""Contract of reductions."""

from __future__ import annotations

import pytest
import torch

from featx.layers import Reduction


class ReductionContract:
    """Tests of a reduction; a subclass overrides the fixtures `reduction` and `row_shape`.

    Attributes:
        reduced_shape: shape of a reduced row, or None if only its consistency is tested.
    """

    reduced_shape: tuple[int, ...] | None = None

    @pytest.fixture
    def reduction(self) -> Reduction:
        """Function from (B, *row_shape) to the stored rows, (B, ...)."""
        raise NotImplementedError("override the fixture `reduction`: it returns the function")

    @pytest.fixture
    def row_shape(self) -> tuple[int, ...]:
        """Shape of the layer's tensor, without the batch dimension."""
        raise NotImplementedError("override the fixture `row_shape`, for example with (8, 4, 4)")

    @pytest.fixture
    def rows(self, row_shape: tuple[int, ...]) -> torch.Tensor:
        """(5, *row_shape) float32, standard normal."""
        return torch.randn(5, *row_shape, generator=torch.Generator().manual_seed(3))

    def test_every_row_becomes_one_row(self, reduction: Reduction, rows: torch.Tensor) -> None:
        reduced = reduction(rows)
        assert len(reduced) == len(rows)
        assert reduced.is_floating_point()
        if self.reduced_shape is not None:
            assert tuple(reduced.shape[1:]) == self.reduced_shape

    def test_a_row_does_not_depend_on_the_other_rows(
        self, reduction: Reduction, rows: torch.Tensor
    ) -> None:
        """A resumed run has other batches; the values must stay the same."""
        together = reduction(rows)
        for number in range(len(rows)):
            alone = reduction(rows[number : number + 1])
            torch.testing.assert_close(alone[0], together[number], rtol=1e-6, atol=1e-6)

    def test_the_same_rows_give_the_same_bits(
        self, reduction: Reduction, rows: torch.Tensor
    ) -> None:
        assert torch.equal(reduction(rows.clone()), reduction(rows.clone()))

    def test_the_tensor_of_the_layer_is_not_changed(
        self, reduction: Reduction, rows: torch.Tensor
    ) -> None:
        before = rows.clone()
        reduction(rows)
        assert torch.equal(rows, before)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
    def test_half_precision_is_summed_in_float32(
        self, reduction: Reduction, rows: torch.Tensor, dtype: torch.dtype
    ) -> None:
        """The result differs from that of float32 by one rounding of the result at most."""
        half = (rows + 40).to(dtype)
        reduced = reduction(half)
        tolerance = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(
            reduced.float(), reduction(half.float()).float(), rtol=tolerance, atol=tolerance
        )

    def test_the_memory_format_has_no_effect(
        self, reduction: Reduction, rows: torch.Tensor
    ) -> None:
        """The engine may compute in channels_last."""
        strided = rows.transpose(1, -1).contiguous().transpose(1, -1)
        torch.testing.assert_close(reduction(strided), reduction(rows), rtol=1e-6, atol=1e-6)
