"""Pictures of tabs, light and dark, on a desk and on a phone, while the demo is trained: those that documents show.

python -m benchmarks.screenshots                                # into docs/screenshots
python -m benchmarks.screenshots --only lab --to /tmp/pictures  # of another tab
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
DEMO_TIMEOUT = 900.0  # seconds in which the demo gets to where its pictures are taken
COLOURS = 96  # of a picture's palette: enough for a page, and a third of the bytes


@contextmanager
def trainings_at_work(demo: Any, folder: Path) -> Iterator[None]:
    """A real training of the demo's model, stopped once and continued, and trainings that wait for its end."""
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
        reach(running, 60)
        stop.request(running, "after_step")
        running = start.begin_job(reopening.continuation(ended(running)))
        reach(running, 220)
        queue.RUNNER[:] = [sys.executable, "-c", "pass"]  # and this process says that it works the queue off
        for rank in (32, 64):
            own = {"output_name": f"zorb-rank-{rank}", "network_dim": rank}
            queue.add_to_queue(start.job_of_config(build_config(config_class(script), values | own, notes=[])))
        with queue.changing() as data:
            data.worker = process.identity()
        yield
    finally:
        stop.request(running, "now")
        ended(running)  # it writes into the folder until then


def reach(run_id: str, step: int) -> None:
    """Wait until a run is at a step."""
    limit = time.monotonic() + DEMO_TIMEOUT
    while time.monotonic() < limit:
        run = reader.find_run(run_id)
        if not run.active:
            raise RuntimeError(f"{run_id} is {run.state}: {run.error}")
        progress = reader.progress(run.folder).update()
        if progress.last.get("step", 0) >= step and not progress.phase:
            return
        time.sleep(0.2)
    raise RuntimeError(f"{run_id} took more than {DEMO_TIMEOUT:.0f} s to get to step {step}")


def ended(run_id: str) -> reader.RecordedRun:
    """Wait for the end of a run."""
    while (run := reader.find_run(run_id)).active:
        time.sleep(0.2)
    return run


# ---- what is done in each tab before its picture is taken

Page = Any


def lora(page: Page, demo: Any) -> None:
    if not page.get_by_placeholder("Config file").locator("visible=true").count():  # a phone folds it away
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
    page.locator("#images-tab").select_option("lora")  # the form with the demo's folder; the last one open is chosen
    page.get_by_role("button", name="Use this tab's settings").click()
    page.wait_for_function("[...document.querySelectorAll('.images article img')].some((i) => i.naturalWidth > 0)")


def masks(page: Page, demo: Any) -> None:
    panel = page.locator("[data-panel=masks]")
    panel.locator("summary").first.click()
    panel.evaluate("e => e.scrollIntoView({ block: 'start' })")


def show_as_it_is(page: Page, demo: Any) -> None:
    """As it is found."""


# In this order: one window goes through all of them.
TABS: dict[str, tuple[str, Callable[[Page, Any], None]]] = {
    "lora": ("LoRA", lora),
    "models": ("LoRA", models),
    "dreambooth": ("DreamBooth", check_messages),
    "finetune": ("Finetune", show_compiling),
    "inversion": ("Textual inversion", show_as_it_is),
    "lllite": ("LLLite", show_as_it_is),
    "runs": ("Runs", show_as_it_is),
    "lab": ("Lab", show_as_it_is),
    "dataset": ("Data", show_images),
    "masks": ("Data", masks),
    "sampling": ("Try it", show_as_it_is),
    "tools": ("Tools", show_as_it_is),
}
SHOWN_IN_DOCS = ("lora", "runs", "dataset", "tools")


def shoot(page: Page, name: str, demo: Any, to: Path | None) -> None:
    """Open a tab, do what it is for, and keep a picture."""
    title, prepare = TABS[name]
    tab = page.get_by_role("tab", name=title, exact=True)
    if not tab.is_visible():  # a kind of training
        page.get_by_role("tab", name="Train", exact=True).click()
    tab.click()
    page.evaluate("scrollTo(0, 0)")
    prepare(page, demo)
    page.wait_for_timeout(700)  # for what is rendered a moment later
    if to:
        taken = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        to.parent.mkdir(parents=True, exist_ok=True)
        taken.quantize(COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(to, optimize=True)
    page.keyboard.press("Escape")


def through(browser: Any, address: str, demo: Any, size: str, mode: str, args: argparse.Namespace) -> None:
    """All pictures of one window."""
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
    before = {"dataset": ["lora"], "masks": ["lora", "dataset"]}  # what a tab shows something of
    for name in TABS:
        if name in wanted or any(name in before.get(other, ()) for other in wanted):
            shoot(page, name, demo, args.to / f"{name}-{size}-{mode}.png" if name in wanted else None)
    context.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Take pictures of the page.")
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
                    through(browser, address, demo, size, mode, args)
            browser.close()
    total = sum(file.stat().st_size for file in args.to.glob("*.png"))
    print(f"{len(list(args.to.glob('*.png')))} pictures, {total / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
