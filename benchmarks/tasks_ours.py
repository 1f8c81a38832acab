"""The daily tasks of benchmarks.tasks in this project's page."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.tasks_hands import MENDED, MODEL, Ground, Hands, await_text

STAND_IN = Path(__file__).resolve().parents[1] / "tests" / "page" / "stand_in.py"


def stand_in(config_path: Path | str, script: str, **how: Any) -> tuple[list[str], dict[str, str]]:
    """In place of the command that starts a training."""
    return [sys.executable, str(STAND_IN), "--config_file", str(config_path)], {}


def option(hands: Hands, name: str) -> Any:
    return hands.page.locator(f"form.settings [data-option={name}]")


def load(hands: Hands, path: Path) -> None:
    hands.type(hands.page.get_by_placeholder("Config file"), path)
    hands.press("Load config")
    hands.until(f"Loaded {path.name}")


def stop_all() -> None:
    """Wait until no stand-in trains, so that the next task finds the device free."""
    from library.runs import queue, reader, stop

    for entry in queue.read_queue().waiting:
        queue.remove_entry(entry.id)
    for run in reader.runs():
        if run.active:
            stop.request(run.id, "now")
    while any(run.active for run in reader.runs()):
        time.sleep(0.1)


def finished_run(ground: Ground) -> None:
    """The record of a training that ended: a loss per step, samples of three steps, saved files."""
    from PIL import Image

    from library.runs.record import Record

    out = ground.folder / "finished"
    out.mkdir()
    settings = {"save": {"output_dir": str(out), "output_name": "finished"}}
    with Record.start(settings, "sdxl_train_network", out, "finished", "SDXL LoRA") as run:
        run.plan(60)
        for step in range(1, 61):
            run.step({"step": step, "loss": 1 / (step + 5), "lr": 1e-4})
            if step % 20 == 0:
                picture, result = out / f"{step}.png", out / f"finished-step{step:08d}.safetensors"
                Image.new("RGB", (256, 256), (step * 4, 90, 90)).save(picture)
                run.event("sample", file=str(picture), step=step, prompt="a zorb toy", number=0)
                result.write_bytes(b"x" * 1000)
                run.event("saved", file=str(result), step=step, bytes=1000)


# ---- the tasks: each is done on a page that was just opened


def first_lora(hands: Hands, ground: Ground) -> None:
    hands.type(option(hands, MODEL), ground.model)
    hands.type(option(hands, "train_data_dir"), ground.images("first"))
    hands.press("Train")
    hands.until("Started")


def import_and_train(hands: Hands, ground: Ground) -> None:
    load(hands, ground.config("theirs"))
    hands.press("Train")
    hands.until("Started")


def preset(hands: Hands, ground: Ground) -> None:
    hands.press("Presets")
    hands.click('.preset[data-preset="sdxl/lora-24gb"]')
    hands.page.locator(".changes-made tr", has_text="gpu_memory_limit").wait_for()


def find_setting(hands: Hands, ground: Ground) -> None:
    hands.type(hands.page.locator(".search input"), "noise offset")
    hands.page.locator(".search [role=listbox] li", has_text="noise_offset").locator("visible=true").first.wait_for()
    hands.page.keyboard.press("Enter")
    hands.page.locator(".field.found [data-option=noise_offset]").locator("visible=true").wait_for()


def mend(hands: Hands, ground: Ground) -> None:
    images = ground.images("mended/10_zorb toy").parent
    load(hands, ground.config("wrong", images, learning_rate=2, pretrained_model_name_or_path="/gone.safetensors"))
    hands.start()
    hands.press("Train")
    hands.until("gone.safetensors")
    hands.type(option(hands, "learning_rate"), "0.0001")
    hands.type(option(hands, MODEL), ground.model)
    hands.press("Train")
    hands.until("Started")


def load_and_print(hands: Hands, ground: Ground) -> None:
    load(hands, ground.config("printed"))
    hands.press("Print command")
    hands.page.locator(".message pre").locator("visible=true").first.wait_for()


def queue_ranks(hands: Hands, ground: Ground) -> None:
    load(hands, ground.config("ranks"))
    hands.start()
    hands.click("#lora-form .field:has([data-option=network_dim]) .several")
    hands.type(hands.page.get_by_label("Values of"), "8 16 32")
    hands.press("Add them to the queue")
    hands.until("3 trainings are in the queue")


def resume(hands: Hands, ground: Ground) -> None:
    load(hands, ground.config("stopped", save_state=True, max_train_steps=4000))
    hands.press("Train")
    hands.until("Started")
    hands.page.locator(".live .line", has_text="Step").first.wait_for()
    hands.start()
    hands.press("Stop after this step")
    stopped = hands.page.locator(".live .run").get_attribute("data-run")
    hands.click(".live [data-act=resume]")
    hands.page.locator(f'.live .run[data-state="running"]:not([data-run="{stopped}"])').wait_for()


def edit_caption(hands: Hands, ground: Ground) -> None:
    images = ground.images("captions")
    hands.tab("Data")
    hands.type(hands.page.locator("#images-folder"), images)
    hands.press("Open folder")
    captions = hands.page.locator(".images article textarea")
    captions.first.wait_for()
    hands.type(captions, MENDED, "Tab")
    await_text(images / "000.txt", MENDED)


def see_results(hands: Hands, ground: Ground) -> None:
    hands.tab("Runs")
    hands.hit(hands.page.get_by_role("link", name="finished", exact=True))
    hands.page.locator('[data-chart="loss"] canvas').wait_for()
    hands.page.locator(".gallery .shot").nth(2).wait_for()


Task = Callable[[Hands, Ground], None]
TASKS: dict[str, Task] = {
    "first": first_lora,
    "import": import_and_train,
    "preset": preset,
    "find": find_setting,
    "mend": mend,
    "print": load_and_print,
    "queue": queue_ranks,
    "resume": resume,
    "caption": edit_caption,
    "results": see_results,
}
