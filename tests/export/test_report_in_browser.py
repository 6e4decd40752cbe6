"""A report in a real browser: drawn without an error, an image under the mouse, no request."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_model import extract, run_job, write_image

pytestmark = pytest.mark.usefixtures("packing_in_process")

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

EVIL = "<script>document.title='broken into'<"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a store whose keys and classes try to be markup."""
    root = tmp_path_factory.mktemp("report")
    for i in range(12):
        name = f"<img src=x onerror=document.title='broken into'>{i}.png"
        write_image(root / "photos" / (EVIL, "</script>$x^2$<b>bold")[i % 2] / name, i)
    (root / "photos" / "odd.png").write_text("no image")
    store, file = root / "store", root / "report.html"
    extract(root / "photos", layers=["conv", "deep"], out=store, max_failures=3)
    run_job("probe", store=str(store), device="cpu")
    run_job("report", store=str(store), out=str(file), device="cpu")
    return file


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no playwright: featx[dev] has it"
    )
    if CHROMIUM is None:
        pytest.skip(
            "no chromium: apt-get install chromium; a report was not looked at in a browser"
        )
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


def point_at(page: Any, point: Any) -> None:
    """Move the mouse onto a point until the page has noticed; a busy machine may miss some."""
    for _ in range(60):
        box = point.bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(x - 40, y - 40)
        page.mouse.move(x, y, steps=4)
        page.wait_for_timeout(250)
        if page.locator("#tip").is_visible():
            return


@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1400), pytest.param("dark", 390, marks=pytest.mark.slow)]
)
def test_it_is_drawn(browser: Any, page_file: Path, scheme: str, width: int) -> None:
    heard: list[str] = []
    asked: list[str] = []
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("dialog", lambda dialog: heard.append(dialog.message))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(page_file.as_uri())
    page.wait_for_selector("#plot-tsne .scatterlayer .point")
    drawn = page.evaluate(
        "[...document.querySelectorAll('.plot')].map(p => [p.id, p.querySelectorAll('svg').length])"
    )
    assert {name for name, count in drawn if count} == {
        "plot-norms", "plot-pca", "plot-tsne", "plot-confusion", "plot-cka", "plot-debiased",
    }  # fmt: skip
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(",")))
    assert (brightness > 600) == (scheme == "light")

    # Under the mouse: the image of the row, its key and class as text.
    tip = page.locator("#tip")
    assert tip.is_hidden()
    point = page.locator("#plot-pca .scatterlayer .point").nth(3)
    point.scroll_into_view_if_needed()
    point_at(page, point)
    assert tip.is_visible()
    assert page.locator("#tip img").get_attribute("src").startswith("data:image/webp")
    assert page.evaluate("document.querySelector('#tip img').naturalWidth") > 0
    assert "onerror=document.title" in tip.inner_text()
    page.mouse.move(2, 2)
    page.wait_for_selector("#tip", state="hidden")

    # Another layer, another class: drawn anew.
    before = page.locator("#plot-pca .scatterlayer").inner_html()
    page.select_option("#map-layer", "0")
    assert page.locator("#plot-pca .scatterlayer").inner_html() != before
    page.select_option("#map-class", "0")
    assert page.locator("#legend li").count() == 2
    page.select_option("#strips-layer", "0")
    assert page.locator(".strips:visible").count() == 1

    assert page.title() == "store: a report of featx"
    assert page.locator("main b:text('bold')").count() == 0
    assert asked[0] == page_file.as_uri()
    assert all(url.startswith("data:") for url in asked[1:]), asked
    assert heard == []
    context.close()
