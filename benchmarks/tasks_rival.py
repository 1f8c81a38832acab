"""The daily tasks of benchmarks.tasks in the page of kohya_ss, and its server.

Its messages are in the log of its server when it runs without a desktop: where the page itself shows nothing, a task
is done as soon as the log has the line, as if somebody watched it.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tasks_hands import FIRST_CAPTION, MENDED, WAIT_SECONDS, Ground, Hands, await_text

TIMEOUT_MS = 90_000
START_SECONDS = 180.0
# Its Gradio asks for its own page at the start, and gives up after three seconds, which a busy machine may take.
BEGIN = """
import runpy, sys
from gradio import networking
networking.url_ok = lambda url: True
sys.argv[0], sys.path[0] = "kohya_gui.py", ""
runpy.run_path("kohya_gui.py", run_name="__main__")
"""
PAGE_READY = "document.querySelectorAll('[role=tab]').length > 3"
# Stands in for `accelerate launch`: it prints steps for a minute, and keeps a state if the config says so.
ACCELERATE = """
import pathlib, sys, time, tomllib
config = tomllib.loads(pathlib.Path(sys.argv[sys.argv.index("--config_file") + 1]).read_text(encoding="utf-8"))
print("training goes on from", config["resume"]) if config.get("resume") else print("training begins")
state = pathlib.Path(config["output_dir"]) / f"{config['output_name']}-000001-state"
for step in range(60):
    print("step", step, flush=True)
    if step == 1 and config.get("save_state"):
        state.mkdir(parents=True, exist_ok=True)
    time.sleep(1)
"""


@dataclass
class Rival:
    """A running server of kohya_ss."""

    address: str
    log_path: Path
    seen: int = 0  # characters of the log that were there when a task began

    def forget(self) -> None:
        self.seen = len(self.log())

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def until(self, *words: str) -> None:
        """Wait until the log has one of these."""
        limit = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < limit:
            # Its console breaks lines at 80 columns.
            told = " ".join(self.log()[self.seen :].split())
            if any(word in told for word in words):
                return
            time.sleep(0.02)
        raise TimeoutError(f"the log of kohya_ss had none of {words}: {self.log()[self.seen :][-2000:]}")


@contextmanager
def rival_server(checkout: Path, python: Path, folder: Path) -> Iterator[Rival]:
    """kohya_ss's own server, with a stand-in for accelerate."""
    tools = folder / "tools"
    tools.mkdir()
    (tools / "accelerate.py").write_text(ACCELERATE, encoding="utf-8")
    launcher = tools / "accelerate"
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tools / "accelerate.py"}" "$@"\n', encoding="utf-8")
    launcher.chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "GRADIO_ANALYTICS_ENABLED": "False",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    environment.pop("PYTHONPATH", None)
    address, log_path = f"http://127.0.0.1:{port}/", folder / "kohya_ss.log"
    options = ["--headless", "--noverify", "--listen", "127.0.0.1", "--server_port", str(port)]
    with log_path.open("wb") as log:
        server = subprocess.Popen(
            [str(python), "-c", BEGIN, *options], cwd=checkout, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        _await_start(server, log_path)
        yield Rival(address, log_path)
    finally:
        server.terminate()
        server.wait(30)


def _await_start(server: subprocess.Popen[bytes], log_path: Path) -> None:
    limit = time.monotonic() + START_SECONDS
    while time.monotonic() < limit and server.poll() is None:
        if "Running on local URL" in log_path.read_text(encoding="utf-8", errors="replace"):
            return
        time.sleep(0.2)
    raise RuntimeError(f"kohya_ss did not start: {log_path.read_text(errors='replace')[-2000:]}")


# ---- parts of several tasks


def labelled(hands: Hands, label: str) -> Any:
    """Fields by their label; a few have their explanation in the label too."""
    return hands.page.get_by_label(label)


def open_section(hands: Hands, name: str) -> None:
    hands.hit(hands.page.locator("button.label-wrap", has_text=name))


def settled(hands: Hands) -> None:
    """Wait until the page does nothing any more: what is clicked earlier takes values that are about to change."""
    hands.page.evaluate("""() => new Promise((done) => {
      let last = performance.now();
      const ticks = ({ target }) => (target instanceof Element ? target : target.parentElement)?.closest(".toast-wrap");
      const watch = new MutationObserver((all) => { if (!all.every(ticks)) last = performance.now(); });
      watch.observe(document, { childList: true, subtree: true, attributes: true });
      const began = last;  // a value out of its range keeps it busy for ever
      const isOver = () => performance.now() - last > 500 || performance.now() - began > 8000;
      const wait = () => isOver() ? done(watch.disconnect()) : setTimeout(wait, 50);
      wait();
    })""")
    hands.began += 0.5  # for the last half second nothing happened


def load_in_rival(hands: Hands, path: Path) -> None:
    hands.tab("LoRA")
    open_section(hands, "Configuration")
    hands.type(labelled(hands, "Load/Save Config file"), path, "Enter")
    hands.hit(hands.page.get_by_role("button", name="↩️"))
    name = path.stem
    hands.page.wait_for_function(
        "name => [...document.querySelectorAll('input, textarea')].some((e) => e.value === name)", arg=name
    )
    settled(hands)


def stop_rival(browser: Any, rival: Rival) -> None:
    """Stop what trains, so that the next task can start a training."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(rival.address)
    page.wait_for_function(PAGE_READY)
    hands = Hands(page)
    rival.forget()
    hands.tab("LoRA")
    hands.press("Stop training")
    rival.until("has been terminated", "There is no running process")
    context.close()


# ---- the tasks: each is done on a page that was just opened


def rival_first_lora(hands: Hands, ground: Ground, rival: Rival) -> None:
    images = ground.images("k-first")
    hands.tab("LoRA")
    hands.type(labelled(hands, "Pretrained model name or path"), ground.model, "Enter")
    hands.hit(hands.page.get_by_label("SDXL", exact=True))
    open_section(hands, "Dataset Preparation")  # its trainer wants folders whose names have the repeats
    hands.type(labelled(hands, "Instance prompt"), "zorb")
    hands.type(labelled(hands, "Class prompt"), "toy")
    hands.type(labelled(hands, "Training images (directory"), images, "Enter")
    hands.type(labelled(hands, "Destination training directory"), ground.folder / "k-first-set", "Enter")
    hands.press("Prepare training data")
    hands.page.wait_for_function(
        "[...document.querySelectorAll('textarea')].some((e) => /Done|prepared|success/i.test(e.value))"
    )
    hands.press("Copy info to respective fields")
    open_section(hands, "Parameters")  # until it was opened once, a start fails
    settled(hands)
    hands.press("Start training")
    rival.until("training begins")


def rival_import_config(hands: Hands, ground: Ground, rival: Rival) -> None:
    load_in_rival(hands, ground.config("k-theirs"))
    hands.press("Start training")
    rival.until("training begins")


def rival_preset(hands: Hands, ground: Ground, rival: Rival) -> None:
    hands.tab("LoRA")
    open_section(hands, "Parameters")
    box = labelled(hands, "Presets")
    hands.type(box, "SDXL - LoRA adafactor v1.0", "Enter")
    hands.page.wait_for_function(
        "[...document.querySelectorAll('input')].some((e) => e.checkVisibility() && e.value === 'Adafactor')"
    )
    settled(hands)


def rival_find_setting(hands: Hands, ground: Ground, rival: Rival) -> None:
    hands.tab("LoRA")
    open_section(hands, "Parameters")
    open_section(hands, "Advanced")
    labelled(hands, "Noise offset").locator("visible=true").first.wait_for()


def rival_mend(hands: Hands, ground: Ground, rival: Rival) -> None:
    images = ground.images("k-mended/10_zorb toy").parent
    path = ground.config("k-wrong", images, learning_rate=2, pretrained_model_name_or_path="/gone.safetensors")
    load_in_rival(hands, path)
    hands.start()
    hands.press("Start training")
    hands.page.get_by_text("greater than maximum value").first.wait_for()  # it does not say of what
    open_section(hands, "Parameters")
    hands.type(hands.page.get_by_label("Learning rate", exact=True), "0.0001", "Tab")
    settled(hands)
    hands.press("Start training")
    rival.until("/gone.safetensors")
    hands.type(labelled(hands, "Pretrained model name or path"), ground.model, "Enter")
    settled(hands)
    hands.press("Start training")
    rival.until("training begins")


def rival_print_command(hands: Hands, ground: Ground, rival: Rival) -> None:
    load_in_rival(hands, ground.config("k-printed"))
    hands.press("Print training command")
    rival.until("--config_file")


def rival_resume(hands: Hands, ground: Ground, rival: Rival) -> None:
    load_in_rival(hands, ground.config("k-stopped", save_state=True))
    hands.press("Start training")
    rival.until("step 2")
    hands.start()
    hands.press("Stop training")
    rival.until("has been terminated")
    open_section(hands, "Parameters")
    open_section(hands, "Advanced")
    state = ground.folder / "k-stopped-out" / "k-stopped-000001-state"
    hands.type(labelled(hands, "Resume from saved training state"), state, "Enter")
    settled(hands)
    hands.press("Start training")
    rival.until("training goes on from")


def rival_edit_caption(hands: Hands, ground: Ground, rival: Rival) -> None:
    images = ground.images("k-captions")
    hands.tab("Utilities")
    hands.tab("Manual Captioning")
    hands.type(labelled(hands, "Image folder to caption"), images, "Enter")
    hands.press("Load Images")
    captions = hands.page.get_by_label("Captions")
    captions.locator("visible=true").first.wait_for()
    hands.page.wait_for_function(
        "words => [...document.querySelectorAll('textarea')].some((e) => e.value.startsWith(words))", arg=FIRST_CAPTION
    )
    hands.write(captions, MENDED)
    await_text(images / "000.txt", MENDED)


Task = Callable[[Hands, Ground, Rival], None]
# What its page cannot do is a sentence: what one does instead.
TASKS: dict[str, Task | str] = {
    "first": rival_first_lora,
    "import": rival_import_config,
    "preset": rival_preset,
    "find": rival_find_setting,
    "mend": rival_mend,
    "print": rival_print_command,
    "queue": "no queue and no second training during one: the user waits for each end and starts the next by hand",
    "resume": rival_resume,
    "caption": rival_edit_caption,
    "results": "the page shows neither samples, loss nor the best file: the user opens the output folder, "
    "and TensorBoard for the loss if the config set a log folder",
}
# What is left out where a task can be done.
REMARKS = {
    "first": "copies the images into new folders with the repeats in their names, and does not check them",
    "preset": "applies the preset's values without showing which changed; no preset is made for an amount of memory",
    "find": "no search: the user opens sections until the words appear; here the first try was right",
    "mend": "the first message names no field; the second appears only in the server's log",
    "print": "the command appears only in the server's log",
    "import": "does not check the files that the config names",
    "resume": "possible if the config saved states; Stop kills the training, so it resumes from the last saved state",
}
