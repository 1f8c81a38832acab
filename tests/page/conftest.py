"""The page on a free port, a stand-in for the training, and a real Chromium to look with."""

import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urljoin

import pytest

from kohya_gui.server import scripts
from tests.training import demo  # noqa: F401

# The last list of features counts, so those of Playwright's that matter stand here, too. The suggestions of the address
# line are a page of their own, drawn by a process of its own for every window though nobody sees it.
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
    # Each address in the process of the one before: to start a new one is a third of what a visit takes.
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
    "--js-flags=--no-opt --max-lazy",
]  # no script runs long enough to make up for being optimized, or compiled before it is called
# The browser has no time to spare unless a test says so: forms that nobody opens would be made in each visit.
NEVER_IDLE = "window.idle = []; window.requestIdleCallback = (act) => idle.push(act);"
STAND_IN = Path(__file__).with_name("stand_in.py")
# What works the queue off, with stand-ins for the trainings.
WORKER = """
import sys
from library.runs import start, worker
start.starting = lambda path, script, **how: ([sys.executable, {stand_in!r}, "--config_file", str(path)], dict())
worker.PERIOD = 0.1
sys.exit(worker.main())
"""
FORM = f"import('.{scripts.ADDRESS}').then(({{ modules }}) => modules['form/page.js'])"
SIZE = {"width": 1440, "height": 900}
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")


@pytest.fixture(scope="session")
def chromium():
    """One browser for all tests; skips where there is none."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        pytest.skip(f"no Chromium or Chrome on the PATH (looked for {', '.join(NAMES)}; CHROMIUM names one)")
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """The page's address and the folder that configs may be in."""
    import uvicorn

    from kohya_gui.app import application, bind, build_page

    root = tmp_path_factory.mktemp("page")
    bound = bind("127.0.0.1", 0)
    app = application(build_page([root]), {"host": "127.0.0.1"})
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{bound.getsockname()[1]}/", root
    server.should_exit = True
    thread.join(timeout=5)


@pytest.fixture
def stand_ins(monkeypatch):
    """Trainings are stand-ins, and nothing that they name is there; while a test runs and no longer, since others in
    this process start real ones."""
    from kohya_gui.server import paths
    from library.check import isolated
    from library.runs import queue, start

    monkeypatch.setattr(
        start, "starting", lambda path, script, **how: ([sys.executable, str(STAND_IN), "--config_file", str(path)], {})
    )
    monkeypatch.setattr(queue, "RUNNER", [sys.executable, "-c", WORKER.format(stand_in=str(STAND_IN))])
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN.parents[2]))
    told = lambda reading, launch: {"findings": isolated.known(reading), "fit": None}  # noqa: E731
    monkeypatch.setattr(isolated, "check_reading", told)
    monkeypatch.setattr(isolated, "check_all", lambda readings, launch: [told(one, launch) for one in readings])
    monkeypatch.setattr(paths, "_outside", lambda config, roots: [])  # nowhere is outside of the roots


def own_faults(error):
    """An error of the page's scripts, unless it is Gradio's complaint that a page was left while it was asking. Of a
    server that does not answer the browser itself complains."""
    return [] if "Failed to fetch" in error and "/assets/" in error else [error]


class Visit:
    """One visitor's window onto the page, with all that it asked for and complained about."""

    def __init__(self, browser, address, **how):
        self.address, self.how, self.requests, self.complaints = address, how, [], []
        self.context = browser.new_context(viewport=SIZE, accept_downloads=True, reduced_motion="reduce", **how)
        self.context.add_init_script(NEVER_IDLE)
        self.page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.extend(own_faults(str(error))))
        self.page.on(
            "console", lambda said: self.complaints.extend(own_faults(said.text)) if said.type == "error" else None
        )
        self.open()

    def open(self):
        self.page.goto(self.address)
        self.page.wait_for_selector("form.settings")
        self.page.evaluate(f"() => {FORM}.then(() => null)")  # a click before its scripts are there opens nothing

    def leave(self):
        """What the next visitor would find of this one goes: stored data, other windows, size and pointer."""
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

    def tab(self, name):
        self.page.get_by_role("tab", name=name, exact=True).click()
        self.page.locator(f"#{name.lower().replace(' ', '-')}-form").wait_for()

    def family(self, name):
        self.page.locator("form.settings:visible").get_by_text(name, exact=True).click()

    def fill(self, **values):
        form = self.page.locator("form.settings:visible")
        for name, value in values.items():
            form.locator(f"[data-option={name}]:visible").fill(str(value))

    def held(self, tab="lora"):
        """What the form of a tab would send; asking for it changes nothing on the page."""
        return self.page.evaluate(f"tab => {FORM}.then(({{ held, formOf }}) => held(formOf(tab)))", tab)

    def put(self, **values):
        """Put values into the LoRA form as a config that is loaded does."""
        sent = json.dumps({"values": values})
        self.page.evaluate(f"sent => {FORM}.then(({{ fill }}) => fill('lora', sent))", sent)

    def said(self):
        """What the page says beside its buttons, when it has said something new."""
        return self.page.locator(".message:visible").inner_text()

    def until(self, words, where=".message"):
        self.page.locator(f"{where}:visible", has_text=words).first.wait_for()
        return self

    def has_none(self, script):
        """What a script looks for is not there, or soon is not: colours and sizes take a moment to change."""
        end = time.monotonic() + 10
        while (found := self.page.evaluate(script)) and time.monotonic() < end:
            time.sleep(0.1)
        assert found == []

    def state(self, state):
        self.page.wait_for_selector(f'.run[data-state="{state}"]')
        return self.page.locator(".run").get_attribute("data-run")


@pytest.fixture(scope="session")
def windows():
    """The window that the next visit goes on with, if there is one: another would read and compile all scripts anew."""
    return list[Visit]()


def begun(windows, browser, address):
    if not windows:
        return Visit(browser, address)
    visit = windows.pop()
    visit.address = address
    visit.open()
    return visit


def ended(windows, visit):
    """What a visit complained about and asked for. Its window stays, if it is as any other and no other stays."""
    seen = visit.complaints[:], visit.requests[:]
    if windows or visit.how or visit.page.is_closed():
        visit.context.close()
    else:
        visit.leave()
        windows.append(visit)
    return seen


@pytest.fixture
def visit(chromium, served, windows, stand_ins, monkeypatch, tmp_path):
    """Visits to the page of a user without any runs. At the end none may have seen an error or gone elsewhere."""
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
