"""Rows of images nearest to texts, and the table of other stores, on the page of job=report."""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from probe_problem import blobs, write_store
from tiny_model import job_result, run_job, write_images

import featx
from featx.errors import ConfigError, DataError, FeatxError, StoreError

sys.path.append(str(REPOSITORY / "tests" / "models"))
from clip_zoo import write_folder

pytestmark = pytest.mark.usefixtures("in_tmp_path", "one_thread")


def section(name: str, store: str = "store", **options: Any) -> str:
    """Return a section of the page of the store, '' without it."""
    run_job("report", store=store, device="cpu", report={"tsne": False, **options})
    text = Path("store/report.html").read_text(encoding="utf-8")
    found = re.search(rf'(?s)<section id="{name}">.*?</section>', text)
    return "" if found is None else found.group()


def words_of(text: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).replace("\u202f", " ").split())


def test_rows_of_images_are_those_of_the_search(tmp_path: Path) -> None:
    photos, folder = write_images(tmp_path / "photos", 9), write_folder(tmp_path / "vit", "vit")
    model = {"library": "open_clip", "name": str(folder)}
    run_job("extract", model=model, layers=["embedding"], data=str(photos), precision="fp32",
            out="store")  # fmt: skip
    texts = ["a <b>dog</b>", "a red flower"]
    rows, cosines = featx.similarity.search("store", texts, k=6)
    keys = featx.open("store").keys
    Path("texts.txt").write_text("\n".join(texts))
    for given in (texts, "texts.txt"):
        found = section("texts", texts=given)
        assert "<b>dog" not in found
        for text, nearest, scores in zip(texts, rows, cosines, strict=True):
            strip = found[found.index(html.escape(text)) :]
            assert re.findall(r'title="([^"]*)"', strip)[:6] == [str(keys[row]) for row in nearest]
            assert re.findall(r">(-?\d\.\d{3})<", strip)[:6] == [f"{x:.3f}" for x in scores]
        assert found.count('<img class="pic" src="data:image/webp') == 12
    assert section("texts") == ""


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        ("a dog", StoreError, r"has no embedding, which texts are compared with"),
        ([" "], ConfigError, r"a text is empty"),
        ("no.txt", DataError, r"report\.texts=no\.txt cannot be read"),
    ],
)
def test_texts_are_refused_as_in_a_search(
    texts: Any, error: type[FeatxError], message: str
) -> None:
    x, y = blobs(20)
    write_store(Path("store"), y, x=x)
    with pytest.raises(error, match=message):
        section("texts", texts=texts)
    assert not Path("store/report.html").exists()


def test_the_table_of_other_stores_is_that_of_job_compare(tmp_path: Path) -> None:
    x, y = blobs(60)
    write_store(Path("store"), y, x=x)
    write_store(Path("other/store"), y, x=x[:, :4], wide=x)
    write_store(Path("few"), y[:40], x=x[:40])
    for store in ("store", "other/store"):
        run_job("probe", store=store, device="cpu")
    compared = job_result("compare", store="[store,few,other/store]")
    found = section("stores", store="[store,few,store,other/*]")
    rows = [words_of(row) for row in re.findall(r"(?s)<tr.*?</tr>", found)[1:]]
    assert [row.split()[0] for row in rows] == ["store", "few", "other/store"]
    for row, each in zip(rows, compared["stores"], strict=True):
        assert f" {each['rows']} {each['failed']} " in row
        if (probe := each["probe"]) is not None:
            low, high = (f"{100 * end:.1f}" for end in probe["interval"])
            expected = f"{probe['layer']} {100 * probe['value']:.1f} % {low} – {high}"  # noqa: RUF001
            assert expected in row
    assert len(compared["notes"]) == 2
    for note in compared["notes"]:
        assert note in html.unescape(found)
    assert str(tmp_path) not in found
    assert section("stores") == ""
    with pytest.raises(FeatxError, match="no store at"):
        section("stores", store="[store,nowhere]")
