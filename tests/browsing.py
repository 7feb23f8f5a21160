"""A real browser, and checks for every page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from server_made import listening

from engram.model import ModelFolder

CHROMIUM = shutil.which("chromium")
UPDATE_TIMEOUT = 120_000  # milliseconds
VIEWS = [(1280, "light"), (360, "dark")]  # layout depends on the width alone, contrast on the scheme


@dataclass
class View:
    """An open page with its console messages and requests."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


def seen(context: Any, address: str) -> View:
    """Open an address in a browser context."""
    view = View(context.new_page())
    view.page.on("console", lambda message: view.complaints.append(message.text))
    view.page.on("pageerror", lambda error: view.complaints.append(str(error)))
    view.page.on("request", lambda request: view.requests.append(request.url))
    view.page.goto(address)
    return view


def scrolls_sideways(view: View) -> bool:
    wide, room = view.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    return bool(wide > room)


@contextmanager
def serving(model: Path, **settings: Any) -> Iterator[str]:
    """The address of a server of a model, in this process."""
    with listening(ModelFolder(model), **{"epochs": 10, **settings}) as port:
        yield f"http://127.0.0.1:{port}/"


def says(page: Any, place: str, text: str, timeout: int = 30_000) -> None:
    from playwright.sync_api import expect

    expect(page.locator(place)).to_contain_text(text, timeout=timeout)


def open_screen(page: Any, name: str) -> None:
    from playwright.sync_api import expect

    link = page.get_by_role("navigation").get_by_role("link", name=name, exact=True)
    link.click()
    expect(link).to_have_attribute("aria-current", "page")  # the page follows its address soon after


def files(folder: Path) -> list[str]:
    return [str(path) for path in sorted(folder.iterdir())]


# Texts whose contrast with their background is below 4.5.
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
    if (!walker.currentNode.textContent.trim() || element.closest('title, desc, script, noscript')) continue;
    const style = getComputedStyle(element);
    const ink = light(parse(element.namespaceURI.endsWith('svg') ? style.fill : style.color));
    const paper = light(behind(element));
    const contrast = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (contrast < 4.5) faint.add(`${element.tagName} ${element.textContent.slice(0, 40)} ${contrast.toFixed(2)}`);
  }
  return [...faint];
}"""
