"""The page of `engram serve` in a real browser with a real server."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import FAINT, UPDATE_TIMEOUT, VIEWS, View, files, open_screen, says, scrolls_sideways, seen, serving
from folders_made import paint
from models_made import DAISY, FORMULA, TULIP, copied, draw

from engram.model import ModelFolder, learn, rename

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'")
pytest.importorskip("fastapi", reason="fastapi is not installed: pip install '.[serve]'")

TOKEN = "a token of enough characters"
LONG = "W" * 60
SCREENS = ("Classify", "Teach", "Classes", "Test", "Versions", "Export")
MARKUP = "<img src=x onerror=alert(1)>"
playwright.expect.set_options(timeout=30_000)  # the first image waits for a decoder to start


def opened(browser: Any, address: str, width: int = 1280, scheme: str = "light") -> View:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    return seen(context, address)


def teach(page: Any, images: Path, names: tuple[str, str] = (TULIP, DAISY)) -> None:
    page.get_by_role("button", name="Add a class").click()
    for number, name in enumerate(names):
        group = page.locator("fieldset").nth(number)
        group.get_by_label("Class", exact=True).fill(name)
        group.locator("input[type=file][multiple]").set_input_files(files(images / name)[:20])
    says(page, "#update-size", "40 images")
    page.get_by_role("button", name="Teach", exact=True).click()


def test_teach_classify_rename_merge_roll_back_and_forget(browser: Any, tmp_path: Path) -> None:
    images = draw(tmp_path / "images", (TULIP, DAISY), 24)
    with serving(tmp_path / "model") as address:
        page = opened(browser, address).page
        says(page, "#summary", "There is no model yet.")

        teach(page, images)
        says(page, ".job h3", "Learned", UPDATE_TIMEOUT)
        says(page, ".job .phase", "(95 % interval ")
        says(page, ".job .phase", "on 40 held-out images")
        says(page, ".job .outcome", "Network efficientnet-lite0, not trained")
        rows = page.locator(".job tbody th bdi")
        assert sorted(rows.all_text_contents()) == sorted([TULIP, DAISY])
        says(page, "#summary", "Version 1: it knows 2 classes")
        says(page, "#summary", "on 40 held-out images")
        says(page, "#update-status", "version 1 is in use")

        open_screen(page, "Classify")
        asked = [files(images / name)[-1] for name in (TULIP, DAISY)]
        broken = tmp_path / "broken.png"
        broken.write_bytes(b"no image")
        page.locator("#classify-drop input[multiple]").set_input_files([*asked, str(broken)])
        playwright.expect(page.locator("#answers .bars, #answers .problem")).to_have_count(3)
        assert page.locator("#answers .bars li:first-child bdi").all_text_contents() == [TULIP, DAISY]
        assert page.locator("#answers .problem").count() == 1
        shares = [float(text.strip("<> %")) for text in page.locator("#answers .number").all_text_contents()]
        assert len(shares) == 4 and all(abs(sum(shares[i : i + 2]) - 100) < 0.3 for i in (0, 2))

        open_screen(page, "Classes")
        page.get_by_role("button", name=f"Rename {TULIP}").click()
        page.get_by_role("dialog").get_by_role("textbox").fill("rose")
        page.keyboard.press("Enter")
        says(page, "#memory-status", "Renamed")
        assert sorted(page.locator(".class-name").all_text_contents()) == sorted(["rose", DAISY])

        open_screen(page, "Versions")
        page.get_by_role("button", name="Use version 1").click()
        page.get_by_role("dialog").get_by_role("button", name="Use version 1").click()
        says(page, "#history-status", "Version 1 is in use.")
        assert sorted(page.locator(".class-name").all_text_contents()) == sorted([TULIP, DAISY])

        open_screen(page, "Classes")
        page.get_by_role("button", name=f"Merge {TULIP}").click()
        page.get_by_role("dialog").get_by_role("combobox").select_option(DAISY)
        page.get_by_role("dialog").get_by_role("button", name="Merge").click()
        says(page, "#memory-status", "Merged")
        assert page.locator(".class-name").all_text_contents() == [DAISY]
        open_screen(page, "Versions")
        page.get_by_role("button", name="Use version 1").click()
        page.get_by_role("dialog").get_by_role("button", name="Use version 1").click()
        says(page, "#summary", "Version 1: it knows 2 classes")

        open_screen(page, "Classes")
        page.get_by_role("button", name=f"Forget {TULIP}").click()
        says(page, "dialog[open]", "not unlearned")
        page.get_by_role("dialog").get_by_role("textbox").fill("another")
        page.keyboard.press("Enter")
        says(page, "#question-problem", "Nothing was changed.")
        page.get_by_role("dialog").get_by_role("textbox").fill(TULIP)
        page.keyboard.press("Enter")
        says(page, "#memory-status", "Forgotten.")
        assert page.locator(".class-name").all_text_contents() == [DAISY]
        assert page.get_by_role("button", name="Use version").count() == 0
        assert TULIP not in page.locator("main").inner_text()


def test_an_update_is_cancelled_and_nothing_was_changed(browser: Any, small_model: ModelFolder, tmp_path: Path) -> None:
    """The network of this model is trained in every update."""
    images = draw(tmp_path / "images", (TULIP, DAISY), 24)
    for name, new in ((TULIP, "rose"), (DAISY, "lily")):
        (tmp_path / "images" / name).rename(tmp_path / "images" / new)
    with serving(copied(small_model, tmp_path / "model").path, epochs=100_000) as address:
        page = opened(browser, address).page
        says(page, "#summary", "it knows 3 classes")
        open_screen(page, "Teach")
        teach(page, images, ("rose", "lily"))
        says(page, ".job .phase", "Training", UPDATE_TIMEOUT)
        page.get_by_role("button", name="Cancel this update").click()
        says(page, ".job", "Nothing was changed.")
        says(page, ".job h3", "Cancelled")
        says(page, "#summary", "Version 2: it knows 3 classes")
    assert ModelFolder(tmp_path / "model").versions() == [1, 2]


def test_a_model_created_by_another_process_appears(browser: Any, small_model: ModelFolder, tmp_path: Path) -> None:
    with serving(tmp_path / "model") as address:
        page = opened(browser, address).page
        page.clock.install()
        page.reload()
        says(page, "#summary", "There is no model yet.")
        copied(small_model, tmp_path / "model")
        page.clock.run_for(20_000)  # milliseconds, until the page looks again
        says(page, "#summary", "Version 2: it knows 3 classes")


@pytest.fixture(scope="module")
def known(small_model: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server of a model of three classes, two of them with strange names, and the folder of the images."""
    folder = copied(small_model, tmp_path_factory.mktemp("known") / "model")
    rename(folder, FORMULA, LONG)
    rename(folder, DAISY, MARKUP)
    with serving(folder.path) as address:
        yield address, small_model.path.parent


@pytest.fixture(params=VIEWS, ids=lambda view: f"{view[0]}-{view[1]}", scope="module")
def view(request: pytest.FixtureRequest, browser: Any, known: tuple[str, Path]) -> Iterator[View]:
    address, place = known
    shown = opened(browser, address, *request.param)
    says(shown.page, "#summary", "it knows 3 classes")
    shown.page.locator("#classify-drop input[multiple]").set_input_files(files(place / "1" / TULIP)[:2])
    playwright.expect(shown.page.locator("#answers .bars")).to_have_count(2)
    open_screen(shown.page, "Teach")
    shown.page.get_by_role("button", name="Add a class").click()
    shown.page.locator("fieldset input[multiple]").first.set_input_files(files(place / "1" / TULIP))
    yield shown
    shown.page.context.close()


def test_the_console_is_empty_and_nothing_is_fetched_from_other_hosts(view: View, known: tuple[str, Path]) -> None:
    assert view.complaints == []
    assert [url for url in view.requests if not url.startswith((known[0], "blob:"))] == []


def test_no_screen_scrolls_sideways(view: View) -> None:
    for name in SCREENS:
        open_screen(view.page, name)
        assert not scrolls_sideways(view), name


# Texts that leave the page, and pairs of texts that overlap. The bar at the bottom floats above the rest.
OVERLAPPING = """() => {
  const boxes = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const text = node.textContent.trim();
    if (!text || node.parentElement.closest('[hidden], .skip, .hidden, option, dialog, noscript, .next')) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) if (box.width > 1) boxes.push([text.slice(0, 30), box]);
  }
  const found = [];
  boxes.forEach(([text, box], index) => {
    if (box.left < -1 || box.right > document.documentElement.clientWidth + 1) found.push(`${text} is cut off`);
    for (const [other, next] of boxes.slice(index + 1)) {
      const across = Math.min(box.right, next.right) - Math.max(box.left, next.left);
      const down = Math.min(box.bottom, next.bottom) - Math.max(box.top, next.top);
      if (across > 1 && down > 3) found.push(`${text} lies on ${other}`);
    }
  });
  return found;
}"""


def test_no_text_overlaps_another_or_is_cut_off(view: View) -> None:
    for name in SCREENS:
        open_screen(view.page, name)
        assert view.page.evaluate(OVERLAPPING) == [], name


def test_the_first_screen_without_a_model_is_tidy(browser: Any, tmp_path: Path) -> None:
    with serving(tmp_path / "model") as address:
        for width, scheme in VIEWS:
            view = opened(browser, address, width, scheme)
            says(view.page, "#summary", "There is no model yet.")
            assert view.page.locator("main").inner_text().count("no model") == 0
            assert view.complaints == []
            assert not scrolls_sideways(view)
            assert view.page.evaluate(OVERLAPPING) == []
            assert view.page.evaluate(FAINT) == []
            if pictures := os.environ.get("ENGRAM_PICTURES"):
                view.page.screenshot(path=f"{pictures}/empty-{width}-{scheme}.png")


def test_every_text_has_enough_contrast(view: View) -> None:
    for name in SCREENS:
        open_screen(view.page, name)
        assert view.page.evaluate(FAINT) == [], name


def test_one_screen_is_shown_and_its_address_opens_it_again(view: View) -> None:
    for name in SCREENS:
        open_screen(view.page, name)
        assert view.page.locator("#signed-in > section:visible h2").all_text_contents() == [name]
        assert view.page.locator("nav [aria-current=page]").all_text_contents() == [name]
    view.page.go_back()
    playwright.expect(view.page.locator("#versions")).to_be_visible()
    again = seen(view.page.context, view.page.url)
    playwright.expect(again.page.locator("#versions")).to_be_visible()
    again.page.close()


def test_a_class_name_is_never_interpreted_as_markup(view: View) -> None:
    assert MARKUP in view.page.locator(".class-name").all_text_contents()
    assert view.page.locator("img[onerror]").count() == 0


def test_every_control_has_an_accessible_name(view: View) -> None:
    nameless = """[...document.querySelectorAll('button, input, select')].filter(each =>
      !(each.getAttribute('aria-label') || each.textContent.trim() || each.labels?.length)
      && !each.closest('dialog')).map(each => each.outerHTML)"""
    assert view.page.evaluate(nameless) == []


def test_a_camera_image_is_classified(browser: Any, known: tuple[str, Path]) -> None:
    page = opened(browser, known[0]).page
    page.get_by_role("button", name="Camera: an image to classify").click()
    page.get_by_role("button", name="Take the image").click()
    playwright.expect(page.locator("#answers .bars")).to_have_count(1)
    assert page.evaluate("document.getElementById('viewfinder').srcObject") is None


def test_a_held_key_adds_images_and_the_button_does_not_move(browser: Any, calibrated_model: ModelFolder) -> None:
    with serving(calibrated_model.path) as address:
        page = opened(browser, address).page
        page.get_by_role("button", name="Start the camera").click()
        button = page.get_by_role("button", name="Hold to add images", exact=True)
        before = button.bounding_box()
        playwright.expect(page.locator("#live-rate")).not_to_be_empty()  # after the first answers
        assert button.bounding_box() == before
        page.get_by_label("What does it show?").fill(TULIP)
        button.focus()
        page.keyboard.down(" ")
        playwright.expect(page.locator("#held")).to_have_text(re.compile(r": ([3-9]|\d\d+) images"))
        page.keyboard.up(" ")
        says(page, "#update-size", "images of 1 class")
        page.get_by_role("link", name="Review").click()
        playwright.expect(page.locator("fieldset input[type=text]")).to_have_value(TULIP)


# Drop an image on an element, or paste it where the focus is.
ARRIVE = """async ([kind, place]) => {
  const canvas = Object.assign(document.createElement('canvas'), {width: 20, height: 20});
  canvas.getContext('2d').fillRect(0, 0, 20, 20);
  const blob = await new Promise(resolve => canvas.toBlob(resolve));
  const data = new DataTransfer();
  data.items.add(new File([blob], 'black.png', {type: 'image/png'}));
  const event = kind === 'drop' ? new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true})
    : new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true});
  (place ? document.querySelector(place) : document.body).dispatchEvent(event);
  return event.defaultPrevented;
}"""


def test_images_are_dropped_and_pasted(browser: Any, known: tuple[str, Path]) -> None:
    page = opened(browser, known[0]).page
    says(page, "#summary", "it knows 3 classes")
    for count, kind in enumerate(("drop", "paste"), start=1):
        assert page.evaluate(ARRIVE, [kind, "#classify-drop"])
        playwright.expect(page.locator("#answers .bars")).to_have_count(count)
    open_screen(page, "Teach")
    for count, kind in enumerate(("drop", "paste"), start=1):
        page.locator("fieldset input[type=text]").focus()
        assert page.evaluate(ARRIVE, [kind, "fieldset"])
        playwright.expect(page.locator("fieldset .image")).to_have_count(count)
    assert page.evaluate(ARRIVE, ["drop", ""]), "Beside a drop zone it would replace the page."
    page.locator("fieldset .image").first.click()
    playwright.expect(page.locator("fieldset .image")).to_have_count(1)


def test_a_folder_becomes_one_class_per_sub_folder(browser: Any, known: tuple[str, Path]) -> None:
    page = opened(browser, known[0]).page
    says(page, "#summary", "it knows 3 classes")
    page.locator("#folder").set_input_files(str(known[1] / "1"))
    names = page.locator("fieldset input[type=text]").evaluate_all("each => each.map(field => field.value)")
    assert sorted(names) == sorted([TULIP, DAISY])
    says(page, "#update-size", "48 images")


def test_a_prediction_below_the_threshold_is_shown_as_none_of_these(
    browser: Any, calibrated_model: ModelFolder, known: tuple[str, Path]
) -> None:
    with serving(calibrated_model.path) as address:
        page = opened(browser, address).page
        says(page, "#summary", "it knows 3 classes")
        playwright.expect(page.locator("#uncalibrated")).to_be_hidden()
        page.locator("#rejection summary").click()
        page.locator("#probability").fill("100")  # which chooses this option
        page.locator("#classify-drop input[multiple]").set_input_files(files(known[1] / "1" / TULIP)[:1])
        says(page, "#answers", "None of these")


def test_images_of_unknown_classes_are_shown_as_none_of_these(browser: Any, tmp_path: Path) -> None:
    pictures = paint(tmp_path / "pictures", ("red", "green", "blue", "yellow"), 4)
    learned = learn(ModelFolder(tmp_path / "model"), pictures)
    assert learned.rejection is not None
    other = draw(tmp_path / "other", ("grey",), 1)
    with serving(tmp_path / "model") as address:
        page = opened(browser, address).page
        accepted = learned.rejection.known_accepted
        known_accepted = "100" if accepted == 1 else f"{100 * accepted:.1f}"
        says(page, "#known-accepted", f"known classes, {known_accepted} % are accepted")
        says(page, "#known-accepted", f"{learned.rejection.images} held-out images")
        page.locator("#rejection summary").click()
        page.locator("#by-rate").check()
        page.locator("#classify-drop input[multiple]").set_input_files(files(other / "grey"))
        says(page, "#answers", "None of these")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.locator("#rate").select_option("20 %")
        page.locator("#classify-drop input[multiple]").set_input_files(files(other / "grey"))
        playwright.expect(page.locator("#answers .none")).to_have_count(2)
        assert [url.partition("reject=")[2] for url in asked if "classify" in url] == ["20%25"]


def test_uncalibrated_probabilities_are_not_shown(browser: Any, known: tuple[str, Path]) -> None:
    page = opened(browser, known[0]).page
    says(page, "#uncalibrated", "Classes are ranked without percentages")
    playwright.expect(page.locator("#probability-option")).to_be_hidden()
    says(page, "#facts", "not calibrated: too few held-out images")
    page.locator("#classify-drop input[multiple]").set_input_files(files(known[1] / "1" / TULIP)[:1])
    playwright.expect(page.locator("#answers .bars li").first).to_have_text(TULIP)
    assert page.locator("#answers .number, #answers .bar").count() == 0


def test_warnings_and_unreadable_images_of_an_update_are_shown(browser: Any, tmp_path: Path) -> None:
    images = draw(tmp_path / "images", (TULIP, DAISY), 24)
    (images / TULIP / "0.png").write_bytes(b"no image")  # the first of the class
    with serving(tmp_path / "model") as address:
        page = opened(browser, address).page
        page.get_by_role("button", name="Teach", exact=True).click()  # without any image
        playwright.expect(page.locator("#update-problem")).not_to_be_empty()
        page.get_by_role("button", name="Add a class").click()
        for number, (name, count) in enumerate(((TULIP, 20), (DAISY, 1))):
            group = page.locator("fieldset").nth(number)
            group.get_by_label("Class", exact=True).fill(name)
            group.locator("input[type=file][multiple]").set_input_files(files(images / name)[:count])
        page.get_by_role("button", name="Teach", exact=True).click()
        warnings = page.get_by_role("list", name="Warnings").get_by_role("listitem")
        playwright.expect(warnings).to_have_count(2, timeout=UPDATE_TIMEOUT)
        says(page, ".warnings", DAISY)
        says(page, ".job .outcome", "0.png: ")
        says(page, "#update-status", "1 file was skipped")


def test_signing_in_shows_the_page_and_stores_nothing_scripts_can_read(browser: Any, known: tuple[str, Path]) -> None:
    with serving(known[1] / "model", token=TOKEN) as address:
        page = opened(browser, address).page
        page.get_by_label("Token").fill("a wrong token of enough characters")
        page.keyboard.press("Enter")
        says(page, "#sign-in-problem", "The token is wrong.")
        page.get_by_label("Token").fill(TOKEN)
        page.keyboard.press("Enter")
        says(page, "#summary", "it knows 3 classes")
        assert page.evaluate("[document.cookie, localStorage.length, sessionStorage.length]") == ["", 0, 0]
        page.get_by_role("button", name="Sign out").click()
        playwright.expect(page.get_by_label("Token")).to_be_visible()
        assert page.locator(".class-name").count() == 0


def test_a_lost_connection_is_reported_and_restored(browser: Any, known: tuple[str, Path]) -> None:
    page = opened(browser, known[0]).page
    says(page, "#summary", "it knows 3 classes")
    page.context.set_offline(True)
    page.locator("#classify-drop input[multiple]").set_input_files(files(known[1] / "1" / TULIP)[:1])
    says(page, "#connection", "The server does not answer.")
    says(page, "#answers", "The server does not answer.")
    page.context.set_offline(False)
    says(page, "#connection", "The server answers again.")


def test_a_busy_server_is_tried_again_after_its_retry_after(browser: Any, known: tuple[str, Path]) -> None:
    page = opened(browser, known[0]).page
    says(page, "#summary", "it knows 3 classes")
    refusals = iter([True])

    def refuse_once(route: Any) -> None:
        if next(refusals, False):
            route.fulfill(status=429, headers={"Retry-After": "2"}, json={"detail": "Busy."})
        else:
            route.continue_()

    page.route("**/api/classify*", refuse_once)
    page.locator("#classify-drop input[multiple]").set_input_files(files(known[1] / "1" / TULIP)[:1])
    says(page, "#classify-status", "The server is busy. Trying again in 2 s.")
    playwright.expect(page.locator("#answers .bars")).to_have_count(1)
