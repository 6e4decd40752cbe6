"""job=doctor: report on this machine, with advice about missing parts."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import Requirement

from featx.base import facts, free_memory, installed_version, num_cpus, size_text
from featx.base.version import __version__
from featx.config import Config
from featx.jobs.base import JOBS, Input, Job, print_summary

_SPACE_GIB = 1.0
"""Free space on a disk, in GiB, below which the job warns."""


@dataclass(frozen=True)
class Finding:
    """One line of the result.

    Attributes:
        name: what was looked at.
        found: what is there.
        advice: what to do, or '' if nothing has to be done.
    """

    name: str
    found: str
    advice: str = ""


def run(config: Config, config_yaml: str) -> int:
    """Look at the machine and print a line for each finding; returns the exit code 0."""
    findings = [_looked(name, look, config) for name, look in _LOOKS.items()]
    rows = [
        (finding.name, finding.found + (f"\n-> {finding.advice}" if finding.advice else ""))
        for finding in findings
    ]
    num_advised = sum(bool(finding.advice) for finding in findings)
    verdict = f"{num_advised} to look at" if num_advised else "Nothing is missing."
    print_summary(config, {f.name: asdict(f) for f in findings}, f"{facts(rows)}\n\n{verdict}")
    return 0


def _looked(name: str, look: Callable[[Config], tuple[str, str]], config: Config) -> Finding:
    """Return one finding; a package that fails on import is a finding too."""
    try:
        return Finding(name, *look(config))
    except Exception as error:  # noqa: BLE001 - it is asked because something does not work
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return Finding(name, text, "reinstall the package that the error names")


def _versions(config: Config) -> tuple[str, str]:
    """Return the versions of featx, Python and the operating system."""
    system = f"{platform.system()} {platform.machine()}"
    return f"{__version__}, Python {platform.python_version()}, {system}", ""


def _torch(config: Config) -> tuple[str, str]:
    """Return the versions of torch and of the model libraries, which have to fit together."""
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
        number = f"{torch.cuda.device_count()} CUDA devices"
        return f"{device}: {about.name}, {size_text(about.total_memory)}; {number}", ""
    if device.type == "mps":
        return "mps: Apple GPU", ""
    bf16 = "may compute bf16 fast" if may_have_bf16() else "computes bf16 slowly"
    advice = ""
    if shutil.which("nvidia-smi"):
        advice = "there is an NVIDIA driver, but torch has no CUDA device: install a CUDA build"
    return f"cpu: {_cpu_name()}, {bf16}", advice


def _cpu_name() -> str:
    """Return the name of the CPU, or the architecture where it is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _threads(config: Config) -> tuple[str, str]:
    """Return the number of CPUs that this process may use."""
    usable, there = num_cpus(), os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS")
    advice = ""
    if limit is not None and limit.isdigit() and int(limit) < usable:
        advice = f"OMP_NUM_THREADS={limit} leaves CPUs unused: unset it"
    return f"{usable} of {there} CPUs", advice


def _memory(config: Config) -> tuple[str, str]:
    """Return the memory that this process may still allocate."""
    free = free_memory()
    return ("unknown" if free is None else f"{size_text(free)} free"), ""


def _decoders(config: Config) -> tuple[str, str]:
    """Return the decoders of images."""
    import PIL

    found = [f"Pillow {PIL.__version__}"]
    missing = []
    for package, kind, extra in (
        ("simplejpeg", "JPEG", "jpeg"),
        ("pillow-heif", "HEIC", "heif"),
        ("torchcodec", "video", "video"),
        ("tifffile", "TIFF of several bands", "channels"),
        ("openslide-python", "slides", "slides"),
    ):
        version = installed_version(package)
        if version is None:
            missing.append(f'{kind}: pip install "featx[{extra}]"')
        else:
            found.append(f"{package} {version} ({kind})")
    fast = installed_version("simplejpeg") is not None
    text = ", ".join(found) + (f"; not installed: {'; '.join(missing)}" if missing else "")
    return text, "" if fast else 'JPEGs decode faster with: pip install "featx[jpeg]"'


def _store(config: Config) -> tuple[str, str]:
    """Return the versions of HDF5 and of the codecs."""
    import h5py

    plugin = installed_version("hdf5plugin")
    codecs = f"hdf5plugin {plugin} (zstd, blosc2)" if plugin else "no zstd and blosc2"
    advice = "" if plugin else "pip install hdf5plugin, to read and write compressed stores"
    return f"h5py {h5py.__version__}, HDF5 {h5py.version.hdf5_version}, {codecs}", advice


def _extras(config: Config) -> tuple[str, str]:
    """Return the extras of featx whose packages are all installed, and the others."""
    about = importlib.metadata.metadata("featx")
    requirements = [Requirement(text) for text in importlib.metadata.requires("featx") or ()]
    there: list[str] = []
    missing: list[str] = []
    for extra in about.get_all("Provides-Extra") or ():
        of_extra = [
            each.name
            for each in requirements
            if each.marker is not None and each.marker.evaluate({"extra": extra})
        ]
        is_there = all(installed_version(name) is not None for name in of_extra)
        (there if is_there else missing).append(extra)
    text = f"installed: {', '.join(there) or 'none'}"
    return text + (f"; not installed: {', '.join(missing)}" if missing else ""), ""


def _weights(config: Config) -> tuple[str, str]:
    """Return the folders in which torchvision and timm keep downloaded weights."""
    import huggingface_hub.constants
    import torch

    folders = (
        Path(torch.hub.get_dir()) / "checkpoints",
        Path(huggingface_hub.constants.HF_HUB_CACHE),
    )
    return "\n".join(_folder_text(folder) for folder in folders), ""


def _folder_text(folder: Path) -> str:
    """Return a folder with the number and size of its files."""
    # Snapshots of the Hugging Face Hub are links to blobs: each file is counted once.
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    size = size_text(sum(path.stat().st_size for path in files))
    return f"{folder}: {len(files)} files, {size}" if folder.is_dir() else f"{folder}: none yet"


def _disk(config: Config) -> tuple[str, str]:
    """Return the free space in the current folder."""
    free = shutil.disk_usage(Path.cwd()).free
    advice = "" if free > _SPACE_GIB * (1 << 30) else "make room, or write elsewhere with out=DIR"
    return f"{Path.cwd()}: {size_text(free)} free", advice


def _command(config: Config) -> tuple[str, str]:
    """Return the Python that runs, and whether it is the one of a virtual environment."""
    inside = sys.prefix != sys.base_prefix
    return f"{sys.executable}" + (", a virtual environment" if inside else ""), ""


_LOOKS: dict[str, Callable[[Config], tuple[str, str]]] = {
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
"""Name of each finding -> function that returns (what was found, advice)."""

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
