"""The documentation: its site is whole, its commands are commands, and they run as they stand."""

from __future__ import annotations

import contextlib
import json
import re
import runpy
import shlex
import socket
import sys
import tarfile
import threading
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import REPOSITORY, make_image, run_python, slow_except
from object_server import environment, rows_of, running_server, upload
from tiny_model import write_images

import featx
from featx import __main__ as command
from featx import jobs
from featx.base import shipped_folder
from featx.cli import read_command_line, register_with_hydra
from featx.config import described_options, from_composed
from featx.models import read_catalogue
from featx.storage import s3_client

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]

FIRST_PAGES = [
    REPOSITORY / "README.md",
    *(REPOSITORY / "docs" / f"{name}.md" for name in ("quick-start", "tutorial", "models", "data")),
]
"""Pages that a newcomer reads."""

NOT_RUN = {
    "model.init=reset": "weights that the library has to download",
    "https://": "a server",
    "experiment=my_run": "weights of a library; tests/cli/test_experiments.py has experiments",
    "s3://": "a bucket",
    "/mnt/photos": "a disk of somebody's",
    "CIFAR10": "a data set that torchvision has to download",
    "data=huggingface": "a data set of the Hub; tests/sources/test_huggingface_source.py makes one",
    "data=video": "FFmpeg; tests/sources/test_video_source.py makes videos",
    "store=runs/clip": "weights of a CLIP model; tests/jobs/test_zeroshot.py makes some",
    "out=runs/clip": "weights of a CLIP model; tests/models/test_transformers_texts.py makes some",
    "name: pca, stats: runs/x": "a fragment, for whichever model has layer4",
    "model.golden=": "a file of the user's code; tests/models/test_golden.py runs the example",
    "data.root=slides": "whole-slide images; tests/sources/test_slides_source.py makes some",
    "store=runs/slides": "tiles of slides; tests/export/test_peer_formats.py reads such exports",
    "export.index=IVF1024": "thousands of rows; tests/export trains smaller indices",
    "probe.masks=": "masks; tests/jobs/test_probe_masks.py makes some",
    "executor.workers=": "several processes; tests/pipeline has them",
    "executor=": "a cluster; tests/pipeline runs the same path on this machine",
    "runs/textile ": "the tutorial, which has a test of its own",
    "=runs/textile": "the tutorial, which has a test of its own",
}
"""Commands that are composed but not run: a piece of them, and what they need."""


def name_of(page: Path) -> str:
    """README, or the path below docs without its ending, such as 'reference/jobs'."""
    if page.name == "README.md":
        return "README"
    return page.relative_to(REPOSITORY / "docs").with_suffix("").as_posix()


def commands_of(page: Path) -> list[str]:
    """The commands on a page as one types them: in blocks, and between backticks.

    Those with dots, MODEL or NAME stand for others.
    """
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^(?: {4}|\$ )(?:.*&& )?(python -m featx\b.*?)(?:  +#.*)?$", text, re.M)
    inline = re.findall(r"`(python -m featx [^`]*)`", text)
    lines = [" ".join(line.split()) for line in (*blocks, *inline)]
    return [line for line in lines if not re.search(r"\.\.\.|\b(MODEL|NAME)\b", line)]


def overrides_of(line: str) -> list[str]:
    return [word for word in shlex.split(line)[3:] if not word.startswith("-")]


def snippets_of(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def write_experiments(page: Path) -> None:
    """Write the experiments of a page, YAML blocks that begin with the name of their file, here."""
    text = page.read_text(encoding="utf-8")
    for name, text_of_file in re.findall(r"^```yaml\n# (conf/\S+)\n(.*?)^```", text, re.M | re.S):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text_of_file, encoding="utf-8")


@pytest.mark.parametrize(
    "page",
    slow_except([page for page in PAGES if commands_of(page)], *FIRST_PAGES),
    ids=name_of,
)
def test_every_command_is_one(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra import compose, initialize_config_dir

    monkeypatch.chdir(tmp_path)
    write_experiments(page)
    register_with_hydra(jobs.JOBS)
    lines = commands_of(page)
    with initialize_config_dir(str(shipped_folder("conf")), version_base="1.3"):
        for line in lines:
            if "--" in line:
                continue
            overrides = [re.sub(r"^(model=\w+),.*", r"\1", word) for word in overrides_of(line)]
            read = read_command_line(overrides)
            config = from_composed(compose("config", read.arguments))
            jobs.check(config, read.given)
            assert config.job.name == next(
                (word[4:] for word in overrides if word.startswith("job=")), "extract"
            )


def test_shells_take_every_command_as_it_stands() -> None:
    """zsh looks for files that match an unquoted `[` or `*`, and bash expands `{a,b}`."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    lines = re.findall(r"^(?: {4}|\$ )?(python -m featx\b.*?)(?:  +#.*)?$", text, re.M)
    lines += re.findall(r"`(python -m featx [^`]*)`", text)
    unquoted = {line: re.sub(r"'[^']*'|\"[^\"]*\"", "", line) for line in lines}
    assert [line for line, rest in unquoted.items() if re.search(r"[\[\]*?{}]", rest)] == []


def test_every_extra_that_is_named_exists() -> None:
    """pip itself only warns of an extra that it does not know."""
    texts = [*PAGES, *(REPOSITORY / "featx").rglob("*.py")]
    named = {
        extra
        for path in texts
        for extras in re.findall(r"(?:featx|\"\.)\[([a-z,]+)\]", path.read_text(encoding="utf-8"))
        for extra in extras.split(",")
    }
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert {"demo", "transformers", "export"} <= named
    assert named <= set(project["project"]["optional-dependencies"])


def test_pages_have_commands() -> None:
    """The patterns above find them: no page is silently left out."""
    counts = {name_of(page): len(commands_of(page)) for page in PAGES}
    assert counts["tutorial"] == 8
    assert counts["data"] == 20
    assert counts["report"] == 5
    assert counts["README"] >= 6
    every = "\n".join(line for page in PAGES for line in commands_of(page))
    for piece in NOT_RUN:
        assert piece in every, f"{piece!r} is in no command any more"


def test_the_pages_made_from_the_code_are_as_the_code_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts")
    script = runpy.run_path(str(REPOSITORY / "scripts" / "reference"))
    pages = script["pages"]()
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, f"{path} is stale: run scripts/reference"
    written = "".join(text for path, text in pages.items() if path.parent.name == "options")
    for option in described_options():
        assert f"| `{option.name}` | {option.type_text} |" in written
    assert set((REPOSITORY / "docs" / "reference" / "options").glob("*.md")) < set(pages)
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_page_of_models_is_as_the_catalogue_is() -> None:
    """tests/models/test_catalogue.py compares the catalogue with models that are built."""
    page = (REPOSITORY / "docs" / "backbones.md").read_text(encoding="utf-8")
    timm = [entry for entry in read_catalogue().entries if entry.library == "timm"]
    names, weights = {entry.name for entry in timm}, [entry for entry in timm if entry.tag]
    assert f"{len(names):,} architectures of timm with {len(weights):,} sets of\nweights" in page
    for library, version in read_catalogue().versions.items():
        assert f"{library} {version}" in page


def test_the_reference_has_every_name() -> None:
    pytest.importorskip("mkdocs", reason="no mkdocs: featx[docs] has it")
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    try:
        import docs_hook
    finally:
        sys.path.pop(0)
    assert "::: featx.write_report" in docs_hook.python_page()


@pytest.mark.slow
def test_the_site_is_whole(tmp_path: Path) -> None:
    """Every page is in the contents, every link leads somewhere, every name has its docstring."""
    run_python("-m", "mkdocs", "build", "--strict", "-q", "-d", tmp_path / "site", cwd=REPOSITORY)
    pages = {path.parent.name for path in (tmp_path / "site").rglob("index.html")}
    assert {page.stem for page in PAGES[1:]} - {"index"} <= pages
    assert "python" in pages
    names = (tmp_path / "site" / "reference" / "python" / "index.html").read_text("utf-8")
    assert "whether every row of the listing is there" in names
    experiments = (tmp_path / "site" / "experiments" / "index.html").read_text("utf-8")
    assert experiments.count("<table data-stacked>") == 1, "cells below each other on a phone"
    assert experiments.count('<td data-label="options">') == 3
    plugins = (tmp_path / "site" / "plugins" / "index.html").read_text("utf-8")
    assert "command highlight" in plugins, "commands wrap, also those in the language sh"
    fetched = re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?))"', names)
    assert fetched == [], "the site asks no other server for anything"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with everything that the pages speak of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("photos", "new", "theirs", "imagenet/train"):
        write_images(tmp_path / name, 24)
    for i in range(8):
        make_image(120, 100, seed=i).save(tmp_path / "photos" / "cat" / f"{i:03d}.jpg")
    Path("names.json").write_text(json.dumps({"cat": "Katze", "dog": "Hund"}))
    keys = sorted(str(path) for path in Path("photos").rglob("*.png"))
    lines = [f"{key},{Path(key).parent.name}" for key in keys]
    Path("photos.csv").write_text("\n".join(["path,label", *lines]) + "\n")
    of_excel = [f"{key};Größe{Path(key).parent.name}" for key in keys]
    Path("defects.csv").write_text("\n".join(["Dateiname;Fehlerklasse", *of_excel]), "utf-8-sig")
    below_root = [line.removeprefix("photos/") for line in of_excel]
    Path("latin.csv").write_text("\n".join(["path;label", *below_root]), "cp1252")
    Path("shards").mkdir()
    for number in range(13):
        with tarfile.open(f"shards/train-{number:03d}.tar", "w") as tar:
            tar.add(keys[number], f"{number:03d}.png")
    pixels = np.random.default_rng(0).integers(0, 256, (12, 40, 40, 3), np.uint8)
    with h5py.File("photos.h5", "w") as file:
        file["images"], file["labels"] = pixels, np.arange(12) % 2
    import pyarrow
    import pyarrow.parquet

    table = {"image": [Path(key).read_bytes() for key in keys], "label": [0, 1] * (len(keys) // 2)}
    pyarrow.parquet.write_table(pyarrow.table(table), "train-00000-of-00001.parquet")
    return tmp_path


PHOTOS = "data=folder data.root=photos model=resnet18 layers=[avgpool] out=runs/photos"
"""Makes the store that pages call runs/photos, unless they make it themselves."""

MADE_FIRST = {
    "export": [
        PHOTOS.replace("[avgpool]", "[embedding,avgpool]"),
        PHOTOS.replace("[avgpool]", "[embedding]").replace("runs/photos", "runs/places"),
    ],
    "reference/options/cka": [PHOTOS.replace("[avgpool]", "[layer4,avgpool]")],
    "similarity": [
        "data=folder data.root=photos model=resnet18 'layers={layer4: avg, avgpool: flatten}' "
        "out=runs/photos",
        "data=folder data.root=theirs model=resnet18 'layers={layer4: avg}' out=runs/other",
    ],
    "report": [
        "data=folder data.root=photos model=resnet18 'layers={layer3: avg, layer4: avg}' "
        "out=runs/photos"
    ],
    "scaling": [
        "data=folder data.root=photos model=resnet18 layers=[avgpool] out=runs/photos/resnet50"
    ],
    "statistics": [
        PHOTOS,
        "job=stats data.limit=300 out=runs/x",
        "job=stats data=folder data.root=photos out=runs/ours",
    ],
}
"""Stores that a page takes for granted."""


FILES = ("dino.pth", "mine.pth")
"""Files of weights that docs/models.md speaks of."""

MODELS = ("model.name=net.pt2", "model.name=clone")
"""Options that name a program and a checkout, which docs/models.md speaks of."""


def write_weights() -> None:
    """Write weights of a teacher and a student and of a fine-tuned model, a program, a checkout."""
    import timm
    import torch
    import torchvision

    nets = {name: timm.create_model("test_vit").state_dict() for name in ("student", "teacher")}
    behind = {name: {f"backbone.{k}": x for k, x in net.items()} for name, net in nets.items()}
    tuned = torchvision.models.mobilenet_v3_large(num_classes=5).state_dict()
    for name, state in zip(FILES, (behind, tuned), strict=True):
        torch.save(state, name)
    snippets = snippets_of(REPOSITORY / "docs" / "models.md")
    (program,) = [snippet for snippet in snippets if "torch.export.save" in snippet]
    exec(program, {})
    Path("clone").mkdir()
    Path("clone/hubconf.py").write_text(
        "import timm, torch\n\ndef small(pretrained=False):\n    torch.manual_seed(0)\n"
        "    return timm.create_model('test_resnet')\n"
    )


def run(line: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The command in this process, with random weights and few images."""
    words = shlex.split(line)
    job = next((word[4:] for word in words if word.startswith("job=")), "extract")
    computes = job in ("extract", "plan", "stats", "attribute", "layers") and "store=" not in line
    has_file = any(f"model.weights={name}" in words for name in FILES)
    has_file = has_file or any(name in words for name in MODELS)
    if computes and not has_file and any(word.startswith("model=") for word in words):
        words += [] if "model.weights=null" in line else ["model.weights=null"]
    if computes and job != "layers":
        words += [] if "precision=" in line else ["precision=fp32"]
        if job == "extract" and "dtype=" not in line:
            words.append("dtype=float32")  # random weights may give what float16 does not hold
        if "data.limit" not in line:
            words.append(f"data.limit={4 if job == 'attribute' else 32}")  # both classes
    monkeypatch.setattr(sys, "argv", ["featx", *words])
    return command.run_command()


@pytest.mark.usefixtures("restored_console")
@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if not name_of(page).startswith("tutorial")
        and name_of(page) not in ("index", "performance")
    ],
    ids=name_of,
)
def test_every_command_runs(
    page: Path, world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line for line in commands_of(page) if not any(piece in line for piece in NOT_RUN)]
    made = MADE_FIRST.get(name_of(page), [])
    if any(name in line for line in lines for name in FILES):
        write_weights()
    asked = "store=runs/photos" in "\n".join(lines)
    if asked and not any("out=runs/photos" in line for line in (*made, *lines)):
        made = made or [PHOTOS]
    first = [f"python -m featx {line}" for line in made]
    for line in [*first, *lines]:
        words = line.removeprefix("python -m featx").strip()
        if "neighbors.key=cat/001.jpg" in words:
            words = words.replace("cat/001.jpg", "cat/000.png")
        if words.startswith("-"):
            continue  # --help and -m end or fork Hydra; test_command.py has them
        # Pages show several commands on one folder, which resume one another or differ.
        if "out=" not in words and not re.search(r"job=(?!attribute|stats)", words):
            words += " overwrite=true"
        assert run(words, monkeypatch) == 0, f"{line}\n{capsys.readouterr().err[-2000:]}"


@pytest.mark.usefixtures("restored_console")
@pytest.mark.slow
def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first line to an answer of the server, in the order of the page, word by word."""
    pytest.importorskip("conformal_clip_data", reason="the images come with featx[demo]")
    monkeypatch.chdir(tmp_path)
    page = REPOSITORY / "docs" / "tutorial.md"
    images, marked, server = snippets_of(page)
    exec(images, {})
    assert len(list(Path("photos").rglob("*.jpg"))) == 240
    for line in commands_of(page):
        monkeypatch.setattr(sys, "argv", ["featx", *shlex.split(line)[3:]])
        assert command.run_command() == 0, line
    assert 200_000 < Path("textile.html").stat().st_size < 1_500_000
    output: list[str] = []
    exec(marked, {"print": output.append})
    right = int(output[0].split()[0])
    assert output[0].endswith("of 60 right")
    assert right > 35, "a third of them is right by chance"
    with answering(server) as port:
        good = ask(port, Path("new/local").glob("*.jpg").__next__().read_bytes())
        bad = ask(port, b"no image")
    assert good["class"] in ("global", "local", "nominal")
    assert good["status"] == "ok"
    assert bad == {"class": None, "probability": None, "status": "unsupported"}


@pytest.mark.slow
def test_the_tutorial_of_a_table_and_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the table to the exported rows, in the order of the page, word by word."""
    pytest.importorskip("conformal_clip_data", reason="the images come with featx[demo]")
    pytest.importorskip("pyarrow", reason="featx[parquet] writes Parquet")
    monkeypatch.chdir(tmp_path)
    page = REPOSITORY / "docs" / "tutorial-report.md"
    table, reading = snippets_of(page)
    exec(table, {})
    lines = commands_of(page)
    assert len(lines) == 6
    for line in lines:
        monkeypatch.setattr(sys, "argv", ["featx", *shlex.split(line)[3:]])
        assert command.run_command() == 0, line
    assert 200_000 < Path("rolls.html").stat().st_size < 1_500_000
    probe = json.loads(Path("runs/rolls/probe.json").read_text())
    assert probe["split"]["groups"]["by"] == "roll"
    printed: list[str] = []
    exec(reading, {"print": lambda *values: printed.append(" ".join(map(str, values)))})
    assert printed[0].startswith("240 rows")
    assert "roll" in printed[0]


@pytest.mark.slow
def test_the_tutorial_of_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine and against an S3 server; tests/integration has a real Slurm."""
    pytest.importorskip("conformal_clip_data", reason="the images come with featx[demo]")
    monkeypatch.chdir(tmp_path)
    page = REPOSITORY / "docs" / "tutorial-cluster.md"
    shards, reading = snippets_of(page)
    exec(shards, {})
    lines = commands_of(page)
    assert len(lines) == 8
    with running_server(tmp_path / "moto.log") as url:
        for name, value in environment(url).items():
            monkeypatch.setenv(name, value)
        s3_client.client.cache_clear()  # of a server that an earlier test used
        s3_client.request("create_bucket", Bucket="bucket")
        upload(Path("shards"), "s3://bucket/train")
        for line in lines:
            if "executor=slurm" in line and "mode=local" not in line:
                continue
            run_python(*shlex.split(line)[1:], path=[REPOSITORY])
        printed: list[str] = []
        exec(reading, {"print": lambda value: printed.append(str(value))})
    s3_client.client.cache_clear()
    assert "48 rows, 48 ok, 3 classes, complete" in printed[0]
    local, slurm = (rows_of(featx.open(f"runs/{name}")) for name in ("shards", "slurm"))
    assert local == slurm


@pytest.mark.slow
def test_the_notebook(tmp_path: Path) -> None:
    """Every cell runs in an empty folder, and shows what the committed outputs show."""
    pytest.importorskip("nbclient", reason="no nbclient: featx[dev] has it")
    pytest.importorskip("conformal_clip_data", reason="the images come with featx[demo]")
    script = runpy.run_path(str(REPOSITORY / "scripts" / "notebook"))
    committed = json.loads(script["NOTEBOOK"].read_text(encoding="utf-8"))
    assert script["NOTEBOOK"].stat().st_size < 300_000
    shown, before = (
        [output for cell in cells for output in cell.get("outputs", ())]
        for cells in (script["executed"](tmp_path).cells, committed["cells"])
    )
    text = json.dumps(shown)
    assert "2000 rows, 2000 ok, 3 classes, complete" in text
    assert "2000/2000" in text
    assert "report.html" in text
    assert [sorted(each.get("data", ())) for each in shown if "data" in each] == [
        sorted(each["data"]) for each in before if "data" in each
    ]


@contextlib.contextmanager
def answering(server: str) -> Iterator[int]:
    """The server of the page on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    assert "8000), Answers" in server
    found: dict[str, Any] = {"__name__": "server", "print": lambda line: None}
    exec(server.replace("8000), Answers", f"{port}), Answers").replace(
        "server.serve_forever()", ""), found)  # fmt: skip
    found["Answers"].log_message = lambda *arguments: None
    thread = threading.Thread(target=found["server"].serve_forever)
    thread.start()
    try:
        yield port
    finally:
        found["server"].shutdown()
        thread.join()
        found["server"].server_close()


def ask(port: int, image: bytes) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}", image, timeout=300) as answer:
        found: dict[str, Any] = json.load(answer)
    return found
