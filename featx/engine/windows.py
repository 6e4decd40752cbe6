"""Windows: an image of its own size goes through a model piece by piece, and its maps are blended.

The windows of an image have the size of the model's input. Along each axis they begin at multiples
of a step, and the last one ends with the image. All begin at multiples of the patch size, so that
the positions of overlapping windows coincide. At each position of the map of the whole image

    blended = sum_w weight_w map_w / sum_w weight_w

over the windows w that hold it, where the weight of a window falls linearly from its middle to its
edges: min(i + 1/2, n - 1/2 - i) at position i of n, and the product of both axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from featx.base import size_text
from featx.config import make_reduce
from featx.engine.compute import BatchRows, spec_of
from featx.engine.engine import Engine
from featx.engine.row_checks import describe_nonfinite, finite_rows
from featx.engine.window_strides import check_strides
from featx.errors import LayerError, ReduceError
from featx.images import WINDOW_ERROR
from featx.layers import (
    CapturePoint,
    ChosenLayers,
    OutputCollector,
    ProjectedReduce,
    Reduction,
    RowLayout,
    StoredReduce,
    TokenSample,
    bound_reduction,
)
from featx.types import UNKNOWN_SIZE, ImageFault, LayerSpec, ResumeState, Status, TokenGeometry

ALIGN = "window_align"
"""Name of the alignment of the windows among the choices of a run."""

_CAPTURES = ("output", "input")
"""Captures with a map for each window. A gradient is of a target of the whole output."""

_ADVICE = (
    "Name layers with maps or patch tokens, such as layers=stages; job=layers lists the shapes."
)

Size = tuple[int, int]
"""(height, width)."""


@dataclass(frozen=True)
class _WindowedLayer:
    """A captured layer, and the reduction of its map of the whole image.

    `shape` is (C, rows, columns) of the map of a window; `stride` are the pixels of a position
    along each axis.
    """

    point: CapturePoint
    reduce: StoredReduce
    shape: tuple[int, int, int]
    stride: Size

    def map_size(self, covered: Size) -> Size:
        """Rows and columns of the map of the pixels that windows cover."""
        return covered[0] // self.stride[0], covered[1] // self.stride[1]

    def window_in(self, maps: torch.Tensor, top: int, left: int) -> torch.Tensor:
        """View of the positions of the window that begins at a pixel in (..., rows, columns)."""
        row, column = top // self.stride[0], left // self.stride[1]
        return maps[..., row : row + self.shape[1], column : column + self.shape[2]]


@dataclass
class Windows:
    """Windows of the images of a run, and the layers whose maps are blended.

    Attributes:
        size: height and width of a window in pixels.
        step: pixels from one window to the next along each axis.
        align: pixels of which the place of every window is a multiple; a choice of the run.
        image_sizes: sizes of some images of the data set, for the shapes of the rows.
        store_dtype: dtype of the rows.
    """

    size: Size
    step: Size
    align: int
    layers: Sequence[_WindowedLayer]
    image_sizes: Sequence[Size]
    store_dtype: torch.dtype
    specs: list[LayerSpec] = field(default_factory=list)
    _reductions: dict[tuple[str, Size], tuple[Reduction, tuple[int, ...]]] = field(
        default_factory=dict
    )
    _kinds: dict[str, str] = field(default_factory=dict)

    @property
    def maps(self) -> ChosenLayers:
        """The layers with the reduction that the engine applies to a window: its map."""
        return [(layer.point, make_reduce("map")) for layer in self.layers]

    @property
    def per_image(self) -> float:
        """Mean number of windows of an image."""
        return sum(len(self.places(size)) for size in self.image_sizes) / len(self.image_sizes)

    @property
    def map_bytes(self) -> int:
        """Bytes of the blended float32 maps of the largest of some images."""
        sizes = [self._covered(size) for size in self.image_sizes]
        return max(
            sum(4 * layer.shape[0] * math.prod(layer.map_size(size)) for layer in self.layers)
            for size in sizes
        )

    def describe(self, batch_size: int) -> str:
        """Describe the windows of the largest of some images, and the memory that they take."""
        height, width = max(self.image_sizes, key=math.prod)
        count = len(self.places((height, width)))
        return (
            f"{self.size[1]} x {self.size[0]} pixels every {self.step[1]} x {self.step[0]}: "
            f"{count} of an image of {width} x {height}, {min(count, batch_size)} at a time; "
            f"{size_text(self.map_bytes)} of maps"
        )

    def places(self, image_size: Size) -> list[Size]:
        """Top and left pixel of each window of an image, in row-major order."""
        rows, columns = self._starts(self._covered(image_size))
        return list(itertools.product(rows, columns))

    def _covered(self, image_size: Size) -> Size:
        """Height and width of the part of an image that windows cover, from its top left corner."""
        return image_size[0] // self.align * self.align, image_size[1] // self.align * self.align

    def _starts(self, covered: Size) -> list[list[int]]:
        axes = zip(covered, self.size, self.step, strict=True)
        return [[*range(0, length - side, step), length - side] for length, side, step in axes]

    def set_specs(self, of_windows: Iterable[LayerSpec]) -> list[LayerSpec]:
        """Fix and return the datasets of the run, from those of the maps of windows.

        Raises ReduceError if a reduction does not fit, or the images have several sizes and it
        gives rows of several shapes.
        """
        dtypes = {spec.name: getattr(torch, spec.compute_dtype) for spec in of_windows}
        self.specs = [self._spec(layer, dtypes[layer.point.name]) for layer in self.layers]
        return self.specs

    def _spec(self, layer: _WindowedLayer, compute_dtype: torch.dtype) -> LayerSpec:
        kinds: dict[str, Size] = {}
        refused: ReduceError | None = None
        reduce: Reduction | None = None
        for size in dict.fromkeys(self.image_sizes):
            try:
                reduce, shape = self._reduction(layer, self._covered(size))
            except ReduceError as error:  # such an image fails; others may not
                refused = error
                continue
            kinds.setdefault(_kind_of_row(reduce, shape), size)
        if reduce is None:
            assert refused is not None
            if refused.advice:  # none and flatten need images of one size
                raise ReduceError(refused.problem, "Use avg, max, gem or align.") from refused
            raise refused
        name, ((kind, first), *others) = layer.point.name, kinds.items()
        if others:
            other_kind, other = others[0]
            maps = [layer.map_size(self._covered(size)) for size in self.image_sizes]
            rows, columns = (min(64, *sides) for sides in zip(*maps, strict=True))
            raise ReduceError(
                f"model.window: images have several sizes, such as {_text(first)} and "
                f"{_text(other)} pixels, and with reduce={layer.reduce.name} rows of {name} would "
                f"have {kind} and {other_kind}. A store needs one of them: 'reduce="
                f"{{name: grid, rows: {rows}, columns: {columns}}}' or reduce=align makes them "
                "equal, 'model.transform.resize=[HEIGHT,WIDTH]' the images."
            )
        self._kinds[name] = kind
        bound_args = reduce.bound_args if isinstance(reduce, TokenSample) else {}
        row = torch.empty(1, *shape, dtype=self.store_dtype, device="meta")
        return spec_of(layer.point, layer.reduce, row, compute_dtype, bound_args)

    def _reduction(self, layer: _WindowedLayer, covered: Size) -> tuple[Reduction, tuple[int, ...]]:
        """Function from the blended map of an image to its row, and the shape of the row.

        Raises as `bound_reduction`.
        """
        name = layer.point.name
        if (name, covered) not in self._reductions:
            shape = (layer.shape[0], *layer.map_size(covered))
            rows = RowLayout(name, shape, covered, is_map=True, is_attention=False)
            reduce = bound_reduction(layer.reduce, rows)
            # A meta tensor has a shape but no memory; autocast, which a projection turns off, does
            # not know it.
            device = "cpu" if isinstance(layer.reduce, ProjectedReduce) else "meta"
            row = reduce(torch.zeros(1, *shape, device=device))
            self._reductions[name, covered] = reduce, tuple(row.shape[1:])
        return self._reductions[name, covered]

    def geometries(self) -> dict[str, TokenGeometry]:
        """Places of the positions of the rows. A whole map tells the size of its image; the rows of
        reduce=grid and reduce=align are alike for images of every size.
        """
        covered = self._covered(self.image_sizes[0])
        sizes = {"none": covered, "map": covered, "grid": UNKNOWN_SIZE, "align": UNKNOWN_SIZE}
        return {
            spec.name: TokenGeometry(0, False, (spec.shape[1], spec.shape[2]), sizes[spec.reduce])
            for spec in self.specs
            if spec.reduce in sizes
        }

    def rows(self, engine: Engine, image: torch.Tensor, keys: Sequence[bytes]) -> BatchRows:
        """Compute the row of an image (C, H, W), as `Engine.rows` does those of a batch.

        Raises ImageFault if the size of the image does not give a row of the shape of the store.
        """
        values = self._values(engine, image, keys)
        collector = OutputCollector(self.store_dtype)
        features = {name: collector.cast(name, value).cpu() for name, value in values.items()}
        underflow = collector.underflow_rows()
        return BatchRows(
            features,
            {name: flags.cpu().numpy() for name, flags in finite_rows(features).items()},
            {name: flags.cpu().numpy() for name, flags in underflow.items()},
        )

    def failed_rows(self) -> BatchRows:
        """Rows of zeros for an image that failed."""
        rows = {s.name: torch.zeros(1, *s.shape, dtype=self.store_dtype) for s in self.specs}
        return BatchRows(rows, {}, {})

    def explain(self, engine: Engine, image: torch.Tensor, name: str, keys: Sequence[bytes]) -> str:
        """The reason why the row of an image is not finite, from its values before the cast."""
        value = self._values(engine, image, keys)[name].flatten()
        return describe_nonfinite(value, engine.compute.precision, self.store_dtype)

    def _values(
        self, engine: Engine, image: torch.Tensor, keys: Sequence[bytes]
    ) -> dict[str, torch.Tensor]:
        """Row of an image in each layer, (1, ...), as its reduction gives it."""
        covered = self._covered((image.shape[1], image.shape[2]))
        reductions = {}
        for layer, spec in zip(self.layers, self.specs, strict=True):
            try:
                reductions[spec.name], shape = self._reduction(layer, covered)
            except ReduceError as error:
                raise _window_fault(str(error)) from error
            kind = _kind_of_row(reductions[spec.name], shape)
            if kind != self._kinds[spec.name]:
                raise _window_fault(
                    f"{image.shape[2]} x {image.shape[1]} pixels give {spec.name} a row with "
                    f"{kind}, and the other images one with {self._kinds[spec.name]}; "
                    "reduce=align makes them equal"
                )
        values = {}
        for name, value in self._blend(engine, image, covered):
            reduce = reductions[name]
            keyed = isinstance(reduce, TokenSample)
            values[name] = reduce(value, keys) if keyed else reduce(value)  # type: ignore[call-arg]
        return values

    def _blend(
        self, engine: Engine, image: torch.Tensor, covered: Size
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Send the windows of an image through the model, and blend the maps of each layer.

        No more windows than a batch are cut at once. The last batch is filled up, so that all have
        one shape. The maps are (1, C, rows, columns) float32 on the device.
        """
        blended = {
            layer.point.name: torch.zeros(
                1, layer.shape[0], *layer.map_size(covered), device=engine.device
            )
            for layer in self.layers
        }
        weights = {
            layer.point.name: self._weights(layer, covered, engine.device) for layer in self.layers
        }
        all_places, count = self.places(covered), engine.compute.batch_size
        for start in range(0, len(all_places), count):
            places = all_places[start : start + count]
            batch = image.new_zeros(count, len(image), *self.size)
            for window, (top, left) in zip(batch, places, strict=False):
                window.copy_(image[:, top : top + self.size[0], left : left + self.size[1]])
            maps = engine.rows(batch, on_device=True).features
            for layer in self.layers:
                name = layer.point.name
                of_rows, of_columns = weights[name]
                for number, (top, left) in enumerate(places):
                    weight = of_rows[top][:, None] * of_columns[left]
                    layer.window_in(blended[name], top, left).add_(weight * maps[name][number])
        for name in list(blended):
            yield name, blended.pop(name)

    def _weights(
        self, layer: _WindowedLayer, covered: Size, device: torch.device
    ) -> list[dict[int, torch.Tensor]]:
        """Weights of windows along each axis: first pixel -> (n,) float32 of its positions.

        They are divided by the sum of those of all windows at a position, so that a position of one
        window keeps its value.
        """
        weights = []
        for axis, starts in enumerate(self._starts(covered)):
            stride, count = layer.stride[axis], layer.shape[1 + axis]
            middle = torch.arange(count) + 0.5
            weight = torch.minimum(middle, count - middle)
            total = torch.zeros(covered[axis] // stride)
            for start in starts:
                total[start // stride :][:count] += weight
            weights.append(
                {start: (weight / total[start // stride :][:count]).to(device) for start in starts}
            )
        return weights


def attach_windows(
    engine: Engine,
    chosen: ChosenLayers,
    store_dtype: str,
    image_sizes: Sequence[Size],
    resume_state: ResumeState | None,
) -> Windows:
    """Attach the captures of the maps of windows to an engine, and place the windows.

    The engine is one for float32 rows, the reductions are those of the blended maps, and the resume
    state may keep an alignment. Raises LayerError if a capture has no map, and ReduceError if a
    layer has no map, or one whose positions are no whole number of pixels.
    """
    for point, _ in chosen:
        if point.capture not in _CAPTURES:
            raise LayerError(
                f"model.window: {point.name} is a capture of {point.capture}, which has no map "
                f"that windows can be blended in; expected output or input. {_ADVICE}"
            )
    try:
        engine.attach_captures([(point, make_reduce("map")) for point, _ in chosen])
    except ReduceError as error:
        text = f"model.window: maps of windows are blended. {error.problem}"
        raise ReduceError(text, _ADVICE) from error
    preprocess = engine.backbone.preprocess
    height, width = size = preprocess.crop
    layers = []
    for point, reduce in chosen:
        channels, rows, columns = engine.collector.reduced_shapes[point.name]
        if height % rows or width % columns:
            raise ReduceError(
                f"model.window.size={[height, width]}: {point.name} has {rows} x {columns} "
                "positions in a window, which are no whole numbers of pixels, so the maps of "
                "windows do not fit together. Choose a multiple of the patch size, or of the "
                "stride of the layer."
            )
        stride = height // rows, width // columns
        layers.append(_WindowedLayer(point, reduce, (channels, rows, columns), stride))
    check_strides(engine)
    resolved = resume_state.resolved if resume_state else {}
    strides = [side for layer in layers for side in layer.stride]
    align = math.lcm(int(resolved.get(ALIGN, 1)), *strides)
    assert preprocess.overlap is not None
    free = 1 - preprocess.overlap + 1e-9  # (1 - 0.9) * 320 is less than 32
    steps = [max(align, int(side * free) // align * align) for side in size]
    return Windows(
        size=size,
        step=(steps[0], steps[1]),
        align=align,
        layers=layers,
        image_sizes=list(image_sizes) or [size],
        store_dtype=getattr(torch, store_dtype),
    )


def _kind_of_row(reduce: Reduction, shape: tuple[int, ...]) -> str:
    """Describe in what the rows of a dataset have to be equal: their shape; for sampled tokens the
    grid that they are sampled from, which a store records once for all rows.
    """
    if isinstance(reduce, TokenSample):
        return f"{reduce.k} of {reduce.grid[0]} x {reduce.grid[1]} positions"
    return f"the shape {shape}"


def _window_fault(message: str) -> ImageFault:
    return ImageFault(Status.TRANSFORM_ERROR, message, WINDOW_ERROR)


def _text(size: Size) -> str:
    """Width and height as people write them."""
    return f"{size[1]} x {size[0]}"
