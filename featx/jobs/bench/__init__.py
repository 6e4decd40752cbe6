"""job=bench: the speed of featx, of a plain PyTorch script and of each stage alone, in one run."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from featx.base import log_message, table
from featx.config import DEFAULT_LAYERS, BenchConfig, Config, DataConfig
from featx.errors import ConfigError
from featx.jobs.base import JOBS, RUN_OPTIONS, Input, Job, print_summary
from featx.jobs.bench import contenders
from featx.jobs.bench.contenders import Measurement
from featx.jobs.bench.photos import make_photos
from featx.sources import FolderOptions

SCRIPT = "the user's script"


def run(config: Config, config_yaml: str) -> int:
    """Measure in alternation and print ratios with their spread; returns the exit code 0."""
    with tempfile.TemporaryDirectory(prefix="featx-bench-") as name:
        folder = Path(name)
        config = _config_to_measure(config, folder)
        result = _measure(config, config_yaml, folder)
    print_summary(config, result, _text(result))
    return 0


def _check(config: Config) -> None:
    """Refuse what the script cannot do.

    Raises:
        ConfigError: the images are not files of a folder, or gradients are captured.
    """
    if config.takes_gradients:
        raise ConfigError(
            f"capture={config.capture}: job=bench captures no gradients, because the script that "
            "featx is measured against computes none."
        )
    transform = getattr(config.model, "transform", None)  # that of a model of no library is fixed
    if transform is not None and transform.scale is not None:
        raise ConfigError(
            f"model.transform.scale={transform.scale}: job=bench compares images of RGB, which the "
            "script reads that featx is measured against."
        )
    if config.data.boxes is not None:
        raise ConfigError(
            f"data.boxes={config.data.boxes} has no effect with job=bench: the script that featx "
            "is measured against takes whole images."
        )
    if config.data.name not in ("folder", DataConfig().name):
        raise ConfigError(
            f"data={config.data.name}: job=bench reads files, as the script does that featx is "
            "measured against. Give data=folder data.root=DIR, or leave data out for photographs "
            "made here."
        )


def _config_to_measure(config: Config, folder: Path) -> Config:
    """Return the config with the images of all contenders: a folder, or generated photographs."""
    if config.data.name != "folder":
        photos = folder / "photos"
        make_photos(photos, config.bench.num_images)
        config = replace(config, data=FolderOptions(root=str(photos)))
    return replace(config, data=replace(config.data, limit=config.bench.num_images))


def _measure(config: Config, config_yaml: str, folder: Path) -> dict[str, Any]:
    """Run every contender once per round, in turn, and then each stage separately."""
    exact = replace(config, precision="fp32")
    variants = {
        "featx": config,
        "featx precision=fp32": exact,
        "featx precision=fp32 compile=true": replace(exact, compile=True),
    }
    runs: dict[str, list[Measurement]] = {name: [] for name in (SCRIPT, *variants)}
    first_stores: dict[str, Path] = {}
    for number in range(config.bench.runs):
        log_message(f"round {number + 1} of {config.bench.runs}")
        for name in runs:
            run_folder = folder / f"{number}-{len(first_stores)}"
            run_folder.mkdir()
            if name == SCRIPT:
                measurement = contenders.in_new_process(contenders.run_tutorial, config, run_folder)
            else:
                measurement = contenders.in_new_process(
                    contenders.run_featx, variants[name], config_yaml, run_folder
                )
            runs[name].append(measurement)
            if name in first_stores:
                shutil.rmtree(run_folder)
            first_stores.setdefault(name, run_folder)
    out = str(folder / "stages")
    stages = contenders.in_new_process(
        contenders.stages_alone, replace(config, out=out), config_yaml
    )
    return _result(config, runs, first_stores, stages)


def _result(
    config: Config,
    runs: dict[str, list[Measurement]],
    first_stores: dict[str, Path],
    stages: dict[str, float],
) -> dict[str, Any]:
    """Return medians and spreads in JSON types."""
    images = runs["featx"][0].images
    for stage in ("copy", "write"):
        seconds = statistics.median(m.stages[stage] for m in runs["featx"])
        stages[stage] = images / seconds if seconds else float("inf")
    slowest = min(stages, key=lambda stage: stages[stage])
    rows: dict[str, dict[str, Any]] = {}
    for name, measurements in runs.items():
        rates = [m.images_per_second for m in measurements]
        ratios = [
            m.images_per_second / script.images_per_second
            for m, script in zip(measurements, runs[SCRIPT], strict=True)
        ]
        rows[name] = {
            "images_per_second": statistics.median(rates),
            "ratio": statistics.median(ratios),
            "ratio_spread": [min(ratios), max(ratios)],
            "cosine": contenders.smallest_cosine(first_stores[name], first_stores[SCRIPT]),
        }
    return {
        "model": config.model.name,
        "layers": config.layers or DEFAULT_LAYERS,
        "images": images,
        "runs": config.bench.runs,
        "contenders": rows,
        "stages_alone": stages,
        "slowest_stage": slowest,
        "share_of_slowest_stage": rows["featx"]["images_per_second"] / stages[slowest],
    }


def _text(result: dict[str, Any]) -> str:
    """Format the result for people."""
    body = [
        (
            name,
            f"{row['images_per_second']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_spread'][0]:.2f} to {row['ratio_spread'][1]:.2f}",
            "-" if row["cosine"] is None else f"{row['cosine']:.5f}",
        )
        for name, row in result["contenders"].items()
    ]
    header = ("", "images/s", "ratio", "spread", "smallest cosine to the script's rows")
    stages = [(stage, f"{rate:,.1f}") for stage, rate in result["stages_alone"].items()]
    return (
        f"{result['model']}, layers={result['layers']}, {result['images']} images, "
        f"{result['runs']} rounds in turn, files to store\n"
        f"{table(header, body)}\n\n"
        f"{table(('stage alone', 'images/s'), stages)}\n\n"
        f"featx reaches {result['share_of_slowest_stage']:.2f} of its slowest stage alone "
        f"({result['slowest_stage']})."
    )


JOBS.register(
    Job(
        "bench",
        "Measure the speed of featx, of a plain PyTorch script and of each stage alone.",
        BenchConfig,
        run=run,
        input=Input.IMAGES,
        reads=(*RUN_OPTIONS, "job.json"),
        ignores=("grow", "overwrite", "out", "data.limit"),
        why="every run makes a store of its own, of bench.num_images images",
        check=_check,
    )
)
