"""The report in a real browser: light and dark, wide and narrow. Skipped, saying so, where there is none."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from made_results import every_method, result, save, save_suite

from engram.experiments.report import make_report

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results"
LONG = ", with a setting of a name that is rather long and a value that is longer still"
VIEWS = [(1280, "light"), (1280, "dark"), (360, "light"), (360, "dark")]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The reports that are looked at: what is committed, thirteen methods, long and strange names, and a suite."""
    folder = tmp_path_factory.mktemp("reports")
    names = ["WWWWWWWW" * 12, "🦜 emoji 日本語" * 4, "משהו בעברית", "<b>bold</b> & $x$", "_hidden", "i" * 300]
    strange = [result(name, 0, [0.9, 0.6], seconds={"train": 40.0, name: 9.0}) for name in names]
    save_suite(folder / "suite", [0, 0.01, 0.05, 0.1, 1, 1.05, 1.1, 1000])
    sources = {
        "committed": COMMITTED,
        "thirteen": save(folder / "thirteen", *every_method(seeds=2)),
        "long": save(folder / "long", *every_method(tasks=20, seeds=2, suffix=LONG)),
        "strange": save(folder / "strange", *strange),
        "suite": folder / "suite",
    }
    for name, source in sources.items():
        make_report([source]).save(folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in sources}


@dataclass
class View:
    """A page as it is seen, and what it did while it was opened."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(params=VIEWS, ids=lambda view: f"{view[0]}-{view[1]}", scope="module")
def views(request: pytest.FixtureRequest, browser: Any, pages: dict[str, Path]) -> Iterator[dict[str, View]]:
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    opened = {}
    for name, path in pages.items():
        view = View(context.new_page())
        view.page.on("console", lambda message, view=view: view.complaints.append(message.text))
        view.page.on("pageerror", lambda error, view=view: view.complaints.append(str(error)))
        view.page.on("request", lambda request, view=view: view.requests.append(request.url))
        view.page.goto(path.as_uri())
        opened[name] = view
    yield opened
    context.close()


def test_nothing_is_complained_of_and_nothing_fetched(views: dict[str, View], pages: dict[str, Path]) -> None:
    for name, view in views.items():
        assert view.complaints == []
        assert [url for url in view.requests if not url.startswith("data:")] == [pages[name].as_uri()]


def test_the_page_never_scrolls_sideways(views: dict[str, View]) -> None:
    for name, view in views.items():
        wide, room = view.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide <= room, name
    view.page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    wide, room = view.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= room
    view.page.evaluate("document.querySelectorAll('details').forEach(each => each.open = false)")


# Boxes of the texts of each drawing: pairs that touch, and those that stick out of the drawing.
TOUCHING = """() => {
  const found = [];
  for (const svg of document.querySelectorAll('figure svg')) {
    const outer = svg.getBoundingClientRect();
    const boxes = [...svg.querySelectorAll('text')].map(each => [each.textContent, each.getBoundingClientRect()])
      .filter(([, box]) => box.width > 0);
    boxes.forEach(([name, box], index) => {
      if (box.left < outer.left - 1 || box.right > outer.right + 1 || box.top < outer.top - 1
          || box.bottom > outer.bottom + 1) found.push(`${svg.id}: ${name} is cut off`);
      for (const [other, next] of boxes.slice(index + 1)) {
        const across = Math.min(box.right, next.right) - Math.max(box.left, next.left);
        const down = Math.min(box.bottom, next.bottom) - Math.max(box.top, next.top);
        if (across > 1 && down > 1) found.push(`${svg.getAttribute('aria-labelledby')}: ${name} touches ${other}`);
      }
    });
  }
  return found;
}"""


def test_no_text_of_a_figure_touches_another_or_is_cut_off(views: dict[str, View]) -> None:
    for name, view in views.items():
        assert view.page.evaluate(TOUCHING) == [], name


# Every text with the contrast it has against what is behind it, where that is too little.
FAINT = """() => {
  const parse = colour => colour.match(/[\\d.]+/g).map(Number);
  const linear = part => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = element => {
    for (let each = element; each; each = each.parentElement) {
      const colour = parse(getComputedStyle(each).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    throw new Error('no background');
  };
  const faint = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || element.closest('title, desc')) continue;
    const style = getComputedStyle(element);
    const ink = light(parse(element.namespaceURI.endsWith('svg') ? style.fill : style.color));
    const paper = light(behind(element));
    const contrast = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (contrast < 4.5) faint.add(`${element.tagName} ${element.textContent.slice(0, 40)} ${contrast.toFixed(2)}`);
  }
  return [...faint];
}"""


def test_every_text_can_be_read(views: dict[str, View]) -> None:
    for name, view in views.items():
        assert view.page.evaluate(FAINT) == [], name


def test_the_page_is_dark_where_that_is_wanted(browser: Any, pages: dict[str, Path]) -> None:
    backgrounds = []
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(pages["suite"].as_uri())
        backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        page.close()
    assert backgrounds == ["rgb(255, 255, 255)", "rgb(21, 24, 28)"]


def test_every_figure_is_named_and_has_its_numbers(browser: Any, pages: dict[str, Path]) -> None:
    page = browser.new_page()
    page.goto(pages["committed"].as_uri())
    figures = page.locator("figure")
    assert figures.count() >= 15
    sections = page.get_by_role("heading", name="Figures", level=3).count()
    assert page.get_by_role("img", name="Accuracy against the number of classes").count() == sections >= 3
    assert page.locator("figure svg[role=img]").count() == figures.count()
    assert page.locator("figure details table").count() == figures.count()
    assert page.get_by_role("heading", level=1).count() == 1
    assert page.get_by_role("main").count() == 1 and page.get_by_role("navigation").count() == 1
    page.close()


def test_numbers_open_and_scroll_in_a_place_of_their_own(browser: Any, pages: dict[str, Path]) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 800})
    page.goto(pages["thirteen"].as_uri())
    page.locator("figure summary").first.click()
    table = page.locator("figure .scroll").first
    assert table.is_visible()
    assert table.evaluate("each => each.scrollWidth > each.clientWidth")
    page.close()
