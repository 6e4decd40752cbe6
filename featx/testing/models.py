"""Contracts of model libraries and of reductions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._pytree import tree_leaves

from featx.layers import Reduction
from featx.models import Backbone, state_sha256


class ModelLibraryContract:
    """Tests of the backbones that a model library builds; a subclass overrides `build`."""

    @pytest.fixture
    def build(self) -> Callable[[], Backbone]:
        """Function that builds the same backbone each time it is called."""
        raise NotImplementedError(
            "override the fixture `build`: it returns a function () -> Backbone"
        )

    @pytest.fixture
    def backbone(self, build: Callable[[], Backbone]) -> Backbone:
        """Backbone of the library, built once for each test."""
        return build()

    def test_the_module_is_frozen_in_eval_mode_on_the_cpu(self, backbone: Backbone) -> None:
        assert not any(module.training for module in backbone.module.modules())
        for parameter in backbone.module.parameters():
            assert not parameter.requires_grad
            assert parameter.device.type == "cpu"

    def test_the_weights_have_a_name_and_a_digest(self, backbone: Backbone) -> None:
        assert backbone.name
        assert backbone.weights
        assert backbone.weights_sha256 == state_sha256(backbone.module)

    def test_a_second_build_is_the_same_model(self, build: Callable[[], Backbone]) -> None:
        """A resume and each worker build the model again and must get the same values."""
        first, second = build(), build()
        assert first.weights_sha256 == second.weights_sha256
        assert first.name == second.name
        assert first.weights == second.weights
        assert first.preprocess.describe() == second.preprocess.describe()
        x = _noise(first)
        for one, other in zip(_outputs(first, x), _outputs(second, x), strict=True):
            assert torch.equal(one, other)

    def test_a_forward_pass_gives_one_finite_row_per_image(self, backbone: Backbone) -> None:
        outputs = _outputs(backbone, _noise(backbone))
        assert outputs
        for output in outputs:
            assert len(output) == 2
            assert torch.isfinite(output).all()

    def test_a_row_does_not_depend_on_the_other_rows(self, backbone: Backbone) -> None:
        x = _noise(backbone)
        others = torch.stack([x[0], x[1].flip(-1) - 1])
        for one, other in zip(_outputs(backbone, x), _outputs(backbone, others), strict=True):
            torch.testing.assert_close(one[0], other[0])

    @pytest.mark.parametrize("size", [(301, 257), (90, 160)], ids=["larger", "smaller"])
    def test_the_transform_gives_images_of_the_input_size(
        self, backbone: Backbone, size: tuple[int, int]
    ) -> None:
        x = backbone.preprocess.reference(_image(size))
        assert x.shape == (3, *backbone.preprocess.crop)
        assert x.dtype == torch.float32

    def test_the_fast_path_reproduces_the_transform(self, backbone: Backbone) -> None:
        """Both resize with antialiasing, so a pixel differs by rounding: two steps of 256."""
        preprocess = backbone.preprocess
        if not preprocess.has_fast_path:
            pytest.skip("the transform has no fast path")
        image = _image((301, 257))
        fast = preprocess.crop_uint8(np.array(image))
        assert fast.dtype == torch.uint8
        mean, std = (torch.tensor(x).view(3, 1, 1) for x in (preprocess.mean, preprocess.std))
        expected = (preprocess.reference(image) * std + mean) * 255
        assert (fast.float() - expected).abs().max() <= 2.01

    def test_names_lead_to_modules(self, backbone: Backbone) -> None:
        names = dict(backbone.module.named_modules())
        if backbone.classifier is not None:
            assert backbone.classifier in names
        assert len(set(backbone.stages or ())) == len(backbone.stages or ())

    def test_there_is_one_logit_per_class(self, backbone: Backbone) -> None:
        if not backbone.classes:
            pytest.skip("the library gives no names of classes")
        [logits] = _outputs(backbone, _noise(backbone))
        assert logits.shape == (2, len(backbone.classes))

    def test_the_embedding_is_one_vector_per_image(self, backbone: Backbone) -> None:
        if backbone.embedding is None:
            pytest.skip("the library defines no embedding")
        with torch.inference_mode():
            vectors = backbone.embedding.compute(_noise(backbone))
        assert vectors.ndim == 2
        assert len(vectors) == 2


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


def _noise(backbone: Backbone) -> torch.Tensor:
    """(2, 3, H, W) float32 of the input size, standard normal."""
    height, width = backbone.preprocess.crop
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(5))


def _outputs(backbone: Backbone, x: torch.Tensor) -> list[torch.Tensor]:
    """Tensors that a forward pass returns, alone or in containers."""
    with torch.inference_mode():
        return [y for y in tree_leaves(backbone.module(x)) if isinstance(y, torch.Tensor)]


def _image(size: tuple[int, int]) -> Image.Image:
    """RGB image of (width, height) pixels with smooth structure and some noise."""
    width, height = size
    y, x = np.mgrid[0:height, 0:width] / 40
    noise = np.random.default_rng(0).normal(0, 8, (height, width, 3))
    waves = np.stack([np.sin(x + y), np.cos(x), np.sin(2 * y)], axis=-1)
    return Image.fromarray(np.clip(127 + 90 * waves + noise, 0, 255).astype(np.uint8))
