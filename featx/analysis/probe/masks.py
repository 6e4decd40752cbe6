"""Masks of the images of a store: classes of pixels on the crop that the network saw."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt

from featx.analysis.probe.labelled_rows import LabelledRows, failed_notes, require_complete
from featx.analysis.probe.metrics import Ints
from featx.base import name_text, num_cpus
from featx.config import Config, data_of_saved, from_saved
from featx.errors import ConfigError, DataError, StoreError, counted, first_names
from featx.images import ImagePolicy, LabelTransform, image_sizes, read_image, read_label_map
from featx.sources import open_source, origin_of, parse_box_key
from featx.store import FeatureStore
from featx.types import UNKNOWN_IMAGE, ImageFault, image_checksum

PackedMask = tuple[bytes, list[int]]
"""Mask of a row as in `Masks.packed`, and the class numbers in it, increasing."""


class _UnusableMaskError(Exception):
    """Raised with the reason why a row has no usable mask."""


class MaskReader:
    """Reads the masks of the images of a store, which are transformed as the images were."""

    def __init__(self, config: Config, store: FeatureStore) -> None:
        options = config.probe
        self.folder = Path(str(options.masks)).expanduser()
        if not self.folder.is_dir():
            raise ConfigError(f"probe.masks={options.masks}: there is no such folder.")
        text = str(store.attrs.get("transform", ""))
        transform = LabelTransform.of_description(text)
        if transform is None:
            raise StoreError(
                f"probe.masks: the transform of {store.root} ({text!r}) cannot be applied to "
                "masks. It has to be a resize and a centre crop of 8-bit images by featx's fast "
                "path."
            )
        try:
            saved = from_saved(str(store.attrs.get("config", "")))
        except ConfigError as error:
            raise StoreError(
                f"{store.root} does not record where its images are: {error}"
            ) from error
        data = data_of_saved(saved, config.data, str(store.root))
        if data.has_views:
            raise StoreError(
                f"probe.masks: the rows of {store.root} are views of images (data.views, "
                "data.crops), and masks are of images as they are. Probe a store that was "
                "extracted without them."
            )
        if data.root is not None and "://" not in data.root and not Path(data.root).exists():
            raise StoreError(
                f"probe.masks: the images of {store.root} are not at {data.root}. Their sizes are "
                "compared with those of the masks: say where they are now with data.root=."
            )
        self.store, self.transform, self.ignore = store, transform, options.ignore
        # The sizes of masks are compared with those of whole images, not with those of boxes.
        self._source = open_source(replace(data, boxes=None))
        self._policy = ImagePolicy.from_config(data)
        # Far larger JPEGs were decoded with at least so many pixels of the shorter side; see
        # RowLoader.
        self._at_least: int | None = None
        if data.boxes is None and saved.decode != "reference":
            resize = transform.resize
            self._at_least = max(resize) if isinstance(resize, tuple) else resize
        self.names: tuple[str, ...] = ()
        if options.mask_classes is not None:
            self.names = _class_names(options.mask_classes)
        self._shared = _shared_names(store)

    def of_image(self, rows: Sequence[int]) -> list[tuple[int, PackedMask | str]]:
        """Read the mask of an image for each of its rows, which are several if they are boxes.
        Return (row, mask on the crop, or the reason why there is none).
        """
        keys, masks = self.store.key_bytes, list[tuple[int, PackedMask | str]]()
        try:
            labels, size = self._label_map(rows[0])
        except (_UnusableMaskError, ImageFault) as error:
            return [(row, str(error)) for row in rows]
        for row in rows:
            try:
                masks.append((row, self._crop_mask(labels, size, bytes(keys[row]))))
            except _UnusableMaskError as error:
                masks.append((row, str(error)))
        return masks

    def _label_map(self, row: int) -> tuple[npt.NDArray[np.integer], tuple[int, int]]:
        """Read the mask of an image and compare its size with that of the image."""
        key, kind = origin_of(bytes(self.store.key_bytes[row]))
        checksum = int(self.store.image_checksums[row])
        if kind == "video":
            raise _UnusableMaskError("frames of videos have no masks")
        name = _mask_name(key)
        if name.is_absolute() or ".." in name.parts:
            raise _UnusableMaskError("its key leads out of the folder of the masks")
        if others := [name_text(other) for other in self._shared.get(name, ()) if other != key]:
            raise _UnusableMaskError(
                f"mask {name} would also be that of {others[0]}; rename one image"
            )
        try:
            data = (self.folder / name).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise _UnusableMaskError(f"there is no mask {name}") from None
        try:
            labels = read_label_map(data, self._policy.max_pixels)
        except ImageFault as fault:
            raise _UnusableMaskError(f"mask {name}: {fault}") from fault
        encoded = read_image(self._source, key)
        if checksum not in (UNKNOWN_IMAGE, image_checksum(encoded)):
            raise _UnusableMaskError("the image has changed since its features were extracted")
        full, decoded = image_sizes(encoded, self._policy, self._at_least)
        if labels.shape != full:
            raise _UnusableMaskError(
                f"mask {name} is of {labels.shape[1]} x {labels.shape[0]} pixels, and the upright "
                f"image of {full[1]} x {full[0]}"
            )
        return labels, decoded

    def _crop_mask(
        self, labels: npt.NDArray[np.integer], size: tuple[int, int], key: bytes
    ) -> PackedMask:
        if (parsed := parse_box_key(key)) is not None:
            box = parsed[1]
            labels = labels[box.y : box.y + box.height, box.x : box.x + box.width]
            size = (box.height, box.width)
            if labels.shape != size:
                raise _UnusableMaskError("its box reaches outside the image")
        mask = self.transform.on_crop(labels, size)
        if self.ignore is not None:
            mask[mask == self.ignore] = -1
        numbers = [number for number in np.unique(mask).tolist() if number >= 0]
        if not numbers:
            raise _UnusableMaskError(
                f"all pixels of its crop are ignored (probe.ignore={self.ignore})"
            )
        if self.names and numbers[-1] >= len(self.names):
            raise _UnusableMaskError(
                f"its mask has the class number {numbers[-1]}, and probe.mask_classes names 0 to "
                f"{len(self.names) - 1}"
            )
        return zlib.compress(mask.tobytes(), 1), numbers


def _mask_name(key: bytes) -> PurePosixPath:
    """Return the name of the mask of an image below the folder of the masks."""
    return PurePosixPath(os.fsdecode(key)).with_suffix(".png")


def _shared_names(store: FeatureStore) -> dict[PurePosixPath, list[bytes]]:
    """Find the names of masks that fit several images, whose keys differ only in their endings."""
    images = dict.fromkeys(origin_of(key)[0] for key in store.key_bytes[store.ok].tolist())
    keys_of: dict[PurePosixPath, list[bytes]] = {}
    for key in images:
        keys_of.setdefault(_mask_name(key), []).append(key)
    return {name: keys for name, keys in keys_of.items() if len(keys) > 1}


def _class_names(path: str) -> tuple[str, ...]:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"probe.mask_classes={path} cannot be read: {error}.") from error
    names = tuple(line.strip() for line in text.removesuffix("\n").split("\n"))
    if "" in names or len(set(names)) < len(names):
        raise ConfigError(
            f"probe.mask_classes={path}: expected one name a line, all different and none empty."
        )
    return names


_NAMED = 5
"""Number of rows without a usable mask that a note names."""


@dataclass(frozen=True)
class Masks:
    """Rows with a mask, and the class of each pixel of their crops.

    Attributes:
        labelled: the rows, all of class 0, and K names of classes.
        crop: (height, width) in pixels.
        numbers: (K,) numbers of the classes in the masks, increasing.
        refused: (key, reason) of rows without a usable mask.
        packed: the crop of each row, compressed (H, W) int32 numbers, -1 for pixels without a
            label.
    """

    labelled: LabelledRows
    crop: tuple[int, int]
    numbers: Ints
    refused: tuple[tuple[str, str], ...]
    packed: Sequence[bytes]

    def of(self, place: int) -> Ints:
        """Return the classes of the pixels of a row, (H, W) in [0, K), -1 without a label."""
        numbers = np.frombuffer(zlib.decompress(self.packed[place]), np.int32).reshape(self.crop)
        classes = np.searchsorted(self.numbers, numbers)
        return np.where(numbers < 0, -1, classes)


def read_masks(config: Config, store: FeatureStore) -> Masks:
    """Read the masks of all rows of a store that did not fail."""
    require_complete(store)
    reader, keys = MaskReader(config, store), store.key_bytes.tolist()
    ok_rows = np.flatnonzero(store.ok).tolist()
    images = [list(rows) for _, rows in groupby(ok_rows, lambda row: origin_of(keys[row]))]
    _ = store.image_checksums  # cached before the threads need them
    with ThreadPoolExecutor(num_cpus(), "featx-masks") as pool:
        masks_of_images = pool.map(reader.of_image, images)
        masks_of_rows = sorted(chain.from_iterable(masks_of_images), key=itemgetter(0))
    usable = [(row, mask) for row, mask in masks_of_rows if not isinstance(mask, str)]
    refused = [(store.key_of(row), mask) for row, mask in masks_of_rows if isinstance(mask, str)]
    if not usable:
        raise DataError(
            f"none of the {counted(len(masks_of_rows), 'row')} of {store.root} has a usable mask "
            f"in {reader.folder}: {_problem_text(refused)}."
        )
    numbers = sorted({number for _, (_, numbers) in usable for number in numbers})
    names = tuple(reader.names[i] if reader.names else str(i) for i in numbers)
    if len(names) < 2:
        raise DataError(
            f"the masks in {reader.folder} have the class {names[0]} only, besides pixels that "
            f"are ignored (probe.ignore={reader.ignore}); a probe needs two classes or more."
        )
    rows, notes = np.array([row for row, _ in usable], np.int64), _notes(reader, refused, numbers)
    return Masks(
        LabelledRows(store, rows, np.zeros(len(rows), np.int64), names, notes),
        reader.transform.crop,
        np.array(numbers, np.int64),
        tuple(refused),
        [data for _, (data, _) in usable],
    )


def _notes(
    reader: MaskReader, refused: Sequence[tuple[str, str]], numbers: Sequence[int]
) -> tuple[str, ...]:
    """Return sentences about the rows and classes that are left out."""
    notes = failed_notes(reader.store)
    if refused:
        left_out = counted(
            len(refused), "row without a usable mask is", "rows without a usable mask are"
        )
        notes.append(f"{left_out} left out: {_problem_text(refused)}")
    absent = [name for i, name in enumerate(reader.names) if i not in set(numbers)]
    if absent:
        notes.append(
            "classes of probe.mask_classes without a pixel, left out: "
            + first_names(absent, _NAMED)
        )
    return tuple(notes)


def _problem_text(refused: Sequence[tuple[str, str]]) -> str:
    """Name some rows without a usable mask, with the reasons."""
    named = "; ".join(f"{key}: {reason}" for key, reason in refused[:_NAMED])
    more = f"; and {len(refused) - _NAMED} more" if refused[_NAMED:] else ""
    return named + more
