"""The browser of these tests. They are skipped, saying so, where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browsing import CHROMIUM


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with playwright.sync_playwright() as started:
        camera = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *camera])
        yield chromium
        chromium.close()
