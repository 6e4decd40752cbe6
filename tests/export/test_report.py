"""job=report: its page for stores of every kind, its promises, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from csv_rows import csv_rows
from made_store import make_added, make_labelled, make_run, temporary_files
from PIL import Image
from processes import killed_at_sync
from tiny_model import MODEL, extract, job_result, run_job, write_image, write_images

import featx
from featx.errors import ConfigError, LayerError, MissingExtraError, StoreError
from featx.export.report.html import as_json
from featx.types import TokenGeometry

pytestmark = pytest.mark.usefixtures("in_tmp_path")


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its text without scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.text += data

    @property
    def words(self) -> str:
        return " ".join(self.text.split()).replace("\u202f", " ")


def report(file: str = "store/report.html", **keys: Any) -> Elements:
    keys["report"] = {"tsne": False, **keys.get("report", {})}
    assert run_job("report", store="store", device="cpu", **keys) == 0
    return Elements(Path(file).read_text(encoding="utf-8"))


def data_of(file: str = "store/report.html") -> dict[str, Any]:
    text = Path(file).read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert found is not None
    values: dict[str, Any] = json.loads(found.group(1))
    return values


def test_norms_of_tokens() -> None:
    values = np.ones((9, 7, 3), np.float32)
    values[:, 0] = 5  # the class token
    values[2:5, 4] = 90  # the patch in the second row and the first column, in three images
    run = make_run(9, 8, {"blocks": (7, 3), "flat": (4,)})
    places = TokenGeometry(1, True, (2, 3), (32, 48))
    made = {"blocks": values, "flat": run.features["flat"]}
    replace(run, features=made, tokens={"blocks": places}).write(Path("store"))
    page = report()
    words = page.words[page.words.index("Norms of tokens") :]
    # Median, 99 % quantile, largest, threshold; share of the 54 patch tokens, and of the images.
    found = "1.732155.9155.91.7325.6 %33.3 %row 2, column 1class 8.66"
    assert found in words
    Path("store/report.html").unlink()
    report(layers="flat")
    assert "Norms of tokens" not in Path("store/report.html").read_text(encoding="utf-8")


def test_layers_without_norms_of_tokens_have_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(9, 8, {"blocks": (7, 3), "flat": (4,)})
    specs = tuple(replace(spec, reduce="none", reduce_args={}) for spec in run.specs)
    replace(run, specs=specs).write(Path("store"))
    page = report()
    reason = "no norms of tokens, as it is unknown which of its 7 tokens are patches"
    assert f"blocks: {reason}" in page.words
    assert f"blocks: {reason}" in " ".join(capsys.readouterr().err.split())
    assert page.words.count("no norms of tokens") == 1


def test_a_whole_store(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "cat" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    extract(photos, layers=["conv", "deep", "pool"], max_failures=2)
    run_job("probe", store="store", device="cpu", probe={"method": ["linear", "knn"], "shots": [2]})
    capsys.readouterr()
    page = report(report={"tsne": True})
    assert "file      " in capsys.readouterr().out
    assert "This store is not complete" not in page.text
    assert "1 of 22 rows failed" in page.words
    assert "Not decodable 1" in page.words
    assert "cat/broken.png" in page.text
    found = json.loads(Path("store/probe.json").read_text())
    assert f"{100 * found['accuracy']:.1f}%" in page.words
    assert f"{found['correct']} of {found['rows']} test images" in page.words
    assert "exact McNemar test" in page.words
    data = data_of()
    assert [each["name"] for each in data["layers"]] == ["conv", "deep", "pool"]
    assert data["best"] == found["layer"]
    assert len(data["rows"]) == 21
    assert sorted(data["sprite"]["place"]) == list(range(21))
    assert data["sprite"]["uri"].startswith("data:image/webp;base64,")
    assert data["keys"][0] == "cat/000.png"
    assert sum(role == 3 for role in data["roles"]) == found["rows"]
    # Nothing of it comes from anywhere else.
    for tag, attributes in page.found:
        assert tag not in ("link", "iframe", "object", "base")
        for name in ("src", "href", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), (tag, value)
    policy = next(a["content"] for _, a in page.found if a.get("http-equiv"))
    assert "default-src 'none'" in str(policy)
    assert "unsafe-inline" not in str(policy).partition("script-src")[2]


@pytest.mark.slow
def test_the_errors_are_those_of_the_predictions(photos: Path) -> None:
    for i in range(40):  # images of noise, so that some are predicted wrong
        write_image(photos / ("cat", "dog")[i * 7 % 5 % 2] / f"noise{i}.png", 200 + i)
    extract(photos)
    run_job("probe", store="store", device="cpu", probe={"test_share": 0.4})
    page = report()
    rows = csv_rows("store/probe/predictions.csv", split="test")
    wrong = [row for row in rows if row["true"] != row["predicted"]]
    wrong.sort(key=lambda row: -float(row["p_predicted"]))
    assert wrong
    shown = [found for tag, found in page.found if tag == "li" and "data-true" in found]
    assert [(each["data-true"], each["data-predicted"]) for each in shown] == [
        (row["true"], row["predicted"]) for row in wrong[:24]
    ]
    data = data_of()
    (layer,) = data["layers"]
    assert {data["keys"][int(place)] for place in layer["wrong"]} == {row["key"] for row in wrong}
    for row in wrong[:24]:
        assert f"{float(row['p_predicted']):.2f}" in page.words
    # Predictions of another probe are not mixed with the numbers of this one.
    Path("store/probe/predictions.csv").write_text("layer,method\n")
    assert "predictions.csv is missing or belongs to another probe" in report().words


@pytest.mark.slow
def test_the_page_names_no_folder(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (photos / "cat" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    extract(photos, out=str(tmp_path / "store"), max_failures=2)
    run_job("probe", store="store", device="cpu")
    report()
    text = re.sub(r"data:image/webp;base64,[\w+/=]+", "", Path("store/report.html").read_text())
    for folder in (tmp_path, Path.home(), Path.cwd(), Path(__file__).parent):
        assert str(folder) not in text
    assert re.findall(r"(?:/home|/tmp|/work|/root|/usr|/var)/\w+", text) == []
    photos.rename(tmp_path / "elsewhere")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)  # as in a container without users
    assert "No such file or directory: b'…/photos'" in report().words
    assert str(tmp_path) not in Path("store/report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("folds", [None, 5], ids=["holdout", "kfold"])
def test_near_duplicates_across_the_split_come_first(folds: int | None) -> None:
    x = np.random.default_rng(0).normal(size=(60, 70)).astype(np.float32)
    for first, second in ((1, 40), (2, 33), (5, 58), (10, 20)):
        x[second] = x[first] + 0.01
    run = make_labelled({"flat": x}, np.arange(60) % 2, ("a", "b"))
    run.write(Path("store"), packed=True)
    run_job("probe", store="store", device="cpu", probe={"folds": folds})
    near = json.loads(Path("store/probe.json").read_text())["near_duplicates"]
    assert near["rows"] >= 1
    words = report().words
    assert "standardised vectors of flat: 4 among 60 images" in words
    pairs = {frozenset((each["test"], each["training"])) for each in near["pairs"]}
    assert words.count(", across the split") == len(pairs)
    for pair in pairs:
        for key in pair:
            assert key in words
    assert f"Without {'it' if near['rows'] == 1 else 'them'} the accuracy is" in words


@pytest.mark.parametrize(
    ("probe", "expected"),
    [
        pytest.param({"method": "ridge"}, "A ridge probe gives none.", marks=pytest.mark.slow),
        pytest.param(
            {"method": "knn"},
            "Test accuracy of the knn probe on the chosen layer",
            marks=pytest.mark.slow,
        ),
        pytest.param({"memory_gib": 0.0}, "Not checked", marks=pytest.mark.slow),
        ({"folds": 2}, "every image is tested once"),
        ({"test_store": "other"}, "40 test images"),
    ],
)
def test_every_kind_of_probe(probe: dict[str, Any], expected: str) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    layers = {"a": rng.normal(size=(60, 8)) + y[:, None], "b": rng.normal(size=(60, 70))}
    make_labelled(layers, y, ("x", "y", "z")).write(Path("store"), packed=True)
    others = {name: values[:40] + 0.1 for name, values in layers.items()}
    other = make_labelled(others, y[:40], ("x", "y", "z")).changed(other=1)
    other.write(Path("other"), packed=True)
    run_job("probe", store="store", device="cpu", probe=probe)
    words = report().words
    assert expected in words
    found = json.loads(Path("store/probe.json").read_text())
    assert f"{found['correct']} of {found['rows']} test images" in words
    assert "kNN" not in words  # which is a second method, if there is one


@pytest.mark.slow
def test_the_page_of_500_images_is_small(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(500):
        # Structure of all sizes, which is harder to compress than photos.
        path = tmp_path / "photos" / f"class{i % 10}" / f"{i:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8))
        small.resize((320, 240), Image.Resampling.BICUBIC).save(path)
    extract(tmp_path / "photos", layers=["conv", "deep", "pool"])
    run_job("probe", store="store", device="cpu")
    page = report(report={"tsne": True})
    assert "500 of 500 images" in page.words
    assert Path("store/report.html").stat().st_size < 1_500_000


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    root = tmp_path / "photos"
    evil = "<script>alert(1)<"
    for i in range(6):
        write_image(root / evil / f'"><img src=x onerror=alert({i})>.png', i)
        write_image(root / "</script><b>" / f"{{{{ 7*7 }}}}&amp;{i}.png", i + 6)
    (root / evil / "<svg onload=alert(9)>.jpg").write_text("no image")
    extract(root, max_failures=2)
    run_job("probe", store="store", device="cpu")
    page = report()
    kinds = [tag for tag, _ in page.found]
    assert kinds.count("script") == 3
    assert not any("onload" in found for tag, found in page.found if tag == "svg")
    assert not any(name.startswith("on") for _, found in page.found for name in found)
    assert "<svg onload=alert(9)>.jpg" in page.text
    assert "<script>alert(1)<" in page.text
    assert "{{ 7*7 }}" in page.text
    assert evil in data_of()["classes"]


def test_as_json_cannot_end_its_element() -> None:
    text = as_json({"</script>": "<!-- & \u2028 ]]>"})
    assert "<" not in text
    assert "&" not in text
    assert text.isascii()
    assert json.loads(text) == {"</script>": "<!-- & \\u2028 ]]>"}


def test_secrets_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "swordfish")
    keys = {"hang": "${oc.env:MY_TOKEN}"}
    root = write_images(Path(f"{'confidential ' * 8}folder", "photos").absolute(), 4)
    extract(root, model={**MODEL, "args": keys})
    assert "oc.env:MY_TOKEN" in report().text, "as the store keeps it"
    text = Path("store/report.html").read_text(encoding="utf-8")
    assert "swordfish" not in text
    assert "confidential" not in text


@pytest.mark.slow
def test_without_labels_and_without_thumbnails(tmp_path: Path) -> None:
    root = write_images(tmp_path / "photos")
    for path in list(root.glob("*/*.png")):
        path.rename(root / path.name)
    extract(root)
    root.rename(tmp_path / "elsewhere")
    page = report()
    assert "No row has a label." in page.text
    assert "There are no thumbnails: none of 21 images can be read now" in page.words
    assert data_of()["sprite"]["uri"] == ""
    page = report(data={"name": "folder", "root": str(tmp_path / "elsewhere")})
    assert "21 images were read again" in page.words


@pytest.mark.slow
def test_a_table_that_went_and_an_odd_folder(photos: Path) -> None:
    keys = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))
    table = photos / "photos.csv"
    table.write_text("\n".join(["path,label", *(f"{key},{key[:3]}" for key in keys)]))
    odd = os.fsdecode(b"st\xffre")
    extract({"name": "table", "root": str(table)}, out=odd)
    assert run_job("report", store=odd, device="cpu", out="p.html", report={"tsne": False}) == 0
    assert "21 images were read again" in Elements(Path("p.html").read_text("utf-8")).words
    table.unlink()
    assert run_job("report", store=odd, device="cpu", out="p.html", report={"tsne": False}) == 0
    page = Elements(Path("p.html").read_text("utf-8"))
    assert "There are no thumbnails: data.root=…/photos.csv" in page.words
    assert "st\\xffre" in page.text


@pytest.mark.slow
def test_images_that_went_are_counted(photos: Path) -> None:
    extract(photos)
    (photos / "cat" / "000.png").unlink()
    (photos / "cat" / "006.png").write_bytes(b"no image any more")
    words = report(report={"thumbnails": 40}).words
    assert "1 image could not be read now" in words
    assert "1 image cannot be decoded now: cat/006.png." in words
    data = data_of()
    gone, damaged = (str(data["keys"].index(f"cat/{name}.png")) for name in ("000", "006"))
    assert data["unread"] == {gone: "cannot be read", damaged: "cannot be decoded"}
    assert [data["sprite"]["place"][int(place)] for place in (gone, damaged)] == [-1, -1]
    assert "leaves them out" in report(report={"thumbnails": 0}).words
    page = report(report={"thumbnails": 5})
    assert "5 images were read again" in page.words
    assert "points of the embedding plot beyond that have none" in page.words


def test_the_page_of_boxes_says_of_how_many_images_they_are() -> None:
    x = np.random.default_rng(0).normal(size=(30, 8))
    run = make_labelled({"x": x}, np.arange(30) % 2, ["a", "b"], failed=[4])
    keys = np.array([b"%02d.jpg#%d,0,9,9" % divmod(i, 3) for i in range(30)])
    replace(run, listing=replace(run.listing, keys=keys)).write(Path("store"))
    assert run_job("outliers", store="store", device="cpu") == 0
    words = report(report={"thumbnails": 0}).words
    assert "The rows are boxes, views or frames of 10 images; this page calls each" in words
    assert "to the 10 nearest rows of another image, the farthest first" in words


@pytest.mark.parametrize("parts", [[], [0], [0, 2]])
def test_an_incomplete_store_says_so_loudly(
    parts: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(60, 16, failed=[3])
    with run.session(Path("store")).hold():
        pass
    run.write(Path("store"), parts=parts)
    page = report()
    assert "is not complete" in capsys.readouterr().err
    missing = 60 - sum(len(run.grid.part(i)) for i in parts)
    assert f"This store is not complete. {missing} of 60 rows are not there yet." in page.words
    assert len(data_of()["rows"]) == max(0, 16 * len(parts) - (1 if parts else 0))


def test_layers_that_are_being_added() -> None:
    run = make_run(60, 16).identified()
    run.finish(Path("store"))
    make_added(run, {"later": (4,)}, part_rows=16).finish(Path("store"), at_most=1)
    page = report()
    assert "Layers are being added and are shown when they are complete: later." in page.words
    assert [each["name"] for each in data_of()["layers"]] == ["flat", "map"]


def test_parts_and_a_sample_of_rows() -> None:
    make_run(60, 16).write(Path("store"))
    page = report(report={"rows": 20}, seed=5)
    assert "20 random images of 60 (seed 5)" in page.words
    assert "4 parts, not packed" in page.words
    data = data_of()
    assert len(data["rows"]) == 20
    assert data["layers"][0]["tsne"] is None
    report(report={"rows": 20}, seed=5)
    assert data_of()["rows"] == data["rows"]
    report(report={"rows": 20}, seed=6)
    assert data_of()["rows"] != data["rows"]


def test_of_many_layers_the_last_are_plotted() -> None:
    run = make_run(12, 16, {f"layer{i}": (3,) for i in range(10)})
    run.write(Path("store"), packed=True)
    page = report()
    assert "8 of 10 layers have an embedding plot" in page.words
    assert [each["name"] for each in data_of()["layers"]] == [f"layer{i}" for i in range(2, 10)]
    assert page.text.count("Standard") == 1
    assert all(f"layer{i}" in page.text for i in range(10))
    report(layers="layer3")
    assert [each["name"] for each in data_of()["layers"]] == ["layer3"]


@pytest.mark.parametrize("failed", [range(7), range(8)])
def test_hardly_a_row_is_ok(failed: range) -> None:
    make_run(8, failed=failed).write(Path("store"))
    page = report()
    assert f"{len(failed)} of 8 rows failed" in page.words
    assert "There are not two ok rows to compare." in page.text


def test_a_file_alone() -> None:
    make_run(12).write(Path("made"), packed=True)
    Path("made/features.h5").rename("alone.h5")
    assert run_job("report", store="alone.h5", device="cpu", report={"tsne": False}) == 0
    assert "A single file records no times" in Path("report.html").read_text()


@pytest.mark.parametrize(
    ("folder", "title"), [("runs/birds/toy", "birds/toy"), ("runs/first", "first")]
)
def test_the_title_of_a_folder_with_the_name_of_the_model(folder: str, title: str) -> None:
    make_run(5).write(Path(folder))  # runs/DATA/MODEL is the default of `out`
    assert run_job("report", store=folder, device="cpu", report={"tsne": False}) == 0
    assert f"<title>{title}: a report of featx</title>" in Path(folder, "report.html").read_text()


def test_where_it_goes() -> None:
    make_run(12).copied(Path("store"))
    report("folder/report.html", out="folder")
    report("page.html", out="page.html")
    report("page.html", out="page.html")  # its own page is written anew
    Path("mine.html").write_text("<p>mine")
    with pytest.raises(StoreError, match=r"mine\.html exists and is no report"):
        report(out="mine.html")
    assert Path("mine.html").read_text() == "<p>mine"
    with pytest.raises(StoreError, match="cannot"):
        report(out="mine.html/page.html")
    Path("taken.html").mkdir()
    with pytest.raises(StoreError, match="is a folder"):
        report(out="taken.html")
    with pytest.raises(ConfigError, match=r"page\.pdf: the report is HTML"):
        report(out="page.pdf")


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(12).copied(Path("store"))
    with pytest.raises(LayerError, match="flot"):
        report(layers="flot")
    with pytest.raises(ConfigError, match="needs store=DIR"):
        run_job("report")
    with pytest.raises(ConfigError, match="expected a whole number from 10 to 10000"):
        report(report={"rows": 9})
    with pytest.raises(ConfigError, match="overwrite has no effect"):
        report(overwrite=True)
    with pytest.raises(ConfigError, match="job=report only"):
        run_job("neighbors", store="store", report={"rows": 20})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'scikit-learn: pip install "featx\[report'):
        report(report={"tsne": True})
    report()


@pytest.mark.slow
def test_from_python_and_as_json() -> None:
    make_run(12).copied(Path("store"))
    assert (
        featx.write_report(store="store", out="p.html", device="cpu", report={"tsne": False})
        == Path("p.html").absolute()
    )
    found = job_result("report", store="store", device="cpu", report={"tsne": False})
    assert found["rows_used"] == 12
    assert found["complete"] is True
    assert found["bytes"] == Path("store/report.html").stat().st_size


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_report_leaves_nothing_for_ever() -> None:
    make_run(9, 8).write(Path("store"), packed=True)
    killed_at_sync("from test_report import report; report()", "report.html")
    assert len(temporary_files(Path("store"))) == 1
    report()
    assert temporary_files(Path("store")) == []


@pytest.mark.slow
def test_a_million_rows() -> None:
    run = make_run(1_000_000, 1 << 18, {"flat": (8,)}, dtype="float16", failed=range(0, 999, 3))
    run.write(Path("store"), packed=True)
    page = report(report={"rows": 500})
    assert "500 random images of 999 667 (seed 0)" in page.words
    assert "among all 999 667 images" in page.words
    assert Path("store/report.html").stat().st_size < 1 << 20


def images_of_errors() -> list[str]:
    """Elements that stand for misclassified images: 'img', or the text in its place."""
    text = Path("store/report.html").read_text(encoding="utf-8")
    section = text.split('<section id="errors">')[1].split("</section>")[0]
    found = re.findall(
        r'<img class="pic" src="data:image/webp|<span class="pic none">([^<]*)', section
    )
    return [without or "img" for without in found]


@pytest.mark.slow
def test_errors_of_another_store_show_their_images(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extract(photos)
    (tmp_path / "tests").mkdir()
    for number, path in enumerate(sorted((photos / "cat").glob("*.png"))[:4]):
        target = tmp_path / "tests" / ("dog" if number % 2 else "cat") / path.name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())
    extract(tmp_path / "tests", out="other")
    run_job("probe", store="store", device="cpu", probe={"test_store": "other"})
    tested = csv_rows("store/probe/predictions.csv", split="test")
    errors = [line for line in tested if line["true"] != line["predicted"]]
    assert errors
    report()
    assert images_of_errors() == ["img"] * len(errors)
    assert str(tmp_path) not in Path("store/report.html").read_text(encoding="utf-8")
    report(report={"thumbnails": 0})
    assert images_of_errors() == ["no image"] * len(errors)
    capsys.readouterr()
    path = Path("store/probe.json")
    written = path.read_text()
    for name in ("https://example.org/store", "s3://bucket/store", "gone"):
        found = json.loads(written)
        found["split"]["test_store"] = name
        del found["sha256"]  # of the content before
        path.write_text(json.dumps(found))
        report()
        assert images_of_errors() == ["no image"] * len(errors)
        assert "no thumbnails of probe.test_store" in capsys.readouterr().err
