"""Choice of precision, compilation, memory format, batch size and rows per part.

Options with the value `auto` are decided here, once per run, by timing trial passes over a
few images of the data set. A resumed run takes the recorded values of its resume state instead.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from featx.base import free_memory, size_text
from featx.config import Config
from featx.engine.compute import MIN_COSINE, MIN_SPEEDUP, Compute, TimedRows
from featx.engine.engine import Engine
from featx.engine.precision_choice import ChosenPrecision, choose_precision
from featx.engine.row_checks import row_cosines
from featx.errors import ConfigError, RunError
from featx.images import PREFETCH_BATCHES
from featx.store import layout
from featx.types import ResumeState

logger = logging.getLogger(__name__)

TRIAL_IMAGES = 16
"""Number of images of the data set on which precision=auto and compile=auto are measured."""

_ENOUGH_S = 0.4
"""Seconds. A forward pass on a CPU that takes longer is not timed a second time, because the
one-off costs of the first pass are then a small share. Other devices may load all kernels in the
first pass, so they are always timed again."""

_FILLED_S = 0.2
"""Seconds of a pass in fp32 over the images on which precisions are timed on a GPU. The pass of a
faster precision then takes some 50 ms, and launching its kernels a small part of that."""

CPU_BATCH = 32
"""Largest batch size that batch_size=auto chooses on a CPU."""

CUDA_BATCH = 256
"""Batch size that batch_size=auto tries first on CUDA; it is halved until it fits."""

_MANY_BATCHES = 8
"""Runs of fewer batches than this use half the batch size on a CPU, because some threads have
nothing to do while the last batches are computed."""

COMPILE_PAYS_S = 600.0
"""Seconds of estimated work below which compile=auto does not compile: compiling takes about a
minute."""


class AutoSettings:
    """Chooses the value of every option that is `auto` and concerns the engine.

    Args:
        images: (n, 3, H, W) images of the data set, uint8 in [0, 255] or normalised float32; n may
            be 0.
        num_rows: number of rows that the run computes.
        resume_state: resume state whose recorded values are used, or None for a new run.
        windows_per_image: mean number of windows in which an image goes through the model; None
            without windows. `images` are windows then, and a batch of rows is one image.

    Attributes:
        choices: option name -> the chosen value and the reason, as printed before the run.
        seconds_per_image: seconds of a forward pass per image with the chosen settings, for all of
            its windows; NaN before `resolve`.
        trial_rows: dataset name -> rows of `images` with the chosen settings; None if they were not
            computed, or in batches of another size.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        images: torch.Tensor,
        num_rows: int,
        resume_state: ResumeState | None,
        windows_per_image: float | None = None,
    ) -> None:
        self.choices: dict[str, str] = {}
        self.seconds_per_image = float("nan")
        self._config = config
        self._engine = engine
        self._images = images
        self._num_rows = num_rows
        self._has_windows = windows_per_image is not None
        self._images_per_row = windows_per_image or 1.0
        self._stored = dict(resume_state.resolved) if resume_state else {}
        self._stored_part_rows = resume_state.part_rows if resume_state else None
        self._what = resume_state.what if resume_state else ""
        self._exact: Mapping[str, torch.Tensor] | None = None
        self.trial_rows: Mapping[str, torch.Tensor] | None = None

    def resolve(self) -> None:
        """Configure the engine with precision, compilation, memory format and batch size.

        Raises:
            ConfigError: the batch does not fit into memory, or compile=true cannot be combined with
                the captures.
            RunError: compile=true fails, or the given batch size does not fit on the device.
        """
        batch_size = self._batch_size()
        channels_last, fold = self._formats(batch_size)
        compute = Compute("fp32", False, channels_last, batch_size, fold)
        if self._engine.device.type == "cuda":
            compute = replace(compute, batch_size=self._largest_fitting(compute))
        chosen = self._precision(compute)
        compute = replace(compute, precision=chosen.precision)
        self._engine.configure_compute(compute)
        self._time(chosen.measured)
        self._exact = None
        if self._is_compiled():
            self._compile(compute)

    def part_rows(self, most_rows: float, seconds: float) -> int:
        """Number of rows per part: from the option, the resume state or the measured speed.

        `most_rows` is a limit by the size of a part in bytes, though a part holds one batch in any
        case; `seconds` is the work that it should take. Raises ConfigError if the option is smaller
        than the batch size.
        """
        batch_size = 1 if self._has_windows else self._engine.compute.batch_size
        if self._config.part_rows != "auto":
            rows = int(self._config.part_rows)
            if batch_size > rows:
                raise ConfigError(
                    f"part_rows={rows} is smaller than batch_size={batch_size}; a batch never "
                    "crosses a part, so raise part_rows or lower batch_size."
                )
            return rows
        if self._stored_part_rows is not None:
            return int(self._stored_part_rows)
        by_time = seconds / max(1e-6, self.seconds_per_image or 0)
        rows = layout.power_of_two_at_most(min(most_rows, by_time))
        rows = max(rows, layout.power_of_two_at_least(batch_size))
        self.choices["part_rows"] = f"{rows}"
        return rows

    def _stored_choice(self, key: str) -> bool | int | str | None:
        """The recorded value of an option in the resume state, or None; records the choice."""
        if key not in self._stored:
            return None
        value: bool | int | str = self._stored[key]
        text = str(value).lower() if isinstance(value, bool) else value
        self.choices[key] = f"{text} (as {self._what} started)"
        return value

    def _formats(self, batch_size: int) -> tuple[bool, bool]:
        """(channels_last, fold) from the resume state, or as measured by `Engine.formats`."""
        if "channels_last" in self._stored:
            fold = self._config.fold_batchnorm and bool(self._stored.get("fold_batchnorm"))
            return bool(self._stored["channels_last"]), fold
        # cuDNN adds the bias of a folded convolution in a pass of its own, which takes longer than
        # the BatchNorm that it replaces: ResNet-50 19.2 instead of 16.5 ms a batch of 256 in bf16,
        # 18.1 instead of 17.3 in fp16 (H200, torch 2.11).
        on_cuda = self._engine.device.type == "cuda"
        # More images than a batch of the run may not fit into the memory of the device.
        images = self._images[:batch_size] if on_cuda else self._images
        formats = self._engine.formats(
            images, fold_batchnorm=self._config.fold_batchnorm and not on_cuda
        )
        self._exact = formats.values if len(images) == len(self._images) else None
        if self._config.fold_batchnorm:
            why = "no BatchNorm that is not captured can be folded"
            if on_cuda:
                why = "it would be slower on CUDA"
            elif self._engine.captures.follows_data:
                why = "the control flow of the model may depend on tensor values"
            self.choices["fold_batchnorm"] = (
                f"true ({formats.num_folded} BatchNorm in the convolutions before them)"
                if formats.fold_batchnorm
                else f"false ({why})"
            )
        return formats.channels_last, formats.fold_batchnorm

    def _precision(self, compute: Compute) -> ChosenPrecision:
        """The precision of the option, the resume state, or the fastest one that is close to fp32.

        On a CPU the trial images are enough to time precisions. Small batches do not fill other
        devices, which then wait for launches of kernels: there so many images are taken that a pass
        in fp32 lasts `_FILLED_S`, at most a batch of the run.
        """
        engine, images = self._engine, self._images
        if self._config.precision != "auto":
            return ChosenPrecision(self._config.precision, "")
        if (stored := self._stored_choice("precision")) is not None:
            return ChosenPrecision(str(stored), "")
        batch_size = int(compute.batch_size)
        if engine.device.type == "cpu" or engine.uses_fp32_only or len(images) == 0:
            timed = images if len(images) <= batch_size else images[:batch_size]
        else:
            engine.configure_compute(compute)
            few_images = self.make_batch(min(TRIAL_IMAGES, batch_size))
            engine.run(few_images)  # loads kernels
            started_at = time.perf_counter()
            engine.run(few_images)
            seconds = max(1e-6, time.perf_counter() - started_at)
            num_filling = math.ceil(_FILLED_S / seconds) * len(few_images)
            timed = self.make_batch(min(batch_size, num_filling))
        chosen = choose_precision(engine, compute, images, timed, self._exact)
        self.choices["precision"] = f"{chosen.precision} ({chosen.reason})"
        return chosen

    def _batch_size(self) -> int:
        """The batch size of the option, the resume state, or by device and size of the data set.

        One that the free memory of the host cannot hold is refused before it is allocated. The
        estimate counts the batches that are loaded ahead and, on a CPU, the least that a forward
        pass takes. The memory of other devices is tried by `_largest_fitting`.
        """
        engine, config = self._engine, self._config
        on_cuda = engine.device.type == "cuda"
        if config.batch_size != "auto":
            size = int(config.batch_size)
        elif (stored := self._stored_choice("batch_size")) is not None:
            size = int(stored)
        else:
            largest, num_images = CUDA_BATCH, math.ceil(self._num_rows * self._images_per_row)
            if not on_cuda:
                largest = CPU_BATCH // (1 if num_images >= _MANY_BATCHES * CPU_BATCH else 2)
            if self._has_windows:
                num_windows = math.ceil(self._images_per_row)
                largest = min(largest, layout.power_of_two_at_least(num_windows))
            elif config.part_rows != "auto":
                largest = min(largest, int(config.part_rows))
            size = min(largest, layout.power_of_two_at_least(num_images))
            self.choices["batch_size"] = f"{size}"

        pixels = 3 * math.prod(engine.backbone.preprocess.crop)
        bytes_per_pixel = 4 if config.decode == "reference" else 1
        image_bytes = (1 + PREFETCH_BATCHES) * pixels * bytes_per_pixel
        if not on_cuda:
            precision = "bf16" if config.precision == "auto" else config.precision
            image_bytes += engine.bytes_per_image(precision)
        free = free_memory()
        if free is None or size * image_bytes <= free:
            return size
        fits = layout.power_of_two_at_most(max(1, free / (4 * image_bytes)))
        raise ConfigError(
            f"batch_size={size} needs at least {size_text(size * image_bytes)} of memory "
            f"({size_text(image_bytes)} an image), and {size_text(int(free))} are free. "
            f"batch_size={fits} fits; batch_size=auto chooses one."
        )

    def _largest_fitting(self, compute: Compute) -> int:
        """The batch size, halved until it fits on the CUDA device, if featx chooses it."""
        is_auto = self._config.batch_size == "auto" and "batch_size" not in self._stored
        size = int(compute.batch_size)
        while True:
            try:
                self._engine.configure_compute(replace(compute, batch_size=size))
                self._engine.run(self.make_batch(size))
                return size
            except torch.cuda.OutOfMemoryError as error:
                torch.cuda.empty_cache()
                if not is_auto or size == 1:
                    raise RunError(
                        f"batch_size={size} does not fit into the memory of "
                        f"{self._engine.device}. Lower batch_size."
                    ) from error
                size //= 2
                self.choices["batch_size"] = f"{size} (what fits)"

    def make_batch(self, size: int) -> torch.Tensor:
        """A batch (size, 3, H, W) of the trial images, repeated, or of grey uint8 images."""
        if len(self._images) == 0:
            shape = (size, *self._engine.backbone.preprocess.shape)
            return torch.full(shape, 127, dtype=torch.uint8)
        repeats = -(-size // len(self._images))
        return torch.cat([self._images] * repeats)[:size]

    def _time(self, measured: TimedRows | None = None) -> None:
        """Set `seconds_per_image` and `trial_rows`; without `measured`, measure them now, with the
        current settings of the engine.
        """
        if measured is None:
            compute = self._engine.compute
            on_cpu = self._engine.device.type == "cpu"
            # Small batches do not fill other devices: a GPU would wait for launches of kernels.
            size = min(compute.batch_size, TRIAL_IMAGES) if on_cpu else compute.batch_size
            images = self.make_batch(size)
            is_plain = on_cpu and compute.precision == "fp32" and not compute.compile
            measured = self._engine.time_passes(
                images,
                repeats=2,
                enough_s=_ENOUGH_S if on_cpu else math.inf,
                known_rows=self._exact if is_plain and len(images) == len(self._images) else None,
            )
        self.seconds_per_image = measured.seconds_per_image * self._images_per_row
        of_all = all(len(rows) == len(self._images) for rows in measured.rows.values())
        self.trial_rows = measured.rows if of_all else None

    def _is_compiled(self) -> bool:
        """Return whether to compile the model: by the option, the resume state, or with
        compile=auto if the run is long enough and a compiler exists.
        """
        engine, option = self._engine, self._config.compile
        eager_reason = ""
        if engine.takes_gradients:
            eager_reason = "gradients are taken"
        elif engine.collector.needs_keys:
            eager_reason = "tokens are sampled by the key of each image"
        elif any(point.operation for point in engine.captures.points):
            eager_reason = "operations are captured"
        if eager_reason:
            if option is True:
                raise ConfigError(
                    f"compile=true is not possible because {eager_reason}: a compiled model hides "
                    "these. Use compile=false, or capture outputs of modules."
                )
            self.choices["compile"] = f"false ({eager_reason})"
            return False
        if option != "auto":
            return option
        if (stored := self._stored_choice("compile")) is not None:
            return bool(stored)

        seconds = self.seconds_per_image * self._num_rows
        compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
        if seconds < COMPILE_PAYS_S:
            why = f"the run takes about {seconds:.0f} s, too little to gain from it"
        elif engine.device.type == "cpu" and compiler is None:
            why = "no C++ compiler found"
        else:
            self.choices["compile"] = f"true (about {seconds:.0f} s of work)"
            return True
        self.choices["compile"] = f"false ({why})"
        return False

    def _compile(self, eager: Compute) -> None:
        """Compile; go back to `eager` if values differ or compile=auto gains too little."""
        images = self.make_batch(eager.batch_size)
        expected = {k: v.clone() for k, v in self._engine.run(images).items()}
        eager_s, eager_rows = self.seconds_per_image, self.trial_rows
        self._engine.configure_compute(replace(eager, compile=True))
        try:
            cosine = row_cosines(self._engine.run(images), expected)
            failed = None if cosine >= MIN_COSINE else f"cosine to eager is {cosine:.5f}"
        except Exception as error:  # noqa: BLE001 - torch.compile fails in every possible way
            failed = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:150]}"
        if failed is None:
            self._time()
            gain = eager_s / self.seconds_per_image
            if self._config.compile is True or "compile" in self._stored or gain >= MIN_SPEEDUP:
                return
            self.choices["compile"] = f"false ({gain:.2f} times as fast is too little)"
        else:
            if self._config.compile is True:
                raise RunError(f"compile=true failed ({failed}). Use compile=false.")
            logger.warning("torch.compile failed; the run continues without it: %s", failed)
            self.choices["compile"] = f"false ({failed})"
        self.seconds_per_image, self.trial_rows = eager_s, eager_rows
        self._engine.configure_compute(eager)
