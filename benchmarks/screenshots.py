"""Pictures of every tab, light and dark, on a desk and on a phone, with a demo's data and a run that works.

python -m benchmarks.screenshots [--to docs/screenshots] [--only NAME]
"""

import argparse
import io
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SIZES = {"desk": (1440, 900), "phone": (390, 844)}
COLOURS = 96  # of a picture's palette: enough for a page, and a third of the bytes


@contextmanager
def online(root: Path) -> Iterator[str]:
    """The page in a thread of this process; its address."""
    import uvicorn

    from kohya_gui.app import application, build
    from kohya_gui.serving import bind

    bound = bind("127.0.0.1", 0)
    app = application(build([root]), {"host": "127.0.0.1"})
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{bound.getsockname()[1]}/"
    server.should_exit = True
    thread.join(5)


@contextmanager
def working(demo: Any, folder: Path) -> Iterator[None]:
    """A run in the middle of its work, as a real one would have written it down, and trainings that wait."""
    from library.config.schema import build, changed, read_toml
    from library.families import config_class
    from library.runs import process, queue, start
    from library.runs.record import Record

    script = "flux_train_network"
    values = read_toml(demo.configs[script]) | {"output_dir": str(folder / "results"), "output_name": "zorb"}
    config = build(config_class(script), values | {"max_train_steps": 1600}, notes=[])
    pictures = sorted(demo.images.rglob("*.png"))
    with Record.start(changed(config), script, folder / "results", "zorb", "FLUX.1 LoRA") as run:
        run.plan(1600)
        for block, seconds in (("DoubleStreamBlock", 14.2), ("SingleStreamBlock", 6.1)):
            run.event("compile", block=block, forward=True, seconds=seconds, reason="", failed="", total=seconds,
                      cache_hits=0)  # fmt: skip
        for step in range(1, 721):
            loss = 0.09 + 0.4 * math.exp(-step / 160) + 0.05 * math.sin(step * 1.7) * math.sin(step * 0.37)
            run.step({"step": step, "epoch": 1 + step // 120, "loss": loss, "lr": {"unet": 1e-4}, "s_it": 0.84,
                      "grad_norm": 0.31, "eta": (1600 - step) * 0.84, "data_s": 0.004, "transfer_s": 0.002,
                      "compute_s": 0.83, "memory_gb": 17.6})  # fmt: skip
        saved = folder / "results" / "zorb-step00000500.safetensors"
        saved.write_bytes(bytes(38_000_000))
        run.event("saved", file=str(saved), step=500, bytes=38_000_000, ok=True, text="it loads: all 608 tensors match")
        for number, picture in enumerate(pictures[:4]):
            place = folder / "results" / "sample" / f"zorb_{number:06d}.png"
            place.parent.mkdir(exist_ok=True)
            shutil.copy(picture, place)
            run.event("sample", file=str(place), step=250 * (1 + number // 2), prompt="a zorb toy", number=number % 2)
        queue.RUNNER[:] = [sys.executable, "-c", "pass"]  # and this process says that it works them off
        for name in ("plix-rank-32", "plix-rank-64"):
            waiting = build(config_class(script), values | {"output_name": name}, notes=[])
            queue.add(start.job(waiting))
        with queue.changing() as kept:
            kept.worker = process.identity()
        yield
        run.finish("stopped")


# ---- what is done in each tab before its picture is taken

Page = Any


def lora(page: Page, demo: Any) -> None:
    page.get_by_placeholder("Config file").locator("visible=true").fill(str(demo.configs["flux_train_network"]))
    page.get_by_role("button", name="Load config", exact=True).locator("visible=true").click()
    page.locator(".message:visible").wait_for()
    page.evaluate("scrollTo(0, 0)")


def compiling(page: Page, demo: Any) -> None:
    page.get_by_role("button", name="Torch Compile Settings").locator("visible=true").click()
    page.locator("#finetune-compile").check()
    page.locator("#finetune-compile").scroll_into_view_if_needed()


def told(page: Page, demo: Any) -> None:
    page.get_by_role("button", name="Train", exact=True).locator("visible=true").click()
    page.locator(".message:visible").wait_for()


def images(page: Page, demo: Any) -> None:
    page.locator("#images-folder").fill(str(demo.images))
    page.get_by_role("button", name="Look at it").click()
    page.wait_for_function("[...document.querySelectorAll('.images article img')].some((i) => i.naturalWidth > 0)")


def nothing(page: Page, demo: Any) -> None:
    """As it is found."""


TABS: dict[str, tuple[str, Callable[[Page, Any], None]]] = {
    "lora": ("LoRA", lora),
    "dreambooth": ("DreamBooth", told),
    "finetune": ("Finetune", compiling),
    "queue": ("Queue", nothing),
    "lab": ("Compile Lab", nothing),
    "dataset": ("Data set", images),
    "tools": ("LoRA tools", nothing),
}


def shoot(context: Any, address: str, name: str, demo: Any, to: Path) -> None:
    """Open a tab in a fresh window, do what it is for, and keep a picture."""
    title, prepare = TABS[name]
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.goto(address)
    page.wait_for_selector("form.settings")
    page.wait_for_selector(".run[data-run]")
    page.get_by_role("tab", name=title, exact=True).click()
    page.wait_for_timeout(500)
    prepare(page, demo)
    page.wait_for_timeout(1500)
    taken = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    to.parent.mkdir(parents=True, exist_ok=True)
    taken.quantize(COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(to, optimize=True)
    page.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Take pictures of the page.")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "screenshots")
    parser.add_argument("--only", choices=list(TABS), action="append")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="anna-") as made:
        folder = Path(made).resolve()
        os.environ["KOHYA_HOME"] = str(folder / "home")
        from playwright.sync_api import sync_playwright

        from library.demo.files import prepare

        demo = prepare(folder / "demo", ("flux", "sdxl"))
        chromium = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM)), None)
        with working(demo, folder), online(folder) as address, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            for size, (width, height) in SIZES.items():
                for mode in ("light", "dark"):
                    shape = {"width": width, "height": height}
                    context = browser.new_context(viewport=shape, color_scheme=mode, has_touch=size == "phone")
                    for name in asked.only or TABS:
                        shoot(context, address, name, demo, asked.to / f"{name}-{size}-{mode}.png")
                    context.close()
            browser.close()
    total = sum(file.stat().st_size for file in asked.to.glob("*.png"))
    print(f"{len(list(asked.to.glob('*.png')))} pictures, {total / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
