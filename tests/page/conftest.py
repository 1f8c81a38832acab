"""Fixtures: the page on a free port, stand-ins for trainings, and visits with a real Chromium."""

import json
import sys
import time
from pathlib import Path
from urllib.parse import urljoin

import pytest

from benchmarks.online import BROWSERS, find_chromium, page_online
from kohya_gui.server import scripts
from tests.training import demo  # noqa: F401

# Chromium obeys only the last --disable-features, so Playwright's own list is repeated here. The address bar's
# suggestions (WebUIOmnibox) are a page of their own, in a process of its own for every window, though nobody sees them.
FEATURES = (
    "WebUIOmniboxPopup",
    "WebUIOmniboxAimPopup",
    "WebUIOmniboxFullPopup",
    "AimEnabled",
    "DestroyProfileOnBrowserClose",
    "HttpsUpgrades",
    "HttpsFirstBalancedModeAutoEnable",
    "LensOverlay",
    "MediaRouter",
    "OptimizationHints",
    "PaintHolding",
    "PreconnectToSearch",
    "ThirdPartyStoragePartitioning",
    "Translate",
    # Keep each address in the process of the one before: starting a new process takes a third of a visit.
    "ProactivelySwapBrowsingInstance",
    "RenderDocument",
)
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    f"--disable-features={','.join(FEATURES)}",
    # No script runs long enough for the optimizer to pay off, or for functions that nobody calls to be compiled.
    "--js-flags=--no-opt --max-lazy",
]
# The browser is never idle unless a test says so; otherwise each visit would build the forms of all tabs.
NEVER_IDLE = "window.idle = []; window.requestIdleCallback = (act) => idle.push(act);"
STAND_IN = Path(__file__).with_name("stand_in.py")
# The queue's worker process, with stand-ins for the trainings.
WORKER = """
import sys
from library.runs import start, worker
start.launch_command = lambda path, script, **how: ([sys.executable, {stand_in!r}, "--config_file", str(path)], dict())
worker.PERIOD = 0.1
sys.exit(worker.main())
"""
FORM = f"import('.{scripts.ADDRESS}').then(({{ modules }}) => modules['form/page.js'])"
SIZE = {"width": 1440, "height": 900}


@pytest.fixture(scope="session")
def chromium():
    """One browser for all tests; skips where there is none."""
    browser_path = find_chromium()
    if not browser_path:
        pytest.skip(f"no Chromium or Chrome on the PATH (looked for {', '.join(BROWSERS)}; CHROMIUM names one)")
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """The page's address and the folder that configs may be in."""
    root = tmp_path_factory.mktemp("page")
    with page_online(root) as address:
        yield address, root


@pytest.fixture
def stand_ins(monkeypatch):
    """Replace trainings by stand-ins, and the checks of what they name; only for one test, as others in this process
    start real ones."""
    from kohya_gui.server import paths
    from library.check import isolated
    from library.runs import queue, start

    monkeypatch.setattr(
        start,
        "launch_command",
        lambda path, script, **how: ([sys.executable, str(STAND_IN), "--config_file", str(path)], {}),
    )
    monkeypatch.setattr(queue, "RUNNER", [sys.executable, "-c", WORKER.format(stand_in=str(STAND_IN))])
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN.parents[2]))
    checked = lambda reading, launch: {"findings": isolated.findings_of_reading(reading), "fit": None}  # noqa: E731
    monkeypatch.setattr(isolated, "check_reading", checked)
    monkeypatch.setattr(
        isolated, "check_all", lambda readings, launch: [checked(reading, launch) for reading in readings]
    )
    monkeypatch.setattr(paths, "_outside", lambda config, roots: [])  # nowhere is outside of the roots


def own_faults(error):
    # Gradio logs an error if the page is left during one of its requests. A server that does not answer is still
    # noticed, as the browser logs that itself.
    return [] if "Failed to fetch" in error and "/assets/" in error else [error]


class Visit:
    """One visitor's window, with its requests and the errors in its console."""

    def __init__(self, browser, address, **how):
        self.address, self.how, self.requests, self.complaints = address, how, [], []
        self.context = browser.new_context(viewport=SIZE, accept_downloads=True, reduced_motion="reduce", **how)
        self.context.add_init_script(NEVER_IDLE)
        self.page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.extend(own_faults(str(error))))
        self.page.on(
            "console",
            lambda message: self.complaints.extend(own_faults(message.text)) if message.type == "error" else None,
        )
        self.open()

    def open(self):
        self.page.goto(self.address)
        self.page.wait_for_selector("form.settings")
        self.page.evaluate(f"() => {FORM}.then(() => null)")  # a click before the scripts are loaded does nothing

    def leave(self):
        """Clear what the next visitor would find of this one: stored data, other windows, size and pointer."""
        self.page.evaluate("Storage.prototype.setItem = () => {}; localStorage.clear(); sessionStorage.clear()")
        for window in self.context.pages:
            if window is not self.page:
                window.close()
        self.page.goto(urljoin(self.address, "favicon.ico"))  # a blank page would end the process that has the scripts
        self.context.clear_cookies()
        self.context.clear_permissions()
        self.page.set_viewport_size(SIZE)
        self.page.mouse.move(0, 0)
        self.complaints.clear()
        self.requests.clear()

    def click(self, name):
        self.page.get_by_role("button", name=name, exact=True).locator("visible=true").click()

    def room(self, name):
        self.page.locator("#rooms > .tab-wrapper").get_by_role("tab", name=name, exact=True).click()

    def tab(self, name):
        """Open a kind of training."""
        if not self.page.locator("#kinds").is_visible():
            self.room("Train")
        self.page.locator("#kinds").get_by_role("tab", name=name, exact=True).click()
        self.page.locator(f"#{name.lower().replace(' ', '-')}-form").wait_for()

    def family(self, name):
        self.page.locator("form.settings:visible").get_by_text(name, exact=True).click()

    def fill(self, **values):
        form = self.page.locator("form.settings:visible")
        for name, value in values.items():
            form.locator(f"[data-option={name}]:visible").fill(str(value))

    def held(self, tab="lora"):
        return self.page.evaluate(f"tab => {FORM}.then(({{ held, formOf }}) => held(formOf(tab)))", tab)

    def put(self, **values):
        """Fill values into the LoRA form, like a loaded config."""
        sent = json.dumps({"values": values})
        self.page.evaluate(f"sent => {FORM}.then(({{ fill }}) => fill('lora', sent))", sent)

    def said(self):
        return self.page.locator(".message:visible").inner_text()

    def until(self, words, where=".message"):
        self.page.locator(f"{where}:visible", has_text=words).first.wait_for()
        return self

    def read(self, words, where=".message"):
        """The text of an element as soon as it has these words."""
        shown = self.page.locator(f"{where}:visible", has_text=words).first
        shown.wait_for()
        return shown.inner_text()

    def has_none(self, script):
        """Assert that a script finds nothing, at the latest after a moment: colours and sizes change gradually."""
        end = time.monotonic() + 30
        while (leftovers := self.page.evaluate(script)) and time.monotonic() < end:
            time.sleep(0.1)
        assert leftovers == []

    def state(self, state):
        self.page.wait_for_selector(f'.run[data-state="{state}"]')
        return self.page.locator(".run").get_attribute("data-run")


@pytest.fixture(scope="session")
def windows():
    # The next visit reuses the window of the last one: a new window would read and compile all scripts again.
    return list[Visit]()


def begun(windows, browser, address):
    if not windows:
        return Visit(browser, address)
    visit = windows.pop()
    visit.address = address
    visit.open()
    return visit


def ended(windows, visit):
    """The errors and requests of a visit. Its window is kept for the next visit, unless it was opened with options or
    another one is kept."""
    observed = visit.complaints[:], visit.requests[:]
    if windows or visit.how or visit.page.is_closed():
        visit.context.close()
    else:
        visit.leave()
        windows.append(visit)
    return observed


@pytest.fixture
def visit(chromium, served, windows, stand_ins, monkeypatch, tmp_path):
    """Visits to the page of a user without any runs. At the end, fail on errors in the console and on requests to other
    sites."""
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    visits = []

    def begin(**how):
        visits.append(Visit(chromium, served[0], **how) if how else begun(windows, chromium, served[0]))
        return visits[-1]

    yield begin
    from library.runs import queue, reader, stop

    for entry in queue.read_queue().waiting:
        queue.remove_entry(entry.id)
    for run in reader.runs():
        stop.request(run.id, "kill")
    for complaints, requests in [ended(windows, visit) for visit in visits]:
        assert complaints == []
        assert [url for url in requests if not url.startswith((served[0], "data:", "blob:"))] == []
