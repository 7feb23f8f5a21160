"""From an empty folder to an exported model in the browser, with a camera that films photographs."""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import CHROMIUM, UPDATE_TIMEOUT, files, open_screen, says, scrolls_sideways, seen, serving
from PIL import Image, ImageOps

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'")

FRAME = (640, 480)
REPEATS = 6  # frames of each photo: Chromium plays 30 per second
HELD = 8  # images of each class, at least
NAMES = ("bonsai", "watch", "Faces")
FOURTH = "cup"


@pytest.fixture(scope="module")
def objects() -> Path:
    folder = Path(os.environ.get("ENGRAM_DATA") or "/nowhere", "objects")
    if not folder.is_dir():
        pytest.skip("ENGRAM_DATA does not name a folder that holds objects")
    return folder


@pytest.fixture
def film(tmp_path: Path) -> Path:
    return tmp_path / "camera.mjpeg"


@pytest.fixture
def filming(film: Path, objects: Path) -> Iterator[Any]:
    """A browser whose camera plays the film, from its beginning whenever the camera is started."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    shoot(film, objects / "train" / NAMES[0])
    camera = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    with playwright.sync_playwright() as started:
        arguments = ["--no-sandbox", *camera, f"--use-file-for-fake-video-capture={film}"]
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()


def shoot(film: Path, folder: Path, count: int = 15) -> None:
    """A film that shows photos of a folder one after another."""
    frames = []
    for path in sorted(folder.iterdir())[:count]:
        content = io.BytesIO()
        with Image.open(path) as photo:
            ImageOps.pad(photo.convert("RGB"), FRAME, color="white").save(content, "JPEG")
        frames.append(content.getvalue() * REPEATS)
    film.write_bytes(b"".join(frames))


def hold(page: Any, film: Path, folder: Path) -> None:
    """Film the photos of a class while its button is held."""
    shoot(film, folder)
    page.get_by_role("button", name="Start the camera").click()
    page.get_by_label("What does it show?").fill(folder.name)
    playwright.expect(page.locator("#live-video")).to_be_visible()
    playwright.expect(page.locator("#live-video")).to_have_js_property("videoWidth", FRAME[0])  # the first frame
    page.get_by_role("button", name="Hold to add images", exact=True).hover()
    page.mouse.down()
    playwright.expect(page.locator("#held")).to_have_text(re.compile(rf"^{folder.name}: ([{HELD}-9]|\d\d+) images"))
    page.mouse.up()


def teach_now(page: Any, version: int, classes: int) -> None:
    page.get_by_role("button", name="Teach", exact=True).click()
    says(page, "#summary", f"Version {version}: it knows {classes} classes", UPDATE_TIMEOUT)


@pytest.mark.timeout(1200)  # many steps, each with its own timeout
def test_classes_are_taught_corrected_evaluated_rolled_back_and_exported(
    filming: Any, film: Path, objects: Path, tmp_path: Path
) -> None:
    with serving(tmp_path / "things") as address:
        view = seen(filming.new_context(viewport={"width": 1280, "height": 900}), address)
        page = view.page
        says(page, "#model-name", "things")
        says(page, "#summary", "There is no model yet.")

        for name in NAMES:
            hold(page, film, objects / "train" / name)
            assert page.locator("#held-strip li").count() >= 4
            playwright.expect(page.get_by_role("button", name=f"Hold to add images of {name}")).to_be_visible()
            if name != NAMES[-1]:
                page.get_by_role("button", name="Stop the camera").click()
        page.locator("fieldset .image").first.click()  # removes it
        teach_now(page, 1, 3)
        says(page, "#summary", "held-out images")
        says(page, "#live-bars li:first-child", NAMES[-1])  # what the camera shows
        says(page, "#live-rate", "answers per second")
        playwright.expect(page.locator("#live-none")).to_be_hidden()
        open_screen(page, "Classify")
        page.locator("#rejection summary").click()
        page.locator("#probability").fill("100")
        playwright.expect(page.locator("#live-none")).to_be_visible()
        page.get_by_label("never").check()
        playwright.expect(page.locator("#live-none")).to_be_hidden()
        page.get_by_role("button", name="Stop the camera").click()

        asked = files(objects / "test" / FOURTH)[0]
        page.locator("#classify-drop input[multiple]").set_input_files([asked])
        field = page.locator("#answers .correction input")
        field.fill(FOURTH)
        field.press("Enter")
        says(page, "#answers .correction", f"In the next update as {FOURTH}")
        hold(page, film, objects / "train" / FOURTH)
        teach_now(page, 2, 4)
        says(page, "#live-bars li:first-child", FOURTH)
        page.get_by_role("button", name="Stop the camera").click()
        open_screen(page, "Classes")
        says(page, "#classes", "held-out images recognised")

        test = tmp_path / "test"
        for name in (*NAMES, FOURTH):
            (test / name).mkdir(parents=True)
            for path in sorted((objects / "test" / name).iterdir())[1:4]:
                (test / name / path.name).write_bytes(path.read_bytes())
        open_screen(page, "Test")
        page.locator("#test-folder").set_input_files(str(test))
        says(page, "#evaluate-status", "Version 2: accuracy ")
        says(page, "#evaluate-status", "on 12 test images")
        says(page, "#evaluate-status", "95 % interval")
        accuracy = float(page.locator("#evaluate-status").inner_text().split("accuracy ")[1].split()[0])
        assert accuracy >= 70

        open_screen(page, "Versions")
        page.get_by_role("button", name="Use version 1").click()
        page.get_by_role("dialog").get_by_role("button", name="Use version 1").click()
        says(page, "#summary", "Version 1: it knows 3 classes")

        open_screen(page, "Export")
        with page.expect_download(timeout=UPDATE_TIMEOUT) as saved:
            page.get_by_role("button", name="Export as ONNX").click()
        assert saved.value.suggested_filename == "things-version-1.zip"
        with zipfile.ZipFile(saved.value.path()) as archive:
            assert archive.read("labels.txt").decode().split() == sorted(NAMES)
            assert len(archive.read("model.onnx")) > 1e6
        assert not scrolls_sideways(view)
        if pictures := os.environ.get("ENGRAM_PICTURES"):
            page.screenshot(path=f"{pictures}/desktop.png", full_page=True)
        assert [url for url in view.requests if not url.startswith((address, "blob:"))] == []
