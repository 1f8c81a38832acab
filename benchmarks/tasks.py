"""Ten daily tasks in headless Chromium, on the demo's files: the clicks, fields and seconds that each takes.

    python -m benchmarks.tasks [--only NAME] [--markdown FILE]

Hands that need no time do them, so the seconds are the page's own, the whole check before a training included.
Trainings are stand-ins, which keep records as real ones do. A file that is chosen counts as the click that opens the
browser's dialog for it; a path that is pasted, a number, and a choice from a list count as a field each.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.screenshots import CHROMIUM, PROJECT_ROOT, WINDOW_SIZES, online

CHECK_TIMEOUT_MS = 60_000  # milliseconds: the check before a training loads torch
STAND_IN = PROJECT_ROOT / "tests" / "page" / "stand_in.py"
MODEL_OPTION = "pretrained_model_name_or_path"


@dataclass
class Hands:
    """What a person does on a page, counted."""

    page: Any
    clicks: int = 0
    fields: int = 0
    began: float = field(default_factory=time.perf_counter)

    def click(self, selector: str) -> None:
        self.clicks += 1
        self.page.locator(f"{selector} >> visible=true").first.click()

    def press(self, name: str) -> None:
        self.clicks += 1
        self.page.get_by_role("button", name=name, exact=True).locator("visible=true").first.click()

    def tab(self, name: str) -> None:
        self.clicks += 1
        self.page.get_by_role("tab", name=name, exact=True).click()

    def fill(self, **values: Any) -> None:
        """Fields of the form by option name."""
        for name, value in values.items():
            self.type(f"form.settings [data-option={name}]", value)

    def type(self, selector: str, value: Any) -> None:
        self.fields += 1
        field = self.page.locator(f"{selector} >> visible=true").first
        field.fill(str(value))
        field.dispatch_event("change")

    def choose(self, selector: str, **what: str) -> None:
        self.fields += 1
        self.page.locator(f"{selector} >> visible=true").first.select_option(**what)

    def send(self, selector: str, files: list[Path]) -> None:
        self.clicks += 1
        self.page.locator(selector).first.set_input_files([str(file) for file in files])

    def until(self, words: str, where: str = ".message") -> None:
        self.page.locator(f"{where}:visible", has_text=words).first.wait_for()


@dataclass(frozen=True)
class Ground:
    """The files that the tasks are done on."""

    folder: Path
    demo: Any

    @property
    def model(self) -> Path:
        return self.demo.models["sdxl"]["sdxl"]

    def images(self, name: str, count: int) -> Path:
        """A folder with so many images of the demo and their captions."""
        folder = self.folder / name
        folder.mkdir()
        known = sorted(self.demo.images.rglob("*.png"))
        for number in range(count):
            image = known[number % len(known)]
            for path in (image, image.with_suffix(".txt")):
                shutil.copy(path, folder / f"{number:03}{path.suffix}")
        return folder

    def config(self, name: str) -> Path:
        """A JSON as kohya_ss saves it."""
        path = self.folder / f"{name}.json"
        told = {
            "sdxl": True,
            "LoRA_type": "Standard",
            MODEL_OPTION: str(self.model),
            "train_data_dir": str(self.demo.images),
            "output_dir": str(self.folder / "out"),
            "output_name": name,
            "max_resolution": "256,256",
            "caption_extension": ".txt",
            "max_train_steps": 20,
            "network_dim": 8,
            "learning_rate": 1e-4,
            "mixed_precision": "no",
            "save_precision": "fp16",
            "optimizer": "AdamW",
        }
        path.write_text(json.dumps(told), encoding="utf-8")
        return path


# ---- the tasks: each is done on a page that was just opened


def photos(hands: Hands, ground: Ground) -> None:
    hands.fill(**{MODEL_OPTION: ground.model})
    hands.send("#lora-form .choose-images input", sorted(ground.images("photos", 12).iterdir()))
    hands.until("12 with a caption", ".datasets .numbers")
    hands.fill(output_dir=ground.folder / "out", output_name="photos")
    hands.press("Train")
    hands.until("Started")


def resume_run(hands: Hands, ground: Ground) -> None:
    hands.click(".live [data-act=resume]")
    hands.until("It resumes", ".live .answer")


def epochs(hands: Hands, ground: Ground) -> None:
    hands.click(".live .sample")  # it opens beside the one before it
    hands.page.wait_for_function("[...document.querySelectorAll('dialog.compare img')].every((i) => i.naturalWidth)")


def edit_captions(hands: Hands, ground: Ground) -> None:
    folder = ground.images("hundred", 100)
    hands.tab("Data set")
    hands.type("#images-folder", folder)
    hands.press("Open folder")
    hands.page.wait_for_function("document.querySelectorAll('.images article').length")
    hands.click("[data-panel=caption] summary")
    hands.type("#caption-wd14-model", folder)  # in place of a tagger's folder
    hands.clicks += 1  # the button that starts it: what it takes then is the tagger's time


def import_and_start(hands: Hands, ground: Ground) -> None:
    hands.type("input[placeholder^='Config file'], textarea[placeholder^='Config file']", ground.config("theirs"))
    hands.press("Load config")
    hands.until("Loaded theirs.json")
    hands.press("Train")
    hands.until("Started")


def two_sets(hands: Hands, ground: Ground) -> None:
    hands.fill(**{MODEL_OPTION: ground.model}, output_dir=ground.folder / "out", output_name="two")
    for number, name in enumerate(("first", "second")):
        folder = ground.images(name, 4)
        hands.press("Add a folder")
        hands.type(f".datasets li:nth-child({number + 1}) [data-set=image_dir]", folder)
        hands.until("4 with a caption", f".datasets li:nth-child({number + 1}) .numbers")
    hands.press("Train")
    hands.until("Started")


def lokr(hands: Hands, ground: Ground) -> None:
    hands.fill(**{MODEL_OPTION: ground.model}, train_data_dir=ground.demo.images, output_dir=ground.folder / "out")
    hands.press("Adapter")
    hands.choose(".adapter .kinds", label="LyCORIS: LoKr")
    hands.page.locator(".adapter [data-argument=factor]").first.wait_for()
    hands.press("Train")
    hands.until("Started")


def compare_rates(hands: Hands, ground: Ground) -> None:
    hands.fill(**{MODEL_OPTION: ground.model}, train_data_dir=ground.demo.images, output_dir=ground.folder / "out")
    hands.click("#lora-form .field:has([data-option=learning_rate]) .several")
    hands.type(".message .side input", "5e-5 1e-4 2e-4")
    hands.press("Add them to the queue")
    hands.until("3 trainings are in the queue")


def moved(hands: Hands, ground: Ground) -> None:
    hands.type("input[placeholder^='Config file'], textarea[placeholder^='Config file']", ground.config("moved"))
    hands.press("Load config")
    hands.until("Loaded moved.json")
    hands.clicks, hands.fields = 0, 0  # until here it is as it was left
    hands.press("More")
    with hands.page.expect_download() as download:
        hands.press("Download")
    file = ground.folder / "moved.toml"
    download.value.save_as(file)
    hands.page.evaluate("sessionStorage.clear()")
    hands.page.goto(hands.page.url)  # the page of the other machine
    hands.page.wait_for_selector("form.settings")
    hands.press("More")
    hands.send("input[type=file][accept*=toml]", [file])
    hands.until("Loaded")
    hands.fill(**{MODEL_OPTION: ground.model}, train_data_dir=ground.demo.images, output_dir=ground.folder / "out")


# In this order: the first two are about the run that is there before.
TASKS: dict[str, tuple[str, str, Callable[[Hands, Ground], None]]] = {
    "epochs": ("Compare the samples of two epochs", "desk", epochs),
    "resume": ("Go on with a run that was stopped", "desk", resume_run),
    "photos": ("A new LoRA from a phone's photos, to its start", "phone", photos),
    "captions": ("Have 100 images captioned, to the start", "desk", edit_captions),
    "imported": ("Import a config of kohya_ss and train it", "desk", import_and_start),
    "sets": ("Train on two data sets", "desk", two_sets),
    "lokr": ("Train a LoKr", "desk", lokr),
    "rates": ("Three learning rates in the queue, to compare them", "desk", compare_rates),
    "moved": ("Move a config to another machine, with its three paths", "desk", moved),
}
UPDATE = "| Update program and packages: `./setup.sh update`, or `setup.bat update` | - | - | - |"


def record_stopped_run(ground: Ground) -> None:
    """A run that was stopped, with samples of two epochs and a state to go on from."""
    from PIL import Image

    from library.config.building import build_config
    from library.config.formats import to_toml
    from library.families import config_class
    from library.runs import layout
    from library.runs.record import Record

    out = ground.folder / "before"
    with Record.start({}, "sdxl_train_network", out, "before", "SDXL LoRA") as run:
        config = {
            MODEL_OPTION: str(ground.model),
            "train_data_dir": str(ground.demo.images),
            "output_dir": str(out),
            "output_name": "before",
            "resolution": "256",
            "max_train_steps": 40,
        }
        (run.folder / layout.TOML).write_text(
            to_toml(build_config(config_class("sdxl_train_network"), config, notes=[]))
        )
        run.plan(40)
        for step in (10, 20):
            run.step({"step": step, "loss": 0.1, "lr": 1e-4})
            picture = out / f"{step}.png"
            Image.new("RGB", (256, 256), (step * 9, 90, 90)).save(picture)
            run.event("sample", file=str(picture), step=step, prompt="a zorb toy", number=0)
        state = out / "before-state"
        state.mkdir()
        (state / "train_state.json").write_text(json.dumps({"current_step": 20}), encoding="utf-8")
        run.event("saved", file=str(state), step=20, bytes=1000)
        run.finish("stopped")


def _stand_in(config_path: Path | str, script: str, **how: Any) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, str(STAND_IN), "--config_file", str(config_path)], {}


def measure_tasks(only: list[str], folder: Path) -> list[str]:
    """The lines of the table."""
    from playwright.sync_api import sync_playwright

    from library.demo.files import prepare_demo
    from library.runs import queue, start

    start.starting = _stand_in
    queue.pause()  # its process would start real trainings
    ground = Ground(folder, prepare_demo(folder / "demo", ("sdxl",)))
    record_stopped_run(ground)
    lines = ["| task | clicks | fields | seconds |", "|---|---|---|---|"]
    chromium = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM)), None)
    with online(folder) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name in only or TASKS:
            title, size, task = TASKS[name]
            width, height = WINDOW_SIZES[size]
            context = browser.new_context(viewport={"width": width, "height": height}, has_touch=size == "phone")
            page = context.new_page()
            page.set_default_timeout(CHECK_TIMEOUT_MS)
            page.goto(address)
            page.wait_for_selector("form.settings")
            page.wait_for_selector(".run[data-run]")
            hands = Hands(page)
            task(hands, ground)
            seconds = time.perf_counter() - hands.began
            lines.append(f"| {title} | {hands.clicks} | {hands.fields} | {seconds:.1f} |")
            print(lines[-1], flush=True)
            wait_until_idle()
            context.close()
        browser.close()
    return [*lines, UPDATE]


def wait_until_idle() -> None:
    """Wait until no stand-in trains, so that the next task finds its GPU free."""
    from library.runs import reader, stop

    for run in reader.runs():
        if run.active:
            stop.request(run.id, "now")
    while any(run.active for run in reader.runs()):
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Count the clicks and seconds of ten daily tasks.")
    parser.add_argument("--only", choices=list(TASKS), action="append", default=[])
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tasks-") as made:
        folder = Path(made).resolve()
        os.environ["KOHYA_HOME"] = str(folder / "home")
        lines = measure_tasks(asked.only, folder)
    if asked.markdown:
        asked.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
