"""Pages of job=report and job=predict in Chromium: drawn without an error, readable, no request."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_model import TRUSTED, extract, run_job, write_image

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

CONTRAST = Path(__file__).with_name("contrast.js").read_text(encoding="utf-8")

COLOUR_CELLS = """([kind, share]) => {
  const cells = document.querySelectorAll(".cell");
  for (const cell of cells) {
    cell.className = `cell ${kind}`;
    cell.style.setProperty("--share", share);
  }
  return getComputedStyle(cells[0]).backgroundColor;
}"""

OVERFLOWING = """() => [...document.querySelectorAll("main *")].filter((e) =>
  e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".scroll, pre, .top, svg")
).map((e) => e.tagName + "." + e.className)"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """report.html and predictions.html of a store whose keys and classes try to be markup."""
    root = tmp_path_factory.mktemp("report")
    for i in range(40):
        name = f"<img src=x onerror=document.title='broken into'>{i}.png"
        # Every eighth label is wrong, so that some images are misclassified.
        place = (i + (i % 8 == 0)) % 2
        write_image(root / "photos" / (EVIL, "</script>$x^2$<b>bold")[place] / name, i % 12)
    (root / "photos" / "odd.png").write_text("no image")
    store = str(root / "store")
    extract(root / "photos", layers=["conv", "deep"], out=store, max_failures=3)
    run_job(
        "probe",
        store=store,
        device="cpu",
        probe={"method": ["linear", "knn"], "shots": [2], "seeds": 2},
    )
    run_job("report", store=store, out=str(root / "report.html"), device="cpu")
    run_job(
        "predict", store=store, data=str(root / "photos"), out=str(root), model=TRUSTED,
        device="cpu", max_failures=3,
    )  # fmt: skip
    return root


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no playwright: featx[dev] has it"
    )
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium; the pages were not opened in a browser")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@contextlib.contextmanager
def opened(browser: Any, file: Path, scheme: str, width: int, touch: bool = False) -> Iterator[Any]:
    """A page in the browser, which must neither report an error nor request anything."""
    heard: list[str] = []
    asked: list[str] = []
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme=scheme,
        reduced_motion="reduce",
        has_touch=touch,
    )
    page = context.new_page()
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("dialog", lambda dialog: heard.append(dialog.message))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    yield page
    assert heard == []
    assert asked[0] == file.as_uri()
    assert all(url.startswith("data:") for url in asked[1:]), asked
    context.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scheme", "width"),
    [
        ("report.html", "light", 1360),
        ("predictions.html", "dark", 390),
        ("report.html", "dark", 390),
        ("predictions.html", "light", 1360),
    ],
)
def test_texts_are_readable_and_nothing_is_wider_than_the_screen(
    browser: Any, folder: Path, name: str, scheme: str, width: int
) -> None:
    with opened(browser, folder / name, scheme, width) as page:
        assert page.evaluate(CONTRAST) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(OVERFLOWING) == []
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(",")))
        assert (brightness > 600) == (scheme == "light")
        assert page.locator("main b:text-is('bold')").count() == 0
        assert "broken into" not in page.title()


def painted(page: Any) -> str:
    """The pixels of the embedding plot."""
    return str(page.evaluate("document.getElementById('canvas').toDataURL()"))


def touch_points(page: Any, action: Any) -> None:
    """Call `action` with positions all over the plot, until a point is hit."""
    box = page.locator("#canvas").bounding_box()
    for step in range(1, 400):
        x, y = step % 20 / 20, step // 20 / 20
        action(box["x"] + x * box["width"], box["y"] + y * box["height"])
        if page.locator("#tip").is_visible():
            return


@pytest.mark.slow
def test_the_embedding_plot_shows_the_image_under_the_pointer(browser: Any, folder: Path) -> None:
    with opened(browser, folder / "report.html", "light", 1360) as page:
        tip = page.locator("#tip")
        page.locator("#canvas").scroll_into_view_if_needed()
        page.wait_for_timeout(100)
        assert tip.is_hidden()
        touch_points(page, page.mouse.move)
        assert tip.is_visible()
        assert "onerror=document.title" in page.locator("#tip small").inner_text()
        assert page.locator("#tip b").inner_text() in (EVIL, "<")  # before the first slash
        assert page.locator("#tip canvas").is_visible()
        drawn = page.evaluate(
            "[...document.querySelector('#tip canvas').getContext('2d')"
            ".getImageData(0, 0, 160, 160).data].some((v) => v)"
        )
        assert drawn
        page.mouse.move(2, 2)
        page.wait_for_selector("#tip", state="hidden")

        # Another layer, projection, mark and class: each changes the plot.
        seen = {painted(page)}
        other = 1 - int(page.locator("#layer").input_value())
        page.select_option("#layer", str(other))
        seen.add(painted(page))
        page.click("button[value=pca]")
        seen.add(painted(page))
        page.click("button[value=images]")
        seen.add(painted(page))
        page.locator("#legend button").first.click()
        seen.add(painted(page))
        assert len(seen) == 5
        assert page.locator("#legend button[aria-pressed=true]").count() == 1


@pytest.mark.slow
def test_a_tap_shows_an_image_until_something_else_is_tapped(browser: Any, folder: Path) -> None:
    with opened(browser, folder / "report.html", "dark", 390, touch=True) as page:
        page.locator("#canvas").scroll_into_view_if_needed()
        page.wait_for_timeout(100)
        touch_points(page, page.touchscreen.tap)
        assert page.locator("#tip").is_visible()
        page.locator("#embedding h2").tap()
        page.wait_for_selector("#tip", state="hidden")


@pytest.mark.slow
def test_a_cell_of_the_confusion_matrix_filters_the_errors(browser: Any, folder: Path) -> None:
    with opened(browser, folder / "report.html", "light", 1360) as page:
        cells, images = page.locator(".heat button"), page.locator("#gallery li")
        every = images.count()
        assert every >= 1
        true, predicted = (cells.first.get_attribute(f"data-{n}") for n in ("true", "predicted"))
        expected = page.evaluate(
            "([t, p]) => [...document.querySelectorAll('#gallery li')]"
            ".filter((e) => e.dataset.true === t && e.dataset.predicted === p).length",
            [true, predicted],
        )
        cells.first.focus()
        page.keyboard.press("Enter")
        assert images.filter(visible=True).count() == expected
        assert predicted in page.locator("#gallery-filter").inner_text()
        page.click("#gallery-filter button")
        assert images.filter(visible=True).count() == every


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_in_cells_have_enough_contrast_to_every_colour(
    browser: Any, folder: Path, scheme: str
) -> None:
    with opened(browser, folder / "report.html", scheme, 1360) as page:
        grounds = set()
        for step in range(21):
            for kind in ("right", "wrong"):
                grounds.add(page.evaluate(COLOUR_CELLS, [kind, step / 20]))
                assert page.evaluate(CONTRAST) == []
        assert len(grounds) == 42


@pytest.mark.slow
def test_a_class_filters_the_predictions(browser: Any, folder: Path) -> None:
    with opened(browser, folder / "predictions.html", "light", 1360) as page:
        cards = page.locator("#cards li")
        assert cards.count() == 40
        assert page.locator("#cards img").count() == 40
        doubts = [float(text) for text in page.locator("#cards .first dd").all_inner_texts()]
        assert doubts == sorted(doubts)  # with two classes, doubt is a small probability
        page.select_option("#class-filter select", "0")
        shown = cards.filter(visible=True)
        assert 0 < shown.count() < 40
        assert len({shown.nth(i).get_attribute("data-class") for i in range(shown.count())}) == 1
