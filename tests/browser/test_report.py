"""The report in a real browser: light and dark, wide and narrow. Skipped, saying so, where there is none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import FAINT, VIEWS, View, scrolls_sideways, seen
from made_results import every_method, result, save, save_suite

from engram.experiments.report import make_report

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results"
SOME = ("digits", "cifar100-10-tasks", "cifar100-table1", "exemplar-free-short")  # all of them take 20 seconds
LONG = ", with a setting of a name that is rather long and a value that is longer still"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The reports that are looked at: of committed results, thirteen methods, strange names and a suite."""
    folder = tmp_path_factory.mktemp("reports")
    names = ["WWWWWWWW" * 12, "🦜 emoji 日本語" * 4, "משהו בעברית", "<b>bold</b> & $x$", "_hidden", "i" * 300]
    strange = [result(name, 0, [0.9, 0.6], seconds={"train": 40.0, name: 9.0}) for name in names]
    save_suite(folder / "suite", [0, 0.01, 0.05, 0.1, 1, 1.05, 1.1, 1000])
    sources = {
        "thirteen": save(folder / "thirteen", *every_method(seeds=2)),
        "long": save(folder / "long", *every_method(tasks=20, seeds=2, suffix=LONG)),
        "strange": save(folder / "strange", *strange),
        "suite": folder / "suite",
    }
    for name, source in sources.items():
        make_report([source]).save(folder / f"{name}.html")
    make_report([COMMITTED / name for name in SOME]).save(folder / "committed.html")
    return {name: folder / f"{name}.html" for name in (*sources, "committed")}


@pytest.fixture(params=VIEWS, ids=lambda view: f"{view[0]}-{view[1]}", scope="module")
def views(request: pytest.FixtureRequest, browser: Any, pages: dict[str, Path]) -> Iterator[dict[str, View]]:
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    yield {name: seen(context, path.as_uri()) for name, path in pages.items()}
    context.close()


def test_the_console_is_empty_and_nothing_is_fetched(views: dict[str, View], pages: dict[str, Path]) -> None:
    for name, view in views.items():
        assert view.complaints == []
        assert [url for url in view.requests if not url.startswith("data:")] == [pages[name].as_uri()]


def test_the_page_never_scrolls_sideways(views: dict[str, View]) -> None:
    for name, view in views.items():
        assert not scrolls_sideways(view), name
    view.page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert not scrolls_sideways(view)
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


def test_every_text_can_be_read(views: dict[str, View]) -> None:
    for name, view in views.items():
        assert view.page.evaluate(FAINT) == [], name


def test_the_page_is_dark_if_the_system_prefers_it(browser: Any, pages: dict[str, Path]) -> None:
    backgrounds = []
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(pages["suite"].as_uri())
        backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        page.close()
    assert backgrounds == ["rgb(255, 255, 255)", "rgb(21, 24, 28)"]


def test_every_figure_is_named(browser: Any, pages: dict[str, Path]) -> None:
    page = browser.new_page()
    page.goto(pages["committed"].as_uri())
    figures = page.locator("figure")
    assert figures.count() >= 15
    sections = page.get_by_role("heading", name="Figures", level=3).count()
    assert page.get_by_role("img", name="Accuracy against the number of classes").count() == sections >= 3
    assert page.locator("figure svg[role=img]").count() == figures.count()
    assert page.get_by_role("heading", level=1).count() == 1
    assert page.get_by_role("main").count() == 1 and page.get_by_role("navigation").count() == 1
    page.close()


def test_tables_open_scroll_by_themselves_and_can_be_downloaded(browser: Any, pages: dict[str, Path]) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 800}, accept_downloads=True)
    page.goto(pages["thirteen"].as_uri())
    page.get_by_text("Results by task").click()
    table = page.get_by_role("region", name="after each task")
    assert table.is_visible()
    assert table.evaluate("each => each.scrollWidth > each.clientWidth")
    with page.expect_download() as download:
        page.get_by_role("link", name="CSV").first.click()
    assert download.value.suggested_filename == "made-10-tasks-of-2-classes-results.csv"
    assert "features" in download.value.path().read_text(encoding="utf-8")
    page.close()
