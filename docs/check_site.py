"""Checks a built site: internal links lead to pages and anchors that exist, and nothing is loaded from outside.

python docs/check_site.py site
"""

from __future__ import annotations

import re
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADING = {"img": "src", "script": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}


class Page(HTMLParser):
    """The links, the loaded resources and the anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note what a tag refers to, and its id."""
        values = {name: value for name, value in attributes if value is not None}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif target := values.get(LOADING.get(tag, "")):
            self.loaded.append(target)


@cache
def read(path: Path) -> Page:
    """A page, parsed once."""
    return Page(path)


def pages(site: Path) -> list[Path]:
    """The pages of the site, without the templates of its theme."""
    return sorted(path for path in site.rglob("*.html") if "_static" not in path.parts)


def problems(site: Path) -> list[str]:
    """One line for each link that leads nowhere, and each resource from outside."""
    found = []
    for path in pages(site):
        name, page = path.relative_to(site), read(path)
        for target in [*page.links, *page.loaded]:
            parts = urlsplit(target)
            if parts.scheme in ("http", "https") or parts.netloc:
                if target in page.loaded:
                    found.append(f"{name}: loads {target}")
                continue
            if parts.scheme:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not file.is_file():
                found.append(f"{name}: there is no {target}")
            elif parts.fragment and file.suffix == ".html" and unquote(parts.fragment) not in read(file).anchors:
                found.append(f"{name}: there is no anchor {target}")
    for style in site.rglob("*.css"):
        outside = re.findall(r"(?:url\(|@import)\s*[\"']?(https?:[^\"')]+)", style.read_text(encoding="utf-8"))
        found += [f"{style.relative_to(site)}: loads {address}" for address in outside]
    return found


if __name__ == "__main__":
    faults = problems(Path(sys.argv[1]).resolve())
    print("\n".join(faults) if faults else f"{len(pages(Path(sys.argv[1])))} pages, no broken link")
    sys.exit(bool(faults))
