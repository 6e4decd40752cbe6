"""The cases: commands of users, for each source, library, reduction, executor and job."""

from __future__ import annotations

import signal
from dataclasses import dataclass

FIXED = "precision=fp32 compile=false batch_size=4 part_rows=4"
"""Nothing is left to be decided by measurement."""

SMALL = (
    "model=custom model.factory=small_models:SmallConvNet model.weights=null "
    f"model.transform.resize=32 model.transform.crop=32 {FIXED}"
)
PHOTOS = f"data=folder data.root=DATA/photos {SMALL}"
RUN = f"{PHOTOS} layers=[conv,pool] out=store"

HOLD = "model.args.parts=2 model.args.folder=store/parts"
"""The run waits after two parts, while the file `hold` exists."""


@dataclass(frozen=True)
class Step:
    """A command of a case.

    Attributes:
        line: arguments of featx, or `$` and a line for the shell, where $PYTHON is the Python of
            featx. DATA stands for the folder of the inputs.
        code: exit code that the command has in a correct featx.
        kill: signal that is sent to the process group of the command once `parts` files lie in
            `folder`; the model waits then (programs/small_models.py).
    """

    line: str
    code: int = 0
    kill: signal.Signals | None = None
    folder: str = "store/parts"
    parts: int = 2


@dataclass(frozen=True)
class Case:
    """Commands that are run one after the other in an empty folder.

    Attributes:
        name: of the case.
        steps: the commands; a text is a step that ends with exit code 0.
        needs: packages without which the case is not run.
    """

    name: str
    steps: tuple[str | Step, ...]
    needs: tuple[str, ...] = ()


def _sources() -> list[Case]:
    extract = f"{SMALL} layers=[conv,pool] out=store"
    sources = {
        "folder": "data=folder data.root=DATA/photos",
        "folder-limit": "data=folder data.root=DATA/photos data.limit=9 data.extensions=[jpg,png]",
        "csv": "data=table data.root=DATA/photos.csv data.image_root=DATA/photos "
        "data.columns=[patient,age,tags,use,spare]",
        "parquet": "data=table data.root=DATA/photos.parquet data.columns=[age]",
        "tar": "data=webdataset data.root=DATA/shards",
        "tar-gz": "data=webdataset data.root=DATA/shards/zipped",
        "hdf5": "data=hdf5 data.root=DATA/pixels.h5 data.dataset=/images data.labels=/labels",
        "hdf5-encoded": "data=hdf5 data.root=DATA/pixels.h5 data.dataset=/encoded",
        "huggingface": "data=huggingface data.root=DATA/huggingface",
        "mnist": "data=torchvision data.dataset=MNIST data.root=DATA/torchvision",
        "pets": "data=torchvision data.dataset=OxfordIIITPet data.root=DATA/torchvision",
        "imagefolder": "data=torchvision data.dataset=ImageFolder "
        "data.root=DATA/torchvision/imagefolder",
        "boxes": "data=folder data.root=DATA/photos data.boxes=DATA/boxes.csv max_failures=2",
        "sample": "data=sample",
        "odd": "data=folder data.root=DATA/odd max_failures=1.0",
    }
    needs = {"parquet": ("pyarrow",), "huggingface": ("datasets",)}
    return [
        Case(f"source-{name}", (f"{options} {extract}",), needs.get(name, ()))
        for name, options in sources.items()
    ]


CASES = [
    *_sources(),
    Case("textiles", (f"data.limit=24 {FIXED} out=store",), ("conformal_clip_data",)),
    Case("finished", (RUN, RUN, f"{RUN} pack=false", "job=status store=store")),
    Case("workers", (f"{RUN} executor.workers=2",)),
    Case(
        "kill",
        (
            Step(f"{RUN} {HOLD}", -9, signal.SIGKILL),
            "job=status store=store",
            RUN,
        ),
    ),
]
