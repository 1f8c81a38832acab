"""Images that fail to load: loaded again once the server answers, and shown as gone only if it has no such file."""

import re

import pytest

from tests.curation.conftest import picture
from tests.page.test_sampling import run_with_samples
from tests.source import ROOT
from tests.training import wait_for

SAMPLES, THUMBNAILS = re.compile(r"/samples/"), re.compile(r"/own/images_thumb")
ARE_LOADED = "images => images.length > 0 && images.every((image) => image.complete && image.naturalWidth)"
LOADER = "kohya_gui/server/images.js"
OTHER_ERRORS = {"kohya_gui/runs/uplot.js"}  # of a script


def away(page, images=SAMPLES):
    """Let no request for these images reach the server; return the addresses that failed."""
    failed = []
    page.on("requestfailed", lambda request: images.search(request.url) and failed.append(request.url))
    page.route(images, lambda route: route.abort())
    return failed


def wait_for_second_request(page, failed):
    wait_for(lambda: page.evaluate("1") and any(failed.count(address) > 1 for address in failed), 60)


@pytest.mark.browser
@pytest.mark.parametrize(
    ("place", "image"), [("", ".live .sample img"), ("#runs/{run}", ".gallery img"), ("#runs", ".who img")]
)
def test_they_come_back_when_the_server_does(visit, served, place, image):
    run = run_with_samples(served[1], f"away-{len(place)}").name
    visitor = visit()
    page = visitor.page
    failed = away(page)
    page.goto(f"{page.url.split('#')[0]}{place.format(run=run)}")
    page.reload()
    shown = page.locator(image)
    shown.first.wait_for(state="attached")
    wait_for_second_request(page, failed)
    assert page.locator(".gone, .no-image").count() == 0
    page.unroute(SAMPLES)
    wait_for(lambda: shown.evaluate_all(ARE_LOADED), 60)
    visitor.complaints.clear()  # the failed requests


@pytest.mark.browser
def test_the_sample_on_the_whole_screen_comes_back(visit, served):
    run_with_samples(served[1], "away-large")
    visitor = visit()
    page = visitor.page
    page.locator(".live .sample img").first.wait_for()
    failed = away(page)
    page.locator(".live .sample").first.click()
    stage = page.locator("dialog.viewer .stage")
    wait_for_second_request(page, failed)
    assert not stage.locator(".under + .gone").is_visible()
    page.unroute(SAMPLES)
    wait_for(lambda: stage.locator("img.under").evaluate_all(ARE_LOADED), 60)
    visitor.complaints.clear()


@pytest.mark.browser
def test_images_of_a_data_set_come_back(visit, served):
    folder = served[1] / "away-data"
    folder.mkdir()
    picture(1).save(folder / "a.png")
    visitor = visit()
    page = visitor.page
    failed = away(page, THUMBNAILS)
    page.get_by_role("tab", name="Data", exact=True).click()
    page.locator("#images-folder").fill(str(folder))
    visitor.click("Open folder")
    wait_for_second_request(page, failed)
    page.unroute(THUMBNAILS)
    wait_for(lambda: page.locator(".images article .frame img").evaluate_all(ARE_LOADED), 60)
    visitor.complaints.clear()


@pytest.mark.browser
@pytest.mark.parametrize(
    ("status", "words"), [(404, "The file is gone"), (403, "This image cannot be shown"), (200, "cannot be shown")]
)
def test_a_refused_image_is_gone_only_if_the_server_has_none(visit, served, status, words):
    """Status 200: the file arrives, and is no image."""
    run_with_samples(served[1], f"refused-{status}")
    visitor = visit()
    page = visitor.page
    page.locator(".live .sample img").first.wait_for()
    page.route(SAMPLES, lambda route: route.fulfill(status=status, body=b"no image", content_type="image/png"))
    page.reload()
    page.locator(".live .strip .gone", has_text=words).first.wait_for()
    page.unroute_all(behavior="wait")
    visitor.complaints.clear()


@pytest.mark.browser
def test_an_image_comes_back_each_time_that_it_fails(visit):
    """An element may fail, show its image, and fail again, as those of the viewer do."""
    visitor = visit()
    page, answers = visitor.page, []
    name, empty = "data-once", "<svg xmlns='http://www.w3.org/2000/svg' width='4' height='4'/>"

    def answer(route):
        status = answers.pop(0) if answers else 200
        if status:
            route.fulfill(status=status, body=empty, content_type="image/svg+xml")
        else:
            route.abort()

    page.route(f"**/own/{name}*", answer)
    show = """async (name) => {
        const image = document.querySelector("#come-back") ?? document.body.appendChild(new Image());
        image.id = "come-back";
        image.lost ??= image.addEventListener("kohya:lost", () => image.dataset.lost = "yes") ?? true;
        image.removeAttribute("src");
        image.src = `own/${name}?${Math.random()}`;
        await new Promise((done) => image.addEventListener("load", done, { once: true }));
        return image.dataset.lost ?? "";
    }"""
    for statuses in ([0, 0], [0, 429], [0, 503], [0]):  # of the image, then of the request about it
        answers[:] = statuses
        assert page.evaluate(show, name) == ""
    page.unroute_all(behavior="wait")
    visitor.complaints.clear()


def test_no_other_script_takes_an_error_for_a_missing_file():
    taking = re.compile(r"""addEventListener\(\s*["']error["']|\.onerror\b|\.decode\(\)""")
    scripts = (path for path in (ROOT / "kohya_gui").rglob("*.js") if "vendor" not in path.parts)
    listeners = {path.relative_to(ROOT).as_posix() for path in scripts if taking.search(path.read_text("utf-8"))}
    assert listeners == {LOADER, *OTHER_ERRORS}
