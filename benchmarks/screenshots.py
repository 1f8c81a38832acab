"""Take the documents' screenshots of tabs, light and dark, for desktop and phone, while the demo is trained.

python -m benchmarks.screenshots                                # into docs/screenshots
python -m benchmarks.screenshots --only lab --to /tmp/pictures  # one tab only
"""

import argparse
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.online import find_chromium, page_online
from library.runs import reader
from library.trainings import reopening

PROJECT_ROOT = Path(__file__).resolve().parents[1]
WINDOW_SIZES = {"desk": (1440, 900), "phone": (390, 844)}
DEMO_TIMEOUT = 900.0  # seconds for the demo to reach the step of the screenshots
COLOURS = 96  # palette size: enough for a page, and a third of the bytes


@contextmanager
def trainings_at_work(demo: Any, folder: Path) -> Iterator[None]:
    """Train the demo's model within the context, stopped once and continued, with further trainings in the queue."""
    from library.config.building import build_config
    from library.config.formats import read_toml
    from library.families import config_class
    from library.runs import process, queue, start, stop

    script = "sdxl_train_network"
    values = read_toml(demo.configs[script]) | {"output_dir": str(folder / "results"), "output_name": "zorb"}
    real = {
        "sample_every_n_steps": 100,
        "lr_scheduler": "cosine",
        "save_state": True,
        "lr_warmup_steps": 20,
        "max_train_steps": 4000,
        "save_every_n_steps": 100,
    }
    running = start.begin_job(start.job_of_config(build_config(config_class(script), values | real, notes=[])))
    try:
        wait_for_step(running, 60)
        stop.request(running, "after_step")
        running = start.begin_job(reopening.continuation(wait_for_end(running)))
        wait_for_step(running, 220)
        queue.RUNNER[:] = [sys.executable, "-c", "pass"]  # this process poses as the queue's worker
        for rank in (32, 64):
            own = {"output_name": f"zorb-rank-{rank}", "network_dim": rank}
            queue.add_to_queue(start.job_of_config(build_config(config_class(script), values | own, notes=[])))
        with queue.changing() as data:
            data.worker = process.identity()
        yield
    finally:
        stop.request(running, "now")
        wait_for_end(running)  # until then it writes into the folder


def wait_for_step(run_id: str, step: int) -> None:
    """Wait until a run has reached a step."""
    limit = time.monotonic() + DEMO_TIMEOUT
    while time.monotonic() < limit:
        run = reader.find_run(run_id)
        if not run.active:
            raise RuntimeError(f"{run_id} is {run.state}: {run.error}")
        progress = reader.progress(run.folder).update()
        if progress.last.get("step", 0) >= step and not progress.phase:
            return
        time.sleep(0.2)
    raise RuntimeError(f"{run_id} took more than {DEMO_TIMEOUT:.0f} s to reach step {step}")


def wait_for_end(run_id: str) -> reader.RecordedRun:
    while (run := reader.find_run(run_id)).active:
        time.sleep(0.2)
    return run


# ---- preparing each tab for its screenshot

Page = Any


def lora(page: Page, demo: Any) -> None:
    if not page.get_by_placeholder("Config file").locator("visible=true").count():  # collapsed on a phone
        page.locator(".extra:visible").click()
    page.get_by_placeholder("Config file").locator("visible=true").fill(str(demo.configs["sdxl_train_network"]))
    page.get_by_role("button", name="Load config", exact=True).locator("visible=true").click()
    page.locator(".message:visible").wait_for()
    page.evaluate("scrollTo(0, 0)")


def models(page: Page, demo: Any) -> None:
    page.locator(".find-models >> visible=true").first.click()
    page.locator("dialog.models[open]").wait_for()


def show_compiling(page: Page, demo: Any) -> None:
    page.get_by_role("button", name="Torch Compile Settings").locator("visible=true").click()
    page.locator("#finetune-compile").check()
    page.locator("#finetune-compile").scroll_into_view_if_needed()


def check_messages(page: Page, demo: Any) -> None:
    page.get_by_role("button", name="Train", exact=True).locator("visible=true").click()
    page.locator(".message:visible").wait_for()


def show_images(page: Page, demo: Any) -> None:
    page.locator("#images-tab").select_option("lora")  # the form with the demo's folder; by default the last open one
    page.get_by_role("button", name="Use this tab's settings").click()
    page.wait_for_function("[...document.querySelectorAll('.images article img')].some((i) => i.naturalWidth > 0)")


def masks(page: Page, demo: Any) -> None:
    panel = page.locator("[data-panel=masks]")
    panel.locator("summary").first.click()
    panel.evaluate("e => e.scrollIntoView({ block: 'start' })")


def show_unchanged(page: Page, demo: Any) -> None:
    """Change nothing."""


# In this order, as one window visits all of them.
TABS: dict[str, tuple[str, Callable[[Page, Any], None]]] = {
    "lora": ("LoRA", lora),
    "models": ("LoRA", models),
    "dreambooth": ("DreamBooth", check_messages),
    "finetune": ("Finetune", show_compiling),
    "inversion": ("Textual inversion", show_unchanged),
    "lllite": ("LLLite", show_unchanged),
    "runs": ("Runs", show_unchanged),
    "lab": ("Lab", show_unchanged),
    "dataset": ("Data", show_images),
    "masks": ("Data", masks),
    "sampling": ("Try it", show_unchanged),
    "tools": ("Tools", show_unchanged),
}
SHOWN_IN_DOCS = ("lora", "runs", "dataset", "tools")


def shoot(page: Page, name: str, demo: Any, to: Path | None) -> None:
    """Open a tab, prepare it, and save a screenshot."""
    title, prepare = TABS[name]
    tab = page.get_by_role("tab", name=title, exact=True)
    if not tab.is_visible():  # a kind of training
        page.get_by_role("tab", name="Train", exact=True).click()
    tab.click()
    page.evaluate("scrollTo(0, 0)")
    prepare(page, demo)
    page.wait_for_timeout(700)  # until late content is rendered
    if to:
        taken = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        to.parent.mkdir(parents=True, exist_ok=True)
        taken.quantize(COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(to, optimize=True)
    page.keyboard.press("Escape")


def shoot_window(browser: Any, address: str, demo: Any, size: str, mode: str, args: argparse.Namespace) -> None:
    """Take all screenshots in one window."""
    width, height = WINDOW_SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=mode, has_touch=size == "phone"
    )
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.goto(address)
    page.wait_for_selector("form.settings")
    page.wait_for_selector(".run[data-run]")
    wanted = args.only or SHOWN_IN_DOCS
    before = {"dataset": ["lora"], "masks": ["lora", "dataset"]}  # tabs on whose state others depend
    for name in TABS:
        if name in wanted or any(name in before.get(other, ()) for other in wanted):
            shoot(page, name, demo, args.to / f"{name}-{size}-{mode}.png" if name in wanted else None)
    context.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Take screenshots of the page.")
    parser.add_argument("--to", type=Path, default=PROJECT_ROOT / "docs" / "screenshots")
    parser.add_argument("--only", choices=list(TABS), action="append")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kohya-screenshots-") as place:
        folder = Path(place).resolve()
        os.environ["KOHYA_HOME"] = str(folder / "home")
        from playwright.sync_api import sync_playwright

        from library.demo.files import prepare_demo

        demo = prepare_demo(folder / "demo", ("flux", "sdxl"), compiled=True, trained=("flux", "sdxl"))
        with trainings_at_work(demo, folder), page_online(folder) as address, sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=find_chromium(), args=["--no-sandbox", "--disable-gpu"]
            )
            for size in WINDOW_SIZES:
                for mode in ("light", "dark"):
                    shoot_window(browser, address, demo, size, mode, args)
            browser.close()
    total = sum(file.stat().st_size for file in args.to.glob("*.png"))
    print(f"{len(list(args.to.glob('*.png')))} screenshots, {total / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
