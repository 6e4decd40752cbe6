"""Conformance: how far a run differs from the path of the model's own library, and the limits.

Three judgements, each by the worst image:

    pixels       what the loader makes of an image, and the library's own transform of it, in
                 levels of 255
    forward      the rows of the engine and those of the plain forward pass, on the same pixels
    end to end   the rows of the engine on its own pixels, and those of the plain forward pass on
                 the library's

The third hides in bf16 what the first two show. What both paths share, such as the checkpoint of a
look-alike, shows in none of them: for that there is `model.golden`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from featx.errors import counted
from featx.types import Json

MAX_LEVELS = {"bilinear": 2.0, "bicubic": 32.0}
"""Interpolation -> largest difference of a pixel in levels of 255. Bicubic weights overshoot: where
Pillow resizes the two axes in another order, single pixels at edges differ so much."""

MEAN_LEVELS = 0.5
"""Largest mean difference over an image, in levels of 255."""

MEAN_LEVELS_REDUCED = 8.0
"""The same for JPEGs of more than four times the size, which decode=fast decodes at a fraction."""

FORWARD = {"fp32": 1e-3, "fp16": 0.1, "bf16": 0.25}
"""Precision -> largest relative L2 difference of a row to the plain forward pass in float32."""

COSINE = {"fp32": 0.999, "fp16": 0.99, "bf16": 0.96}
"""Precision -> smallest cosine of a row to the plain forward pass on the library's own pixels."""

_FLOOR = 1e-3
"""Rows shorter than this share of the longest one are compared with that share of it: rounding of a
row that is nearly zero says nothing."""


@dataclass(frozen=True)
class PixelDifferences:
    """Largest and mean difference of the pixels of each image on two paths, in levels of 255."""

    largest: torch.Tensor
    mean: torch.Tensor


@dataclass(frozen=True)
class RowDifferences:
    """Relative L2 difference and cosine of each image, between the rows of a layer on two paths."""

    errors: torch.Tensor
    cosines: torch.Tensor


@dataclass(frozen=True)
class Compared:
    """Images that went both ways.

    Attributes:
        pixels: differences of the pixels; None if the run uses the library's own.
        forward: layer -> differences on the same pixels, of the first images.
        end_to_end: layer -> differences on the pixels of each path.
        not_compared: layer -> reason why it is in neither.
        is_reduced: tells whether an image, by its number, was decoded at a fraction of its size.
    """

    keys: Sequence[str]
    precision: str
    interpolation: str
    pixels: PixelDifferences | None
    forward: Mapping[str, RowDifferences]
    end_to_end: Mapping[str, RowDifferences]
    not_compared: Mapping[str, str]
    is_reduced: Callable[[int], bool]


@dataclass(frozen=True)
class Conformance:
    """Judgement of a comparison.

    Attributes:
        differences: the differences as JSON types, for featx.json.
        line: the differences as one line of text.
        broken: promises that are not kept, one sentence each.
        notes: what breaks no promise and is worth knowing, one sentence each.
    """

    differences: Json
    line: str
    broken: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def pixel_differences(
    one: torch.Tensor, other: torch.Tensor, std: Sequence[float]
) -> PixelDifferences:
    """Compare normalised images."""
    levels = (one - other).abs() * torch.tensor(std).view(-1, 1, 1) * 255
    return PixelDifferences(levels.flatten(1).amax(1), levels.flatten(1).mean(1))


def row_differences(rows: torch.Tensor, plain: torch.Tensor) -> RowDifferences:
    """Compare rows with those of the plain path.

    The rounding of `rows` to its dtype is not counted, and rows that are not finite differ by
    nothing: the run itself stops at these, or records them.
    """
    a, b = (x.double().reshape(len(x), -1) for x in (rows, plain))
    if rows.is_floating_point() and rows.dtype != torch.float32:
        info = torch.finfo(rows.dtype)
        rounding = b.abs() * info.eps / 2 + info.smallest_normal * info.eps
        difference = a - b
        a = b + difference.sign() * (difference.abs() - 1.01 * rounding).clamp(min=0)
    finite = (torch.isfinite(a) & torch.isfinite(b)).all(1)
    a, b = a[finite], b[finite]
    lengths = b.norm(dim=1)
    floor = max(_FLOOR * float(lengths.max()) if len(b) else 0.0, 1e-30)
    errors = (a - b).norm(dim=1) / lengths.clamp(min=floor)
    cosines = (a * b).sum(1) / (a.norm(dim=1) * lengths).clamp(min=floor * floor)
    # A short row has no direction that means anything; its error says what there is to say.
    cosines = torch.where(lengths > floor, cosines.clamp(-1, 1), 1 - errors.square() / 2)
    errors_of_all, cosines_of_all = torch.zeros(len(finite)), torch.ones(len(finite))
    errors_of_all[finite], cosines_of_all[finite] = errors.float(), cosines.float()
    return RowDifferences(errors_of_all, cosines_of_all)


def judge(compared: Compared) -> Conformance:
    """Judge a comparison by the limits of this module."""
    if not compared.keys:
        return Conformance(_as_dict(compared, 0), "no image could be read")
    pixels, end_to_end = compared.pixels, compared.end_to_end
    # Largest difference of a pixel, with the rounding of the comparison.
    max_levels = MAX_LEVELS.get(compared.interpolation, 0.0) + 0.01

    # Other limits hold for images that were decoded at a fraction of their size. Those are looked
    # for among the images whose pixels or rows differ by more than a whole image may.
    reduced = []
    if pixels is not None:
        far = (pixels.largest > max_levels) | (pixels.mean > MEAN_LEVELS)
        for difference in end_to_end.values():
            far[: len(difference.cosines)] |= difference.cosines < COSINE[compared.precision]
        reduced = [i for i in torch.nonzero(far).flatten().tolist() if compared.is_reduced(i)]
    broken = _broken_promises(compared, reduced, max_levels)

    # What breaks no promise but is worth knowing.
    notes = []
    cosines_of_reduced = []
    for difference in end_to_end.values():
        num = len(difference.cosines)
        cosines_of_reduced += [float(difference.cosines[i]) for i in reduced if i < num]
    if cosines_of_reduced and min(cosines_of_reduced) < COSINE["fp32"]:
        notes.append(
            f"{counted(len(reduced), 'large JPEG')} of the {counted(len(compared.keys), 'image')} "
            "compared with the library's own path, decoded at a fraction of their size, give rows "
            f"with a cosine of {min(cosines_of_reduced):.4f}; decode=reference decodes every image "
            "as a whole."
        )

    parts = []
    if pixels is not None:
        parts.append(f"pixels within {float(pixels.largest.max()):.0f} of 255")
    if compared.forward:
        error = max(float(x.errors.max()) for x in compared.forward.values())
        parts.append(f"forward pass within {error:.0e}")
    if end_to_end:
        cosine = min(float(x.cosines.min()) for x in end_to_end.values())
        parts.append(f"cosine {cosine:.5f} end to end")
    text = ", ".join(parts) or "nothing to compare"
    return Conformance(
        _as_dict(compared, len(reduced)) | ({"broken": broken} if broken else {}),
        f"{counted(len(compared.keys), 'image')}: {text}",
        tuple(broken),
        tuple(notes),
    )


def _broken_promises(compared: Compared, reduced: Sequence[int], max_levels: float) -> list[str]:
    """The broken promises, one sentence each, with other limits for the images in `reduced`."""
    broken = []
    pixels, keys = compared.pixels, compared.keys
    if pixels is not None:
        sentences = []
        for i in range(len(keys)):
            most, mean = max_levels, MEAN_LEVELS
            promised = f"{most:.0f}"
            if i in reduced:
                most, mean, promised = float("inf"), MEAN_LEVELS_REDUCED, "any"
            if pixels.largest[i] > most or pixels.mean[i] > mean:
                sentences.append(
                    f"pixels: those of {keys[i]} differ from the library's own transform by "
                    f"up to {pixels.largest[i]:.0f} of 255 levels and by {pixels.mean[i]:.2g} on "
                    f"average; promised are {promised} and {mean:.2g}."
                )
        others = counted(len(sentences) - 1, "more image does", "more images do")
        more = f" {others} so as well." if len(sentences) > 1 else ""
        broken += [sentence + more for sentence in sentences[:1]]

    limit = FORWARD[compared.precision]
    errors = {name: float(x.errors.max()) for name, x in compared.forward.items()}
    far = {name: error for name, error in errors.items() if error > limit}
    if far:
        worst = max(far, key=lambda name: far[name])
        broken.append(
            f"forward pass: {worst} differs from the library's own forward pass on the same pixels "
            f"by {far[worst]:.2g} (relative L2 of the worst image); promised are {limit:g} in "
            f"{compared.precision}. {counted(len(far), 'layer')} of {len(errors)} "
            f"{'differs' if len(far) == 1 else 'differ'} by more."
        )

    # Rows of images that were decoded at a fraction of their size are not judged.
    limit = COSINE[compared.precision]
    smallest = {}
    for name, difference in compared.end_to_end.items():
        each = [float(c) for i, c in enumerate(difference.cosines) if i not in reduced]
        if each and min(each) < limit:
            smallest[name] = min(each)
    if smallest:
        worst = min(smallest, key=lambda name: smallest[name])
        broken.append(
            f"end to end: rows of {worst} have a cosine of {smallest[worst]:.5f} to those of the "
            f"library's own path, for the worst image; promised are {limit:g} in "
            f"{compared.precision}."
        )
    return broken


def _as_dict(compared: Compared, num_reduced: int) -> dict[str, object]:
    """The differences as JSON types: of each layer the largest error and the smallest cosine."""
    pixels = compared.pixels
    levels = None
    if pixels is not None and compared.keys:
        levels = {
            "max": _short(float(pixels.largest.max())),
            "mean": _short(float(pixels.mean.max())),
        }
    worst: dict[str, dict[str, dict[str, float]]] = {"forward": {}, "end_to_end": {}}
    for path, layers in (("forward", compared.forward), ("end_to_end", compared.end_to_end)):
        for name, difference in layers.items():
            worst[path][name] = {
                "error": _short(float(difference.errors.max())),
                "cosine": round(float(difference.cosines.min()), 6),
            }
    return {
        "images": len(compared.keys),
        "levels": levels,
        **({"reduced_images": num_reduced} if num_reduced else {}),
        **worst,
        **({"not_compared": dict(compared.not_compared)} if compared.not_compared else {}),
    }


def _short(value: float) -> float:
    """A value with three significant digits."""
    return float(f"{value:.3g}")
