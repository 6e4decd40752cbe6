"""The cases: commands of users, for each source, library, reduction, executor and job."""

from __future__ import annotations

import signal
from dataclasses import dataclass

FIXED = "precision=fp32 compile=false batch_size=4 part_rows=4"
"""Nothing is left to be decided by measurement."""

FACTORY = "model=custom model.factory=small_models:SmallConvNet"
CUSTOM = f"{FACTORY} model.transform.resize=32 model.transform.crop=32"
SMALL = f"{CUSTOM} model.weights=null {FIXED}"
PHOTOS = f"data=folder data.root=DATA/photos {SMALL}"
RUN = f"{PHOTOS} layers=[conv,pool] out=store"

HOLD = "model.args.parts=2 model.args.folder=store/parts"
"""The run waits after two parts, while the file `hold` exists."""


@dataclass(frozen=True)
class Step:
    """A command of a case, and the exit code that it has in a correct featx.

    The line has arguments of featx, or `$` and a line for the shell, where $PYTHON is the Python of
    featx. DATA stands for the folder of the inputs. The signal `kill` is sent to the process group
    of the command once `parts` files lie in `folder`; the model waits then (small_models.py).
    """

    line: str
    code: int = 0
    kill: signal.Signals | None = None
    folder: str = "store/parts"
    parts: int = 2


@dataclass(frozen=True)
class Case:
    """Commands, run one after the other in an empty folder; a text ends with exit code 0."""

    name: str
    steps: tuple[str | Step, ...]


SOURCES = {
    "folder": "data=folder data.root=DATA/photos",
    "folder-part": "data=folder data.root=DATA/photos data.limit=9 data.extensions=[jpg,png]",
    "csv": "data=table data.root=DATA/photos.csv data.image_root=DATA/photos "
    "data.columns=[patient,age,tags,use,spare]",
    "parquet": "data=table data.root=DATA/photos.parquet data.columns=[age]",
    "tar": "data=webdataset data.root=DATA/shards",
    "tar-gz": "data=webdataset data.root=DATA/shards/zipped",
    "hdf5": "data=hdf5 data.root=DATA/pixels.h5 data.dataset=/images data.label_column=/labels",
    "hdf5-encoded": "data=hdf5 data.root=DATA/pixels.h5 data.dataset=/encoded",
    "mnist": "data=torchvision data.dataset=MNIST data.root=DATA/torchvision",
    "pets": "data=torchvision data.dataset=OxfordIIITPet data.root=DATA/torchvision",
    "imagefolder": "data=torchvision data.dataset=ImageFolder data.root=DATA/torchvision/classes",
    "boxes": "data=folder data.root=DATA/photos data.boxes=DATA/boxes.csv max_failures=2",
    "slides": "data=slides data.root=DATA/slides data.boxes=DATA/slide-boxes.csv max_failures=3",
    "video": "data=video data.root=DATA/videos data.every_s=0.5",
    "sample": "data=sample out=sample",
    "damaged": "data=folder data.root=DATA/odd max_failures=1.0",
    "damaged-reference": "data=folder data.root=DATA/odd max_failures=1.0 decode=reference "
    "data.exif=ignore data.background=black",
    "odd-images": "data=folder data.root=DATA/odd-images max_failures=1.0",
    "bands": "data=folder data.root=DATA/bands data.extensions=[npy] model.args.channels=5 "
    "model.transform.scale=10000 model.transform.mean=[0.1,0.1,0.1,0.3,0.2] "
    "model.transform.std=[0.1,0.1,0.1,0.2,0.1]",
}
"""Sources, each of which is extracted with the small model."""

VIT = f"data=folder data.root=DATA/photos model=test_vit model.weights=null {FIXED} out=store"
RESNET = (
    "data=folder data.root=DATA/photos model=resnet18 model.weights=null model.input_size=[64,64] "
    f"{FIXED} out=store"
)
MADE = f"data=folder data.root=DATA/photos {FIXED} out=store"
SMALL_CROP = "model.transform.resize=32 model.transform.crop=32"

MODELS = {
    "source-huggingface": (
        "$ $PYTHON -m make_model huggingface DATA/photos.parquet",
        f"data=huggingface data.root=huggingface {SMALL} layers=[conv,pool] out=store",
    ),
    "torchvision": (f"{RESNET} layers=stages reduce=avg", f"{RESNET} layers=[avgpool] pack=false"),
    "timm": (
        f"{VIT} layers=[embedding,blocks.1]",
        f"{VIT} model=test_convnext layers=stages reduce=gem out=convnext",
    ),
    "transformers": (
        "$ $PYTHON -m make_model transformers 2>/dev/null",
        f"model=transformers model.name=transformers layers=all {MADE}",
    ),
    "open-clip": (
        "$ $PYTHON -m make_model open_clip",
        f"model=open_clip model.name=open_clip {MADE}",
        "job=zeroshot store=store zeroshot.templates=simple",
        "job=predict store=store/zeroshot/embedding.safetensors data=folder data.root=DATA/photos "
        "out=predicted",
    ),
    "hub": (
        "$ $PYTHON -m make_model hub",
        f"model=hub model.name=hub model.factory=small model.weights=null {SMALL_CROP} "
        f"layers=['0'] {MADE}",
    ),
    "program": (
        "$ $PYTHON -m make_model export",
        f"model=export model.name=net.pt2 {SMALL_CROP} {MADE}",
    ),
    "weights": (
        "$ $PYTHON -m make_model weights",
        f"{CUSTOM} model.weights=net.safetensors layers=[conv,head] {MADE}",
        f"{CUSTOM} model.weights=net.pth layers=[conv,head] {MADE} out=nested",
        Step(f"{CUSTOM} model.weights=net.pth model.init=reset layers=[head] {MADE} out=reset", 2),
        Step(f"{CUSTOM} model.weights=net.pth seed=3 layers=[deep] {MADE} dtype=float32", 2),
    ),
    "packaged": (
        f"data.limit=12 {FIXED} out=store",
        f"data=sample {FIXED} layers=stages out=sample",
    ),
    "reductions": (
        f"{RESNET} 'layers={{conv1: grid, layer1: max, layer2: gem, layer3: flatten}}'",
        f"{VIT} 'layers={{blocks.0: cls, blocks.1: patch_avg, blocks.2: grid, blocks.3: avg}}' "
        "out=vit",
        f"{VIT} 'layers=[blocks.0,blocks.3]' reduce=sample reduce.k=5 out=sample",
        f"{RESNET} layers=[layer2,layer3] reduce=align reduce.size=6 reduce.pool=3 out=align",
    ),
    "projections": (
        f"job=stats {RUN} reduce=avg".replace("out=store", "out=stats"),
        f"{RUN} reduce=pca reduce.stats=stats reduce.k=3",
        f"{RUN} reduce=whiten reduce.stats=stats reduce.epsilon=0.1 out=whitened",
    ),
    "captures": (
        f"{RUN} 'layers=[conv:input,deep,pool:grad_output,relu]' target=label "
        "data.classes=DATA/classes.json",
        f"{RUN} capture=[output,grad_output] layers=[conv,deep] target=entropy out=gradients",
        f"{VIT} 'layers=[\"blocks.*.attn\"]' capture=attention out=attention",
        f"{RESNET} 'layers=[layer1.0.add,layer2.0.conv1,\"layer2.0.relu@2\"]' out=operations",
    ),
    "numbers": (
        f"{VIT} precision=bf16 dtype=bfloat16 layers=[embedding]",
        f"{RUN} dtype=float32 decode=reference fold_batchnorm=false out=float32",
        f"{RUN} codec=zstd out=zstd",
        f"{RUN} codec=gzip dtype=bfloat16 part_rows=8 pack=false out=gzip",
        f"{RESNET} layers=[layer4.1.bn2] dtype=float32 out=folded",
    ),
    "nonfinite": (
        Step(f"{RUN} model.args.poison=0.6", 1),
        f"{RUN} model.args.poison=0.6 nonfinite=record max_failures=1.0 out=recorded",
    ),
    "python": ("$ $PYTHON -m python_api", f"job=verify store=memory {FACTORY}"),
    "tensorboard": (f"{RUN} tensorboard=8",),
}
"""Libraries, reductions, captures and numbers; and the Python interface."""

WATCHED = f"{RUN} {HOLD}"
COPY = "$ cp -rp DATA/photos photos"
COPIED = RUN.replace("DATA/photos", "photos")

RUNS = {
    "finished": (RUN, RUN, f"{RUN} pack=false", "job=status store=store"),
    "workers": (f"{RUN} executor.workers=2",),
    "slurm-local": (f"{RUN} executor=slurm executor.mode=local executor.workers=2",),
    "kill": (
        Step(WATCHED, -9, signal.SIGKILL),
        "job=status store=store",
        Step("job=verify store=store", 1),
        RUN,
    ),
    "kill-workers": (
        Step(f"{WATCHED} executor.workers=2", -9, signal.SIGKILL),
        f"{RUN} executor.workers=2",
    ),
    "terminate": (Step(WATCHED, 143, signal.SIGTERM), "job=status store=store job.json=true", RUN),
    "interrupt": (Step(WATCHED, 130, signal.SIGINT), f"{RUN} executor.workers=2"),
    "kill-stats": (
        Step(
            f"job=stats {WATCHED}".replace("/parts", "/stats-parts"),
            -9,
            signal.SIGKILL,
            "store/stats-parts",
        ),
        f"job=stats {RUN}",
    ),
    "parts": (
        f"{RUN} pack=false",
        "job=verify store=store",
        "$ $PYTHON -m flip store/parts/part-000003.h5 features/conv 1",
        Step("job=verify store=store", 2),
        f"job=verify store=store verify.repair=true {FACTORY}",
        "job=pack store=store",
        "job=verify store=store job.json=true",
    ),
    "grow": (
        COPY,
        COPIED,
        COPIED.replace("[conv,pool]", "[deep]"),
        "$ cp -p DATA/odd/sound.jpg photos/dog/100.jpg; cp -p DATA/odd/cut.png photos/cat/000.png",
        Step(COPIED, 2),
        f"{COPIED} layers=[conv,pool,deep] grow=true max_failures=1",
        "$ cp -p DATA/odd/sound.jpg photos/cat/000.png",
        f"{COPIED} layers=[conv,pool,deep] retry_failed=true",
        "job=verify store=store",
    ),
    "refresh": (
        COPY,
        COPIED,
        "$ cp -p DATA/odd/sound.jpg photos/cat/000.jpg; cp -p DATA/odd/cut.jpg photos/cat/003.jpg",
        Step(COPIED, 2),
        Step("job=verify store=store", 2),
        f"{COPIED} refresh=true max_failures=1",
        "job=verify store=store",
        "$ rm photos/dog/001.png",
        Step(COPIED, 2),
        f"{COPIED} overwrite=true max_failures=1",
    ),
    "damage": (
        COPY,
        COPIED,
        "$ $PYTHON -m flip store/features.h5 features/conv 9",
        Step("job=verify store=store", 2),
        Step("job=verify store=store job.json=true", 2),
        f"job=verify store=store verify.repair=true verify.reextract_rows=5 {FACTORY}",
        "$ $PYTHON -m flip store/features.h5 key 3; rm store/featx.json",
        Step("job=verify store=store", 2),
        f"job=verify store=store verify.repair=true {FACTORY}",
        "$ head -c 9000 store/features.h5 > cut; mv cut store/features.h5",
        Step("job=export store=store export.format=npy out=exported", 2),
        COPIED,
        "job=verify store=store",
        "$ $PYTHON -m flip store/features.h5 features/pool 6; rm photos/*/018.*",
        f"job=verify store=store verify.repair=true {FACTORY}",
    ),
}
"""Resumes, kills, executors, growth and damage."""

LABELLED = (
    "data=table data.root=DATA/photos.csv data.image_root=DATA/photos "
    f"data.columns=[patient,age,tags,use] {SMALL} 'layers={{conv: none, pool: flatten}}' out=store"
)
FORMATS = ("npy", "parquet", "safetensors", "zarr", "webdataset", "huggingface")
VECTOR_FORMATS = ("faiss", "hloc", "clip_retrieval")

JOBS = {
    "probe": (
        LABELLED,
        "job=probe store=store 'probe.method=[linear,knn,ridge]' probe.bootstrap=100",
        "job=probe store=store probe.folds=3 probe.group_column=patient",
        "job=probe store=store probe.split=use probe.shots=[1,2] job.json=true",
        "job=probe store=store probe.label_column=age 'probe.method=[linear,knn]' probe.seeds=2",
        "job=probe store=store probe.label_column=tags probe.task=multilabel",
    ),
    "probe-tokens": (
        LABELLED,
        "job=probe store=store probe.method=attentive layers=[conv] probe.epochs=3",
        "job=probe store=store layers=[conv] probe.masks=DATA/masks "
        "probe.mask_classes=DATA/mask-classes.txt",
    ),
    "predict": (
        LABELLED,
        "job=probe store=store probe.calibration=temperature",
        f"job=predict store=store {FACTORY} data=folder data.root=DATA/odd max_failures=1.0 "
        "out=predicted",
    ),
    "export": (
        LABELLED,
        *(f"job=export store=store export.format={name}" for name in FORMATS),
        *(f"job=export store=store layers=pool export.format={name}" for name in VECTOR_FORMATS),
    ),
    "report": (
        LABELLED,
        "job=probe store=store 'probe.method=[linear,knn]'",
        "job=report store=store out=report.html",
    ),
    "similarity": (
        RUN,
        f"{RUN} data.extensions=[jpg,png] out=other",
        "job=neighbors store=store layers=pool neighbors.k=4",
        "job=neighbors store=store layers=conv neighbors.key=cat/000.jpg "
        "neighbors.metric=euclidean",
        f"job=neighbors store=store layers=pool neighbors.image=DATA/odd/sound.jpg {FACTORY}",
        "job=duplicates store=store layers=pool duplicates.threshold=0.9",
        "job=cka store=store 'cka.measures=[cka,cka_debiased,rsa,svcca,procrustes]'",
        "job=cka store=[store,other] job.json=true",
        "job=distance store=[store,other]",
    ),
    "stats": (
        f"job=stats {RUN} reduce=avg",
        f"job=stats {RUN} stats.observation=position stats.covariance=diagonal layers=[conv] "
        "out=positions",
        f"job=stats {RUN} reduce=avg data.limit=12 stats.reference=store out=half job.json=true",
        f"job=stats {RUN} reduce=avg executor.workers=2 out=workers",
    ),
    "attribute": (
        f"job=attribute {RESNET} attribute.per_class=2 "
        "'attribute.method=[saliency,input_x_gradient,integrated_gradients,gradcam,occlusion]' "
        "attribute.steps=4 attribute.window=16 data.limit=9".replace("out=store", "out=maps"),
    ),
    "inspect": (
        f"job=layers data=folder data.root=DATA/photos {CUSTOM}",
        f"job=layers data=folder data.root=DATA/photos {CUSTOM} job.json=true",
        "job=layers model=resnet18 model.weights=null job.show=watch",
        "job=layers model=test_vit model.weights=null 'layers=[**]'",
        f"job=plan {RUN}",
        f"job=plan {RUN} job.json=true executor.workers=2",
        "job=models models.query=dino",
        f"{PHOTOS} --cfg job",
        "--help",
        "--version",
    ),
}
"""The other jobs."""

WRONG = (
    "batchsize=4",
    "job=extrakt",
    "model=resnet81",
    "model=resnet18 model.weights=null data=folder data.root=DATA/photos layers=[layr4]",
    f"{PHOTOS} layers=[conv:grad_outputs]",
    f"{PHOTOS} layers=[conv",
    f"{PHOTOS} layers=[convv]",
    f"{PHOTOS} layers=[pool:grad_output] target=label out=unnamed",
    f"{PHOTOS} reduce=gemm",
    f"{PHOTOS} reduce.p=2",
    f"{PHOTOS} part_rows=3",
    f"{PHOTOS} batch_size=8",
    f"{PHOTOS} dtype=int8",
    f"{PHOTOS} codec=lzma",
    f"{PHOTOS} max_failures=-1",
    f"{PHOTOS} probe.k=3",
    f"{PHOTOS} model.args.colour=3",
    f"{PHOTOS} model.factory=small_models:LargeNet",
    f"data=folder data.root=nowhere {SMALL}",
    f"data=folder data.root=empty {SMALL}",
    f"data=table data.root=DATA/photos.csv data.label_column=lable {SMALL}",
    f"data=hdf5 data.root=DATA/pixels.h5 data.dataset=/imags {SMALL}",
    f"data=hdf5 data.root=DATA/photos.csv data.dataset=/images {SMALL}",
    f"data=webdataset data.root=DATA/photos {SMALL}",
    f"data=torchvision data.dataset=CIFAR10 data.root=DATA/torchvision {SMALL}",
    "job=verify store=nowhere",
    "job=probe store=nowhere",
    "job=export store=store export.format=exel",
    "job=probe store=store",
    "job=probe store=store probe.label_column=age",
    "job=neighbors store=store layers=pool neighbors.key=cat/01.jpg",
    "job=cka store=store cka.rows=0",
    "job=predict store=store data=folder data.root=DATA/photos out=predicted",
    f"{RUN} data.root=DATA/odd dtype=float32 max_failures=1.0",
    f"{RUN} data.root=DATA/odd data.limit=12 max_failures=1.0",
)
"""Mistakes, which end with exit code 2; the store was made of the images without labels."""

CASES = [
    *(
        Case(f"source-{name}", (f"{SMALL} layers=[conv,pool] out=store {options}",))
        for name, options in SOURCES.items()
    ),
    *(Case(name, steps) for name, steps in {**MODELS, **RUNS, **JOBS}.items()),
    Case("too-many-failures", (Step(f"{RUN} data.root=DATA/odd", 3),)),
    Case(
        "mistakes",
        (
            "$ mkdir empty",
            f"{RUN} data.root=DATA/odd max_failures=1.0",
            *(Step(line, 2) for line in WRONG),
        ),
    ),
    Case("ray", (f"{RUN} executor=ray executor.workers=2",)),
]

NEEDS = {
    "source-parquet": "pyarrow",
    "source-huggingface": "datasets",
    "source-slides": "openslide",
    "source-video": "ffmpeg",
    "source-odd-images": "odd-images",
    "transformers": "transformers",
    "open-clip": "open_clip",
    "packaged": "conformal_clip_data",
    "tensorboard": "tensorboard",
    "export": "zarr",
    "report": "sklearn",
    "ray": "ray",
}
"""Case -> module, program, or file of the inputs without which it is not run."""

VARIES = {
    # What the killed workers had read as of their last heartbeats.
    "kill-workers": ("*/summary.json:*bytes_read",),
}
"""Case -> values that differ between two runs of one checkout, as for `compare_folders`."""
