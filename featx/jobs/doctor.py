"""job=doctor: report on this machine, with advice about missing parts."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from packaging.requirements import Requirement

from featx.base import free_memory, installed_version, num_cpus, size_text
from featx.base.version import __version__
from featx.config import Config
from featx.errors import FeatxError, counted
from featx.jobs.base import JOBS, Input, Job, print_summary

_SPACE_GIB = 1.0
"""Free space on a disk, in GiB, below which the job warns."""


def run(config: Config, config_yaml: str) -> int:
    """Look at the machine and print a line for each finding; returns the exit code 0."""
    findings = {}
    for name, check in _CHECKS.items():
        try:
            findings[name] = check(config)
        except FeatxError as error:  # whose message says what to do
            findings[name] = "cannot be used", str(error)
        except Exception as error:  # noqa: BLE001 - it is asked because something does not work
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            findings[name] = text, "reinstall the package that the error names"
    rows = [
        (name, f"{text}\n-> {advice}" if advice else text)
        for name, (text, advice) in findings.items()
    ]
    summary = {
        name: {"name": name, "found": text, "advice": advice}
        for name, (text, advice) in findings.items()
    }
    num_advised = sum(bool(advice) for _, advice in findings.values())
    verdict = f"{num_advised} to look at" if num_advised else "Nothing is missing."
    print_summary(config, summary, rows, verdict)
    return 0


def _versions(config: Config) -> tuple[str, str]:
    system = f"{platform.system()} {platform.machine()}"
    return f"{__version__}, Python {platform.python_version()}, {system}", ""


def _torch(config: Config) -> tuple[str, str]:
    import timm
    import torch
    import torchvision

    versions = f"{torch.__version__}, torchvision {torchvision.__version__}"
    return f"{versions}, timm {timm.__version__}", ""


def _device(config: Config) -> tuple[str, str]:
    """Return the device that `device` chooses, with its memory or its number types."""
    import torch

    from featx.base import choose_device, may_have_bf16

    device = choose_device(config.device)
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        number = counted(torch.cuda.device_count(), "CUDA device")
        return f"{device}: {about.name}, {size_text(about.total_memory)}; {number}", ""
    if device.type == "mps":
        return "mps: Apple GPU", ""

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    # The architecture stands for a name that is unknown.
    name = names[0] if names else platform.processor() or platform.machine()
    bf16 = "may compute bf16 fast" if may_have_bf16() else "computes bf16 slowly"
    advice = ""
    if shutil.which("nvidia-smi"):
        advice = "there is an NVIDIA driver, but torch has no CUDA device: install a CUDA build"
    return f"cpu: {name}, {bf16}", advice


def _threads(config: Config) -> tuple[str, str]:
    num_usable, num_all = num_cpus(), os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS")
    advice = ""
    if limit is not None and limit.isdigit() and int(limit) < num_usable:
        advice = f"OMP_NUM_THREADS={limit} leaves CPUs unused: unset it"
    return f"{num_usable} of {num_all} CPUs", advice


def _memory(config: Config) -> tuple[str, str]:
    free = free_memory()
    return ("unknown" if free is None else f"{size_text(free)} free"), ""


def _decoders(config: Config) -> tuple[str, str]:
    import PIL

    installed = [
        f"Pillow {PIL.__version__}",
        f"simplejpeg {installed_version('simplejpeg')} (JPEG)",
    ]
    not_installed = []
    for package, kind, extra in (
        ("pillow-heif", "HEIC", "heif"),
        ("torchcodec", "video", "video"),
        ("tifffile", "TIFF of several bands", "channels"),
        ("openslide-python", "slides", "slides"),
    ):
        version = installed_version(package)
        if version is None:
            not_installed.append(f'{kind}: pip install "featx[{extra}]"')
        else:
            installed.append(f"{package} {version} ({kind})")
    return _both(", ".join(installed), "; ".join(not_installed)), ""


def _store(config: Config) -> tuple[str, str]:
    import h5py

    plugin = installed_version("hdf5plugin")
    codecs = f"hdf5plugin {plugin} (zstd)" if plugin else "no zstd"
    advice = "" if plugin else "pip install hdf5plugin, to read and write compressed stores"
    return f"h5py {h5py.__version__}, HDF5 {h5py.version.hdf5_version}, {codecs}", advice


def _extras(config: Config) -> tuple[str, str]:
    """Return the extras of featx whose packages are all installed, and the others."""
    about = importlib.metadata.metadata("featx")
    requirements = [Requirement(text) for text in importlib.metadata.requires("featx") or ()]
    installed: list[str] = []
    not_installed: list[str] = []
    for extra in about.get_all("Provides-Extra") or ():
        packages = [
            each.name
            for each in requirements
            if each.marker is not None and each.marker.evaluate({"extra": extra})
        ]
        is_installed = all(installed_version(name) is not None for name in packages)
        (installed if is_installed else not_installed).append(extra)
    found = f"installed: {', '.join(installed) or 'none'}"
    return _both(found, ", ".join(not_installed)), ""


def _both(found: str, not_installed: str) -> str:
    return f"{found}; not installed: {not_installed}" if not_installed else found


def _weights(config: Config) -> tuple[str, str]:
    """Return the folders in which torchvision and timm keep downloaded weights."""
    import huggingface_hub.constants
    import torch

    folders = (
        Path(torch.hub.get_dir()) / "checkpoints",
        Path(huggingface_hub.constants.HF_HUB_CACHE),
    )
    lines = []
    for folder in folders:
        # Snapshots of the Hugging Face Hub are links to blobs: each file is counted once.
        files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
        size = size_text(sum(path.stat().st_size for path in files))
        found = f"{counted(len(files), 'file')}, {size}" if folder.is_dir() else "none yet"
        lines.append(f"{folder}: {found}")
    return "\n".join(lines), ""


def _disk(config: Config) -> tuple[str, str]:
    free = shutil.disk_usage(Path.cwd()).free
    advice = "" if free > _SPACE_GIB * (1 << 30) else "make room, or write elsewhere with out=DIR"
    return f"{Path.cwd()}: {size_text(free)} free", advice


def _command(config: Config) -> tuple[str, str]:
    """Return the Python that runs, and whether it is the one of a virtual environment."""
    is_virtual = sys.prefix != sys.base_prefix
    return f"{sys.executable}" + (", a virtual environment" if is_virtual else ""), ""


_CHECKS: dict[str, Callable[[Config], tuple[str, str]]] = {
    "featx": _versions,
    "python": _command,
    "torch": _torch,
    "device": _device,
    "threads": _threads,
    "memory": _memory,
    "disk": _disk,
    "decoders": _decoders,
    "store": _store,
    "weights": _weights,
    "extras": _extras,
}
"""Name of each finding -> function that returns its text and its advice."""

JOBS.register(
    Job(
        "doctor",
        "Show what featx finds on this machine: versions, device, decoders, extras, disk.",
        run=run,
        input=Input.NOTHING,
        reads=("job.json", "device"),
        why="it looks at the machine only",
    )
)
